"""Journal: what became of each ticket, in shared memory that outlives the learner rank.

Invariant: an append is there as a whole or not at all, also when its process is killed in the middle: rows are written
first, and their number last. Rows are int64[6]; what they mean is the ledger's business.

File: a page with the header, then the rows. When it is full, it is replaced by a shorter account of the same.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm.ring import ArenaError, map_new_file

ROW_WIDTH = 6
_MAGIC = b"ILLMJRNL"
_FORMAT = 1
_HEADER = struct.Struct("<8sQ")
_HEADER_BYTES = 4096
_LENGTH_AT = 64
_MIN_ROWS = 1 << 14


class Journal:
    """For one thread at a time. path: taken over where it exists, else made. Raises ArenaError where there is no room,
    or where the file is no journal of this format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spare: mmap.mmap | None = None
        if path.exists() and path.stat().st_size:  # a maker that died before it had room leaves nothing
            self._adopt()
        else:
            self._make(path, _MIN_ROWS)
        self._reserve()

    def __len__(self) -> int:
        return int(self._length[0])

    def rows(self) -> np.ndarray:
        """int64[n, 6]: a copy of all rows, oldest first."""
        return self._rows[: len(self)].copy()

    def append(self, rows: Sequence[tuple[int, ...]]) -> bool:
        """Add rows, all or none. False where they do not fit: `rewrite` then."""
        begin = len(self)
        end = begin + len(rows)
        if end > len(self._rows):
            return False
        if rows:
            self._rows[begin:end] = rows
        self._length[0] = end
        return True

    def rewrite(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Hold these rows and no others, with room for as many again; where the file system is full, with the room
        there has been.

        Raises:
            ArenaError: it is full, and these are more rows than there were.
        """
        new = self.path.with_name(self.path.name + ".new")
        self._make(new, max(_MIN_ROWS, 2 * len(rows)), len(rows))
        self.append(rows)
        os.replace(new, self.path)
        self._reserve()

    def _reserve(self) -> None:
        """Keep as much memory for the next rewrite, which must not fail when others have filled the file system."""
        num_bytes = _num_bytes(len(self._rows))
        if self._spare is None or len(self._spare) != num_bytes:
            try:
                self._spare = map_new_file(self._spare_path, num_bytes, "")
            except ArenaError:
                self._spare = None

    @property
    def _spare_path(self) -> Path:
        return self.path.with_name(self.path.name + ".spare")

    def _make(self, path: Path, num_rows: int, num_used: int = 0) -> None:
        """Attach a new file for so many rows, or what is kept where that is enough for those that are used."""
        try:
            mapping = map_new_file(path, _num_bytes(num_rows), "Free memory")
        except ArenaError:
            if self._spare is None or len(self._spare) < _num_bytes(num_used):
                raise
            os.replace(self._spare_path, path)
            mapping, self._spare = self._spare, None
        mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT)
        self._attach(mapping)

    def _adopt(self) -> None:
        handle = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            size = os.fstat(handle).st_size
            if size < _HEADER_BYTES:
                raise ArenaError(f"{self.path} has {size} bytes: it is no journal")
            mapping = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        if mapping[: _HEADER.size] not in (_HEADER.pack(_MAGIC, _FORMAT), bytes(_HEADER.size)):
            raise ArenaError(f"{self.path} is no journal of format {_FORMAT}: start under another run.name")
        # Zeros: its maker died before it was done, and the journal is empty.
        mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, _FORMAT)
        self._attach(mapping)
        length = int(self._length[0])
        if not 0 <= length <= len(self._rows):
            raise ArenaError(f"{self.path} says that it has {length} rows, and has room for {len(self._rows)}")

    def _attach(self, mapping: mmap.mmap) -> None:
        self._length = np.frombuffer(mapping, np.int64, 1, _LENGTH_AT)
        count = (len(mapping) - _HEADER_BYTES) // (8 * ROW_WIDTH)
        self._rows = np.frombuffer(mapping, np.int64, count * ROW_WIDTH, _HEADER_BYTES).reshape(-1, ROW_WIDTH)


def _num_bytes(num_rows: int) -> int:
    return _HEADER_BYTES + 8 * ROW_WIDTH * num_rows
