"""Statistics of the study against their definitions, and what its phases choose from what earlier ones have found."""

import itertools
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from impala_llm.config import load
from tools import _study_contrasts as contrasts
from tools import _study_grid as grid
from tools import _study_kept as keeping
from tools import _study_lab as lab
from tools import _study_plan as plan
from tools import _study_report as reporting
from tools import _study_shop as shop
from tools import _study_stats as stats
from tools import study

pytestmark = pytest.mark.system


def test_the_interquartile_mean_is_that_of_the_middle_half() -> None:
    assert float(stats.interquartile_mean(np.array([9.0, 1.0, 2.0, 4.0]))) == 3.0
    assert float(stats.interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -50.0]))) == 2.0, "one of five at each end"
    assert float(stats.interquartile_mean(np.array([1.0, 2.0, 6.0]))) == 3.0, "none of three"
    assert stats.interquartile_mean(np.array([[0.0, 1.0, 2.0, 9.0], [5.0, 5.0, 5.0, 5.0]])).tolist() == [1.5, 5.0]


def test_bootstrap_intervals_have_the_width_that_theory_gives_them() -> None:
    """Intervals of a mean have 1.96 standard errors on each side, of a constant no width; pairs are drawn together."""
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = stats.bootstrap_interval(values, lambda drawn: drawn.mean(axis=-1))
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert stats.bootstrap_interval(np.full(7, 0.5)) == (0.5, 0.5)
    pairs = np.stack([0.9 * values, values], axis=1)
    assert stats.bootstrap_interval(pairs, stats.kept_share) == pytest.approx((0.9, 0.9)), "a ratio that never varies"
    assert np.isnan(stats.bootstrap_interval(np.array([1.0]))).all()


def test_the_p_value_is_the_share_of_signs_that_are_as_extreme() -> None:
    differences = [0.3, 0.1, -0.05, 0.2, 0.4]
    observed = abs(sum(differences))
    count = 0
    for signs in itertools.product([1, -1], repeat=5):
        count += abs(sum(sign * value for sign, value in zip(signs, differences, strict=True))) >= observed - 1e-12
    assert stats.paired_p_value(differences) == count / 32
    assert stats.paired_p_value([0.0] * 6) == 1.0
    assert stats.paired_p_value([0.1] * 10) == 2 / 2**10, "all of one sign: that draw and its mirror image"


def test_the_p_value_of_many_pairs_is_small_where_they_differ_and_even_where_they_do_not() -> None:
    generator = np.random.default_rng(3)
    assert stats.paired_p_value((0.5 + generator.normal(0, 0.3, 30)).tolist()) < 0.001
    found = np.array([stats.paired_p_value(generator.normal(0, 1, 20).tolist()) for _ in range(60)])
    assert 0.3 < found.mean() < 0.7 and (found < 0.05).mean() < 0.15


def test_the_p_value_of_thirty_pairs_counts_all_patterns_and_the_ties_that_six_digits_hide() -> None:
    differences = np.random.default_rng(4).integers(-60, 90, 30) / 1500
    patterns = {0: 1}  # number of patterns of signs by their sum
    for value in np.round(differences * 1500).astype(int).tolist():
        sums = [(found + sign * value, number) for found, number in patterns.items() for sign in (1, -1)]
        patterns = {}
        for found, number in sums:
            patterns[found] = patterns.get(found, 0) + number
    observed = abs(round(float(differences.sum()) * 1500))
    expected = sum(number for found, number in patterns.items() if abs(found) >= observed) / 2**30
    assert 0 < expected < 1 and stats.paired_p_value(differences.tolist()) == expected
    assert stats.paired_p_value(np.round(differences, 6).tolist()) == expected


def test_holm_is_its_worked_example() -> None:
    """In rising order 0.005, 0.01, 0.03 and 0.04 become 4, 3, 2 times as much, and no less than the one before."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.6, 0.7]) == [1.0, 1.0] and stats.holm([]) == []


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tables whose intervals are of constant data, or are not looked at."""
    monkeypatch.setattr(stats, "RESAMPLES", 300)


