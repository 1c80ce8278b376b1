"""Indices and servers of actors: no two supervisors of a host have the same one."""

import errno
import os
import random
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from impala_llm.pipeline.shm import actor_claims
from impala_llm.pipeline.shm.actor_claims import claimed_indices, claimed_servers


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the claims of a test are that has shared memory of its own."""
    monkeypatch.setattr(actor_claims, "shared_memory", lambda: tmp_path)
    return tmp_path / f"impala_llm-{os.getuid()}.claims"


def test_a_second_supervisor_counts_on_and_what_ended_is_free_again() -> None:
    run, other = uuid.uuid4().hex, uuid.uuid4().hex
    with claimed_indices(run, 1) as first, claimed_indices(run, 2) as second, claimed_indices(other, 1) as elsewhere:
        assert (first, second, elsewhere) == ([0], [1, 2], [0])
    with claimed_indices(run, 1) as third:
        assert third == [0]


def test_the_indices_of_a_supervisor_follow_one_another() -> None:
    """So no two of its n actors have the same remainder by n, by which servers are dealt."""
    run = uuid.uuid4().hex
    with ExitStack() as stack:
        with claimed_indices(run, 1):
            assert stack.enter_context(claimed_indices(run, 1)) == [1]
        with claimed_indices(run, 2) as pair, claimed_indices(run, 1) as alone:
            assert (pair, alone) == ([2, 3], [0])


def test_a_server_that_other_actors_use_is_named_until_they_have_ended() -> None:
    mine, other = (f"http://{uuid.uuid4().hex}:30000" for _ in range(2))
    with claimed_servers([mine]) as first, claimed_servers([other, f"{mine}/"]) as second:
        assert (first, second) == ([], [f"{mine}/"])
    with claimed_servers([mine, other]) as third:
        assert third == []


def test_a_server_is_the_same_in_all_spellings_of_its_url() -> None:
    port = random.randrange(1, 2**16)
    spellings = [
        f"{host}:{port}" for host in ("http://127.0.0.1", "http://localhost", "HTTP://LOCALHOST", "http://[::1]")
    ]
    spellings.append(f"http://localhost:{port}/v1/")
    for spelling in spellings:
        with claimed_servers([spelling]) as first, claimed_servers(spellings) as second:
            assert (first, second) == ([], spellings)
    with claimed_servers(spellings) as taken:
        assert taken == [], "no claim stands in the way of another one of the same command"


def test_claims_leave_nothing_behind(folder: Path) -> None:
    with claimed_indices("run", 2), claimed_servers(["http://a:30000"]):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600] * 3
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_not_followed_and_stops_no_run(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with claimed_indices("run", 2) as indices, claimed_servers(["http://a:30000"]) as taken:
        assert (indices, taken) == ([0, 1], [])
    assert list((tmp_path / "elsewhere").iterdir()) == []
    [said] = caplog.messages
    assert said.startswith(f"{folder} is not a directory of user {os.getuid()}: ")
    assert "may use the same servers of engine.urls" in said and "root" in said


@pytest.mark.parametrize("code", [errno.EPERM, errno.EROFS])
def test_where_no_file_can_be_made_everything_is_free(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with claimed_indices("run", 2) as indices, claimed_servers(["http://a:30000"]) as taken:
        assert (indices, taken) == ([0, 1], [])
    assert not folder.exists()
