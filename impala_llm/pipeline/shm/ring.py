"""Arena: the ring buffer in shared memory in which an actor writes trajectories, for the learner to copy.

Invariant: a record is complete before its span is announced, and its bytes do not change until the writer frees it. So
a reader of an announced record that was not freed reads a whole one; a writer that is killed half-way has announced
nothing. The checksum detects changes by others.

File: a page with the header, then the ring. Records (record.py) start at multiples of 64 bytes and never wrap: one that
does not fit before the end of the ring starts at 0. Space is reclaimed in the order of writing, whatever the order of
`free`. The file keeps its size and pages for its whole life, since fresh pages cost several times the copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.record import EncodedTrajectory

_MAGIC = b"ILLMRING"
_FORMAT = 2
_HEADER = struct.Struct("<8sQQQ")  # magic, format, incarnation, capacity in bytes
_HEADER_BYTES = 4096
_UNIT = 8
"""Words of 8 bytes to which records are aligned."""
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 5, 0.02
_ADVICE = (
    "Lower pipeline.arena_mb or free memory. An actor that is started again needs memory anew: that of its last one is "
    "kept until the learner has noticed its end"
)
# linux/mman.h; the mmap module of Python 3.11 does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


class ArenaError(RuntimeError):
    """An arena file that cannot be used, or a span that was not written."""


class RecordTooLarge(ArenaError):
    """A record that does not fit into the ring even when it is empty."""


class Span(NamedTuple):
    """Location of a record: start and length in words of 8 bytes, and its checksum (`copy_kernels.checksum`) as
    int64."""

    start: int
    num_words: int
    checksum: int


def populate(mapping: mmap.mmap, *, write: bool) -> None:
    """Fault in all pages of a mapping, so that no later copy has to.

    Args:
        mapping: to fault in.
        write: map the pages for writing.
    """
    try:
        mapping.madvise(_MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)
    except OSError:
        # Kernels before 5.14 and other systems: touch each page instead.
        view = memoryview(mapping)
        for start in range(0, len(view), mmap.PAGESIZE):
            if write:
                view[start] = view[start]
            else:
                view[start]
        view.release()


def map_new_file(path: Path, num_bytes: int, advice: str, replace: bool = True) -> mmap.mmap:
    """Create and map a file of mode 0600, its pages reserved and resident.

    Args:
        path: of the file.
        num_bytes: its size.
        advice: end of the error message, a sentence that says what to do.
        replace: whether a file that exists already is replaced; processes that have mapped it keep the old one.

    Raises:
        ArenaError: the file system has no room.
        FileExistsError: there is a file, which is not to be replaced.
    """
    if replace:
        path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserves the pages: a full file system is an error here and not a SIGBUS in the middle of a write.
        os.posix_fallocate(handle, 0, num_bytes)
        mapping = mmap.mmap(handle, num_bytes)
    except OSError as error:
        path.unlink()
        raise ArenaError(f"cannot reserve {num_bytes} bytes for {path}: {error}. {advice}") from error
    finally:
        os.close(handle)
    populate(mapping, write=True)
    return mapping


def _remove_abandoned(path: Path) -> None:
    """Remove the file of a writer that has ended. Raises ArenaError where it has a living one, which would lose it."""
    try:
        lock = FileLock(path, _READ_FLAGS)
    except FileNotFoundError:
        return
    except OSError:  # something else lies there, such as a link
        path.unlink(missing_ok=True)
        return
    with contextlib.closing(lock):
        if not _locked(lock) or not lock.is_at(path):
            raise _in_use(path)
        path.unlink()


def _locked(lock: FileLock) -> bool:
    """Lock a file as its writer does. A reader may hold it for a moment, see `has_writer`. Returns whether it is."""
    for _ in range(_LOCK_ATTEMPTS):
        if lock.take(fcntl.LOCK_EX):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _in_use(path: Path) -> ArenaError:
    return ArenaError(f"{path} belongs to another process, which is alive: give each actor an index of its own")


class ArenaWriter:
    """The writer of an arena. One for each arena, for one thread.

    Life of a record: `write`, its span is announced, `free`. The file is locked (flock) until `close` or the end of
    the process: see `ArenaReader.has_writer`.

    Args:
        path: file, created anew; None: memory of this process alone, whose records are sent as bytes (`view`).
        capacity: bytes of the ring, rounded down to a multiple of 64.
        incarnation: number of 64 bits that the reader must know, so that it cannot open the file of an earlier process
            by mistake.

    Raises:
        ValueError: the capacity is too small for any record.
        ArenaError: the file system has no room, or the file is that of a living writer.
    """

    def __init__(self, path: Path | None, capacity: int, incarnation: int = 0) -> None:
        if capacity < 8 * _UNIT:
            raise ValueError(f"capacity is {capacity} bytes: at least {8 * _UNIT} are needed (pipeline.arena_mb)")
        self.path = path
        self._num_words = capacity // 8 // _UNIT * _UNIT
        self.capacity = 8 * self._num_words
        """Bytes of the ring."""
        num_bytes = _HEADER_BYTES + 8 * self._num_words
        self._lock: FileLock | None = None
        if path is None:
            self._map = mmap.mmap(-1, num_bytes)
            populate(self._map, write=True)
        else:
            _remove_abandoned(path)
            try:
                self._map = map_new_file(path, num_bytes, _ADVICE, replace=False)
                self._lock = FileLock(path, os.O_RDONLY | os.O_NOFOLLOW)
            except (FileExistsError, FileNotFoundError):
                raise _in_use(path) from None
        header = _HEADER.pack(_MAGIC, _FORMAT, incarnation, self.capacity)
        self._map[: _HEADER.size] = header
        # A process of the same name that starts at the same moment may have replaced the file before it was locked.
        if path is not None and self._lock is not None:
            is_own = _locked(self._lock) and self._lock.is_at(path)
            if not is_own or os.pread(self._lock.fileno(), _HEADER.size, 0) != header:
                self._lock.close()
                raise _in_use(path)
        self._bytes = memoryview(self._map)
        self._ring = np.frombuffer(self._map, np.uint64, self._num_words, _HEADER_BYTES)
        # [start, end, freed] in the order of writing.
        self._live: deque[list[int]] = deque()
        self._by_start: dict[int, list[int]] = {}
        self._head = 0

    def write(self, encoded: EncodedTrajectory) -> Span | None:
        """Write a record.

        Returns:
            Its span, or None where there is no room now (back-pressure): try again after a `free`.

        Raises:
            RecordTooLarge: the record does not fit even into an empty ring.
        """
        header, block, size = encoded
        start = self._find_room(size)
        if start is None:
            if size > self._num_words:
                raise RecordTooLarge(
                    f"a record of {8 * size} bytes does not fit into an arena of {self.capacity} bytes: "
                    "raise pipeline.arena_mb or shorten the episodes"
                )
            return None
        begin = _HEADER_BYTES + 8 * start
        self._bytes[begin : begin + len(header)] = header
        checksum = copy_kernels.lay_block(self._ring, start, len(header) // 8, block)
        self._head = end = start + (size + _UNIT - 1) // _UNIT * _UNIT
        live = self._by_start[start] = [start, end, False]
        self._live.append(live)
        return tuple.__new__(Span, (start, size, checksum))  # three times as fast as to call the class

    def free(self, start: int) -> None:
        """Give back the space of the record at `start`.

        Raises:
            ArenaError: there is no record.
        """
        record = self._by_start.pop(start, None)
        if record is None:
            raise ArenaError(f"the record at {start} of {self.path} was freed before or never written")
        record[2] = True
        live = self._live
        while live and live[0][2]:
            live.popleft()
        if not live:
            self._head = 0

    def view(self, span: Span) -> memoryview:
        """Bytes of a record, valid until it is freed. No copy."""
        begin = _HEADER_BYTES + 8 * span.start
        return self._bytes[begin : begin + 8 * span.num_words]

    @property
    def used(self) -> int:
        """Bytes of the ring in use, gaps included."""
        if not self._live:
            return 0
        tail = self._live[0][0]
        return 8 * (self._head - tail if self._head > tail else self._num_words - tail + self._head)

    def close(self) -> None:
        """Remove the file. Readers that mapped it keep their mapping."""
        if self.path is not None and self._lock is not None and self._lock.is_open:  # not in a forked process
            self.path.unlink(missing_ok=True)
            self._lock.close()

    def _find_room(self, size: int) -> int | None:
        if not self._live:
            return 0 if size <= self._num_words else None
        tail, head = self._live[0][0], self._head
        if head > tail:
            if size <= self._num_words - head:
                return head
            return 0 if size <= tail else None
        return head if size <= tail - head else None


class ArenaReader:
    """A read-only mapping of an arena, for any number of threads. It is unmapped with its last reference.

    Attributes:
        words: uint64[n], the ring. Its contents must not be trusted.

    Args:
        path: file of the arena.
        incarnation: number that the writer was given; None accepts any.

    Raises:
        ArenaError: the file is missing, truncated, or no arena of this format and incarnation.
    """

    def __init__(self, path: Path, incarnation: int | None = None) -> None:
        self.path = path
        try:
            handle = os.open(path, _READ_FLAGS)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error}") from error
        try:
            status = os.fstat(handle)
            self._num_bytes = status.st_size
            if not stat.S_ISREG(status.st_mode) or self._num_bytes <= _HEADER_BYTES:
                raise ArenaError(f"{path} has {self._num_bytes} bytes: it is not an arena")
            mapping = mmap.mmap(handle, self._num_bytes, prot=mmap.PROT_READ)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        magic, layout, found, capacity = _HEADER.unpack(mapping[: _HEADER.size])
        expected = found if incarnation is None else incarnation
        if (magic, layout, found) != (_MAGIC, _FORMAT, expected):
            raise ArenaError(f"{path} is not an arena of format {_FORMAT} and incarnation {expected}")
        if self._num_bytes != _HEADER_BYTES + capacity:
            raise ArenaError(
                f"{path} has {self._num_bytes} bytes, its header says {_HEADER_BYTES + capacity}: it is truncated"
            )
        populate(mapping, write=False)
        self.words = np.frombuffer(mapping, np.uint64, capacity // 8, _HEADER_BYTES)

    def check_size(self) -> None:
        """Check that the file was not truncated: reading on would kill this process (SIGBUS).

        Raises:
            ArenaError: it was.
        """
        size = os.fstat(self._handle).st_size
        if size != self._num_bytes:
            raise ArenaError(f"{self.path} has {size} bytes and had {self._num_bytes}: another process truncated it")

    def has_writer(self) -> bool:
        """Return whether the arena's writer is alive, by its lock, which is visible from other PID namespaces too."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return False

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)
