"""A warm start and what is not whole, or not as it was, in the folder that it goes on from."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from impala_llm.cli import main
from impala_llm.imitation import Imitation
from impala_llm.learning.checkpoints import writer
from impala_llm.learning.checkpoints.files import checkpoints, newest_whole
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.sft import STATE
from tests.helpers import make_tiny_model
from tests.test_sft import signal_handlers_kept, warm_start, words

pytestmark = pytest.mark.system

FEW = ("demonstrations.num_episodes=12", "sft.epochs=4")


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    with signal_handlers_kept():
        yield


def damage(checkpoint: Path) -> None:
    (checkpoint / "rank-0.safetensors").write_bytes(b"")


def test_a_damaged_checkpoint_does_not_cost_the_later_ones(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=4", "learner.checkpoint_every=2") / STATE
    newest, older = checkpoints(state)
    damage(newest)
    warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=3", "learner.checkpoints_kept=1")
    manifest, passed_over = newest_whole(state)
    assert manifest is not None and (manifest.update, passed_over) == (3, [])
    said = capsys.readouterr().out
    assert f"{newest.name}: rank-0.safetensors has 0 bytes" in said and f"stays as {newest.name}.damaged" in said
    assert f"going on from update 2, checkpoint {older}" in said


def test_a_warm_start_without_a_whole_checkpoint_is_refused_and_not_begun_anew(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=1") / STATE
    damage(checkpoints(state)[0])
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=2")]) == 2
    error = capsys.readouterr().err
    assert f"no checkpoint in {state} is whole (update-000001: rank-0.safetensors has 0 bytes" in error
    assert "set another sft.dir" in error and "Traceback" not in error
    assert [path.name for path in checkpoints(state)] == ["update-000001"]


def test_adapters_are_not_put_on_other_weights_than_those_that_they_were_learned_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`model.path` was trained further meanwhile, under the same name and of the same shape."""
    model, lora = make_tiny_model(tmp_path / "model"), "model.lora.rank=4"
    warm_start(tmp_path, model, *FEW, lora, "sft.max_updates=1")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.25
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert main(["sft", *words(tmp_path, model, *FEW, lora, "sft.max_updates=2")]) == 2
    said = capsys.readouterr().err
    assert f"holds a warm start with adapters of other weights than model.path={model} has now: " in said


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_update_that_could_not_be_saved_is_said_to_be_lost(
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_begun: bool,
) -> None:
    """Room for the policy, and none for the checkpoint."""
    if is_begun:
        warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=1")
    then = "goes on from update 1" if is_begun else "begins anew"
    step = Imitation.step

    def interrupted(self: Imitation, number: int, progress: float) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number, progress)

    monkeypatch.setattr(writer, "write_file", full)
    with monkeypatch.context() as patch:
        patch.setattr(Imitation, "step", interrupted)
        with pytest.raises(SystemExit):
            main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=3")])
    said = capsys.readouterr().out
    assert f"interrupted; update 2 could not be saved: the same command {then}; make room in sft.dir=" in said
    assert "is saved in" not in said.rpartition("going on")[2]
    warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=3")
    said = capsys.readouterr().out
    assert "the policy is saved in " in said
    assert f"sft: update 3 could not be saved: the same command {then}; make room in sft.dir=" in said


def test_a_policy_that_could_not_be_saved_either_is_not_promised(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "write_file", full)
    monkeypatch.setattr(PolicyExport, "save", full)
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=1")]) == 4
    said = capsys.readouterr().err
    assert (
        "the policy cannot be saved: " in said and "update 1 could not be saved: the same command begins anew" in said
    )
    assert "from the last checkpoint" not in said


def test_an_end_before_what_is_done_is_refused(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = warm_start(tmp_path, tiny_model, *FEW, "sft.max_updates=3")
    before = (folder / "config.yaml").read_text()
    assert main(["sft", *words(tmp_path, tiny_model, *FEW, "sft.max_updates=1")]) == 2
    said = capsys.readouterr().err
    assert "sft.max_updates=1" in said and "has learned in 3 updates already" in said
    assert (folder / "config.yaml").read_text() == before
