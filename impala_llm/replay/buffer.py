"""The replay buffer: what came in and may be trained on, bounded in trajectories, bytes, age and reuse.

Life of an item (trajectories that are trained on together: a whole group, or a single one):

    insert ──► waits ──► sample (again and again) ──► removed with its last replay
                 └─────► evicted: too stale, or the lowest priority when the buffer is full

Invariant: an item that was inserted leaves in exactly one way, and the caller is told: `SampledItem.is_last`, or an
`EvictedItem` in what `insert`, `sample` or `evict_stale` return. Staleness is never negative and never above
`max_staleness` in what is sampled. The same calls with the same seed draw the same items, also across `state_dict`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from impala_llm.replay.columns import Column, SignatureCounts
from impala_llm.replay.priorities import ItemColumns, Sampler
from impala_llm.replay.state import State, trajectory_from_state, trajectory_to_state
from impala_llm.trajectory import Trajectory

STATE_FORMAT = 1


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


@dataclass(frozen=True)
class Sample:
    items: tuple[SampledItem, ...]
    """Empty when the buffer held too few."""
    evicted: tuple[EvictedItem, ...]


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
    """Of the items' oldest tokens; None when the buffer is empty."""
    newest_version: int | None


@dataclass
class _Item:
    item_id: int
    trajectories: tuple[Trajectory, ...]
    signature: str
    version: int
    num_bytes: int
    num_replays: int = 0


