"""Batches from the trajectories that arrive: groups are put together, buffered, and drawn by priority.

Invariant: every trajectory that comes out of the receiver is reported back once as trained or evicted; nothing waits in
here for a group member that can never come. An unroll of an episode is a trajectory of its own.

Where several processes share a rank, the one that leads it gives the batch to the others, as records (`share_batch`).
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from impala_llm.algorithms.advantages import episode_return, levelled_returns
from impala_llm.config import ConfigError
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.shm.record import decode_record, record_bytes
from impala_llm.pipeline.tickets.curriculum import Curriculum
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.replay import (
    EvictedItem,
    GroupAssembler,
    OldestFirst,
    PrioritySampler,
    ReplayBuffer,
    ReplayFraction,
    SamplesPerInsert,
)
from impala_llm.replay.buffer import BufferSnapshot, BufferStats, StateTooLarge
from impala_llm.settings import Config
from impala_llm.trajectory import DeferredTrajectory, Trajectory

_log = logging.getLogger(__name__)


class Stalled(RuntimeError):
    """No batch came together for too long. The message says what is missing."""


@dataclass(frozen=True)
class Batch:
    """Data of an update, in the order of the tickets: the same data gives the same sums to the last bit."""

    trajectories: tuple[Trajectory, ...]
    weights: tuple[float, ...]
    """Importance weight of each trajectory's draw; those that a rank has drawn have mean 1."""
    item_ids: tuple[int, ...]
    """Buffer item of each trajectory; a number below 0 for one of another rank."""
    mean_reuse: float
    """Times that a trajectory has been drawn, this time included, on average."""
    borrowed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Item of another rank that this one computes (work_balance.py) -> (that rank, the item's number there)."""

    @property
    def num_tokens(self) -> int:
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True)
class Intake:
    """Trajectories that a batch source received and dropped in a step, and its buffer at the end of the step."""

    received: tuple[Trajectory, ...]
    evicted: tuple[Trajectory, ...]
    """Trajectories that taught nothing, dropped for age or space."""
    num_refilled: int
    """Groups without variance that were dropped for others."""
    num_yielded: int
    """Groups that had to go on without members that were still to come."""
    replayed_share: float | None
    """Share of the next batch that may have been used before; None where it is not bounded."""
    buffer: BufferStats


@dataclass(frozen=True)
class SourceSnapshot:
    """State of a source at a moment, without a copy of the trajectories."""

    buffer: BufferSnapshot
    rest: dict[str, Any]
    """State of the other parts, as `BatchSource.state_dict` has it."""


