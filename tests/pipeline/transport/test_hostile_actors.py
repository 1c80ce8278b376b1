"""One actor sends wrong messages, by mistake or on purpose: the learner goes on for all others."""

import contextlib
import dataclasses
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from impala_llm.pipeline.shm import record_kernels
from impala_llm.pipeline.shm.record import RecordError, decode_record, record_bytes
from impala_llm.pipeline.shm.ring import ArenaWriter
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.transport import ingest, messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.trajectory import TrajectoryError
from tests.pipeline.keeping import checksum_of, words_of
from tests.pipeline.pair import Pair, counter, drain
from tests.pipeline.peers import Peer
from tests.pipeline.support import make_trajectory, turns_until

ROOT = Path(__file__).parents[3]


def still_serves(pair: Pair, actor_id: str = "sound") -> None:
    """A sound actor brings a trajectory."""
    receiver = pair.receivers[-1]
    actor = pair.actor(actor_id, want=1)
    [ticket] = pair.tickets(actor, 1)
    actor.send(make_trajectory(ticket, actor_id=actor_id))
    assert [t.ticket_id for t in drain(receiver, 1, actor)] == [ticket.ticket_id]


def test_more_sequences_than_a_message_holds_are_acknowledged_in_several(pair: Pair) -> None:
    receiver = pair.receiver()
    arena = ArenaWriter(pair.run_dir.arena_path("peer"), 4096, incarnation=1)
    peer = Peer(receiver, arena="peer", first_sequence=1)
    # What was answered before, by its own account, is so again, however often it is offered.
    again = messages.DescriptorBatch.of([messages.Descriptor(0, 0, 0, 11, 0)] * messages.MAX_ITEMS)
    for _ in range(2):
        peer.say(again)
    count = 0
    while count < 2 * messages.MAX_ITEMS:
        answer = peer.hear_until(messages.Ack)
        assert isinstance(answer, messages.Ack)
        count += len(answer.sequences)
    peer.close()
    arena.close()
    still_serves(pair)


def test_figures_without_a_name_are_no_trajectory(pair: Pair) -> None:
    receiver, actor = pair.receiver(), pair.actor(want=1)
    [ticket] = pair.tickets(actor, 1)
    sound = make_trajectory(ticket)
    with pytest.raises(TrajectoryError, match="stats has a name that is empty"):
        dataclasses.replace(sound, stats={"": 1.0})
    for names in (("",), ("a", ""), ("", "a")):
        hidden = dataclasses.replace(sound)
        object.__setattr__(hidden, "stats", dict.fromkeys(names, 1.0))
        data = record_bytes(hidden)
        with pytest.raises(RecordError, match="stats has a name that is empty"):
            decode_record(data)
    actor.send(hidden)
    refused = []

    def is_refused() -> bool:
        refused.extend(event for event in actor.poll(0.01) if isinstance(event, messages.Refused))
        return bool(refused)

    turns_until(is_refused)
    assert "stats has a name that is empty" in refused[0].reason
    assert receiver.drain(0.0) == []
    still_serves(pair)


def test_a_record_longer_than_an_episode_may_be_is_refused_with_the_setting_to_change(pair: Pair) -> None:
    receiver, actor = pair.receiver(max_tokens=50), pair.actor(want=2)
    long, fits = pair.tickets(actor, 2)
    actor.send(make_trajectory(long, num_tokens=51))
    actor.send(make_trajectory(fits, num_tokens=50))
    events: list[object] = []

    def is_refused() -> bool:
        events.extend(event for event in actor.poll(0.01) if isinstance(event, messages.Refused))
        return bool(events)

    turns_until(is_refused)
    [refused] = events
    assert isinstance(refused, messages.Refused) and refused.sequence == 0
    assert refused.reason == ("it has 51 tokens, the learner's engine.max_length is 50: give its actor the same")
    assert [t.ticket_id for t in drain(receiver, 1, actor)] == [fits.ticket_id]


def test_an_unroll_for_a_ticket_of_a_group_is_refused_with_the_settings_to_change(pair: Pair) -> None:
    receiver, actor = pair.receiver(group_size=2), pair.actor(want=2)
    [ticket, other] = pair.tickets(actor, 2)
    actor.request(0)
    for index in (0, 1):
        actor.send(make_trajectory(ticket, episode_id="x", unroll_index=index, continues=index == 0))
    actor.send(make_trajectory(other))
    events = turns_until(lambda: actor.num_unacknowledged == 0, actor)
    [first, _] = [event.reason for event in events if isinstance(event, messages.Refused)]
    assert "is of a group" in first and "actor.unroll_turns and actor.unroll_tokens" in first
    assert [t.ticket_id for t in drain(receiver, 1, actor)] == [other.ticket_id]
    assert receiver.lost_members(other.group_id) == 1, "the group is not waited for"


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_long_record_that_an_earlier_process_took_is_dropped_by_one_with_a_smaller_limit(
    pair: Pair, caplog: pytest.LogCaptureFixture, group_size: int
) -> None:
    first, actor = pair.receiver(group_size=group_size), pair.actor(want=2)
    long, fits = pair.tickets(actor, 2)
    actor.request(0)
    for ticket, size in ((long, 51), (fits, 50)):
        actor.send(make_trajectory(ticket, num_tokens=size))
    drain(first, 2, actor)
    turns_until(lambda: actor.num_unacknowledged == 0, actor)
    pair.receivers.remove(first)
    first.close()
    second = pair.receiver(max_tokens=50, group_size=group_size)
    assert [t.ticket_id for t in second.drain(0.0)] == [fits.ticket_id]
    assert second.counters()["evicted"] == 1
    assert second.lost_members(fits.group_id) == group_size - 1, "its group does not wait for the one that was dropped"
    assert f"ticket {long.ticket_id} has 51 tokens, the learner's engine.max_length is 50" in caplog.text


