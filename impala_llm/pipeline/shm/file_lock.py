"""Locks on files (flock), which the kernel frees with the process that holds them, whatever ends that.

Invariant: a process forked by Python has none of its parent's locks. A lock belongs to the open file, which a fork
shares: an environment that forks would otherwise keep the locks of its actor beyond the actor's death. A process forked
by C code does keep them.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_open: set[FileLock] = set()
_changing = threading.RLock()
"""Held while a file is opened or closed, and during a fork: so the forked process knows which descriptors are open."""


class FileLock:
    """An open file that can be locked. Each object is a holder of its own. For one thread at a time.

    Args:
        path: of the file.
        flags: for `os.open`; a file that it creates has mode 0600.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, flags: int = os.O_RDWR) -> None:
        with _changing:
            self._descriptor: int | None = os.open(path, flags, 0o600)
            _open.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed; False in a process that was forked since."""
        return self._descriptor is not None

    def fileno(self) -> int:
        """Descriptor of the open file, which stays this object's."""
        assert self._descriptor is not None
        return self._descriptor

    def take(self, operation: int) -> bool:
        """Lock the file, without waiting. Returns whether it is locked.

        Args:
            operation: fcntl.LOCK_SH or fcntl.LOCK_EX.
        """
        try:
            fcntl.flock(self.fileno(), operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: Path) -> bool:
        """Return whether `path` still names the file, which may have been removed before it was locked."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Free the lock and close the file. Does nothing where it is not open."""
        with _changing:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            _open.discard(self)
            # A process that another thread is starting has the open file too, until it runs its program.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _close_in_child() -> None:
    for lock in _open:
        assert lock._descriptor is not None
        os.close(lock._descriptor)  # which leaves the parent's lock as it is
        lock._descriptor = None
    _open.clear()
    _changing.release()


os.register_at_fork(before=_changing.acquire, after_in_parent=_changing.release, after_in_child=_close_in_child)


@contextmanager
def flock(path: Path, operation: int) -> Iterator[bool]:
    """Try to lock a file without waiting; yields whether it is locked. Each call is a holder of its own.

    Args:
        path: of the file, which exists.
        operation: fcntl.LOCK_SH or fcntl.LOCK_EX.
    """
    with closing(FileLock(path)) as lock:
        yield lock.take(operation)
