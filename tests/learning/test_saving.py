"""Saving at a rank: what is written where the disk, or whatever else, refuses a part of it."""

import dataclasses
import errno
import json
import os
import threading
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from impala_llm.config import ConfigError, load
from impala_llm.learner import Learner
from impala_llm.learning import saving as saving_module
from impala_llm.learning.checkpoints import writer as checkpoint
from impala_llm.learning.checkpoints.files import checkpoints, newest_whole, update_of
from impala_llm.learning.checkpoints.policy_folders import trained_update
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.learning.checkpoints.resume import Start
from impala_llm.learning.checkpoints.writer import Checkpointer
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.origin import Origin, make_model
from impala_llm.learning.policy.lora import adapter_tensors, add_adapters
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.model_files import model_checksum, policy_files
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.saving import RankParts, Saving, UpdateEnd
from impala_llm.pipeline import ActorEndpoint
from impala_llm.pipeline.shared_settings import shared_settings
from impala_llm.pipeline.shm.run_directory import find_run, remove_run_dir
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.messages import Grant
from impala_llm.settings import Config, LearnerConfig, LoraConfig
from tests.learning.builders import save_lm
from tests.pipeline.support import make_trajectory
from tests.two_ranks import Meeting, ThreadRanks

MOMENT = UpdateEnd(update=5, version=5, seconds=1.0)


def make_saving(
    folder: Path, lora_rank: int, ranks: Ranks | None = None, model: PolicyModel | None = None
) -> tuple[Saving, Checkpointer]:
    """Saving of a run without tickets."""
    ranks = ranks or Ranks("cpu")
    if model is None:
        model = PolicyModel.from_pretrained(save_lm(folder / "model"))
        add_adapters(model.lm, LoraConfig(rank=lora_rank))
    receiver = Mock(**{"rows.return_value": [], "held.return_value": {}})
    endpoint = Mock(receiver=receiver, run_dir=Mock(run_id=7))
    batches = Mock(**{"snapshot.return_value.buffer.trajectories": [], "state_dict.return_value": {}})
    publisher = Mock(export=PolicyExport(model, ranks))
    optimizer = Optimizer(model, LearnerConfig())
    checkpointer = Checkpointer(folder / "run", 2, ranks.rank, ranks.world_size)
    parts = RankParts(ranks, endpoint, model, optimizer, batches, publisher, {"tokenizer.json": b"{}"})
    return Saving(LearnerConfig(), checkpointer, parts, None), checkpointer


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def odd(*_: object) -> None:
    raise ValueError("this model cannot be written so")


@pytest.mark.parametrize("fails", [no_room, odd])
def test_a_checkpoint_has_no_half_written_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: object, capsys: pytest.CaptureFixture[str]
) -> None:
    saving, checkpointer = make_saving(tmp_path, lora_rank=2)
    with monkeypatch.context() as full:  # for the merged matrices, which are the most of it
        full.setattr(os, "posix_fallocate", fails)
        saving.save(saving.tickets(5), MOMENT)
        assert checkpointer.wait()
    manifest, passed_over = newest_whole(tmp_path / "run")
    assert manifest is not None and passed_over == []
    assert not (manifest.path / "policy").exists()
    assert not [name for name in manifest.files if name.startswith("policy")]
    said = capsys.readouterr().out
    assert "checkpoint update-000005 has no policy/, but the run can go on from it: " in said
    saving.save(saving.tickets(6), UpdateEnd(6, 6, 1.0))
    assert checkpointer.wait()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "update-000006" / "policy")


def test_all_files_of_a_checkpoint_are_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, checkpointer = make_saving(tmp_path, lora_rank=2)
    synced, rename, fsync = set(), Path.rename, os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.stat(descriptor).st_ino)
        fsync(descriptor)

    def check(path: Path, target: Path) -> Path:
        if path.name == "update-000005.new":
            assert [each for each in (path, *path.rglob("*")) if each.stat().st_ino not in synced] == []
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    saving.save(saving.tickets(5), MOMENT)
    assert checkpointer.wait()
    assert (tmp_path / "run" / "checkpoints" / "update-000005" / "policy" / "adapter").is_dir()


def test_a_policy_that_cannot_be_saved_amid_a_run_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saving, _ = make_saving(tmp_path, lora_rank=0)
    monkeypatch.setattr(PolicyModel, "save", odd)
    assert not saving.save_policy(tmp_path / "run" / "policy-5", 5)
    said = capsys.readouterr().out
    assert "policy of update 5 cannot be saved" in said and "this model cannot be written so" in said


