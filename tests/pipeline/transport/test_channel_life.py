"""Actors and learners that come, go, die and begin anew: who holds which ticket, and what has arrived."""

import contextlib
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.shm import record_kernels
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.transport import messages, sessions
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, LearnerLost
from tests.pipeline.pair import ARENA_BYTES, Pair, counter, drain
from tests.pipeline.support import contents, make_trajectory, turns_until


def test_a_silent_actor_loses_its_tickets_and_can_come_back(pair: Pair) -> None:
    receiver = pair.receiver(heartbeat_timeout_s=0.3)
    slow, other = pair.actor("slow"), pair.actor("other")
    lost = pair.tickets(slow, 2)
    turns_until(counter(receiver, "actors_lost"), other)
    other.request(4)
    turns_until(lambda: {t.ticket_id for t in lost} <= {t.ticket_id for t in other.held}, other)
    first, second = (make_trajectory(ticket, seed=1, actor_id="slow") for ticket in lost)
    slow.send(first)  # it was not dead after all, and is first
    assert contents(drain(receiver, 1, slow, other)[0]) == contents(first)
    other.send(make_trajectory(lost[0], seed=2))
    other.send(make_trajectory(lost[1], seed=2))
    drain(receiver, 1, slow, other)
    slow.send(second)
    turns_until(lambda: slow.num_unacknowledged + other.num_unacknowledged == 0, slow, other)
    assert receiver.drain(0.0) == []
    counters = receiver.counters()
    assert (counters["received"], counters["trajectories_unwanted"]) == (2, 2)


def test_a_receiver_closes_while_its_code_is_being_compiled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(record_kernels, "compile_ingest", lambda: (begun.set(), may_end.wait(60)))
    pair.receiver()
    assert begun.wait(30)
    closing = threading.Thread(target=pair.receivers.pop().close)
    closing.start()
    closing.join(30)
    has_closed = not closing.is_alive()
    may_end.set()
    closing.join()
    assert has_closed


def test_a_leaving_actor_gives_its_tickets_back_at_once(pair: Pair) -> None:
    receiver = pair.receiver()
    leaving, staying = pair.actor("leaving"), pair.actor("staying", want=1)
    tickets = pair.tickets(leaving, 2)
    pair.actors.remove(leaving)
    leaving.close()
    turns_until(counter(receiver, "regranted", 2), staying)
    staying.request(8)
    turns_until(lambda: {t.ticket_id for t in tickets} <= {t.ticket_id for t in staying.held}, staying)
    assert receiver.counters()["actors_lost"] == 0


def test_a_new_process_of_the_same_name_takes_over(pair: Pair) -> None:
    receiver = pair.receiver()
    old = pair.actor(is_shared=False)
    tickets = pair.tickets(old, 2)
    pair.actors.remove(old)
    new = pair.actor(is_shared=False)
    assert pair.tickets(new, 2) == tickets
    assert receiver.counters()["actors_lost"] == 1
    old.close()


