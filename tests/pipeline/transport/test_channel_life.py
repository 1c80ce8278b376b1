"""Actors and learners that come, go, die and begin anew: who holds which ticket, and what has arrived."""

import contextlib
import dataclasses
import socket
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.shm import record_kernels
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, LearnerLost
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.trajectory import Trajectory
from tests.pipeline.keeping import checksum_of, words_of
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
    old = pair.actor()
    tickets = pair.tickets(old, 2)
    pair.actors.remove(old)
    new = pair.actor()
    assert pair.tickets(new, 2) == tickets
    assert receiver.counters()["actors_lost"] == 1
    old.close()


def test_two_living_processes_of_one_name_do_not_take_turns(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver = pair.receiver()
    first = pair.actor()
    tickets = pair.tickets(first, 2)
    second = ActorChannel(pair.run_dir.endpoint(0), "actor-0", pair.run_dir, ARENA_BYTES, times=ChannelTimes(0.05))
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


def test_a_restarted_learner_finds_what_it_acknowledged_and_gets_the_rest_again(pair: Pair) -> None:
    first = pair.receiver(batch_size=8)
    actor = pair.actor(want=4)
    tickets = pair.tickets(actor, 4)
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(tickets)]
    actor.send(sent[0])
    turns_until(lambda: actor.num_unacknowledged == 0, actor)  # acknowledged, and never drained
    pair.receivers.remove(first)
    first.close()
    for trajectory in sent[1:3]:
        actor.send(trajectory)
    second = pair.receiver(batch_size=8)
    arrived = drain(second, 3, actor)
    assert [contents(t) for t in arrived] == [contents(t) for t in sent[:3]]
    actor.send(sent[3])
    assert contents(drain(second, 1, actor)[0]) == contents(sent[3])
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert second.counters()["recovered"] == 1
    assert second.counters()["received"] == 3


def reported(receiver: Receiver, number: int) -> bool:
    return receiver.actor_stats().get("actor-0") == {"sent": number}


def test_what_was_answered_before_a_restart_is_no_gap_after_it(pair: Pair) -> None:
    first = pair.receiver(batch_size=16)
    actor = pair.actor(want=3)
    early, *others = pair.tickets(actor, 3)
    # Of a version that is announced later: those after it are acknowledged before it.
    actor.send(make_trajectory(early, version=1))
    for ticket in others:
        actor.send(make_trajectory(ticket))
    turns_until(lambda: actor.num_unacknowledged == 1, actor)
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=16, max_remembered=8)
    second.announce(1)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    for number in range(20):
        turns_until(lambda: len(actor.held) > 0, actor)
        actor.send(make_trajectory(actor.held[0], version=1))
        actor.report({"sent": number})
        turns_until(partial(reported, second, number), actor)  # a heartbeat has come
        second.evicted([trajectory.unroll_id for trajectory in second.drain(0.0)])
    assert second.counters()["actors_lost"] == 0


@pytest.mark.parametrize("published", [False, True])
def test_a_step_counts_once_its_version_is_published(pair: Pair, published: bool) -> None:
    first = pair.receiver(batch_size=2)
    actor = pair.actor(want=2)
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(pair.tickets(actor, 2))]
    for trajectory in sent:
        actor.send(trajectory)
    drain(first, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([t.ticket_id for t in sent])  # and the learner dies before it announces version 1
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=2, version=int(published))
    found = second.drain(0.0)
    assert [contents(t) for t in found] == ([] if published else [contents(t) for t in sent])


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


# --- unrolls


def unrolls_of(ticket: Ticket, count: int) -> list[Trajectory]:
    name = f"episode of {ticket.ticket_id}"
    return [
        make_trajectory(ticket, seed=i, episode_id=name, unroll_index=i, continues=i < count - 1) for i in range(count)
    ]


def test_a_ticket_is_held_until_the_last_unroll_was_acknowledged(pair: Pair) -> None:
    receiver = pair.receiver()
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.request(0)
    for number, unroll in enumerate(unrolls_of(ticket, 3)):
        assert actor.held == [ticket]
        actor.send(unroll)
        [arrived] = drain(receiver, 1, actor)
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
        assert contents(arrived) == contents(unroll)
        assert receiver.counters()["open"] == (number < 2)
        receiver.trained([arrived.unroll_id])
        receiver.announce(number + 1)
    assert actor.held == []
    assert receiver.counters()["trained"] == 1


