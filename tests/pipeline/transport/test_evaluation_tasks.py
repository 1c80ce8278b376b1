"""Tasks of an evaluation: which actor gets which, whose results count, and when it ends."""

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.transport.evaluation_tasks import MAX_ATTEMPTS, RESEND_S, Evaluation, EvaluationTasks
from impala_llm.pipeline.transport.messages import EvaluationFailed, EvaluationGrant, EvaluationResult

ID = 7


def begun(num_tasks: int = 4, version: int = 3, timeout_s: float = 100.0) -> EvaluationTasks[str]:
    tasks: EvaluationTasks[str] = EvaluationTasks()
    tasks.begin(ID, version, range(num_tasks), 0.0, timeout_s)
    return tasks


def result(task_id: int, score: float = 1.0, evaluation_id: int = ID, versions: tuple[int, int] = (3, 4)) -> Any:
    return EvaluationResult(evaluation_id, task_id, score, score == 1.0, 20, 2, *versions)


def of(told: dict[str, EvaluationGrant]) -> dict[str, tuple[int, ...]]:
    return {actor: grant.task_ids for actor, grant in told.items()}


def test_tasks_are_dealt_evenly_up_to_what_actors_want_and_more_as_results_come() -> None:
    tasks = begun(5)
    told = tasks.deal({"a": 2, "b": 1, "c": 0}, now=0.0)
    assert told == {"a": EvaluationGrant(ID, 3, 0.0, (0, 2)), "b": EvaluationGrant(ID, 3, 0.0, (1,))}
    assert tasks.deal({"a": 2, "b": 1, "c": 0}, now=1.0) == {}
    assert tasks.answered("a", result(0))
    assert of(tasks.deal({"a": 2, "b": 1}, now=2.0)) == {"a": (2, 3)}
    for actor, task_id in (("b", 1), ("a", 3), ("a", 2)):
        assert tasks.answered(actor, result(task_id, 0.0))
    assert tasks.ended(3.0) is None
    assert of(tasks.deal({"a": 2, "b": 1}, now=3.0)) == {"a": (4,), "b": ()}
    assert tasks.answered("a", result(4))
    assert tasks.ended(4.5) == Evaluation(3, 5, tuple(result(i, float(i in (0, 4))) for i in range(5)), 4.5)
    assert tasks.ended(4.5) is None and not tasks.is_under_way
    assert of(tasks.deal({"a": 2, "b": 1}, now=5.0)) == {"a": ()}
    assert tasks.deal({"a": 2, "b": 1}, now=50.0) == {}


def test_tasks_of_a_lost_actor_are_dealt_to_another_and_its_late_results_do_not_count() -> None:
    tasks = begun(2)
    assert of(tasks.deal({"a": 2, "b": 0}, now=0.0)) == {"a": (0, 1)}
    assert of(tasks.deal({"b": 2}, now=1.0)) == {"b": (0, 1)}
    assert not tasks.answered("a", result(0, 0.25))
    assert tasks.answered("b", result(0, 0.5)) and tasks.answered("b", result(1, 0.5))
    ended = tasks.ended(2.0)
    assert ended is not None and [r.score for r in ended.results] == [0.5, 0.5]


def test_an_actor_that_wants_none_any_more_is_told_that_it_has_none() -> None:
    tasks = begun(1)
    tasks.deal({"a": 1}, now=0.0)
    assert of(tasks.deal({"a": 0, "b": 1}, now=1.0)) == {"b": (0,), "a": ()}


def test_what_an_actor_has_is_said_again_after_a_while() -> None:
    tasks = begun(1)
    assert of(tasks.deal({"a": 1}, now=0.0)) == {"a": (0,)}
    assert tasks.deal({"a": 1}, now=RESEND_S - 0.1) == {}
    assert of(tasks.deal({"a": 1}, now=RESEND_S)) == {"a": (0,)}
    assert tasks.deal({"a": 1}, now=RESEND_S + 0.1) == {}


def test_results_that_were_not_awaited_change_nothing() -> None:
    tasks = begun(2)
    assert not tasks.answered("a", result(0)), "it was dealt to nobody"
    tasks.deal({"a": 1, "b": 1}, now=0.0)
    assert not tasks.answered("b", result(0)), "it is another's"
    assert not tasks.answered("a", result(99)), "there is no such task"
    assert not tasks.answered("a", result(0, evaluation_id=ID + 1)), "of another evaluation"
    assert tasks.answered("a", result(0, 0.5))
    assert not tasks.answered("a", result(0, 1.0)), "it came before"
    assert not tasks.failed("a", EvaluationFailed(ID, 0, "late")), "it came before"
    assert tasks.answered("b", result(1, 0.5))
    ended = tasks.ended(1.0)
    assert ended is not None and [r.score for r in ended.results] == [0.5, 0.5]
    assert not tasks.answered("a", result(0)), "it is over"