class BatchSource:
    """Owned by the learner's thread of one rank.

    Args:
        batch_size: trajectories of a batch of this rank.
        seed: of the draws.
        curriculum: is told how episodes ended; None: nobody is.
    """

    def __init__(
        self, config: Config, receiver: Receiver, batch_size: int, seed: int, curriculum: Curriculum | None = None
    ) -> None:
        replay, group_size = config.replay, config.algorithm.group_size
        self._receiver = receiver
        self._curriculum = curriculum
        self._replay = replay
        self._group_size = group_size
        self._num_items = batch_size // group_size
        self._stall_timeout_s = config.learner.stall_timeout_s
        self._exponent = replay.correction_exponent
        self._groups = GroupAssembler(group_size)
        sampler = (
            PrioritySampler(
                recency_tau=math.inf if replay.recency_tau is None else replay.recency_tau,
                advantage_exponent=replay.advantage_exponent,
                rarity_exponent=replay.rarity_exponent,
                uniform_floor=replay.uniform_floor,
            )
            if replay.prioritised or replay.max_replays > 1
            else OldestFirst()
        )
        staleness = config.algorithm.max_staleness
        self.buffer = ReplayBuffer(
            sampler,
            replay.capacity,
            replay.capacity_mb << 20,
            math.inf if staleness is None else staleness,
            replay.max_replays,
            seed,
            separate_replayed=replay.max_replayed_share is not None,
        )
        self.replay_fraction: ReplayFraction | None = None
        """Steers how much of a batch is replayed, where it is bounded: to be told of each batch's weights."""
        if replay.max_replayed_share is not None:
            self.replay_fraction = ReplayFraction(replay.target_ess, replay.max_replayed_share)
        self._max_replayed: int | None = None
        # Samples never run ahead of inserts · ratio; inserts are paced by the tickets.
        self._rate = SamplesPerInsert(
            replay.samples_per_insert,
            min_size=batch_size,
            error=batch_size * max(1.0, replay.samples_per_insert),
        )
        self.received: list[Trajectory] = []
        """Arrived in this step."""
        self.evicted: list[Trajectory] = []
        self.num_refilled = self.num_yielded = 0
        """As in `Intake`, of this step."""
        self._discount = config.algorithm.credit.discount
        self._refills = config.algorithm.refill * self._num_items
        self._refills_owed = 0.0
        self._grant_refills()
        self._before_draw: SourceSnapshot | None = None

    def next_batch(
        self, version: int, until: float = math.inf, on_wait: Callable[[str], object] | None = None
    ) -> Batch | None:
        """Wait until a batch can be drawn. None where there was none `until` then, in seconds of `time.monotonic`.

        on_wait: called a few times a second with what is waited for.

        Raises:
            Stalled: after `learner.stall_timeout_s` with an actor; those that are still to come are waited for.
            ReceiverError: the receiver has died.
        """
        clock, waited_s = ActiveClock(), 0.0  # a learner that was stopped has not waited
        batch = self.batch_at_hand(version)
        while batch is None:
            if time.monotonic() >= until:
                return None
            before = clock.now
            waited_s += (clock.tick() - before) * (self._receiver.counters()["actors"] > 0)
            if waited_s > self._stall_timeout_s:
                raise Stalled(
                    f"no batch for {self._stall_timeout_s:g} s (learner.stall_timeout_s): {self._missing()}, "
                    f"{len(self._groups)} trajectories in open groups; look at the actors' logs"
                )
            if on_wait is not None:
                on_wait(self._missing())
            num_received = len(self.received)
            self.collect(version, timeout_s=0.2)
            if self._receiver.is_full and len(self.received) == num_received:
                self._yield_oldest(version)
            batch = self._draw(version)
        return batch

    def batch_at_hand(self, version: int) -> Batch | None:
        """Take in what has arrived, and draw a batch if there is one."""
        self.collect(version, timeout_s=0.0)
        return self._draw(version)

    def _missing(self) -> str:
        counters = self._receiver.counters()
        noun = "trajectories" if self._group_size == 1 else "groups"
        num_missing, limit = self._rate.num_missing(self._num_items * self._group_size), ""
        failed = f", {counters['failed']:.0f} episodes failed" if counters["failed"] else ""
        if num_missing and len(self.buffer) >= self._num_items:
            ratio = f"replay.samples_per_insert={self._replay.samples_per_insert:g}"
            limit = f" ({ratio} asks for {num_missing} more trajectories first)"
        return (
            f"{len(self.buffer)} of {self._num_items} {noun}{limit}, {counters['open']:.0f} episodes under way, "
            f"{counters['actors']:.0f} actors{failed}"
        )

    def collect(self, version: int, timeout_s: float) -> None:
        """Take in what has arrived, waiting up to `timeout_s` for the first."""
        self._take_in(self._receiver.drain(timeout_s), version)

    def _take_in(self, arrived: Sequence[Trajectory], version: int) -> None:
        late: list[Trajectory] = []
        complete: list[tuple[Trajectory, ...]] = []
        for trajectory in arrived:
            self.received.append(trajectory)
            if self._curriculum is not None and not trajectory.continues:
                self._curriculum.observe(trajectory.signature, trajectory.success)
            if self._groups.is_closed(trajectory.group_id):
                late.append(trajectory)
            elif (group := self._groups.add(trajectory)) is not None:
                complete.append(group)
        for group_id, present in self._groups.open_groups().items():
            if present + self._receiver.lost_members(group_id) >= self._group_size:
                group, dropped = self._groups.close_short(group_id, is_over=True)
                late.extend(dropped)
                if group is not None:
                    complete.append(group)
        complete = [group for group in complete if not self._refill(group)]
        if complete:
            # A short group counts as a whole one, as in the tickets: a batch of it would be waited for for ever.
            self._rate.record_inserts(len(complete) * self._group_size)
            self._evict(self.buffer.insert_all(complete, version))
        self._drop(late)

    def _grant_refills(self) -> None:
        """Set how many groups may be dropped before the next draw; a fraction of one goes on to the draw after."""
        wanted = self._refills + self._refills_owed
        self._refills_left = math.floor(wanted + 1e-9)  # ten times 0.1 is a little less than 1
        self._refills_owed = wanted - self._refills_left

    def _refill(self, group: tuple[Trajectory, ...]) -> bool:
        """Drop a group whose returns are all equal, so that another is played in its place, if the update may yet."""
        if not self._refills_left:
            return False
        returns = [episode_return(t, self._discount) for t in group]
        if len(levelled_returns(returns, group).unique()) > 1:
            return False
        self._refills_left -= 1
        self.num_refilled += 1
        self._release(group)
        return True

    def _yield_oldest(self, version: int) -> None:
        """Nothing more can come in, as the trajectory store is full, and there is no batch: the group that has waited
        longest for its other members is used without them, or dropped where it has but one."""
        if open_groups := self._groups.open_groups():
            group_id = min(open_groups)
            _log.warning(
                "the trajectory store is full of groups that miss members: group %d goes on with %d of %d; raise "
                "replay.capacity_mb",
                *(group_id, open_groups[group_id], self._group_size),
            )
            self.num_yielded += 1
            group, dropped = self._groups.close_short(group_id)
            if group is not None:
                self._rate.record_inserts(self._group_size)
                self._evict(self.buffer.insert_all([group], version))
            self._drop(list(dropped))
        # Dropped trajectories are copied out of the arena, which is short of space; they are still measured.
        copies = {id(t): copy.deepcopy(t) for t in self.evicted if isinstance(t, DeferredTrajectory)}
        self.evicted = [copies.get(id(t), t) for t in self.evicted]
        self.received = [copies.get(id(t), t) for t in self.received]

    def arrivals(self, version: int) -> list[Trajectory]:
        """Take in what has arrived, and return all that has in this step."""
        self.collect(version, timeout_s=0.0)
        return self.received

    def snapshot(self) -> SourceSnapshot:
        """State as of now; amid a step as it was before its batch was drawn, so that it can be drawn again.

        What has arrived since the draw is then missing: the ledger has it as received."""
        return self._before_draw or self._snapshot()

    def learned(self, abs_advantages: Mapping[int, float], effective_share: float | None) -> None:
        """Set priorities and the replayed share of the next batches by what was learned from the last one.

        Args:
            abs_advantages, effective_share: as in `UpdateResult`.
        """
        self.buffer.update_advantages(list(abs_advantages), list(abs_advantages.values()))
        if self.replay_fraction is not None and effective_share is not None:
            self.replay_fraction.update(min(1.0, effective_share))

    def end_step(self) -> Intake:
        """End the step: its batch has been trained on, so that its draw stays. Returns what the step took in."""
        self._before_draw = None
        share = None if self.replay_fraction is None else self.replay_fraction.fraction
        counts = self.num_refilled, self.num_yielded
        intake = Intake(tuple(self.received), tuple(self.evicted), *counts, share, self.buffer.stats())
        self.received, self.evicted, self.num_refilled, self.num_yielded = [], [], 0, 0
        return intake

    def _snapshot(self) -> SourceSnapshot:
        fraction = self.replay_fraction
        return SourceSnapshot(
            self.buffer.snapshot(),
            {
                "rate": self._rate.state_dict(),
                "groups": self._groups.state_dict(),
                "replay_fraction": None if fraction is None else fraction.state_dict(),
                "max_replayed": self._max_replayed,
                "refills_left": self._refills_left,
                "refills_owed": self._refills_owed,
                "received": [t.unroll_id for t in self.received],  # which the metrics of no step have yet
                # Restored where it is made: the first tickets are drawn before there is a source.
                "curriculum": None if self._curriculum is None else self._curriculum.state_dict(),
            },
        )

    def state_dict(self, snapshot: SourceSnapshot | None = None) -> dict[str, Any]:
        """State as plain numbers, lists, strings and arrays; see `ReplayBuffer.state_dict`.

        Args:
            snapshot: of which it is wanted; None: what `snapshot` gives.
        """
        snapshot = snapshot or self.snapshot()
        return {"buffer": self.buffer.state_dict(snapshot.buffer), **snapshot.rest}

    def load_state_dict(self, state: Mapping[str, Any], trajectories: Mapping[int, Trajectory], version: int) -> None:
        """Restore a state.

        Args:
            trajectories: by `unroll_id`: those of the buffer's items, and all that were received and are in none.
            version: the learner's.

        Raises:
            ConfigError: the buffer is too small for it.
        """
        try:
            self.buffer.load_state_dict(state["buffer"], trajectories)
        except StateTooLarge as error:
            capacity, needed_mb = self._replay.capacity, -(-error.num_bytes >> 20)
            key, value, least = "replay.capacity", capacity, error.num_trajectories
            if error.num_trajectories <= capacity:
                key, value, least = "replay.capacity_mb", self._replay.capacity_mb, needed_mb
            raise ConfigError(
                f"{key}={value} is too small for the replay buffer of the checkpoint: set it to {least} or more"
            ) from error
        self._rate.load_state_dict(state["rate"])
        self._groups.load_state_dict(state["groups"])
        if self.replay_fraction is not None and state["replay_fraction"] is not None:
            self.replay_fraction.load_state_dict(state["replay_fraction"])
        chosen = None if self.replay_fraction is None else state["max_replayed"]
        self._max_replayed = None if chosen is None else min(chosen, self._num_items)
        self._refills_left = min(state["refills_left"], math.ceil(self._refills))
        self._refills_owed = state["refills_owed"]
        held = {t.unroll_id for t in self.buffer.snapshot().trajectories}
        # The curriculum was told of members of open groups when they came.
        in_open_groups = trajectories.keys() & set(state["groups"]["open"])
        for number, t in trajectories.items():
            if number in in_open_groups:
                self._groups.add(t)
        known = held | in_open_groups
        self.received = [trajectories[number] for number in state.get("received", ()) if number in known]
        rest = trajectories.keys() - known
        self._take_in([t for number, t in trajectories.items() if number in rest], version)

    def _draw(self, version: int) -> Batch | None:
        # Also where there is less than a batch: until then their tickets take the places of those that will fill it.
        self._evict(self.buffer.evict_stale(version))
        if len(self.buffer) < self._num_items or not self._rate.can_sample(self._num_items * self._group_size):
            return None
        self._before_draw = self._snapshot()
        if self.replay_fraction is not None and self._max_replayed is None:
            self._max_replayed = self.replay_fraction.num_replayed(self._num_items)
        sample = self.buffer.sample(self._num_items, version, self._exponent, self._max_replayed)
        self._evict(sample.evicted)
        if not sample.items:
            self._before_draw = None
            return None
        self._max_replayed = None
        self._grant_refills()
        members = [(t, item.weight, item.item_id) for item in sample.items for t in item.trajectories]
        members.sort(key=lambda member: (member[0].ticket_id, member[0].unroll_index))
        self._rate.record_samples(self._num_items * self._group_size)
        trajectories, weights, item_ids = zip(*members, strict=True)
        # The buffer's have maximum 1, which often belongs to an old item that the uniform floor has drawn. Beside it
        # all others would be small, and with them the policy gradient, while an entropy bonus keeps its size.
        mean = sum(weights) / len(weights)
        weights = tuple(weight / mean for weight in weights)
        reuse = sum(item.num_replays * len(item.trajectories) for item in sample.items) / len(members)
        return Batch(trajectories, weights, item_ids, reuse)

    def _evict(self, items: tuple[EvictedItem, ...]) -> None:
        for item in items:
            if item.num_replays:  # it has taught before: nothing is lost
                self._release(item.trajectories)
            else:
                self._drop(item.trajectories)

    def _drop(self, trajectories: Sequence[Trajectory]) -> None:
        """Give up trajectories that nothing was learned from."""
        self.evicted.extend(trajectories)
        self._release(trajectories)

    def _release(self, trajectories: Sequence[Trajectory]) -> None:
        if trajectories:
            self._receiver.evicted([t.unroll_id for t in trajectories])


