"""Groups that wait for members, in a learner that goes on from a checkpoint: each episode is counted once."""

from collections.abc import Mapping
from typing import Any

from impala_llm.config import load
from impala_llm.learning.batch_source import BatchSource
from impala_llm.learning.checkpoints.past import dealt
from impala_llm.pipeline.tickets.curriculum import Curriculum
from impala_llm.pipeline.tickets.journal_rows import account
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.trajectory import Trajectory
from tests.learning.test_batch_source import BATCH, GROUP, PlayedReceiver, members


def make_source(known: Mapping[str, Any] | None = None) -> tuple[BatchSource, PlayedReceiver, Curriculum]:
    config = load(["experiment=toy", f"learner.batch_size={BATCH}", f"algorithm.group_size={GROUP}"])
    receiver, curriculum = PlayedReceiver(), Curriculum({0: ""}, 0.1, 0, known)
    return BatchSource(config, receiver, BATCH, 0, curriculum), receiver, curriculum  # type: ignore[arg-type]


def counts(curriculum: Curriculum) -> list[int]:
    return curriculum.state_dict()["counts"]


def saved_with(arrived: list[Trajectory]) -> dict[str, Any]:
    """The state of a source for which these have come."""
    source, receiver, curriculum = make_source()
    receiver.arriving = list(arrived)
    source.collect(version=0, timeout_s=0.0)
    assert counts(curriculum) == [len(arrived)]
    return source.state_dict()


def test_members_of_open_groups_are_counted_once_and_their_groups_go_on() -> None:
    """A member that came after the state was saved has not been counted. The metrics have none: no step had ended."""
    before, since = members(0)[:2], members(0)[2:3]
    state = saved_with(before)
    source, receiver, curriculum = make_source(state["curriculum"])
    source.load_state_dict(state, {t.unroll_id: t for t in (*since, *before)}, version=0)
    assert counts(curriculum) == [3]
    assert [t.unroll_id for t in source.received] == [t.unroll_id for t in (*before, *since)]
    receiver.arriving = members(0)[3:] + members(1)
    assert [t.ticket_id for t in source.next_batch(version=0).trajectories] == list(range(BATCH))  # type: ignore[union-attr]


def test_an_open_group_that_another_rank_takes_over_is_not_counted_again() -> None:
    """Groups 0 and 1 of one rank become those of two."""
    arrived = {rank: members(rank)[:2] for rank in (0, 1)}
    state = {
        "rows": account(TaskOrder(range(50), GROUP, seed=0), [], 0),
        "held": [],
        "random": {},
        "states": {"trainer": {"rewards": {"first": []}}, "meters": {"begun": []}},
        "batches": saved_with([*arrived[0], *arrived[1]]),
    }
    for rank, mine in arrived.items():
        past = dealt([state], rank, num_ranks=2)["batches"]
        source, _, curriculum = make_source(past["curriculum"])
        source.load_state_dict(past, {t.unroll_id: t for t in mine}, version=0)
        assert counts(curriculum) == [4] and source.received == mine
