"""Trajectory store: keeps the trajectories that a learner rank has acknowledged, in memory that outlives the process.

Life of a record: reserved → copied into and checked → committed → ended (it was trained on or evicted) → its space is
used again, once no array views it any more.

Invariants. Committed records are whole: the index names a record only after its last byte, so a process that is killed
at any moment leaves whole records behind, and the next one finds them with `recovered`. Space is used again only after
the record has ended and the last array that views it is gone: a trajectory never changes while it is referred to.

File: a page with the header; the index, int64[max_records, 8]; then the records (record.py), at multiples of 64 bytes.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.free_space import FreeSpace
from impala_llm.pipeline.shm.record import (
    Facts,
    RecordError,
    block_start,
    decode_record,
    facts_of,
    metadata_of,
    record_bytes,
)
from impala_llm.pipeline.shm.record_layout import FACT_INDEX, INTEGERS, NUM_TOKENS, NUM_TURNS, TICKET_ID, UNROLL_INDEX
from impala_llm.pipeline.shm.ring import ArenaError, map_new_file, populate
from impala_llm.pipeline.shm.store_header import FORMAT, HEADER, MAGIC
from impala_llm.trajectory import ARRAY_FIELDS, DeferredTrajectory, Trajectory, block_views, unroll_id

_log = logging.getLogger(__name__)
_HEADER_BYTES = 4096
_UNIT = 8
_FREE, _COMMITTED, _ENDED = 0, 1, 2
_STATE, _START, _SIZE, _CHECKSUM, _SERIAL, _COUNTED = range(6)
_ROW_WORDS = 8
_MAX_SERIAL = 1 << 62
_MANY = 1024
"""Number of dropped records at which their space is reclaimed although there is room: many at once cost less."""


class _Stored:
    """A committed record. It reads fields by name for a `DeferredTrajectory`; its space is given back when the last
    reference to it is gone."""

    __slots__ = ("_facts", "_index", "_store", "row")

    def __init__(self, store: TrajectoryStore, row: int, facts: np.ndarray, index: int) -> None:
        """Make the owner of the record in a row of the index of `store`.

        Args:
            facts: int64[n, FACTS], of which facts[index] are of this record.
        """
        self._store = store
        self.row = row
        self._facts: np.ndarray | Facts = facts
        self._index = index

    def __call__(self, name: str) -> object:
        facts = self._facts
        if isinstance(facts, np.ndarray):
            facts = self._facts = facts[self._index].tolist()
        if name in INTEGERS:
            return facts[FACT_INDEX[name]]
        start, size = self._store.extent(self.row)
        if name not in ARRAY_FIELDS and name != "block":
            return metadata_of(self._store.record(start, size), facts)[name]
        words = self._store.view(start, size)
        words.keeper = self
        block = words.view(np.ndarray)[block_start(facts) :]
        return block if name == "block" else block_views(block, facts[NUM_TOKENS], facts[NUM_TURNS])[name]

    def record(self) -> memoryview:
        """Its bytes."""
        return self._store.record(*self._store.extent(self.row))

    def __del__(self) -> None:
        # In any thread: only note it. The thread of the store reclaims the space.
        self._store.dropped.append(self.row)


class _KeptWords(np.ndarray):
    """A view of the store that keeps its record alive. It is the base of arrays made from it, since its own base is a
    mapping and no array."""

    keeper: _Stored


class TrajectoryStore:
    """Store of trajectories. For one thread; only `end` may be called, and trajectories may be freed, in any thread.

    Args:
        path: file, created, or taken over from a process that has ended.
        capacity: bytes for records, rounded down to a multiple of 64.
        max_records: records stored at a time.

    Raises:
        ArenaError: there is no room, or the file has another size.
    """

    def __init__(self, path: Path, capacity: int, max_records: int) -> None:
        self.path = path
        self._num_words = capacity // 8 // _UNIT * _UNIT
        index_bytes = -(-8 * _ROW_WORDS * max_records // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begin = _HEADER_BYTES + index_bytes
        header = HEADER.pack(MAGIC, FORMAT, max_records, 8 * self._num_words)
        found = _open_existing(path, self._begin + 8 * self._num_words, header)
        if found is None:
            advice = "Lower replay.capacity_mb or free memory"
            self._map = map_new_file(path, self._begin + 8 * self._num_words, advice)
            self._map[: HEADER.size] = header
        else:
            self._map = found
        self.words = np.frombuffer(self._map, np.uint64, self._num_words, self._begin)
        self._bytes = memoryview(self._map)
        self._index = np.frombuffer(self._map, np.int64, _ROW_WORDS * max_records, _HEADER_BYTES).reshape(
            -1, _ROW_WORDS
        )
        self.dropped: deque[int] = deque()
        """Rows of the index whose records nothing refers to any more."""
        self._lock = threading.Lock()
        self._by_unroll: dict[int, _Stored] = {}
        self._free = FreeSpace()
        self._serial = 0
        self._used = 0
        self.counted: set[int] = set()
        """Records, by `unroll_id`, that an earlier process had noted with `note_counted`."""
        self._recovered = self._recover()
        self._free_rows = np.flatnonzero(self._index[:, _STATE] == _FREE)[::-1].tolist()

    @property
    def capacity(self) -> int:
        """Bytes for records."""
        return 8 * self._num_words

    @property
    def used(self) -> int:
        """Bytes in use by records."""
        given_back = _rounded(self._index[list(self.dropped), _SIZE]).sum()
        return 8 * (self._used - int(given_back))

    def recovered(self) -> list[Trajectory]:
        """Take the trajectories that an earlier process committed and did not end, in order of commit. Works once."""
        recovered, self._recovered = self._recovered, []
        return recovered

    def reserve(self, sizes: np.ndarray) -> np.ndarray:
        """Reserve room for as many of the first records as fit. Each must then be committed or cancelled.

        Args:
            sizes: int64[n], in words.

        Returns:
            Start words, int64[m] with m <= n.
        """
        if len(self.dropped) >= _MANY or len(sizes) > len(self._free_rows):
            self._reclaim()
        sizes = sizes[: len(self._free_rows)]
        starts = np.empty(len(sizes), np.int64)
        total = copy_kernels.lay_end_to_end(sizes, _UNIT, starts)
        start = self._free.take(total)
        if start is None and self.dropped:
            self._reclaim()
            start = self._free.take(total)
        if start is not None:
            return starts + start
        # No extent holds all of them: one by one.
        found = []
        for size in _rounded(sizes).tolist():
            start = self._free.take(size)
            if start is None:
                break
            found.append(start)
        return np.array(found, np.int64)

    def cancel(self, start: int, size: int) -> None:
        """Give back the space that was reserved for one record.

        Args:
            start, size: of the record, in words.
        """
        self._free.give(start, start + -(-size // _UNIT) * _UNIT)

    def text(self, start: int, begin: int, end: int) -> str:
        """Decode bytes of a record that are known to be UTF-8.

        Args:
            start: first word of the record.
            begin, end: of the bytes, from the start of the record.
        """
        base = self._begin + 8 * start
        return str(self._bytes[base + begin : base + end], "utf-8")

    def extent(self, row: int) -> tuple[int, int]:
        """Start and size, in words, of the record in a row of the index."""
        start, size = self._index[row, _START : _SIZE + 1].tolist()
        return start, size

    def record(self, start: int, size: int) -> memoryview:
        """Bytes of a record, without a copy; valid until its space is given back.

        Args:
            start, size: of the record, in words.
        """
        begin = self._begin + 8 * start
        return self._bytes[begin : begin + 8 * size]

    def commit(
        self, starts: np.ndarray, sizes: np.ndarray, checksums: np.ndarray, facts: np.ndarray
    ) -> list[Trajectory]:
        """Keep records that are whole, valid and wanted.

        Args:
            starts, sizes: int64[n], in words.
            checksums: int64[n].
            facts: int64[n, FACTS], see record.py.

        Returns:
            Their trajectories.
        """
        count = len(starts)
        if not count:
            return []
        rows = self._free_rows[-count:]
        del self._free_rows[-count:]
        entries = np.zeros((count, _COUNTED), np.int64)
        entries[:, 0], entries[:, 1], entries[:, 2] = starts, sizes, checksums
        entries[:, 3] = np.arange(self._serial, self._serial + count)
        self._serial += count
        self._index[rows, _START : _COUNTED + 1] = entries
        trajectories = self._keep(rows, facts)
        self._index[rows, _STATE] = _COMMITTED  # last: from here on the records count
        return trajectories

    def held(self) -> dict[int, Callable[[], memoryview]]:
        """Records that a later process would find: `unroll_id` -> function that returns the bytes. For any thread.

        Their space is not used again while one of these functions is referred to.
        """
        with self._lock:
            return {number: stored.record for number, stored in self._by_unroll.items()}

    def adopt(self, trajectories: Iterable[Trajectory]) -> int:
        """Add trajectories that another process had committed. Returns the number of those that found no room."""
        num_lost = 0
        for trajectory in trajectories:
            record = np.frombuffer(record_bytes(trajectory), np.uint64)
            sizes = np.array([len(record)], np.int64)
            starts = self.reserve(sizes)
            if not len(starts):
                num_lost += 1
                continue
            start = int(starts[0])
            self.words[start : start + len(record)] = record
            checksums = np.array([copy_kernels.checksum(record)], np.uint64).view(np.int64)
            facts = np.array([facts_of(self.record(start, len(record)))], np.int64)
            self._recovered += self.commit(starts, sizes, checksums, facts)
        return num_lost

    def end(self, unroll_ids: Iterable[int]) -> None:
        """End records that were trained on or evicted: a later process does not find them.

        Args:
            unroll_ids: see `Trajectory.unroll_id`; unknown ones are ignored.
        """
        with self._lock:
            found = [self._by_unroll.pop(number, None) for number in unroll_ids]
        self._index[[stored.row for stored in found if stored is not None], _STATE] = _ENDED

    def note_counted(self, unroll_ids: Iterable[int]) -> None:
        """Note records that the metrics have counted: see `counted`. For any thread.

        Args:
            unroll_ids: see `Trajectory.unroll_id`; unknown ones, and those that have ended, are ignored.
        """
        self._index[self._rows_of(unroll_ids), _COUNTED] = 1

    def share_of(self, unroll_ids: Iterable[int]) -> float:
        """Return the share of the store that these take up: of its records or of its bytes, whichever is larger."""
        rows = self._rows_of(unroll_ids)
        return max(len(rows) / len(self._index), int(_rounded(self._index[rows, _SIZE]).sum()) / self._num_words)

    def view(self, start: int, size: int) -> _KeptWords:
        """View words as uint64[size], without a copy.

        Args:
            start, size: of the words.
        """
        return _KeptWords((size,), np.uint64, self._map, self._begin + 8 * start)

    def _rows_of(self, unroll_ids: Iterable[int]) -> list[int]:
        with self._lock:
            found = [self._by_unroll.get(number) for number in unroll_ids]
        return [stored.row for stored in found if stored is not None]

    def _keep(self, rows: Sequence[int], facts: np.ndarray) -> list[Trajectory]:
        """Make the trajectories of records in these rows of the index."""
        self._used += int(_rounded(self._index[rows, _SIZE]).sum())
        ticket_ids = facts[:, TICKET_ID].tolist()
        unrolls = facts[:, UNROLL_INDEX].tolist()
        trajectories: list[Trajectory] = []
        with self._lock:
            for index, (row, ticket_id, unroll) in enumerate(zip(rows, ticket_ids, unrolls, strict=True)):
                stored = _Stored(self, row, facts, index)
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
        # Adjacent records are joined before their space is given back.
        gaps = np.flatnonzero(starts[1:] != ends[:-1])
        for first, last in zip([0, *(gaps + 1)], [*gaps, len(rows) - 1], strict=True):
            self._give(int(starts[first]), int(ends[last]))
        self._index[rows, _STATE] = _FREE
        self._free_rows += rows

    def _give(self, start: int, end: int) -> None:
        self._used -= end - start
        self._free.give(start, end)

    def _recover(self) -> list[Trajectory]:
        """Rebuild the state in this process's memory from the index. Returns the trajectories found."""
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
                if copy_kernels.checksum(self.words[start : start + size]) != checksum % (1 << 64):
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
            if self._index[row, _COUNTED]:
                self.counted.add(unroll_id(facts[TICKET_ID], facts[UNROLL_INDEX]))
            self._serial = max(self._serial, serial + 1)
        self._free.give(end, self._num_words)
        self._index[self._index[:, _STATE] == _ENDED, _STATE] = _FREE
        return [trajectory for _, trajectory in sorted(found, key=lambda item: item[0])]


def _rounded(sizes: np.ndarray) -> np.ndarray:
    return (sizes + (_UNIT - 1)) // _UNIT * _UNIT


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
                return None  # its maker died before writing the header
        if size == 0:
            return None  # its maker died before reserving memory
    finally:
        os.close(handle)
    raise ArenaError(
        f"{path} was made with other sizes: put replay.capacity and replay.capacity_mb back, or remove "
        f"{path.parent.parent}, without which the run goes on from its newest checkpoint, if it has one"
    )
