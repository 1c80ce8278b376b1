"""Batch source between a receiver that is played here and the buffer: groups, order, evictions, tickets."""

import dataclasses
import math
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from impala_llm.config import ConfigError, load
from impala_llm.learning.batch_source import Batch, BatchSource, Stalled
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.trajectory import Trajectory
from tests.pipeline.keeping import words_of
from tests.pipeline.support import VOCAB_SIZE, turns_until
from tests.pipeline.support import make_trajectory as make_played
from tests.replay.builders import make_trajectory

GROUP, BATCH = 4, 8


def make_record(ticket: Ticket | None = None) -> Trajectory:
    """A trajectory whose record has the same size for all tickets."""
    name = f"episode {0 if ticket is None else ticket.ticket_id:3}"
    return make_played(ticket, num_tokens=100, episode_id=name)


@pytest.fixture
def run_dir() -> Iterator[RunDirectory]:
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:  # a short path
        yield run


class PlayedReceiver:
    """The part of a receiver that the source asks; the test says what arrives and what is lost."""

    num_failed, num_actors = 0.0, 2.0

    def __init__(self) -> None:
        self.arriving: list[Trajectory] = []
        self.lost: dict[int, int] = defaultdict(int)
        self.is_full = False
        self.evicted_tickets: list[int] = []

    def drain(self, timeout_s: float) -> list[Trajectory]:
        arrived, self.arriving = self.arriving, []
        return arrived

    def lost_members(self, group_id: int) -> int:
        return self.lost[group_id]

    def evicted(self, ticket_ids: list[int]) -> None:
        self.evicted_tickets += ticket_ids

    def counters(self) -> dict[str, float]:
        return {"actors": self.num_actors, "open": 3.0, "failed": self.num_failed}


def make_source(
    *overrides: str, seed: int = 0, stall_timeout_s: float = 600.0, batch_size: int = BATCH
) -> tuple[BatchSource, PlayedReceiver]:
    settings = ["experiment=toy", f"learner.batch_size={batch_size}", f"algorithm.group_size={GROUP}", *overrides]
    receiver, config = PlayedReceiver(), load(settings)
    config.learner.stall_timeout_s = stall_timeout_s
    return BatchSource(config, receiver, batch_size, seed), receiver  # type: ignore[arg-type]


def members(group_id: int, version: int = 0, missing: int = 0) -> list[Trajectory]:
    """The trajectories of a group, without the last `missing`."""
    tickets = range(group_id * GROUP, (group_id + 1) * GROUP - missing)
    return [make_trajectory(version=version, ticket_id=ticket, group_id=group_id) for ticket in tickets]


