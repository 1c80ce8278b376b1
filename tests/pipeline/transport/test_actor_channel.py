"""An actor's channel and a learner rank's receiver pass on trajectories once, equal, and none that breaks a rule."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Iterable

import msgpack
import numpy as np
import pytest
import zmq

from impala_llm.pipeline.shm.record import encode_record, record_bytes
from impala_llm.pipeline.shm.ring import ArenaWriter, RecordTooLarge
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Claim, Ticket, Verdict
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, ReceiverError, RecordLimits
from tests.pipeline.pair import ARENA_BYTES, Pair, drain
from tests.pipeline.support import VOCAB_SIZE, contents, make_trajectory, turns_until


def test_a_trajectory_arrives_once_and_equal_and_is_acknowledged(pair: Pair) -> None:
    receiver, actor = pair.receiver(), pair.actor()
    tickets = pair.tickets(actor, 2)
    sent = [make_trajectory(ticket, seed=i, num_tokens=30 + i) for i, ticket in enumerate(tickets)]
    assert [actor.send(trajectory) for trajectory in sent] == [True, True]
    assert actor.num_unacknowledged == 2
    arrived = drain(receiver, 2, actor)
    assert [contents(trajectory) for trajectory in arrived] == [contents(trajectory) for trajectory in sent]
    turns_until(lambda: actor.num_unacknowledged == 0 and len(actor.held) == 2, actor)
    assert not {t.ticket_id for t in actor.held} & {t.ticket_id for t in tickets}  # the level is filled again
    assert actor.arena_fill == 0
    counters = receiver.counters()
    assert (counters["received"], counters["actors"], counters["open"]) == (2, 1, 2)
    assert counters["received_bytes"] == sum(len(record_bytes(trajectory)) for trajectory in sent)


def test_a_whole_batch_in_one_grant_and_versions_before_their_tickets(pair: Pair) -> None:
    receiver, actor = pair.receiver(max_staleness=0), pair.actor(want=1)
    for version in range(3):
        events = turns_until(lambda: len(actor.held) == 4, actor)
        kinds = [event for event in events if isinstance(event, messages.Grant | messages.WeightsAnnounced)]
        assert kinds[0] == messages.WeightsAnnounced(version)
        [grant] = kinds[1:]
        assert isinstance(grant, messages.Grant)
        assert [t.ticket_id for t in grant.tickets] == list(range(4 * version, 4 * version + 4))
        assert {t.min_version for t in grant.tickets} == {version}
        for ticket in reversed(grant.tickets):
            actor.send(make_trajectory(ticket, version=version))
        arrived = drain(receiver, 4, actor)
        turns_until(lambda: actor.num_unacknowledged == 0, actor)
        receiver.trained(trajectory.ticket_id for trajectory in arrived)
        receiver.announce(version + 1)


def test_what_a_fast_server_made_before_the_slowest_had_the_version_is_delayed_and_not_lost(pair: Pair) -> None:
    receiver, fast, slow = pair.receiver(), pair.actor("fast", want=1), pair.actor("slow", want=1)
    [early], [late] = pair.tickets(fast, 1), pair.tickets(slow, 1)
    receiver.trained([])
    fast.send(make_trajectory(early, version=1))  # while the learner still sends version 1 to the other
    slow.send(make_trajectory(late, version=0))
    assert [t.ticket_id for t in drain(receiver, 1, fast, slow)] == [late.ticket_id]
    assert fast.num_unacknowledged == 1
    receiver.announce(1)
    assert [t.ticket_id for t in drain(receiver, 1, fast, slow)] == [early.ticket_id]
    turns_until(lambda: fast.num_unacknowledged == 0, fast)
    assert receiver.counters()["trajectories_refused"] == receiver.counters()["regranted"] == 0


def test_a_full_arena_keeps_trajectories_back_and_loses_none(pair: Pair) -> None:
    receiver = pair.receiver(batch_size=32)
    one = make_trajectory(num_tokens=100)
    actor = pair.actor(want=20, arena_bytes=2 * len(record_bytes(one)) + 128)
    tickets = pair.tickets(actor, 20)
    accepted = [actor.send(make_trajectory(ticket, num_tokens=100, seed=i)) for i, ticket in enumerate(tickets)]
    assert accepted[:2] == [True, True] and not any(accepted[2:])
    arrived = drain(receiver, 20, actor)
    assert [t.ticket_id for t in arrived] == [t.ticket_id for t in tickets]


def test_a_trajectory_larger_than_the_arena_is_refused_at_once(pair: Pair) -> None:
    pair.receiver()
    actor = pair.actor(arena_bytes=256)
    [ticket, _] = pair.tickets(actor, 2)
    with pytest.raises(RecordTooLarge, match=r"pipeline\.arena_mb"):
        actor.send(make_trajectory(ticket, num_tokens=100))
    actor.fail(ticket.ticket_id, "too large")
    with pytest.raises(ValueError, match="not held"):
        actor.fail(ticket.ticket_id, "again")


def test_a_full_replay_arena_takes_nothing_and_acknowledges_nothing(pair: Pair) -> None:
    size = len(record_bytes(make_trajectory()))
    receiver = pair.receiver(replay_bytes=size + 64)  # one at a time
    actor = pair.actor(want=3, resend_s=0.0)  # offers again at each heartbeat what is not acknowledged
    sent = [make_trajectory(ticket, seed=i) for i, ticket in enumerate(pair.tickets(actor, 3))]
    for trajectory in sent:
        actor.send(trajectory)
    turns_until(lambda: actor.num_unacknowledged == 2, actor)
    assert receiver.counters()["queue_trajectories"] == 1
    for trajectory in sent:
        [arrived] = drain(receiver, 1, actor)
        assert contents(arrived) == contents(trajectory)
        receiver.evicted([arrived.ticket_id])
        del arrived
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    assert receiver.drain(0.0) == []


def test_a_trajectory_larger_than_the_replay_arena_is_refused(pair: Pair) -> None:
    pair.receiver(replay_bytes=1 << 10)
    actor = pair.actor()
    [ticket, _] = pair.tickets(actor, 2)
    actor.send(make_trajectory(ticket, num_tokens=100))
    events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    [refused] = [event for event in events if isinstance(event, messages.Refused)]
    assert "replay.capacity_mb" in refused.reason


def test_what_has_arrived_stays_as_it_is_while_anybody_looks_at_it(pair: Pair) -> None:
    receiver = pair.receiver(replay_bytes=1 << 12)
    actor = pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    first = make_trajectory(ticket, seed=0)
    actor.send(first)
    tokens = drain(receiver, 1, actor)[0].tokens
    receiver.evicted([ticket.ticket_id])
    for seed in range(1, 20):  # many times the arena
        turns_until(lambda: len(actor.held) == 1 and actor.num_unacknowledged == 0, actor)
        [ticket] = actor.held
        actor.send(make_trajectory(ticket, seed=seed))
        drain(receiver, 1, actor)
        receiver.evicted([ticket.ticket_id])
        assert np.array_equal(tokens, first.tokens)


def test_failed_tickets_come_again_and_then_are_given_up(pair: Pair) -> None:
    receiver, actor = pair.receiver(), pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.fail(ticket.ticket_id, "the environment broke \ud800")
    assert pair.tickets(actor, 1) == [ticket]
    actor.fail(ticket.ticket_id, "again")
    [other] = pair.tickets(actor, 1)
    assert other != ticket
    assert receiver.counters()["given_up"] == 1


def test_what_is_malformed_is_refused_and_the_learner_goes_on(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    receiver = pair.receiver(batch_size=16)
    actor = pair.actor(want=6)
    tickets = pair.tickets(actor, 6)
    good = make_trajectory(tickets[5])
    bad = [
        dataclasses.replace(good, tokens=np.full(40, VOCAB_SIZE, np.int32), ticket_id=tickets[0].ticket_id),
        dataclasses.replace(make_trajectory(tickets[1]), task_id=tickets[1].task_id + 1),
        dataclasses.replace(make_trajectory(tickets[2]), group_id=10**6),
        dataclasses.replace(make_trajectory(tickets[3]), ticket_id=10**9),
    ]
    for trajectory in bad:
        actor.send(trajectory)
    actor.send(good)
    events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    [arrived] = drain(receiver, 1, actor)
    assert contents(arrived) == contents(good)
    reasons = {event.sequence: event.reason for event in events if isinstance(event, messages.Refused)}
    assert set(reasons) == {0, 1, 2, 3}
    for sequence, expected in [(0, "vocabulary"), (1, "task_id"), (2, "group_id"), (3, "unknown")]:
        assert expected in reasons[sequence]
    counters = receiver.counters()
    assert (counters["trajectories_refused"], counters["trajectories_unwanted"], counters["refused"]) == (3, 1, 3)
    assert "a trajectory was refused" in caplog.text


def test_versions_that_do_not_exist_or_are_too_old_are_refused(pair: Pair) -> None:
    receiver = pair.receiver(max_staleness=0, batch_size=2)
    actor = pair.actor()
    first = pair.tickets(actor, 2)
    for ticket in first:
        actor.send(make_trajectory(ticket, version=0))
    drain(receiver, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    receiver.trained(ticket.ticket_id for ticket in first)
    receiver.announce(1)
    [ticket, other] = pair.tickets(actor, 2)
    actor.send(make_trajectory(ticket, version=0))
    [refused] = [
        e for e in turns_until(lambda: actor.num_unacknowledged == 0, actor) if isinstance(e, messages.Refused)
    ]
    assert "demands 1" in refused.reason
    # Published and not yet announced: waits for the announcement.
    actor.send(make_trajectory(other, version=2))
    for _ in range(5):
        actor.poll(0.01)
    assert receiver.drain(0.0) == [] and actor.num_unacknowledged == 1
    receiver.announce(2)
    assert len(drain(receiver, 1, actor)) == 1


def test_bytes_of_a_stranger_cost_a_counter(pair: Pair) -> None:
    receiver = pair.receiver()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(receiver.endpoint)
    for frames in (
        [b"\xff\xff"],
        [b""],
        [b"a", b"b"],
        [messages.encode(messages.Goodbye())],
        [messages.encode(messages.Hello("actor-0", 1, (), "actor-0"))],
        [msgpack.packb([99, 1])],
        [messages.encode(messages.Goodbye())[:-1] + b"x"],
    ):
        stranger.send_multipart(frames)
    stranger.send(messages.encode(messages.Heartbeat((), {})))
    assert stranger.poll(20_000)
    assert messages.decode(stranger.recv()) == messages.HelloWanted()
    stranger.close(0)
    context.term()
    assert receiver.counters()["messages_malformed"] == 6
    actor = pair.actor()
    pair.tickets(actor, 2)


def test_the_same_record_offered_many_times_arrives_once(pair: Pair) -> None:
    receiver = pair.receiver()
    writer = ArenaWriter(pair.run_dir.arena_path("peer"), ARENA_BYTES, incarnation=1)
    peer = pair.peer(receiver, arena="peer")
    peer.request(1)
    [ticket, *_] = peer.granted().tickets
    span = writer.write(encode_record(make_trajectory(ticket)))
    assert span is not None
    offer = messages.DescriptorBatch.of([messages.Descriptor(0, ticket.ticket_id, *span)])

    def acknowledged(count: int) -> list[int]:
        sequences: list[int] = []
        while len(sequences) < count:
            ack = peer.hear_until(messages.Ack)
            assert isinstance(ack, messages.Ack)
            sequences += ack.sequences
        return sequences

    peer.say(offer)
    assert acknowledged(1) == [0]
    for _ in range(4):
        peer.say(offer)
    assert acknowledged(4) == [0] * 4
    assert len(drain(receiver, 1)) == 1
    receiver.evicted([ticket.ticket_id])
    writer.free(span.start)
    peer.say(offer)  # after the acknowledgement: its space may be in use again
    assert acknowledged(1) == [0]
    assert receiver.drain(0.0) == []
    assert receiver.counters()["trajectories_refused"] == 0
    writer.close()


def test_figures_of_actors_reach_the_learner(pair: Pair) -> None:
    receiver, actor = pair.receiver(), pair.actor()
    actor.report({"tokens_per_s": np.float32(2.0)})  # type: ignore[dict-item]
    turns_until(lambda: receiver.actor_stats() == {"actor-0": {"tokens_per_s": 2.0}}, actor)


def test_the_learner_gets_the_mean_of_what_an_actor_has_reported_since_it_asked(pair: Pair) -> None:
    receiver, actor = pair.receiver(), pair.actor()
    for value in (1.0, 4.0, 7.0):
        actor.report({"tokens_per_s": value})
        turns_until(lambda value=value: receiver.actor_stats() == {"actor-0": {"tokens_per_s": value}}, actor)
    mean = receiver.mean_actor_stats()["actor-0"]["tokens_per_s"]
    assert 1.0 < mean < 7.0  # a value may have come with several heartbeats
    assert receiver.mean_actor_stats() == {}
    actor.report({"others": 3.0})
    turns_until(lambda: receiver.actor_stats() == {"actor-0": {"others": 3.0}}, actor)
    assert receiver.mean_actor_stats() == {"actor-0": {"others": 3.0}}


def test_an_error_in_the_thread_reaches_whoever_drains(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = pair.receiver()

    def broken() -> list[object]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pair.ledger, "grantable", broken)
    with pytest.raises(ReceiverError, match="a defect") as caught:
        receiver.drain(20.0)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_signal_in_the_middle_of_a_turn_ends_the_receiver_and_nothing_more_is_acknowledged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, actor = pair.receiver(), pair.actor()
    [ticket, _] = pair.tickets(actor, 2)
    # The ledger has its verdict, and the record is neither kept nor answered: here the signal comes.
    received_all = pair.ledger.received_all

    def interrupted(claims: Iterable[Claim]) -> list[Verdict]:
        received_all(claims)
        raise SystemExit(143)

    monkeypatch.setattr(pair.ledger, "received_all", interrupted)
    sender = threading.Timer(0.05, actor.send, (make_trajectory(ticket),))
    sender.start()
    with pytest.raises((SystemExit, ReceiverError)):
        receiver.drain(20.0)
    sender.join()
    with pytest.raises(ReceiverError):
        receiver.drain(20.0)
    actor.poll(0.2)
    assert actor.num_unacknowledged == 1


def test_tcp_on_loopback_when_asked_and_nothing_beyond(pair: Pair) -> None:
    receiver = pair.receiver(endpoint="tcp://127.0.0.1:*")
    actor = pair.actor(endpoint=receiver.endpoint)
    [ticket, _] = pair.tickets(actor, 2)
    actor.send(make_trajectory(ticket))
    drain(receiver, 1, actor)
    arena = TrajectoryStore(pair.run_dir.path / "other.replay", 1 << 12, 8)
    for endpoint in ("tcp://0.0.0.0:1", "tcp://*:1", "inproc://x", "udp://127.0.0.1:1"):
        with pytest.raises(ValueError, match="without keys|endpoint"):
            Receiver(Endpoints(endpoint), pair.ledger, RecordLimits(VOCAB_SIZE), pair.run_dir, arena).start()
    arena.path.unlink()


def test_an_endpoint_in_use_is_an_error_of_start(pair: Pair) -> None:
    taken = pair.receiver(endpoint="tcp://127.0.0.1:*")
    arena = TrajectoryStore(pair.run_dir.path / "other.replay", 1 << 12, 8)
    with pytest.raises(zmq.ZMQError):
        Receiver(Endpoints(taken.endpoint), pair.ledger, RecordLimits(VOCAB_SIZE), pair.run_dir, arena).start()
    arena.path.unlink()


def test_asyncio_wakes_for_every_message_while_others_send(pair: Pair) -> None:
    """Without heartbeats nothing but the socket's signal can wake: a lost edge would hang until the time-out."""
    receiver = pair.receiver(batch_size=64)
    actor = pair.actor(want=64, heartbeat_s=600.0)
    num_trajectories = 500

    async def play() -> None:
        sent = 0
        acknowledged = 0

        async def send_later(ticket: Ticket) -> None:
            await asyncio.sleep(0)
            actor.send(make_trajectory(ticket, version=ticket.min_version))

        async def learn() -> None:
            version = 0
            while acknowledged < num_trajectories:
                batch = await asyncio.to_thread(receiver.drain, 0.01)
                receiver.trained([trajectory.ticket_id for trajectory in batch])
                version += 1
                receiver.announce(version)

        learner = asyncio.create_task(learn())
        tasks = set()
        while acknowledged < num_trajectories:
            await actor.readable(1.0)
            for event in actor.poll():
                if isinstance(event, messages.Grant):
                    for ticket in event.tickets[: num_trajectories - sent]:
                        sent += 1
                        tasks.add(asyncio.create_task(send_later(ticket)))
                elif isinstance(event, messages.Ack):
                    acknowledged += len(event.sequences)
        await learner

    asyncio.run(asyncio.wait_for(play(), 60))