def test_two_living_processes_of_one_name_do_not_take_turns(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver = pair.receiver()
    first = pair.actor()
    tickets = pair.tickets(first, 2)
    second = ActorChannel(pair.run_dir.endpoint(0), "actor-0", None, ARENA_BYTES, times=ChannelTimes(0.05))
    second.hello()
    second.request(2)
    turns_until(lambda: "two processes have the name" in caplog.text, first, second)
    assert (first.held, second.held) == (tickets, [])
    assert receiver.counters()["actors_lost"] == 0
    second.close()


def test_an_actor_that_is_asked_for_its_name_again_and_again_answers_now_and_then(pair: Pair) -> None:
    """As where another process has its name: each of its messages is answered like this."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as learner:
        learner.bind(pair.run_dir.endpoint(0))
        actor = ActorChannel(pair.run_dir.endpoint(0), "actor-0", pair.run_dir, ARENA_BYTES, times=ChannelTimes(60.0))
        actor.hello()
        heard: list[messages.Message] = []
        for _ in range(50):
            if learner.poll(100):
                address, frame = learner.recv_multipart()
                heard.append(messages.decode(frame))
                learner.send_multipart([address, messages.encode(messages.HelloWanted(), pair.run_dir.run_id)])
            actor.request(1)
            actor.poll(0.01)
        actor.close()
    Path(pair.run_dir.endpoint(0).removeprefix("ipc://")).unlink(missing_ok=True)
    assert len(heard) == 50 and sum(isinstance(message, messages.Hello) for message in heard) == 2


# --- runs of one name


def test_an_actor_of_an_earlier_run_is_sent_home_and_ends_no_ticket(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = pair.receiver(endpoint="tcp://127.0.0.1:*")
    other = pair.actor(endpoint=receiver.endpoint)
    [ticket, *_] = pair.tickets(other, 2)
    context = zmq.Context()
    old = sockets.dealer(context, receiver.endpoint, b"actor-9#0000000000000001", messages.MAX_MESSAGE_BYTES)
    earlier = pair.run_dir.run_id ^ 1
    try:
        for message in (
            messages.Hello("actor-9", 1, (ticket.ticket_id,), ""),
            messages.TicketFailed(ticket.ticket_id, "late"),
        ):
            old.send(messages.encode(message, earlier))
            assert old.poll(10_000)
            frame = old.recv()
            assert isinstance(answer := messages.decode(frame), messages.Shutdown) and "another run" in answer.reason
            assert messages.run_id_of(frame) == pair.run_dir.run_id
        assert receiver.counters()["actors"] == 1
        assert "was told to end" in caplog.text
        assert ticket in other.held and receiver.counters()["failed"] == 0
    finally:
        old.close(linger=0)
        context.term()


def test_an_actor_follows_a_learner_that_moves_by_the_file_that_names_its_endpoint(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "learner"
    actor = pair.actor(want=4, endpoint=f"@{file}+0", is_shared=False)  # there is no file yet, and no learner
    turns_until(lambda: True, actor)
    first = pair.receiver(endpoint="tcp://127.0.0.1:*")
    file.write_text("no endpoint")
    turns_until(lambda: True, actor)
    file.write_text(f"{first.endpoint}\n")
    tickets = pair.tickets(actor, 2)
    pair.receivers.remove(first)
    first.close()
    sent = make_trajectory(tickets[0])
    actor.send(sent)
    second = pair.receiver(endpoint="tcp://127.0.0.1:*")
    assert second.endpoint != first.endpoint
    file.write_text(f"{second.endpoint}\n")
    assert contents(drain(second, 1, actor)[0]) == contents(sent)


def test_an_actor_on_another_host_goes_home_when_another_run_takes_the_endpoint(pair: Pair) -> None:
    first = pair.receiver(endpoint="tcp://127.0.0.1:*")
    actor = ActorChannel(first.endpoint, "actor-0", None, ARENA_BYTES, times=ChannelTimes(0.05))
    pair.actors.append(actor)
    actor.hello()
    actor.request(2)
    pair.tickets(actor, 2)
    pair.receivers.remove(first)
    first.close()
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run_dir:
        later = Pair(run_dir)
        receiver = later.receiver(endpoint=first.endpoint)
        with pytest.raises(LearnerLost, match="another run"):
            turns_until(lambda: False, actor)
        assert receiver.counters()["open"] == 0
        later.close()


def test_an_actor_on_this_host_goes_home_when_another_run_takes_the_name() -> None:
    with tempfile.TemporaryDirectory() as base:
        with RunDirectory.create("t", Path(base)) as first:
            actor = ActorChannel(first.endpoint(), "actor-0", first, ARENA_BYTES, times=ChannelTimes(0.02))
            actor.hello()
        with RunDirectory.create("t", Path(base)), pytest.raises(LearnerLost, match="another run"):
            turns_until(lambda: False, actor)
        actor.close()


# --- silence, and what gets lost


def test_a_ticket_that_takes_too_long_is_taken_away(pair: Pair) -> None:
    receiver = pair.receiver(ticket_timeout_s=0.2)
    slow, other = pair.actor("slow", want=1), pair.actor("other", want=0)
    [ticket] = pair.tickets(slow, 1)
    slow.request(0)
    other.request(2)
    events = turns_until(lambda: not slow.held and ticket in other.held, slow, other)
    assert messages.Revoked((ticket.ticket_id,)) in events
    assert receiver.counters()["tickets_expired"] >= 1


def test_tickets_of_a_batch_that_wait_at_their_actor_are_not_late_while_it_brings_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, tick=lambda: None)
    monkeypatch.setattr(sessions, "ActiveClock", lambda max_gap_s: clock)
    receiver = pair.receiver(max_staleness=0, batch_size=4, ticket_timeout_s=600.0, heartbeat_timeout_s=1e9)
    actor = pair.actor(want=1)
    *quick, hanging = pair.tickets(actor, 4)
    actor.request(0)
    for ticket in quick:  # one after the other, each in less than the time limit and all in more
        clock.now += 400.0
        actor.send(make_trajectory(ticket))
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert receiver.counters()["tickets_expired"] == 0
    clock.now += 601.0
    events = turns_until(lambda: not actor.held, actor)
    assert messages.Revoked((hanging.ticket_id,)) in events
    assert receiver.counters()["tickets_expired"] == 1


def test_a_ticket_whose_unrolls_arrive_is_not_late(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, tick=lambda: None)
    monkeypatch.setattr(sessions, "ActiveClock", lambda max_gap_s: clock)
    receiver = pair.receiver(ticket_timeout_s=600.0, heartbeat_timeout_s=1e9)
    actor = pair.actor(want=2)
    unrolled, hanging = pair.tickets(actor, 2)
    actor.request(0)
    for number in range(2):  # each in less than the time limit, both in more
        clock.now += 400.0
        actor.send(make_trajectory(unrolled, episode_id="e", unroll_index=number, continues=True))
        events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    events += turns_until(lambda: hanging not in actor.held, actor)
    assert messages.Revoked((hanging.ticket_id,)) in events
    assert actor.held == [unrolled] and receiver.counters()["tickets_expired"] == 1


def test_a_grant_that_got_lost_is_sent_again(pair: Pair) -> None:
    peer = pair.peer(pair.receiver(grant_resend_s=0.1))
    peer.request(2)
    granted = peer.granted()
    again: list[messages.Message] = []

    def is_granted_again() -> bool:
        peer.say(messages.Heartbeat((), {}, 2))  # it holds nothing: as if the message had never come
        again.append(peer.hear())
        return granted in again

    turns_until(is_granted_again)


def test_shutdown_reaches_all_actors_and_those_that_come_late(pair: Pair) -> None:
    receiver = pair.receiver()
    early = pair.actor("early")
    pair.tickets(early, 2)
    receiver.shutdown("enough")
    assert messages.Shutdown("enough") in turns_until(lambda: not receiver.counters()["actors"], early) + early.poll(
        5.0
    )
    late = pair.actor("late")
    assert messages.Shutdown("enough") in [e for e in late.poll(20.0)] + late.poll(1.0)


def test_actors_do_not_outlive_a_silent_learner(pair: Pair) -> None:
    actor = pair.actor(learner_timeout_s=0.2)
    with pytest.raises(LearnerLost, match=r"pipeline\.learner_timeout_s=0\.2"):
        actor.poll(20.0)


def test_an_actor_waits_for_a_silent_learner_as_long_as_it_takes_and_says_so_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    actor = pair.actor(learner_timeout_s=None, heartbeat_s=0.02)
    turns_until(lambda: "silent" in caplog.text, actor)
    actor.poll(0.2)
    assert caplog.text.count("pipeline.learner_timeout_s=null") == 1
    pair.receiver()
    pair.tickets(actor, 2)
    assert "the learner is back" in caplog.text


def test_an_actor_does_not_wait_for_a_run_that_was_removed(tmp_path: Path) -> None:
    with RunDirectory.create("over", tmp_path):
        actor = ActorChannel(
            "tcp://127.0.0.1:1", "a", RunDirectory.attach("over", tmp_path), 1 << 16, times=ChannelTimes(0.02)
        )
    try:
        with pytest.raises(LearnerLost, match="has ended"):
            actor.poll(20.0)
    finally:
        actor.close()


def test_an_arena_that_the_learner_cannot_open_sends_the_actor_home(pair: Pair) -> None:
    pair.receiver()
    actor = ActorChannel(pair.run_dir.endpoint(0), "actor-0", pair.run_dir, ARENA_BYTES, times=ChannelTimes(0.05))
    pair.actors.append(actor)
    pair.run_dir.arena_path("actor-0").unlink()
    actor.hello()
    event, *_ = actor.poll(20.0)  # each hello, of which a slow machine sends several, is answered
    assert isinstance(event, messages.Shutdown) and "arena" in event.reason


def test_servers_of_actors_reach_the_learner_and_go_with_them(pair: Pair) -> None:
    first, actor, other = pair.receiver(), pair.actor(), pair.actor("other")
    actor.offer_engines(messages.Engines(("http://a:1", "http://a:2"), (5, 6)))
    other.offer_engines(messages.Engines(("http://b:1",), (7,)))
    turns_until(lambda: first.engines() == {5: "http://a:1", 6: "http://a:2", 7: "http://b:1"}, actor, other)
    actor.offer_engines(messages.Engines(("http://a:1",), (8,)))
    turns_until(lambda: first.engines() == {8: "http://a:1", 7: "http://b:1"}, actor, other)
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver()
    events = turns_until(lambda: second.engines() == {8: "http://a:1", 7: "http://b:1"}, actor, other)
    assert messages.HelloWanted() in events
    pair.actors.remove(other)
    other.close()
    turns_until(lambda: second.engines() == {8: "http://a:1"}, actor)


def test_an_actor_of_another_host_cannot_offer_what_listens_on_the_learners(pair: Pair) -> None:
    receiver = pair.receiver(bind="tcp://127.0.0.1:*")
    actor = pair.actor(endpoint=receiver.endpoints[1], is_shared=False)
    actor.offer_engines(messages.Engines(("http://127.0.0.1:22",), (1,)))
    turns_until(counter(receiver, "messages_malformed"), actor)
    actor.offer_engines(messages.Engines(("http://elsewhere:1",), (2,)))
    turns_until(lambda: receiver.engines() == {2: "http://elsewhere:1"}, actor)


def test_what_a_lost_connection_may_have_swallowed_is_offered_again_at_once(pair: Pair) -> None:
    context = zmq.Context()
    silent = sockets.router(context, "tcp://127.0.0.1:*", messages.MAX_MESSAGE_BYTES)
    endpoint = silent.getsockopt_string(zmq.LAST_ENDPOINT)
    actor = pair.actor(heartbeat_s=0.02, resend_s=1000.0, endpoint=endpoint)
    assert actor.send(make_trajectory(num_tokens=20))
    offers: list[messages.Message] = []

    def offered_twice() -> bool:
        while silent.poll(0):
            message = messages.decode(silent.recv_multipart()[1])
            if isinstance(message, messages.DescriptorBatch):
                offers.append(message)
        return len(offers) >= 2

    turns_until(offered_twice, actor)
    assert offers[0] == offers[1]
    silent.close()
    context.term()


class Relay:
    """A socket in front of another, whose stream towards whoever connects can be disturbed."""

    def __init__(self, front: Path, back: Path) -> None:
        self.num_connections = 0
        self._back = back
        self._actor: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(front))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def send_noise(self) -> None:
        assert self._actor is not None
        self._actor.sendall(b"\xff" * 20)  # a frame that is larger than any may be

    def _serve(self) -> None:
        while True:
            self._actor, _ = self._listener.accept()
            rank = socket.socket(socket.AF_UNIX)
            rank.connect(str(self._back))
            self.num_connections += 1
            for source, target in ((self._actor, rank), (rank, self._actor)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_an_actor_connects_again_after_its_stream_was_disturbed(pair: Pair) -> None:
    # libzmq does not: after an error of protocol, unlike one of the connection, it gives a connection up for good.
    pair.receiver()
    front = pair.run_dir.path / "relay.sock"
    relay = Relay(front, pair.run_dir.path / "learner-0.sock")
    actor = pair.actor(want=1, endpoint=f"ipc://{front}")
    pair.tickets(actor, 1)
    before = relay.num_connections
    relay.send_noise()
    turns_until(lambda: relay.num_connections > before, actor)
    front.unlink()
