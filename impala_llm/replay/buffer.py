"""The replay buffer: trajectories that may be trained on, bounded in number, bytes, staleness and reuse.

Life of an item (trajectories that are trained on together: a whole group, or a single one):

    insert ──► waits ──► sample (again and again) ──► removed with its last replay
                 └─────► evicted: too stale, or the lowest priority when the buffer is full

Invariant: an item that was inserted leaves in exactly one way, and the caller is told: `SampledItem.is_last`, or an
`EvictedItem` in what `insert_all`, `sample` or `evict_stale` return. Staleness is never negative, and of what is
sampled that of the newest action token is never above `max_staleness`. The same calls with the same seed draw the same
items, also across `state_dict`.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from impala_llm.replay.items import NO_ITEMS, EvictedItem, Items, Sample
from impala_llm.replay.priorities import OldestFirst, Sampler
from impala_llm.trajectory import Trajectory, block_bytes

STATE_FORMAT = 4
_SAVED_COLUMNS = ("item_id", "num_replays", "abs_advantage", "is_known")
"""The others follow from the trajectories."""
_CHANGED_IN_PLACE = ("num_replays", "signature", "abs_advantage", "is_known")
"""Columns whose elements change; of the others a new array replaces the old one."""


@dataclass(frozen=True)
class BufferSnapshot:
    """State of a buffer at a moment, without a copy of its trajectories."""

    items: Items
    signatures: list[str]
    """Signatures, each at the index that stands for it."""
    generator: str
    version: int
    next_id: int

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for members in self.items.trajectories for t in members]


@dataclass(frozen=True)
class BufferStats:
    num_trajectories: int
    num_bytes: int
    """Size of the arrays of all trajectories."""
    fill: float
    """The larger share of the two capacities, in [0, 1]."""
    oldest_version: int | None
    """The smallest of the items; None when the buffer is empty."""


class StateTooLarge(ValueError):
    """A saved buffer holds more than there is room for.

    Attributes:
        num_trajectories, num_bytes: that it holds.
    """

    def __init__(self, stats: BufferStats, num_trajectories: int, num_bytes: int) -> None:
        self.num_trajectories, self.num_bytes = stats.num_trajectories, stats.num_bytes
        super().__init__(
            f"the saved buffer holds {self.num_trajectories} trajectories of {self.num_bytes} bytes, and room is for "
            f"{num_trajectories} of {num_bytes} bytes: raise the capacity to resume"
        )


class ReplayBuffer:
    """Items with priorities.

    Args:
        sampler: decides what is drawn and what a full buffer gives up.
        capacity_trajectories, capacity_bytes: both hold; bytes count the arrays.
        max_staleness: η >= 0 in policy versions; an item is evicted when all of its action tokens are older. While
            one is not, it teaches, and its return is among those that others are compared with: dropped sooner, long
            episodes would be missing there. Infinity: no item is evicted for its staleness.
        max_replays: times that an item may be sampled, >= 1.
        seed: >= 0, of all draws.
        separate_replayed: items that were sampled before are a class of their own, and `sample` takes `max_replayed`.

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
        if separate_replayed and isinstance(sampler, OldestFirst):
            raise ValueError("separate_replayed is True: a queue uses its items once, give it a PrioritySampler")
        self._sampler = sampler
        self._capacity_trajectories = capacity_trajectories
        self._capacity_bytes = capacity_bytes
        self._max_staleness = max_staleness
        self._max_replays = max_replays
        self._separate_replayed = separate_replayed
        self._rng = np.random.default_rng(seed)
        self._version = 0
        self._next_id = 0
        self._items = NO_ITEMS
        self._signature_numbers: dict[str, int] = {}
        """Number of each signature, ascending; some may have no item any more."""

    def __len__(self) -> int:
        """Items that can be sampled."""
        return len(self._items.item_id)

    def insert_all(
        self, items: Sequence[Sequence[Trajectory]], version: int, signatures: Sequence[str] | None = None
    ) -> tuple[EvictedItem, ...]:
        """Add items.

        Their |A| is not known before they were trained on; until then it counts as the largest that is known in the
        buffer when they come (1 if none is), so that they are likely to be tried.

        Args:
            items: each holds at least one trajectory; they stay together.
            version: the learner's, never smaller than before.
            signatures: what rarity counts, one for each item; by default that of its first trajectory.

        Returns:
            The evicted items: stale ones, new ones among them if they are stale already, new ones that are larger than
            the whole buffer, and then those of the lowest priority, the oldest first among equals, until the new ones
            fit. New ones only make room for each other where all of them together are more than the buffer holds.

        Raises:
            ValueError: an empty item, tokens newer than `version`, a version that decreases. Then nothing was inserted.
        """
        if signatures is not None and len(signatures) != len(items):
            raise ValueError(f"signatures has {len(signatures)} elements, items has {len(items)}: one each")
        if not items:
            return self.evict_stale(version)
        if signatures is None:
            signatures = [trajectories[0].signature if trajectories else "" for trajectories in items]
        new = self._checked(items, version)
        evicted = self.evict_stale(version)
        new = new._replace(
            item_id=np.arange(self._next_id, self._next_id + len(items)), signature=self._numbers_of(signatures)
        )
        self._next_id += len(items)
        is_stale = new.newest_version < version - self._max_staleness
        is_too_large = (new.num_trajectories > self._capacity_trajectories) | (new.num_bytes > self._capacity_bytes)
        if (is_lost := is_stale | is_too_large).any():
            evicted += _evicted(new, np.flatnonzero(is_stale), "stale")
            evicted += _evicted(new, np.flatnonzero(is_too_large & ~is_stale), "capacity")
            new = new.take(~is_lost)
        while len(new.item_id):
            fitting = min(
                np.searchsorted(np.cumsum(new.num_trajectories), self._capacity_trajectories, side="right"),
                np.searchsorted(np.cumsum(new.num_bytes), self._capacity_bytes, side="right"),
            )
            evicted += self._take_in(new.take(slice(fitting)))
            new = new.take(slice(fitting, None))
        return evicted

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
        self._check_draw(num_items, importance_exponent, max_replayed)
        evicted = self.evict_stale(version)
        items = self._items
        if max_replayed is None:
            classes = [(np.arange(len(self)), num_items)]
        else:
            is_fresh = items.num_replays == 0
            replayed = np.flatnonzero(~is_fresh)
            num_replayed = min(max_replayed, len(replayed))
            classes = [(np.flatnonzero(is_fresh), num_items - num_replayed), (replayed, num_replayed)]
        if classes[0][1] > len(classes[0][0]):
            nothing = np.zeros(0, np.int64)
            return Sample(nothing, np.zeros(0), nothing, np.zeros(0, np.bool_), (), evicted)
        draws = [self._sampler.draw(items, among, num, self._rng) for among, num in classes if num]
        rows = np.concatenate([drawn for drawn, _ in draws])
        log_weights = -importance_exponent * np.concatenate([log_density for _, log_density in draws])
        items.num_replays[rows] += 1
        num_replays = items.num_replays[rows]
        sample = Sample(
            item_ids=items.item_id[rows],
            weights=np.exp(log_weights - log_weights.max()),
            num_replays=num_replays,
            is_last=num_replays >= self._max_replays,
            trajectories=tuple(items.trajectories[rows].tolist()),
            evicted=evicted,
        )
        if sample.is_last.any():
            self._items = items.without(rows[sample.is_last])
        return sample

    def evict_stale(self, version: int) -> tuple[EvictedItem, ...]:
        """Remove items older than `max_staleness` for a learner at `version`; raises ValueError if that decreases."""
        if version < self._version:
            raise ValueError(f"version is {version} after {self._version}: the learner's version never decreases")
        self._version = version
        stale = np.flatnonzero(self._items.newest_version < version - self._max_staleness)
        return self._evict(stale, "stale") if len(stale) else ()

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
        is_there, rows = self._items.find(ids)
        self._items.abs_advantage[rows] = values[is_there]
        self._items.is_known[rows] = True

    def stats(self) -> BufferStats:
        items = self._items
        num_trajectories, num_bytes = int(items.num_trajectories.sum()), int(items.num_bytes.sum())
        return BufferStats(
            num_trajectories=num_trajectories,
            num_bytes=num_bytes,
            fill=max(num_trajectories / self._capacity_trajectories, num_bytes / self._capacity_bytes),
            oldest_version=int(items.version.min()) if len(self) else None,
        )

    def snapshot(self) -> BufferSnapshot:
        """Snapshot from which `state_dict` is made: cheap, and unchanged by what the buffer does next."""
        copies = {name: getattr(self._items, name).copy() for name in _CHANGED_IN_PLACE}
        generator = json.dumps(self._rng.bit_generator.state)  # its numbers are larger than those of most formats
        names = list(self._signature_numbers)
        return BufferSnapshot(self._items._replace(**copies), names, generator, self._version, self._next_id)

    def state_dict(self, snapshot: BufferSnapshot | None = None) -> dict[str, Any]:
        """Everything but the settings and the trajectories, as dicts, lists, arrays, numbers and strings.

        Trajectories stand there by `unroll_id`: a caller that saves the state saves the `trajectories` of the snapshot
        beside it.

        Args:
            snapshot: of which the state is wanted; None: as of now.
        """
        snapshot = snapshot or self.snapshot()
        items = snapshot.items
        return {
            "format": STATE_FORMAT,
            "generator": snapshot.generator,
            "version": snapshot.version,
            "next_id": snapshot.next_id,
            "columns": {name: getattr(items, name) for name in _SAVED_COLUMNS},
            "signatures": [snapshot.signatures[number] for number in items.signature],
            "trajectories": [[t.unroll_id for t in members] for members in items.trajectories],
        }

    def load_state_dict(self, state: Mapping[str, Any], trajectories: Mapping[int, Trajectory]) -> None:
        """Take over a saved state, its seed included; what the buffer held is forgotten.

        Args:
            trajectories: by `unroll_id`. An item of which one is missing is left out.

        Raises:
            StateTooLarge: more than the capacity holds.
            ValueError: another format.
        """
        if state["format"] != STATE_FORMAT:
            raise ValueError(f"format is {state['format']}: this version reads replay states of format {STATE_FORMAT}")
        self._rng.bit_generator.state = json.loads(state["generator"])
        self._version = state["version"]
        self._next_id = state["next_id"]
        self._items, self._signature_numbers = NO_ITEMS, {}
        rows = [row for row, ids in enumerate(state["trajectories"]) if all(number in trajectories for number in ids)]
        if not rows:
            return
        items = _columns([tuple(trajectories[number] for number in state["trajectories"][row]) for row in rows])
        columns = {name: column[rows] for name, column in state["columns"].items()}
        signatures = [state["signatures"][row] for row in rows]
        self._items = items._replace(signature=self._numbers_of(signatures), **columns)
        stats = self.stats()
        if stats.fill > 1.0:
            raise StateTooLarge(stats, self._capacity_trajectories, self._capacity_bytes)

    def _check_draw(self, num_items: int, importance_exponent: float, max_replayed: int | None) -> None:
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

    def _checked(self, items: Sequence[Sequence[Trajectory]], version: int) -> Items:
        """The columns of new items; raises ValueError if one of them may not be inserted."""
        if not all(items):
            raise ValueError("trajectories is empty: an item holds at least one")
        new = _columns(items)
        newest = new.newest_version.max()
        if newest > version:
            raise ValueError(
                f"version is {version}, but a token was sampled by {newest}: versions must survive a restart"
            )
        return new

    def _numbers_of(self, signatures: Sequence[str]) -> np.ndarray:
        """Number signatures, int64[k]. Numbers without an item are given up once they outnumber the items."""
        numbers = self._signature_numbers
        if len(numbers) > 2 * len(self) + 64:
            names = list(numbers)
            used, self._items.signature[:] = np.unique(self._items.signature, return_inverse=True)
            self._signature_numbers = numbers = {names[old]: new for new, old in enumerate(used.tolist())}
        return np.array([numbers.setdefault(signature, len(numbers)) for signature in signatures], np.int64)

    def _take_in(self, new: Items) -> tuple[EvictedItem, ...]:
        """Add items that fit into an empty buffer together, and return the ones evicted for them."""
        held = self._items
        too_many = held.num_trajectories.sum() + new.num_trajectories.sum() - self._capacity_trajectories
        too_large = held.num_bytes.sum() + new.num_bytes.sum() - self._capacity_bytes
        evicted: tuple[EvictedItem, ...] = ()
        if too_many > 0 or too_large > 0:
            # At least so many have to go, even if each is as large as the largest.
            num_items = max(-(-too_many // held.num_trajectories.max()), -(-too_large // held.num_bytes.max()))
            while True:
                rows = self._sampler.lowest(held, num_items)
                is_enough = np.cumsum(held.num_trajectories[rows]) >= too_many
                is_enough &= np.cumsum(held.num_bytes[rows]) >= too_large
                if is_enough[-1]:
                    break
                num_items = min(2 * num_items, len(self))
            evicted = self._evict(rows[: int(np.argmax(is_enough)) + 1], "capacity")
            held = self._items
        new.abs_advantage[:] = (held.abs_advantage * held.is_known).max() if held.is_known.any() else 1.0
        self._items = held.followed_by(new)
        return evicted

    def _evict(self, rows: np.ndarray, reason: Literal["stale", "capacity"]) -> tuple[EvictedItem, ...]:
        evicted = _evicted(self._items, rows, reason)
        self._items = self._items.without(rows)
        return evicted


def _evicted(items: Items, rows: np.ndarray, reason: Literal["stale", "capacity"]) -> tuple[EvictedItem, ...]:
    item_ids, num_replays, trajectories = (
        column[rows].tolist() for column in (items.item_id, items.num_replays, items.trajectories)
    )
    return tuple(map(EvictedItem, item_ids, itertools.repeat(reason), num_replays, trajectories))


def _columns(items: Sequence[Sequence[Trajectory]]) -> Items:
    """Columns of new items, without item_id, signature and |A|."""
    num = len(items)
    num_trajectories = np.fromiter(map(len, items), np.int64, num)
    firsts = np.cumsum(num_trajectories) - num_trajectories
    members = [t for trajectories in items for t in trajectories]
    by_member = [t.versions for t in members]
    num_tokens = np.fromiter(map(len, by_member), np.int64, len(members))
    sizes = list(map(block_bytes, num_tokens.tolist(), [len(t.turns) for t in members]))
    lengths = np.add.reduceat(num_tokens, firsts)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # As `Trajectory.nbytes`, `oldest_version` and `newest_version`, of all at once. Most items are of one version.
    versions = np.concatenate(by_member)
    middle = np.minimum.reduceat(versions.view(np.uint32), starts).astype(np.int64)
    newest = np.maximum.reduceat(versions, starts).astype(np.int64)
    for row in np.flatnonzero(newest != middle).tolist():
        middle[row] = _middle_version(versions[starts[row] : ends[row]])
    return Items(
        item_id=np.zeros(num, np.int64),
        version=middle,
        newest_version=newest,
        num_bytes=np.add.reduceat(sizes, firsts),
        num_trajectories=num_trajectories,
        num_replays=np.zeros(num, np.int64),
        signature=np.zeros(num, np.int64),
        abs_advantage=np.zeros(num),
        is_known=np.zeros(num, np.bool_),
        trajectories=np.fromiter(map(tuple, items), np.object_, num),
    )


def _middle_version(versions: np.ndarray) -> int:
    """The median version of the action tokens of int32[n] versions, which are negative where there is no action."""
    actions = versions[versions >= 0]
    half = len(actions) // 2
    return int(np.partition(actions, half)[half])
