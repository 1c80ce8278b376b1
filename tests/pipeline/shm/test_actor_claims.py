"""Indices of actors: no two supervisors of a host have the same one."""

import uuid

from impala_llm.pipeline.shm.actor_claims import claimed_indices


def test_a_second_supervisor_counts_on_and_what_ended_is_free_again() -> None:
    run, other = uuid.uuid4().hex, uuid.uuid4().hex
    with claimed_indices(run, 1) as first, claimed_indices(run, 2) as second, claimed_indices(other, 1) as elsewhere:
        assert (first, second, elsewhere) == ([0], [1, 2], [0])
    with claimed_indices(run, 1) as third:
        assert third == [0]
