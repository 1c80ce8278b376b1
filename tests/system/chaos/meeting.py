"""A barrier of the learner ranks of the chaos test, in place of the collectives of torch.distributed.

Invariant: `exchange` returns the same on all ranks, or ends with Missed on those that are there.
"""

import time
from pathlib import Path

import numpy as np

from tests.system.chaos.settings import NUM_RANKS


class Missed(RuntimeError):
    """Another rank did not come in time."""


class Meeting:
    """path: of a file that all ranks map. generation: of the ranks; they are started together, and grows each time."""

    def __init__(self, path: Path, rank: int, generation: int) -> None:
        # A rank is at most one exchange ahead, so that two cells each are enough.
        self._cells = np.memmap(path, np.int64, "r+", shape=(2, NUM_RANKS))
        self._rank, self._generation = rank, generation
        self._count = 0

    @staticmethod
    def prepare(path: Path) -> None:
        path.write_bytes(bytes(8 * 2 * NUM_RANKS))

    def exchange(self, bits: int, timeout_s: float) -> list[int]:
        """Wait for all ranks. bits: in [0, 255]. Returns those of all ranks, by rank. Raises Missed."""
        self._count += 1
        cells = self._cells[self._count % 2]
        mark = self._generation << 32 | self._count
        cells[self._rank] = mark << 8 | bits
        deadline = time.monotonic() + timeout_s
        while True:
            seen = cells.tolist()
            if all(value >> 8 == mark for value in seen):
                return [value & 255 for value in seen]
            if time.monotonic() > deadline:
                raise Missed(f"rank {self._rank} met nobody at exchange {self._count} in {timeout_s:g} s")
            time.sleep(0.001)
