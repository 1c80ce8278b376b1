"""The arrays behind the buffer: columns that grow and shrink by a row at a time, in step with each other.

Invariant: rows are dense. A removal moves the last row into the gap, so nothing is ever scanned for holes.
"""

import numpy as np


class Column:
    """A growing array; `remove` moves the last element into the gap."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._data = np.zeros(64, dtype)
        self._length = 0

    @property
    def view(self) -> np.ndarray:
        """[length], shares memory."""
        return self._data[: self._length]

    def append(self, value: float) -> None:
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[self._length] = value
        self._length += 1

    def remove(self, row: int) -> None:
        self._length -= 1
        self._data[row] = self._data[self._length]


class SignatureCounts:
    """How many items have each signature; a signature has a slot as long as an item has it."""

    def __init__(self) -> None:
        self.counts = np.zeros(64, np.int64)
        """By slot."""
        self._slot_of: dict[str, int] = {}
        self._free = list(range(64))

    def __len__(self) -> int:
        return len(self._slot_of)

    def add(self, signature: str) -> int:
        """Count one more; returns the slot."""
        slot = self._slot_of.get(signature)
        if slot is None:
            if not self._free:
                self._free = list(range(len(self.counts), 2 * len(self.counts)))
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
            slot = self._slot_of[signature] = self._free.pop()
        self.counts[slot] += 1
        return slot

    def remove(self, signature: str) -> None:
        slot = self._slot_of[signature]
        self.counts[slot] -= 1
        if self.counts[slot] == 0:
            del self._slot_of[signature]
            self._free.append(slot)
