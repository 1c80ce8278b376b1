"""The door: commands, help, bad input. Nothing is started here."""

import json
import subprocess
from pathlib import Path

import pytest

from impala_llm import cli, launch


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["train", "--help"], ["evaluate", "-h"]])
def test_help_goes_to_stdout(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    for command in ("train", "evaluate", "bench", "keys"):
        assert f"impala-llm {command}" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("words", [[], ["trian"], ["experiment=toy"]])
def test_no_command_is_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert "impala-llm train" in printed.err and printed.out == ""


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_bad_settings_stop_before_anything_is_started(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "experiment=toy", "algorithm.max_staleness=-1"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.max_staleness=-1" in said and "at least 0" in said


def test_a_dry_run_prints_settings_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "experiment=toy", "--dry-run", "run.name=dry"]) == 0
    printed = capsys.readouterr().out
    for word in ("name: dry", "# learner: ", "# actor 0: ", "run.name=dry"):
        assert word in printed
    assert "--dry-run" not in printed


@pytest.mark.parametrize(
    ("code", "wanted", "compared"), [(0, "true", True), (0, "false", False), (1, "true", False), (130, "true", False)]
)
def test_the_table_comes_after_a_finished_run_only(
    code: int, wanted: str, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from impala_llm import evaluate

    calls = []
    monkeypatch.setattr(launch, "supervise", lambda config, overrides: code)
    monkeypatch.setattr(evaluate, "compare", lambda config: calls.append(config.run.name))
    settings = ["experiment=toy", "run.name=table", f"evaluation.before_and_after={wanted}"]
    assert cli.main(["train", *settings]) == code
    assert calls == (["table"] if compared else [])


def test_evaluate_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from impala_llm import evaluate

    calls = []

    def played(config: object, as_json: bool) -> int:
        calls.append((config.evaluation.num_tasks, as_json))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(evaluate, "main", played)
    assert cli.main(["evaluate", "experiment=toy", "evaluation.num_tasks=7"]) == 0
    assert cli.main(["evaluate", "--json", "experiment=toy", "evaluation.num_tasks=8"]) == 0
    assert calls == [(7, False), (8, True)]


def test_an_unknown_benchmark_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "no-such-bench"]) == 2
    assert "no-such-bench" in capsys.readouterr().err


def test_keys_makes_a_folder_and_says_what_goes_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", "--dir", str(folder), "--actors", "gpu1,gpu2"]) == 0
    printed = capsys.readouterr().out
    for word in (str(folder), "gpu1.secret.json", "gpu2.secret.json", "learner.public.json", "pipeline.keys="):
        assert word in printed
    assert json.loads((folder / "gpu1.secret.json").read_text())["secret_key"] not in printed
    assert cli.main(["keys", "--dir", str(folder), "--actors", "gpu2"]) == 2
    assert "gpu2.secret.json exists" in capsys.readouterr().err


def test_keys_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", "--help"]) == 0
    assert "--dir" in (printed := capsys.readouterr().out) and "revoke" in printed
    assert cli.main(["keys"]) == 2
    assert "--dir" in capsys.readouterr().err
