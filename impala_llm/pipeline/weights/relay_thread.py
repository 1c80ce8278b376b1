"""Base class of the relay's server and client: a thread that runs from `start` to `close` and closes its own socket."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

import zmq

_log = logging.getLogger(__name__)
_JOIN_S = 10.0
_PAUSE_S = 1.0


class RelayThread(ABC):
    """Works in a thread of its own, from `start` to `close`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, which releases its socket and all else that it holds."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)
        else:
            self._release()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._work()
                except zmq.ContextTerminated:
                    raise
                except zmq.ZMQError as error:  # such as too many open files, which may be over in a moment
                    _log.warning("the %s fails, and tries again: %s", self._thread.name, error)
                    self._stop.wait(_PAUSE_S)
        except zmq.ContextTerminated:
            _log.info("the %s ends with its context", self._thread.name)
        finally:
            self._release()

    @abstractmethod
    def _work(self) -> None:
        """Do one short piece of work: the thread checks between two calls whether it is to end."""

    @abstractmethod
    def _release(self) -> None:
        """Close the socket, and release everything else that is held."""