def result_of(settings: lab.RunSettings, score: float) -> dict:
    """A run with this score in all its evaluations but the first one, of the starting policy."""
    scores = [0.0] + 5 * [score]
    points = [
        {"update": n, "episodes": 32 * n, "sampled": scores[n], "greedy": scores[n], "loss/entropy": 1.0}
        for n in range(6)
    ]
    data = json.loads(json.dumps(settings.as_dict()))
    clock = [[n, 0.2 * n, 0.1 * n] for n in range(6)]
    return {
        "settings": data, "curve": points, "clock": clock, "episodes": 160, "action_tokens": 960, "seconds": 2.0
    }  # fmt: skip


def as_scored(score: dict[str, float]):  # type: ignore[no-untyped-def]
    """Results in which a method scores what is said here at a rate of 1e-3, less at others, and half of it at a lag of
    64."""

    def finished(wanted: Sequence[lab.RunSettings]) -> list[dict]:
        found = []
        for run in wanted:
            of_lag = score.get(run.method, 0.3) * (0.5 if run.lag == 64 else 1.0)
            found.append(result_of(run, of_lag - 100 * abs(plan.rate_of(vars(run)) - 1e-3)))
        return found

    return finished


def test_the_best_rate_of_each_lag_is_chosen_and_of_equal_ones_the_lowest() -> None:
    runs = [run for run in plan.rates(range(2)) if run.method == "M2PO"]
    best = {0: 2e-3, 16: 5e-4}
    results = [result_of(run, 0.8 if plan.rate_of(vars(run)) == best[run.lag] else 0.4) for run in runs]
    assert plan.chosen_rates(results) == {"M2PO": best}
    assert plan.chosen_rates([result_of(run, 0.4) for run in runs]) == {"M2PO": {0: 5e-4, 16: 5e-4}}


def test_the_rivals_are_those_that_bear_a_lag_of_64_best_beside_the_fixed_methods() -> None:
    of_groups = {"TOPR, group": 0.85}  # is compared with PPO's clip on groups alone
    finished = as_scored({"PPO clip": 0.9, "M2PO": 0.8, "CISPO": 0.7, "TOPR": 0.6, **of_groups})
    screened = plan.screen(range(2), finished)
    assert plan.rivals(finished(screened)) == ["M2PO", "CISPO"]
    reported = plan.main(range(2), finished)
    assert {run.method for run in reported} == {*plan.FIXED, "M2PO", "CISPO"}
    assert {run.lag for run in reported} == set(plan.LAGS)


def test_phases_that_choose_and_phases_that_report_share_no_seed_and_no_split() -> None:
    finished = as_scored({"TOPR": 0.9})
    choosing = [
        *plan.rates(range(5)), *plan.screen(range(5), finished), *shop.rates(range(2), finished),
        *plan.quarters(range(2)), *plan.built(range(3), finished), *plan.built_again(range(3), finished),
        *plan.dpo_rates(range(3)),
    ]  # fmt: skip
    reported = [
        *plan.main(range(30), finished), *plan.long(range(10), finished), *shop.shop(range(5), finished),
        *plan.confirm(range(10), finished), *plan.dpo(range(10), finished), *plan.precision(range(10)),
        *shop.replay(range(3), finished), *plan.after_main(range(10)), *shop.at_256(range(3), finished),
        *shop.confirm(range(6)), *plan.long_one_rate(range(6)), *plan.lag_4(range(10)),
    ]  # fmt: skip
    assert {run.evaluate_on for run in choosing} == {"validation"} and {run.evaluate_on for run in reported} == {"test"}
    assert not {run.seed for run in choosing} & {run.seed for run in reported}


def test_the_default_is_confirmed_on_seeds_and_goals_of_its_own() -> None:
    finished = as_scored({"TOPR": 0.9})
    runs = shop.confirm(range(plan.SEEDS["shop-confirm"]))
    catalogues = {word for run in runs for word in run.overrides if word.startswith("env.webshop.catalogue_seed=")}
    assert len(catalogues) == len({run.seed for run in runs}) == plan.SEEDS["shop-confirm"]
    others = [*shop.rates(range(2), finished), *shop.shop(range(5), finished), *shop.at_256(range(3), finished)]
    assert not {run.seed for run in runs} & {run.seed for run in others}
    default = load(list(shop.COMMON)).env.webshop.catalogue_seed
    assert f"env.webshop.catalogue_seed={default}" not in catalogues
    # One rate for all, so that only loss and lag differ.
    assert {plan.rate_of(run.as_dict()) for run in runs} == {1e-4}


