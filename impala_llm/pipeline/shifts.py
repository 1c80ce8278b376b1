"""Shifts: two threads take turns at the same work. One was started for it; the other wants what comes out of it, and
does it itself while it has nothing else to do.

So what has arrived is not handed from thread to thread while somebody waits for it: no switch between two threads that
share one interpreter lock (leader and followers: Schmidt et al., Pattern-Oriented Software Architecture 2, 2000).

Invariant: one of the two works at any time, never both, and each sees all that the other did. The worker takes over
when the guest has stayed away for a moment, so that nothing lies undone for longer than that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_LINGER_S = 0.005
"""A guest that left is waited for so long: most come again at once."""

Serve = Callable[[float], None]
"""Does what there is to do, waiting for something up to so many seconds, or until the bell can be read."""


class Shifts:
    """The worker's thread calls `work`, the guest's `help`; anybody may `nudge` and `stop`.

    idle_s: longest wait of a serve.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.bell, self._button = os.pipe()
        """A descriptor that ends a serve's wait; `silence` it then."""
        os.set_blocking(self.bell, False)
        os.set_blocking(self._button, False)
        self._changed = threading.Condition()
        # Written with the condition held.
        self._worker_rests = False
        self._guest_is_here = False
        self._guest_left = 0.0
        self._is_urgent = False
        self._stopping = False

    def work(self, serve: Serve) -> None:
        """Serve until `stop`, but for the guest's shifts. An error of the worker's stops all."""
        try:
            while not self._stopping:
                serve(self._idle_s)
                if self._guest_is_here:
                    self._rest()
                    serve(0.0)  # what was nudged for meanwhile rang no bell
        finally:
            self.stop()

    def help(self, serve: Serve, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Serve instead of the worker until there is what the guest waits for, or the time is over, or `stop`."""
        deadline = time.monotonic() + timeout_s
        try:
            with self._changed:
                self._guest_is_here = True
                if not self._worker_rests:
                    self._ring()
                    self._changed.wait_for(lambda: self._worker_rests or self._stopping)
            while not (self._stopping or is_done() or (left := deadline - time.monotonic()) <= 0):
                serve(min(left, self._idle_s))
        finally:
            with self._changed:
                self._guest_is_here = False
                self._guest_left = time.monotonic()

    def nudge(self, urgent: bool = False) -> None:
        """There is something to do of which no descriptor tells. Not urgent: it may wait for the guest's next shift, or
        for a few milliseconds."""
        if self._stopping:
            return
        if self._guest_is_here or not self._worker_rests:
            self._ring()
        elif urgent:
            with self._changed:
                self._is_urgent = True
                self._changed.notify_all()

    def silence(self) -> None:
        """The bell has been heard."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 1 << 16)

    def stop(self) -> None:
        """End `work` and `help`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._ring()

    def close(self) -> None:
        """Free the descriptors, once nobody works any more."""
        os.close(self.bell)
        os.close(self._button)

    def _ring(self) -> None:
        # A full pipe is full of earlier calls: it will be heard.
        with contextlib.suppress(BlockingIOError):
            os.write(self._button, b"!")

    def _rest(self) -> None:
        with self._changed:
            self._worker_rests = True
            self._changed.notify_all()
            # The guest gives no notice when it leaves: mostly it is back at once, and a notice would wake this thread.
            while not self._stopping and (self._guest_is_here or not self._is_due()):
                self._changed.wait(_LINGER_S)
            self._worker_rests = False
            self._is_urgent = False

    def _is_due(self) -> bool:
        return self._is_urgent or time.monotonic() - self._guest_left >= _LINGER_S
