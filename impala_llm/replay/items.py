"""Items of a replay buffer: the columns in which they are held, and the forms in which they are handed out.

An item is a number of trajectories that are trained on together: a whole group, or a single one.

Invariant: rows are in the order of insertion, so that `item_id` ascends, and of two rows the first is the older item.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from impala_llm.trajectory import Trajectory


class Items(NamedTuple):
    """N items as parallel columns, [N] each."""

    item_id: np.ndarray
    """int64."""
    version: np.ndarray
    """int64: policy version of the median action token, which recency and the queue go by."""
    newest_version: np.ndarray
    """int64: policy version of the newest action token, which decides when the item is too stale."""
    num_bytes: np.ndarray
    """int64: of the arrays of its trajectories."""
    num_trajectories: np.ndarray
    """int64."""
    num_replays: np.ndarray
    """int64: how often it has been sampled."""
    signature: np.ndarray
    """int64: number that stands for its signature."""
    abs_advantage: np.ndarray
    """float64: |A|."""
    is_known: np.ndarray
    """bool: |A| was measured, not assumed."""
    trajectories: np.ndarray
    """object: tuples of `Trajectory`."""

    def take(self, rows: np.ndarray | slice) -> "Items":
        return Items(*(column[rows] for column in self))

    def without(self, rows: np.ndarray) -> "Items":
        keep = np.ones(len(self.item_id), np.bool_)
        keep[rows] = False
        return self.take(keep)

    def followed_by(self, later: "Items") -> "Items":
        return Items(*map(np.concatenate, zip(self, later, strict=True)))

    def find(self, item_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Look items up.

        Args:
            item_ids: int64[k].

        Returns:
            (is_there, rows): bool[k], and int64 with a row for each item that is there.
        """
        rows = np.searchsorted(self.item_id, item_ids)
        is_there = rows < len(self.item_id)
        is_there[is_there] = self.item_id[rows[is_there]] == item_ids[is_there]
        return is_there, rows[is_there]


_NONE = np.zeros(0, np.int64)
NO_ITEMS = Items(
    _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, np.zeros(0), np.zeros(0, np.bool_), np.zeros(0, np.object_)
)


class EvictedItem(NamedTuple):
    """An item that was dropped; its trajectories hold lengths, scores and tickets."""

    item_id: int
    reason: Literal["stale", "capacity"]
    num_replays: int
    """Number of times that it had been sampled; 0: it was never trained on."""
    trajectories: tuple[Trajectory, ...]


class SampledItem(NamedTuple):
    """An item that was drawn."""

    item_id: int
    """For `ReplayBuffer.update_advantages`."""
    trajectories: tuple[Trajectory, ...]
    weight: float
    """Importance weight (N·P)^-b in (0, 1]; the largest of the sample is 1."""
    num_replays: int
    """Number of times that it has been sampled, this one included: 1 is fresh data."""
    is_last: bool
    """Whether it has left the buffer with this sample."""


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
        columns = (self.weights, self.num_replays, self.is_last)
        return tuple(map(SampledItem, self.item_ids.tolist(), self.trajectories, *(c.tolist() for c in columns)))
