"""The comparison of schedules: what is compared differs in nothing else, and curves and times are what they say."""

import math

import pytest

from impala_llm.config import load
from tools import schedule_study as study


@pytest.mark.parametrize("task", study.TASKS)
def test_arms_differ_in_staleness_alone(task: str) -> None:
    of_seed = [run for run in study.planned([task]) if run.seed == 1]
    assert {run.staleness for run in of_seed} == set(study.TASKS[task].staleness) and 0 in study.TASKS[task].staleness
    for speed in study.TASKS[task].speeds:
        without = {
            tuple(word for word in run.words() if "max_staleness" not in word) for run in of_seed if run.speed == speed
        }
        assert len(without) == 1


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
    points = [(10.0, 1, 0.25, 0.0), (20.0, 2, 0.75, 0.0), (30.0, 3, 0.5, 0.0)]
    assert study.seconds_to(level, points) == seconds


def test_idle_time_is_weighted_by_the_length_of_steps_without_the_first() -> None:
    steps = [{"time/step_s": s, "time/idle_share": share} for s, share in ((100.0, 1.0), (1.0, 1.0), (3.0, 0.0))]
    assert study.idle_share(steps) == 0.25


def test_a_gain_is_paired_with_the_synchronous_run_of_the_same_seed() -> None:
    def result(staleness: int, seed: int, score: float) -> dict[str, object]:
        settings = {"task": "corridor", "speed": "slow", "staleness": staleness, "seed": seed}
        points = [(10.0, 1, 0.0, 0.0), (30.0 - 5 * staleness, 2, 1.0, 0.0)]
        rest = {"updates": 10, "learner_idle": 0.5, "success": 0.0, "curve": points}
        return {"settings": settings, "score": score, **rest}

    results = [result(0, 0, 0.25), result(0, 1, 0.5), result(1, 0, 0.75), result(1, 1, 1.0), result(1, 2, 0.0)]
    assert "+0.500 [+0.500, +0.500]" in study.table(results)
    assert "| 30 s | 25 s | 1.2 (1.2 to 1.2) |" in study.speed_table(results)
