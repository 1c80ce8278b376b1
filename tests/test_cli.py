"""The command line: commands, help, bad input. Nothing is started here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from impala_llm import cli, launch
from impala_llm.commands import parser as commands
from impala_llm.commands.settings_reference import markdown, reference
from impala_llm.config import load, to_yaml
from impala_llm.config_files import known_keys
from impala_llm.learning.checkpoints.policy_folders import replace_folder
from impala_llm.processes.stop_signals import STOP_SIGNALS
from impala_llm.settings import ASSETS, Config


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers of this process as they were."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_goes_to_stdout(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    printed = capsys.readouterr()
    for command in (
        "train",
        "actors",
        "evaluate",
        "demonstrate",
        "demonstrations",
        "sft",
        "doctor",
        "bench",
        "keys",
        "new-env",
    ):
        assert f"impala-llm {command}" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize("command", ["train", "actors", "evaluate", "demonstrate", "sft"])
def test_help_of_a_command_fits_a_screen_and_names_the_parts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"impala-llm {command}" in printed and len(printed.splitlines()) <= 30
    for part in dict.fromkeys(key.partition(".")[0] for key in known_keys()):
        keys = {line.partition("=")[0] for line in reference(f"{part}.").splitlines() if line.startswith(f"{part}.")}
        assert f"{part} ({len(keys)})" in " ".join(printed.split())


@pytest.mark.parametrize("command", ["train", "actors", "evaluate", "demonstrate", "sft"])
def test_help_with_a_dot_shows_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help", "."]) == 0
    printed = capsys.readouterr().out
    for key in known_keys():
        assert f"{key}=" in printed, key
    assert "learner.learning_rate=0.0003  (0 to 1)" in printed


def test_help_with_a_word_shows_its_settings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "staleness"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("algorithm.max_staleness=2  (at least 0)") and "learner.batch_size" not in printed
    assert cli.main(["train", "--help", "nosuchthing"]) == 2


def test_help_searches_keys_and_meanings_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("gpu", "GPU"):
        assert cli.main(["train", "--help", word]) == 0
        assert "engine.memory_fraction=" in capsys.readouterr().out
    assert cli.main(["train", "--help", "STALE"]) == 0
    assert capsys.readouterr().out.startswith("algorithm.max_staleness=")


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["STALE"], ["train", "STALE"]), (["lr", "env=toy"], ["train", "lr", "env=toy"]), (["sft", "lr"], ["sft", "lr"])],
)
def test_help_without_a_command_searches_those_of_training(
    words: list[str], meant: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--help", *words]) == 0
    printed = capsys.readouterr().out
    assert cli.main([*meant, "--help"]) == 0
    assert printed == capsys.readouterr().out and "usage" not in printed


def test_help_of_what_is_a_command_or_nearly_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help", "bench"]) == 0
    assert capsys.readouterr().out.startswith("usage: impala-llm bench")
    assert cli.main(["--help", "trian"]) == 2
    assert "did you mean the command train?" in capsys.readouterr().err
    for words in (["help"], ["--help", "--version"], ["-h", "-h"], ["--help", ""]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.startswith("impala-llm train [--config FILE]")


def test_help_knows_the_names_of_other_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "LR"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "LR, as other trainers call it:" and second.startswith("learner.learning_rate=")
    assert cli.main(["train", "--help", "steps"]) == 0
    _, second, *rest = capsys.readouterr().out.splitlines()
    assert second.startswith("learner.total_updates=")
    assert any(line.startswith("learner.minibatches=") for line in rest), "and what else has the word"
    assert cli.main(["train", "--help", "max_steps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("learner.total_updates=")
    assert cli.main(["sft", "--help", "lr"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("sft.learning_rate=")
    assert cli.main(["train", "--help", "model"]) == 0
    assert "other trainers" not in capsys.readouterr().out, "it is a word of ours"
    assert cli.main(["train", "--help", "rloo"]) == 0
    assert "algorithm=group_relative algorithm.credit=rloo" in capsys.readouterr().out


def test_help_takes_settings_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "max_staleness"]) == 0
    alone = capsys.readouterr().out
    for words in (["experiment=toy", "--help", "max_staleness"], ["--config", "my.yaml", "max_staleness", "--help"]):
        assert cli.main(["train", *words]) == 0
        assert capsys.readouterr().out == alone
    assert cli.main(["train", "experiment=quickstart", "--help"]) == 0
    assert capsys.readouterr().out.startswith("impala-llm train")


ANOTHER_QUICKSTART = ("experiment=quickstart", "run.name=of-the-tests")
"""Not the run that a user of this checkout may have made."""
OWN_PARTS = """
from dataclasses import dataclass
from impala_llm.algorithms.losses import Reinforce

