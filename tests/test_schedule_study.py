"""The comparison of schedules: what is compared differs in nothing else, and curves and times are what they say."""

import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from impala_llm.commands.model_files import starting_policy_problems
from impala_llm.config import load
from tools import schedule_study as study

pytestmark = pytest.mark.system


@pytest.mark.parametrize("task", study.TASKS)
def test_arms_differ_in_nothing_but_their_own_settings(task: str) -> None:
    plan = study.TASKS[task]
    of_seed = [run for run in study.planned([task]) if run.seed == 1]
    assert {run.arm for run in of_seed} == set(plan.arms)
    for speed in plan.speeds:
        of_speed = [run for run in of_seed if run.speed == speed]
        shared = {tuple(word for word in run.words() if word not in plan.arms[run.arm].words) for run in of_speed}
        assert len(shared) == 1
    assert any(arm.against for arm in plan.arms.values()), "there is something to compare with"
    assert {other for arm in plan.arms.values() for other in arm.against} <= {*plan.arms}


def test_every_run_has_settings_that_load_and_a_file_of_its_own() -> None:
    runs = study.planned(list(study.TASKS))
    assert len({run.name for run in runs}) == len(runs)
    for run in study.planned(list(study.TASKS), 1):
        load(run.words())


@pytest.mark.parametrize("task", ["corridor", "shop"])
def test_five_steps_of_a_synchronous_run_are_as_large_as_one(task: str) -> None:
    """And it has as many episodes at once as the asynchronous run, whose tickets allow five batches."""
    runs = {run.arm: load(run.words()) for run in study.planned([task], 1)}
    one, five = runs["synchronous"], runs["synchronous, 5 steps"]
    assert {run.learner.warmup_updates for run in runs.values()} == {0}, "which counts updates, and not steps"
    assert five.learner.batch_size / five.learner.minibatches == one.learner.batch_size / one.learner.minibatches
    assert five.learner.batch_size == (1 + runs["η = 4"].algorithm.max_staleness) * one.learner.batch_size


def test_an_update_learns_from_as_many_turns_of_unrolls() -> None:
    runs = {run.arm: load(run.words()) for run in study.planned(["unrolls"], 1)}
    whole, unrolls = runs["η = 1"], runs["η = 1, unrolls"]
    assert (whole.actor.unroll_turns, unrolls.actor.unroll_turns) == (None, 2)
    assert unrolls.learner.batch_size * 2 == whole.learner.batch_size * 6
    assert unrolls.env.args.args == {"num_turns": 6}  # type: ignore[union-attr]


def test_a_slow_shop_has_the_settings_of_the_quickstart() -> None:
    [run] = [run for run in study.planned(["shop"]) if run.seed == 0 and run.arm == "η = 4"]
    config, shipped = load(run.words()), load(["experiment=quickstart"])
    assert config.env.args.args == vars(shipped.env.webshop)  # type: ignore[union-attr]
    assert (config.algorithm.max_staleness, config.learner.max_minutes) == (4, study.TASKS["shop"].minutes)
    assert config.learner.learning_rate == shipped.learner.learning_rate


@pytest.mark.parametrize("task", study.TASKS)
def test_no_run_begins_with_a_policy_that_its_environment_refuses(task: str) -> None:
    """A shop that waits is not the shop by its name, for which alone `tiny_shopper` stands."""
    assert {tuple(starting_policy_problems(load(run.words()))) for run in study.planned([task], 1)} == {()}


def test_versions_are_trained_as_the_lab_trains_on_the_shop() -> None:
    words = study.TASKS["versions"].words
    assert {*words} - {"algorithm=topr_gae", "model.path=impala_llm/assets/tiny_shopper"} <= {*study.shop.COMMON}
    assert len({word for word in words if word.startswith("learner.")}) == 4


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


def run_with(points: list[tuple[float, float]]) -> dict[str, object]:
    """A run of 1,200 s, whose stretches are of 60 s, with these (seconds, score); updates take no time."""
    curve = [(seconds, 1, score, 0.0) for seconds, score in points]
    return {"minutes": 20, "updates": math.inf, "staleness": 0.0, "curve": curve}


def test_a_point_is_of_a_policy_that_was_published_before() -> None:
    """A policy two versions before the newest, which is one update before the end of the step: three updates
    of 120 s."""
    run = run_with([(130.0, 0.1), (600.0, 0.2)]) | {"updates": 10, "staleness": 2.0}
    assert study.by_policy(run, study.SCORE) == [(0.0, 0.1), (240.0, 0.2)]


