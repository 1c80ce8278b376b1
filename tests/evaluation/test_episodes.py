"""Evaluation tasks at an actor: which it plays, and the results that it sends to the learner."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from impala_llm.actor import Actor
from impala_llm.config import load
from impala_llm.engines.base import EngineError, EngineStats, Generation, SamplingParams
from impala_llm.environment_faults import EnvironmentFaults
from impala_llm.envs import make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.evaluation.episodes import RESEND_S, EvaluationEpisodes, evaluation_slots
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.messages import EvaluationGrant, EvaluationResult, HelloWanted
from impala_llm.rollout import ChatFormat
from impala_llm.trajectory import Trajectory
from tests.pipeline.support import make_trajectory


class Rig:
    """Episodes that end when the test says so, and what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.began: list[int] = []
        self.ends: defaultdict[int, asyncio.Future[Trajectory | str]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )
        self.now = 0.0
        self.episodes = EvaluationEpisodes(self, self.play, lambda: self.now)

    def evaluated(self, result: EvaluationResult) -> None:
        self.sent.append(result)

    def evaluation_failed(self, evaluation_id: int, task_id: int, reason: str) -> None:
        self.sent.append((evaluation_id, task_id, reason))

    async def play(self, grant: EvaluationGrant, task_id: int) -> Trajectory | str:
        self.began.append(task_id)
        return await self.ends[task_id]

    async def end(self, task_id: int, outcome: Trajectory | str) -> None:
        self.ends.pop(task_id).set_result(outcome)
        await rest()


async def rest() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Callable[[Rig], Awaitable[None]]) -> None:
    async def body() -> None:
        await test(Rig())

    asyncio.run(body())


def grant(*task_ids: int, evaluation_id: int = 7, min_version: int = 0) -> EvaluationGrant:
    return EvaluationGrant(evaluation_id, min_version, 0.0, task_ids)


def test_tasks_are_played_in_order_while_there_are_slots_and_the_result_has_what_was_played() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(5, 6, 7))
        rig.episodes.start(slots=2, version=0)
        await rest()
        assert rig.began == [5, 6]
        episode = make_trajectory(version=3)
        await rig.end(6, episode)
        [result] = rig.sent
        assert (result.evaluation_id, result.task_id) == (7, 6)
        assert (result.score, result.success) == (episode.score, episode.success)
        assert (result.num_tokens, result.num_turns) == (episode.num_tokens, len(episode.turns))
        assert (result.first_version, result.last_version) == (3, 3)
        assert list(rig.episodes.running) == [5]
        rig.episodes.start(slots=1, version=0)
        await rest()
        assert rig.began == [5, 6, 7]
        rig.episodes.clear()

    run(test)


def test_weights_older_than_asked_for_play_nothing() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(1, min_version=4))
        rig.episodes.start(slots=8, version=3)
        assert not rig.episodes.running
        rig.episodes.start(slots=8, version=5)
        assert list(rig.episodes.running) == [1]
        rig.episodes.clear()

    run(test)


def test_a_task_named_again_is_not_played_again_and_its_result_is_sent_again() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(1, 2))
        rig.episodes.start(8, 0)
        await rest()
        await rig.end(1, make_trajectory())
        rig.episodes.update(grant(1, 2))
        assert len(rig.sent) == 1, "it is on its way"
        rig.now += RESEND_S
        for _ in range(2):
            rig.episodes.update(grant(1, 2))
        rig.episodes.start(8, 0)
        await rest()
        assert rig.began == [1, 2] and rig.sent[0] == rig.sent[1] and len(rig.sent) == 2
        rig.episodes.clear()

    run(test)


def test_a_task_that_is_not_named_any_more_is_stopped() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(1, 2, 3))
        rig.episodes.start(2, 0)
        await rest()
        ends = dict(rig.ends)
        rig.episodes.update(grant(2))
        await rest()
        assert ends[1].cancelled() and not ends[2].cancelled()
        assert list(rig.episodes.running) == [2] and rig.sent == []
        rig.episodes.start(2, 0)
        assert rig.began == [1, 2]
        rig.episodes.clear()

    run(test)


def test_a_failed_task_is_given_back_with_the_reason_and_played_again_if_it_is_named_again() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(1))
        rig.episodes.start(8, 0)
        await rest()
        await rig.end(1, "EngineError: it is down")
        assert rig.sent == [(7, 1, "EngineError: it is down")]
        rig.episodes.update(grant(1))
        rig.episodes.start(8, 0)
        await rest()
        assert rig.began == [1, 1]
        rig.episodes.clear()

    run(test)


def test_another_evaluation_of_the_same_tasks_plays_them_anew() -> None:
    async def test(rig: Rig) -> None:
        rig.episodes.update(grant(1, 2))
        rig.episodes.start(8, 0)
        await rest()
        await rig.end(1, make_trajectory())
        cancelled = rig.ends.pop(2)
        rig.episodes.update(grant(1, 2, evaluation_id=8))
        await rest()
        assert cancelled.cancelled() and len(rig.sent) == 1
        rig.episodes.start(8, 0)
        await rest()
        assert rig.began == [1, 2, 1, 2]
        rig.episodes.clear()

    run(test)


def actor_with(rig: Rig, max_episodes: int, share: float) -> Any:
    actor: Any = Actor.__new__(Actor)
    actor.config = load(
        [
            "experiment=toy",
            f"actor.max_episodes={max_episodes}",
            f"evaluation.run_share={share}",
            "evaluation.every_updates=1",
        ]
    )
    actor.engine = SimpleNamespace(version=0)
    actor.is_up, actor.running, actor.waiting = True, {}, rig.waiting  # type: ignore[attr-defined]
    actor.evaluation = rig.episodes

    async def play(ticket: Ticket) -> None:
        await rig.ends[1000 + ticket.ticket_id]

    actor.play = play
    return actor


