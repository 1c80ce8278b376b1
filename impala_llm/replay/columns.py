"""The arrays behind the buffer: columns that grow and shrink by a row at a time, in step with each other.

Invariant: rows are dense. A removal moves the last row into the gap, so nothing is ever scanned for holes.
"""

import heapq
from collections.abc import Sequence

import numpy as np


class Column:
    """A growing array; `remove` moves the last element into the gap."""

    def __init__(self, dtype: type[np.generic] | np.dtype) -> None:
        self._data = np.zeros(64, dtype)
        self._length = 0

    @property
    def view(self) -> np.ndarray:
        """[length], shares memory."""
        return self._data[: self._length]

    def append(self, value: object) -> None:
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[self._length] = value
        self._length += 1

    def remove(self, row: int) -> None:
        self._length -= 1
        self._data[row] = self._data[self._length]
        self._data[self._length] = 0  # a reference to an object would keep it alive


class RowOfItem:
    """In which row an item lies.

    A dictionary knows it. An array that is looked into by the last bits of item_id knows it of nearly all items, and
    faster, of many at once: what it says of one is believed if that row holds this item.
    """

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._guess = np.zeros(64, np.int64)

    def __contains__(self, item_id: int) -> bool:
        return item_id in self._row_of

    def __getitem__(self, item_id: int) -> int:
        return self._row_of[item_id]

    def __setitem__(self, item_id: int, row: int) -> None:
        self._row_of[item_id] = row
        if 2 * len(self._row_of) > len(self._guess):
            self._guess = np.zeros(2 * len(self._guess), np.int64)
            ids = np.fromiter(self._row_of.keys(), np.int64)
            self._guess[ids & (len(self._guess) - 1)] = np.fromiter(self._row_of.values(), np.int64)
        self._guess[item_id & (len(self._guess) - 1)] = row

    def __delitem__(self, item_id: int) -> None:
        del self._row_of[item_id]

    def rows(self, item_ids: np.ndarray, by_row: np.ndarray) -> np.ndarray:
        """int64[k], -1 where there is none, of int64[k]. by_row: int64[N], the items of the rows."""
        if not len(by_row):
            return np.full(len(item_ids), -1, np.int64)
        rows = np.minimum(self._guess[item_ids & (len(self._guess) - 1)], len(by_row) - 1)
        wrong = np.flatnonzero(by_row[rows] != item_ids)
        rows[wrong] = [self._row_of.get(item_id, -1) for item_id in item_ids[wrong].tolist()]
        return rows


class SignatureCounts:
    """How many items have each signature; a signature has a slot, the smallest free one, as long as an item has it."""

    def __init__(self) -> None:
        self.counts = np.zeros(64, np.int64)
        """By slot."""
        self._slot_of: dict[str, int] = {}
        self._free = list(range(64))

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot(self, signature: str) -> int:
        """Of a signature that an item has."""
        return self._slot_of[signature]

    def add(self, signature: str) -> int:
        """Count one more; returns the slot."""
        slot = self._slot_of.get(signature)
        if slot is None:
            if not self._free:
                self._free = list(range(len(self.counts), 2 * len(self.counts)))
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            slot = self._slot_of[signature] = heapq.heappop(self._free)
        self.counts[slot] += 1
        return slot

    def remove(self, signature: str) -> int:
        """Count one less; returns how many are left."""
        slot = self._slot_of[signature]
        self.counts[slot] -= 1
        left = int(self.counts[slot])
        if left == 0:
            del self._slot_of[signature]
            heapq.heappush(self._free, slot)
        return left

    def restore(self, signatures: Sequence[str], slots: Sequence[int]) -> None:
        """Forget everything, and count these, which had these slots."""
        self._slot_of = dict(zip(signatures, slots, strict=True))
        size = 64
        while size <= max(self._slot_of.values(), default=0):
            size *= 2
        self.counts = np.bincount(np.array(slots, np.int64), minlength=size)
        self._free = np.flatnonzero(self.counts == 0).tolist()