def tickets(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [t.ticket_id for t in batch.trajectories]


def test_a_batch_is_whole_groups_in_the_order_of_their_tickets() -> None:
    for seed in range(3):
        source, receiver = make_source()
        receiver.arriving = members(1) + members(0)
        random.Random(seed).shuffle(receiver.arriving)
        batch = source.next_batch(version=0)
        assert tickets(batch) == list(range(BATCH))
        assert batch.weights == (1.0,) * BATCH and batch.mean_reuse == 1.0
        assert len(set(batch.item_ids[:GROUP])) == len(set(batch.item_ids[GROUP:])) == 1
        assert batch.num_tokens == sum(t.num_tokens for t in batch.trajectories)
        assert sorted(t.ticket_id for t in source.received) == list(range(BATCH))
        assert receiver.evicted_tickets == []


def test_a_group_waits_for_its_members_and_a_batch_for_its_groups() -> None:
    source, receiver = make_source(stall_timeout_s=0.0)
    receiver.arriving = members(0) + members(1)[1:]
    source.collect(version=0, timeout_s=0.0)
    assert len(source.buffer) == 1
    receiver.arriving = members(1)[:1]
    assert tickets(source.next_batch(version=0)) == list(range(BATCH))


def test_groups_of_one_are_drawn_as_they_come() -> None:
    source, receiver = make_source("algorithm=vtrace", "algorithm.group_size=1")
    receiver.arriving = [make_trajectory(ticket_id=ticket, group_id=ticket) for ticket in reversed(range(BATCH + 3))]
    assert tickets(source.next_batch(version=0)) == list(range(3, BATCH + 3))
    assert len(source.buffer) == 3


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_group_without_its_lost_members_takes_the_place_of_a_whole_one(max_staleness: int) -> None:
    """With max_staleness 0 no ticket beyond the batch is granted: one that waited for more would wait for ever."""
    source, receiver = make_source(f"algorithm.max_staleness={max_staleness}", "learner.stall_timeout_s=1")
    for version in range(3):
        first = 2 * version
        receiver.arriving = members(first, version) + members(first + 1, version, missing=1)
        source.collect(version, timeout_s=0.0)
        assert len(source.buffer) == 1
        receiver.lost[first + 1] = 1  # from now on known to be lost
        assert tickets(source.next_batch(version)) == list(range(version * BATCH, (version + 1) * BATCH - 1))
    assert receiver.evicted_tickets == []


def test_who_has_nobody_left_to_be_compared_with_is_evicted_and_so_is_who_comes_late() -> None:
    source, receiver = make_source()
    lonely, *late = members(0)
    receiver.arriving, receiver.lost[0] = [lonely], GROUP - 1
    source.collect(version=0, timeout_s=0.0)
    assert receiver.evicted_tickets == [0] and len(source.buffer) == 0
    receiver.arriving = late[:1]  # an attempt that was given up arrives after all
    source.collect(version=0, timeout_s=0.0)
    assert receiver.evicted_tickets == [0, 1]
    assert [t.ticket_id for t in source.evicted] == [0, 1] and [t.ticket_id for t in source.received] == [0, 1]


def test_what_became_too_old_is_evicted_and_reported() -> None:
    source, receiver = make_source("algorithm.max_staleness=1")
    receiver.arriving = members(0, version=0)
    source.collect(version=0, timeout_s=0.0)
    receiver.arriving = members(1, version=1) + members(2, version=2)
    assert tickets(source.next_batch(version=2)) == list(range(GROUP, GROUP + BATCH))
    assert receiver.evicted_tickets == list(range(GROUP))
    receiver.arriving = members(3, version=0)  # born too old
    source.collect(version=2, timeout_s=0.0)
    assert receiver.evicted_tickets == [*range(GROUP), *range(3 * GROUP, 4 * GROUP)]


def test_what_is_too_old_is_evicted_although_there_is_less_than_a_batch() -> None:
    """Its tickets have the places of those that would make the batch whole: they are not granted before."""
    source, receiver = make_source("algorithm.max_staleness=0")
    receiver.arriving = members(0) + members(1) + members(2)  # of a run that had a larger batch
    assert tickets(source.next_batch(version=0)) == list(range(BATCH))
    assert source.batch_at_hand(version=1) is None
    assert receiver.evicted_tickets == list(range(BATCH, BATCH + GROUP))


def test_a_group_of_which_one_member_took_long_is_drawn_with_those_that_waited_for_it() -> None:
    source, receiver = make_source("algorithm.max_staleness=1")
    *waited, late = members(0, version=0)
    versions = np.where(late.action_mask, 0, late.versions).astype(np.int32)
    versions[np.flatnonzero(late.action_mask)[-1]] = 4
    receiver.arriving = [*waited, dataclasses.replace(late, versions=versions), *members(1, version=4)]
    source.collect(version=5, timeout_s=0.0)
    assert receiver.evicted_tickets == []
    assert tickets(source.next_batch(version=5)) == list(range(BATCH))


def test_data_that_are_used_once_and_have_no_known_advantage_are_drawn_the_oldest_first() -> None:
    words = ("recency_tau=null", "rarity_exponent=0", "max_replays=1", "samples_per_insert=1")
    source, receiver = make_source("algorithm.max_staleness=8", "replay=prioritised", *(f"replay.{w}" for w in words))
    receiver.arriving = [t for group_id in (3, 1, 2, 0) for t in members(group_id, version=group_id)]
    drawn = [tickets(source.next_batch(version=3)) for _ in range(2)]
    assert drawn == [[t.ticket_id for group_id in pair for t in members(group_id)] for pair in ((0, 1), (2, 3))]


def test_replay_draws_again_with_the_weight_of_the_item_on_every_member() -> None:
    # Another seed may leave one group for the last batch of two: it would wait for more, which never comes here.
    source, receiver = make_source("replay=prioritised", "replay.uniform_floor=0", "algorithm.max_staleness=4", seed=2)
    receiver.arriving = [t for group_id in range(4) for t in members(group_id)]
    drawn: Counter[int] = Counter()
    reuse = 0.0
    for _ in range(4):  # 2 samples per insert: 4 batches of 2 out of 4 groups
        batch = source.next_batch(version=0)
        drawn.update(tickets(batch))
        reuse += batch.mean_reuse
        of_item = defaultdict(set)
        for t, weight, item_id in zip(batch.trajectories, batch.weights, batch.item_ids, strict=True):
            of_item[item_id].add((t.group_id, weight))
        assert sorted(len(pairs) for pairs in of_item.values()) == [1, 1]
        # priorities that differ, so that a weight on the wrong member would show
        source.buffer.update_advantages(list(of_item), [0.1 + item_id for item_id in of_item])
    assert set(drawn.values()) == {2} and len(drawn) == 4 * GROUP
    assert reuse / 4 == pytest.approx(1.5)


def test_what_was_trained_on_before_it_became_too_old_is_not_lost() -> None:
    source, receiver = make_source("replay=prioritised", "replay.max_replays=4", "algorithm.max_staleness=1")
    receiver.arriving = [t for group_id in range(3) for t in members(group_id)]
    drawn = tickets(source.next_batch(version=0))
    source.collect(version=5, timeout_s=0.0)
    assert source.batch_at_hand(version=5) is None
    assert sorted(receiver.evicted_tickets) == list(range(3 * GROUP)), "all end their tickets"
    assert sorted(t.ticket_id for t in source.evicted) == sorted(set(range(3 * GROUP)) - set(drawn))


def test_the_same_seed_draws_the_same_batches() -> None:
    def draws(seed: int) -> list[list[int]]:
        source, receiver = make_source("replay=prioritised", "algorithm.max_staleness=4", seed=seed)
        receiver.arriving = [t for group_id in range(16) for t in members(group_id)]
        return [tickets(source.next_batch(version=0)) for _ in range(8)]

    assert draws(1) == draws(1) != draws(2)


def test_no_batch_for_too_long_says_what_there_was() -> None:
    source, receiver = make_source(stall_timeout_s=0.0)
    receiver.arriving = members(0) + members(1, missing=1)
    with pytest.raises(Stalled, match=r"stall_timeout_s.* 1 of 2 groups, 3 episodes under way, 2 actors, 3 traj"):
        source.next_batch(version=0)


def test_a_learner_that_was_stopped_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, or a laptop that sleeps, while it waits."""
    source, receiver = make_source(stall_timeout_s=60.0)
    now, jumps = [100.0], iter([3600.0])
    monkeypatch.setattr("impala_llm.pipeline.transport.active_clock.time.monotonic", lambda: now[0])

    def wait(said: str) -> None:
        if (jump := next(jumps, 0.0)) == 0.0:
            receiver.arriving = members(0) + members(1)
        now[0] += jump

    assert source.next_batch(version=0, on_wait=wait) is not None


def test_actors_that_are_still_to_come_are_waited_for() -> None:
    """Those of a partition that preempts come back after hours."""
    source, receiver = make_source(stall_timeout_s=0.0)
    receiver.num_actors = 0.0
    noted: list[str] = []

    def wait(said: str) -> None:
        noted.append(said)
        receiver.arriving = members(0) + members(1) if len(noted) == 2 else []

    assert source.next_batch(version=0, on_wait=wait) is not None
    assert "0 actors" in noted[0]


@pytest.mark.parametrize("seed", range(5))
def test_every_ticket_is_handed_out_once_or_evicted_once(seed: int) -> None:
    """Members arrive in any order, some are lost, some are late, versions go on: nothing vanishes, nothing doubles."""
    rng = random.Random(seed)
    source, receiver = make_source("algorithm.max_staleness=1")
    trained: Counter[int] = Counter()
    arrived: set[int] = set()
    version = 0
    for round_ in range(30):
        for group_id in (2 * round_, 2 * round_ + 1):
            there = [t for t in members(group_id, max(0, version - rng.randint(0, 2))) if rng.random() < 0.9]
            receiver.lost[group_id] = GROUP - len(there)
            receiver.arriving += there
            arrived |= {t.ticket_id for t in there}
        rng.shuffle(receiver.arriving)
        source.collect(version, timeout_s=0.0)
        while (batch := source.next_batch(version, until=0.0)) is not None:
            assert tickets(batch) == sorted(tickets(batch))
            assert all(version - t.oldest_version <= 1 for t in batch.trajectories)
            trained.update(tickets(batch))
            version += 1
    evicted = Counter(receiver.evicted_tickets)
    assert max((trained + evicted).values()) == 1
    waiting = arrived - trained.keys() - evicted.keys()
    assert len(waiting) == source.buffer.stats().num_trajectories
    assert trained and evicted


def test_a_bounded_share_of_a_batch_was_used_before() -> None:
    source, receiver = make_source(
        "replay=prioritised", "replay.max_replays=4", "replay.max_replayed_share=0.5", "algorithm.max_staleness=8"
    )
    receiver.arriving = [t for group_id in range(4) for t in members(group_id)]
    assert source.next_batch(version=0).mean_reuse == 1.0, "nothing had been used before"
    assert source.next_batch(version=0).mean_reuse == 1.5, "one group of two"
    assert source.replay_fraction is not None
    assert source.next_batch(version=0).mean_reuse > 1.0


def test_the_replayed_share_falls_after_a_batch_of_few_effective_samples_and_rises_after_others() -> None:
    words = ("replay=prioritised", "replay.max_replays=4", "replay.max_replayed_share=0.5", "replay.target_ess=0.4")
    source, _ = make_source(*words, "algorithm.max_staleness=8")
    assert source.end_step().replayed_share == 0.5
    source.learned({}, 0.3)
    assert source.end_step().replayed_share == pytest.approx(0.5 * 0.3 / 0.4)
    source.learned({}, None)
    assert source.end_step().replayed_share == pytest.approx(0.5 * 0.3 / 0.4), "nothing was measured"
    source.learned({}, 1.0)
    assert source.end_step().replayed_share > 0.5 * 0.3 / 0.4


def test_a_step_takes_in_what_has_arrived_since_the_last_one() -> None:
    source, receiver = make_source()
    receiver.arriving = members(0) + members(1)
    source.next_batch(version=0)
    assert sorted(t.ticket_id for t in source.end_step().received) == list(range(8))
    assert source.end_step().received == ()


def test_each_unroll_of_an_episode_is_an_item_of_its_own() -> None:
    source, receiver = make_source("algorithm=vtrace", "algorithm.group_size=1", "algorithm.max_staleness=1")
    unrolls = [
        dataclasses.replace(
            make_trajectory(version=index // 2, ticket_id=ticket, group_id=ticket),
            unroll_index=index,
            bootstrap=index < 3,
            continues=index < 3,
        )
        for ticket in range(BATCH // 2)
        for index in range(4)
    ]
    receiver.arriving = unrolls[::-1]
    batch = source.next_batch(version=2)
    young = [t.unroll_id for t in unrolls if t.unroll_index >= 2]
    assert [t.unroll_id for t in batch.trajectories] == young, "by ticket, then by unroll"
    assert sorted([*receiver.evicted_tickets, *young]) == sorted(t.unroll_id for t in unrolls), "the others are too old"


def test_the_oldest_incomplete_group_yields_when_nothing_more_can_come_in(caplog: pytest.LogCaptureFixture) -> None:
    source, receiver = make_source("learner.stall_timeout_s=20")
    receiver.is_full = True
    receiver.arriving = [*members(2, missing=1), *members(0, missing=3), *members(1, missing=2)]
    batch = source.next_batch(version=0)
    assert tickets(batch) == [4, 5, 8, 9, 10]  # groups 1 and 2
    assert receiver.evicted_tickets == [0]  # nobody to compare it with
    assert source.num_yielded == 3
    assert "group 0 goes on with 1 of 4" in caplog.text and "replay.capacity_mb" in caplog.text
    receiver.arriving = members(0)[1:] + members(1)[2:]  # too late
    source.collect(version=0, timeout_s=0.0)
    assert receiver.evicted_tickets == [0, 1, 2, 3, 6, 7]


def test_groups_that_fill_the_replay_arena_do_not_stall_a_run(run_dir: RunDirectory) -> None:
    """Three members of each group come, then the arena is full and the last ones wait outside."""
    order = TaskOrder(range(50), GROUP, seed=1)
    ledger = TicketLedger(order, BATCH, max_staleness=2)
    size = -(-8 * len(words_of(make_record())) // 64) * 64
    arena = TrajectoryStore(run_dir.replay_path(), 17 * size, max_records=64)
    receiver = Receiver(
        Endpoints(run_dir.endpoint(0)), ledger, RecordLimits(VOCAB_SIZE), run_dir, arena, SessionLimits(600.0)
    )
    receiver.start()
    actor = ActorChannel(run_dir.endpoint(0), "actor-0", run_dir, 1 << 18, times=ChannelTimes(0.05))
    settings = ["experiment=toy", f"learner.batch_size={BATCH}", f"algorithm.group_size={GROUP}"]
    source = BatchSource(
        load([*settings, "algorithm.max_staleness=2", "learner.stall_timeout_s=60"]), receiver, BATCH, 0
    )
    try:
        actor.hello()
        actor.request(24)
        turns_until(lambda: len(actor.held) == 24, actor)
        actor.request(0)
        last = [ticket for ticket in actor.held if ticket.ticket_id % GROUP == GROUP - 1]
        first = [ticket for ticket in actor.held if ticket not in last]
        for ticket in (*first, *last):
            actor.send(make_record(ticket))
        turns_until(lambda: receiver.is_full, actor)
        batch = source.next_batch(version=0)
        assert len(batch.trajectories) >= 2 and source.num_yielded > 0
        receiver.trained([t.unroll_id for t in batch.trajectories])
        receiver.announce(1)
        batch = source.next_batch(version=1)
        assert len(batch.trajectories) >= 2
    finally:
        actor.close()
        receiver.close()


def test_a_wait_says_what_is_missing_and_ends_with_the_time_of_the_run() -> None:
    source, _ = make_source()
    said: list[str] = []
    assert source.next_batch(version=0, until=time.monotonic() + 0.3, on_wait=said.append) is None
    assert said and "0 of 2 groups" in said[0] and "failed" not in said[0]


def test_a_wait_says_how_many_episodes_have_failed() -> None:
    source, receiver = make_source()
    receiver.num_failed = 3941
    said: list[str] = []
    source.next_batch(version=0, until=time.monotonic() + 0.3, on_wait=said.append)
    assert "3941 episodes failed" in said[0]


# --- groups without variance


def scored(group_id: int, *returns: float) -> list[Trajectory]:
    return [
        dataclasses.replace(t, rewards=np.where(np.arange(t.num_tokens) == t.turns[-1, 1] - 1, value, 0.0).astype("f4"))
        for t, value in zip(members(group_id), returns, strict=True)
    ]


def test_groups_without_variance_make_room_for_others_and_are_counted() -> None:
    source, receiver = make_source("algorithm.refill=2")
    receiver.arriving = scored(0, 0, 0, 0, 0) + scored(1, 0, 1, 0, 0) + scored(2, 1, 1, 1, 1) + scored(3, 1, 0.5, 1, 1)
    assert tickets(source.next_batch(version=0)) == [*range(4, 8), *range(12, 16)]
    assert sorted(receiver.evicted_tickets) == [*range(0, 4), *range(8, 12)], "so that others are granted"
    assert source.num_refilled == 2
    assert source.evicted == [], "what is dropped on purpose is not lost for age or space"


def test_returns_that_differ_by_rounding_are_no_variance() -> None:
    source, receiver = make_source("algorithm.refill=2")
    equal = float(np.float32(0.3)) + float(np.float32(0.4))
    receiver.arriving = scored(0, 0.7, 0.7, equal, 0.7) + scored(1, 0, 1, 0, 0) + scored(2, 0.7, 0.7001, 0.7, 0.7)
    assert tickets(source.next_batch(version=0)) == list(range(4, 12))
    assert source.num_refilled == 1


def test_no_more_are_replaced_in_an_update_than_the_setting_says() -> None:
    """A policy that has solved its tasks must not wait for ever."""
    source, receiver = make_source("algorithm.refill=0.5")
    for version, first in enumerate((0, 3)):
        receiver.arriving = [t for group in range(first, first + 3) for t in scored(group, 1, 1, 1, 1)]
        assert tickets(source.next_batch(version)) == list(range(GROUP * (first + 1), GROUP * (first + 3)))
        assert source.num_refilled == version + 1


@pytest.mark.parametrize("refill", [0.05, 0.15, 0.75], ids=str)
def test_fractions_of_a_group_to_replace_add_up_over_the_updates(refill: float) -> None:
    """Also over restarts: as many in all as the setting says, to within one."""
    source, receiver = make_source(f"algorithm.refill={refill}", stall_timeout_s=5.0)
    num_refilled = 0
    for update in range(24):
        receiver.arriving = [t for group in range(4 * update, 4 * update + 4) for t in scored(group, 1, 1, 1, 1)]
        source.next_batch(version=0)
        num_refilled += source.end_step().num_refilled
        assert num_refilled == math.floor(refill * 2 * (update + 1) + 1e-6)
        if update % 7 == 0:
            state, held = source.state_dict(), {t.unroll_id: t for t in source.buffer.snapshot().trajectories}
            source, receiver = make_source(f"algorithm.refill={refill}", stall_timeout_s=5.0)
            source.load_state_dict(state, held, version=0)


def test_by_default_all_groups_are_trained_on() -> None:
    source, receiver = make_source()
    receiver.arriving = scored(0, 0, 0, 0, 0) + scored(1, 1, 1, 1, 1)
    assert tickets(source.next_batch(version=0)) == list(range(BATCH))
    assert source.num_refilled == 0 and receiver.evicted_tickets == []


def test_a_buffer_that_is_too_small_for_a_checkpoint_is_refused_by_its_setting() -> None:
    source, receiver = make_source("replay.capacity=64")
    arrived = [t for group in range(4) for t in members(group)]
    receiver.arriving = list(arrived)
    source.collect(version=0, timeout_s=0.0)
    state = source.state_dict(source.snapshot())
    smaller, _ = make_source("replay.capacity=12")
    with pytest.raises(ConfigError, match=r"^replay.capacity=12 is too small .*: set it to 16 or more$"):
        smaller.load_state_dict(state, {t.unroll_id: t for t in arrived}, version=0)


def test_what_comes_in_a_step_is_counted_in_it_or_by_the_learner_that_goes_on_from_the_middle_of_it() -> None:
    source, receiver = make_source()
    arrived = [*members(0), *members(1, missing=2)]
    receiver.arriving = list(arrived)
    assert source.batch_at_hand(version=0) is None
    amid = source.state_dict()
    assert source.end_step().received == tuple(arrived)
    after = source.state_dict()
    for state, counts in ((amid, tuple(arrived)), (after, ())):
        source, _ = make_source()
        source.load_state_dict(state, {t.unroll_id: t for t in arrived}, version=0)
        assert source.end_step().received == counts


REPLAY = ("replay=prioritised", "replay.max_replays=4", "algorithm.max_staleness=8")


def go_on(source: BatchSource, *overrides: str, batch_size: int = BATCH) -> tuple[BatchSource, PlayedReceiver]:
    """A source with the state of another, and other settings."""
    state, held = source.state_dict(), {t.unroll_id: t for t in source.buffer.snapshot().trajectories}
    next_source, receiver = make_source(*REPLAY, *overrides, batch_size=batch_size)
    next_source.load_state_dict(state, held, version=0)
    return next_source, receiver


def test_a_run_goes_on_with_less_reuse() -> None:
    source, receiver = make_source(*REPLAY, "replay.samples_per_insert=4")
    for group_id in range(0, 8, 2):
        receiver.arriving = members(group_id) + members(group_id + 1)
        while source.batch_at_hand(version=0) is not None:
            source.end_step()
    receiver.arriving = members(8)
    source.collect(version=0, timeout_s=0.0)
    source, receiver = go_on(source, "replay.samples_per_insert=1")
    receiver.arriving = members(9) + members(10)
    assert source.batch_at_hand(version=0) is not None


def test_a_wait_for_the_reuse_to_fall_names_its_setting() -> None:
    settings = "replay=prioritised", "replay.samples_per_insert=0.5", "algorithm.max_staleness=null"
    source, receiver = make_source(*settings, stall_timeout_s=0.0)
    receiver.arriving = members(0) + members(1) + members(2)
    assert source.next_batch(version=0) is not None
    wanted = r": 3 of 2 groups \(replay.samples_per_insert=0.5 asks for 12 more trajectories first\), 3 episodes"
    with pytest.raises(Stalled, match=wanted):
        source.next_batch(version=0)


BOUNDED, MUCH = "replay.max_replayed_share=0.5", "replay.samples_per_insert=4"


@pytest.mark.parametrize(
    "later", [[MUCH, BOUNDED], [MUCH], []], ids=["bounded", "without the bound", "with less reuse"]
)
def test_a_run_that_waited_with_a_bounded_share_goes_on(later: list[str]) -> None:
    source, receiver = make_source(*REPLAY, MUCH, BOUNDED)
    receiver.arriving = members(0) + members(1)
    assert source.batch_at_hand(version=0) is not None
    source.end_step()
    assert source.batch_at_hand(version=0) is None, "one new group is wanted"
    source, receiver = go_on(source, *later)
    receiver.arriving = members(2) + members(3)
    assert source.batch_at_hand(version=0) is not None


def test_a_smaller_batch_has_no_more_used_ones_than_it_holds() -> None:
    source, receiver = make_source(*REPLAY, MUCH, BOUNDED, batch_size=4 * GROUP)
    receiver.arriving = [t for group_id in range(4) for t in members(group_id)]
    assert source.batch_at_hand(version=0) is not None
    source.end_step()
    assert source.batch_at_hand(version=0) is None, "two new groups are wanted"
    source, _ = go_on(source, MUCH, BOUNDED, batch_size=GROUP)
    assert len(tickets(source.batch_at_hand(version=0))) == GROUP
