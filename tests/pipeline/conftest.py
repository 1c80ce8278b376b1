"""Fixtures of several files of these tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_llm.pipeline.shm.run_directory import RunDirectory
from tests.pipeline.pair import Listener, Pair


@pytest.fixture
def run_dir() -> Iterator[RunDirectory]:
    # Not tmp_path: socket paths must be short.
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        yield run


@pytest.fixture
def pair(run_dir: RunDirectory) -> Iterator[Pair]:
    pair = Pair(run_dir)
    yield pair
    pair.close()
    kept = set(run_dir.path.glob("learner-0.*"))  # until the run is over
    assert run_dir.path / "learner-0.sock" not in kept
    assert set(run_dir.path.iterdir()) == kept | {run_dir.path / "clock"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.socket.close(0)
    listener.context.destroy(linger=0)