def test_losses_on_the_long_corridor_have_one_rate_and_seeds_of_no_other_phase() -> None:
    finished = as_scored({"TOPR": 0.9})
    runs = plan.long_one_rate(range(plan.SEEDS["long-one-rate"]))
    assert {plan.rate_of(run.as_dict()) for run in runs} == {5e-4} and {run.num_turns for run in runs} == {6}
    others = [*plan.long(range(5), finished), *plan.confirm(range(10), finished), *shop.confirm(range(6))]
    assert not {run.seed for run in runs} & {run.seed for run in others}


def test_every_run_of_the_plan_has_settings_that_the_learner_accepts_and_methods_differ_in_nothing_else() -> None:
    finished = as_scored({"TOPR": 0.9})
    plans = [
        plan.rates([0]), plan.screen([0], finished), plan.main([0], finished), plan.long([0], finished),
        plan.quarters([0])[::16], plan.built([0], finished), plan.built_again([0], finished),
        plan.confirm([0], finished),
        plan.after_main([0]), plan.dpo_rates([0]), plan.dpo([0], finished), plan.precision([0]),
        plan.long_one_rate([0]), plan.lag_4([0]),
        shop.rates([0], finished), shop.shop([0], finished), shop.replay([0], finished), shop.at_256([0], finished),
        shop.confirm([0]),
    ]  # fmt: skip
    # Rates and lags are numbers, and make nothing valid or not: one of each method and task.
    kinds = {(run.method, run.num_turns, "env=corridor" in run.overrides): run for runs in plans for run in runs}
    for run in kinds.values():
        load(run.words())
    for runs in plans:
        assert len({(run.lag, run.method, run.overrides) for run in runs}) == len(runs)
        # More samples per insert are more updates of as many episodes.
        same = {"method": "", "lag": 0, "task": "", "overrides": (), "num_updates": 0, "evaluate_every": 0}
        assert len({replace(run, **same) for run in runs}) == 1
    starts = {start for runs in plans[:14] for run in runs if (start := grid.start_of(run))}
    assert all(grid.start_of(run) is None for runs in plans[14:] for run in runs)
    for start in starts:
        load(start.words())


def test_a_phase_waits_for_the_runs_that_it_rests_on(tmp_path: Path) -> None:
    with pytest.raises(plan.Missing, match="252 of 252 runs of --part rates have not finished"):
        study.planned("screen", range(1), tmp_path)


@pytest.mark.usefixtures("few_resamples")
def test_the_reports_of_the_second_study_come_out_of_its_data(tmp_path: Path) -> None:
    finished = as_scored({"PPO clip": 0.9, "M2PO": 0.8, "CISPO": 0.7})
    chosen = contrasts.rate_table(finished(plan.rates(range(2))))
    assert "| M2PO | 16 | 0.750 [0.750, 0.750] | **0.800 [0.800, 0.800]** | 0.700 [0.700, 0.700] |" in chosen
    runs = plan.main(range(4), finished)
    tables = study.report_of_second("main", finished(runs), tmp_path)
    difference = "0.050 [0.050, 0.050]"
    thrice = f"{difference} | {difference} | {difference}"
    assert f"| PPO clip less M2PO | 64 | 4 | {thrice} | 0.1250 | 1.0000 |" in tables, "2 of 16 signs"
    of_dtypes = study.report_of_second("precision", finished(plan.precision(range(2))), tmp_path)
    assert "| TOPR, float32 less TOPR, bfloat16 | 0 | 2 | 0.000" in of_dtypes
    with_topr = as_scored({"TOPR": 0.9})
    study.report_of_second("confirm", with_topr(plan.confirm(range(2), with_topr)), tmp_path)
    second_look = study.report_of_second("after-main", finished(plan.after_main(range(2))), tmp_path)
    there = {method for pair in plan.AFTER_MAIN for method in pair} - {"ρ1ρρ, token"}  # which these data do not build
    pairs = [pair for pair in plan.AFTER_MAIN if {*pair} <= there]
    assert all(f"| {ours} less {other} | 256 | 2 |" in second_look for ours, other in pairs) and len(pairs) == 11
    at_one_rate = study.report_of_second("long-one-rate", finished(plan.long_one_rate(range(2))), tmp_path)
    assert at_one_rate.count("| TOPR less floored IS | 64 |") == 2, "with Student's intervals as well"
    of_young_data = study.report_of_second("lag-4", finished(plan.lag_4(range(2))), tmp_path)
    assert of_young_data.count("| TOPR less PPO clip | 4 |") == 2
    of_intervals = study.report_of_second("dpo", finished(plan.dpo(range(2), finished)), tmp_path)
    assert of_intervals.count("| DPO, weights every update less ") == 3
    of_shop = study.report_of_second("shop", finished(shop.shop(range(2), finished)), tmp_path)
    assert "| PPO clip less no correction | 64 | 2 |" in of_shop and (tmp_path / "shop-time.svg").exists()
    assert "| 50 % [50, 50] | 50 % [50, 50] |" in tables, "what the run began with is 0 here"
    assert "| no correction, 1e-4 | 16 | 2 | 100 % [100, 100] | 100.0 ± 0.0 % |" in of_shop
    assert of_shop.count("| PPO clip less no correction | 64 |") == 2, "with Student's intervals as well"
    assert len((tmp_path / "main.jsonl").read_text().splitlines()) == len(runs)
    assert (tmp_path / "main.svg").read_text().startswith("<?xml")


