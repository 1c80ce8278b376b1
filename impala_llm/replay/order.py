"""What a buffer asks of an order of priority, and the plainest of them, a queue.

Invariant: an order numbers its items by dense rows, in step with the buffer: items are appended behind the last row,
and where some are removed others move as `columns.moves` says.
"""

import bisect
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from impala_llm.replay.columns import moves
from impala_llm.replay.state import State


@dataclass(frozen=True)
class Draw:
    """k items in the order in which they were drawn."""

    rows: np.ndarray
    """int64[k]."""
    log_density: np.ndarray
    """float64[k]: log(N·P_i), P_i the probability of the first draw; 0 under uniform sampling."""


class Order(Protocol):
    def append(self, item_ids: np.ndarray, versions: np.ndarray, slots: np.ndarray) -> None:
        """Add items.

        Args:
            item_ids: int64[k], ascending, larger than all before.
            versions: int64[k], policy version of the token in the middle, by age.
            slots: int64[k], stand for the signatures.
        """
        ...

    def remove(self, rows: np.ndarray) -> None:
        """Take items out, int64[k], distinct."""
        ...

    def remove_lowest(self, num_items: int) -> np.ndarray:
        """Take out the items of the lowest priority, one after the other, the oldest among equals: what a full buffer
        gives up. Returns the rows that they had, int64[k], the first to go first."""
        ...

    def set_advantages(self, rows: np.ndarray, abs_advantages: np.ndarray) -> None:
        """float64[k], |A| >= 0, of int64[k]; negative rows are passed over."""
        ...

    def set_replayed(self, rows: np.ndarray) -> None:
        """The items, int64[k], have been sampled for the first time. Called where classes are separate."""
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
        replayed: np.ndarray,
    ) -> None:
        """Take over a saved state; what was held is forgotten. All but `state` are by row: int64[N], bool[N]."""
        ...


class QueueOrder:
    """The oldest version first, in the order of insertion within a version; advantages and rarity play no part."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int]] = []
        """(version, item_id), sorted."""
        self._keys: list[tuple[int, int]] = []
        """By row."""
        self._row_of: dict[int, int] = {}

    def append(self, item_ids: np.ndarray, versions: np.ndarray, slots: np.ndarray) -> None:
        for key in zip(versions.tolist(), item_ids.tolist(), strict=True):
            self._row_of[key[1]] = len(self._keys)
            self._keys.append(key)
            bisect.insort(self._queue, key)

    def remove(self, rows: np.ndarray) -> None:
        sources, targets = moves(rows, len(self._keys))
        for row in rows.tolist():
            key = self._keys[row]
            del self._row_of[key[1]]
            del self._queue[bisect.bisect_left(self._queue, key)]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._keys[target] = self._keys[source]
            self._row_of[self._keys[target][1]] = target
        del self._keys[len(self._keys) - len(rows) :]

    def remove_lowest(self, num_items: int) -> np.ndarray:
        rows = np.array([self._row_of[item_id] for _, item_id in self._queue[:num_items]], np.int64)
        self.remove(rows)
        return rows

    def set_advantages(self, rows: np.ndarray, abs_advantages: np.ndarray) -> None:
        """Does nothing."""

    def set_replayed(self, rows: np.ndarray) -> None:
        """Does nothing."""

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
        replayed: np.ndarray,
    ) -> None:
        self._keys = list(zip(versions.tolist(), item_ids.tolist(), strict=True))
        self._queue = sorted(self._keys)
        self._row_of = {item_id: row for row, item_id in enumerate(item_ids.tolist())}