def test_a_result_of_older_weights_than_were_asked_for_is_played_again() -> None:
    tasks = begun(1, version=3)
    tasks.deal({"a": 1}, now=0.0)
    assert not tasks.answered("a", result(0, versions=(2, 3)))
    tasks.deal({"a": 1}, now=0.0)
    assert tasks.answered("a", result(0, versions=(3, 3)))


def test_a_task_that_fails_again_and_again_is_given_up() -> None:
    tasks = begun(2)
    for attempt in range(MAX_ATTEMPTS):
        tasks.deal({"a": 1} if attempt else {"a": 1, "b": 1}, now=float(attempt))
        if attempt == 0:
            assert tasks.answered("b", result(1))
        assert tasks.failed("a", EvaluationFailed(ID, 0, "no luck"))
    assert tasks.deal({"a": 1}, now=9.0) == {"a": EvaluationGrant(ID, 3, 0.0, ())}
    assert tasks.ended(9.0) == Evaluation(3, 2, (result(1),), 9.0)


def test_a_task_that_failed_at_one_actor_is_tried_by_another() -> None:
    """Also where the other one has all that it wants for now."""
    tasks = begun(num_tasks=3)
    wants = {"bad": 1, "good": 2}
    dealt = of(tasks.deal(wants, 0.0))
    (task_id,) = dealt["bad"]
    assert tasks.failed("bad", EvaluationFailed(ID, task_id, "broken"))
    assert of(tasks.deal(wants, 1.0)) == {"bad": ()}
    assert tasks.answered("good", result(dealt["good"][0]))
    assert of(tasks.deal(wants, 2.0)) == {"good": (dealt["good"][1], task_id)}


def test_a_task_that_ends_its_actors_is_given_up() -> None:
    tasks = begun(1)
    for number in range(MAX_ATTEMPTS):
        assert of(tasks.deal({f"actor {number}": 1}, now=0.0)) == {f"actor {number}": (0,)}
    assert tasks.deal({"last": 1}, now=0.0) == {}
    assert tasks.ended(0.0) == Evaluation(3, 1, (), 0.0)


def test_the_time_counts_from_the_first_task_dealt_and_what_came_by_then_counts() -> None:
    tasks = begun(2, timeout_s=10.0)
    assert tasks.ended(1000.0) is None
    tasks.deal({}, now=1000.0)
    tasks.deal({"a": 2}, now=2000.0)
    assert tasks.answered("a", result(1))
    assert tasks.ended(2009.9) is None
    assert tasks.ended(2010.0) == Evaluation(3, 2, (result(1),), 10.0)


def test_a_second_evaluation_begins_after_the_first_has_ended() -> None:
    tasks = begun(1)
    with pytest.raises(ValueError, match="under way"):
        tasks.begin(8, 4, [0], 0.0, 1.0)
    tasks.deal({"a": 1}, now=0.0)
    tasks.answered("a", result(0))
    tasks.ended(0.0)
    tasks.begin(8, 4, [0], 0.5, 1.0)
    assert tasks.deal({"a": 1}, now=0.0) == {"a": EvaluationGrant(8, 4, 0.5, (0,))}
    assert not tasks.answered("a", result(0, evaluation_id=ID, versions=(9, 9)))
    assert tasks.answered("a", dataclasses.replace(result(0, evaluation_id=8), first_version=4))


ACTORS = ["a", "b", "c"]


@settings(deadline=None)
@example([("b", 4, 3), ("b", 1, 2), ("b", 1, 2)])  # the only task of b fails, and is dealt to b again
@given(st.lists(st.tuples(st.sampled_from(ACTORS), st.integers(-1, 6), st.integers(0, 5)), max_size=60))
def test_whatever_actors_do_each_task_counts_once_and_the_evaluation_ends(steps: list[tuple[str, int, int]]) -> None:
    """action 0: its want is zero from now on; 1: it wants three; 2: it fails; else: a result."""
    tasks, wants, had = begun(6, timeout_s=1000.0), dict.fromkeys(ACTORS, 2), {a: () for a in ACTORS}
    counted: list[int] = []
    for now, (actor, task_id, action) in enumerate(steps):
        had |= of(tasks.deal(wants, float(now)))  # type: ignore[arg-type]
        assert all(len(had[a]) <= 3 for a in ACTORS)
        everywhere = [t for a in ACTORS for t in had[a]]
        assert len(everywhere) == len(set(everywhere)), "no task is at two actors"
        if action < 2:
            wants[actor] = 3 * action
        elif action == 2:
            assert tasks.failed(actor, EvaluationFailed(ID, task_id, "x")) == (task_id in had[actor])
        elif tasks.answered(actor, result(task_id)):
            assert task_id in had[actor]
            counted.append(task_id)
        had[actor] = tuple(t for t in had[actor] if action < 2 or t != task_id)
    ended = tasks.ended(1e9) if steps else None
    if ended is not None:
        assert sorted(r.task_id for r in ended.results) == sorted(counted) and len(set(counted)) == len(counted)
