"""Publishing of weights: versions that go to engines, are kept or wait, and the ways they take."""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.tensor_writing import TensorPart
from impala_llm.processes.stop_signals import Stopped
from tests.learning.builders import save_lm


@dataclass
class Receiver:
    """The part of a receiver that a publisher asks and tells."""

    needs_any: bool = False
    is_crowded: bool = False
    announced: list[tuple[int, bool, bool]] = field(default_factory=list)
    """(version, published, kept)."""
    early: list[int] = field(default_factory=list)

    def needs_weights(self) -> bool:
        return self.needs_any

    def must_keep(self) -> bool:
        return self.is_crowded

    def announce(self, version: int, published: bool, kept: bool) -> None:
        self.announced.append((version, published, kept))

    def announce_late(self, version: int) -> None:
        self.early.append(version)


class Learner:
    """A rank with a publisher on boards of two slots: while version 0 is read, version 2 finds no slot."""

    def __init__(
        self,
        path: Path,
        interval: int | None = 1,
        max_staleness: int | None = 2,
        version: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        policy = path / "policy"
        self.model = PolicyModel.from_pretrained(policy if policy.exists() else save_lm(policy))
        self.receiver = Receiver()
        self.is_signalled = False
        self.sent: list[int] = []
        """By a way beside the board."""
        boards = [WeightPublisher(path / name, num_slots=2) for name in ("board", "kept")]
        self.publisher = VersionPublisher(
            ranks or Ranks("cpu"), self.model, *boards, interval, max_staleness, timeout_s=0.01
        )
        self.publisher.begin(version)
        self.publisher.transports.append(self.send)
        self.board, self.kept = WeightReader(path / "board"), WeightReader(path / "kept")

    def send(self, model: PolicyModel, version: int) -> dict[str, float]:
        assert model is self.model and self.board.latest() == version
        self.sent.append(version)
        return {"weights/servers_sent": 1.0}

    def publish(self, version: int) -> dict[str, float]:
        metrics = self.publisher.publish(version, self.receiver)
        assert metrics.pop("weights/publish_s") > 0.0
        return metrics

    def publish_early(self, version: int) -> dict[str, float]:
        return self.publisher.publish_early(version, self.receiver, lambda: self.is_signalled)

    def wait_for_ranks(self, version: int) -> dict[str, float]:
        return self.publisher.wait_for_ranks(version, self.receiver, lambda: self.is_signalled)


PUBLISHED = {"weights/skipped": 0.0, "weights/servers_sent": 1.0}
SKIPPED = {"weights/skipped": 1.0}


def test_a_version_is_skipped_while_a_reader_holds_on_and_the_reader_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(tmp_path)
    assert learner.publish(1) == PUBLISHED
    with learner.board.lease(0), caplog.at_level(logging.WARNING):
        assert learner.publish(2) == SKIPPED
        assert learner.publish(3) == SKIPPED
        assert learner.board.latest() == 1
    assert f"2 is skipped: all 2 slots of {tmp_path / 'board'}" in caplog.text
    assert f"process {os.getpid()} (" in caplog.text
    assert learner.publish(4) == PUBLISHED
    assert learner.board.latest() == 4 and learner.sent == [1, 4]
    assert learner.receiver.announced == [(version, version in (1, 4), False) for version in (1, 2, 3, 4)]


def test_a_version_without_which_no_batch_would_come_waits_for_the_reader(tmp_path: Path) -> None:
    learner = Learner(tmp_path, max_staleness=0)
    assert learner.publish(1) == PUBLISHED
    done = threading.Event()

    def publish() -> None:
        assert learner.publish(2) == PUBLISHED
        done.set()

    with learner.board.lease(0):
        thread = threading.Thread(target=publish)
        thread.start()
        assert not done.wait(0.1)
        assert learner.board.latest() == 1
    assert done.wait(20)
    thread.join()
    assert learner.board.latest() == 2


class Meetings(Ranks):
    """Lets a test wait for each sum over ranks, and play the others in it."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__("cpu")
        self.rank = self.process = rank
        self.held = threading.Semaphore(0)
        self.totals: list[list[float]] = []
        """Results of the next sums, where they are not this rank's numbers."""

    def sum(self, numbers: Sequence[float], of_processes: bool = False) -> list[float]:
        self.held.release()
        return self.totals.pop(0) if self.totals else list(numbers)


def test_ranks_meet_again_and_again_while_a_version_waits(tmp_path: Path) -> None:
    ranks = Meetings()
    learner = Learner(tmp_path, max_staleness=0, ranks=ranks)
    learner.publish(1)
    while ranks.held.acquire(blocking=False):
        pass
    with learner.board.lease(0):
        thread = threading.Thread(target=learner.publish, args=(2,))
        thread.start()
        assert all(ranks.held.acquire(timeout=20) for _ in range(3))
        assert learner.receiver.announced == [(1, True, False)]
    thread.join()
    assert learner.receiver.announced == [(1, True, False), (2, True, False)]


def test_a_rank_announces_what_rank_0_has_published_after_waiting(tmp_path: Path) -> None:
    Learner(tmp_path)
    ranks = Meetings(rank=1)
    learner = Learner(tmp_path, max_staleness=0, ranks=ranks)
    ranks.totals = [[1.0], [1.0], [0.0], [1.0, 0.0]]
    assert learner.publish(1) == {}
    assert ranks.totals == [] and learner.sent == []
    assert learner.receiver.announced == [(1, True, False)]


def test_only_every_so_manyth_version_is_due_and_none_offline(tmp_path: Path) -> None:
    third = Learner(tmp_path / "third", interval=3)
    assert [third.publish(version) for version in range(1, 8)] == [{}, {}, PUBLISHED, {}, {}, PUBLISHED, {}]
    offline = Learner(tmp_path / "offline", interval=None, max_staleness=None)
    assert [offline.publish(version) for version in (1, 2)] == [{}, {}]
    assert offline.sent == []


def test_a_learner_that_is_started_again_does_not_wait_for_a_version_that_is_there(tmp_path: Path) -> None:
    first = Learner(tmp_path)
    first.publish(1)
    with first.board.lease(0):
        second = Learner(tmp_path, max_staleness=0, version=1)
    assert second.publish(2) == PUBLISHED


@pytest.mark.parametrize("interval", [None, 4])
def test_what_is_kept_is_for_learners_alone(tmp_path: Path, interval: int | None) -> None:
    learner = Learner(tmp_path, interval, max_staleness=None)
    learner.receiver.is_crowded = True
    assert learner.publish(2) == {} and learner.sent == []
    assert (learner.board.latest(), learner.kept.latest()) == (0, 2)
    assert learner.receiver.announced == [(2, False, True)]
    resumed = Learner(tmp_path, interval, None, version=2)
    assert resumed.board.latest() == (0 if interval is None else 2)


def test_what_is_published_is_not_kept_too(tmp_path: Path) -> None:
    learner = Learner(tmp_path, interval=2)
    learner.receiver.is_crowded = True
    assert [learner.publish(version) for version in (1, 2)] == [{}, PUBLISHED]
    assert (learner.board.latest(), learner.kept.latest()) == (2, 1)
    assert learner.receiver.announced == [(1, False, True), (2, True, True)]


def test_a_version_without_which_nothing_comes_goes_over_all_ways_before_it_is_due(tmp_path: Path) -> None:
    learner = Learner(tmp_path, interval=3)
    assert learner.publish(1) == learner.publish_early(1) == {}, "a batch may come without it"
    learner.receiver.needs_any = True
    assert learner.publish_early(1) == {"weights/servers_sent": 1.0}
    assert (learner.board.latest(), learner.sent, learner.receiver.early) == (1, [1], [1])
    assert [learner.publish(version) for version in (2, 3, 4)] == [{}, PUBLISHED, {}]
    with learner.board.lease(1):
        assert learner.publish_early(4) == {}, "its two slots are the latest one, and one that is being read"
    assert learner.receiver.early == [1]
    assert learner.publish_early(4) == {"weights/servers_sent": 1.0}
    assert (learner.sent, learner.receiver.early) == ([1, 3, 4], [1, 4])


def test_the_last_version_is_published_once_also_where_it_is_not_due(tmp_path: Path) -> None:
    """For the evaluation at the end of the run; unless readers hold all slots."""
    learner = Learner(tmp_path, interval=3)
    learner.publish(1)
    for _ in range(2):
        learner.publisher.publish_last(1, learner.receiver)
        assert (learner.board.latest(), learner.sent) == (1, [1]) and set(learner.receiver.early) == {1}
    with learner.board.lease(0):
        learner.publisher.publish_last(2, learner.receiver)
    assert (learner.board.latest(), learner.sent) == (1, [1]) and set(learner.receiver.early) == {1}


def test_a_version_that_another_rank_has_published_is_announced_and_not_sent_again(tmp_path: Path) -> None:
    first, second = Learner(tmp_path, interval=3), Learner(tmp_path, interval=3)
    for rank in (first, second):
        rank.publish(1)
        rank.receiver.needs_any = True
        rank.publish_early(1)
    assert (first.sent, first.receiver.early) == ([1], [1])
    assert (second.sent, second.receiver.early) == ([], [1])


def test_rank_0_sends_over_all_ways_what_another_rank_waits_for(tmp_path: Path) -> None:
    ranks = Meetings()
    ranks.world_size = ranks.num_processes = 2
    learner = Learner(tmp_path, interval=3, ranks=ranks)
    learner.publish(1)
    # It has a batch and the other one waits for version 1; nobody waits for a reader; it is sent; both have a batch.
    ranks.totals = [[1.0, 1.0, 0.0, 0.0], [0.0], [1.0], [2.0, 0.0, 1.0, 0.0]]
    assert learner.wait_for_ranks(1) == {"weights/servers_sent": 1.0}
    assert (ranks.totals, learner.board.latest(), learner.sent, learner.receiver.early) == ([], 1, [1], [])


def test_a_signal_to_any_process_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    ranks = Meetings()
    learner = Learner(tmp_path, interval=3, ranks=ranks)
    learner.publish(1)
    assert learner.publish_early(1) == {}
    ranks.totals = [[0.0, 0.0, 0.0, 1.0]]  # another's
    with pytest.raises(Stopped):
        learner.publish_early(1)
    learner.is_signalled = True
    learner.receiver.needs_any = True
    with pytest.raises(Stopped):
        learner.publish_early(1)
    assert (learner.board.latest(), learner.sent) == (0, []), "one that is to end sends no version first"
    assert learner.wait_for_ranks(1) == {}, "it meets the others until they know"


@pytest.mark.parametrize("interval", [None, 4])
def test_the_room_of_what_may_be_kept_is_reserved_at_the_start(tmp_path: Path, interval: int | None) -> None:
    Learner(tmp_path, interval, max_staleness=None)
    sizes = {path.stat().st_size for path in tmp_path.glob("*/slot-*/model.safetensors")}
    assert len(list(tmp_path.glob("kept/slot-*/model.safetensors"))) == 2 and len(sizes) == 1


def test_each_version_comes_with_its_value_head(tmp_path: Path) -> None:
    learner = Learner(tmp_path, interval=2)
    bias = learner.model.value_head[-1].bias
    learner.receiver.is_crowded = True
    heads = {}
    for version in (2, 3):
        torch.nn.init.constant_(bias, float(version))
        learner.publish(version)
        heads[version] = bias.tolist()
    for reader, version in ((learner.board, 2), (learner.kept, 3)):
        with reader.lease() as lease:
            assert lease.version == version
            model = PolicyModel.from_pretrained(tmp_path / "policy")
            assert model.load_value_head(lease.extra()) and model.value_head[-1].bias.tolist() == heads[version]
            assert sorted(path.name for path in lease.path.iterdir()) == ["model.safetensors"], "what engines read"
            head = lease.extra()
    assert not PolicyModel.from_pretrained(tmp_path / "policy", value_hidden_size=8).load_value_head(head)


def test_a_number_without_dimensions_is_rank_0s_to_write(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "policy"))
    model.lm.register_buffer("scale", torch.tensor(2.0))
    for number in (0, 1):
        ranks = Ranks("cpu")
        ranks.rank = ranks.process = number
        ranks.is_sharded = True
        name, shape, part = PolicyExport(model, ranks).tensors()["scale"]
        assert isinstance(part, TensorPart) and (name, shape, part.num_bytes) == ("F32", (), 4 * (number == 0))


def test_engines_get_the_weights_in_their_type(tmp_path: Path) -> None:
    """A version on the board holds the policy converted; the one that is kept for the learner is not converted."""
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "policy"))
    boards = [WeightPublisher(tmp_path / name, num_slots=2) for name in ("board", "kept")]
    publisher = VersionPublisher(Ranks("cpu"), model, *boards, interval=1, max_staleness=2, dtype=torch.bfloat16)
    publisher.begin(0)
    with torch.no_grad():
        for p in model.lm.parameters():
            p.mul_(1.01)
    publisher.publish(1, Receiver())
    publisher.keep(2)
    expected = {name: tensor.clone() for name, tensor in model.policy_weights()}
    for name, dtype in (("board", torch.bfloat16), ("kept", torch.float32)):
        with WeightReader(tmp_path / name).lease() as lease:
            lease.tensors(verify=True)
            found = load_file(lease.path / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor.to(dtype)) for key, tensor in expected.items())
