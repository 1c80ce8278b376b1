"""The replay buffer: what came in and may be trained on, bounded in trajectories, bytes, age and reuse.

Life of an item (trajectories that are trained on together: a whole group, or a single one):

    insert ──► waits ──► sample (again and again) ──► removed with its last replay
                 └─────► evicted: too stale, or the lowest priority when the buffer is full

Invariant: an item that was inserted leaves in exactly one way, and the caller is told: `SampledItem.is_last`, or an
`EvictedItem` in what `insert_all`, `sample` or `evict_stale` return. Staleness is never negative, and of what is
sampled that of the newest action token is never above `max_staleness`. The same calls with the same seed draw the same
items, also across `state_dict`.
"""

import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from impala_llm.replay.columns import Column, RowOfItem, SignatureCounts, moves
from impala_llm.replay.priorities import Sampler
from impala_llm.replay.state import State, trajectory_from_state, trajectory_to_state
from impala_llm.trajectory import NO_VERSION, Trajectory

STATE_FORMAT = 2


@dataclass(frozen=True)
class EvictedItem:
    """What was dropped; its trajectories know lengths, scores and tickets."""

    item_id: int
    reason: Literal["stale", "capacity"]
    num_replays: int
    """How often it had been sampled; 0: its episodes were played for nothing."""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class SampledItem:
    item_id: int
    """For `update_advantages`."""
    trajectories: tuple[Trajectory, ...]
    weight: float
    """Importance weight (N·P)^-b in (0, 1]; the largest of the sample is 1."""
    num_replays: int
    """How often it has been sampled, this time included: 1 is fresh data."""
    is_last: bool
    """It has left the buffer with this sample."""


@dataclass(frozen=True, eq=False)
class Sample:
    """k items, as columns in the order of the draw; `items` has them one by one. k is 0 when the buffer held few."""

    item_ids: np.ndarray
    """int64[k]."""
    weights: np.ndarray
    """float64[k], in (0, 1]; the largest is 1."""
    num_replays: np.ndarray
    """int64[k]."""
    is_last: np.ndarray
    """bool[k]."""
    trajectories: tuple[tuple[Trajectory, ...], ...]
    evicted: tuple[EvictedItem, ...]

    @cached_property
    def items(self) -> tuple[SampledItem, ...]:
        return tuple(
            map(
                SampledItem,
                self.item_ids.tolist(),
                self.trajectories,
                self.weights.tolist(),
                self.num_replays.tolist(),
                self.is_last.tolist(),
            )
        )


@dataclass(frozen=True)
class BufferStats:
    num_trajectories: int
    num_items: int
    num_bytes: int
    """Of the arrays."""
    num_signatures: int
    fill: float
    """The larger share of the two capacities, in [0, 1]."""
    oldest_version: int | None
    """The smallest of the items; None when the buffer is empty."""
    newest_version: int | None


# Together, since a draw wants both: they come into the cache at once.
_ITEM = np.dtype([("item_id", np.int64), ("num_replays", np.int64)])


class _Item(NamedTuple):
    """What the rows of an item hold, but its number and its replays."""

    version: int
    """Of its token in the middle, by age: what recency and the queue go by."""
    newest: int
    """Of its newest token: what evicts it."""
    num_bytes: int
    signature: str
    trajectories: tuple[Trajectory, ...]