def test_what_delay_alone_leaves_is_the_score_of_so_many_updates_before() -> None:
    """The score rises by 0.01 an update; its last five evaluations are of 60 to 100 updates; 20 updates earlier it was
    lower by 0.2."""
    [settings, *_] = (run for run in plan.rates([0]) if plan.rate_of(vars(run)) == 1e-3)
    runs = []
    for lag, slope in ((0, 0.01), (20, 0.005)):
        runs.append(result_of(replace(settings, lag=lag), 0.0))
        runs[-1]["curve"] = [{"update": u, "sampled": slope * u, "greedy": 0.0} for u in range(0, 101, 10)]
    [row] = keeping.of_best_table(runs).splitlines()[2:]
    assert row.endswith("| 0.400 | 0.001 | 50 % | 50 % | 0.600 | 67 % |  |"), "one run has no interval"


def test_no_run_begins_when_time_is_up_and_the_same_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = plan.rates([0])[:2]
    assert study.run_missing(runs, tmp_path, 1, deadline=0.0) == []
    assert "2 runs are left: the same command goes on" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_resamples")
def test_runs_whose_data_are_kept_are_finished_in_another_folder(tmp_path: Path) -> None:
    runs = plan.rates([0])[:3]
    results = as_scored({"no correction": 0.9})(runs[:2])
    study.report_of_second("rates", results, tmp_path / "data")
    study.restore(tmp_path / "data", tmp_path / "runs")
    assert [r["settings"]["overrides"] for r in study.finished(runs, tmp_path / "runs")] == [
        list(run.overrides) for run in runs[:2]
    ]
    newer = results[0] | {"episodes": 7}
    study.keep(newer, study.run_path(tmp_path / "runs", runs[0]))
    study.restore(tmp_path / "data", tmp_path / "runs")
    assert study.finished(runs, tmp_path / "runs")[0] == newer, "what has just run is kept"


def test_the_data_of_the_repository_are_finished_runs_and_their_report_is_those_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_repository = study.ROOT / "docs" / "results" / "off_policy"
    parts = [word for part in "acde" for word in ("--part", part)]
    words = ["--report", *parts, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["study.py", *words])
    assert study.main() == 0
    for name in ("lag", "replay", "variants", "critic"):
        assert (tmp_path / "out" / f"{name}.jsonl").read_text() == (of_repository / f"{name}.jsonl").read_text()
    assert "no run has finished" not in capsys.readouterr().out


@pytest.mark.usefixtures("few_resamples")
def test_a_trial_rests_on_the_data_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = as_scored({})(plan.rates(range(plan.SEEDS["rates"])))
    study.report_of_second("rates", results, tmp_path / "docs" / "results" / "off_policy")
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["study.py", "--report", "--quick", "--part", "screen"])
    assert study.main() == 0


@pytest.mark.usefixtures("few_resamples")
def test_a_report_of_fewer_runs_than_its_file_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs" / "results" / "off_policy"
    study.report_of_second("rates", as_scored({})(plan.rates(range(2))), folder)
    before = (folder / "rates.jsonl").read_bytes()
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["study.py", "--report", "--part", "rates", "--part", "a", "--seeds", "1"])
    assert study.main() == 1
    assert (folder / "rates.jsonl").read_bytes() == before
    output = capsys.readouterr()
    assert f"{folder / 'rates.jsonl'} holds 168 runs, and this report has 84" in output.err and "--out" in output.err
    assert "part a: no run has finished" in output.out, "the other parts are reported"


