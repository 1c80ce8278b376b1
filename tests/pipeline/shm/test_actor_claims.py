"""Indices and servers of actors: no two supervisors of a host have the same one."""

import errno
import os
import socket
import uuid
from contextlib import ExitStack

import pytest

from impala_llm.pipeline.shm.actor_claims import claimed_indices, claimed_servers


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


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
def test_where_no_name_can_be_bound_everything_is_free(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with claimed_indices("run", 2) as indices, claimed_servers(["http://a:30000"]) as taken:
        assert (indices, taken) == ([0, 1], [])
