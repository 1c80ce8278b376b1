"""Arena: the shared-memory ring in which an actor lays trajectories for the learner to copy.

Invariant: a record is complete before its descriptor exists, and its bytes stay as they are until the writer frees the
descriptor. So whoever holds a descriptor that was not freed reads a whole record; a writer that is killed half-way has
published nothing. The checksum catches what breaks this from outside.

File: a page with the header, then `capacity` bytes of ring. Records start at multiples of 64 bytes and never wrap: one
that does not fit before the end of the ring starts at 0. Space is reclaimed in the order of writing, whatever the order
of `free`. The file keeps its size and pages for its whole life, since fresh pages cost several times the copy.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"ILLMRING"
_FORMAT = 1
_CRC32 = 1
"""Kind of checksum, in the header so that a faster one can follow."""
_HEADER = struct.Struct("<8sIIQQ")  # magic, format, checksum kind, incarnation, capacity
_HEADER_BYTES = 4096
_ALIGNMENT = 64
# linux/mman.h; the mmap module of Python 3.11 does not name them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

Part = bytes | bytearray | memoryview


class ArenaError(RuntimeError):
    """An arena file or a descriptor that cannot be used."""


class RecordTooLarge(ArenaError):
    """A record that does not fit into the ring even when it is empty."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a record lies. Written by `ArenaWriter`, read by `ArenaReader`, freed once.

    record_id: counts the records of an arena from 0. offset, length: bytes, offset from the start of the ring.
    checksum: CRC-32 of the `length` bytes.
    """

    record_id: int
    offset: int
    length: int
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


@dataclass(slots=True)
class _Live:
    """A record that takes up space: [start, end) of the ring."""

    record_id: int
    start: int
    end: int
    freed: bool = False


class ArenaWriter:
    """The writing side; one per arena, for one thread. Life of a record: `try_write`, descriptor sent, `free`.

    path: made anew; a file that lies there already is replaced, and readers of the old one keep the old one.
    capacity: bytes of the ring, rounded down to a multiple of 64. incarnation: number of 64 bits that the reader
    must know, so that it cannot open the file of an earlier process by mistake. Raises ArenaError where the file
    system has no room.
    """

    def __init__(self, path: Path, capacity: int, incarnation: int = 0) -> None:
        if capacity < _ALIGNMENT:
            raise ValueError(f"capacity is {capacity} bytes: at least {_ALIGNMENT} are needed (pipeline.arena_mb)")
        self.path = path
        self.capacity = capacity = capacity // _ALIGNMENT * _ALIGNMENT
        self._live: deque[_Live] = deque()
        self._by_id: dict[int, _Live] = {}
        self._head = 0
        self._next_id = 0
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserves the pages: a full file system is an error here and not a SIGBUS in the middle of a write.
            os.posix_fallocate(handle, 0, _HEADER_BYTES + capacity)
            self._map = mmap.mmap(handle, _HEADER_BYTES + capacity)
        except OSError as error:
            path.unlink()
            raise ArenaError(
                f"cannot reserve {capacity} bytes for the arena {path}: {error}. Lower pipeline.arena_mb or free memory"
            ) from error
        finally:
            os.close(handle)
        populate(self._map, write=True)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT, _CRC32, incarnation, capacity)
        self._ring = memoryview(self._map)[_HEADER_BYTES:]

    def try_write(self, parts: Sequence[Part]) -> Descriptor | None:
        """Lay the parts end to end as one record. None where there is no room now: back-pressure, try after a `free`.

        Raises RecordTooLarge where it can never fit, ValueError where it is empty.
        """
        length = sum(memoryview(part).nbytes for part in parts)
        if length == 0:
            raise ValueError("an arena record must hold at least one byte")
        if length > self.capacity:
            raise RecordTooLarge(
                f"a record of {length} bytes does not fit into an arena of {self.capacity} bytes: "
                "raise pipeline.arena_mb or shorten the episodes"
            )
        start = self._find_room(length)
        if start is None:
            return None
        position = start
        checksum = 0
        for part in parts:
            view = memoryview(part).cast("B")
            self._ring[position : position + view.nbytes] = view
            checksum = zlib.crc32(view, checksum)
            position += view.nbytes
        live = _Live(self._next_id, start, _align(position))
        self._next_id += 1
        self._head = live.end
        self._live.append(live)
        self._by_id[live.record_id] = live
        return Descriptor(live.record_id, start, length, checksum)

    def free(self, descriptor: Descriptor) -> None:
        """Give a record's space back. ArenaError where it was freed before or never written."""
        live = self._by_id.pop(descriptor.record_id, None)
        if live is None:
            raise ArenaError(f"record {descriptor.record_id} of {self.path} was freed before or never written")
        live.freed = True
        while self._live and self._live[0].freed:
            self._live.popleft()
        if not self._live:
            self._head = 0

    @property
    def used(self) -> int:
        """Bytes of the ring that cannot be written now, gaps included."""
        if not self._live:
            return 0
        tail = self._live[0].start
        return self._head - tail if self._head > tail else self.capacity - tail + self._head

    def close(self) -> None:
        """Remove the file. Readers that mapped it keep their mapping."""
        self._ring.release()
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _find_room(self, length: int) -> int | None:
        if not self._live:
            return 0
        tail = self._live[0].start
        if self._head > tail:
            if length <= self.capacity - self._head:
                return self._head
            return 0 if length <= tail else None
        return self._head if length <= tail - self._head else None


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


class ArenaReader:
    """The reading side: a read-only mapping of an arena, for any number of threads. It ends with its last reference.

    incarnation: as the writer said it; None takes any. Raises ArenaError where the file is missing, truncated or not an
    arena of this format and incarnation.
    """

    def __init__(self, path: Path, incarnation: int | None = None) -> None:
        self.path = path
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(f"cannot open the arena {path}: {error}") from error
        try:
            size = os.fstat(handle).st_size
            if size <= _HEADER_BYTES:
                raise ArenaError(f"{path} has {size} bytes: it is not an arena")
            self._map = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
        magic, layout, checksum_kind, file_incarnation, capacity = _HEADER.unpack(self._map[: _HEADER.size])
        expected = file_incarnation if incarnation is None else incarnation
        if (magic, layout, checksum_kind, file_incarnation) != (_MAGIC, _FORMAT, _CRC32, expected):
            raise ArenaError(f"{path} is not an arena of format {_FORMAT} and incarnation {expected}")
        if size != _HEADER_BYTES + capacity:
            raise ArenaError(f"{path} has {size} bytes, its header says {_HEADER_BYTES + capacity}: it is truncated")
        self.capacity: int = capacity
        populate(self._map, write=False)
        self._ring = memoryview(self._map)[_HEADER_BYTES:]

    def read(self, descriptor: Descriptor) -> memoryview:
        """The record as a read-only view, valid until its descriptor is freed: copy it before the acknowledgement.

        Raises ArenaError where the descriptor leaves the ring or the checksum disagrees.
        """
        end = descriptor.offset + descriptor.length
        if descriptor.offset < 0 or descriptor.length < 0 or end > self.capacity:
            raise ArenaError(
                f"record [{descriptor.offset}, {end}) lies outside of the {self.capacity} bytes of {self.path}"
            )
        view = self._ring[descriptor.offset : end]
        checksum = zlib.crc32(view)
        if checksum != descriptor.checksum:
            raise ArenaError(
                f"record {descriptor.record_id} of {self.path} has checksum {checksum:#010x}, its descriptor says "
                f"{descriptor.checksum:#010x}: the bytes were torn or changed"
            )
        return view
