"""Replay arena: where a learner rank keeps the trajectories that it has acknowledged, in memory that outlives it.

Life of a record: reserved → copied into and checked → committed → ended (it was trained on or evicted) → its space is
used again, once nothing views it any more.

Invariants. What is committed is whole: the index names a record only after its last byte, so a process that is killed
at any moment leaves whole records behind, and the next one finds them with `recovered`. Space is used again only after
the record has ended and the last array that views it is gone: a trajectory in anybody's hands never changes.

File: a page with the header; the index, int64[max_records, 8]; then the records (record.py), at multiples of 64 bytes.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from impala_llm.pipeline import kernels
from impala_llm.pipeline.arena import ArenaError, map_new_file, populate
from impala_llm.pipeline.record import (
    GROUP_ID,
    NUM_TOKENS,
    NUM_TURNS,
    TASK_ID,
    TICKET_ID,
    UNROLL_INDEX,
    Facts,
    RecordError,
    block_start,
    decode_record,
    facts_of,
    metadata_of,
)
from impala_llm.trajectory import ARRAY_FIELDS, DeferredTrajectory, Trajectory, block_views, unroll_id

_log = logging.getLogger(__name__)
_MAGIC = b"ILLMKEEP"
_FORMAT = 1
_HEADER = struct.Struct("<8sQQQ")  # magic, format, max_records, capacity in bytes
_HEADER_BYTES = 4096
_UNIT = 8
_FREE, _COMMITTED, _ENDED = 0, 1, 2
_STATE, _START, _SIZE, _CHECKSUM, _SERIAL = range(5)
_ROW_WORDS = 8
_MAX_SERIAL = 1 << 62
_MANY = 1024
"""Dropped records whose space is taken back although there is room without it: many at once cost less."""
_INTEGERS = {"group_id": GROUP_ID, "task_id": TASK_ID, "unroll_index": UNROLL_INDEX}


class _Stored:
    """A committed record: its fields by name, as a `DeferredTrajectory` asks for them, and the right to its space,
    which goes back when the last reference is gone."""

    __slots__ = ("_arena", "_facts", "_place", "row")

    def __init__(self, arena: ReplayArena, row: int, facts: np.ndarray, place: int) -> None:
        """facts: int64[n, FACTS], of which those at `place` are its own."""
        self._arena = arena
        self.row = row
        self._facts: np.ndarray | Facts = facts
        self._place = place

    def __call__(self, name: str) -> object:
        facts = self._facts
        if isinstance(facts, np.ndarray):
            facts = self._facts = facts[self._place].tolist()
        if name in _INTEGERS:
            return facts[_INTEGERS[name]]
        start, size = self._arena.extent(self.row)
        if name not in ARRAY_FIELDS and name != "block":
            return metadata_of(self._arena.record(start, size), facts)[name]
        words = self._arena.view(start, size)
        words.keeper = self
        block = words.view(np.ndarray)[block_start(facts) :]
        return block if name == "block" else block_views(block, facts[NUM_TOKENS], facts[NUM_TURNS])[name]

    def __del__(self) -> None:
        # From whichever thread: only this, the arena's owner does the rest.
        self._arena.dropped.append(self.row)


class _KeptWords(np.ndarray):
    """A view of the arena that keeps its record. Arrays made from it have it as their base, since its own base is a
    mapping and no array."""

    keeper: _Stored


class ReplayArena:
    """For one thread, but for `end`, which any thread may call, and the trajectories, which may die in any thread.

    path: made anew, or taken over from a process that is gone. capacity: bytes for records, rounded down to a multiple
    of 64. max_records: at once. Raises ArenaError where there is no room, or where the file there has another size.
    """

    def __init__(self, path: Path, capacity: int, max_records: int) -> None:
        self.path = path
        self._num_words = capacity // 8 // _UNIT * _UNIT
        index_bytes = -(-8 * _ROW_WORDS * max_records // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begin = _HEADER_BYTES + index_bytes
        header = _HEADER.pack(_MAGIC, _FORMAT, max_records, 8 * self._num_words)
        found = _open_existing(path, self._begin + 8 * self._num_words, header)
        if found is None:
            advice = "Lower replay.capacity_mb or free memory"
            self._map = map_new_file(path, self._begin + 8 * self._num_words, advice)
            self._map[: _HEADER.size] = header
        else:
            self._map = found
        self.words = np.frombuffer(self._map, np.uint64, self._num_words, self._begin)
        self._bytes = memoryview(self._map)
        self._index = np.frombuffer(self._map, np.int64, _ROW_WORDS * max_records, _HEADER_BYTES).reshape(
            -1, _ROW_WORDS
        )
        self.dropped: deque[int] = deque()
        """Rows of records of which nothing is left but their bytes."""
        self._lock = threading.Lock()
        self._by_unroll: dict[int, _Stored] = {}
        self._free = _FreeSpace()
        self._serial = 0
        self._used = 0
        self._recovered = self._recover()
        self._free_rows = np.flatnonzero(self._index[:, _STATE] == _FREE)[::-1].tolist()

    @property
    def capacity(self) -> int:
        """Bytes for records."""
        return 8 * self._num_words

    @property
    def used(self) -> int:
        """Bytes that records take up."""
        given_back = _rounded(self._index[list(self.dropped), _SIZE]).sum()
        return 8 * (self._used - int(given_back))

    def recovered(self) -> list[Trajectory]:
        """Once: what an earlier process had committed and not ended, in the order in which it was committed."""
        recovered, self._recovered = self._recovered, []
        return recovered

    def reserve(self, sizes: np.ndarray) -> np.ndarray:
        """Room for records of these sizes, int64[n] in words: where each goes, int64[m], for as many of the first ones
        as there is room.

        Each of them must be committed or cancelled.
        """
        if len(self.dropped) >= _MANY or len(sizes) > len(self._free_rows):
            self._reclaim()
        sizes = sizes[: len(self._free_rows)]
        starts = np.empty(len(sizes), np.int64)
        total = kernels.lay_end_to_end(sizes, _UNIT, starts)
        start = self._free.take(total)
        if start is None and self.dropped:
            self._reclaim()
            start = self._free.take(total)
        if start is not None:
            return starts + start
        # Not in one piece: one by one.
        found = []
        for size in _rounded(sizes).tolist():
            start = self._free.take(size)
            if start is None:
                break
            found.append(start)
        return np.array(found, np.int64)

    def cancel(self, start: int, size: int) -> None:
        """Give back what was reserved."""
        self._free.give(start, start + -(-size // _UNIT) * _UNIT)

    def text(self, start: int, begin: int, end: int) -> str:
        """UTF-8 in the record at `start`, which was checked: bytes [begin, end) of it."""
        base = self._begin + 8 * start
        return str(self._bytes[base + begin : base + end], "utf-8")

    def extent(self, row: int) -> tuple[int, int]:
        """Start and size of the record that this row of the index is for, in words."""
        start, size = self._index[row, _START : _SIZE + 1].tolist()
        return start, size

    def record(self, start: int, size: int) -> memoryview:
        """A record's bytes, valid until its space is given back."""
        begin = self._begin + 8 * start
        return self._bytes[begin : begin + 8 * size]

    def commit(
        self, starts: np.ndarray, sizes: np.ndarray, checksums: np.ndarray, facts: np.ndarray
    ) -> list[Trajectory]:
        """These records, of which `facts` are known, are whole, valid and wanted: keep them.

        All int64[n], sizes in words, but facts: int64[n, FACTS].
        """
        count = len(starts)
        if not count:
            return []
        rows = self._free_rows[-count:]
        del self._free_rows[-count:]
        entries = np.empty((count, 4), np.int64)
        entries[:, 0], entries[:, 1], entries[:, 2] = starts, sizes, checksums
        entries[:, 3] = np.arange(self._serial, self._serial + count)
        self._serial += count
        self._index[rows, _START : _SERIAL + 1] = entries
        trajectories = self._keep(rows, facts)
        self._index[rows, _STATE] = _COMMITTED  # the last: now, and not before, they are there
        return trajectories

    def end(self, unroll_ids: Iterable[int]) -> None:
        """These were trained on or evicted (`Trajectory.unroll_id`): a later process need not find their records."""
        with self._lock:
            found = [self._by_unroll.pop(number, None) for number in unroll_ids]
        self._index[[stored.row for stored in found if stored is not None], _STATE] = _ENDED

    def share_of(self, unroll_ids: Iterable[int]) -> float:
        """What these take up of the records or of the bytes that there is room for, whichever is more."""
        with self._lock:
            found = [self._by_unroll.get(number) for number in unroll_ids]
        rows = [stored.row for stored in found if stored is not None]
        return max(len(rows) / len(self._index), int(_rounded(self._index[rows, _SIZE]).sum()) / self._num_words)

    def view(self, start: int, size: int) -> _KeptWords:
        """uint64[size] at `start`."""
        return _KeptWords((size,), np.uint64, self._map, self._begin + 8 * start)

    def _keep(self, rows: Sequence[int], facts: np.ndarray) -> list[Trajectory]:
        """Trajectories of the records of these rows of the index."""
        self._used += int(_rounded(self._index[rows, _SIZE]).sum())
        ticket_ids = facts[:, TICKET_ID].tolist()
        unrolls = facts[:, UNROLL_INDEX].tolist()
        trajectories: list[Trajectory] = []
        with self._lock:
            for place, (row, ticket_id, unroll) in enumerate(zip(rows, ticket_ids, unrolls, strict=True)):
                stored = _Stored(self, row, facts, place)
                self._by_unroll[unroll_id(ticket_id, unroll) if unroll else ticket_id] = stored
                trajectories.append(DeferredTrajectory.of(stored, ticket_id))
        return trajectories

    def _reclaim(self) -> None:
        rows = [self.dropped.popleft() for _ in range(len(self.dropped))]
        if not rows:
            return
        starts = self._index[rows, _START]
        order = np.argsort(starts)
        starts, ends = starts[order], (starts + _rounded(self._index[rows, _SIZE]))[order]
        # What lies end to end is put together before it is given back.
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        for first, last in zip([0, *(gaps + 1)], [*gaps, len(rows) - 1], strict=True):
            self._give(int(starts[first]), int(ends[last]))
        self._index[rows, _STATE] = _FREE
        self._free_rows += rows

    def _give(self, start: int, end: int) -> None:
        self._used -= end - start
        self._free.give(start, end)

    def _recover(self) -> list[Trajectory]:
        """Rebuild what lives in this process's memory from the index."""
        found = []
        end = 0
        committed = np.flatnonzero(self._index[:, _STATE] == _COMMITTED)
        for row in committed[np.argsort(self._index[committed, _START])].tolist():
            _, start, size, checksum, serial = self._index[row, : _SERIAL + 1].tolist()
            try:
                if start < end or start % _UNIT or size < 1 or start + size > self._num_words:
                    raise RecordError(f"it lies at [{start}, {start + size}) of {self._num_words} words")
                if not 0 <= serial < _MAX_SERIAL:
                    raise RecordError(f"its serial number is {serial}")
                if kernels.checksum(self.words[start : start + size]) != checksum % (1 << 64):
                    raise RecordError("its checksum differs")
                record = self.record(start, size)
                decode_record(record)
                facts = facts_of(record)
                if unroll_id(facts[TICKET_ID], facts[UNROLL_INDEX]) in self._by_unroll:
                    raise RecordError(f"unroll {facts[UNROLL_INDEX]} of ticket {facts[TICKET_ID]} is there already")
            except RecordError as error:
                _log.warning("a record of %s is damaged and left out: %s", self.path, str(error))
                self._index[row, _STATE] = _FREE
                continue
            self._free.give(end, start)
            end = start + -(-size // _UNIT) * _UNIT
            found.append((serial, *self._keep([row], np.array([facts], np.int64))))
            self._serial = max(self._serial, serial + 1)
        self._free.give(end, self._num_words)
        self._index[self._index[:, _STATE] == _ENDED, _STATE] = _FREE
        return [trajectory for _, trajectory in sorted(found, key=lambda item: item[0])]


def _rounded(sizes: np.ndarray) -> np.ndarray:
    return (sizes + (_UNIT - 1)) // _UNIT * _UNIT


class _FreeSpace:
    """Extents [start, end) of free space. Invariant: no two of them touch.

    Records are taken from the front of one extent until it is used up; the next one is then the largest. What ends in
    the order in which it came thus makes a ring, and what ends in another order is put together where it touches.
    """

    def __init__(self) -> None:
        self._front = self._back = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        """A heap of (-size, start): of all extents but the one in use, and of some that are no more."""

    def take(self, size: int) -> int | None:
        """Start of a piece of this size; None where no extent is large enough."""
        if self._back - self._front < size:
            start = self._largest()
            if start is None or self._by_start[start] - start < size:
                return None
            end = self._by_start.pop(start)
            del self._by_end[end]
            front, back = self._front, self._back
            self._front, self._back = start, end
            self.give(front, back)
        start = self._front
        self._front += size
        return start

    def give(self, start: int, end: int) -> None:
        """[start, end) is free."""
        if start == end:
            return
        if end in self._by_start:
            last = self._by_start.pop(end)
            del self._by_end[last]
            end = last
        if start in self._by_end:
            first = self._by_end.pop(start)
            del self._by_start[first]
            start = first
        if start == self._back and self._front < self._back:
            self._back = end
        elif end == self._front and self._front < self._back:
            self._front = start
        else:
            self._by_start[start] = end
            self._by_end[end] = start
            heappush(self._by_size, (start - end, start))
            if len(self._by_size) > 2 * len(self._by_start) + 64:
                self._by_size = sorted((start - end, start) for start, end in self._by_start.items())

    def _largest(self) -> int | None:
        """Start of the largest extent but the one in use."""
        while self._by_size:
            negative, start = self._by_size[0]
            if self._by_start.get(start) == start - negative:
                return start
            heappop(self._by_size)
        return None


def _open_existing(path: Path, num_bytes: int, header: bytes) -> mmap.mmap | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(handle).st_size
        if size == num_bytes:
            mapping = mmap.mmap(handle, num_bytes)
            if mapping[: len(header)] == header:
                populate(mapping, write=True)
                return mapping
            if not any(mapping[: len(header)]):
                return None  # its maker died before it was done
        if size == 0:
            return None  # and so here, before it had room
    finally:
        os.close(handle)
    raise ArenaError(
        f"{path} was made with other sizes: keep replay.capacity and replay.capacity_mb as they were, or start under "
        "another run.name"
    )
