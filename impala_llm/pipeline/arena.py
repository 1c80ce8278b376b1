"""Arena: the ring in which an actor lays trajectories for the learner to copy.

Invariant: a record is complete before its place is told, and its bytes stay as they are until the writer frees it. So
whoever was told of a record that was not freed reads a whole one; a writer that is killed half-way has published
nothing. The checksum catches what breaks this from outside.

File: a page with the header, then the ring. Records (record.py) start at multiples of 64 bytes and never wrap: one that
does not fit before the end of the ring starts at 0. Space is reclaimed in the order of writing, whatever the order of
`free`. The file keeps its size and pages for its whole life, since fresh pages cost several times the copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from impala_llm.pipeline import kernels
from impala_llm.pipeline.record import EncodedTrajectory

_MAGIC = b"ILLMRING"
_FORMAT = 2
_HEADER = struct.Struct("<8sQQQ")  # magic, format, incarnation, capacity in bytes
_HEADER_BYTES = 4096
_UNIT = 8
"""Words of 8 bytes to which records are aligned."""
# linux/mman.h; the mmap module of Python 3.11 does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


class ArenaError(RuntimeError):
    """An arena file that cannot be used, or a place that was not written."""


class RecordTooLarge(ArenaError):
    """A record that does not fit into the ring even when it is empty."""


class Place(NamedTuple):
    """Where a record lies: start and length in words of 8 bytes, and its checksum (`kernels.checksum`) as int64."""

    start: int
    num_words: int
    checksum: int


def populate(mapping: mmap.mmap, *, write: bool) -> None:
    """Bring all pages of a mapping in now, so that no later copy pays for it."""
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


def map_new_file(path: Path, num_bytes: int, advice: str) -> mmap.mmap:
    """A new file of this size, mode 0600, its pages reserved and resident; one that lies there already is replaced, and
    who has mapped it keeps the old one. ArenaError where the file system has no room; advice: what to do then."""
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


class ArenaWriter:
    """The writing side; one per arena, for one thread. Life of a record: `write`, its place told, `free`.

    path: made anew; None: memory of this process alone, whose records travel as bytes (`view`). capacity: bytes of the
    ring, rounded down to a multiple of 64. incarnation: number of 64 bits that the reader must know, so that it cannot
    open the file of an earlier process by mistake. The file is locked (flock) until `close` or the end of the process:
    see `ArenaReader.has_writer`. Raises ArenaError where the file system has no room.
    """

    def __init__(self, path: Path | None, capacity: int, incarnation: int = 0) -> None:
        if capacity < 8 * _UNIT:
            raise ValueError(f"capacity is {capacity} bytes: at least {8 * _UNIT} are needed (pipeline.arena_mb)")
        self.path = path
        self._num_words = capacity // 8 // _UNIT * _UNIT
        num_bytes = _HEADER_BYTES + 8 * self._num_words
        self._lock: int | None = None
        if path is None:
            self._map = mmap.mmap(-1, num_bytes)
            populate(self._map, write=True)
        else:
            self._map = map_new_file(path, num_bytes, "Lower pipeline.arena_mb or free memory")
            self._lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT, incarnation, self.capacity)
        self._bytes = memoryview(self._map)
        self._ring = np.frombuffer(self._map, np.uint64, self._num_words, _HEADER_BYTES)
        # [start, end, freed] in the order of writing.
        self._live: deque[list[int]] = deque()
        self._by_start: dict[int, list[int]] = {}
        self._head = 0

    @property
    def capacity(self) -> int:
        """Bytes of the ring."""
        return 8 * self._num_words

    def write(self, encoded: EncodedTrajectory) -> Place | None:
        """Lay a record down. None where there is no room now: back-pressure, try after a `free`.

        Raises RecordTooLarge where it can never fit.
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
        checksum = kernels.lay_block(self._ring, start, len(header) // 8, block)
        self._head = end = start + (size + _UNIT - 1) // _UNIT * _UNIT
        live = self._by_start[start] = [start, end, False]
        self._live.append(live)
        return tuple.__new__(Place, (start, size, checksum))  # three times as fast as to call the class

    def free(self, start: int) -> None:
        """Give the space of the record at `start` back. ArenaError where there is none."""
        record = self._by_start.pop(start, None)
        if record is None:
            raise ArenaError(f"the record at {start} of {self.path} was freed before or never written")
        record[2] = True
        live = self._live
        while live and live[0][2]:
            live.popleft()
        if not live:
            self._head = 0

    def view(self, place: Place) -> memoryview:
        """A record's bytes, valid until it is freed."""
        begin = _HEADER_BYTES + 8 * place.start
        return self._bytes[begin : begin + 8 * place.num_words]

    @property
    def used(self) -> int:
        """Bytes of the ring that cannot be written now, gaps included."""
        if not self._live:
            return 0
        tail = self._live[0][0]
        return 8 * (self._head - tail if self._head > tail else self._num_words - tail + self._head)

    def close(self) -> None:
        """Remove the file. Readers that mapped it keep their mapping."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
    """The reading side: a read-only mapping of an arena, for any number of threads. It ends with its last reference.

    words: uint64[n], the ring; what lies there is not to be trusted. incarnation: as the writer said it; None takes
    any. Raises ArenaError where the file is missing, truncated or not an arena of this format and incarnation.
    """

    def __init__(self, path: Path, incarnation: int | None = None) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        """Raise ArenaError where the file was cut: reading on would kill this process (SIGBUS)."""
        size = os.fstat(self._handle).st_size
        if size != self._num_bytes:
            raise ArenaError(f"{self.path} has {size} bytes and had {self._num_bytes}: somebody has truncated it")

    def has_writer(self) -> bool:
        """Whether the process that made the arena still has it: its lock ends with it, and is seen from other PID
        namespaces too."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return False

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)
