"""Committed results can be run again: today's tree takes their settings."""

import json
import re
from pathlib import Path

import pytest

from impala_llm.config import load
from tools import quickstart_results

pytestmark = pytest.mark.system

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SETTINGS = sorted(RESULTS.rglob("*.yaml"))
STUDIES = sorted(RESULTS.rglob("*.jsonl"))


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_settings_of_a_run_load(path: Path) -> None:
    # The interpreter of an SGLang server is where that machine has it, and so are a model that was downloaded and a
    # policy that a warm start made.
    own = (
        ["model.path=tiny_shopper"] if re.search(r"^  path: (outputs|models)/", path.read_text(), re.MULTILINE) else []
    )
    config = load([f"experiment={path}", "engine.python=null", *own])
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_settings_of_a_study_load(path: Path) -> None:
    rows = [json.loads(line)["settings"] for line in path.read_text().splitlines()]
    assert rows
    # Each override once: 81 losses that differ in which four of twelve words they have need not all be loaded.
    seen: set[str] = set()
    for number, overrides in enumerate(row.get("overrides", ()) for row in rows):
        if number == 0 or not seen.issuperset(overrides):
            load(overrides)
            seen.update(overrides)


def test_there_are_results() -> None:
    assert len(SETTINGS) >= 5 and len(STUDIES) >= 5


def test_an_evaluation_is_kept_with_the_scores_from_which_gains_are_paired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(label: str, scores: list[float]) -> dict:
        means = {"score": sum(scores) / 3, "success": 0.0, "turns": 3.0}
        intervals = {"score_interval": [0.0, 1.0], "success_interval": [0.0, 0.5]}
        return {"label": label, "tasks": "shop", "num_tasks": 3, **means, **intervals, "scores": scores}

    rows = [result("before", [0.5, 0.25, 0.0]), result("after", [0.75, 0.5, 0.25])]
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "metrics.jsonl").write_text('{"step": 1, "time_s": 0.0}\n')
    (run / "evaluation.json").write_text(json.dumps(rows))
    (run / "config.yaml").write_text("run: {}\n")
    monkeypatch.setattr(quickstart_results, "OUT", out)
    monkeypatch.setattr(quickstart_results, "plot", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["quickstart_results.py", str(run)])
    quickstart_results.main()
    assert json.loads((out / "run.json").read_text()) == rows
    # Of successes, none of which changed, Bonett and Price's interval and not [0, 0].
    success = "0.000 [0.000, 0.500] | +0.000 [-0.554, +0.554]"
    assert f"| after, run | 0.500 [0.000, 1.000] | +0.250 [+0.250, +0.250] | {success} |" in capsys.readouterr().out


def test_evaluations_of_several_runs_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(label: str, scores: list[float], tokens: float | None = 9.0) -> dict:
        means = {"score": sum(scores) / 3, "success": 0.0, "turns": 3.0, "tokens": tokens}
        intervals = {"score_interval": [0.0, 1.0], "success_interval": [0.0, 0.5]}
        return {"label": label, "tasks": "shop", "num_tasks": 3, **means, **intervals, "scores": scores}

    monkeypatch.syspath_prepend(quickstart_results.__file__.rpartition("/")[0])
    from tools import smollm2_results

    common = [result("rule: first hit", [0.25, 0.25, 0.25], None), result("before", [0.5, 0.25, 0.0])]
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, scores in zip(runs, ([0.75, 0.5, 0.25], [0.5, 0.25, 0.0]), strict=True):
        (run / "tensorboard").mkdir(parents=True)
        (run / "tensorboard" / "metrics.jsonl").write_text('{"step": 1, "time_s": 0.0}\n')
        (run / "evaluation-0.json").write_text(json.dumps([*common, result("after", scores)]))
        (run / "config.yaml").write_text("run: {}\n")
    monkeypatch.setattr(smollm2_results, "OUT", tmp_path / "out")
    monkeypatch.setattr(smollm2_results.curves, "plot", lambda *_: None)
    evaluations = [str(run / "evaluation-0.json") for run in runs]
    monkeypatch.setattr("sys.argv", ["smollm2_results.py", "--runs", *map(str, runs), "--evaluations", *evaluations])
    smollm2_results.main()
    kept = [json.loads((tmp_path / "out" / f"{run.name}-evaluation-0.json").read_text()) for run in runs]
    assert [rows[-1]["scores"] for rows in kept] == [[0.75, 0.5, 0.25], [0.5, 0.25, 0.0]]
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0].strip("| "), row[-1].strip("| ")) for row in rows] == [
        ("rule: first hit", ""),
        ("before", ""),
        ("after, first", "+0.250 [+0.250, +0.250]"),
        ("after, second", "+0.000 [+0.000, +0.000]"),
    ]