def test_fewer_seeds_of_the_trace_are_fewer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(seeds: Sequence[int]) -> list[dict]:
        return [{"half_lives": [1.0 for _ in seeds]}]

    monkeypatch.setattr(study.trace, "measure", measured)
    reporting.write_lines(tmp_path / "trace.jsonl", measured(range(3)))
    with pytest.raises(study.FewerRuns, match="holds 3 runs, and this report has 1"):
        study.report("b", [], range(1), tmp_path, tmp_path)


def run_or_be_killed(settings: lab.RunSettings, path: Path) -> float:
    """Stands for `study.run_one` in its process: seed 1 ends as the kernel ends a process when memory is out."""
    if settings.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    study.keep(result_of(settings, 0.5), path)
    return 0.0


@pytest.mark.system
def test_a_run_whose_process_is_killed_has_failed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "run_one", run_or_be_killed)
    runs = [replace(plan.rates([0])[0], seed=seed) for seed in range(4)]
    [failure] = study.run_missing(runs, tmp_path, 2)
    assert "seed 1: BrokenProcessPool" in failure
    assert [r["settings"]["seed"] for r in study.finished(runs, tmp_path)] == [0, 2, 3]


def test_what_failed_is_listed_also_where_a_later_phase_cannot_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "run_missing", lambda wanted, *_: [f"{wanted[0].part}: killed"])
    monkeypatch.setattr("sys.argv", ["study.py", "--part", "rates", "--part", "screen"])
    assert study.main() == 1
    errors = capsys.readouterr().err
    assert "failed: rates: killed" in errors and "part screen cannot be planned: 252 of 252" in errors


def test_methods_of_which_one_becomes_the_default_have_two_more_seeds() -> None:
    finished = as_scored({"TOPR": 0.9})
    others = {"no correction, 1e-4", "TOPR, 1e-4", "PPO clip, 3e-4"}
    assert {run.method for run in shop.shop([0], finished)} == {*plan.FIXED, *shop.CONTENDERS, *others}
    assert {run.method for run in shop.shop([3], finished)} == {*shop.CONTENDERS, "TOPR, 1e-4", "PPO clip, 3e-4"}
    [uncorrected, _] = [run for run in shop.shop([0], finished) if run.method == "no correction, 1e-4"]
    assert {"algorithm.loss=reinforce", "learner.learning_rate=0.0001"} <= set(uncorrected.overrides)


def test_methods_of_which_one_becomes_the_default_run_at_256_and_two_of_them_at_the_rate_of_the_third_too() -> None:
    runs = shop.at_256([0], as_scored({"TOPR": 0.9}))
    assert {run.method for run in runs} == {*shop.CONTENDERS, "TOPR, 1e-4", f"{shop.BUILT}, 1e-4"}


def test_replays_have_equally_many_episodes_by_the_method_that_was_best_at_a_lag_of_16() -> None:
    finished = as_scored({"TOPR": 0.9})
    runs = shop.replay(range(2), finished)
    assert len(runs) == (1 + 3 * 5) + (1 + 2 * 5) + 2 * 3 and all(
        {"algorithm.loss=topr"} <= set(run.overrides) for run in runs
    )
    episodes = set()
    for run in runs:
        replay = load(run.words()).replay
        rate = "" if plan.rate_of(vars(run)) == 3e-4 else ", rate 0.0001"
        assert run.task == f"WebShop, {replay.samples_per_insert:g} samples per insert{rate}"
        episodes.add(lab.num_due(run.num_updates, 16, replay.samples_per_insert) - 16)
    assert episodes == {120 * 16}, "but for the batch that the first update waits for"


def test_losses_of_the_shop_have_the_options_of_their_presets_whatever_the_default_is() -> None:
    losses = {run.method: load(run.words()).algorithm.loss for run in shop.confirm([0])}
    assert losses["TOPR"] == load(["algorithm=topr_gae"]).algorithm.loss
    assert losses["floored IS"] == load(["algorithm=floored_is"]).algorithm.loss != losses["TOPR"]
    assert losses["PPO clip"] == load(["algorithm=ppo"]).algorithm.loss