@pytest.mark.parametrize(
    ("has_metrics", "onward"), [(True, "the same command goes on"), (False, "command with run.resume=true goes")]
)
def test_a_last_policy_that_cannot_be_saved_is_saved_by_the_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_metrics: bool, onward: str
) -> None:
    """Without metrics on the disk the same command alone would begin anew."""
    saving, _ = make_saving(tmp_path, lora_rank=0)
    if has_metrics:
        (tmp_path / "run" / "tensorboard").mkdir(parents=True)
        (tmp_path / "run" / "tensorboard" / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(PolicyModel, "save", no_room)
    assert not saving.save_last_policy(tmp_path / "run", MOMENT)
    assert onward in capsys.readouterr().out


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_saved_policy_says_of_which_update_it_is_and_one_that_learns_on_from_it_does_not(
    tmp_path: Path, lora_rank: int
) -> None:
    saving, _ = make_saving(tmp_path, lora_rank)
    assert saving.save_policy(tmp_path / "policy", 4)
    assert json.loads((tmp_path / "policy" / "training.json").read_text()) == {"update": 4}
    assert saving.save_policy(tmp_path / "policy", 78)
    assert trained_update(tmp_path / "policy") == 78
    assert "training.json" not in policy_files(tmp_path / "policy")


def test_the_last_checkpoint_is_written_again_where_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, checkpointer = make_saving(tmp_path, lora_rank=0)
    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write_file", no_room)
        saving.save(saving.tickets(5), MOMENT)
        assert not checkpointer.wait()
    saving.save_last(MOMENT)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["update-000005"]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """A disk that takes no weights of an export before it is told to: set when some have come; what tells it."""
    has_come, goes_on, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slowly(*words: int) -> None:
        has_come.set()
        assert goes_on.wait(30)
        allocate(*words)

    monkeypatch.setattr(os, "posix_fallocate", slowly)
    return has_come, goes_on


def test_a_checkpoint_that_finds_another_one_being_written_exports_nothing(
    tmp_path: Path, slow_disk: tuple[threading.Event, threading.Event]
) -> None:
    has_come, goes_on = slow_disk
    saving, checkpointer = make_saving(tmp_path, lora_rank=2)
    saving.save(saving.tickets(5), MOMENT)
    assert has_come.wait(30)
    saving.save(saving.tickets(6), UpdateEnd(6, 6, 1.0))
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    goes_on.set()
    assert checkpointer.wait() and left == ["update-000005.new"]


def test_no_rank_begins_a_checkpoint_while_another_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the policy beside its part, and is busy for longer."""
    meeting, goes_on, write_file = Meeting(), threading.Event(), checkpoint.write_file
    both = [make_saving(tmp_path, 0, ThreadRanks(rank, meeting)) for rank in range(2)]

    def write(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
        assert "rank-1" in path.name or goes_on.wait(30)
        return write_file(path, pieces)

    monkeypatch.setattr(checkpoint, "write_file", write)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each[0].save(each[0].tickets(5), MOMENT), both))
        assert both[1][1].wait(), "rank 1 has written its part"
        list(pool.map(lambda each: each[0].save(each[0].tickets(6), UpdateEnd(6, 6, 1.0)), both))
        assert not both[1][1].is_busy
        goes_on.set()
        assert list(pool.map(lambda each: each[1].wait(), both)) == [True, True]
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["update-000005"]


def test_a_stop_before_the_first_update_leaves_its_version_reserved(tmp_path: Path) -> None:
    """It was published: the run that begins again must not give its number to other weights."""
    saving, checkpointer = make_saving(tmp_path, 0)
    checkpointer.versions.reserve(0, ahead=0)
    assert not saving.save_last(UpdateEnd(0, 0, 0.1))
    assert checkpointer.versions.unused(0) > 0


def test_a_policy_with_adapters_learns_on_while_it_is_exported(
    tmp_path: Path, slow_disk: tuple[threading.Event, threading.Event]
) -> None:
    """The export, its adapters and the checkpoint are those of the update that has ended."""
    has_come, goes_on = slow_disk
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "model"))
    add_adapters(model.lm, LoraConfig(rank=2))
    adapters = adapter_tensors(model.lm)
    change = partial(torch.nn.init.normal_, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for tensor in adapters.values():
            change(tensor)
    saving, checkpointer = make_saving(tmp_path, 2, model=model)
    expected = {name: tensor.detach().clone() for name, tensor in adapters.items()}
    goes_on.set()
    PolicyExport(model, Ranks("cpu")).save(tmp_path / "expected", {"tokenizer.json": b"{}"})
    goes_on.clear(), has_come.clear()
    saving.save(saving.tickets(5), MOMENT)
    assert has_come.wait(30), "the learner goes on"
    saving.before_change()
    with torch.no_grad():
        for tensor in adapters.values():
            change(tensor)
    goes_on.set()
    assert checkpointer.wait()
    manifest, _ = newest_whole(tmp_path / "run")
    assert manifest is not None
    for path in sorted(path for path in (tmp_path / "expected").rglob("*") if path.is_file()):
        name = path.relative_to(tmp_path / "expected")
        assert (manifest.path / "policy" / name).read_bytes() == path.read_bytes(), name
    CheckpointReader(manifest).load_model(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapters.items())


@pytest.mark.parametrize(("version", "best"), [(4, ["update-000005"]), (6, [])])
def test_the_last_checkpoint_is_the_best_one_where_none_comes_after_the_best_policy(
    tmp_path: Path, version: int, best: list[str]
) -> None:
    """Its evaluation has ended after the last update, which had a checkpoint that was due."""
    saving, checkpointer = make_saving(tmp_path, lora_rank=0)
    saving.save(saving.tickets(5), MOMENT)
    assert checkpointer.wait()
    written = (tmp_path / "run" / "checkpoints" / "update-000005").stat()
    checkpointer.mark_best(version, update=version)
    assert saving.save_last(MOMENT)
    assert (tmp_path / "run" / "checkpoints" / "update-000005").stat().st_ino == written.st_ino, "not written again"
    assert [os.readlink(path) for path in (tmp_path / "run" / "checkpoints").glob("best")] == best


def test_the_last_checkpoint_of_two_ranks_is_written_again_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has failed; files that rank 1 has left would be read in place of those that it writes now."""
    meeting, has_failed = Meeting(), threading.Event()

    class LateRanks(ThreadRanks):
        def sum(self, numbers: Sequence[float], of_processes: bool = False) -> list[float]:
            found = super().sum(numbers, of_processes)
            assert self.rank == 0 or has_failed.wait(30)
            return found

    both = [make_saving(tmp_path, 0, LateRanks(rank, meeting)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as full:
            full.setattr(checkpoint, "write_file", no_room)
            first, second = (pool.submit(saving.save, saving.tickets(5), MOMENT) for saving, _ in both)
            first.result(30)
            assert not both[0][1].wait()
        has_failed.set()
        second.result(30)
        assert both[1][1].wait()
    left = tmp_path / "run" / "checkpoints" / "update-000005.new" / "rank-1.json"
    left.write_bytes(left.read_bytes().replace(b"rank-1.msgpack", b"rank-1.another"))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each[0].save_last(MOMENT), both))
    manifest, passed_over = newest_whole(tmp_path / "run")
    assert manifest is not None and (manifest.update, manifest.num_ranks, passed_over) == (5, 2, [])


@pytest.mark.parametrize("broken", [[(PolicyExport, "save")], [(PolicyExport, "save"), (VersionPublisher, "keep")]])
def test_the_last_checkpoint_is_written_where_the_policy_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: list[tuple[type, str]]
) -> None:
    """And cannot even be kept in shared memory."""
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"])
    config.run.terminal = False
    for kind, name in broken:
        monkeypatch.setattr(kind, name, odd)
    raised = None
    try:
        with ExitStack() as stack:
            learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
            learner.update = learner.version = 4
    except ValueError as error:
        raised = error
    assert (tmp_path / "checkpoints" / "update-000004" / "manifest.json").is_file()
    assert (raised is not None) == (len(broken) == 2) and learner.is_saved == (raised is not None)
    learner.endpoint.run_dir.remove()
    remove_run_dir(config.run.name)  # which it leaves where the policy was kept in it