def test_running_means_are_of_three_stretches_of_time_however_many_points_there_are() -> None:
    every = [(60.0 * index + 30, index / 10) for index in range(20)]
    means = study.running_means(run_with(every), study.SCORE)
    assert means[:2] == [pytest.approx((180.0, 0.1)), pytest.approx((240.0, 0.2))] and len(means) == 18
    few = study.running_means(run_with([every[0], every[3], every[19]]), study.SCORE)
    assert few == [
        *((180.0, 0.0), (240.0, pytest.approx(0.3)), (300.0, pytest.approx(0.3)), (360.0, pytest.approx(0.3))),
        (1200.0, pytest.approx(1.9)),
    ]


def test_where_a_run_ends_is_the_mean_of_its_last_quarter_of_time() -> None:
    assert study.end_of(run_with([(100, 0.0), (899, 0.1), (901, 0.2), (1190, 0.4)]), study.SCORE) == pytest.approx(0.3)
    assert study.end_of(run_with([(100, 0.0), (899, 0.1)]), study.SCORE) == 0.1, "no update ended in it"


@pytest.mark.parametrize(("points", "noise"), [((20, 20), (0.02, 0.02)), ((9, 20), (0.02, 0.04))])
def test_arms_that_are_as_fast_take_as_long(points: tuple[int, int], noise: tuple[float, float]) -> None:
    """Whatever the number and the noise of their points, and how long an update takes behind which they are written: of
    two equal arms neither is slower, nor never there."""
    generator = np.random.default_rng(5)
    results = []
    for seed in range(60):
        for arm, num_points, spread in zip(("synchronous", "η = 4"), points, noise, strict=True):
            seconds = (np.arange(num_points) + 0.5) * 480 / num_points
            published = np.maximum(seconds - 480 / num_points, 0)
            scores = 0.65 + 0.2 * (1 - np.exp(-published / 200)) + generator.normal(0, spread, num_points)
            curve = [(at, 1, score, 0.0) for at, score in zip(seconds.tolist(), scores.tolist(), strict=True)]
            of_arm = {"curve": curve, "minutes": 8, "updates": num_points, "staleness": 0.0}
            results.append(result(arm, seed, 0.9) | of_arm)
    [row] = [line for line in study.speed_table(results).splitlines() if "η = 4" in line]
    found = re.search(r"\| (\d\.\d\d) \(", row)
    assert found and 0.85 <= float(found[1]) <= 1.15, row
    assert int(row.split("|")[-2]) <= 1


def test_an_arm_that_learns_nothing_sets_no_level() -> None:
    results = [result("synchronous", 0, 0.5), result("η = 4", 0, 0.5)]
    results[0]["curve"] = [(at, 1, 0.04 * score, 0.0) for at, _, score, _ in line_to_1(60.0)]
    [row] = study.speed_table(results).splitlines()[2:]
    assert row.endswith("| synchronous | 0 of 1 |  |  |  |  |  |")


def test_a_finished_run_whose_settings_have_changed_is_not_taken_for_todays() -> None:
    [run, *_] = study.planned(["corridor"])
    kept = {"settings": asdict(run) | {"overrides": run.words()}, "minutes": study.TASKS["corridor"].minutes}
    assert study.run_of(kept) == run
    assert study.run_of(kept | {"minutes": 1}) is None
    for changed in ({"overrides": ["experiment=toy"]}, {"arm": "η = 1"}, {"speed": "none"}, {"task": "none"}):
        assert study.run_of({**kept, "settings": kept["settings"] | changed}) is None


def test_the_committed_runs_are_of_todays_plan() -> None:
    """A setting that the shop has got since had its default in them: they are reported, and not refused."""
    results = [json.loads(line) for line in (study.DATA / "runs.jsonl").read_text().splitlines()]
    assert [result["settings"] for result in results if study.run_of(result) is None] == []