class ReplayBuffer:
    """Items with priorities.

    Args:
        sampler: decides what is drawn and what a full buffer gives up.
        capacity_trajectories, capacity_bytes: both hold; bytes count the arrays.
        max_staleness: η >= 0 in policy versions; an item is evicted when all of its action tokens are older. While
            one is not, it teaches, and its return is among those that others are compared with: dropped sooner, long
            episodes would be missing there. Infinity never evicts by age.
        max_replays: times that an item may be sampled, >= 1.
        seed: >= 0, of all draws.
        separate_replayed: what was sampled before is a class of its own, and `sample` takes `max_replayed`.

    Raises:
        ValueError: a setting that is out of range.
    """

    def __init__(
        self,
        sampler: Sampler,
        capacity_trajectories: int,
        capacity_bytes: int,
        max_staleness: float = math.inf,
        max_replays: int = 1,
        seed: int = 0,
        separate_replayed: bool = False,
    ) -> None:
        for name, value, smallest in (
            ("capacity_trajectories", capacity_trajectories, 1),
            ("capacity_bytes", capacity_bytes, 1),
            ("max_staleness", max_staleness, 0),
            ("max_replays", max_replays, 1),
            ("seed", seed, 0),
        ):
            if not value >= smallest:
                raise ValueError(f"{name} is {value}: it must be at least {smallest}")
        self._sampler = sampler
        self._capacity_trajectories = capacity_trajectories
        self._capacity_bytes = capacity_bytes
        self._max_staleness = max_staleness
        self._max_replays = max_replays
        self._separate_replayed = separate_replayed
        self._rng = np.random.default_rng(seed)
        self._clear()

    def _clear(self) -> None:
        self._version = 0
        self._next_id = 0
        self._num_trajectories = 0
        self._num_bytes = 0
        self._num_replayed = 0
        """Where they are separate."""
        # Items lie densely in rows, in step with the order; a removal moves the last row into the gap.
        self._order = self._sampler.order(self._separate_replayed)
        self._row_of = RowOfItem()
        self._trajectories = Column(np.object_)
        self._signature_of = Column(np.object_)
        self._items = Column(_ITEM)
        self._versions = Column(np.int64)
        self._sizes = Column(np.int64)
        """Bytes."""
        self._most_trajectories, self._most_bytes = 1, 1
        """Of any item that has been here."""
        self._signatures = SignatureCounts()
        self._by_age: list[tuple[int, int]] = []
        """Heap of (newest version, item_id), where age evicts; items that have left otherwise are still in it."""

    def __len__(self) -> int:
        """Items that can be sampled."""
        return len(self._items.view)

    def insert(
        self, trajectories: Sequence[Trajectory], version: int, signature: str | None = None
    ) -> tuple[EvictedItem, ...]:
        """Add one item, as `insert_all`."""
        return self.insert_all([trajectories], version, None if signature is None else [signature])

    def insert_all(
        self, items: Sequence[Sequence[Trajectory]], version: int, signatures: Sequence[str] | None = None
    ) -> tuple[EvictedItem, ...]:
        """Add items.

        Their |A| is not known before they were trained on; until then it counts as large as the largest known one in
        the buffer (1 if none is), so that they are likely to be tried.

        Args:
            items: each holds at least one trajectory; they stay together.
            version: the learner's, never smaller than before.
            signatures: what rarity counts, one for each item; by default that of its first trajectory.

        Returns:
            What had to go: stale items, new ones among them if they are born stale, and then those of lowest priority,
            the oldest first among equals, until the new ones fit. New ones only make room for each other where all of
            them together are more than the buffer holds.

        Raises:
            ValueError: an empty item, one larger than the whole buffer, tokens newer than `version`, a version that
                decreases. Then nothing was inserted.
        """
        if signatures is not None and len(signatures) != len(items):
            raise ValueError(f"signatures has {len(signatures)} elements, items has {len(items)}: one each")
        if signatures is None:
            signatures = [trajectories[0].signature if trajectories else "" for trajectories in items]
        new = self._checked(items, signatures, version) if items else []
        evicted = list(self.evict_stale(version))
        ids: list[int] = []
        fitting: list[_Item] = []
        num_trajectories = num_bytes = 0
        for item in new:
            item_id = self._next_id
            self._next_id += 1
            if version - item.newest > self._max_staleness:
                evicted.append(EvictedItem(item_id, "stale", 0, item.trajectories))
                continue
            num_trajectories += len(item.trajectories)
            num_bytes += item.num_bytes
            if num_trajectories > self._capacity_trajectories or num_bytes > self._capacity_bytes:
                evicted += self._take_in(ids, fitting)
                ids, fitting = [], []
                num_trajectories, num_bytes = len(item.trajectories), item.num_bytes
            ids.append(item_id)
            fitting.append(item)
        if fitting:
            evicted += self._take_in(ids, fitting)
        return tuple(evicted)

    def sample(
        self, num_items: int, version: int, importance_exponent: float = 1.0, max_replayed: int | None = None
    ) -> Sample:
        """Draw distinct items.

        Args:
            num_items: >= 1. With groups, the batch size over the group size: a group that lost a member takes the place
                of a whole one, as it does in the tickets, and the batch is a trajectory short.
            version: the learner's, never smaller than before; what is too stale for it is evicted first.
            importance_exponent: b in [0, 1] of the weights; 1 undoes the bias of the draw, 0 leaves it.
            max_replayed: with `separate_replayed`, and only then: so many items at most have been sampled before, and
                all that there are if they are fewer; the others are fresh, and come first. Each class is drawn by its
                own P. N·P of the weights is that of the class, so they do not undo the shares, which are a choice.

        Returns:
            No items when fewer than `num_items` are left, or fewer fresh ones than it takes: the caller waits for more.

        Raises:
            ValueError: an argument out of range, a version that decreases.
        """
        if not 1 <= num_items <= self._capacity_trajectories:
            raise ValueError(
                f"num_items is {num_items}: draw at least 1 and at most the capacity, {self._capacity_trajectories}"
            )
        if not 0.0 <= importance_exponent <= 1.0:
            raise ValueError(f"importance_exponent is {importance_exponent}: it must lie in [0, 1]")
        if self._separate_replayed != (max_replayed is not None):
            raise ValueError(
                f"max_replayed is {max_replayed} and separate_replayed is {self._separate_replayed}: "
                "give a number exactly where replayed items are separate"
            )
        if max_replayed is not None and not 0 <= max_replayed <= num_items:
            raise ValueError(f"max_replayed is {max_replayed}: it must be at least 0 and at most num_items")
        evicted = self.evict_stale(version)
        num_replayed = 0 if max_replayed is None else min(max_replayed, self._num_replayed)
        num_first = num_items - num_replayed
        if num_first > len(self) - self._num_replayed:
            nothing = np.zeros(0, np.int64)
            return Sample(nothing, np.zeros(0), nothing, np.zeros(0, np.bool_), (), evicted)
        draws = [self._order.draw(num_first, self._rng)] if num_first else []
        if num_replayed:
            draws.append(self._order.draw(num_replayed, self._rng, replayed=True))
        rows, log_density = draws[0].rows, draws[0].log_density
        if len(draws) > 1:
            rows = np.concatenate([rows, draws[1].rows])
            log_density = np.concatenate([log_density, draws[1].log_density])
        log_weights = -importance_exponent * log_density
        items = self._items.view[rows]
        num_replays = items["num_replays"] + 1
        self._items.view["num_replays"][rows] = num_replays
        is_last = num_replays >= self._max_replays
        sample = Sample(
            item_ids=items["item_id"],
            weights=np.exp(log_weights - log_weights.max()),
            num_replays=num_replays,
            is_last=is_last,
            trajectories=tuple(self._trajectories.view[rows].tolist()),
            evicted=evicted,
        )
        if self._separate_replayed:
            fresh = rows[num_replays == 1]
            self._num_replayed += len(fresh)
            self._order.set_replayed(fresh)
        if is_last.any():
            last = rows[is_last]
            self._order.remove(last)
            self._remove(last)
        return sample

    def evict_stale(self, version: int) -> tuple[EvictedItem, ...]:
        """Remove what is older than `max_staleness` for a learner at `version`; raises ValueError if that decreases."""
        if version < self._version:
            raise ValueError(f"version is {version} after {self._version}: the learner's version never decreases")
        self._version = version
        stale = []
        while self._by_age and version - self._by_age[0][0] > self._max_staleness:
            item_id = heapq.heappop(self._by_age)[1]
            if item_id in self._row_of:
                stale.append(item_id)
        if not stale:
            return ()
        rows = np.array([self._row_of[item_id] for item_id in sorted(stale)], np.int64)
        self._order.remove(rows)
        return self._evict(rows, "stale")

    def update_advantages(
        self, item_ids: Sequence[int] | np.ndarray, abs_advantages: Sequence[float] | np.ndarray
    ) -> None:
        """Set |A| of items after they were trained on. Items that have left in the meantime are passed over.

        Raises:
            ValueError: different lengths, or a value that is negative or not finite.
        """
        values = np.asarray(abs_advantages, np.float64)
        ids = np.asarray(item_ids, np.int64)
        if len(ids) != len(values):
            raise ValueError(f"abs_advantages has {len(values)} elements, item_ids has {len(ids)}: one each")
        good = (values >= 0.0) & (values < math.inf)
        if not good.all():
            i = int(np.argmin(good))
            raise ValueError(f"abs_advantages of item {ids[i]} is {values[i]}: it must be finite and at least 0")
        self._order.set_advantages(self._row_of.rows(ids, self._items.view["item_id"]), values)

    def stats(self) -> BufferStats:
        versions = self._versions.view
        return BufferStats(
            num_trajectories=self._num_trajectories,
            num_items=len(self),
            num_bytes=self._num_bytes,
            num_signatures=len(self._signatures),
            fill=max(self._num_trajectories / self._capacity_trajectories, self._num_bytes / self._capacity_bytes),
            oldest_version=int(versions.min()) if len(versions) else None,
            newest_version=int(versions.max()) if len(versions) else None,
        )

    def state_dict(self) -> State:
        """Everything but the settings, as dicts, lists, arrays, numbers and strings."""
        return {
            "format": STATE_FORMAT,
            # its numbers are larger than those of most formats
            "generator": json.dumps(self._rng.bit_generator.state),
            "version": self._version,
            "next_id": self._next_id,
            "item_ids": self._items.view["item_id"].copy(),
            "num_replays": self._items.view["num_replays"].copy(),
            "slots": np.array([self._signatures.slot(signature) for signature in self._signature_of.view], np.int64),
            "signatures": self._signature_of.view.tolist(),
            "trajectories": [[trajectory_to_state(t) for t in members] for members in self._trajectories.view],
            "order": self._order.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over a saved state, its seed included; what the buffer held is forgotten.

        Raises:
            ValueError: another format, or more than the capacity holds.
        """
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"format is {state['format']}: this version reads replay states of format {STATE_FORMAT}")
        self._clear()
        self._rng.bit_generator.state = json.loads(state["generator"])
        self._version = state["version"]
        self._next_id = state["next_id"]
        self._signatures.restore(state["signatures"], state["slots"].tolist())
        items = []
        for signature, saved in zip(state["signatures"], state["trajectories"], strict=True):
            members = tuple(map(trajectory_from_state, saved))
            versions = np.concatenate([t.versions for t in members])
            num_bytes = sum(t.nbytes for t in members)
            items.append(_Item(_middle_version(versions), int(versions.max()), num_bytes, signature, members))
        if items:
            self._append(state["item_ids"], state["num_replays"], items)
        self._order.load_state_dict(
            state["order"],
            self._items.view["item_id"],
            self._versions.view,
            state["slots"],
            self._items.view["num_replays"] > 0,
        )
        if self._num_trajectories > self._capacity_trajectories or self._num_bytes > self._capacity_bytes:
            raise ValueError(
                f"the saved buffer holds {self._num_trajectories} trajectories of {self._num_bytes} bytes, and room is "
                f"for {self._capacity_trajectories} of {self._capacity_bytes} bytes: raise the capacity to resume"
            )

    def _checked(self, items: Sequence[Sequence[Trajectory]], signatures: Sequence[str], version: int) -> list[_Item]:
        if not all(items):
            raise ValueError("trajectories is empty: an item holds at least one")
        sizes = [sum([t.nbytes for t in members]) for members in items]
        for members, num_bytes in zip(items, sizes, strict=True):
            if len(members) > self._capacity_trajectories or num_bytes > self._capacity_bytes:
                raise ValueError(
                    f"trajectories holds {len(members)} of {num_bytes} bytes: the whole buffer has room for "
                    f"{self._capacity_trajectories} of {self._capacity_bytes} bytes; raise its capacity"
                )
        # As `Trajectory.oldest_version` and `newest_version`, of all at once. Most items are of one version.
        versions = np.concatenate([t.versions for members in items for t in members])
        ends = np.cumsum([sum([len(t.versions) for t in members]) for members in items])
        starts = np.concatenate([[0], ends[:-1]])
        newest = np.maximum.reduceat(versions, starts)
        if newest.max() > version:
            raise ValueError(
                f"version is {version}, but a token was sampled by {newest.max()}: versions must survive a restart"
            )
        middle = np.minimum.reduceat(versions.view(np.uint32), starts)
        for place in np.flatnonzero(newest != middle).tolist():
            middle[place] = _middle_version(versions[starts[place] : ends[place]])
        return list(map(_Item, middle.tolist(), newest.tolist(), sizes, signatures, map(tuple, items)))

    def _take_in(self, ids: list[int], items: list[_Item]) -> list[EvictedItem]:
        """Items that fit into an empty buffer, all together. Returns what had to go."""
        num_trajectories = sum([len(item.trajectories) for item in items])
        evicted = self._make_room(num_trajectories, sum([item.num_bytes for item in items]))
        slots = np.array([self._signatures.add(item.signature) for item in items], np.int64)
        item_ids = np.array(ids, np.int64)
        self._append(item_ids, np.zeros(len(items), np.int64), items)
        self._order.append(item_ids, self._versions.view[-len(items) :], slots)
        return evicted

    def _make_room(self, num_trajectories: int, num_bytes: int) -> list[EvictedItem]:
        """Evict by priority until so much fits."""
        evicted: list[EvictedItem] = []
        while True:
            too_many = self._num_trajectories + num_trajectories - self._capacity_trajectories
            too_large = self._num_bytes + num_bytes - self._capacity_bytes
            if too_many <= 0 and too_large <= 0:
                return evicted
            # So many have to go, however large they are.
            num_items = max(-(-too_many // self._most_trajectories), -(-too_large // self._most_bytes))
            evicted += self._evict(self._order.remove_lowest(num_items), "capacity")

    def _evict(self, rows: np.ndarray, reason: Literal["stale", "capacity"]) -> tuple[EvictedItem, ...]:
        """Rows that have left the order."""
        items = self._items.view[rows]
        item_ids, num_replays = items["item_id"].tolist(), items["num_replays"].tolist()
        return tuple(map(EvictedItem, item_ids, itertools.repeat(reason), num_replays, self._remove(rows)))

    def _append(self, item_ids: np.ndarray, num_replays: np.ndarray, items: list[_Item]) -> None:
        """All of new rows, int64[k], but their order and the counts of their signatures."""
        num = len(items)
        versions, newest, sizes, signatures, trajectories = zip(*items, strict=True)
        self._row_of.put(item_ids, np.arange(len(self), len(self) + num))
        # As an array of tuples, which numpy would otherwise take apart.
        self._trajectories.extend(num)[:] = np.fromiter(trajectories, np.object_, num)
        self._signature_of.extend(num)[:] = signatures
        self._versions.extend(num)[:] = versions
        self._sizes.extend(num)[:] = sizes
        rows = self._items.extend(num)
        rows["item_id"], rows["num_replays"] = item_ids, num_replays
        members = list(map(len, trajectories))
        self._num_trajectories += sum(members)
        self._num_bytes += sum(sizes)
        self._most_trajectories = max(self._most_trajectories, *members)
        self._most_bytes = max(self._most_bytes, *sizes)
        if self._separate_replayed:
            self._num_replayed += int(np.count_nonzero(num_replays))
        if self._max_staleness < math.inf:
            for entry in zip(newest, item_ids.tolist(), strict=True):
                heapq.heappush(self._by_age, entry)

    def _remove(self, rows: np.ndarray) -> list[tuple[Trajectory, ...]]:
        """All of rows, int64[k], but their order. Returns what they held."""
        trajectories: list[tuple[Trajectory, ...]] = self._trajectories.view[rows].tolist()
        if self._separate_replayed:
            self._num_replayed -= int(np.count_nonzero(self._items.view["num_replays"][rows]))
        self._num_trajectories -= sum(map(len, trajectories))
        self._num_bytes -= int(self._sizes.view[rows].sum())
        self._row_of.remove(self._items.view["item_id"][rows])
        for signature in self._signature_of.view[rows].tolist():
            self._signatures.remove(signature)
        num_left = len(self) - len(rows)
        sources, targets = moves(rows, len(self))
        for column in (self._trajectories, self._signature_of, self._items, self._versions, self._sizes):
            column.move(sources, targets, num_left)
        self._row_of.put(self._items.view["item_id"][targets], targets)
        return trajectories


def _middle_version(versions: np.ndarray) -> int:
    """Of the action token in the middle, by age: half of them are newer.

    versions: int32[n], NO_VERSION where there is no action.
    """
    actions = versions[versions != NO_VERSION]
    half = len(actions) // 2
    return int(np.partition(actions, half)[half])