def test_shared_memory_outlives_all_ends_until_policy_and_checkpoint_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, a signal to a learner that starts, a disk without room for the checkpoint; a run without an update has
    nothing to leave."""
    config = load(["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}"])
    config.run.terminal = False
    ranks, stops = Ranks("cpu"), Mock(number=0)
    with ExitStack() as stack:
        Learner(config, ranks, stack, Start(), stops)
    assert find_run(config.run.name) is None
    with pytest.raises(ValueError, match="cannot be written so"), ExitStack() as stack:
        learner = Learner(config, ranks, stack, Start(), stops)
        learner.saving.end_update()
        odd()
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as told, ExitStack() as stack:
        told.setattr(Learner, "make_writer", Mock(side_effect=KeyboardInterrupt))
        Learner(config, ranks, stack, Start(take_over=True), stops)
    with monkeypatch.context() as full, ExitStack() as stack:
        full.setattr(checkpoint, "write_file", no_room)
        learner = Learner(config, ranks, stack, Start(take_over=True), stops)
        learner.update = learner.version = 4
    assert learner.is_saved and find_run(config.run.name).run.run_id == learner.endpoint.run_dir.run_id
    with ExitStack() as stack:
        learner = Learner(config, ranks, stack, Start(take_over=True), stops)
        learner.update = learner.version = 4
    assert find_run(config.run.name) is None


def step(learner: Learner, actor: ActorChannel) -> None:
    """Play the tickets of an update, have the learner train on them, and wait for the checkpoint that it may begin."""
    num_played = 0
    while num_played < learner.config.learner.batch_size or actor.num_unacknowledged:
        for ticket in (each for event in actor.poll(1.0) if isinstance(event, Grant) for each in event.tickets):
            played = make_trajectory(ticket, version=learner.version)
            actor.send(dataclasses.replace(played, tokens=played.tokens % learner.model.vocab_size))
            num_played += 1
    assert learner.step()
    learner.checkpointer.wait()


def test_a_checkpoint_is_due_after_the_first_update_and_then_once_for_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is lost before `learner.checkpoint_minutes` are over has one already, and no update follows with a
    second one."""
    small = ["learner.batch_size=2", "algorithm.group_size=2", "model.scratch.hidden_size=16", "run.terminal=false"]
    often = ["learner.checkpoint_minutes=1", "learner.checkpoints_kept=100"]
    name = f"run.name=test-{uuid.uuid4().hex[:12]}"
    config = load(["experiment=toy", name, f"run.dir={tmp_path}", *small, *often])
    clock = Mock(**{"monotonic.return_value": 0.0})
    monkeypatch.setattr(saving_module, "time", clock)
    with ExitStack() as stack:
        learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
        actor = stack.enter_context(closing(ActorEndpoint(config, "actor-0").connect())).first
        actor.hello(shared_settings(config))
        actor.request(2)
        for _ in range(12):
            clock.monotonic.return_value += 15.0
            step(learner, actor)
        found = sorted(map(update_of, checkpoints(tmp_path)))
    assert found == [1, 6, 11]


