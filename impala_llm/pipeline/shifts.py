"""Leader and followers for two threads: the thread that serves is the leader, and the two take turns at it.

A background thread serves as a rule. A consumer thread that waits for the results serves by itself meanwhile, so that
nothing is handed from thread to thread while somebody waits for it: two threads that share one interpreter lock would
have to switch (Schmidt et al., Pattern-Oriented Software Architecture 2, 2000, "Leader/Followers").

Invariant: one of the two serves at any time, never both, and each sees all that the other did. The background thread
leads again when the consumer has been away for a moment (`_LINGER_S`), so no work waits for longer than that.

Names below: the worker is the background thread, the guest the consumer, the bell the read end of a wake-up pipe and
the button its write end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_LINGER_S = 0.005
"""Seconds that the background thread waits for a consumer that left: most come again at once."""

Serve = Callable[[float], None]
"""Does all work there is. Waits for some up to so many seconds, or until the wake-up pipe is readable."""


class Shifts:
    """Lets two threads take turns: the background thread calls `work`, the consumer `help`, any thread `nudge`, `stop`.

    Args:
        idle_s: longest wait of one call of `Serve`, in seconds.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.bell, self._button = os.pipe()
        """Read end of the wake-up pipe: a descriptor that ends the wait of `Serve`, which then calls `silence`."""
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
        """Serve until `stop`, except while the consumer does. An error in this thread stops both.

        Args:
            serve: does the work.
        """
        try:
            while not self._stopping:
                serve(self._idle_s)
                if self._guest_is_here:
                    self._rest()
                    serve(0.0)  # a nudge meanwhile has written nothing to the pipe
        finally:
            self.stop()

    def help(self, serve: Serve, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Serve instead of the background thread, until `is_done`, `stop` or the end of the time.

        Args:
            serve: does the work.
            is_done: returns whether the result that the consumer waits for is there.
            timeout_s: seconds to serve at most.
        """
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
        """Tell the leader that there is work of which no descriptor tells.

        Args:
            urgent: False: it may wait until the consumer serves again, or for a few milliseconds.
        """
        if self._stopping:
            return
        if self._guest_is_here or not self._worker_rests:
            self._ring()
        elif urgent:
            with self._changed:
                self._is_urgent = True
                self._changed.notify_all()

    def silence(self) -> None:
        """Empty the wake-up pipe."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 1 << 16)

    def stop(self) -> None:
        """End `work` and `help`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._ring()

    def close(self) -> None:
        """Free the descriptors, once neither thread serves any more."""
        os.close(self.bell)
        os.close(self._button)

    def _ring(self) -> None:
        # A full pipe is full of earlier wake-ups: it will be read.
        with contextlib.suppress(BlockingIOError):
            os.write(self._button, b"!")

    def _rest(self) -> None:
        with self._changed:
            self._worker_rests = True
            self._changed.notify_all()
            # The consumer does not notify when it leaves: mostly it is back at once, and that would wake this thread.
            while not self._stopping and (self._guest_is_here or not self._is_due()):
                self._changed.wait(_LINGER_S)
            self._worker_rests = False
            self._is_urgent = False

    def _is_due(self) -> bool:
        return self._is_urgent or time.monotonic() - self._guest_left >= _LINGER_S