def test_an_error_in_handling_a_peer_ends_its_session_and_no_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = pair.receiver()
    failed = pair.ledger.failed

    def broken(ticket_id: int, actor_id: str) -> None:
        if actor_id == "peer":
            raise ZeroDivisionError("a defect")
        failed(ticket_id, actor_id)

    monkeypatch.setattr(pair.ledger, "failed", broken)
    peer = Peer(receiver)
    peer.say(messages.TicketRequest(2))
    peer.hear_until(messages.Grant)
    peer.say(messages.TicketFailed(0, "x"))
    turns_until(counter(receiver, "sessions_broken"))
    turns_until(lambda: receiver.counters()["open"] == 0)  # they are granted again
    peer.say(messages.Heartbeat((), {}))
    peer.hear_until(messages.HelloWanted)
    assert "peer" in caplog.text and "a defect" in caplog.text
    peer.close()
    still_serves(pair)


def test_an_error_over_a_record_ends_the_session_and_takes_no_space(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = pair.receiver(replay_bytes=1 << 13)
    defects = [ZeroDivisionError("a defect")]

    class Broken:
        """The compiled code, whose first call fails."""

        def __getattr__(self, name: str) -> object:
            if name == "take_records" and defects:
                raise defects.pop()
            return getattr(record_kernels, name)

    monkeypatch.setattr(ingest, "record_kernels", Broken())
    peer = Peer(receiver)
    record = words_of(make_trajectory())
    rows = [messages.Descriptor(i, 0, 0, len(record), checksum_of(record)) for i in range(20)]  # more than fit
    peer.say(messages.DescriptorBatch.of(rows), *[record.tobytes()] * 20)
    turns_until(counter(receiver, "sessions_broken"))
    peer.close()
    still_serves(pair)


def test_frames_beyond_what_may_wait_are_dropped_unseen_and_asked_for_once_there_is_room(pair: Pair) -> None:
    receiver = pair.receiver(batch_size=16, replay_bytes=1 << 13)  # room for nine of 32 records, and about as many wait
    peer = pair.peer(receiver)
    peer.request(32)
    tickets = peer.granted().tickets
    records = [words_of(make_trajectory(ticket)) for ticket in tickets]
    rows = [
        messages.Descriptor(i, ticket.ticket_id, 0, len(record), checksum_of(record))
        for i, (ticket, record) in enumerate(zip(tickets, records, strict=True))
    ]

    def offer(sequences: Iterable[int]) -> None:
        for i in sequences:
            peer.say(messages.DescriptorBatch.of([rows[i]]), records[i].tobytes())

    offer(range(32))
    peer.say(messages.Heartbeat((), {}))
    peer.hear_until(messages.WeightsAnnounced)  # its answer: all offers have been looked at
    wanted: list[int] = []
    arrived: list[int] = []

    def are_all_there() -> bool:
        peer.say(messages.DescriptorBatch.of(rows))  # a reminder
        while peer.socket.poll(50):
            message = peer.hear()
            if isinstance(message, messages.RecordsWanted):
                wanted.extend(message.sequences)
                offer(message.sequences)
        for trajectory in receiver.drain(0.0):
            arrived.append(trajectory.ticket_id)
            receiver.evicted([trajectory.unroll_id])
        return len(arrived) >= 32

    turns_until(are_all_there)
    assert wanted and sorted(arrived) == [ticket.ticket_id for ticket in tickets]


LEARNER = """
import resource, sys, tempfile
from pathlib import Path
from impala_llm.pipeline.shm.run_directory import RunDirectory
from tests.pipeline.pair import Pair
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with RunDirectory.create("t", Path(sys.argv[1])) as run_dir:
    pair = Pair(run_dir)
    receiver = pair.receiver()
    print(flush=True)
    sys.stdin.read()
    assert len(receiver.drain(20.0)) == 1
    pair.close()
"""


def test_more_connections_than_descriptors_at_first_leave_room_for_actors() -> None:
    with tempfile.TemporaryDirectory() as base:  # not tmp_path: socket paths must be short
        learner = subprocess.Popen(
            [sys.executable, "-c", LEARNER, base], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert learner.stdin is not None and learner.stdout is not None
        learner.stdout.readline()
        run_dir = RunDirectory.attach("t", Path(base))
        with contextlib.ExitStack() as strangers:
            for _ in range(300):
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(run_dir.endpoint(0).removeprefix("ipc://"))
            actor = ActorChannel(run_dir.endpoint(0), "actor-0", run_dir, 1 << 16, times=ChannelTimes(0.05))
            actor.hello()
            actor.request(1)
            turns_until(lambda: len(actor.held) == 1 or learner.poll() is not None, actor)
            assert learner.poll() is None
            actor.send(make_trajectory(actor.held[0]))
            turns_until(lambda: actor.num_unacknowledged == 0, actor)
            actor.close()
        learner.communicate(timeout=20)
        assert learner.returncode == 0


def test_a_refused_record_that_is_offered_again_is_refused_again(pair: Pair) -> None:
    peer = pair.peer(pair.receiver())
    peer.request(1)
    [ticket, *_] = peer.granted().tickets
    offer = messages.DescriptorBatch.of([messages.Descriptor(0, ticket.ticket_id, 0, 100, 0)])
    for _ in range(2):  # the first answer was lost on its way
        peer.say(offer, bytes(800))
        while not isinstance(answer := peer.hear(), messages.Ack | messages.Refused):
            pass
        assert isinstance(answer, messages.Refused)