# --- weights beside those that learn


def make_checkpoint(folder: Path, config: Config) -> CheckpointReader:
    """A checkpoint of a run with these settings."""
    model = make_model(config, Origin(0, 0, None, None, is_lost=False), Ranks("cpu"))
    saving, checkpointer = make_saving(folder, 0, model=model)
    saving.save(saving.tickets(5), MOMENT)
    assert checkpointer.wait()
    manifest, _ = newest_whole(folder / "run")
    assert manifest is not None
    return CheckpointReader(manifest)


def train_further(directory: Path) -> None:
    """Give a model other weights, under the same name and of the same shape."""
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.25
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("model.path", ["model.lora.rank=2"]),
        ("model.path", ["algorithm.kl_coef=0.1"]),
        ("model.path", ["algorithm.reward_kl_coef=0.1"]),
        ("model.path", ["algorithm=dpo"]),
        ("algorithm.reference", ["algorithm.kl_coef=0.1"]),
        ("algorithm.credit.teacher", ["algorithm.credit=distillation"]),
    ],
    ids=str,
)
def test_a_run_does_not_go_on_beside_other_weights_than_it_was_trained_with(
    tmp_path: Path, changed: str, words: list[str]
) -> None:
    """Those under its adapters, its reference, its teacher."""
    paths = {key: save_lm(tmp_path / key) for key in ("model.path", changed)}
    config = load(["engine.max_length=64", *words, *(f"{key}={path}" for key, path in paths.items())])
    checkpoint = make_checkpoint(tmp_path, config)
    origin = Origin(5, 5, None, checkpoint, is_lost=True)
    make_model(config, origin, Ranks("cpu"))
    train_further(paths[changed])
    said = f"{changed}={paths[changed]} has other weights .*: put .* model.path={checkpoint.manifest.path}/"
    with pytest.raises(ConfigError, match=said):
        make_model(config, origin, Ranks("cpu"))


def test_a_checkpoint_knows_the_model_that_its_run_began_with_wherever_it_lies(tmp_path: Path) -> None:
    """By a checksum; the weights under its adapters are compared also where they have moved."""
    start = save_lm(tmp_path / "model")
    words = ["model.lora.rank=2", "engine.max_length=64"]
    checkpoint = make_checkpoint(tmp_path, load([*words, f"model.path={start}"]))
    assert checkpoint.manifest.start == model_checksum(start)
    start.rename(tmp_path / "moved")
    config, origin = load([*words, f"model.path={tmp_path}/moved"]), Origin(5, 5, None, checkpoint, is_lost=True)
    make_model(config, origin, Ranks("cpu"))
    train_further(tmp_path / "moved")
    with pytest.raises(ConfigError, match="moved has other weights"):
        make_model(config, origin, Ranks("cpu"))


def test_a_run_goes_on_beside_other_weights_of_a_reference_that_it_no_longer_asks(tmp_path: Path) -> None:
    words = [f"model.path={save_lm(tmp_path / 'model')}", "engine.max_length=64"]
    reference = save_lm(tmp_path / "reference")
    config = load([*words, "algorithm.kl_coef=0.1", f"algorithm.reference={reference}"])
    checkpoint = make_checkpoint(tmp_path, config)
    train_further(reference)
    config.algorithm.kl_coef = 0.0
    make_model(config, Origin(5, 5, None, checkpoint, is_lost=True), Ranks("cpu"))