@pytest.mark.parametrize(("max_episodes", "share", "most"), [(8, 0.25, 2), (8, 0.0, 1), (1, 0.5, 1), (6, 1.0, 6)])
def test_evaluation_takes_its_share_of_the_slots_and_training_all_others(
    max_episodes: int, share: float, most: int
) -> None:
    async def test(rig: Rig) -> None:
        rig.waiting = deque(Ticket(i, i, i, 0, 0) for i in range(20))  # type: ignore[attr-defined]
        actor = actor_with(rig, max_episodes, share)
        assert evaluation_slots(actor.config) == most
        rig.episodes.update(grant(*range(50)))
        actor.start_episodes()
        assert (len(rig.episodes.running), len(actor.running)) == (most, max_episodes - most)
        await rest()
        # Where nothing is to be evaluated any more, all slots are for training again.
        actor.handle(grant())
        actor.start_episodes()
        assert (len(rig.episodes.running), len(actor.running)) == (0, max_episodes)
        # An evaluation waits for slots: nothing that is played is stopped for it.
        actor.handle(grant(*range(50), evaluation_id=8))
        actor.start_episodes()
        assert (len(rig.episodes.running), len(actor.running)) == (0, max_episodes)
        for task in actor.running.values():
            task.cancel()

    run(test)


def test_a_failed_engine_and_another_learner_stop_what_is_evaluated() -> None:
    async def test(rig: Rig) -> None:
        wanted: list[int] = []
        actor: Any = Actor.__new__(Actor)
        actor.actor_id, actor.failed_starts, actor.evaluation = "actor-0", 0, rig.episodes
        actor.engine_restarts, actor.engine = 0, SimpleNamespace(stats=EngineStats)
        actor.channels = SimpleNamespace(
            request=lambda want: None, first=SimpleNamespace(request_evaluation=wanted.append)
        )
        actor.config = load(["experiment=toy"])
        for stop in (lambda: actor.engine_failed(EngineError("gone")), lambda: actor.handle(HelloWanted())):
            actor.is_up = False
            rig.episodes.update(grant(1, 2))
            rig.episodes.start(1, 0)
            stop()
            rig.episodes.start(8, 0)
            assert not rig.episodes.running
        assert wanted == [0]

    run(test)


class FirstLetter:
    """An engine that answers with the letter that it is shown, and keeps what it was asked for."""

    version = 3

    def __init__(self) -> None:
        self.params: list[SamplingParams] = []

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        self.params.append(params)
        tokens = np.array([prompt[-2], params.stop_token_ids[0]], np.int32)
        return Generation(tokens, np.zeros(2, np.float32), np.full(2, self.version, np.int32), "stop")

    def release(self, session_id: str) -> None: ...


def player(tmp_path: Path) -> Any:
    """An actor that plays evaluation tasks."""
    actor: Any = Actor.__new__(Actor)
    actor.config = load(["experiment=toy", f"run.dir={tmp_path}", "engine.temperature=0.7"])
    actor.actor_id, actor.episodes, actor.engine = "actor-0", 0, FirstLetter()
    actor.faults, actor.evaluation_faults, actor.failure = EnvironmentFaults(20.0), EnvironmentFaults(20.0), None
    actor.suite = make_suite(actor.config.env)
    actor.chat = ChatFormat.of(resolve_policy(actor.config), "")
    return actor


def test_an_evaluation_task_is_sampled_as_the_learner_says_and_is_no_training(tmp_path: Path) -> None:
    actor = player(tmp_path)
    suite = actor.suite
    trainings: list[bool] = []

    def session(training: bool) -> Any:
        trainings.append(training)
        return suite.session(training)

    def signature(task_id: int) -> str:
        if task_id == 99:
            raise KeyError("no such task")
        return suite.signature(task_id)

    actor.suite = SimpleNamespace(name=suite.name, session=session, signature=signature)
    episode = asyncio.run(actor.play_evaluation(EvaluationGrant(7, 0, 0.0, (5,)), 5))
    assert (episode.task_id, episode.score, set(episode.versions[episode.action_mask])) == (5, 1.0, {3})
    asyncio.run(actor.play_evaluation(EvaluationGrant(7, 0, 0.25, (5,)), 5))
    assert [(p.greedy, p.temperature) for p in actor.engine.params] == [(True, 1.0), (False, 0.25)]
    assert trainings == [False, False]
    assert "no such task" in asyncio.run(actor.play_evaluation(EvaluationGrant(7, 0, 0.0, (99,)), 99))


def test_faults_of_evaluation_tasks_end_no_actor_and_their_success_hides_no_faults_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EnvironmentFaults, "MAX_DELAY_S", 0.0)
    actor = player(tmp_path)
    actor.faults.num_in_a_row = 1
    asyncio.run(actor.play_evaluation(EvaluationGrant(7, 0, 0.0, (5,)), 5))
    assert actor.faults.num_in_a_row == 1

    def session(training: bool) -> Any:
        raise EnvironmentFault("the validation split is missing")

    actor.suite = SimpleNamespace(name="toy", session=session, signature=actor.suite.signature)
    capsys.readouterr()
    for _ in range(EnvironmentFaults.MOST_IN_A_ROW + 1):
        reason = asyncio.run(actor.play_evaluation(EvaluationGrant(7, 0, 0.0, (5,)), 5))
        assert reason == "the validation split is missing"
    assert actor.failure is None and actor.faults.num_in_a_row == 1
    assert capsys.readouterr().err.count("EnvironmentFault: the validation split is missing") == 1
