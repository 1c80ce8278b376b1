"""The state that a learner goes on from, by what its run has left on the disk and in shared memory."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from impala_llm.config import load
from impala_llm.learning.checkpoints.files import (
    CheckpointError,
    CheckpointManifest,
    VersionMark,
    checksum,
    manifest_bytes,
    name_of,
    newest_whole,
    retire_old,
)
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.origin import Origin, find_origin, make_model
from impala_llm.learning.packing import OutOfMemory
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from tests.learning.builders import save_lm
from tests.learning.test_saving import MOMENT, make_saving


def make_checkpoint(run_folder: Path, update: int, version: int | None = None) -> Path:
    """A checkpoint with one file besides its manifest."""
    folder = run_folder / "checkpoints" / name_of(update)
    folder.mkdir(parents=True)
    (folder / "rank-0.records").write_bytes(b"records")
    found = checksum(folder / "rank-0.records")
    assert found is not None
    version = update if version is None else version
    manifest = CheckpointManifest(folder, update, version, 77, 1, 0.0, {"rank-0.records": found}, {})
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest))
    return folder


def damage(folder: Path) -> None:
    (folder / "rank-0.records").write_bytes(b"recordz")


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_not_begun_anew(tmp_path: Path) -> None:
    for update in (10, 20):
        damage(make_checkpoint(tmp_path, update))
    with pytest.raises(CheckpointError, match=r"is whole \(update-000020, update-000010\), .*: restore the files"):
        find_origin(tmp_path, None, VersionMark(tmp_path / "checkpoints"), Ranks("cpu"))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["update-000010", "update-000020"]


def test_a_run_without_a_checkpoint_begins(tmp_path: Path) -> None:
    origin = find_origin(tmp_path, None, VersionMark(tmp_path / "checkpoints"), Ranks("cpu"))
    assert (origin.update, origin.version, origin.checkpoint) == (0, 0, None)


def test_a_run_that_begins_again_uses_no_version_twice(tmp_path: Path) -> None:
    """Its host was lost before the first checkpoint, and again."""
    folder, found = tmp_path / "checkpoints", []
    for _ in range(3):
        versions = VersionMark(folder)
        origin = find_origin(tmp_path, None, versions, Ranks("cpu"))
        assert (origin.update, origin.checkpoint, origin.begins) == (0, None, True)
        versions.reserve(origin.version, ahead=origin.version)
        found.append((origin.version, versions.reserved))
    assert found == [(0, 256), (257, 513), (514, 770)]


@pytest.mark.parametrize("is_noted", [True, False])
def test_versions_that_are_ahead_of_updates_stay_so_where_their_note_is_lost(tmp_path: Path, is_noted: bool) -> None:
    make_checkpoint(tmp_path, 95, version=257)
    versions = VersionMark(tmp_path / "checkpoints")
    if is_noted:
        versions.reserve(300, ahead=162)
    board = Mock(spec=WeightReader, **{"latest.return_value": 300})
    origin = find_origin(tmp_path, board, versions, Ranks("cpu"))
    assert (origin.version, origin.update, origin.is_lost) == (300, 138, False)


@pytest.mark.parametrize("content", [None, bytes(128), b'{"reserved": '])
def test_no_version_is_used_twice_where_their_note_is_lost_with_the_host(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    make_checkpoint(tmp_path, 432)
    VersionMark(folder).reserve(432, ahead=0)
    last = VersionMark(folder).reserved
    if content is None:
        (folder / "versions.json").unlink()
    else:
        (folder / "versions.json").write_bytes(content)
    origin = find_origin(tmp_path, None, VersionMark(folder), Ranks("cpu"))
    assert (origin.update, origin.version) == (432, last + 1)
    said = capsys.readouterr().out
    assert f"{folder}/versions.json is missing or damaged" in said and f"as version {last + 1}" in said


def test_a_checkpoint_under_the_number_of_another_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, 120)
    make_checkpoint(tmp_path, 140).rename(tmp_path / "checkpoints" / name_of(240))
    origin = find_origin(tmp_path, None, VersionMark(tmp_path / "checkpoints"), Ranks("cpu"))
    assert origin.update == 120
    assert "checkpoint update-000240: manifest.json is of update 140: it is passed over" in capsys.readouterr().out


@pytest.mark.parametrize(("fitted", "asked", "fix"), [(0, "32", "0"), (8, "null", "8"), (8, "0", "8")])
def test_a_fitted_value_head_of_another_width_is_not_dropped_in_silence(
    tmp_path: Path, fitted: int, asked: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    PolicyModel.from_pretrained(save_lm(tmp_path / "start"), fitted).save(tmp_path / "warm")
    settings = [f"model.path={tmp_path / 'warm'}", "engine.max_length=64"]
    origin = Origin(0, 0, None, None, is_lost=False)
    make_model(load([*settings, f"model.value_hidden_size={asked}"]), origin, Ranks("cpu"))
    said = capsys.readouterr().out
    assert f"model.value_hidden_size={asked}: " in said and f"set model.value_hidden_size={fix} to keep it" in said
    make_model(load([*settings, f"model.value_hidden_size={fix}"]), origin, Ranks("cpu"))
    assert "value_hidden_size" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], r"learner.sharding=fsdp2 with more ranks \(there also learner.cpu_offload=true\)"),
        (["learner.tensor_parallel=2"], "set learner.sharding=fsdp2 and learner.tensor_parallel=1 with more ranks .*"),
        (["learner.sharding=fsdp2"], "learner.cpu_offload=true or more than learner.num_ranks=1"),
        (["learner.sharding=fsdp2", "learner.cpu_offload=true"], "set more than learner.num_ranks=1"),
    ],
)
def test_a_device_that_does_not_hold_the_policy_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], fix: str
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(PolicyModel, "to", full)
    config = load([f"model.path={save_lm(tmp_path)}", "engine.max_length=64", *words])
    said = f"memory does not suffice for model.path={tmp_path} on cpu: .*{fix}, or take a smaller model"
    with pytest.raises(OutOfMemory, match=said):
        make_model(config, Origin(0, 0, None, None, is_lost=False), Ranks("cpu"))


def test_the_default_value_head_of_the_default_policy_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    make_model(load([]), Origin(0, 0, None, None, is_lost=False), Ranks("cpu"))
    assert "value_hidden_size" not in capsys.readouterr().out


def test_a_damaged_checkpoint_takes_no_place_among_those_that_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    make_checkpoint(tmp_path, 5)
    damage(make_checkpoint(tmp_path, 200))
    (folder / "best").symlink_to("update-000200")
    for _ in range(2):
        origin = find_origin(tmp_path, None, VersionMark(folder), Ranks("cpu"))
        assert origin.update == 5
    said = capsys.readouterr().out
    assert said.count("it is passed over, and stays as update-000200.damaged") == 1
    for update in (10, 20):
        make_checkpoint(tmp_path, update)
        for path in retire_old(tmp_path, 1)[0]:
            shutil.rmtree(path)
        assert {path.name for path in folder.iterdir()} == {name_of(update), "update-000200.damaged"}


@pytest.mark.parametrize("now", ["engine", "float32"])
def test_weights_that_are_rounded_on_the_board_come_from_a_checkpoint_of_the_same_version(
    tmp_path: Path, now: str
) -> None:
    """Also where `pipeline.weights_dtype` was set to float32 since, as the message on rounded weights advises."""
    start = save_lm(tmp_path / "model")
    model = PolicyModel.from_pretrained(start, None, True)
    with torch.no_grad():
        for p in model.lm.parameters():
            p.mul_(1.01)
    boards = [WeightPublisher(tmp_path / name, 2, policy_files(start)) for name in ("board", "kept")]
    VersionPublisher(Ranks("cpu"), model, *boards, interval=1, max_staleness=2, dtype=torch.bfloat16).begin(5)
    saving, checkpointer = make_saving(tmp_path, 0, model=model)
    saving.save(saving.tickets(5), MOMENT)
    assert checkpointer.wait()
    manifest, _ = newest_whole(tmp_path / "run")
    assert manifest is not None
    settings = [f"model.path={start}", "engine.max_length=64", "engine.dtype=bfloat16", f"pipeline.weights_dtype={now}"]
    origin = Origin(5, 5, WeightReader(tmp_path / "board"), CheckpointReader(manifest), is_lost=False)
    found = make_model(load(settings), origin, Ranks("cpu"))
    for (name, mine), expected in zip(found.lm.named_parameters(), model.lm.parameters(), strict=True):
        assert torch.equal(mine, expected), name


def test_trajectories_of_a_checkpoint_are_read_only_where_shared_memory_is_lost(tmp_path: Path) -> None:
    """Else they lie there, and what the checkpoint has of them is not needed."""
    saving, checkpointer = make_saving(tmp_path, 0)
    saving.save(saving.tickets(5), MOMENT)
    assert checkpointer.wait()
    manifest, _ = newest_whole(tmp_path / "run")
    assert manifest is not None
    (manifest.path / "rank-0.records").unlink()
    past = Origin(5, 5, None, CheckpointReader(manifest), is_lost=False).past(Ranks("cpu"))
    assert past is not None and past.plain["states"] == {}
    with pytest.raises(CheckpointError, match="rank-0.records"):
        Origin(5, 5, None, CheckpointReader(manifest), is_lost=True).past(Ranks("cpu"))