@dataclass
class SoftLoss(Reinforce):
    tau: float = 0.5
    \"\"\"Softness of the loss.\"\"\"

class NextLetter:
    def __init__(self, num_letters: int, others: list[int] = []): ...
"""


def test_help_lists_the_options_of_own_parts_too(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (user_folder / "own.py").write_text(OWN_PARTS)
    for words, line in (
        (
            ["softness", "algorithm.loss=own:SoftLoss"],
            "algorithm.loss.tau=0.5\n    own:SoftLoss: Softness of the loss.",
        ),
        (["num_letters", "env=own:NextLetter"], "env.args.num_letters=...  (must be set)\n    own:NextLetter: "),
        (["args.others", "env.name=own:NextLetter", "learner.epochs=2"], "env.args.others=[]\n"),
        (["num_words", "env=parrot"], "env.args.num_words="),
    ):
        assert cli.main(["train", "--help", *words]) == 0
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.minib", "nonsense"], "--help searches for one word, and besides 'learner.minib' there is nonsense"),
        (["learner.minib", "foo=bar"], "foo=bar is an unknown key"),
        (["learner.minib", "--fast"], "--fast is no option of this command"),
        (["tau", "algorithm.loss=nowhere:Loss"], "algorithm.loss=nowhere:Loss cannot be imported"),
    ],
)
def test_help_refuses_what_it_does_not_read(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help", "."],
        *([command, "--help"] for command in ("train", "actors", "evaluate", "demonstrate", "sft", "doctor")),
    ],
)
def test_help_fits_a_terminal_of_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"impala-llm {version('impala_llm')}\n"


@pytest.mark.parametrize("is_on_path", [True, False])
def test_commands_are_printed_as_a_shell_finds_them(
    is_on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "impala-llm", "tensorboard"):
        (own / name).touch(0o755)
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setattr(launch, "supervise", lambda config, overrides: (tmp_path / "run" / "policy").mkdir() or 0)
    monkeypatch.setenv("PATH", str(own) if is_on_path else "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "experiment=toy", f"run.dir={tmp_path}/run", "evaluation.before_and_after=false"]) == 0
    printed = capsys.readouterr().out
    folder = "" if is_on_path else "venv/bin/"
    assert f"evaluate it: {folder}impala-llm evaluate --config {tmp_path}/run/config.yaml\n" in printed
    assert f"see its curves: {folder}tensorboard --logdir {tmp_path}/run\n" in printed


def test_last_lines_that_a_full_disk_does_not_take_leave_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "supervise", lambda config, overrides: 0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["train", "experiment=toy", f"run.dir={tmp_path}/run"]) == 0


def test_help_finds_a_key_by_its_words() -> None:
    assert reference("Group Size").startswith("algorithm.group_size=")


def test_help_finds_the_beginnings_of_words_in_meanings() -> None:
    """And not their middles, in which a short word stands everywhere."""
    assert "already" in reference("alread") and not reference("lready")
    assert reference("fsdp").startswith("learner.sharding="), "and all of a key's value is found by its meaning"


def test_every_setting_has_a_meaning() -> None:
    lines = reference(".").splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert line.startswith(" ") or following.startswith("    "), line


def test_the_page_of_settings_is_what_the_fields_say() -> None:
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text() == markdown(), "python -m impala_llm.commands.settings_reference > docs/settings.md"


def test_a_misspelt_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'trian': did you mean `impala-llm train`?" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("words", [["train", "--json"], ["train", "--config"], ["actors", "--actors", "2"]])
def test_unknown_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert words[1] in said and "--help" in said


def test_settings_come_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "my.yaml"
    assert cli.main(["train", "experiment=corridor", "algorithm=dpo", "learner.batch_size=16", "--dry-run"]) == 0
    first = capsys.readouterr().out.partition("# threads")[0]
    saved.write_text(first)
    for words in (["--config", str(saved)], [f"--config={saved}"], [f"experiment={saved}"]):
        assert cli.main(["train", *words, "--dry-run"]) == 0
        assert capsys.readouterr().out.partition("# threads")[0] == first
    assert cli.main(["train", "--config", str(saved), "learner.batch_size=24", "--dry-run"]) == 0
    assert "batch_size: 24" in capsys.readouterr().out


def test_a_file_of_a_dry_run_is_for_another_run_by_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "my.yaml"
    for own, folder in ([], "outputs/second"), ([f"run.dir={tmp_path}/own"], f"{tmp_path}/own"):
        assert cli.main(["train", "experiment=toy", "run.name=first", *own, "--dry-run"]) == 0
        saved.write_text(capsys.readouterr().out)
        assert load([f"experiment={saved}", "run.name=second"]).run.dir == folder


def test_a_file_with_an_unknown_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yaml").write_text("learner:\n  lr: 1.0e-4\n")
    assert cli.main(["train", "--config", str(tmp_path / "my.yaml")]) == 2
    said = capsys.readouterr().err
    assert "my.yaml: learner.lr is an unknown key: did you mean learner.learning_rate?" in said
    (tmp_path / "my.yaml").write_text("learner:\n  batch_size: [\n")
    assert cli.main(["train", "--config", str(tmp_path / "my.yaml")]) == 2
    assert "my.yaml, line 3: this is not YAML" in capsys.readouterr().err
    assert cli.main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_a_home_folder_is_one_in_values_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "model.path=~/no-such-model"]) == 2
    assert f"model.path={Path.home()}/no-such-model does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["experiment=toy"]])
def test_no_command_is_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert "impala-llm train" in printed.err and printed.out == ""


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_bad_settings_stop_before_anything_is_started(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "experiment=toy", "algorithm.max_staleness=-1"]) == 2
    said = capsys.readouterr().err
    assert "algorithm.max_staleness=-1" in said and "at least 0" in said


def test_a_dry_run_prints_settings_and_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "experiment=toy", "--dry-run", "run.name=dry"]) == 0
    printed = capsys.readouterr().out
    for word in ("name: dry", "# learner: ", "# actor 0: ", "run.name=dry"):
        assert word in printed
    assert "--dry-run" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_the_learner_would_warn_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["experiment=toy", "learner.epochs=4", "--dry-run"]
    assert cli.main(["train", *words, "algorithm=topr"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("impala-llm: learner.epochs=4 with algorithm.loss=topr: this loss does not bound how far")
    assert cli.main(["train", *words, "algorithm=ppo"]) == 0
    assert capsys.readouterr().err == "impala-llm: with these settings a run would begin; nothing was started\n"


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_dry_run_refuses_what_the_start_refuses_and_neither_leaves_a_folder(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for word in ("model.device=cuda", "run.dir=/proc/nope"):
        assert cli.main(["train", "experiment=toy", word, *flags]) == 2
        assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "outputs" / "toy" / "tensorboard").mkdir(parents=True)
    (tmp_path / "outputs" / "toy" / "tensorboard" / "metrics.jsonl").write_text("{}\n")
    assert cli.main(["train", "experiment=toy", *flags]) == 2
    assert "run.dir=outputs/toy holds a run already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "outputs" / "toy").iterdir()] == ["tensorboard"]


def test_a_dry_run_makes_the_tasks(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "from impala_llm.envs.toy import ParrotSuite\nclass Suite(ParrotSuite):\n"
    code += "    def __init__(self, options):\n        raise OSError('no data here')\n"
    (user_folder / "empty.py").write_text(code)
    assert cli.main(["train", "experiment=toy", "env=empty:Suite", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "env.name=empty:Suite cannot be made: OSError: no data here" in printed.err and "# actor 0" in printed.out


@pytest.mark.parametrize(
    ("tasks", "session", "said"),
    [("range(0)", "None", "at least one task is expected"), ("range(9)", "object()", "no method reset and no step")],
)
def test_a_dry_run_finds_what_would_end_the_run(
    user_folder: Path, capsys: pytest.CaptureFixture[str], tasks: str, session: str, said: str
) -> None:
    (user_folder / "flawed.py").write_text(
        f"class Suite:\n    name, system_prompt = 'flawed', ''\n    def tasks(self, split):\n        return {tasks}\n"
        f"    def session(self, training):\n        return {session}\n"
        "    def signature(self, task_id):\n        return ''\n"
    )
    assert cli.main(["train", "experiment=toy", "env=flawed:Suite", "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_a_key_that_is_given_twice_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["experiment=toy", "learner.batch_size=16", "run.seed=3", "learner.batch_size=24"]
    assert cli.main(["train", *words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == "impala-llm: given more than once, the last one counts: learner.batch_size=24"
    assert "batch_size: 24" in printed.out


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


def test_an_evaluation_says_that_the_unseen_catalogue_is_that_of_its_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from impala_llm import evaluate

    monkeypatch.setattr(evaluate, "main", lambda config, as_json: 0)
    words = ["evaluate", *ANOTHER_QUICKSTART]
    assert cli.main([*words, "env.webshop.catalogue_seed=7"]) == 0
    [said] = capsys.readouterr().err.splitlines()
    assert "evaluation.unseen_seed=7 is left out" in said and "env.webshop.catalogue_seed=7" in said
    for word in ("env.webshop.catalogue_seed=0", "evaluation.unseen_seed=null"):
        assert cli.main([*words, word]) == 0 and capsys.readouterr().err == ""


def test_a_runs_config_means_the_policy_that_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from impala_llm import evaluate

    played: list[str] = []
    monkeypatch.setattr(evaluate, "main", lambda config, as_json: played.append(config.model.path) or 0)
    shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "policy")
    assert cli.main(["train", *ANOTHER_QUICKSTART, "--dry-run"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out.partition("# threads")[0])
    (tmp_path / "other.yaml").write_text((tmp_path / "config.yaml").read_text())
    words = ["evaluate", "--config", f"{tmp_path}/config.yaml"]
    assert cli.main(words) == 0
    assert f"playing what the run has learned, {tmp_path}/policy" in capsys.readouterr().err
    assert cli.main([*words, "model.path=tiny_shopper"]) == 0
    assert cli.main(["evaluate", "--config", f"{tmp_path}/other.yaml"]) == 0
    shutil.rmtree(tmp_path / "policy")
    assert cli.main(words) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "logs").mkdir()  # a run's folder: its start is not what it has learned
    (tmp_path / "checkpoints" / "update-000020").mkdir(parents=True)  # without a policy, which could not be written
    assert cli.main(words) == 2
    assert f"{tmp_path}/policy is not there, nor a checkpoint with one: the run" in capsys.readouterr().err
    assert played == [str(tmp_path / "policy"), "tiny_shopper", "tiny_shopper", "tiny_shopper"]


def test_a_policy_is_evaluated_without_the_modules_of_what_trained_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from impala_llm import evaluate

    played: list[Config] = []
    monkeypatch.setattr(evaluate, "main", lambda config, as_json: played.append(config) or 0)
    file = tmp_path / "settings.yaml"
    own = {"algorithm.credit.name": "gone:Credit", "algorithm.loss.name": "gone:Loss", "algorithm.loss.tau": 0.5}
    learned = {"algorithm.max_staleness": 8, "learner.sync_interval": 4, "algorithm.refill": 1.0}
    settings = OmegaConf.create(to_yaml(load(["experiment=toy", "env.args.num_words=7"])))
    for key, value in {**own, **learned, "run.metric_writers": ["gone:Writer"]}.items():
        OmegaConf.update(settings, key, value)
    file.write_text(OmegaConf.to_yaml(settings))
    assert cli.main(["evaluate", "--config", str(file)]) == 0
    said = capsys.readouterr().err
    assert "algorithm, learner, replay, run.metric_writers of the file are left out" in said and "gone:Credit" in said
    assert played[0].env.args.num_words == 7 and played[0].engine.max_length == 64
    for command, word, why in (
        *(("train", "--dry-run", "gone:Credit"), ("evaluate", "algorithm.loss.tau=1", "gone:Credit")),
        ("evaluate", "env.args.num_wrds=3", "did you mean env.args.num_words?"),
    ):
        assert cli.main([command, "--config", str(file), word]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "in_checkpoints", "played"),
    [
        (4, [78, 9], "checkpoints/update-000078/policy"),
        (None, [78], "checkpoints/update-000078/policy"),  # killed before its first end
        (78, [9, 78], "policy"),
        (79, [78], "policy"),  # without room for its last checkpoint
    ],
)
def test_the_newest_policy_of_a_run_is_played_and_its_update_said(
    saved: int | None,
    in_checkpoints: list[int],
    played: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in a run that has ended once, goes on, and is evaluated meanwhile or after it was killed."""
    from impala_llm import evaluate

    paths: list[str] = []
    monkeypatch.setattr(evaluate, "main", lambda config, as_json: paths.append(config.model.path) or 0)
    assert cli.main(["train", *ANOTHER_QUICKSTART, "--dry-run"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out.partition("# threads")[0])
    (tmp_path / "logs").mkdir()
    for update in in_checkpoints:
        shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "checkpoints" / f"update-{update:06d}" / "policy")
    if saved is not None:
        shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "policy")
        (tmp_path / "policy" / "training.json").write_text(json.dumps({"update": saved}))
    update = max(saved or 0, *in_checkpoints)
    for last, more in ((update, ""), (update + 5, f" (the metrics of the run go to update {update + 5})")):
        (tmp_path / "tensorboard").mkdir(exist_ok=True)
        (tmp_path / "tensorboard" / "metrics.jsonl").write_text(f'{{"step": {last}, "learner/version": {last}}}\n')
        assert cli.main(["evaluate", "--config", f"{tmp_path}/config.yaml"]) == 0
        said = f"playing what the run has learned, {tmp_path}/{played}, of update {update}{more}; model.path plays"
        assert said in capsys.readouterr().err
    assert paths == [str(tmp_path / played)] * 2


