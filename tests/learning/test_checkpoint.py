"""Checkpoints: what is written can be gone on from, what is not whole is passed over, and old ones go."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from impala_llm.learning.checkpoints import files as checkpoint_files
from impala_llm.learning.checkpoints import writer as checkpoint
from impala_llm.learning.checkpoints.files import (
    CheckpointError,
    CheckpointManifest,
    Part,
    VersionMark,
    best_of,
    checkpoints,
    newest_whole,
    read_manifest,
)
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.checkpoints.writer import (
    Checkpointer,
    RankState,
    load_random_state,
    random_state,
    tensors_of,
)
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.pipeline.shm.record import record_bytes
from impala_llm.settings import LearnerConfig
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS
from tests.learning.builders import VOCABULARY, make_trajectory, save_lm


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_lm(tmp_path / "model")


def make(policy: Path, architecture_seed: int = 0) -> tuple[PolicyModel, Optimizer]:
    torch.manual_seed(architecture_seed)
    model = PolicyModel.from_pretrained(policy, value_hidden_size=8, value_trunk_gradient=True)
    return model, Optimizer(model, LearnerConfig(value_warmup_updates=1, warmup_updates=0))


def take_step(model: PolicyModel, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (12,), generator=generator)
    hidden = model.hidden(tokens, torch.arange(12), torch.tensor([12]))
    log_probs, _ = model.action_log_probs(hidden[:-1], tokens[1:], 1.0)
    (model.values(hidden).square().mean() - log_probs.mean()).backward()
    optimizer.step(number, progress=0.0)


def make_state(update: int, model: PolicyModel, optimizer: Optimizer, policy: Path, **plain: Any) -> RankState:
    return RankState(
        update=update,
        version=update + 5,
        run_id=77,
        minutes_used=1.5,
        plain=plain,
        records={},
        tensors=tensors_of(model, optimizer, is_main=True),
        policy=dict(model.policy_weights()),
        files=model.config_files(policy_files(policy)),
    )


def write(folder: Path, policy: Path, *updates: int, num_kept: int = 9) -> Checkpointer:
    model, optimizer = make(policy)
    checkpointer = Checkpointer(folder, num_kept)
    for update in updates:
        assert checkpointer.save(make_state(update, model, optimizer, policy)) and checkpointer.wait()
    return checkpointer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("qwen3_moe", False)])
@pytest.mark.parametrize("num_before", [1, 3])
def test_training_goes_on_from_a_checkpoint_to_the_last_bit(
    tmp_path: Path, architecture: str, tied: bool, num_before: int
) -> None:
    """Also after the updates in which only the value head learns, when the policy has no moments yet."""
    policy = save_lm(tmp_path / "model", architecture, tied)
    model, optimizer = make(policy)
    for number in range(num_before):
        take_step(model, optimizer, number)
    checkpointer = Checkpointer(tmp_path / "run", 1)
    assert checkpointer.save(make_state(num_before, model, optimizer, policy))
    checkpointer.wait_until_copied()
    for number in range(num_before, 6):
        take_step(model, optimizer, number)
    assert checkpointer.wait()
    manifest, passed_over = newest_whole(tmp_path / "run")
    assert manifest is not None and passed_over == []
    assert (manifest.update, manifest.version, manifest.run_id, manifest.minutes_used) == (
        num_before,
        num_before + 5,
        77,
        1.5,
    )
    again, restored = make(policy, architecture_seed=1)
    reader = CheckpointReader(manifest)
    reader.load_model(again)
    reader.load_optimizer(restored)
    for number in range(num_before, 6):
        take_step(again, restored, number)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in model.state_dict().items()
    }


def test_the_export_is_a_plain_hugging_face_directory_and_no_tensor_is_written_twice(
    tmp_path: Path, policy: Path
) -> None:
    model, _ = make(policy)
    write(tmp_path, policy, 3)
    folder = tmp_path / "checkpoints" / "update-000003"
    plain = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert {n: t.tolist() for n, t in plain.state_dict().items()} == {
        n: t.tolist() for n, t in model.lm.state_dict().items()
    }
    exported, own = load_file(folder / "policy" / "model.safetensors"), load_file(folder / "rank-0.safetensors")
    assert not [name for name in own if name.startswith("model.lm.")] and exported
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {
        *(".json", ".safetensors", ".msgpack", ".records", ".txt", ".jinja", ".model")
    }


def test_what_is_no_tensor_comes_back_as_it_was(tmp_path: Path, policy: Path) -> None:
    model, optimizer = make(policy)
    trajectories = [make_trajectory(20 + n, [(3, 7)], seed=n) for n in range(3)]
    plain = {
        "numbers": [1, 2.5, None, True],
        "by id": {7: "seven"},
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
    }
    state = make_state(1, model, optimizer, policy, **plain, random=random_state())
    for number, t in enumerate(trajectories):
        state.records[number] = lambda t=t: record_bytes(t)
    checkpointer = Checkpointer(tmp_path, 1)
    expected = torch.rand(5)
    assert checkpointer.save(state) and checkpointer.wait()
    reader = CheckpointReader(read_manifest(tmp_path / "checkpoints" / "update-000001"))
    found = reader.plain(0)
    assert {name: found[name] for name in ("numbers", "by id")} == {name: plain[name] for name in ("numbers", "by id")}
    assert found["array"].dtype == np.int32 and found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    load_random_state(found["random"])
    assert torch.equal(torch.rand(5), expected)
    for shift in (0, 4):
        for number, t in reader.trajectories(0, shift).items():
            original = trajectories[number]
            assert all(getattr(t, name) == getattr(original, name) for name in METADATA_FIELDS)
            versions = original.versions + shift * original.action_mask
            assert (t.versions == versions).all()
            rest = set(ARRAY_FIELDS) - {"versions"}
            assert all((getattr(t, name) == getattr(original, name)).all() for name in rest)


def test_shares_of_any_number_of_ranks_are_read(tmp_path: Path, policy: Path) -> None:
    """A tensor whose rows lie in two files, as two ranks would have written them."""
    model, optimizer = make(policy)
    write(tmp_path, policy, 1)
    folder = tmp_path / "checkpoints" / "update-000001"
    manifest = read_manifest(folder)
    name = next(n for n in manifest.tensors if n.endswith("q_proj.weight.exp_avg"))
    moments = torch.arange(32.0 * 32.0).reshape(32, 32)
    tensors: dict[str, tuple[Part, ...]] = dict(manifest.tensors)
    parts = []
    for rank, (begin, end) in enumerate(((0, 20), (20, 32))):
        save_file({"share": moments[begin:end].contiguous()}, folder / f"share-{rank}.safetensors")
        parts.append(Part(f"share-{rank}.safetensors", "share", (begin, 0)))
    tensors[name] = tuple(parts)
    step = name.replace("exp_avg", "step")
    save_file({"step": torch.tensor(3.0)}, folder / "step.safetensors")
    tensors[step] = (Part("step.safetensors", "step", ()),)
    facts = (manifest.update, manifest.version, manifest.run_id, 2, manifest.minutes_used)
    CheckpointReader(CheckpointManifest(folder, *facts, manifest.files, tensors)).load_optimizer(optimizer)
    assert torch.equal(optimizer.state_dict()[name.removeprefix("optimizer.")], moments)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(tmp_path: Path, policy: Path) -> None:
    write(tmp_path, policy, 1)
    reader = CheckpointReader(read_manifest(tmp_path / "checkpoints" / "update-000001"))
    with pytest.raises(
        CheckpointError, match=r"update-000001 has .*value_head.* of shape \[8, 32\], this model of \[16"
    ):
        reader.load_model(PolicyModel.from_pretrained(policy, value_hidden_size=16))
    with pytest.raises(CheckpointError, match="update-000001 has no tensor model.lm.* of another model"):
        reader.load_model(PolicyModel.from_pretrained(save_lm(tmp_path / "other", "qwen2"), value_hidden_size=8))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda path: (path / "rank-0.msgpack").unlink(), "rank-0.msgpack is missing"),
        (lambda path: (path / "rank-0.records").write_bytes(b"1"), "rank-0.records has 1 bytes, not 0"),
        (
            lambda path: (path / "policy" / "model.safetensors").write_bytes(
                bytes((path / "policy" / "model.safetensors").stat().st_size)
            ),
            "policy/model.safetensors has another checksum",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    spoil: Any, said: str, tmp_path: Path, policy: Path
) -> None:
    write(tmp_path, policy, 9, 10)
    spoil(tmp_path / "checkpoints" / "update-000010")
    manifest, passed_over = newest_whole(tmp_path)
    assert manifest is not None and manifest.update == 9
    assert len(passed_over) == 1 and passed_over[0].startswith(f"update-000010: {said}")


def test_what_was_being_written_when_the_learner_died_is_named_and_removed(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, policy, 9)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "update-000009", folder / "update-000010.new")
    shutil.copytree(folder / "update-000009", folder / "update-000008.removed")  # amid the removal of an old one
    assert [path.name for path in checkpoints(tmp_path)] == ["update-000009"]
    Checkpointer(tmp_path, 2).begin()
    said = capsys.readouterr().out
    assert "checkpoint update-000010 is half-written" in said and "update-000008" not in said
    assert names(tmp_path) == ["update-000009"]


def test_a_checkpoint_stays_until_another_of_its_update_has_taken_its_name(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = write(tmp_path, policy, 9)
    model, optimizer = make(policy)
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if path.name == "update-000009.new":
            raise OSError(errno.EIO, "the process dies here")
        return rename(path, target)

    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", stop)
        assert checkpointer.save(make_state(9, model, optimizer, policy)) and not checkpointer.wait()
    found, passed_over = newest_whole(tmp_path)
    assert found is not None and (found.update, passed_over) == (9, [])
    Checkpointer(tmp_path, 2).begin()
    assert names(tmp_path) == ["update-000009"] and newest_whole(tmp_path)[0] is not None
    assert checkpointer.save(make_state(9, model, optimizer, policy)) and checkpointer.wait()
    assert names(tmp_path) == ["update-000009"]


def test_a_full_disk_keeps_the_old_one_and_says_so(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = write(tmp_path, policy, 1, 2, num_kept=1)
    model, optimizer = make(policy)

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(checkpoint_files.os, "fsync", fsync)
        assert checkpointer.save(make_state(3, model, optimizer, policy))
        assert not checkpointer.wait()
    said = capsys.readouterr().out
    assert f"checkpoint update-000003 cannot be written to {tmp_path}/checkpoints (No space left on device)" in said
    assert "update-000002 stays the newest" in said
    assert names(tmp_path) == ["update-000002"]
    assert checkpointer.save(make_state(4, model, optimizer, policy)) and checkpointer.wait()
    assert names(tmp_path) == ["update-000004"]


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path, policy: Path) -> None:
    checkpointer = write(tmp_path, policy, 1, 2, num_kept=2)
    assert best_of(tmp_path) is None
    checkpointer.mark_best(version=6, update=1)
    model, optimizer = make(policy)
    for update in (3, 4):
        assert checkpointer.save(make_state(update, model, optimizer, policy)) and checkpointer.wait()
    assert names(tmp_path) == ["best", "update-000001", "update-000003", "update-000004"]
    assert (tmp_path / "checkpoints" / "best" / "policy" / "config.json").is_file()
    assert not checkpointer.is_wanted
    checkpointer.mark_best(version=10, update=5)  # in no checkpoint: the next one counts
    assert checkpointer.is_wanted
    assert checkpointer.save(make_state(6, model, optimizer, policy)) and checkpointer.wait()
    assert not checkpointer.is_wanted and best_of(tmp_path) == "update-000006"
    assert names(tmp_path) == ["best", "update-000004", "update-000006"]


def test_a_checkpoint_of_before_the_best_version_is_not_marked(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(policy)
    checkpointer = Checkpointer(tmp_path, 2)

    def sync(path: Path) -> None:
        checkpointer.mark_best(version=10, update=5)  # while that of version 6 is being written

    with monkeypatch.context() as amid:
        amid.setattr(checkpoint, "sync", sync)
        assert checkpointer.save(make_state(1, model, optimizer, policy)) and checkpointer.wait()
    assert best_of(tmp_path) is None and checkpointer.is_wanted
    assert checkpointer.save(make_state(6, model, optimizer, policy)) and checkpointer.wait()
    assert best_of(tmp_path) == "update-000006" and not checkpointer.is_wanted


def test_two_ranks_write_one_checkpoint(tmp_path: Path, policy: Path) -> None:
    model, optimizer = make(policy)
    ranks = [Checkpointer(tmp_path, 1, rank, 2) for rank in range(2)]
    states = [make_state(1, model, optimizer, policy, rank=0)]
    states.append(RankState(1, 6, 77, 1.5, {"rank": 1}, {}, {}))
    for rank, state in zip(ranks, states, strict=True):
        assert rank.save(state)
    assert all([rank.wait() for rank in ranks])
    manifest, _ = newest_whole(tmp_path)
    assert manifest is not None and manifest.num_ranks == 2
    reader = CheckpointReader(manifest)
    assert [reader.plain(rank)["rank"] for rank in range(2)] == [0, 1]
    reader.load_model(make(policy)[0])


def test_checkpoints_can_be_switched_off(tmp_path: Path, policy: Path) -> None:
    checkpointer = Checkpointer(tmp_path, 0)
    model, optimizer = make(policy)
    assert not checkpointer.save(make_state(1, model, optimizer, policy))
    checkpointer.wait_until_copied()
    assert not (tmp_path / "checkpoints").exists()


def test_no_version_is_used_twice(tmp_path: Path) -> None:
    """Whoever goes on from an old checkpoint begins above all that the dead learner may have published."""
    mark = VersionMark(tmp_path)
    assert mark.unused(7) == 7 + 256 + 1, "of a run that has a checkpoint a lost note says nothing"
    published = []
    for version in range(1000):
        mark.reserve(version, ahead=0)
        published.append(version)
    again = VersionMark(tmp_path)
    assert again.unused(600) > max(published)
    first = again.unused(600)
    again.reserve(first, ahead=first - 600)
    assert VersionMark(tmp_path).ahead == first - 600
    again.end(first + 3)
    assert VersionMark(tmp_path).unused(first + 3) == first + 3, "a run that has ended in order goes on without a gap"


SMALL_DISK = 'mount -t tmpfs -o size=64k tmpfs "$0" && exec "$@"'
ON_A_FULL_DISK = """
import sys
from pathlib import Path
from impala_llm.learning.checkpoints.files import VersionMark
folder = Path(sys.argv[1])
VersionMark(folder).reserve(0, 0)
with (folder / "all of the room").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
mark = VersionMark(folder)
for version in range(1000):
    mark.reserve(version, 0)
