"""Journal: the history of each ticket, in shared memory that outlives the learner rank.

Invariant: an append is complete or has no effect, also when its process is killed in the middle: rows are written
first, and their number last. Rows are int64[6]; the ledger defines their meaning.

File: a page with the header, then the rows. When it is full, it is replaced by a shorter one with the same meaning.
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
    """File of rows. For one thread at a time.

    Args:
        path: of the file, taken over where it exists, else made.
        min_rows: room that a file has at least.

    Raises:
        ArenaError: there is no room, or the file is no journal of this format.
    """

    def __init__(self, path: Path, min_rows: int = _MIN_ROWS) -> None:
        self.path = path
        self._min_rows = min_rows
        self._spare: mmap.mmap | None = None
        if path.exists() and path.stat().st_size:  # an empty file: its maker died before reserving memory
            self._adopt()
        else:
            self._make(path, min_rows)
        self._reserve()

    def __len__(self) -> int:
        return int(self._length[0])

    def rows(self) -> np.ndarray:
        """Copy all rows, oldest first: int64[n, 6]."""
        return self._rows[: len(self)].copy()

    def append(self, rows: Sequence[tuple[int, ...]]) -> bool:
        """Add rows, all or none.

        Args:
            rows: to be added, oldest first.

        Returns:
            False where they do not fit: `rewrite` then.
        """
        begin = len(self)
        end = begin + len(rows)
        if end > len(self._rows):
            return False
        if rows:
            self._rows[begin:end] = rows
        self._length[0] = end
        return True

    def rewrite(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Replace all rows, with room for as many again; with the previous room where the file system is full.

        Raises:
            ArenaError: it is full, and these are more rows than the previous room holds.
        """
        new = self.path.with_name(self.path.name + ".new")
        self._make(new, max(self._min_rows, 2 * len(rows)), len(rows))
        self.append(rows)
        os.replace(new, self.path)
        self._reserve()

    def _reserve(self) -> None:
        """Reserve as much memory for the next rewrite, which must not fail when others have filled the file system."""
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
        """Attach a new file, or the reserved one where the file system is full.

        Args:
            num_rows: room of the new file.
            num_used: rows that the reserved file must have room for.
        """
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
        # Zeros: its maker died before writing the header, and the journal is empty.
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
