"""Inbox: trajectories on their way from the thread that receives to the one that trains.

Invariant: each is taken out once, in the order of arrival. Once the receiver has died, nothing is taken out any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from impala_llm.trajectory import Trajectory


class ReceiverError(RuntimeError):
    """The receiver has died. Its `__cause__` is the reason."""


class Inbox:
    """A queue for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trajectories: list[Trajectory] = []
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._trajectories)

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append trajectories."""
        with self._lock:
            self._trajectories.extend(trajectories)

    def fail(self, error: BaseException) -> None:
        """Make `drain` raise from now on."""
        self._error = error

    def is_ready(self) -> bool:
        """Return whether `drain` would return something, or raise."""
        return bool(self._trajectories) or self._error is not None

    def drain(self) -> list[Trajectory]:
        """Take everything out, oldest first.

        Raises:
            ReceiverError: the receiver has died.
        """
        if self._error is not None:
            raise ReceiverError(f"the receiver has died: {self._error}") from self._error
        with self._lock:
            trajectories, self._trajectories = self._trajectories, []
        return trajectories