def test_what_was_learned_from_before_the_learner_died_stays_away_and_the_rest_is_found(pair: Pair) -> None:
    first = pair.receiver(batch_size=1)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    unrolls = unrolls_of(ticket, 3)
    for unroll in unrolls[:2]:
        actor.send(unroll)
    drain(first, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([unrolls[0].unroll_id])
    first.announce(1)
    first.trained([unrolls[1].unroll_id])  # and the learner dies before version 2 is published
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(batch_size=1, version=1)
    assert [contents(t) for t in second.drain(0.0)] == [contents(unrolls[1])]
    assert second.counters()["ready"] == 0, "the episode is not played again"
    actor.send(unrolls[2])  # it comes in time
    assert contents(drain(second, 1, actor)[0]) == contents(unrolls[2])
    second.trained([t.unroll_id for t in unrolls[1:]])
    second.announce(2)
    counters = second.counters()
    assert (counters["trained"], counters["in_buffer"]) == (1, 0)


def test_a_learner_that_publishes_nothing_never_runs_out_of_room_and_loses_nothing(pair: Pair) -> None:
    """It trains on three times what its arena has room for, and dies between two versions that it keeps."""
    first = pair.receiver(max_staleness=None)
    actor = pair.actor(want=4)
    kept, since = 0, []
    for version in range(1, 52):
        for ticket in pair.tickets(actor, 4)[:4]:
            actor.send(make_trajectory(ticket))
        ids = [t.unroll_id for t in drain(first, 4, actor)[:4]]
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
        first.trained(ids)
        since += ids
        is_due = first.must_keep()
        first.announce(version, published=False, kept=is_due)
        if is_due:
            kept, since = version, []
    assert 0 < kept < 51 and since, "the last step was not kept"
    assert first.counters()["arena_fill"] < 0.5
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(max_staleness=None, version=kept, published=0)
    assert sorted(t.unroll_id for t in second.drain(0.0)) == sorted(since)
    announced = [e for e in turns_until(counter(second, "actors"), actor) if isinstance(e, messages.WeightsAnnounced)]
    assert {e.version for e in announced} <= {0}, "actors stay with what was published"


def test_a_learner_knows_that_nothing_comes_until_it_publishes_and_says_so_when_it_has(pair: Pair) -> None:
    receiver = pair.receiver(batch_size=1)
    actor = pair.actor(want=2)
    first, second = pair.tickets(actor, 2)[:2]
    assert not receiver.needs_weights()
    actor.send(make_trajectory(first))
    [arrived] = drain(receiver, 1, actor)
    receiver.trained([arrived.unroll_id])
    receiver.announce(1, published=False)
    actor.fail(second.ticket_id, "no use")
    turns_until(lambda: second in actor.held, actor)
    assert not receiver.needs_weights(), "it is tried once more"
    actor.fail(second.ticket_id, "no use either")
    turns_until(lambda: bool(actor.held) and receiver.needs_weights(), actor)
    receiver.announce_late(1)
    heard: list[object] = []
    turns_until(lambda: heard.extend(actor.poll(0.01)) or messages.WeightsAnnounced(1) in heard)
    assert not receiver.needs_weights()


def test_what_a_step_has_trained_on_that_may_be_lost_survives_its_eviction_from_the_buffer(pair: Pair) -> None:
    first = pair.receiver(max_staleness=None)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.send(sent := make_trajectory(ticket))
    [arrived] = drain(first, 1, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    first.trained([arrived.unroll_id])
    first.announce(1, published=False)
    first.evicted([arrived.unroll_id])  # it might have been replayed, and is too old for that now
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(max_staleness=None, version=0)
    assert [contents(t) for t in second.drain(0.0)] == [contents(sent)]


def test_an_actor_is_told_to_end_the_episode_of_a_refused_unroll(pair: Pair) -> None:
    receiver = pair.receiver()
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.request(0)
    good, bad, _ = unrolls_of(ticket, 3)
    actor.send(good)
    drain(receiver, 1, actor)
    actor.send(dataclasses.replace(bad, task_id=bad.task_id + 1))
    events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert any(isinstance(event, messages.Refused) for event in events)
    assert messages.Revoked((ticket.ticket_id,)) in events and actor.held == []
    counters = receiver.counters()
    assert (counters["open"], counters["in_buffer"], counters["cut"], counters["refused"]) == (0, 1, 1, 0)


def test_an_episode_whose_rest_the_actor_does_not_know_of_is_cut_and_not_granted_again(pair: Pair) -> None:
    receiver = pair.receiver(grant_resend_s=0.1)
    peer = pair.peer(receiver)
    peer.request(1)
    [ticket, *_] = peer.granted().tickets
    peer.request(0)
    record = words_of(unrolls_of(ticket, 2)[0])
    row = messages.Descriptor(0, ticket.ticket_id, 0, len(record), checksum_of(record))
    peer.say(messages.DescriptorBatch.of([row]), record.tobytes())
    [arrived] = drain(receiver, 1)
    heard: list[messages.Message] = []

    def is_cut() -> bool:
        peer.say(messages.Heartbeat((), {}))  # it holds nothing: the news of its failure has got lost
        heard.append(peer.hear())
        return receiver.counters()["cut"] == 1

    turns_until(is_cut)
    assert not any(isinstance(message, messages.Grant) for message in heard)
    receiver.evicted([arrived.unroll_id])
    assert receiver.counters()["evicted"] == 1


def test_a_ticket_that_takes_too_long_is_taken_away(pair: Pair) -> None:
    receiver = pair.receiver(ticket_timeout_s=0.2)
    slow, other = pair.actor("slow", want=1), pair.actor("other", want=0)
    [ticket] = pair.tickets(slow, 1)
    slow.request(0)
    other.request(2)
    events = turns_until(lambda: not slow.held and ticket in other.held, slow, other)
    assert messages.Revoked((ticket.ticket_id,)) in events
    assert receiver.counters()["tickets_expired"] >= 1


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
    [event] = actor.poll(20.0)
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