def test_floored_importance_sampling_is_the_preset_of_that_name() -> None:
    ours, preset = (
        load(["experiment=corridor", *plan.FLOORED_IS]),
        load(["experiment=corridor", "algorithm=floored_is"]),
    )
    assert ours.algorithm.credit.name == preset.algorithm.credit.name == "gae"
    assert ours.algorithm.loss == preset.algorithm.loss


@pytest.mark.usefixtures("few_resamples")
def test_replays_are_compared_after_the_updates_that_using_each_episode_once_makes() -> None:
    def result(method: str, reuse: int, speed: float) -> dict:
        runs = shop.replay([0], as_scored({}))
        [run, *_] = [r for r in runs if r.method == method and r.num_updates == 120 * reuse]
        marks = [20 * reuse * n for n in range(7)]
        points = [{"update": n, "episodes": 32 * n, "sampled": n / 1000, "sampled_rare": n / 2000} for n in marks]
        clock = [(n, n * speed / 2, n * speed) for n in marks]
        settings = json.loads(json.dumps(run.as_dict()))
        return {"settings": settings, "curve": points, "clock": clock, "episodes": 192}

    often, once = result("PER", 4, 2.5), result("each once", 1, 1.0)
    seconds = [point["seconds"] for point in contrasts.with_seconds([often])[0]["curve"]]
    assert seconds == [200.0 * n for n in range(7)], "of playing and learning the longer one"
    # The mean over 90 to 120 updates, of a score of a thousandth an update.
    assert contrasts.score_by(often, 120) == pytest.approx(0.105) == contrasts.score_by(once, 120)
    rows = contrasts.replay_table([once, often]).splitlines()[2:]
    # The last five evaluations are of 40 to 120 updates, of 160 to 480 where an episode is used four times.
    assert rows[0].startswith("| WebShop, 1 samples per insert | each once | 1 | 192 | 120 | 0.080 | 0.040 |")
    assert rows[1].startswith("| WebShop, 4 samples per insert | PER | 1 | 192 | 480 | 0.320 | 0.160 |")
    assert all("| 0.105 | 0.50 |" in row for row in rows)


def test_a_replay_is_compared_with_using_each_episode_once_at_its_own_rate_by_seed() -> None:
    """The score of a run does not change: of its seed, less 0.1 and 0.3 where two samples are drawn uniformly."""

    def result(run: lab.RunSettings) -> dict:
        score = 0.5 + run.seed / 1000 - (0.2 + 0.1 * (-1) ** run.seed if run.method == "uniform" else 0.0)
        if plan.rate_of(vars(run)) == 1e-4:
            score += 0.25
        of_point = {"sampled": score, "greedy": score, "sampled_rare": score}
        curve = [{"update": n, **(of_point | {"greedy": 0.5} if n == 0 else of_point)} for n in range(0, 241, 40)]
        return {"settings": json.loads(json.dumps(run.as_dict())), "curve": curve}

    runs = [run for run in shop.replay([0, 1], as_scored({})) if run.method in ("each once", "uniform")]
    rows = [row for row in keeping.less_once_table([result(run) for run in runs]).splitlines() if ", 2 samples" in row]
    # Student's half width of -0.3 and -0.1: 12.706 times 0.1.
    assert len(rows) == 2 and all("|".join([" -0.200 [-1.471, 1.071] "] * 3) in row for row in rows), rows


@pytest.mark.usefixtures("few_resamples")
def test_runs_are_pairs_only_where_both_began_with_one_policy() -> None:
    def run(method: str, seed: int, start: float, score: float) -> plan.Result:
        curve = [{"update": 0, "greedy": start, "sampled": start}, {"update": 8, "greedy": score, "sampled": score}]
        return {"settings": {"method": method, "seed": seed, "lag": 16}, "curve": curve}

    runs = [run("new", seed, 0.2, 0.5) for seed in (30, 31, 33)]
    runs += [run("old", 30, 0.2, 0.4), run("old", 31, 0.3, 0.1), run("old", 32, 0.2, 0.4), run("old", 33, 0.2, 0.2)]
    [row] = contrasts.contrast_table(runs, [("new", "old")]).splitlines()[2:]
    assert row.startswith("| new less old | 16 | 2 | 0.100 [0.050, 0.150] "), "seeds 30 and 33; a score is a mean"