@pytest.mark.parametrize(("code", "saves"), [(0, True), (143, True), (137, False), (4, False)])
def test_an_evaluation_is_recommended_where_this_start_has_saved_the_policy(
    code: int,
    saves: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That of an earlier start stays where the learner has died too often, or has found no room."""
    (tmp_path / "policy").mkdir()

    def supervised(*_: object) -> int:
        if saves:
            (tmp_path / "new").mkdir()
            replace_folder(tmp_path / "new", tmp_path / "policy")
        return code

    monkeypatch.setattr(launch, "supervise", supervised)
    assert cli.main(["train", "experiment=toy", "evaluation.before_and_after=false", f"run.dir={tmp_path}"]) == code
    assert ("evaluate it: " in capsys.readouterr().out) == saves


def test_an_evaluation_of_the_start_says_how_to_play_what_the_run_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from impala_llm import evaluate

    monkeypatch.setattr(evaluate, "main", lambda config, as_json: 0)
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "experiment=quickstart"]
    assert cli.main(words) == 0 and capsys.readouterr().err == ""
    for name in ("policy", "policy-best"):
        shutil.copytree(ASSETS / "tiny_shopper", tmp_path / "outputs" / "quickstart" / name)
    assert cli.main(words) == 0
    said = capsys.readouterr().err
    assert "evaluate --config outputs/quickstart/config.yaml" in said
    assert "model.path=outputs/quickstart/policy-best" in said
    assert cli.main([*words, "model.path=tiny_shopper"]) == 0 and capsys.readouterr().err == ""


def test_settings_have_one_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", f"{tmp_path}/my.yaml", "experiment=toy"]) == 2
    assert "two sources of settings" in capsys.readouterr().err


def test_help_of_a_benchmark_shows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "transport", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "impala-llm bench transport" in printed and "--actors VALUE" in printed


def test_an_unknown_benchmark_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "no-such-bench"]) == 2
    assert "no-such-bench" in capsys.readouterr().err
    assert cli.main(["bench", "transport", "--actors", "many"]) == 2
    assert "--actors=many" in capsys.readouterr().err


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


@pytest.mark.parametrize("command", ["train", "evaluate", "actors"])
@pytest.mark.parametrize(
    ("entries", "setting", "words"),
    [
        ({"model_type": "mamba"}, "run.seed=1", ["model.path=", "kind mamba", "docs/engines.md"]),
        ({"model_type": "new", "layer_types": ["conv"]}, "run.seed=1", ["model.path=", "conv", "docs/engines.md"]),
        (
            {"model_type": "llama", "max_position_embeddings": 512},
            "engine.max_length=1024",
            ["engine.max_length=1024", "512 positions", "lower it to 512"],
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused_before_anything_starts(
    command: str,
    entries: dict[str, object],
    setting: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert cli.main([command, f"model.path={tmp_path}", setting]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert len(said.splitlines()) == 1


def test_ctrl_c_ends_quietly_and_a_second_one_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_command", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.main(["evaluate"]) == 128 + signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "")


def test_a_setting_that_is_written_as_an_option_is_named_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (["--learner.batch_size", "32"], "write learner.batch_size=32"),
        (["--experiment=toy"], "write experiment=toy"),
        (["--fast"], "see `impala-llm train --help`"),
        (["--model=/data/m"], "write model.path=/data/m"),
        (["--model", "Qwen/Qwen3-0.6B"], "write model.path=Qwen/Qwen3-0.6B"),
        (["--model", "tiny_shopper"], "write model=tiny_shopper"),
        (["--engine=vllm"], "write engine=sglang"),
        (["--num_generations", "8"], "write algorithm.group_size=8"),
        (["--learning-rate=1e-5"], "write learner.learning_rate=1e-5"),
        (["--dryrun"], "write --dry-run"),
        (["--run.terminal", "learner.total_updates=3"], "write run.terminal=VALUE"),
        (["--run.terminal", "--dry-run"], "write run.terminal=VALUE"),
    ):
        assert cli.main(["train", *words]) == 2
        assert capsys.readouterr().err == f"impala-llm: {words[0]} is no option of this command: {hint}\n"


def test_a_dry_run_of_actors_is_answered_with_the_command_that_checks_a_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["actors", "--dry-run", "experiment=toy"]) == 2
    assert "--dry-run is no option of this command: `impala-llm doctor` with the same" in capsys.readouterr().err


def test_an_option_means_the_setting_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sft", "--lr", "3e-4"]) == 2
    assert capsys.readouterr().err.endswith("write sft.learning_rate=3e-4\n")
    assert cli.main(["actors", "--"]) == 2
    assert capsys.readouterr().err.endswith("see `impala-llm actors --help`\n")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_an_interrupted_evaluation_after_training_names_the_command_that_makes_its_table(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_config: object) -> None:
        if signal.getsignal(number) == signal.SIG_DFL:
            pytest.fail("the signal would end this process")
        os.kill(os.getpid(), number)

    (tmp_path / "policy").mkdir()
    monkeypatch.setattr("impala_llm.launch.supervise", lambda *_: 0)
    monkeypatch.setattr("impala_llm.commands.preflight.check_training", lambda _config: None)
    monkeypatch.setattr("impala_llm.evaluate.compare", interrupt)
    words = ["experiment=toy", "evaluation.before_and_after=true", f"run.dir={tmp_path}"]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
        commands.train(load(words), words, False)
    assert ended.type is KeyboardInterrupt if number == signal.SIGINT else ended.value.code == 128 + number
    said = capsys.readouterr().out
    assert "the evaluation was interrupted; training has finished, and its policy is saved" in said
    assert "impala-llm evaluate" in said and str(tmp_path) in said
    [start] = re.findall(r"began as: the same command and evaluation.start=(\S+)", said)
    assert (Path(start) / "config.json").is_file()
