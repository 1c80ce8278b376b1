"""Two threads in place of two processes."""

import threading
from typing import Any


class Meeting:
    """Where rank 0 and rank 1 exchange what they have, again and again."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._brought: list[Any] = [None, None]

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Wait for the other rank; return what both brought, rank 0 first. BrokenBarrierError after 30 s without it."""
        self._brought[rank] = mine
        self._barrier.wait(30)
        both = list(self._brought)
        self._barrier.wait(30)
        return both
