"""The ring in which an actor lays records: whole, apart from one another, and back-pressure when it is full."""

import mmap
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm import copy_kernels, ring
from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.record import EncodedTrajectory
from impala_llm.pipeline.shm.ring import ArenaError, ArenaReader, ArenaWriter, RecordTooLarge, Span

UNIT = 8  # words to which records are aligned: 64 bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "actor.arena"


def record(num_words: int, value: int = 0) -> EncodedTrajectory:
    """A record of words that depend on `value` alone, split somewhere."""
    words = np.random.default_rng(value).integers(0, 2**63, num_words, np.uint64)
    middle = min(num_words, 1 + value % 11)
    return EncodedTrajectory(words[:middle].tobytes(), words[middle:], num_words)


def content(encoded: EncodedTrajectory) -> bytes:
    return encoded.header + encoded.block.tobytes()


def read(reader: ArenaReader, span: Span) -> bytes:
    words = reader.words[span.start : span.start + span.num_words]
    assert int(copy_kernels.checksum(words)) == span.checksum % 2**64
    return words.tobytes()


def test_both_parts_of_a_record_come_back_as_one(path: Path) -> None:
    writer = ArenaWriter(path, 4096, incarnation=7)
    span = writer.write(record(20, 3))
    assert span is not None and span.num_words == 20
    assert read(ArenaReader(path, 7), span) == content(record(20, 3))
    assert bytes(writer.view(span)) == content(record(20, 3))
    assert path.stat().st_mode & 0o777 == 0o600
    writer.close()
    assert not path.exists()
    writer.close()


def test_the_file_is_laid_out_as_described(path: Path) -> None:
    writer = ArenaWriter(path, 300, incarnation=9)  # rounded down to 256
    first, second = writer.write(record(3, 1)), writer.write(record(9, 2))
    assert first is not None and second is not None
    assert (first.start, second.start) == (0, UNIT)
    data = path.read_bytes()
    assert len(data) == 4096 + 256 and writer.capacity == 256
    assert struct.unpack_from("<8sQQQ", data) == (b"ILLMRING", 2, 9, 256)
    assert data[4096 : 4096 + 24] == content(record(3, 1))
    assert data[4096 + 64 : 4096 + 64 + 72] == content(record(9, 2))


def test_a_full_ring_is_back_pressure_and_space_comes_back_in_order(path: Path) -> None:
    writer = ArenaWriter(path, 256)  # four records of 8 words
    spans = [writer.write(record(8, i)) for i in range(4)]
    first, second, third, fourth = spans
    assert first and second and third and fourth
    assert writer.write(record(1)) is None
    assert writer.used == 256
    writer.free(second.start)  # out of order: the oldest is still held
    assert writer.write(record(1)) is None
    writer.free(first.start)
    assert writer.used == 128
    wrapped = writer.write(record(16, 9))
    assert wrapped is not None and wrapped.start == 0
    assert writer.used == 256
    reader = ArenaReader(path)
    for span, expected in [(third, record(8, 2)), (fourth, record(8, 3)), (wrapped, record(16, 9))]:
        assert read(reader, span) == content(expected)


