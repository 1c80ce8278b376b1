"""The queue of what the receiver has taken in and the learner has not seen yet. What bounds it is the replay arena,
where its trajectories lie.

Invariant: a trajectory that was put is drained exactly once, in order. An error of the receiver reaches whoever drains.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from impala_llm.trajectory import Trajectory


class ReceiverError(RuntimeError):
    """The receiver has died; the cause is attached."""


class Inbox:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trajectories: list[Trajectory] = []
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._trajectories)

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append them."""
        with self._lock:
            self._trajectories.extend(trajectories)

    def fail(self, error: BaseException) -> None:
        """From now on `drain` raises."""
        self._error = error

    def is_ready(self) -> bool:
        """`drain` gives something, or raises."""
        return bool(self._trajectories) or self._error is not None

    def drain(self) -> list[Trajectory]:
        """All that is inside, oldest first. Raises ReceiverError."""
        if self._error is not None:
            raise ReceiverError(f"the receiver has died: {self._error}") from self._error
        with self._lock:
            trajectories, self._trajectories = self._trajectories, []
        return trajectories