def test_a_waiting_coroutine_gives_way_and_its_time_out_holds(pair: Pair) -> None:
    actor = pair.actor(heartbeat_s=600.0)

    async def wait() -> tuple[list[object], bool]:
        ran = False

        async def other() -> None:
            nonlocal ran
            ran = True

        task = asyncio.create_task(other())
        await actor.readable(0.05)
        events = actor.poll()
        await task
        return list(events), ran

    assert asyncio.run(wait()) == ([], True)


def test_closing_frees_the_descriptors(run_dir: RunDirectory) -> None:
    def used() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        pair = Pair(run_dir)
        pair.receiver()
        pair.tickets(pair.actor(), 2)
        pair.close()

    once()
    before = used()
    for _ in range(3):
        once()
    assert used() <= before


def test_a_million_tokens_fit_through(run_dir: RunDirectory) -> None:
    pair = Pair(run_dir)
    receiver = pair.receiver(replay_bytes=40 << 20)
    actor = pair.actor(want=1, arena_bytes=20 << 20)
    [ticket] = pair.tickets(actor, 1)
    sent = make_trajectory(ticket, num_tokens=1 << 20)
    actor.send(sent)
    [arrived] = drain(receiver, 1, actor)
    assert contents(arrived) == contents(sent)
    pair.close()