def test_a_record_that_does_not_fit_before_the_end_starts_at_0(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    first, second = writer.write(record(16, 1)), writer.write(record(8, 2))
    assert first and second
    writer.free(first.start)
    third = writer.write(record(13, 3))  # 8 words at the end, 16 at the start
    assert third is not None and third.start == 0
    assert writer.write(record(1)) is None  # the gap at the end is used up until `second` is free
    assert writer.used == 256
    writer.free(second.start)
    assert writer.used == 128
    assert writer.write(record(1)) is not None


def test_a_record_larger_than_the_ring_names_capacity_and_key(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    for _ in range(2):  # empty, and in use
        with pytest.raises(RecordTooLarge, match=r"264 bytes.*256 bytes.*pipeline\.arena_mb"):
            writer.write(record(33))
        assert writer.write(record(1)) is not None


def test_an_arena_without_room_on_the_file_system_is_a_clear_error(path: Path) -> None:
    with pytest.raises(ArenaError, match=r"pipeline\.arena_mb"):
        ArenaWriter(path, 1 << 60)
    assert not path.exists()
    with pytest.raises(ArenaError, match=r"that of its last one is kept until the learner has noticed its end"):
        ArenaWriter(path, 1 << 60)
    with pytest.raises(ValueError, match=r"capacity is 63 bytes.*pipeline\.arena_mb"):
        ArenaWriter(path, 63)


def test_freeing_twice_is_an_error(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    span = writer.write(record(1))
    assert span is not None
    for wrong in (span.start + 1, span.start + UNIT, -1):
        with pytest.raises(ArenaError, match="never written"):
            writer.free(wrong)
    writer.free(span.start)
    with pytest.raises(ArenaError, match="freed before"):
        writer.free(span.start)


def test_changed_bytes_are_seen_through_the_mapping(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    span = writer.write(record(8))
    assert span is not None
    reader = ArenaReader(path)
    with path.open("r+b") as file:
        file.seek(4096 + 5)
        file.write(bytes([content(record(8))[5] ^ 1]))
    assert int(copy_kernels.checksum(reader.words[:8])) != span.checksum % 2**64
    assert not reader.words.flags.writeable


def test_files_that_are_no_arena_of_this_process_are_refused(path: Path) -> None:
    with pytest.raises(ArenaError, match="cannot open"):
        ArenaReader(path)
    for data in (b"", b"short", bytes(4096), bytes(4097), bytes(8192)):
        path.write_bytes(data)
        with pytest.raises(ArenaError, match="not an arena"):
            ArenaReader(path)
    ArenaWriter(path, 4096, incarnation=1)
    with pytest.raises(ArenaError, match="incarnation 2"):
        ArenaReader(path, incarnation=2)
    with path.open("r+b") as file:
        file.truncate(6000)
    with pytest.raises(ArenaError, match="truncated"):
        ArenaReader(path, incarnation=1)
    with path.open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(ArenaError, match="truncated"):
        ArenaReader(path, incarnation=1)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(ArenaError, match="cannot open"):
        ArenaReader(link)
    with pytest.raises(ArenaError):
        ArenaReader(path.parent)


@pytest.mark.parametrize("size", [4096, 0, 8200])
def test_a_file_that_was_cut_is_noticed_before_it_is_read(path: Path, size: int) -> None:
    ArenaWriter(path, 4096)
    reader = ArenaReader(path)
    reader.check_size()
    os.truncate(path, size)
    with pytest.raises(ArenaError, match="truncated"):
        reader.check_size()


def test_a_reader_gives_its_handle_and_mapping_back(path: Path) -> None:
    ArenaWriter(path, 4096)
    before = len(os.listdir("/proc/self/fd"))
    reader = ArenaReader(path)
    words = reader.words
    del reader
    assert words.sum() == 0  # the mapping lives as long as what views it
    del words
    assert len(os.listdir("/proc/self/fd")) == before
    path.write_bytes(b"x" * 8192)
    for _ in range(10):
        with pytest.raises(ArenaError):
            ArenaReader(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_new_arena_of_the_same_name_leaves_the_readers_of_the_old_one_alone(path: Path) -> None:
    old_writer = ArenaWriter(path, 256)
    old = old_writer.write(record(5, 1))
    reader = ArenaReader(path)
    old_writer.close()
    new = ArenaWriter(path, 256).write(record(5, 2))
    assert old and new
    assert read(reader, old) == content(record(5, 1))
    assert read(ArenaReader(path), new) == content(record(5, 2))
    reader.check_size()


def test_the_arena_of_a_living_writer_is_not_replaced(path: Path) -> None:
    writer = ArenaWriter(path, 256, incarnation=1)
    with pytest.raises(ArenaError, match="another process, which is alive: give each actor an index of its own"):
        ArenaWriter(path, 256, incarnation=2)
    assert ArenaReader(path, 1).has_writer()
    writer.close()
    ArenaWriter(path, 256, incarnation=2)
    assert ArenaReader(path, 2).has_writer()


@pytest.mark.parametrize("when", ["before it is opened", "once it is open"])
def test_of_two_writers_that_start_at_the_same_moment_one_keeps_the_arena(
    path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The second one looks for a living writer when the first has made its file, and has not locked it."""
    second: list[ArenaWriter] = []

    class Late(FileLock):
        """Opened by the first writer, to lock its file."""

        def __init__(self, *arguments: Any) -> None:
            is_made = path.exists()  # and not yet looked for
            if is_made:
                monkeypatch.setattr(ring, "FileLock", FileLock)
            if is_made and when == "before it is opened":
                second.append(ArenaWriter(path, 256, incarnation=2))
            super().__init__(*arguments)
            if is_made and when == "once it is open":
                second.append(ArenaWriter(path, 256, incarnation=2))

    monkeypatch.setattr(ring, "FileLock", Late)
    with pytest.raises(ArenaError, match="another process, which is alive"):
        ArenaWriter(path, 256, incarnation=1)
    assert second and ArenaReader(path, 2).has_writer()


def test_an_arena_without_a_path_is_memory_of_this_process_alone(tmp_path: Path) -> None:
    writer = ArenaWriter(None, 4096)
    span = writer.write(record(20, 3))
    assert span is not None and writer.path is None
    assert bytes(writer.view(span)) == content(record(20, 3))
    assert isinstance(writer.view(span).obj, mmap.mmap)
    writer.free(span.start)
    assert writer.used == 0
    writer.close()
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(64, 2000), st.booleans())
def test_random_use_never_overlaps_or_loses_space(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, shared: bool
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("arena") / "a.arena" if shared else None
    writer = ArenaWriter(path, size)
    reader = ArenaReader(path) if path is not None else None
    held: list[tuple[Span, bytes]] = []
    for turn in range(150):
        encoded = record(rng.randint(1, writer.capacity // 8), turn)
        span = writer.write(encoded)
        if span is not None:
            assert span.start % UNIT == 0 and span.start + span.num_words <= writer.capacity // 8
            held.append((span, content(encoded)))
        else:
            assert held, "an empty ring takes every record that fits at all"
        for known, expected in held:
            assert (bytes(writer.view(known)) if reader is None else read(reader, known)) == expected
        while held and rng.random() < 0.4:
            writer.free(held.pop(rng.randrange(len(held)))[0].start)
        taken = sum(-(-span.num_words // UNIT) * UNIT * 8 for span, _ in held)
        assert taken <= writer.used <= writer.capacity
    for known, _ in held:
        writer.free(known.start)
    assert writer.used == 0
    assert writer.write(record(writer.capacity // 8)) is not None
    writer.close()


def test_a_reader_sees_whether_the_writer_still_has_the_arena(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    code = (
        "import sys; from pathlib import Path; from impala_llm.pipeline.shm.ring import ArenaWriter\n"
        "arena = ArenaWriter(Path(sys.argv[1]), 4096); print('made', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "made\n"
    readers = [ArenaReader(path), ArenaReader(path)]
    assert [reader.has_writer() for reader in readers] == [True, True]
    writer.kill()
    writer.wait()
    assert [reader.has_writer() for reader in readers] == [False, False]
    ArenaWriter(path, 4096, incarnation=1)
    assert ArenaReader(path, 1).has_writer()
