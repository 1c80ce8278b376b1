"""What a buffer asks of an order of priority, and the plainest of them, a queue.

Invariant: an order numbers its items by dense rows, in step with the buffer: an item is appended behind the last row,
and a removal moves the last row into the gap.
"""

import bisect
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from impala_llm.replay.state import State


@dataclass(frozen=True)
class Draw:
    """k items in the order in which they were drawn."""

    rows: np.ndarray
    """int64[k]."""
    log_density: np.ndarray
    """float64[k]: log(N·P_i), P_i the probability of the first draw; 0 under uniform sampling."""


class Order(Protocol):
    def append(self, item_id: int, version: int, slot: int, count: int) -> None:
        """Add an item.

        Args:
            item_id: larger than all before.
            version: policy version of the oldest token.
            slot: stands for the signature.
            count: items of this slot, this one included.
        """
        ...

    def remove(self, row: int, count: int) -> None:
        """Take an item out. count: items of its slot that are left."""
        ...

    def set_advantages(self, rows: np.ndarray, abs_advantages: np.ndarray) -> None:
        """float64[k], |A| >= 0, of int64[k]; negative rows are passed over."""
        ...

    def set_replayed(self, rows: np.ndarray) -> None:
        """The items, int64[k], have been sampled for the first time. Called where classes are separate."""
        ...

    def first_to_go(self) -> int:
        """item_id of the lowest priority, the oldest among equals: what a full buffer gives up."""
        ...

    def draw(self, num_items: int, rng: np.random.Generator, replayed: bool = False) -> Draw:
        """Distinct rows, 1 <= num_items <= N. replayed: the class that is drawn from, where classes are separate."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(
        self,
        state: State,
        item_ids: np.ndarray,
        versions: np.ndarray,
        slots: np.ndarray,
        counts: np.ndarray,
        replayed: np.ndarray,
    ) -> None:
        """Take over a saved state; what was held is forgotten.

        Args:
            item_ids, versions, slots, replayed: int64[N], int64[N], int64[N], bool[N], by row.
            counts: int64, items by slot.
        """
        ...


class QueueOrder:
    """The oldest version first, in the order of insertion within a version; advantages and rarity play no part."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int]] = []
        """(version, item_id), sorted."""
        self._keys: list[tuple[int, int]] = []
        """By row."""
        self._row_of: dict[int, int] = {}

    def append(self, item_id: int, version: int, slot: int, count: int) -> None:
        key = (version, item_id)
        self._row_of[item_id] = len(self._keys)
        self._keys.append(key)
        bisect.insort(self._queue, key)

    def remove(self, row: int, count: int) -> None:
        key, last = self._keys[row], self._keys.pop()
        if last is not key:
            self._keys[row] = last
            self._row_of[last[1]] = row
        del self._row_of[key[1]]
        del self._queue[bisect.bisect_left(self._queue, key)]

    def set_advantages(self, rows: np.ndarray, abs_advantages: np.ndarray) -> None:
        """Does nothing."""

    def set_replayed(self, rows: np.ndarray) -> None:
        """Does nothing."""

    def first_to_go(self) -> int:
        return self._queue[0][1]

    def draw(self, num_items: int, rng: np.random.Generator, replayed: bool = False) -> Draw:
        rows = [self._row_of[item_id] for _, item_id in self._queue[:num_items]]
        return Draw(np.array(rows, np.int64), np.zeros(num_items))

    def state_dict(self) -> State:
        return {}

    def load_state_dict(
        self,
        state: State,
        item_ids: np.ndarray,
        versions: np.ndarray,
        slots: np.ndarray,
        counts: np.ndarray,
        replayed: np.ndarray,
    ) -> None:
        self._keys = list(zip(versions.tolist(), item_ids.tolist(), strict=True))
        self._queue = sorted(self._keys)
        self._row_of = {item_id: row for row, item_id in enumerate(item_ids.tolist())}
