import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.arena import ArenaError, ArenaReader, ArenaWriter, Descriptor, RecordTooLarge


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "actor.arena"


def test_parts_come_back_as_one_record(path: Path) -> None:
    writer = ArenaWriter(path, 4096, incarnation=7)
    descriptor = writer.try_write([b"ab", bytearray(b"cde"), memoryview(b"f")])
    assert descriptor is not None
    assert bytes(ArenaReader(path, 7).read(descriptor)) == b"abcdef"
    writer.close()
    assert not path.exists()


def test_a_full_ring_is_back_pressure_and_space_comes_back_in_order(path: Path) -> None:
    writer = ArenaWriter(path, 256)  # four records of 64 bytes
    records = [writer.try_write([bytes([i]) * 64]) for i in range(4)]
    first, second, third, fourth = records
    assert first and second and third and fourth
    assert writer.try_write([b"x"]) is None
    assert writer.used == 256
    writer.free(second)  # out of order: the oldest is still held
    assert writer.try_write([b"x"]) is None
    writer.free(first)
    wrapped = writer.try_write([b"y" * 128])
    assert wrapped is not None and wrapped.offset == 0
    reader = ArenaReader(path)
    assert bytes(reader.read(third)) == b"\x02" * 64
    assert bytes(reader.read(fourth)) == b"\x03" * 64
    assert bytes(reader.read(wrapped)) == b"y" * 128


def test_a_record_that_does_not_fit_before_the_end_starts_at_0(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    first = writer.try_write([b"a" * 128])
    second = writer.try_write([b"b" * 64])
    assert first and second
    writer.free(first)
    third = writer.try_write([b"c" * 100])  # 64 bytes at the end, 128 at the start
    assert third is not None and third.offset == 0
    assert writer.try_write([b"d"]) is None  # the gap at the end is used up until `second` is free
    writer.free(second)
    assert writer.try_write([b"d"]) is not None


def test_a_record_larger_than_the_ring_names_capacity_and_key(path: Path) -> None:
    with pytest.raises(RecordTooLarge, match=r"257 bytes.*256 bytes.*pipeline\.arena_mb"):
        ArenaWriter(path, 256).try_write([b"x" * 257])


def test_an_arena_without_room_on_the_file_system_is_a_clear_error(path: Path) -> None:
    with pytest.raises(ArenaError, match=r"pipeline\.arena_mb"):
        ArenaWriter(path, 1 << 60)
    assert not path.exists()


def test_freeing_twice_is_an_error(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    descriptor = writer.try_write([b"x"])
    assert descriptor is not None
    writer.free(descriptor)
    with pytest.raises(ArenaError, match="freed before"):
        writer.free(descriptor)


def test_changed_bytes_and_wild_descriptors_are_refused(path: Path) -> None:
    writer = ArenaWriter(path, 256)
    descriptor = writer.try_write([b"x" * 64])
    assert descriptor is not None
    reader = ArenaReader(path)
    content = bytearray(path.read_bytes())
    content[-256] ^= 1  # the first byte of the ring
    with path.open("r+b") as file:
        file.write(content)
    with pytest.raises(ArenaError, match="checksum"):
        reader.read(descriptor)
    for wild in (Descriptor(0, 200, 100, 0), Descriptor(0, -1, 10, 0), Descriptor(0, 0, 1 << 40, 0)):
        with pytest.raises(ArenaError, match="outside"):
            reader.read(wild)


def test_files_that_are_no_arena_of_this_process_are_refused(path: Path) -> None:
    with pytest.raises(ArenaError, match="cannot open"):
        ArenaReader(path)
    path.write_bytes(b"short")
    with pytest.raises(ArenaError, match="not an arena"):
        ArenaReader(path)
    path.write_bytes(bytes(8192))
    with pytest.raises(ArenaError, match="not an arena"):
        ArenaReader(path)
    ArenaWriter(path, 4096, incarnation=1)
    with pytest.raises(ArenaError, match="incarnation 2"):
        ArenaReader(path, incarnation=2)
    with path.open("r+b") as file:
        file.truncate(6000)
    with pytest.raises(ArenaError, match="truncated"):
        ArenaReader(path, incarnation=1)


def test_a_new_arena_of_the_same_name_leaves_the_readers_of_the_old_one_alone(path: Path) -> None:
    old = ArenaWriter(path, 256).try_write([b"old"])
    reader = ArenaReader(path)
    new = ArenaWriter(path, 256).try_write([b"new"])
    assert old and new
    assert bytes(reader.read(old)) == b"old"
    assert bytes(ArenaReader(path).read(new)) == b"new"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.integers(64, 2000))
def test_random_use_never_overlaps_or_loses_space(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("arena") / "a.arena"
    writer = ArenaWriter(path, size)
    reader = ArenaReader(path)
    held: list[tuple[Descriptor, bytes]] = []
    for _ in range(200):
        content = rng.randbytes(rng.randint(1, writer.capacity))
        descriptor = writer.try_write([content[:3], content[3:]])
        if descriptor is not None:
            held.append((descriptor, content))
        else:
            assert held, "an empty ring takes every record that fits at all"
        for known, expected in held:
            assert bytes(reader.read(known)) == expected
        while held and rng.random() < 0.4:
            writer.free(held.pop(rng.randrange(len(held)))[0])
        assert 0 <= writer.used <= writer.capacity
    for known, _ in held:
        writer.free(known)
    assert writer.used == 0
    assert writer.try_write([bytes(writer.capacity)]) is not None
    writer.close()
