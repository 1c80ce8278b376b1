"""The comparison of schedules: what is compared differs in nothing else, and curves and times are what they say."""

import math
import re
from dataclasses import asdict

import numpy as np
import pytest

from impala_llm.config import load
from tools import schedule_study as study


@pytest.mark.parametrize("task", study.TASKS)
def test_arms_differ_in_staleness_and_unrolls_alone(task: str) -> None:
    plan = study.TASKS[task]
    of_seed = [run for run in study.planned([task]) if run.seed == 1]
    assert {run.staleness for run in of_seed} == set(plan.staleness)
    assert 0 in plan.staleness or None in plan.unroll_turns, "there is something to compare with"
    own = re.compile("max_staleness|unroll_turns|batch_size")
    for speed in plan.speeds:
        assert len({tuple(w for w in run.words() if not own.search(w)) for run in of_seed if run.speed == speed}) == 1


def test_an_update_learns_from_as_many_turns_of_unrolls() -> None:
    runs = {run.unroll_turns: load(run.words()) for run in study.planned(["unrolls"], 1) if run.staleness == 1}
    assert {turns: config.actor.unroll_turns for turns, config in runs.items()} == {None: None, 2: 2}
    assert runs[2].learner.batch_size * 2 == runs[None].learner.batch_size * 6
    assert runs[2].env.args.args == {"num_turns": 6}  # type: ignore[union-attr]


def test_a_slow_shop_has_the_settings_of_the_quickstart() -> None:
    [run] = [run for run in study.planned(["shop"]) if run.seed == 0 and run.staleness == 4]
    config, shipped = load(run.words()), load(["experiment=quickstart"])
    assert config.env.args.args == vars(shipped.env.webshop)  # type: ignore[union-attr]
    assert (config.algorithm.max_staleness, config.learner.max_minutes) == (4, study.TASKS["shop"].minutes)
    assert config.learner.learning_rate == shipped.learner.learning_rate


def test_a_curve_has_means_of_equal_stretches_of_time() -> None:
    steps = [
        {"step": 1, "progress/seconds": 1.0, "rollout/score": 0.25, "rollout/success_rate": 0.0},
        {"step": 2, "progress/seconds": 3.0, "rollout/score": 0.75, "rollout/success_rate": 0.5},
        {"step": 3, "progress/seconds": 4.0},
        {"step": 4, "progress/seconds": 104.0, "rollout/score": 1.0, "rollout/success_rate": 1.0},
    ]
    assert study.curve(steps, 100.0) == [(2.0, 2, 0.5, 0.25), (104.0, 4, 1.0, 1.0)]


@pytest.mark.parametrize(("level", "seconds"), [(0.1, 10.0), (0.5, 15.0), (0.75, 20.0), (0.9, math.inf)])
def test_the_time_to_a_score_lies_between_two_points(level: float, seconds: float) -> None:
    assert study.seconds_to(level, [(10.0, 0.25), (20.0, 0.75), (30.0, 0.5)]) == seconds


def test_curves_are_smoothed_by_running_means() -> None:
    points = [(10.0, 1, 0.0, 0.0), (20.0, 2, 0.3, 0.0), (30.0, 3, 0.6, 0.0), (40.0, 4, 0.9, 0.0)]
    assert study.smooth(points) == [pytest.approx((20.0, 0.3)), pytest.approx((30.0, 0.6))]
    assert study.smooth(points[:2]) == [pytest.approx((15.0, 0.15))], "fewer points than a mean has"


def test_arms_that_are_as_fast_take_as_long_whatever_the_noise_of_their_points() -> None:
    """The score that counts is no highest point: of two equal arms neither is slower, nor never there."""
    generator = np.random.default_rng(5)
    seconds = np.linspace(5, 119, 20)
    results = []
    for seed in range(40):
        for staleness in (0, 1):
            scores = 0.9 * (1 - np.exp(-seconds / 20)) + generator.normal(0, 0.02, 20)
            points = [(at, 1, score, 0.0) for at, score in zip(seconds.tolist(), scores.tolist(), strict=True)]
            results.append(result(staleness, seed, 0.9) | {"curve": points})
    [row] = [line for line in study.speed_table(results).splitlines() if "η = 1" in line]
    assert re.search(r"\| (0\.9|1\.0|1\.1) \(", row) and "| 0 of 40 |" in row


def test_a_finished_run_whose_settings_have_changed_is_not_taken_for_todays() -> None:
    [run, *_] = study.planned(["corridor"])
    kept = {"settings": asdict(run) | {"overrides": run.words()}, "minutes": study.TASKS["corridor"].minutes}
    assert study.run_of(kept) == run
    assert study.run_of(kept | {"minutes": 1}) is None
    assert study.run_of({**kept, "settings": kept["settings"] | {"overrides": ["experiment=toy"]}}) is None


def test_idle_time_is_weighted_by_the_length_of_steps_without_the_first() -> None:
    steps = [{"time/step_s": s, "time/idle_share": share} for s, share in ((100.0, 1.0), (1.0, 1.0), (3.0, 0.0))]
    assert study.idle_share(steps) == 0.25


def result(staleness: int, seed: int, score: float, unroll_turns: int | None = None) -> dict[str, object]:
    of_run = {"task": "corridor", "speed": "slow", "staleness": staleness, "unroll_turns": unroll_turns, "seed": seed}
    # In a straight line to 1, which is reached the sooner the staler.
    points = [(place * (30.0 - 5 * staleness - (unroll_turns or 0)), 1, place, 0.0) for place in (0.0, 0.5, 1.0, 1.5)]
    return {
        "settings": of_run, "score": score, "updates": 10, "learner_idle": 0.5, "success": 0.0, "curve": points
    }  # fmt: skip


def test_a_gain_is_paired_with_the_synchronous_run_of_the_same_seed() -> None:
    results = [result(0, 0, 0.25), result(0, 1, 0.5), result(1, 0, 0.75), result(1, 1, 1.0), result(1, 2, 0.0)]
    assert "+0.500 [+0.500, +0.500]" in study.table(results)
    row = next(line for line in study.speed_table(results).splitlines() if "| η = 1 |" in line)
    assert row.endswith("| 1.2 (1.2 to 1.2) | 0 of 2 |")


def test_unrolls_are_compared_with_whole_episodes_of_the_same_staleness() -> None:
    results = [result(0, 0, 0.0), result(1, 0, 0.25), result(1, 0, 0.75, unroll_turns=5)]
    of_unrolls = [line for line in study.table(results).splitlines() if "unrolls of 5 turns" in line]
    assert len(of_unrolls) == 1 and "+0.500" in of_unrolls[0]
    row = next(line for line in study.speed_table(results).splitlines() if "unrolls of 5 turns" in line)
    assert row.endswith("| 1.2 (1.2 to 1.2) | 0 of 1 |"), "25 s of whole episodes, 20 of unrolls"
