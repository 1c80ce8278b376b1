"""The study: lags are exact, runs repeat to the bit and resume, and what is reported is what was measured."""

import importlib.util
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from impala_llm.config import load
from impala_llm.envs import make_suite
from impala_llm.trajectory import Trajectory
from tools import _study_grid as grid
from tools import _study_lab as lab
from tools import _study_report as reporting
from tools import _study_trace as trace

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study", ROOT / "tools" / "study.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(lag: int, num_updates: int = 5, *overrides: str) -> lab.RunSettings:
    [first, *_] = (run for run in grid.part_a([0]) if run.lag == lag and run.method == "V-trace turn")
    run = replace(grid.quick(first), warm_updates=0, num_updates=num_updates, evaluate_every=num_updates)
    return replace(run, overrides=(*run.overrides, *overrides))


class WatchedTrainer(lab.Trainer):
    """Remembers what each update was given."""

    batches: list[tuple[int, tuple[Trajectory, ...]]] = []

    def update(self, batch, version, progress, **arrivals):  # type: ignore[no-untyped-def]
        self.batches.append((version, batch.trajectories))
        return super().update(batch, version, progress, **arrivals)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[Trajectory, ...]]]:
    monkeypatch.setattr(lab, "Trainer", WatchedTrainer)
    monkeypatch.setattr(WatchedTrainer, "batches", [])
    return WatchedTrainer.batches


@pytest.mark.parametrize("lag", [0, 4])
def test_every_token_is_exactly_as_old_as_the_lag_says(lag: int, batches: list) -> None:
    result = lab.run(small(lag, 7))
    assert [version for version, _ in batches] == list(range(7))
    for version, trajectories in batches:
        ages = {version - int(v) for t in trajectories for v in t.versions[t.action_mask]}
        assert ages == {min(version, lag)}
    assert result["episodes"] == 7 * 8


def test_two_lags_and_methods_play_the_same_tasks_and_runs_repeat_to_the_bit(batches: list) -> None:
    first = lab.run(small(4))
    again = lab.run(small(4))
    assert first["curve"] == again["curve"]
    lab.run(small(0, 5, "algorithm.credit=gae", "algorithm.loss=reinforce"))
    tasks = [[t.task_id for t in trajectories] for _, trajectories in batches]
    assert tasks[:5] == tasks[5:10] == tasks[10:]


def test_every_second_kind_of_task_is_rare_and_scored_by_itself() -> None:
    suite = make_suite(load(["experiment=quickstart", "env.webshop.num_products=60"]).env)
    kinds = sorted({suite.signature(task) for task in suite.tasks("train")})
    tasks = suite.tasks("test")
    rare = lab.rarity(suite, tasks)
    assert {kinds.index(suite.signature(task)) % 2 for task, is_rare in zip(tasks, rare, strict=True) if is_rare} == {1}
    assert 0 < rare.mean() < 1
    stream = lab.TaskStream(suite, 1, 1e-9, seed=0)
    assert not lab.rarity(suite, [stream.next()[0] for _ in range(50)]).any()


def test_what_is_rare_is_scored_by_itself_and_the_clock_has_every_evaluation() -> None:
    result = lab.run(replace(small(0), rare_share=0.5))
    assert all({"sampled", "sampled_rare", "greedy_rare"} <= set(point) for point in result["curve"])
    assert [update for update, *_ in result["clock"]] == [point["update"] for point in result["curve"]]
    for before, after in itertools.pairwise(result["clock"]):
        assert after[1] > before[1] and after[2] > before[2], "playing and learning take time"


