"""Records that an actor has offered and that have not been answered yet. For one thread at a time.

Invariant: each sequence number of an actor is queued once, however often and in whatever order it is offered. Sequence
numbers that were seen take memory only while a smaller one is missing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from impala_llm.pipeline.shm.record_layout import NUM_WORDS
from impala_llm.pipeline.shm.ring import ArenaReader

_MANY, _MANY_WORDS = 512, 1 << 20
"""Records, and words, at which a chunk is processed without joining more to it: actors can continue earlier when
acknowledgements arrive earlier."""


@dataclass(slots=True)
class Chunk:
    """Records that were offered together.

    Attributes:
        rows: int64[n, 5], a `messages.Descriptor` each.
        frames: one for each record, where records come as frames; else empty.
    """

    rows: np.ndarray
    frames: list[bytes]

    def split(self, count: int) -> tuple[Chunk, Chunk]:
        """Split into the first `count` records and the others."""
        return Chunk(self.rows[:count], self.frames[:count]), Chunk(self.rows[count:], self.frames[count:])

    def only(self, indices: list[int]) -> Chunk:
        """Select the records at these indices."""
        return Chunk(self.rows[indices], [self.frames[i] for i in indices] if self.frames else [])


@dataclass(slots=True)
class Offers:
    """Records that an actor process has offered and that were not answered yet.

    Attributes:
        reader: of its arena; None where its records come as frames.
        first_sequence: sequence below which all were answered before.
        refused: reasons of the refusals, by sequence.
        queue: chunks to take, oldest first.
        early: (version, chunk) of records that wait for the announcement of that version.
    """

    reader: ArenaReader | None
    first_sequence: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    queue: deque[Chunk] = field(default_factory=deque)
    early: deque[tuple[int, Chunk]] = field(default_factory=deque)
    # Sequences that were seen: all below, and these.
    _seen_below: int = field(init=False)
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._seen_below = self.first_sequence

    def add(self, rows: np.ndarray, frames: list[bytes]) -> list[int]:
        """Queue new records.

        Args:
            rows: int64[n, 5], a `messages.Descriptor` each.
            frames: a record each, or none at all.

        Returns:
            Sequences of records that were settled before, to be answered again.
        """
        # A writable copy, as rows of several chunks are: numba would compile its code once more for read-only rows.
        rows = rows.copy()
        sequences = rows[:, 0]
        follows = not self._seen and sequences[0] == self._seen_below
        if follows and (len(rows) == 1 or (np.diff(sequences) == 1).all()):
            self._seen_below += len(rows)
            self.queue.append(Chunk(rows, frames))
            return []
        waiting = self._waiting()
        settled: list[int] = []
        new: list[int] = []
        for index, sequence in enumerate(sequences.tolist()):
            if sequence >= self._seen_below and sequence not in self._seen:
                self._seen.add(sequence)
                waiting.add(sequence)
                new.append(index)
            elif sequence not in waiting:
                settled.append(sequence)
        self._close_gap()
        if new:
            self.queue.append(Chunk(rows, frames).only(new))
        return settled

    def announced(self, version: int) -> None:
        """Queue the records that waited for this version or an older one."""
        while self.early and self.early[0][0] <= version:
            self.queue.append(self.early.popleft()[1])

    def look_up(self, sequences: list[int]) -> tuple[list[int], list[int]]:
        """Classify records that are named without their bytes.

        Returns:
            Sequences that were settled before, and sequences that never arrived.
        """
        waiting = self._waiting()
        lacking = {s for s in sequences if s >= self._seen_below and s not in self._seen}
        return [s for s in sequences if s not in waiting and s not in lacking], sorted(lacking)

    def _unsettled(self) -> list[Chunk]:
        return [*self.queue, *(chunk for _, chunk in self.early)]

    def _waiting(self) -> set[int]:
        return {sequence for chunk in self._unsettled() for sequence in chunk.rows[:, 0].tolist()}

    def answered_below(self, sequence: int) -> None:
        """Note that the actor has an answer to all records below `sequence`, some of them from an earlier process."""
        if sequence > self._seen_below:
            self._seen_below = sequence
            self._seen = {later for later in self._seen if later >= sequence}
            self._close_gap()

    def _close_gap(self) -> None:
        while self._seen_below in self._seen:
            self._seen.remove(self._seen_below)
            self._seen_below += 1

    def next_chunk(self) -> Chunk:
        """Take the chunk that was offered first, joined with later ones that can be processed together with it."""
        chunks = [self.queue.popleft()]
        num_records = num_words = 0
        while self.queue:
            rows = chunks[-1].rows
            num_records, num_words = num_records + len(rows), num_words + int(rows[:, NUM_WORDS].sum())
            if num_records >= _MANY or num_words >= _MANY_WORDS:
                break
            chunks.append(self.queue.popleft())
        if len(chunks) == 1:
            return chunks[0]
        frames = [frame for chunk in chunks for frame in chunk.frames]
        return Chunk(np.concatenate([chunk.rows for chunk in chunks]), frames)

    @property
    def num_bytes(self) -> int:
        """Size of the frames that wait."""
        return sum(len(frame) for chunk in self._unsettled() for frame in chunk.frames)

    @property
    def num_gaps(self) -> int:
        """Number of records that arrived before one with a smaller sequence. Small for an actor without defects."""
        return len(self._seen)
