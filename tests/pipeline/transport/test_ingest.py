"""From offers to the trajectory store: each record once, in order, and nothing acknowledged that is not kept."""

import dataclasses
from pathlib import Path

import numba
import numpy as np
import pytest

from impala_llm.pipeline.shm.record import encode_record, record_bytes
from impala_llm.pipeline.shm.ring import ArenaReader, ArenaWriter, Span
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.ingest import Inbox, Ingest, Settled
from impala_llm.pipeline.transport.messages import Descriptor, DescriptorBatch
from impala_llm.pipeline.transport.offers import Offers
from impala_llm.trajectory import Trajectory
from tests.pipeline.keeping import checksum_of, words_of
from tests.pipeline.support import VOCAB_SIZE, contents, make_trajectory

ACTOR = "actor-0"
NUM_TOKENS = 20


class Side:
    """The ingest of a learner rank, and an actor's arena. `tickets`: granted to the actor, all of them."""

    def __init__(self, path: Path, replay_bytes: int = 1 << 18, shared: bool = True) -> None:
        self.ledger = TicketLedger(TaskOrder(range(50), seed=1), batch_size=16, max_staleness=1)
        self.ledger.request(ACTOR, 32)
        self.ledger.request("another", 0)
        ((_, self.tickets),) = self.ledger.grantable()
        self.replay = TrajectoryStore(path / "learner.replay", replay_bytes, 256)
        self.inbox = Inbox()
        self.ingest = Ingest(self.replay, self.ledger, self.inbox, VOCAB_SIZE)
        self.writer = ArenaWriter(path / "actor.arena", 1 << 18)
        self.offers = Offers(ArenaReader(path / "actor.arena") if shared else None)

    def write(self, trajectory: Trajectory) -> Span:
        span = self.writer.write(encode_record(trajectory))
        assert span is not None
        return span

    def erase(self) -> None:
        """Overwrite all records of the actor's arena."""
        file = np.memmap(self.writer.path, np.uint64, "r+")
        file[-(self.writer.capacity // 8) :] = 0

    def descriptor(self, sequence: int, trajectory: Trajectory) -> Descriptor:
        """After laying its record down."""
        return Descriptor(sequence, trajectory.ticket_id, *self.write(trajectory))

    def offer(self, *descriptors: Descriptor, frames: list[bytes] | None = None) -> list[int]:
        return self.offers.add(np.array(descriptors, np.int64).reshape(-1, 5), frames or [])

    def take(self) -> Settled:
        """Until nothing more can be settled now, as the receiver does."""
        total = Settled()
        self.offers.announced(self.ledger.version)
        while self.offers.queue:
            settled = self.ingest.take(self.offers, ACTOR)
            total.acks += settled.acks
            total.refusals += settled.refusals
            if not settled.acks and not settled.refusals:
                break
        return total

    def arrived(self) -> list[Trajectory]:
        return self.inbox.drain()

    def state_of(self, ticket: Ticket) -> str:
        if self.ledger.lookup(ticket.ticket_id) is None:
            return "ended"
        open_here = [t.ticket_id for t in self.ledger.open_tickets(ACTOR)]
        return "open" if ticket.ticket_id in open_here else "received"


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def play(ticket: Ticket, version: int = 0, num_tokens: int = NUM_TOKENS) -> Trajectory:
    return make_trajectory(ticket, seed=ticket.ticket_id, num_tokens=num_tokens, version=version)


def ids(trajectories: list[Trajectory]) -> list[int]:
    return [t.ticket_id for t in trajectories]


def test_records_are_kept_acknowledged_and_given_to_the_learner_in_order(side: Side) -> None:
    played = [play(ticket) for ticket in side.tickets[:6]]
    descriptors = [side.descriptor(i, t) for i, t in enumerate(played)]
    assert side.offer(*descriptors[:4]) == [] and side.offer(*descriptors[4:]) == []
    assert side.take() == Settled(acks=[0, 1, 2, 3, 4, 5])
    arrived = side.arrived()
    assert [contents(t) for t in arrived] == [contents(t) for t in played]
    assert {side.state_of(ticket) for ticket in side.tickets[:6]} == {"received"}
    assert side.ingest.totals["received_bytes"] == sum(len(record_bytes(t)) for t in played)
    later = TrajectoryStore(side.replay.path, side.replay.capacity, 256)
    assert [contents(t) for t in later.recovered()] == [contents(t) for t in played]


def test_messages_that_wait_are_judged_together_and_each_record_for_itself(side: Side) -> None:
    played = [play(ticket) for ticket in side.tickets[:6]]
    descriptors = [side.descriptor(i, t) for i, t in enumerate(played)]
    descriptors[2] = descriptors[2]._replace(checksum=descriptors[2].checksum ^ 1)
    for first in (0, 1, 4):
        assert side.offer(*descriptors[first : {0: 1, 1: 4, 4: 6}[first]]) == []
    settled = side.ingest.take(side.offers, ACTOR)
    assert settled.acks == [0, 1, 3, 4, 5] and [sequence for sequence, _ in settled.refusals] == [2]
    assert not side.offers.queue
    assert [contents(t) for t in side.arrived()] == [contents(played[i]) for i in settled.acks]


def test_what_came_alone_or_together_runs_through_the_same_compiled_code(side: Side) -> None:
    played = [play(ticket) for ticket in side.tickets[:3]]
    offered = [DescriptorBatch.of([side.descriptor(i, t)]).array for i, t in enumerate(played)]
    seen = []
    for batch in ([offered[0]], offered[1:]):
        for rows in batch:
            side.offers.add(rows, [])
        seen.append(numba.typeof(side.offers.next_chunk().rows))
    assert seen[0] == seen[1]


def test_no_more_than_512_are_judged_together(side: Side) -> None:
    sequences = iter(range(700))
    for count in (400, 200, 100):
        side.offer(*(Descriptor(next(sequences), 0, 0, 0, 0) for _ in range(count)))  # no record is so short
    assert [len(side.ingest.take(side.offers, ACTOR).refusals) for _ in range(2)] == [600, 100]


def test_a_record_may_change_after_it_was_acknowledged(side: Side) -> None:
    played = play(side.tickets[0])
    side.offer(side.descriptor(0, played))
    assert side.take().acks == [0]
    side.erase()
    assert contents(side.arrived()[0]) == contents(played)


def test_records_in_frames_are_kept_too(tmp_path: Path) -> None:
    side = Side(tmp_path, shared=False)
    played = [play(ticket) for ticket in side.tickets[:3]]
    records = [record_bytes(t) for t in played]
    sums = [checksum_of(words_of(t)) for t in played]
    rows = [Descriptor(i, t.ticket_id, 0, len(records[i]) // 8, sums[i]) for i, t in enumerate(played)]
    side.offer(*rows, frames=records)
    assert side.take() == Settled(acks=[0, 1, 2])
    assert [contents(t) for t in side.arrived()] == [contents(t) for t in played]


def test_frames_of_other_sizes_than_their_descriptors_say_are_refused(tmp_path: Path) -> None:
    side = Side(tmp_path, shared=False)
    played = [play(ticket) for ticket in side.tickets[:7]]
    records = [record_bytes(t) for t in played]
    sums = [checksum_of(words_of(t)) for t in played]
    rows = [Descriptor(i, t.ticket_id, 0, len(records[i]) // 8, sums[i]) for i, t in enumerate(played)]
    frames = list(records)
    frames[0] = b""
    frames[1] += bytes(8)
    frames[2] = frames[2][:-1]
    rows[4] = rows[4]._replace(num_words=0)
    rows[5] = rows[5]._replace(checksum=rows[5].checksum ^ 1)
    rows[6] = rows[6]._replace(start=2**62)  # which counts for nothing where records are frames
    side.offer(*rows, frames=frames)
    settled = side.take()
    assert sorted(settled.acks) == [3, 6]
    assert sorted(sequence for sequence, _ in settled.refusals) == [0, 1, 2, 4, 5]
    assert all("came as a frame" in reason for sequence, reason in settled.refusals if sequence < 3)
    assert ids(side.arrived()) == [played[3].ticket_id, played[6].ticket_id]


# --- said more than once


def test_the_same_episode_twice_in_a_batch_is_kept_once_and_acknowledged_twice(side: Side) -> None:
    played = play(side.tickets[0])
    side.offer(side.descriptor(0, played), side.descriptor(1, played), side.descriptor(2, play(side.tickets[1])))
    assert sorted(side.take().acks) == [0, 1, 2]
    assert ids(side.arrived()) == [side.tickets[0].ticket_id, side.tickets[1].ticket_id]
    assert side.replay.used == 2 * -(-len(record_bytes(played)) // 64) * 64


def test_two_episodes_of_a_ticket_in_a_batch_the_first_one_counts(side: Side) -> None:
    first = play(side.tickets[0])
    second = dataclasses.replace(first, episode_id="another")
    side.offer(side.descriptor(0, first), side.descriptor(1, second))
    settled = side.take()
    assert settled.acks == [0]
    assert [(s, "has its episode already" in reason) for s, reason in settled.refusals] == [(1, True)]
    assert [t.episode_id for t in side.arrived()] == [first.episode_id]
    assert side.ingest.totals["trajectories_unwanted"] == 1


def test_unrolls_of_an_episode_are_all_kept(side: Side) -> None:
    first = play(side.tickets[0])
    unrolls = [dataclasses.replace(first, unroll_index=i) for i in (1, 0, 2, 1)]
    side.offer(*(side.descriptor(i, t) for i, t in enumerate(unrolls)))
    assert sorted(side.take().acks) == [0, 1, 2, 3]
    assert [t.unroll_index for t in side.arrived()] == [1, 0, 2]


def test_a_replayed_descriptor_is_acknowledged_again_and_never_read_again(side: Side) -> None:
    rows = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets[:4])]
    side.offer(*rows)
    assert side.offer(*rows) == []  # it waits: not settled, and not queued a second time
    assert side.take().acks == [0, 1, 2, 3]
    side.erase()  # reading it again would find it torn
    assert side.offer(*rows[1:3]) == [1, 2]
    assert side.offer(rows[3], side.descriptor(4, play(side.tickets[4])), rows[0]) == [3, 0]
    assert side.take() == Settled(acks=[4])
    assert ids(side.arrived()) == [t.ticket_id for t in side.tickets[:5]]


def test_a_refused_sequence_that_is_said_again_is_not_read_again(side: Side) -> None:
    row = side.descriptor(0, play(side.tickets[0]))
    side.offer(row._replace(checksum=0))
    assert [s for s, _ in side.take().refusals] == [0]
    assert side.offer(row) == [0]
    assert not side.offers.queue and side.arrived() == []


def test_a_sequence_that_comes_twice_in_a_batch_is_acknowledged_only_once_it_is_kept(side: Side) -> None:
    row = side.descriptor(0, play(side.tickets[0]))
    for rows in ([row, row], [row._replace(sequence=5), row._replace(sequence=5)]):
        assert side.offer(*rows) == []
        assert rows[0].sequence in side.take().acks
    assert len(side.arrived()) == 1


def test_reordered_batches_are_all_kept_and_told_apart(side: Side) -> None:
    rows = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets[:9])]
    for batch in (rows[6:9], rows[2:4], rows[3:7], rows[0:2], rows[4:6], rows[::-1]):
        side.offer(*batch)
    assert sorted(side.take().acks) == list(range(9))
    assert sorted(ids(side.arrived())) == sorted(t.ticket_id for t in side.tickets[:9])
    assert sorted(side.offer(*rows[::2])) == [0, 2, 4, 6, 8]
    assert side.offers.num_gaps == 0, "nothing is remembered one by one once there are no gaps"
    assert side.offers.look_up([8, 9]) == ([8], [9])


def test_what_was_seen_of_an_actor_takes_no_memory_after_the_learner_was_started_again() -> None:
    # A new process of the learner meets an actor whose first 100 records were answered by the last one.
    offers = Offers(reader=None, first_sequence=100)
    for sequence in range(100, 5100):
        offers.add(np.array([[sequence, sequence, 0, 10, 0]], np.int64), [])
        offers.queue.clear()
    assert offers.num_gaps == 0


# --- what must wait


def test_what_is_ahead_of_the_announcement_waits_and_is_taken_after_it(side: Side) -> None:
    rows = [side.descriptor(i, play(t, version=i % 2)) for i, t in enumerate(side.tickets[:4])]
    side.offer(*rows)
    assert side.take() == Settled(acks=[0, 2])
    assert side.take() == Settled()
    side.ledger.advance(1)
    assert side.take() == Settled(acks=[1, 3])
    assert ids(side.arrived()) == [side.tickets[i].ticket_id for i in (0, 2, 1, 3)]


def test_what_is_ahead_waits_for_as_long_as_the_version_takes_and_holds_nothing_up(side: Side) -> None:
    early, late = play(side.tickets[0], version=1), play(side.tickets[1])
    side.offer(side.descriptor(0, early))
    assert side.take() == Settled()
    side.offer(side.descriptor(1, late))
    assert side.take() == Settled(acks=[1])
    assert side.state_of(side.tickets[0]) == "open"
    assert side.offer(side.descriptor(0, early)) == []  # offered once more, and not settled yet
    side.ledger.advance(1)
    assert side.take() == Settled(acks=[0])
    assert ids(side.arrived()) == [side.tickets[1].ticket_id, side.tickets[0].ticket_id]


def test_a_version_that_nobody_can_be_making_is_refused(side: Side) -> None:
    side.offer(side.descriptor(0, play(side.tickets[0], version=2)), side.descriptor(1, play(side.tickets[1])))
    settled = side.take()
    assert settled.acks == [1] and [(s, "versions reaches 2" in r) for s, r in settled.refusals] == [(0, True)]
    assert side.state_of(side.tickets[0]) == "ended"
    assert side.replay.used == -(-len(record_bytes(play(side.tickets[1]))) // 64) * 64


@pytest.mark.parametrize("premature", [False, True])
def test_a_full_replay_arena_keeps_the_order_and_loses_nothing(tmp_path: Path, premature: bool) -> None:
    size = -(-len(record_bytes(play(Ticket(0, 0, 0, 0, 0)))) // 64) * 64
    side = Side(tmp_path, replay_bytes=5 * size)
    played = [play(t, version=int(premature and i == 3)) for i, t in enumerate(side.tickets[:20])]
    rows = [side.descriptor(i, t) for i, t in enumerate(played)]
    side.offer(*rows[:9])
    side.offer(*rows[9:])
    acks: list[int] = []
    arrived: list[str] = []
    for turn in range(60):
        acks += side.take().acks
        assert side.replay.used <= side.replay.capacity
        assert side.take() == Settled()
        new = side.arrived()
        assert len(new) <= 5
        arrived += [t.episode_id for t in new]
        assert sorted(acks) == sorted(i for i, t in enumerate(played) if t.episode_id in arrived)
        side.ledger.evicted(ids(new))
        side.replay.end(ids(new))
        new.clear()
        if turn == 3 and premature:
            side.ledger.advance(1)
    order = [i for i in range(20) if not (premature and i == 3)]
    assert [i for i in acks if not (premature and i == 3)] == order
    assert sorted(acks) == list(range(20))
    assert arrived == [played[i].episode_id for i in acks]
    assert side.offer(*rows) == list(range(20))


# --- what is not to be believed


@pytest.mark.parametrize("num_words", [0, 1, 10, -1, -(2**63), 2**31, 2**62, 2**63 - 1])
def test_impossible_sizes_are_refused_and_the_rest_is_not_held_up(side: Side, num_words: int) -> None:
    rows = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets[:3])]
    rows[1] = rows[1]._replace(num_words=num_words)
    side.offer(*rows)
    settled = side.take()
    assert settled.acks == [0, 2] and [s for s, _ in settled.refusals] == [1]
    assert side.state_of(side.tickets[1]) == "ended"
    side.offer(rows[1]._replace(sequence=3))  # alone
    settled = side.take()
    assert settled.acks == [] and [s for s, _ in settled.refusals] == [3]
    assert not side.offers.queue


@pytest.mark.parametrize("start", [1, -8, 2**15, 2**40, 2**62, 2**63 - 1, -(2**63)])
def test_impossible_spans_are_refused_and_the_rest_is_not_held_up(side: Side, start: int) -> None:
    rows = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets[:3])]
    side.offer(rows[0], rows[1]._replace(start=start), rows[2])
    settled = side.take()
    assert settled.acks == [0, 2]
    assert [(s, "checksum" in reason) for s, reason in settled.refusals] == [(1, True)]
    assert ids(side.arrived()) == [side.tickets[0].ticket_id, side.tickets[2].ticket_id]


def test_a_record_larger_than_the_replay_arena_is_refused_with_the_key_to_change(tmp_path: Path) -> None:
    side = Side(tmp_path, replay_bytes=1024)
    side.offer(side.descriptor(0, play(side.tickets[0], num_tokens=100)), side.descriptor(1, play(side.tickets[1])))
    settled = side.take()
    assert settled.acks == [1] and "replay.capacity_mb" in settled.refusals[0][1]


def changed(ticket: Ticket, **changes: object) -> Trajectory:
    return dataclasses.replace(play(ticket), **changes)


def test_records_that_break_a_rule_are_refused_by_name(side: Side) -> None:
    tickets = side.tickets
    tokens = play(tickets[0]).tokens.copy()
    tokens[3] = VOCAB_SIZE
    wrong = play(tickets[1])
    wrong.rewards[0] = 1.0  # behind the back of its checks
    for sequence, (trajectory, expected) in enumerate(
        [
            (changed(tickets[0], tokens=tokens), "vocabulary"),
            (wrong, "rewards must be 0"),
            (changed(tickets[2], task_id=-7), "task_id and group_id are -7"),
            (changed(tickets[3], group_id=999), "task_id and group_id"),
        ]
    ):
        side.offer(side.descriptor(sequence, trajectory))
        settled = side.take()
        assert settled.acks == [] and len(settled.refusals) == 1 and expected in settled.refusals[0][1]
        assert side.state_of(tickets[sequence]) == "ended"
    assert side.ingest.totals["trajectories_refused"] == 4
    assert side.replay.used == 0 and side.arrived() == []


def test_a_record_of_another_ticket_than_its_descriptor_says_is_refused(side: Side) -> None:
    row = side.descriptor(0, play(side.tickets[0]))
    side.offer(row._replace(ticket_id=side.tickets[1].ticket_id))
    assert "in its descriptor" in side.take().refusals[0][1]
    assert side.state_of(side.tickets[0]) == "open"


def test_a_record_of_no_known_or_an_ended_ticket_is_refused_and_does_no_harm(side: Side) -> None:
    side.ledger.refused(side.tickets[0].ticket_id, ACTOR)
    unknown = dataclasses.replace(play(side.tickets[1]), ticket_id=9999)
    side.offer(side.descriptor(0, play(side.tickets[0])), side.descriptor(1, unknown))
    settled = side.take()
    assert settled.acks == []
    assert "has ended" in settled.refusals[0][1] and "unknown" in settled.refusals[1][1]
    assert side.replay.used == 0


def test_weights_that_are_too_old_for_the_ticket_are_refused(side: Side) -> None:
    played = [play(t) for t in side.tickets]
    side.offer(*(side.descriptor(i, t) for i, t in enumerate(played)))
    side.take()
    new = side.arrived()
    side.ledger.trained(ids(new)[:16])
    side.ledger.advance(1)
    side.ledger.trained(ids(new)[16:])
    side.ledger.advance(2)
    ((_, tickets),) = side.ledger.grantable()
    assert tickets[0].min_version > 0
    side.offer(side.descriptor(len(played), play(tickets[0], version=0)))
    assert "demands" in side.take().refusals[0][1]


def test_an_actor_that_cuts_its_arena_is_refused_and_does_not_kill_the_learner(side: Side) -> None:
    rows = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets[:2])]
    side.offer(*rows)
    assert side.writer.path is not None
    with side.writer.path.open("r+b") as file:
        file.truncate(4096)
    settled = side.take()
    assert [s for s, _ in settled.refusals] == [0, 1] and "truncated" in settled.refusals[0][1]
    assert side.replay.used == 0 and len(side.replay.reserve(np.array([side.replay.capacity // 8]))) == 1


def test_random_descriptors_never_raise_and_only_true_ones_are_kept(tmp_path: Path) -> None:
    side = Side(tmp_path, replay_bytes=1 << 14)
    rng = np.random.default_rng(0)
    true = [side.descriptor(i, play(ticket)) for i, ticket in enumerate(side.tickets)]
    numbers = [0, 1, 7, 8, 11, 64, 2**31, 2**62, 2**63 - 1]
    acked: set[int] = set()
    arrived: list[int] = []
    for _ in range(400):
        batch = []
        for _ in range(rng.integers(1, 5)):
            row = list(true[rng.integers(len(true))])
            if rng.random() < 0.8:
                row[0] = int(rng.integers(1 << 40))
                row[rng.integers(2, 5)] = int(numbers[rng.integers(len(numbers))])
            batch.append(Descriptor(*row))
        side.offer(*DescriptorBatch.of(batch).array.tolist())
        settled = side.take()
        acked |= {*settled.acks}
        new = side.arrived()
        arrived += ids(new)
        for trajectory in new:
            assert trajectory.tokens.tobytes() == play_of(side, trajectory.ticket_id).tokens.tobytes()
        side.replay.end(ids(new))
        new.clear()
        trajectory = None
    assert len(arrived) == len(set(arrived)) and set(arrived) <= {t.ticket_id for t in side.tickets}
    assert side.replay.used == 0 or len(side.replay.reserve(np.array([8]))) == 1


def play_of(side: Side, ticket_id: int) -> Trajectory:
    return play(next(t for t in side.tickets if t.ticket_id == ticket_id))
