"""Clock that counts only time in which this process ran, for deadlines on the silence of others.

Invariant: a gap between two ticks counts for at most `max_gap_s`. A process that was stopped (SIGSTOP, a suspended
machine) or busy elsewhere thus never takes its own absence for the silence of its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ActiveClock:
    """Seconds since construction, with long gaps between ticks shortened. For one thread.

    Args:
        max_gap_s: seconds that a gap counts at most.
        monotonic: source of real time, in seconds.
    """

    def __init__(self, max_gap_s: float = 1.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_gap_s = max_gap_s
        self._monotonic = monotonic
        self._last_tick = monotonic()
        self.now = 0.0
        """Seconds, as of the last tick."""

    def tick(self) -> float:
        """Add the time since the last tick. Returns the new `now`."""
        real = self._monotonic()
        self.now += min(real - self._last_tick, self._max_gap_s)
        self._last_tick = real
        return self.now
