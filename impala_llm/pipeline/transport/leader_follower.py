"""Leader/followers pattern (Schmidt et al., Pattern-Oriented Software Architecture 2, 2000) for two threads.

Both threads can serve the same sockets. The one that serves is the leader, the other one is the follower. The service
thread exists only to serve. The client thread uses the results, and becomes the leader while it waits for them: it then
gets them without a switch between two threads that share one interpreter lock.

Invariant: at any time one of the two leads, never both, and each sees the effects of the other's work. The service
thread becomes the leader again when the client thread has not led for `_LINGER_S`, so that no work waits for longer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_LINGER_S = 0.005
"""Seconds that the service thread still follows after the client thread has led: mostly that leads again at once."""

Serve = Callable[[float], None]
"""Does all work that is due. If there is none, waits for it for at most the given seconds, or until `wakeup` can be
read."""


class LeaderFollower:
    """Makes one of two threads the leader: the service thread calls `run`, the client thread calls `lead`.

    Any thread may `wake` the leader, and `stop` both threads.

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
        self._service_follows = False
        self._client_leads = False
        self._client_led_until = 0.0
        self._is_urgent = False
        self._stopping = False

    def run(self, serve: Serve) -> None:
        """Lead until `stop`, except while the client thread leads. For the service thread.

        Args:
            serve: does the work. An error that it raises ends both threads.
        """
        try:
            while not self._stopping:
                serve(self._idle_s)
                if self._client_leads:
                    self._follow()
                    if not self._stopping:  # after an interrupted turn there is no other: its state is not known
                        serve(0.0)  # `wake` has written nothing meanwhile
        finally:
            self.stop()

    def lead(self, serve: Serve, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Lead instead of the service thread until `is_done`, `stop` or the timeout. For the client thread.

        Args:
            serve: does the work. An error that it raises is raised here, and the service thread continues.
            is_done: returns whether the result that the client thread waits for has arrived.
            timeout_s: seconds to lead at most.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._changed:
                self._client_leads = True
                if not self._service_follows:
                    self._send_wakeup()
                    self._changed.wait_for(lambda: self._service_follows or self._stopping)
            while not (self._stopping or is_done() or (left := deadline - time.monotonic()) <= 0):
                serve(min(left, self._idle_s))
        finally:
            with self._changed:
                self._client_leads = False
                self._client_led_until = time.monotonic()

    def wake(self, urgent: bool = False) -> None:
        """Tell the leader that there is work that does not arrive by a socket.

        Args:
            urgent: if both threads follow, the service thread leads at once; otherwise within `_LINGER_S`.
        """
        if self._stopping:
            return
        if self._client_leads or not self._service_follows:
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
            self._service_follows = True
            self._changed.notify_all()
            # `lead` does not notify when it ends: mostly it is called again at once, and a wake-up would be in vain.
            while not self._stopping and (self._client_leads or not self._is_due()):
                self._changed.wait(_LINGER_S)
            self._service_follows = False
            self._is_urgent = False

    def _is_due(self) -> bool:
        return self._is_urgent or time.monotonic() - self._client_led_until >= _LINGER_S