@pytest.mark.parametrize("interval, ages", [("3", [0, 1, 2, 0, 1, 2, 0]), ("null", [0, 1, 2, 3, 4, 5, 6])])
def test_weights_that_are_published_seldom_make_data_older_and_the_newest_are_scored(
    interval: str, ages: list[int], batches: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []

    class WatchedPlayer(lab.Player):
        async def score(self, name: str) -> dict[str, float]:
            scored.append(self.scored_engine.version)
            return await super().score(name)

    monkeypatch.setattr(lab, "Player", WatchedPlayer)
    lab.run(replace(small(0, 7, f"learner.sync_interval={interval}"), evaluate_every=1))
    of_updates = [{v - int(u) for t in found for u in t.versions[t.action_mask]} for v, found in batches]
    assert of_updates == [{age} for age in ages]
    assert scored == [version for version in range(8) for _ in ("greedy", "sampled")]


def test_replay_draws_each_episode_as_often_as_its_ratio_says_at_the_same_lag(batches: list) -> None:
    result = lab.run(small(4, 9, "replay.samples_per_insert=4", "replay.max_replays=16"))
    assert result["episodes"] == 8 + 8 * 8 // 4 == lab.num_due(8, 8, 4.0)
    for version, trajectories in batches:
        assert all(version - t.oldest_version >= min(version, 4) for t in trajectories)


def test_training_plays_in_training_mode_and_what_is_scored_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    class WatchedSuite(lab.CorridorSuite):
        def session(self, training: bool):  # type: ignore[no-untyped-def]
            modes.append(training)
            return super().session(training)

    monkeypatch.setattr(lab, "CorridorSuite", WatchedSuite)
    settings = small(0, 1)
    lab.run(settings)
    evaluation = [False] * 2 * settings.evaluation_tasks  # greedy and sampled
    assert modes == [*evaluation, *[True] * 8, *evaluation]


def test_every_run_of_the_study_has_settings_that_the_learner_accepts() -> None:
    plan = [*grid.part_a([0]), *grid.part_c([0]), *grid.part_d([0]), *grid.part_e([0])]
    starts = [start for run in plan if (start := grid.start_of(run))]
    assert len(starts) == len(plan)
    for overrides in {run.overrides for run in [*plan, *starts]}:
        load(overrides)


def test_methods_differ_in_what_they_name_alone() -> None:
    for runs in (grid.part_a([0, 1]), grid.part_c([0, 1])):
        of_task = [run for run in runs if run.method != "used once"]
        for run in of_task:
            twin = next(r for r in of_task if (r.task, r.seed) == (run.task, run.seed))
            assert replace(run, method="", lag=0, overrides=()) == replace(twin, method="", lag=0, overrides=())


def test_a_second_call_runs_only_what_is_missing(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small(0, 1)
    path = study.run_path(tmp_path, settings)
    study.run_one(settings, path)
    assert json.loads(path.read_text())["settings"]["lag"] == 0
    assert study.run_missing([settings], tmp_path, 1) == []
    assert "0 of 1 runs to do" in capsys.readouterr().out
    assert study.run_path(tmp_path, replace(settings, seed=1)) != path
    [result] = study.finished([settings, small(4)], tmp_path)
    assert result["action_tokens"] > 0


def test_the_tool_reports_what_has_finished_and_says_what_has_not(study: ModuleType, tmp_path: Path) -> None:
    plan = [replace(small(0, 2), seed=seed) for seed in (0, 1)]
    for settings in plan:
        study.run_one(settings, study.run_path(tmp_path, settings))
    table = study.report("a", plan, [0, 1], tmp_path, tmp_path / "out")
    assert "V-trace turn" in table and table.count("\n") == 2
    lines = (tmp_path / "out" / "lag.jsonl").read_text().splitlines()
    assert [json.loads(line)["settings"]["seed"] for line in lines] == [0, 1]
    assert (tmp_path / "out" / "lag.svg").read_text().startswith("<?xml")
    assert "no run has finished" in study.report("c", grid.part_c([0]), [0], tmp_path, tmp_path / "out")


def test_a_phase_that_cannot_be_planned_leaves_the_reports_of_the_others(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dpo` rests on `dpo-rates`, of which there is no run here."""
    reported: list[str] = []
    monkeypatch.setattr(study, "report", lambda part, *_: reported.append(part) or "")
    monkeypatch.setattr(study, "restore", lambda *_: None)
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["study.py", "--report", "--part", "dpo", "--part", "precision", *folders])
    assert study.main() == 1
    assert reported == ["precision"] and "part dpo cannot be planned" in capsys.readouterr().err


@pytest.mark.parametrize("settings", trace.all_settings(), ids=str)
def test_measured_half_lives_agree_with_the_formula(settings: trace.TraceSettings) -> None:
    """The formula's expectation is checked against draws here, the line's fit against an exact exponential below."""
    log_ratios = trace.draw_noise(settings, (64, 2048), seed=1)
    noise = log_ratios.numpy()
    kept = np.where(np.abs(noise) < settings.dead_band, 0.0, noise)
    turns = kept.reshape(64, -1, trace.TURN_TOKENS)
    steps = {"token": kept, "geometric": turns.mean(2), "product": turns.sum(2)}[settings.granularity]
    a_token = np.minimum(0.0, steps).sum() / kept.size
    assert trace.predicted_half_life(settings) == pytest.approx(-math.log(2.0) / a_token, rel=0.3)
    distances, values = trace.credit(settings, log_ratios)
    assert trace.half_life(distances, values) == pytest.approx(trace.predicted_half_life(settings), rel=0.3)


def test_the_half_life_of_an_exact_decay_is_found() -> None:
    distances = np.arange(100, 0, -1)
    assert trace.half_life(distances, np.exp2(-distances / 17.0)[None]) == pytest.approx(17.0)
    assert trace.half_life(distances, np.ones((1, 100))) == math.inf


def result_with(scores: list[float], entropies: list[float], seed: int = 0, lag: int = 0) -> dict:
    points = [
        {"update": i, "episodes": 10 * i, "sampled": s, "greedy": s, "loss/entropy": h}
        for i, (s, h) in enumerate(zip(scores, entropies, strict=True))
    ]
    settings = replace(small(0), task="t", method="m", seed=seed, lag=lag).as_dict()
    return {"settings": settings, "curve": points, "episodes": 10 * (len(scores) - 1)}


def test_scores_intervals_and_breaks_are_what_their_definitions_say() -> None:
    good = result_with([0.0, 0.4, 0.5, 0.6, 0.7, 0.8], [4.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert reporting.final_score(good) == pytest.approx(0.6)
    assert reporting.area(good) == pytest.approx((0.2 + 0.45 + 0.55 + 0.65 + 0.75) / 5)
    assert not reporting.has_collapsed(good)
    bad = result_with([0.0, 0.4, 0.5, 0.1, 0.1, 0.1], [4.0, 2.0, 1.0, 0.1, 0.1, 0.1], lag=16)
    assert reporting.has_collapsed(bad)
    mean, half = reporting.mean_and_half_width([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    rows = reporting.lag_table([good, result_with([0.6] * 6, [1.0] * 6, seed=1), bad]).splitlines()[2:]
    assert "| 0.60 0.60 | 100 % | 100 % | 0 of 2 |" in rows[0]
    assert "| 0.24 | 40 % | 40 % | 1 of 1 |" in rows[1]
