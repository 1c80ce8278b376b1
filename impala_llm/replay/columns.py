"""The arrays behind the buffer: columns that grow and shrink in step with each other.

Invariant: rows are dense. Where some are removed, `moves` says which of the others fill the gaps, so nothing is ever
scanned for holes.
"""

import heapq
from collections.abc import Sequence

import numpy as np


def moves(gone: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Where rows go when others are removed: sources and targets, int64[n] each. gone: int64[k], distinct.

    The rows that stay behind the new end fill the gaps before it, both in order.
    """
    num_left = num_rows - len(gone)
    stays = np.ones(len(gone), np.bool_)
    stays[gone[gone >= num_left] - num_left] = False
    return num_left + np.flatnonzero(stays), np.sort(gone[gone < num_left])


class Column:
    """A growing array."""

    def __init__(self, dtype: type[np.generic] | np.dtype) -> None:
        self._data = np.zeros(64, dtype)
        self._length = 0

    @property
    def view(self) -> np.ndarray:
        """[length], shares memory."""
        return self._data[: self._length]

    def extend(self, num: int) -> np.ndarray:
        """Lengthen it; returns the new end, [num], to be written to."""
        self._length += num
        while self._length > len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        return self._data[self._length - num : self._length]

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Fill gaps, and shorten it."""
        self._data[targets] = self._data[sources]
        self._data[length : self._length] = 0  # a reference to an object would keep it alive
        self._length = length


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

    def put(self, item_ids: np.ndarray, rows: np.ndarray) -> None:
        """Where items lie from now on, int64[k] each."""
        self._row_of.update(zip(item_ids.tolist(), rows.tolist(), strict=True))
        if 2 * len(self._row_of) > len(self._guess):
            self._guess = np.zeros(2 << (2 * len(self._row_of) - 1).bit_length(), np.int64)
            item_ids = np.fromiter(self._row_of.keys(), np.int64)
            rows = np.fromiter(self._row_of.values(), np.int64)
        self._guess[item_ids & (len(self._guess) - 1)] = rows

    def remove(self, item_ids: np.ndarray) -> None:
        """They are nowhere any more."""
        for item_id in item_ids.tolist():
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
        self._counts = [0] * 64
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
                self._free = list(range(len(self._counts), 2 * len(self._counts)))
                self._counts += [0] * len(self._counts)
            slot = self._slot_of[signature] = heapq.heappop(self._free)
        self._counts[slot] += 1
        return slot

    def remove(self, signature: str) -> None:
        """Count one less."""
        slot = self._slot_of[signature]
        self._counts[slot] -= 1
        if not self._counts[slot]:
            del self._slot_of[signature]
            heapq.heappush(self._free, slot)

    def restore(self, signatures: Sequence[str], slots: Sequence[int]) -> None:
        """Forget everything, and count these, which had these slots."""
        self._slot_of = dict(zip(signatures, slots, strict=True))
        size = 64
        while size <= max(self._slot_of.values(), default=0):
            size *= 2
        self._counts = np.bincount(np.array(slots, np.int64), minlength=size).tolist()
        self._free = [slot for slot, count in enumerate(self._counts) if not count]
