"""An actor's name belongs to the key that it first came with, on the real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from impala_llm.pipeline.network.keys import load_actor_keys, load_learner_keys, make_keys
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.messages import Shutdown
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits
from tests.pipeline.support import VOCAB_SIZE, turns_until

ARENA_BYTES = 1 << 16


class Host:
    """A learner with keys, and actors that come over tcp with the key of a name, or (None) from its own host."""

    def __init__(self, run_dir: RunDirectory, folder: Path) -> None:
        make_keys(folder, ["a", "b"])
        self.run_dir, self.folder = run_dir, folder
        self.receiver = Receiver(
            Endpoints(run_dir.endpoint(0), "tcp://127.0.0.1:*", load_learner_keys(folder)),
            TicketLedger(TaskOrder(range(50), seed=1), 4, 1, max_open=64),
            RecordLimits(VOCAB_SIZE),
            run_dir,
            TrajectoryStore(run_dir.replay_path(), 1 << 20, max_records=64),
        )
        self.receiver.start()

    @contextmanager
    def actor(self, actor_id: str, key: str | None) -> Iterator[ActorChannel]:
        here, there = self.receiver.endpoints
        where = (here, actor_id, self.run_dir, ARENA_BYTES, None)
        if key is not None:
            where = (there, actor_id, None, ARENA_BYTES, load_actor_keys(self.folder, key))
        channel = ActorChannel(*where, times=ChannelTimes(0.05))
        channel.hello()
        channel.request(1)
        try:
            yield channel
        finally:
            channel.close()


@pytest.fixture
def host(run_dir: RunDirectory, tmp_path: Path) -> Iterator[Host]:
    host = Host(run_dir, tmp_path / "keys")
    yield host
    host.receiver.close()


@pytest.mark.parametrize("first, second", [("a", "b"), ("a", None), (None, "a")])
def test_a_name_that_another_key_came_with_is_not_to_be_had(host: Host, first: str | None, second: str | None) -> None:
    """Not even once its owner has gone; and its owner gets it back."""
    with host.actor("actor-0", first) as owner:
        turns_until(lambda: len(owner.held) == 1, owner)
    for _ in range(2):
        with host.actor("actor-0", second) as other:
            events = turns_until(lambda: host.receiver.counters()["actors"] == 0, other)
            while not (said := [event for event in events if isinstance(event, Shutdown)]):
                events = other.poll(0.1)
            assert "actor-0 belongs to" in said[0].reason and "an index of its own" in said[0].reason
            assert not other.held
        with host.actor("actor-0", first) as owner:
            turns_until(lambda: len(owner.held) == 1, owner)


def test_one_key_serves_actors_of_many_names(host: Host) -> None:
    with host.actor("actor-0", "a") as one, host.actor("actor-1", "a") as two, host.actor("actor-2", None) as three:
        turns_until(lambda: all(len(actor.held) == 1 for actor in (one, two, three)), one, two, three)


def test_an_actor_whose_key_is_not_authorised_logs_once_what_to_do(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    key = load_actor_keys(host.folder, "b").public.decode()
    authorised = host.folder / "authorised" / "b.public.json"
    content = authorised.read_text()
    authorised.unlink()
    with host.actor("actor-0", "b") as actor:
        turns_until(lambda: any("does not take this actor's key" in message for message in caplog.messages), actor)
        authorised.write_text(content)
        turns_until(lambda: len(actor.held) == 1, actor)
    said = [message for message in caplog.messages if "does not take this actor's key" in message]
    assert len(said) == 1 and key in said[0] and "authorised/" in said[0] and host.receiver.endpoints[1] in said[0]