def test_the_report_is_made_from_the_committed_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (study.DATA / "runs.jsonl").read_bytes()
    (tmp_path / "runs.jsonl").write_bytes(data)
    monkeypatch.setattr(sys, "argv", ["study", "--report", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")])
    assert study.main() == 0
    assert (tmp_path / "runs.jsonl").read_bytes() == data
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in study.DATA.glob("*.svg")}


def test_a_shop_with_another_setting_is_another_run() -> None:
    [run, *_] = study.planned(["shop"])
    kept = {"settings": asdict(run) | {"overrides": run.words()}, "minutes": study.TASKS["shop"].minutes}
    [shop] = [word for word in run.words() if word.startswith("env.args.args=")]
    for changed, same in (
        (shop.replace('"script_speaks_of_prices": false, ', ""), True),  # as it was before there was such a setting
        (shop.replace('"max_steps": 30', '"max_steps": 15'), False),
        (shop.replace('"max_steps": 30', '"steps": 30'), False),
    ):
        assert changed != shop
        overrides = [changed if word == shop else word for word in run.words()]
        assert (study.run_of({**kept, "settings": kept["settings"] | {"overrides": overrides}}) == run) is same


def test_runs_of_other_settings_are_not_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "runs.jsonl"
    strange = result("η = 1", 0, 0.5) | {"minutes": 2}
    data.write_text(before := json.dumps(strange) + "\n")
    monkeypatch.setattr(sys, "argv", ["study", "--report", "--out", str(tmp_path), "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match=r"1 runs in .*runs.jsonl .* have other settings"):
        study.main()
    assert data.read_text() == before


def test_idle_time_is_weighted_by_the_length_of_steps_without_the_first() -> None:
    steps = [{"time/step_s": s, "time/idle_share": share} for s, share in ((100.0, 1.0), (1.0, 1.0), (3.0, 0.0))]
    assert study.idle_share(steps) == 0.25
    actors = [step | {"actor/idle_share": 1.0 - step["time/idle_share"]} for step in steps]
    assert study.idle_share([*actors, {"time/step_s": 9.0}], "actor/idle_share") == 0.75


def line_to_1(seconds: float) -> list[tuple[float, int, float, float]]:
    """A curve of 2 minutes, its score on a straight line from 0 to 1 after so many seconds; success stays 0."""
    return [(at, 1, min(1.0, at / seconds), 0.0) for at in (6.0 * index + 3 for index in range(20))]


def result(arm: str, seed: int, score: float, task: str = "corridor", seconds: float = 60.0) -> dict[str, object]:
    of_run = {"task": task, "speed": "long-tailed", "arm": arm, "seed": seed}
    return {
        "settings": of_run, "score": score, "minutes": 2, "updates": 10**9, "learner_idle": 0.5, "staleness": 1.5,
        "success": 0.0, "curve": line_to_1(seconds),
    }  # fmt: skip


def test_a_gain_is_paired_with_the_synchronous_run_of_the_same_seed() -> None:
    results = [result("synchronous", seed, 0.25 * (seed + 1)) for seed in (0, 1)]
    results += [result("η = 4", seed, 0.75 + 0.5 * seed, seconds=40.0) for seed in (0, 1)] + [result("η = 4", 2, 0.0)]
    # Differences of 0.5 and 0.75: Student's half width is 12.706 · 0.125.
    assert "| η = 4 | synchronous | 2 | +0.625 [-0.963, +2.213] |" in study.gain_table(results)
    row = next(line for line in study.speed_table(results).splitlines() if "| η = 4 |" in line)
    # The level is 0.05 + 0.8 · 0.95; means of 18 s lag by 9, so they are there after 9 + 0.81 · 60 and 9 + 0.81 · 40 s.
    assert row.endswith("| 2 of 2 | 0.810 (0.810 to 0.810) | 58 s | 41 s | 1.39 (1.39 to 1.39) | 0 |")


def test_an_arm_is_compared_with_each_that_it_names() -> None:
    results = [result(arm, seed, 0.5) for arm in ("synchronous", "synchronous, 5 steps", "η = 4") for seed in (0, 1)]
    rows = study.gain_table(results).splitlines()[2:]
    assert [row.split(" | ")[2:4] for row in rows] == [
        ["synchronous, 5 steps", "synchronous"],
        ["η = 4", "synchronous"],
        ["η = 4", "synchronous, 5 steps"],
    ]


def test_the_time_to_a_success_rate_is_that_of_its_own_column() -> None:
    results = [result("synchronous", 0, 0.5), result("η = 4", 0, 0.5)]
    for run, seconds in zip(results, (60.0, 30.0), strict=True):
        run["curve"] = [(at, 1, 0.5, score) for at, _, score, _ in line_to_1(seconds)]
    [row] = study.speed_table(results, study.SUCCESS).splitlines()[2:]
    assert "| 1.70 (1.70 to 1.70) |" in row


def test_unrolls_are_compared_with_whole_episodes_of_the_same_staleness() -> None:
    results = [result("η = 4", 0, 0.0, "unrolls"), result("η = 1", 0, 0.25, "unrolls")]
    results.append(result("η = 1, unrolls", 0, 0.75, "unrolls", seconds=30.0))
    [row] = study.gain_table(results).splitlines()[2:]
    assert "| η = 1, unrolls | η = 1 | 1 | +0.500 |" in row
    [row] = study.speed_table(results).splitlines()[2:]
    assert row.endswith("| 1.70 (1.70 to 1.70) | 0 |"), "60 s of whole episodes, 30 of unrolls"
