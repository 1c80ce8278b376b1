"""A trajectory gets arrays of any kind by lines in trajectory.py alone: the record and its checks follow.

The package is copied with further fields, and a process that imports the copy runs the checks below.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import impala_llm
from impala_llm.pipeline.shm.record import MAGIC

PACKAGE = Path(impala_llm.__file__).parent

CHECKS = """
    import itertools
    import numpy as np
    from impala_llm.pipeline.shm import copy_kernels, record, record_kernels
    from impala_llm.pipeline.shm.record_layout import FACTS
    from impala_llm.trajectory import ARRAY_FIELDS, Trajectory, TrajectoryError, block_views

    def made(num_tokens, num_turns, **changes):
        mask = np.zeros(num_tokens, bool)
        mask[1 : 2 * num_turns + 1 : 2] = True
        turns = np.array([[i, i + 1] for i in range(1, 2 * num_turns + 1, 2)], np.int32)
        arrays = {
            "tokens": np.arange(num_tokens, dtype=np.int32),
            "action_mask": mask,
            "behaviour_log_probs": np.where(mask, -0.5, 0).astype(np.float32),
            "versions": np.where(mask, 3, -1).astype(np.int32),
            "rewards": np.zeros(num_tokens, np.float32),
            "turns": turns,
            "surprise": np.linspace(0, 1, num_tokens, dtype=np.float32),
            "seen": np.arange(num_tokens) % 3 == 0,
            "turn_value": np.linspace(2, 3, num_turns, dtype=np.float32),
            "turn_choice": np.arange(3 * num_turns, dtype=np.int32).reshape(-1, 3),
            "turn_good": np.arange(num_turns) % 2 == 0,
        }
        return Trajectory(
            **arrays | changes, ticket_id=1, group_id=0, task_id=0, episode_id="e", env="toy", actor_id="a",
            score=0.0, bootstrap=False, success=False,
        )

    def outcomes(data):
        words = np.frombuffer(data, np.uint64)
        checksum = np.array([copy_kernels.checksum(words)], np.uint64).view(np.int64)[0]
        rows, starts = np.array([[0, 0, 0, len(words), checksum]], np.int64), np.zeros(1, np.int64)
        for large in (0, 1 << 40):
            facts, target = np.zeros((1, FACTS), np.int64), np.empty(len(words), np.uint64)
            rules = record.MAGIC, record.MAX_TOKENS, record.MAX_STATS, record.MAX_TEXT_BYTES, 1000, large
            record_kernels.take_records(words, rows, target, starts, *rules, facts)
            yield facts[0, 0]

    def refused(data, text):
        assert set(outcomes(data)) == {record_kernels.INVALID}
        try:
            record.decode_record(data)
        except record.RecordError as error:
            assert text in str(error), error
        else:
            raise AssertionError("it was decoded")

    for num_tokens, num_turns in itertools.product(range(9, 14), range(1, 5)):
        trajectory = made(num_tokens, num_turns)
        data = record.record_bytes(trajectory)
        assert set(outcomes(data)) == {record_kernels.COPIED}
        decoded = record.decode_record(data)
        for name in ARRAY_FIELDS:
            assert getattr(decoded, name).tolist() == getattr(trajectory, name).tolist(), name
        for name in ("surprise", "turn_value", "seen", "turn_good"):
            changed = bytearray(data)
            block = np.frombuffer(changed, np.uint64)[len(data) // 8 - len(trajectory.block) :]
            array = block_views(block, num_tokens, num_turns)[name]
            if array.dtype == bool:
                array.view(np.uint8)[-1] = 2
                refused(changed, f"{name} holds a byte that is neither 0 nor 1")
            else:
                array[-1] = np.nan
                refused(changed, f"{name} holds a value that is not finite")

    for name, value, text in [
        ("surprise", np.zeros(3, np.float32), "surprise has length 3, tokens has 9"),
        ("turn_value", np.zeros(2, np.float32), "turn_value has length 2, turns has 1"),
        ("turn_choice", np.zeros((1, 2), np.int32), "turn_choice has shape [1, 2]: [1, 3] is expected"),
        ("turn_good", np.zeros(1, np.int32), "turn_good has dtype int32: bool is expected"),
    ]:
        try:
            made(9, 1, **{name: value})
        except TrajectoryError as error:
            assert text in str(error), error
        else:
            raise AssertionError(name)
"""


def copied(folder: Path, token_fields: str = "", turn_fields: str = "", attributes: str = "") -> Path:
    """A folder with a copy of the package that has these lines more in the tables and among the attributes."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / PACKAGE.name / "trajectory.py"
    source = path.read_text()
    for old, new in (
        ('    "action_mask": np.dtype(np.bool_),\n', f'    "action_mask": np.dtype(np.bool_),\n{token_fields}'),
        ('{"turns": np.dtype((np.int32, 2))}', f'{{{turn_fields}"turns": np.dtype((np.int32, 2))}}'),
        ("    ticket_id: int\n", f"{attributes}    ticket_id: int\n"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    path.write_text(source)
    return folder


def run(program: str, folder: Path) -> str:
    """Return the output of a program that imports the package of this folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def magic(folder: Path) -> int:
    """First word of the records of a package."""
    return int(run("from impala_llm.pipeline.shm.record import MAGIC; print(MAGIC)", folder))


def test_records_of_a_package_with_another_array_begin_with_another_word(tmp_path: Path) -> None:
    found = {
        magic(copied(tmp_path / "token", token_fields='    "extra": np.dtype(np.bool_),\n')),
        magic(copied(tmp_path / "turn", turn_fields='"extra": np.dtype(np.bool_), ')),
        magic(copied(tmp_path / "pair", turn_fields='"extra": np.dtype((np.bool_, 2)), ')),
        magic(copied(tmp_path / "number", turn_fields='"extra": np.dtype(np.float32), ')),
        MAGIC,
    }
    assert len(found) == 5


def test_a_fifth_text_is_refused_at_the_import(tmp_path: Path) -> None:
    folder = copied(tmp_path, attributes="    tag: str\n")
    program = """
        try:
            import impala_llm.pipeline.shm.record
        except TypeError as error:
            print(error)
    """
    assert "a record has four, whose lengths share a word" in run(program, folder)


@pytest.mark.system
def test_added_arrays_travel_and_are_checked(tmp_path: Path) -> None:
    names = ("surprise", "seen", "turn_value", "turn_choice", "turn_good")
    folder = copied(
        tmp_path,
        token_fields='    "surprise": np.dtype(np.float32),\n    "seen": np.dtype(np.bool_),\n',
        turn_fields='"turn_value": np.dtype(np.float32), "turn_choice": np.dtype((np.int32, 3)), '
        '"turn_good": np.dtype(bool), ',
        attributes="".join(f"    {name}: np.ndarray\n" for name in names),
    )
    run(CHECKS, folder)