def share_batch(ranks: Ranks, batch: Batch | None) -> Batch:
    """Return the batch of the process that leads this rank, in all of its processes.

    Args:
        batch: of this process; one that leads must have one.
    """
    if ranks.tensor_parallel == 1 and batch is not None:
        return batch
    packed = None
    if batch is not None:
        packed = msgpack.packb([list(batch.weights), list(batch.item_ids), batch.mean_reuse])
    weights, item_ids, mean_reuse = msgpack.unpackb(ranks.share(packed))
    trajectories = share_trajectories(ranks, () if batch is None else batch.trajectories)
    return batch or Batch(tuple(trajectories), tuple(weights), tuple(item_ids), mean_reuse)


def share_trajectories(ranks: Ranks, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Return the trajectories of the process that leads this rank, in all of its processes.

    Args:
        trajectories: of this process; those of one that does not lead are not looked at.

    Returns:
        In the process that leads the same objects, in others copies.
    """
    if ranks.tensor_parallel == 1:
        return trajectories
    packed = msgpack.packb([record_bytes(t) for t in trajectories]) if ranks.leads else None
    records = ranks.share(packed)
    return trajectories if ranks.leads else [decode_record(bytearray(each)) for each in msgpack.unpackb(records)]


def share_arrivals(ranks: Ranks, batches: BatchSource, version: int) -> Sequence[Trajectory]:
    """Take in what has arrived at a rank, and return it in all of its processes.

    Args:
        version: the learner's.
    """
    return share_trajectories(ranks, batches.arrivals(version))
