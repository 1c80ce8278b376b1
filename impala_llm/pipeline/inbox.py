"""The queue between the receiver's thread and the learner's, bounded in bytes.

Invariant: a trajectory that was put is drained exactly once, in order. An error of the receiver's thread reaches
whoever drains.
"""

from __future__ import annotations

import threading

from impala_llm.trajectory import Trajectory


class ReceiverError(RuntimeError):
    """The receiver's thread has died; the cause is attached."""


class Inbox:
    """Thread-safe. max_bytes: of the arrays; one trajectory more may be put while the bound is not reached."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._changed = threading.Condition()
        self._trajectories: list[Trajectory] = []
        self._num_bytes = 0
        self._error: BaseException | None = None

    @property
    def full(self) -> bool:
        """Whether nothing should be put now."""
        return self._num_bytes >= self.max_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays inside."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._trajectories)

    def put(self, trajectory: Trajectory) -> None:
        """Append one and wake the drain."""
        with self._changed:
            self._trajectories.append(trajectory)
            self._num_bytes += trajectory.nbytes
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
            self._num_bytes = 0
            return trajectories
