"""Committed trajectories stay, whole and in order, until they have ended and nobody views them any more."""

import gc
import logging
import mmap
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm import trajectory_store
from impala_llm.pipeline.shm.record_layout import FACTS
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.trajectory import Trajectory, unroll_id
from tests.pipeline.keeping import commit, commit_laid, lay_down, make, words_of
from tests.pipeline.support import at_each_line_of, contents, steps_of

CAPACITY = 1 << 14
ROWS = 64
INDEX_AT, ROW_BYTES = 4096, 64  # a page with the header, then 8 words a record
RECORDS_AT = INDEX_AT + mmap.PAGESIZE
COMMITTED = 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learner.replay"


def sizes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def is_whole(arena: TrajectoryStore) -> bool:
    """Whether all space is free and in one piece."""
    starts = arena.reserve(sizes(arena.capacity // 8)).tolist()
    for start in starts:
        arena.cancel(start, arena.capacity // 8)
    return starts == [0] and arena.used == 0


def index_of(path: Path) -> np.ndarray:
    """int64[rows, 8] of the file, which changes with it."""
    return np.memmap(path, np.int64, "r+", INDEX_AT, (ROWS, 8))


# --- keeping


def test_what_was_committed_comes_back_equal_field_by_field(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    originals = [make(i) for i in range(5)]
    for original, kept in zip(originals, commit(arena, originals), strict=True):
        assert contents(kept) == contents(original)
        assert kept.block.tobytes() == original.block.tobytes()
        assert kept.ticket_id == original.ticket_id
    assert path.stat().st_mode & 0o777 == 0o600
    assert arena.used == sum(-(-len(words_of(t)) // 8) * 64 for t in originals)


def test_a_later_process_finds_all_of_it_byte_for_byte_and_in_order(path: Path) -> None:
    first = TrajectoryStore(path, CAPACITY, ROWS)
    originals = [make(i) for i in (7, 3, 9, 1)]
    commit(first, originals[:1])
    commit(first, originals[1:])
    second = TrajectoryStore(path, CAPACITY, ROWS)
    recovered = second.recovered()
    assert [contents(t) for t in recovered] == [contents(t) for t in originals]
    assert second.recovered() == []
    assert second.used == sum(-(-len(words_of(t)) // 8) * 64 for t in originals)
    more = [make(20), make(2)]
    commit(second, more)
    third = TrajectoryStore(path, CAPACITY, ROWS)
    assert [contents(t) for t in third.recovered()] == [contents(t) for t in originals + more]


def test_a_later_process_knows_what_the_metrics_had_counted(path: Path) -> None:
    first = TrajectoryStore(path, CAPACITY, ROWS)
    commit(first, [make(i) for i in (7, 3, 9)])
    first.note_counted([7, 9, 1000])
    assert not first.counted
    second = TrajectoryStore(path, CAPACITY, ROWS)
    assert second.counted == {7, 9}
    second.end([7, 3, 9])
    second.recovered()
    third = TrajectoryStore(path, CAPACITY, ROWS)
    commit(third, [make(i) for i in (1, 2, 4)])  # into rows that were noted
    assert not TrajectoryStore(path, CAPACITY, ROWS).counted


def test_the_file_is_laid_out_as_described(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY + 63, ROWS)
    kept = commit(arena, [make(1), make(2)])
    data = path.read_bytes()
    assert struct.unpack_from("<8sQQQ", data) == (b"ILLMKEEP", 1, ROWS, CAPACITY)
    assert len(data) == RECORDS_AT + CAPACITY
    rows = sorted((row.tolist() for row in index_of(path) if row[0]), key=lambda row: row[4])
    for row, trajectory in zip(rows, kept, strict=True):
        state, start, size = row[:3]
        assert state == COMMITTED and start % 8 == 0
        begin = RECORDS_AT + 8 * start
        assert data[begin : begin + 8 * size] == words_of(trajectory).tobytes()


def test_each_unroll_of_a_ticket_ends_for_itself(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    unrolls = [replace(make(4, 20), unroll_index=index, bootstrap=True, continues=index < 2) for index in range(3)]
    kept = commit(arena, [unrolls[0], make(5, 20), *unrolls[1:]])
    assert [t.unroll_id for t in kept] == [unroll_id(4, 0), 5, unroll_id(4, 1), unroll_id(4, 2)]
    assert [t.continues for t in kept] == [True, False, True, False]
    arena.end([4, unroll_id(4, 2), 99])
    del kept
    found = TrajectoryStore(path, CAPACITY, ROWS).recovered()
    assert [(t.ticket_id, t.unroll_index) for t in found] == [(5, 0), (4, 1)]


# --- when space is used again


def overwrite(arena: TrajectoryStore) -> int:
    """Fill all free space with ones. Returns how many words that were."""
    taken = []
    for size in (512, 64, 8):
        while len(starts := arena.reserve(sizes(size))):
            arena.words[starts[0] : starts[0] + size] = 2**64 - 1
            taken.append((int(starts[0]), size))
    for start, size in taken:
        arena.cancel(start, size)
    return sum(size for _, size in taken)


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t.tokens,
        lambda t: t.action_mask[3:5],
        lambda t: t.block,
        lambda t: t.block[2:].view(np.int32),
        lambda t: memoryview(t.rewards),
        lambda t: np.frombuffer(t.versions, np.int32),
        lambda t: t.turns.reshape(-1).T,
        lambda t: np.asarray(t.behaviour_log_probs, np.float32),
    ],
)
def test_space_is_not_used_again_while_anything_of_it_lives(path: Path, keep: Callable[[Trajectory], object]) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    originals = [make(i, 50) for i in range(3)]
    kept = commit(arena, originals)
    part = keep(kept[1])
    expected = bytes(part) if isinstance(part, memoryview) else None
    expected = part.tobytes() if isinstance(part, np.ndarray) else expected
    arena.end([0, 1, 2])
    kept.clear()
    gc.collect(0)
    size = -(-len(words_of(originals[1])) // 8) * 8
    assert overwrite(arena) == CAPACITY // 8 - size
    if isinstance(part, Trajectory):
        assert contents(part) == contents(originals[1])
    else:
        assert bytes(part) == expected  # type: ignore[call-overload]
    del part
    gc.collect(0)
    assert overwrite(arena) == CAPACITY // 8
    assert is_whole(arena)


def test_tensors_made_of_it_keep_it_too(path: Path) -> None:
    torch = pytest.importorskip("torch")
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    original = make(1, 50)
    tensor = torch.from_numpy(commit(arena, [original])[0].tokens)
    arena.end([1])
    overwrite(arena)
    assert tensor.tolist() == original.tokens.tolist()
    del tensor
    assert is_whole(arena)


@pytest.mark.parametrize("ends_first", [True, False])
def test_space_comes_back_after_both_the_end_and_the_last_reference(path: Path, ends_first: bool) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    kept = commit(arena, [make(1, 50)])
    if ends_first:
        arena.end([1])
        assert not is_whole(arena)
        kept.clear()
    else:
        kept.clear()
        gc.collect(0)
        assert not is_whole(arena)
        assert [t.ticket_id for t in TrajectoryStore(path, CAPACITY, ROWS).recovered()] == [1]
        arena.end([1])
    assert is_whole(arena)


def test_what_has_ended_is_not_found_again_although_it_is_still_viewed(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    kept = commit(arena, [make(1), make(2)])
    arena.end([1])
    assert [t.ticket_id for t in TrajectoryStore(path, CAPACITY, ROWS).recovered()] == [2]
    assert contents(kept[0]) == contents(make(1))


def test_a_full_arena_has_room_for_fewer_and_what_is_cancelled_comes_back(path: Path) -> None:
    arena = TrajectoryStore(path, 1024, ROWS)  # 128 words
    starts = arena.reserve(sizes(40, 33, 8, 64, 1)).tolist()
    assert starts == [0, 40, 80]  # 33 take 40; 64 do not fit, and what follows must wait its turn
    assert arena.reserve(sizes(41)).tolist() == []
    assert arena.reserve(sizes()).tolist() == []
    arena.cancel(40, 33)
    assert arena.reserve(sizes(40)).tolist() in ([40], [88])
    arena.cancel(0, 40)
    arena.cancel(80, 8)


def test_a_full_and_fragmented_arena_is_found_full_at_once(path: Path) -> None:
    def steps(num_records: int) -> int:
        arena = TrajectoryStore(path, 2 * 64 * num_records, max_records=2 * num_records)
        starts = arena.reserve(np.full(2 * num_records, 8))
        for start in starts[::2].tolist():
            arena.cancel(start, 8)
        path.unlink()
        arena.reserve(np.array([16]))  # what has changed is sorted in
        return steps_of(lambda: arena.reserve(np.array([16, 16, 16])))

    assert steps(2000) <= 1.5 * steps(20)


def test_no_more_records_are_kept_than_there_are_rows(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, 4)
    assert len(arena.reserve(sizes(8, 8, 8, 8, 8, 8))) == 4
    arena = TrajectoryStore(path.with_name("other"), CAPACITY, 4)
    kept = commit(arena, [make(i, 10) for i in range(6)])
    assert len(kept) == 4 and commit(arena, [make(9, 10)]) == []
    arena.end([2])
    kept.clear()
    assert len(commit(arena, [make(9, 10), make(10, 10)])) == 1


def test_nothing_to_commit_or_end_is_no_matter(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    nothing = np.empty(0, np.int64)
    assert arena.commit(nothing, nothing, nothing, np.empty((0, FACTS), np.int64)) == []
    arena.end([])
    assert len(commit(arena, [make(i, 10) for i in range(3)])) == 3


@cache
def known(ticket_id: int) -> tuple[bytes, bytes, int]:
    """Return block, tokens and record size in bytes of the trajectory that `make` returns for this ticket.

    Cached: the test below compares all its views with them after each action."""
    trajectory = make(ticket_id)
    return trajectory.block.tobytes(), trajectory.tokens.tobytes(), -(-len(words_of(trajectory)) // 8) * 64


@pytest.mark.system
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([512, 4096, CAPACITY]))
def test_random_use_loses_changes_and_overlaps_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, capacity: int
) -> None:
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("replay") / "a.replay"
    arena = TrajectoryStore(path, capacity, ROWS)
    viewed: dict[int, Trajectory | np.ndarray] = {}  # in somebody's hands
    kept: dict[int, Trajectory] = {}  # committed and not ended: the originals, in order of commit
    next_ticket = 0
    for _ in range(80):
        action = rng.random()
        if action < 0.5:
            batch = [make(next_ticket + i) for i in range(rng.randint(1, 4))]
            next_ticket += len(batch)
            records = [words_of(t) for t in batch]
            starts = arena.reserve(sizes(*map(len, records))).tolist()
            laid = []
            for start, words, original in zip(starts, records, batch, strict=False):
                if rng.random() < 0.3:
                    arena.words[start : start + len(words)] = 2**64 - 1
                    arena.cancel(start, len(words))
                else:
                    laid.append(lay_down(arena, start, words))
                    kept[original.ticket_id] = original
            for trajectory in commit_laid(arena, laid) if laid else []:
                viewed[trajectory.ticket_id] = trajectory
        elif action < 0.7:
            ended = rng.sample(sorted(kept), min(len(kept), rng.randint(0, 3)))
            arena.end(ended)
            for ticket_id in ended:
                del kept[ticket_id]
        elif action < 0.95:
            for ticket_id in rng.sample(sorted(viewed), min(len(viewed), rng.randint(0, 4))):
                trajectory = viewed[ticket_id]
                if isinstance(trajectory, Trajectory) and rng.random() < 0.4:
                    viewed[ticket_id] = trajectory.tokens
                else:
                    del viewed[ticket_id]
            trajectory = None  # type: ignore[assignment]
        else:
            # What is viewed belongs to the one before, whose space the next one does not know.
            viewed.clear()
            arena = TrajectoryStore(path, capacity, ROWS)
            recovered = arena.recovered()
            assert [t.ticket_id for t in recovered] == list(kept)
            viewed = {t.ticket_id: t for t in recovered}
            recovered.clear()
        for ticket_id, value in viewed.items():
            block, tokens, _ = known(ticket_id)
            if isinstance(value, Trajectory):
                assert value.block.tobytes() == block
            else:
                assert value.tobytes() == tokens
        assert sum(known(ticket_id)[2] for ticket_id in kept) <= arena.used <= arena.capacity
    later = TrajectoryStore(path, capacity, ROWS)
    assert [contents(t) for t in later.recovered()] == [contents(t) for t in kept.values()]
    del later
    viewed.clear()
    value = trajectory = None  # type: ignore[assignment]
    arena.end(list(kept))
    assert is_whole(arena)


# --- killed at any moment


@pytest.mark.system
@pytest.mark.parametrize("seed", range(3))
def test_a_process_killed_at_any_moment_leaves_whole_records_in_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path, copied = tmp_path / "a.replay", tmp_path / "killed.replay"
    arena = TrajectoryStore(path, 4096, ROWS)
    kept: list[int] = []  # in order of commit
    doubtful: list[int] = []  # of these, what a commit or an end is under way for
    num_moments = 0

    def killed() -> None:
        nonlocal num_moments
        if rng.random() > 0.1:
            return
        num_moments += 1
        shutil.copyfile(path, copied)
        later = TrajectoryStore(copied, 4096, ROWS)
        found = {t.ticket_id: t for t in later.recovered()}
        assert list(found) == [ticket_id for ticket_id in kept if ticket_id in found]
        assert {*kept} - {*doubtful} <= found.keys()
        assert all(contents(trajectory) == contents(make(i, 20)) for i, trajectory in found.items())
        # It goes on, and no space is lost.
        commit(later, [make(10_000, 20)])
        later.end([*found, 10_000])
        found.clear()
        assert is_whole(later)

    held: dict[int, Trajectory] = {}
    for turn in range(40):
        batch = [make(3 * turn + i, 20) for i in range(rng.randint(1, 3))]
        doubtful = [t.ticket_id for t in batch]
        kept += doubtful
        with at_each_line_of(trajectory_store, killed):
            new = {t.ticket_id: t for t in commit(arena, batch)}
        held |= new
        kept = [ticket_id for ticket_id in kept if ticket_id in held]
        new.clear()
        doubtful = rng.sample(kept, min(len(kept), rng.randint(0, 3)))
        with at_each_line_of(trajectory_store, killed):
            arena.end(doubtful)
        kept = [ticket_id for ticket_id in kept if ticket_id not in doubtful]
        held = {ticket_id: held[ticket_id] for ticket_id in kept}
        doubtful = []
    assert num_moments > 100


# --- files that are not as they should be


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_damaged_record_is_left_out_and_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    commit(arena, [make(i, 20) for i in range(3)])
    row = next(row for row in index_of(path) if row[0] == COMMITTED and row[4] == sorted(index_of(path)[:, 4])[-2])
    damage(path, RECORDS_AT + 8 * int(row[1]) + 200)
    with caplog.at_level(logging.WARNING):
        later = TrajectoryStore(path, CAPACITY, ROWS)
    recovered = later.recovered()
    assert len(recovered) == 2 and "damaged" in caplog.text and "checksum" in caplog.text
    for trajectory in recovered:
        assert contents(trajectory) == contents(make(trajectory.ticket_id, 20))
    later.end([0, 1, 2])
    recovered.clear()
    trajectory = None  # type: ignore[assignment]
    assert is_whole(later)


@pytest.mark.parametrize(
    ("column", "value"),
    [(1, v) for v in (-8, 3, 2**40, 2**63 - 1, -(2**63), CAPACITY // 8 - 8, CAPACITY // 8 - 1)]
    + [(2, v) for v in (0, -1, 1, 10, 12, 2**40, 2**63 - 1)]
    + [(3, v) for v in (0, -1)]
    + [(4, v) for v in (-1, 2**62, 2**63 - 1)],
)
def test_a_damaged_row_of_the_index_is_left_out(path: Path, column: int, value: int) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    commit(arena, [make(i, 20) for i in range(3)])
    rows = index_of(path)
    victim = int(np.argmax(rows[:, 4] * (rows[:, 0] == COMMITTED)))
    rows[victim, column] = value
    later = TrajectoryStore(path, CAPACITY, ROWS)
    recovered = later.recovered()
    assert [t.ticket_id for t in recovered] == [0, 1]
    later.end([0, 1, 2])
    recovered.clear()
    assert is_whole(later)
    assert len(commit(later, [make(5, 20)])) == 1


def test_a_row_that_names_zeros_or_an_offset_within_a_record_is_left_out(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    commit(arena, [make(0, 20)])
    rows = index_of(path)
    used = np.flatnonzero(rows[:, 0] == COMMITTED)[0]
    free = np.flatnonzero(rows[:, 0] == 0)
    rows[free[0], :5] = (COMMITTED, CAPACITY // 8 - 1, 1, 0, 7)  # one word of zero has the checksum 0
    rows[free[1], :5] = rows[used, :5]  # the same record twice
    rows[free[2], :5] = rows[used, :5]
    rows[free[2], 1] += 1
    later = TrajectoryStore(path, CAPACITY, ROWS)
    recovered = later.recovered()
    assert [t.ticket_id for t in recovered] == [0]
    later.end([0])
    recovered.clear()
    assert is_whole(later)


def test_a_file_of_other_sizes_is_refused_and_left_as_it_is(path: Path) -> None:
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    commit(arena, [make(0, 20)])
    data = path.read_bytes()
    for capacity, max_records in [(CAPACITY + 64, ROWS), (CAPACITY - 64, ROWS), (CAPACITY, 2 * ROWS), (CAPACITY, 63)]:
        with pytest.raises(ArenaError, match="other sizes"):
            TrajectoryStore(path, capacity, max_records)
    assert path.read_bytes() == data
    for broken in (b"x" * 100, b"x" * len(data), data[:-1], data + b"\0"):
        path.write_bytes(broken)
        with pytest.raises(ArenaError, match="other sizes"):
            TrajectoryStore(path, CAPACITY, ROWS)


@pytest.mark.parametrize("size", [0, RECORDS_AT + CAPACITY])
def test_a_maker_that_was_killed_half_way_leaves_nothing_that_must_be_cleared_away(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    arena = TrajectoryStore(path, CAPACITY, ROWS)
    assert arena.recovered() == []
    assert contents(commit(arena, [make(1)])[0]) == contents(make(1))


def test_no_room_on_the_file_system_is_a_clear_error(path: Path) -> None:
    with pytest.raises(ArenaError, match=r"replay\.capacity_mb"):
        TrajectoryStore(path, 1 << 60, ROWS)
    assert not path.exists()
