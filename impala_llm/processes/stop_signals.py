"""SIGINT, SIGTERM and SIGHUP of a learner: as exceptions, at a moment at which its state is whole."""

import signal
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_PATIENCE_S = 4.0
"""Seconds for which a signal waits for the end of an update. The supervisor waits for five."""


class Stopped(Exception):
    """A process of the learner received a signal while it waited for a batch."""


class ToldToStop(SystemExit):
    """SIGTERM or SIGHUP was received. A class of its own, since user code may raise SystemExit too.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP of a rank by an exception, which releases sockets, shared memory and files.

    While `holds_back()` is true the exception is raised by the next `check`, or after `STOP_PATIENCE_S`; for as long as
    `waits_on()` is true, that time is extended, and `on_wait` is called once. Further signals are ignored.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the signal that was received; 0: none."""
        self.holds_back: Callable[[], bool] = lambda: False
        self.waits_on: Callable[[], bool] = lambda: False
        self.on_wait: Callable[[], object] = lambda: None
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._wake)

    def check(self) -> None:
        """Raise KeyboardInterrupt or ToldToStop if a signal was received."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.number:
            raise KeyboardInterrupt if self.number == signal.SIGINT else ToldToStop(self.number)

    def _receive(self, number: int, _frame: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.number = number
        if self.holds_back():
            if self.waits_on():
                self.on_wait()
            signal.setitimer(signal.ITIMER_REAL, STOP_PATIENCE_S)
        else:
            self.check()

    def _wake(self, *_: object) -> None:
        """Called when a signal has waited for `STOP_PATIENCE_S`."""
        if self.waits_on():
            signal.setitimer(signal.ITIMER_REAL, STOP_PATIENCE_S)
        else:
            self.check()
