"""The queue between the receiver's thread and the learner's. What bounds it is the replay arena, where its trajectories
lie.

Invariant: a trajectory that was put is drained exactly once, in order. An error of the receiver's thread reaches
whoever drains.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from impala_llm.trajectory import Trajectory


class ReceiverError(RuntimeError):
    """The receiver's thread has died; the cause is attached."""


class Inbox:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trajectories: list[Trajectory] = []
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._trajectories)

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append them and wake the drain."""
        with self._changed:
            self._trajectories.extend(trajectories)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """From now on `drain` raises."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> list[Trajectory]:
        """All that is inside, oldest first, waiting up to `timeout_s` seconds for the first. Raises ReceiverError."""
        with self._changed:
            self._changed.wait_for(lambda: self._trajectories or self._error is not None, timeout_s)
            if self._error is not None:
                raise ReceiverError(f"the receiver has died: {self._error}") from self._error
            trajectories, self._trajectories = self._trajectories, []
            return trajectories
