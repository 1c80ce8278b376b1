"""Rows that were appended stay, and an append that was cut off leaves none."""

import itertools
import os
import shutil
import struct
from pathlib import Path

import pytest

from impala_llm.pipeline.shm import journal as journal_module
from impala_llm.pipeline.shm.journal import ROW_WIDTH, Journal
from impala_llm.pipeline.shm.ring import ArenaError
from tests.pipeline.support import at_each_line_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learner.journal"


def some_rows(first: int, count: int) -> list[tuple[int, ...]]:
    return [tuple((first + i) * 10 + k for k in range(ROW_WIDTH)) for i in range(count)]


def content(journal: Journal) -> list[tuple[int, ...]]:
    return [tuple(row) for row in journal.rows().tolist()]


def test_rows_come_back_in_order_and_in_a_later_process(path: Path) -> None:
    journal = Journal(path)
    assert len(journal) == 0 and journal.rows().shape == (0, 6)
    assert journal.append(some_rows(0, 3)) and journal.append([]) and journal.append(some_rows(3, 2))
    assert content(journal) == some_rows(0, 5) and len(journal) == 5
    later = Journal(path)
    assert content(later) == some_rows(0, 5)
    assert later.append([(-(2**63), 2**63 - 1, 0, -1, 1, 2)])
    assert content(Journal(path))[5:] == [(-(2**63), 2**63 - 1, 0, -1, 1, 2)]


def test_the_file_is_laid_out_as_described(path: Path) -> None:
    Journal(path).append(some_rows(7, 2))
    data = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert struct.unpack_from("<8sQ", data) == (b"ILLMJRNL", 1) and struct.unpack_from("<q", data, 64) == (2,)
    rows = [struct.unpack_from("<6q", data, 4096 + 48 * i) for i in range(2)]
    assert rows == some_rows(7, 2)


def test_rows_are_a_copy(path: Path) -> None:
    journal = Journal(path)
    journal.append(some_rows(0, 1))
    journal.rows()[:] = 9
    assert content(journal) == some_rows(0, 1)


def test_a_full_journal_takes_all_rows_of_an_append_or_none(path: Path) -> None:
    journal = Journal(path, min_rows=4)
    assert journal.append(some_rows(0, 3))
    assert not journal.append(some_rows(3, 2))
    assert content(journal) == some_rows(0, 3)
    assert journal.append(some_rows(3, 1))
    assert not journal.append(some_rows(4, 1)) and journal.append([])
    assert content(Journal(path)) == some_rows(0, 4)


def test_a_rewrite_replaces_everything_and_makes_room(path: Path) -> None:
    journal = Journal(path, min_rows=4)
    journal.append(some_rows(0, 4))
    for round_ in range(5):
        journal.rewrite(some_rows(100, 10))
        assert content(journal) == content(Journal(path)) == some_rows(100, 10)
        assert journal.append(some_rows(110, 10))
        assert content(journal) == content(Journal(path)) == some_rows(100, 20)
        journal.rewrite([])
        assert content(journal) == content(Journal(path)) == []
        assert journal.append(some_rows(round_, 4)) and not journal.append(some_rows(0, 1))
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.spare"]  # room for the next rewrite


def test_a_journal_that_has_grown_is_rewritten_where_others_have_filled_the_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = journal_module.map_new_file
    free = 1 << 20

    def used() -> int:
        return sum(found.stat().st_size for found in path.parent.iterdir())

    def map_new_file(path: Path, num_bytes: int, advice: str) -> object:
        path.unlink(missing_ok=True)
        if used() + num_bytes > free:
            raise ArenaError(f"no room for {path}")
        return make(path, num_bytes, advice)

    monkeypatch.setattr(journal_module, "map_new_file", map_new_file)
    journal = Journal(path, min_rows=4)
    journal.rewrite(some_rows(0, 10))
    free = used()
    for first in range(5):
        while journal.append(some_rows(10, 1)):
            pass
        journal.rewrite(some_rows(first, 12))
        assert content(journal) == some_rows(first, 12)
    assert content(Journal(path)) == some_rows(4, 12)
    with pytest.raises(ArenaError, match="no room"):
        journal.rewrite(some_rows(0, 1000))


def test_an_append_that_was_cut_off_leaves_the_rows_from_before(path: Path) -> None:
    journal = Journal(path)
    journal.append(some_rows(0, 3))
    states = []

    def killed() -> None:
        copy = shutil.copyfile(path, path.with_name("killed"))
        states.append(content(Journal(copy)))

    with at_each_line_of(journal_module, killed):
        journal.append(some_rows(3, 4))
    killed()
    assert len(states) > 5
    assert [rows for rows, _ in itertools.groupby(states)] == [some_rows(0, 3), some_rows(0, 7)]


def test_a_rewrite_that_was_cut_off_leaves_the_rows_from_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path)
    journal.append(some_rows(0, 3))

    def killed(old: Path, new: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(journal_module.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            journal.rewrite(some_rows(50, 1))
    assert len(os.listdir(path.parent)) == 3
    later = Journal(path)
    assert content(later) == some_rows(0, 3)
    later.rewrite(some_rows(60, 2))
    assert content(Journal(path)) == some_rows(60, 2)
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.spare"]  # room for the next rewrite


@pytest.mark.parametrize("size", [0, 4096 + 48 * 100])
def test_a_maker_that_was_killed_half_way_leaves_an_empty_journal(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    journal = Journal(path)
    assert content(journal) == [] and journal.append(some_rows(0, 2))
    assert content(Journal(path)) == some_rows(0, 2)


def test_what_is_no_journal_is_refused(path: Path) -> None:
    for data in (b"x", bytes(4095), b"x" * 8192, struct.pack("<8sQ", b"ILLMJRNL", 2) + bytes(8192)):
        path.write_bytes(data)
        with pytest.raises(ArenaError, match="no journal"):
            Journal(path)
        assert path.read_bytes() == data
    for length in (-1, 3, 2**62, -(2**63)):
        path.write_bytes(struct.pack("<8sQ48xq", b"ILLMJRNL", 1, length).ljust(4096 + 48 * 2 + 47, b"\0"))
        with pytest.raises(ArenaError, match="rows, and has room for 2"):
            Journal(path)
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError):
        Journal(link)


def test_no_room_on_the_file_system_is_a_clear_error(path: Path) -> None:
    with pytest.raises(ArenaError, match="Free memory"):
        Journal(path, min_rows=1 << 56)
    assert not path.exists()