class ReplayBuffer:
    """Items with priorities.

    Args:
        sampler: decides what is drawn and what a full buffer gives up.
        capacity_trajectories, capacity_bytes: both hold; bytes count the arrays.
        max_staleness: η >= 0 in policy versions, of an item's oldest token; infinity never evicts by age.
        max_replays: times that an item may be sampled, >= 1.
        seed: >= 0, of all draws.

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
        self._seed = seed
        self._clear()

    def _clear(self) -> None:
        self._version = 0
        self._next_id = 0
        self._num_draws = 0
        self._num_trajectories = 0
        self._num_bytes = 0
        # Items lie densely in rows, in step with the columns; a removal moves the last row into the gap.
        self._items: list[_Item] = []
        self._row_of: dict[int, int] = {}
        self._versions = Column(np.int64)
        self._abs_advantages = Column(np.float64)
        self._advantage_known = Column(np.bool_)
        self._signature_slots = Column(np.int64)
        self._item_ids = Column(np.int64)
        self._signatures = SignatureCounts()

    def __len__(self) -> int:
        """Items that can be sampled."""
        return len(self._items)

    def insert(
        self, trajectories: Sequence[Trajectory], version: int, signature: str | None = None
    ) -> tuple[EvictedItem, ...]:
        """Add one item.

        Its |A| is not known before it was trained on; until then it counts as large as the largest known one in the
        buffer (1 if none is), so that it is likely to be tried.

        Args:
            trajectories: at least one; they stay together.
            version: the learner's, never smaller than before.
            signature: what rarity counts; by default that of the first trajectory.

        Returns:
            What had to go: stale items, the new one among them if it is born stale, and then those of lowest priority,
            the oldest first among equals, until the new one fits.

        Raises:
            ValueError: an empty item, one larger than the whole buffer, tokens newer than `version`, a version that
                decreases.
        """
        if not trajectories:
            raise ValueError("trajectories is empty: an item holds at least one")
        num_bytes = sum(t.nbytes for t in trajectories)
        if len(trajectories) > self._capacity_trajectories or num_bytes > self._capacity_bytes:
            raise ValueError(
                f"trajectories holds {len(trajectories)} of {num_bytes} bytes: the whole buffer has room for "
                f"{self._capacity_trajectories} of {self._capacity_bytes} bytes; raise its capacity"
            )
        newest = max(t.newest_version for t in trajectories)
        if newest > version:
            raise ValueError(
                f"version is {version}, but a token was sampled by {newest}: versions must survive a restart"
            )
        evicted = self.evict_stale(version)
        known = self._abs_advantages.view[self._advantage_known.view]
        item = _Item(
            item_id=self._next_id,
            trajectories=tuple(trajectories),
            signature=trajectories[0].signature if signature is None else signature,
            version=min(t.oldest_version for t in trajectories),
            num_bytes=num_bytes,
        )
        self._next_id += 1
        if self._is_stale(item.version):
            return (*evicted, EvictedItem(item.item_id, "stale", 0, item.trajectories))
        evicted += self._make_room(len(trajectories), num_bytes)
        self._append(item, float(known.max()) if len(known) else 1.0, advantage_known=False)
        return evicted

    def sample(self, num_items: int, version: int, importance_exponent: float = 1.0) -> Sample:
        """Draw distinct items.

        Args:
            num_items: >= 1. With groups, the batch size over the group size: a group that lost a member takes the place
                of a whole one, as it does in the tickets, and the batch is a trajectory short.
            version: the learner's, never smaller than before; what is too stale for it is evicted first.
            importance_exponent: b in [0, 1] of the weights; 1 undoes the bias of the draw, 0 leaves it.

        Returns:
            No items when fewer than `num_items` are left: the caller waits for more.

        Raises:
            ValueError: an argument out of range, a version that decreases.
        """
        if not 1 <= num_items <= self._capacity_trajectories:
            raise ValueError(
                f"num_items is {num_items}: draw at least 1 and at most the capacity, {self._capacity_trajectories}"
            )
        if not 0.0 <= importance_exponent <= 1.0:
            raise ValueError(f"importance_exponent is {importance_exponent}: it must lie in [0, 1]")
        evicted = self.evict_stale(version)
        if len(self) < num_items:
            return Sample((), evicted)
        # a generator of its own for each draw: two integers are the whole state to be saved
        rng = np.random.default_rng((self._seed, self._num_draws))
        self._num_draws += 1
        draw = self._sampler.draw(self._columns(), num_items, rng)
        log_weights = -importance_exponent * draw.log_density
        weights = np.exp(log_weights - log_weights.max())
        sampled = []
        for row, weight in zip(draw.rows.tolist(), weights.tolist(), strict=True):
            item = self._items[row]
            item.num_replays += 1
            is_last = item.num_replays >= self._max_replays
            sampled.append(SampledItem(item.item_id, item.trajectories, weight, item.num_replays, is_last))
        for chosen in sampled:
            if chosen.is_last:
                self._remove(chosen.item_id)
        return Sample(tuple(sampled), evicted)

    def evict_stale(self, version: int) -> tuple[EvictedItem, ...]:
        """Remove what is older than `max_staleness` for a learner at `version`; raises ValueError if that decreases."""
        if version < self._version:
            raise ValueError(f"version is {version} after {self._version}: the learner's version never decreases")
        self._version = version
        if math.isinf(self._max_staleness):
            return ()
        stale = self._item_ids.view[version - self._versions.view > self._max_staleness]
        return tuple(self._evict(item_id, "stale") for item_id in np.sort(stale).tolist())

    def update_advantages(self, item_ids: Sequence[int], abs_advantages: Sequence[float]) -> None:
        """Set |A| of items after they were trained on. Items that have left in the meantime are passed over.

        Raises:
            ValueError: different lengths, or a value that is negative or not finite.
        """
        if len(item_ids) != len(abs_advantages):
            raise ValueError(
                f"abs_advantages has {len(abs_advantages)} elements, item_ids has {len(item_ids)}: one each"
            )
        for item_id, value in zip(item_ids, abs_advantages, strict=True):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"abs_advantages of item {item_id} is {value}: it must be finite and at least 0")
            row = self._row_of.get(item_id)
            if row is not None:
                self._abs_advantages.view[row] = value
                self._advantage_known.view[row] = True

    def stats(self) -> BufferStats:
        versions = self._versions.view
        return BufferStats(
            num_trajectories=self._num_trajectories,
            num_items=len(self._items),
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
            "seed": self._seed,
            "version": self._version,
            "next_id": self._next_id,
            "num_draws": self._num_draws,
            "abs_advantages": self._abs_advantages.view.copy(),
            "advantage_known": self._advantage_known.view.copy(),
            "items": [
                {
                    "item_id": item.item_id,
                    "signature": item.signature,
                    "num_replays": item.num_replays,
                    "trajectories": [trajectory_to_state(t) for t in item.trajectories],
                }
                for item in self._items
            ],
        }

    def load_state_dict(self, state: State) -> None:
        """Take over a saved state, its seed included; what the buffer held is forgotten.

        Raises:
            ValueError: another format, or more than the capacity holds.
        """
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"format is {state['format']}: this version reads replay states of format {STATE_FORMAT}")
        self._clear()
        self._seed = state["seed"]
        self._version = state["version"]
        self._next_id = state["next_id"]
        self._num_draws = state["num_draws"]
        advantages = zip(state["abs_advantages"].tolist(), state["advantage_known"].tolist(), strict=True)
        for saved, (abs_advantage, known) in zip(state["items"], advantages, strict=True):
            trajectories = tuple(map(trajectory_from_state, saved["trajectories"]))
            item = _Item(
                item_id=saved["item_id"],
                trajectories=trajectories,
                signature=saved["signature"],
                version=min(t.oldest_version for t in trajectories),
                num_bytes=sum(t.nbytes for t in trajectories),
                num_replays=saved["num_replays"],
            )
            self._append(item, abs_advantage, known)
        if self._num_trajectories > self._capacity_trajectories or self._num_bytes > self._capacity_bytes:
            raise ValueError(
                f"the saved buffer holds {self._num_trajectories} trajectories of {self._num_bytes} bytes, and room is "
                f"for {self._capacity_trajectories} of {self._capacity_bytes} bytes: raise the capacity to resume"
            )

    def _is_stale(self, version: int) -> bool:
        return self._version - version > self._max_staleness

    def _make_room(self, num_trajectories: int, num_bytes: int) -> tuple[EvictedItem, ...]:
        """Evict by priority until an item of this size fits."""
        evicted: list[EvictedItem] = []
        if self._fits(num_trajectories, num_bytes):
            return ()
        columns = self._columns()
        order = np.lexsort((columns.item_ids, self._sampler.log_priorities(columns)))
        for item_id in columns.item_ids[order].tolist():
            if self._fits(num_trajectories, num_bytes):
                break
            evicted.append(self._evict(item_id, "capacity"))
        return tuple(evicted)

    def _fits(self, num_trajectories: int, num_bytes: int) -> bool:
        return (
            self._num_trajectories + num_trajectories <= self._capacity_trajectories
            and self._num_bytes + num_bytes <= self._capacity_bytes
        )

    def _evict(self, item_id: int, reason: Literal["stale", "capacity"]) -> EvictedItem:
        item = self._remove(item_id)
        return EvictedItem(item.item_id, reason, item.num_replays, item.trajectories)

    def _columns(self) -> ItemColumns:
        return ItemColumns(
            item_ids=self._item_ids.view,
            versions=self._versions.view,
            abs_advantages=self._abs_advantages.view,
            signature_counts=self._signatures.counts[self._signature_slots.view],
        )

    def _append(self, item: _Item, abs_advantage: float, advantage_known: bool) -> None:
        self._row_of[item.item_id] = len(self._items)
        self._items.append(item)
        self._item_ids.append(item.item_id)
        self._versions.append(item.version)
        self._abs_advantages.append(abs_advantage)
        self._advantage_known.append(advantage_known)
        self._signature_slots.append(self._signatures.add(item.signature))
        self._num_trajectories += len(item.trajectories)
        self._num_bytes += item.num_bytes

    def _remove(self, item_id: int) -> _Item:
        row = self._row_of.pop(item_id)
        item, last = self._items[row], self._items.pop()
        if last is not item:
            self._items[row] = last
            self._row_of[last.item_id] = row
        for column in (
            self._item_ids,
            self._versions,
            self._abs_advantages,
            self._advantage_known,
            self._signature_slots,
        ):
            column.remove(row)
        self._signatures.remove(item.signature)
        self._num_trajectories -= len(item.trajectories)
        self._num_bytes -= item.num_bytes
        return item
