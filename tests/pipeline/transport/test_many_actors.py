"""Many actors that only live: what they are asked for, and what they cost."""

import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from tests.pipeline.pair import ARENA_BYTES, Listener, Pair, counter
from tests.pipeline.support import turns_until


class Crowd:
    """Sockets of actors on other hosts, by hand."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def come(self, endpoint: str, count: int) -> list[messages.Message]:
        """Introduce so many more actors, one after the other. Returns the answers."""
        return [self._one(endpoint) for _ in range(count)]

    def _one(self, endpoint: str) -> messages.Message:
        name = f"actor-{len(self.sockets)}"
        socket = sockets.dealer(self.context, endpoint, f"{name}#{1:016x}".encode(), messages.MAX_MESSAGE_BYTES)
        self.sockets.append(socket)
        return self.ask(socket, messages.Hello(name, 1, (), ""))

    def ask(self, socket: "zmq.Socket[bytes]", message: messages.Message) -> messages.Message:
        socket.send(messages.encode(message))
        assert socket.poll(20_000)
        return messages.decode(socket.recv())


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.context.destroy(linger=0)


def test_the_more_actors_the_fewer_heartbeats_each_is_asked_for(pair: Pair, crowd: Crowd) -> None:
    endpoint = pair.receiver().endpoint
    answers = crowd.come(endpoint, 250)
    assert answers[98] == messages.WeightsAnnounced(0, 0)
    assert answers[99] == messages.WeightsAnnounced(0, 1)
    assert answers[249] == messages.WeightsAnnounced(0, 2)
    assert crowd.ask(crowd.sockets[0], messages.Heartbeat((), {})) == messages.WeightsAnnounced(0, 2)


def test_an_actor_sends_as_many_heartbeats_as_it_is_asked_for(listener: Listener) -> None:
    now = 1000.0
    times = ChannelTimes(heartbeat_s=1.0, monotonic=lambda: now)
    actor = ActorChannel(listener.endpoint, "actor", None, ARENA_BYTES, times=times)
    actor.hello()
    turns_until(lambda: listener.has_heard(0) and len(listener.others) > 0)
    listener.say(messages.WeightsAnnounced(0, 10))
    turns_until(lambda: bool(actor.poll()))
    listener.others.clear()
    for version in range(1, 101):
        now += 1.0
        listener.say(messages.WeightsAnnounced(version, 10))
        turns_until(lambda: bool(actor.poll()))
    actor.request(7)
    turns_until(lambda: listener.has_heard(0) and messages.TicketRequest(7) in listener.others)
    assert len([message for message in listener.others if isinstance(message, messages.Heartbeat)]) == 10
    actor.close()


def test_who_is_asked_for_few_heartbeats_may_be_silent_for_longer(pair: Pair, crowd: Crowd) -> None:
    receiver = pair.receiver(heartbeat_timeout_s=0.05, heartbeats_per_s=2)
    answers = crowd.come(receiver.endpoint, 3)
    assert answers == [messages.WeightsAnnounced(0, seconds) for seconds in (0, 1, 1)]
    turns_until(counter(receiver, "actors_lost"))
    turns_until(lambda: set(receiver.actor_stats()) == {"actor-1", "actor-2"})
    assert receiver.counters()["actors_lost"] == 1


def test_a_message_of_one_actor_is_no_work_for_the_others(pair: Pair, crowd: Crowd) -> None:
    calls = 0
    files = tuple(
        f"/pipeline/transport/{name}.py" for name in ("receiver", "message_loop", "sessions", "actor_sockets")
    )

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(files)

    threading.setprofile(count)
    receiver = pair.receiver()
    threading.setprofile(None)
    crowd.come(receiver.endpoint, 200)
    before = calls
    for _ in range(100):
        crowd.ask(crowd.sockets[0], messages.Heartbeat((), {}))
    # Some dozens a message, and now and then a look at all of them.
    assert calls - before < 100 * 50
