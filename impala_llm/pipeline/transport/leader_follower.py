"""Leader and followers: two threads take turns in leading, that is, in serving the same sockets.

The background thread was started for it. The visiting thread needs the results, and leads while it waits for them. So
results are not handed from thread to thread while one waits for them: no switch between two threads that share one
interpreter lock (Schmidt et al., Pattern-Oriented Software Architecture 2, 2000).

Invariant: one of the two leads at any time, never both, and each sees all that the other did. The background thread
takes the lead when the visiting one has stayed away for a moment, so that nothing waits for longer than that.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_LINGER_S = 0.005
"""Seconds that the background thread waits for a visiting thread that left: most come again at once."""

Serve = Callable[[float], None]
"""Does all work there is. Waits for some up to so many seconds, or until `wakeup` can be read."""


class LeaderFollower:
    """Lets two threads take turns: the background thread calls `run`, the visiting one `lead`.

    Any thread may `wake` the leader, and `stop` both.

    Args:
        idle_s: longest wait of one call of `Serve`, in seconds.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self.wakeup, self._wakeup_sender = os.pipe()
        """Descriptor that ends the leader's wait, which then calls `clear_wakeup`."""
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._wakeup_sender, False)
        self._changed = threading.Condition()
        # Written with the condition held.
        self._background_follows = False
        self._visitor_leads = False
        self._visitor_left_at = 0.0
        self._is_urgent = False
        self._stopping = False

    def run(self, serve: Serve) -> None:
        """Lead until `stop`, except while the visiting thread does. An error of serve stops both threads."""
        try:
            while not self._stopping:
                serve(self._idle_s)
                if self._visitor_leads:
                    self._follow()
                    serve(0.0)  # `wake` has written nothing meanwhile
        finally:
            self.stop()

    def lead(self, serve: Serve, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Lead instead of the background thread, until `is_done`, `stop` or the end of the time.

        Args:
            serve: does the work.
            is_done: returns whether the result that the visiting thread waits for is there.
            timeout_s: seconds to lead at most.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._changed:
                self._visitor_leads = True
                if not self._background_follows:
                    self._send_wakeup()
                    self._changed.wait_for(lambda: self._background_follows or self._stopping)
            while not (self._stopping or is_done() or (left := deadline - time.monotonic()) <= 0):
                serve(min(left, self._idle_s))
        finally:
            with self._changed:
                self._visitor_leads = False
                self._visitor_left_at = time.monotonic()

    def wake(self, urgent: bool = False) -> None:
        """Tell the leader that there is work of which no socket tells.

        Args:
            urgent: the background thread takes the lead at once, where nobody leads; otherwise within milliseconds.
        """
        if self._stopping:
            return
        if self._visitor_leads or not self._background_follows:
            self._send_wakeup()
        elif urgent:
            with self._changed:
                self._is_urgent = True
                self._changed.notify_all()

    def clear_wakeup(self) -> None:
        """Read what was written to `wakeup`."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 1 << 16)

    def stop(self) -> None:
        """End `run` and `lead`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._send_wakeup()

    def close(self) -> None:
        """Free the descriptors, once both threads have ended."""
        os.close(self.wakeup)
        os.close(self._wakeup_sender)

    def _send_wakeup(self) -> None:
        # A full pipe is full of earlier wake-ups: the leader reads them.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakeup_sender, b"!")

    def _follow(self) -> None:
        with self._changed:
            self._background_follows = True
            self._changed.notify_all()
            # The visitor does not notify when it leaves: mostly it is back at once, and that would wake this thread.
            while not self._stopping and (self._visitor_leads or not self._is_due()):
                self._changed.wait(_LINGER_S)
            self._background_follows = False
            self._is_urgent = False

    def _is_due(self) -> bool:
        return self._is_urgent or time.monotonic() - self._visitor_left_at >= _LINGER_S