print(VersionMark(folder).unused(7))
"""


def test_versions_are_reserved_on_a_disk_that_has_become_full(tmp_path: Path) -> None:
    prefix = ["unshare", "--mount", "sh", "-c", SMALL_DISK, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no right to mount here")
    command = [*prefix, sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 999 and ended.stderr == ""


def test_versions_that_cannot_be_reserved_are_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").touch()  # a file, where the folder should be
    mark = VersionMark(tmp_path / "checkpoints")
    for version in range(3):
        mark.reserve(version, 0)
    (said,) = caplog.messages
    assert "training goes on" in said and "versions above -1 may be used twice" in said


def test_a_run_that_goes_on_from_a_checkpoint_alone_has_another_life(tmp_path: Path) -> None:
    assert VersionMark(tmp_path).life is None
    VersionMark(tmp_path).reserve(3, ahead=0)
    assert VersionMark(tmp_path).life == 0
    mark = VersionMark(tmp_path)
    mark.begin_life()
    mark.reserve(mark.unused(2), ahead=5)
    mark.end(500)
    assert (VersionMark(tmp_path).life, VersionMark(tmp_path).reserved, VersionMark(tmp_path).ahead) == (1, 500, 5)


def test_a_full_disk_does_not_end_a_run_for_its_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    mark = VersionMark(tmp_path / "file")
    mark.reserve(3, ahead=0)
    assert "the versions of the run cannot be noted" in caplog.text and mark.reserved == -1


def test_manifests_say_what_they_are(tmp_path: Path, policy: Path) -> None:
    write(tmp_path, policy, 12)
    values = json.loads((tmp_path / "checkpoints" / "update-000012" / "manifest.json").read_text())
    assert (values["format"], values["update"], values["num_ranks"]) == (2, 12, 1)
    (tmp_path / "checkpoints" / "update-000012" / "manifest.json").write_text(json.dumps(values | {"format": 1}))
    with pytest.raises(CheckpointError, match="format 1, of another release, .* reads 2: go on with that release"):
        read_manifest(tmp_path / "checkpoints" / "update-000012")


@pytest.mark.parametrize("name", ["update", "version", "run_id", "num_ranks"])
def test_a_manifest_with_another_number_than_was_written_is_damaged(tmp_path: Path, policy: Path, name: str) -> None:
    write(tmp_path, policy, 12)
    folder = tmp_path / "checkpoints" / "update-000012"
    text = (folder / "manifest.json").read_text()
    number = json.loads(text)[name]
    (folder / "manifest.json").write_text(text.replace(f'"{name}": {number}', f'"{name}": {number + 100}', 1))
    with pytest.raises(CheckpointError, match="manifest.json has another checksum"):
        read_manifest(folder)


def test_a_manifest_in_the_folder_of_another_update_is_damaged(tmp_path: Path, policy: Path) -> None:
    write(tmp_path, policy, 12)
    folder = tmp_path / "checkpoints" / "update-000012"
    folder.rename(folder.with_name("update-000013"))
    with pytest.raises(CheckpointError, match="manifest.json is of update 12"):
        read_manifest(folder.with_name("update-000013"))


def test_the_note_of_versions_is_on_the_disk_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.add((path, (tmp_path / "versions.json").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    VersionMark(tmp_path).reserve(0, ahead=0)
    assert (str(tmp_path), True) in synced
