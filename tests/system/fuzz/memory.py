"""Decoders of what lies in shared memory: arenas, replay arenas, journals and what the ledger makes of them."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm import copy_kernels, record, record_kernels, record_layout
from impala_llm.pipeline.shm.journal import ROW_WIDTH, Journal
from impala_llm.pipeline.shm.record import RecordError
from impala_llm.pipeline.shm.ring import ArenaError, ArenaReader, ArenaWriter
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import ARRAY_FIELDS, TrajectoryError
from tests.pipeline.keeping import commit
from tests.system.fuzz.inputs import VOCAB_SIZE, Decoder, Source, changed_record, sample_trajectory

PAGE = mmap.PAGESIZE
PROT_NONE = 0  # linux/mman.h


def record_decoder(source: Source, folder: Path) -> Decoder:
    def decode(data: bytes) -> None:
        again = record.record_bytes(record.decode_record(data))
        assert record.record_bytes(record.decode_record(again)) == again, "it does not come back equal"

    return Decoder(lambda: changed_record(source), decode, (RecordError,))


class Fenced:
    """Memory between two pages that kill the process when they are touched."""

    def __init__(self, num_pages: int) -> None:
        self._map = mmap.mmap(-1, PAGE * (num_pages + 2))
        self.bytes = np.frombuffer(self._map, np.uint8)[PAGE:-PAGE]
        libc = ctypes.CDLL(None, use_errno=True)
        begin = self.bytes.ctypes.data
        for fence in (begin - PAGE, begin + self.bytes.size):
            if libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(PAGE), PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def place(self, data: bytes, at_end: bool) -> np.ndarray:
        """The data as uint64[n] that ends, or begins, at a fence. A multiple of 8 bytes."""
        begin = self.bytes.size - len(data) if at_end else 0
        part = self.bytes[begin : begin + len(data)]
        part[:] = np.frombuffer(data, np.uint8)
        return part.view(np.uint64)


class Refusal(Exception):
    """`take_records` said no."""


def kernel_decoder(source: Source, folder: Path) -> Decoder:
    """An input: start, size and checksum of a record, 8 bytes each, then the actor's memory."""
    sources, targets = Fenced(2), Fenced(2)

    def make() -> bytes:
        rng = source.rng
        data = changed_record(source)
        data = data[: len(data) // 8 * 8]
        before, after = (rng.randbytes(8 * rng.randrange(4)) for _ in range(2))
        start, size = len(before) // 8, len(data) // 8
        checksum = int(copy_kernels.checksum(np.frombuffer(data, np.uint64)))
        span = struct.pack("<QQQ", start, size, checksum)
        if rng.random() < 0.3:
            span = source.changed(span, keep_size=True, changes=2)
        return (span + before + data + after)[: 2 * PAGE]

    def decode(data: bytes) -> None:
        start, size, checksum = struct.unpack_from("<qqq", data)
        memory = data[24:]
        words = sources.place(memory, at_end=len(data) % 16 == 0)
        room = bytes(8 * size) if 0 <= size <= len(words) else b""
        target = targets.place(room, at_end=True)
        facts = np.zeros((1, record_layout.FACTS), np.int64)
        rules = (
            record.MAGIC,
            record.MAX_TOKENS,
            record.MAX_STATS,
            record.MAX_TEXT_BYTES,
            VOCAB_SIZE,
            len(data) % 3 * copy_kernels.LARGE,
        )
        rows = np.array([[0, 0, start, size, checksum]])
        record_kernels.take_records(words, rows, target, np.zeros(1, np.int64), *rules, facts)
        assert words.tobytes() == memory, "it wrote to its source"
        inside = start >= 0 and 0 <= size <= len(words) - start
        taken = memory[8 * start : 8 * (start + size)] if inside else b""
        is_whole = len(taken) >= 88 and int(copy_kernels.checksum(np.frombuffer(taken, np.uint64))) == checksum % 2**64
        expected = record_kernels.TORN
        if is_whole:
            try:
                record.decode_record(taken).validate_vocabulary(VOCAB_SIZE)
                expected = record_kernels.COPIED
                assert target.tobytes() == taken, "the copy differs"
            except (RecordError, TrajectoryError):
                expected = record_kernels.INVALID
        assert facts[0, 0] == expected, f"the compiled rules say {facts[0, 0]}, the others {expected}"
        if expected != record_kernels.COPIED:
            raise Refusal

    return Decoder(make, decode, (Refusal,))


def arena_decoder(source: Source, folder: Path) -> Decoder:
    path = folder / "actor.arena"
    writer = ArenaWriter(path, 256, incarnation=5)
    writer.write(record.EncodedTrajectory(b"12345678", np.arange(9, dtype=np.uint64), 10))
    valid = path.read_bytes()

    def make() -> bytes:
        if source.rng.random() < 0.1:
            return source.noise(5000)
        data = source.changed(valid[:64], keep_size=True) + valid[64:]
        return data if source.rng.random() < 0.5 else source.changed(data)

    def decode(data: bytes) -> None:
        path.write_bytes(data)
        reader = ArenaReader(path, 5)
        reader.check_size()
        copy_kernels.checksum(reader.words)

    return Decoder(make, decode, (ArenaError,))


def replay_decoder(source: Source, folder: Path) -> Decoder:
    path = folder / "learner.replay"
    capacity, rows = 4096, 8

    made = TrajectoryStore(path, capacity, rows)
    commit(made, [sample_trajectory(source.rng, ticket_id) for ticket_id in range(5)])
    made.end([1])
    valid = path.read_bytes()
    records_at = len(valid) - capacity

    def make() -> bytes:
        rng = source.rng
        kind = rng.random()
        if kind < 0.05:
            return source.changed(valid)
        head = valid[:4096]
        if kind < 0.1:
            head = source.changed(head[:40], keep_size=True) + head[40:]
        index = valid[4096 : 4096 + 64 * rows]
        if kind < 0.6:
            index = source.changed(index, keep_size=True)
        gap = valid[4096 + 64 * rows : records_at]
        records = source.changed(valid[records_at:], keep_size=True) if kind > 0.4 else valid[records_at:]
        if rng.random() < 0.7:  # with checksums that agree
            table = np.frombuffer(bytearray(index), np.int64).reshape(rows, 8)
            words = np.frombuffer(records, np.uint64)
            for row in table:
                if 0 <= row[1] < len(words) and 0 < row[2] <= len(words):
                    row[3:4].view(np.uint64)[0] = int(copy_kernels.checksum(words[row[1] : row[1] + row[2]]))
            index = table.tobytes()
        return head + index + gap + records

    def decode(data: bytes) -> None:
        path.write_bytes(data)
        arena = TrajectoryStore(path, capacity, rows)
        found = arena.recovered()
        for trajectory in found:
            dataclasses.replace(trajectory)  # which checks all of it
            assert sum(getattr(trajectory, name).nbytes for name in ARRAY_FIELDS) <= capacity
        arena.end([trajectory.unroll_id for trajectory in found])
        trajectory = None
        found.clear()
        if not len(arena.reserve(np.array([capacity // 8]))):
            states = np.memmap(path, np.int64, "r", 4096, (rows, 8))[:, 0]
            assert states.all(), "space was lost, since a row of the index is free"
            return
        arena.cancel(0, capacity // 8)
        assert len(commit(arena, [sample_trajectory(source.rng)])) == 1

    return Decoder(make, decode, (ArenaError,))


def journal_decoder(source: Source, folder: Path) -> Decoder:
    path = folder / "learner.journal"
    rows = [tuple(range(i, i + ROW_WIDTH)) for i in range(5)]
    Journal(path).append(rows)
    valid = path.read_bytes()[: 4096 + 8 * ROW_WIDTH * 7]

    def make() -> bytes:
        kind = source.rng.random()
        if kind < 0.1:
            return source.noise(5000)
        data = source.changed(valid[:80], keep_size=True) + valid[80:]
        return data if kind < 0.6 else source.changed(data)

    def decode(data: bytes) -> None:
        path.write_bytes(data)
        journal = Journal(path)
        before = journal.rows()
        if journal.append(rows[:1]):
            assert (journal.rows()[:-1] == before).all() and journal.rows()[-1].tolist() == list(rows[0])

    return Decoder(make, decode, (ArenaError,))


class Rows:
    """A journal in the memory of this process."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def rows(self) -> np.ndarray:
        return self._rows.copy()

    def append(self, rows: Sequence[tuple[int, ...]]) -> bool:
        self._rows = np.concatenate([self._rows, np.array(rows, np.int64).reshape(-1, ROW_WIDTH)])
        return len(self._rows) < 200

    def rewrite(self, rows: Sequence[tuple[int, ...]]) -> None:
        self._rows = np.array(rows, np.int64).reshape(-1, ROW_WIDTH)


def ledger_decoder(source: Source, folder: Path) -> Decoder:
    """An input: rows of a journal."""

    def ledger(rows: np.ndarray) -> tuple[TicketLedger, Rows]:
        journal = Rows(rows)
        order = TaskOrder(range(5), group_size=2, seed=1)
        return TicketLedger(order, batch_size=4, max_staleness=1, version=2, journal=journal), journal  # type: ignore[arg-type]

    def play(one: TicketLedger) -> None:
        one.request("a", 8)
        tickets = [ticket.ticket_id for _, granted in one.grantable() for ticket in granted]
        for ticket_id in tickets:
            one.received(ticket_id, f"episode {ticket_id}")
        one.trained(tickets[:4])
        one.evicted(tickets[4:5])

    first, journal = ledger(np.zeros((0, ROW_WIDTH), np.int64))
    first.recover([])
    play(first)
    valid = journal.rows().tobytes()

    def make() -> bytes:
        data = source.changed(valid, keep_size=True) if source.rng.random() < 0.9 else source.changed(valid)
        return data[: len(data) // (8 * ROW_WIDTH) * 8 * ROW_WIDTH]

    def decode(data: bytes) -> None:
        one, _ = ledger(np.frombuffer(data, np.int64).reshape(-1, ROW_WIDTH))
        one.recover([(0, "episode 0", 0), (5, "e", 1), (2**62, "f", 0)])
        # What it has taken over does not break it later.
        try:
            play(one)
            one.advance(3)
        except Exception as error:
            raise AssertionError(f"it broke after the recovery: {error!r}") from error

    return Decoder(make, decode, (RunDirectoryError,))
