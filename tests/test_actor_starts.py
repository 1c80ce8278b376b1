"""Starts of an actor: waiting tickets that it takes, orders to end that are failures, failed starts that are final."""

import asyncio
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from impala_llm.actor import Actor
from impala_llm.config import load
from impala_llm.engines.base import EngineError, EngineStats, ModelRefused, ServerUnfit
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.messages import RUN_OVER, HelloWanted, Shutdown, WeightsAnnounced


def test_a_ticket_that_waits_for_newer_weights_does_not_hold_up_those_behind_it() -> None:
    async def started(version: int, slots: int) -> list[int]:
        actor: Any = Actor.__new__(Actor)
        actor.config = SimpleNamespace(actor=SimpleNamespace(max_episodes=slots))
        actor.engine = SimpleNamespace(version=version)
        actor.is_up, actor.running = True, {}
        actor.waiting = deque(Ticket(i, 0, i, 0, min_version) for i, min_version in enumerate([0, 2, 0, 1]))

        async def play(ticket: Ticket) -> None:
            await asyncio.sleep(0)

        actor.play = play
        actor.start_episodes()
        tickets = list(actor.running)
        assert sorted([*tickets, *(ticket.ticket_id for ticket in actor.waiting)]) == [0, 1, 2, 3]
        await asyncio.gather(*actor.running.values())
        return tickets

    assert asyncio.run(started(version=0, slots=8)) == [0, 2]
    assert asyncio.run(started(version=2, slots=3)) == [0, 1, 2]


@pytest.mark.parametrize(("reason", "failure"), [(RUN_OVER, "None"), ("no arena", "ActorRefused('no arena')")])
def test_a_refused_actor_fails_and_one_whose_run_is_over_does_not(reason: str, failure: str) -> None:
    """Within a run what fails is started again."""
    actor: Any = Actor.__new__(Actor)
    actor.failure = None
    actor.handle(Shutdown(reason))
    assert actor.stopping and repr(actor.failure) == failure


@pytest.mark.parametrize(
    ("error", "episodes", "ends"),
    [
        (ServerUnfit("engine.python=x has no sglang installed"), 0, True),
        (ServerUnfit("engine.python=x did not answer"), 1, False),  # known to work, since it has played
        (EngineError("http://a:1 did not answer for 600 s"), 0, False),
        (ModelRefused("differs by 0.1 nats"), 1, True),
    ],
)
def test_an_actor_ends_where_no_further_start_of_its_engine_can_do_better(
    error: EngineError, episodes: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start() -> None:
        raise error

    actor: Any = Actor.__new__(Actor)
    actor.actor_id, actor.episodes, actor.failure, actor.is_up = "actor-0", episodes, None, False
    actor.failed_starts = actor.engine_restarts = 0
    actor.board = SimpleNamespace(latest=lambda: 0)
    actor.channels = SimpleNamespace(request=lambda want: None)
    actor.engine = SimpleNamespace(start=start, stats=EngineStats)
    asyncio.run(actor.start_engine())
    assert actor.failure is (error if ends else None) and not actor.is_up
    assert (f"{error}; again in" in capsys.readouterr().err) is not ends


class Refusing:
    """Engine without weights that refuses so many loads."""

    version, failure = -1, None

    def __init__(self, error: EngineError, refusals: int) -> None:
        self.error, self.refusals = error, refusals

    async def load_shared(self, lease: Any) -> None:
        if self.refusals:
            self.refusals -= 1
            raise self.error
        self.version = lease.version


def actor_that_loads(engine: Refusing) -> Any:
    actor: Any = Actor.__new__(Actor)
    actor.actor_id, actor.config, actor.engine = "actor-0", load(["experiment=toy"]), engine
    actor.board = SimpleNamespace(latest=lambda: 0, lease=lambda: nullcontext(SimpleNamespace(version=0)))
    actor.is_up, actor.num_new_learners, actor.announced, actor.loading, actor.failure = True, 0, 0, None, None
    actor.waiting, actor.running = deque([Ticket(1, 0, 1, 0, 0)]), {}
    return actor


def test_weights_that_were_refused_once_are_loaded_again_without_another_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None comes where the learner waits for episodes of these weights."""
    monkeypatch.setattr("impala_llm.actor.LOAD_PAUSE_S", 0.0)

    async def main() -> None:
        actor = actor_that_loads(Refusing(EngineError("http://a:1 answered 503"), refusals=2))
        played = asyncio.Event()

        async def play(ticket: Ticket) -> None:
            played.set()

        actor.play = play
        while not played.is_set():
            actor.tend_engine()  # as the actor does whenever it has looked for messages
            await asyncio.sleep(0)
        assert (actor.engine.version, actor.failure) == (0, None)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_servers_that_could_not_be_reclaimed_once_are_reclaimed_without_another_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have weights already, of the version that was announced, but perhaps not in full. Another learner that comes
    while they are reclaimed may have left them so again."""
    monkeypatch.setattr("impala_llm.actor.LOAD_PAUSE_S", 0.0)
    tried = []

    async def main() -> None:
        async def reclaim(lease: Any) -> None:
            tried.append(lease.version)
            if len(tried) < 3:
                raise EngineError("http://a:1 answered 503")
            if len(tried) == 3:
                actor.handle(HelloWanted())

        engine = type("Fed", (SGLangEngine,), {"__init__": lambda _: None, "failure": None})
        actor = actor_that_loads(engine())
        actor.engine.version, actor.engine.reclaim = 0, reclaim
        actor.config.engine.transfer, actor.evaluation, actor.waiting = "distributed", None, deque()
        actor.handle(HelloWanted())
        for _ in range(50):
            actor.tend_engine()
            await asyncio.sleep(0)
        assert (tried, actor.failure) == ([0] * 4, None)

    asyncio.run(main())


def test_an_actor_whose_model_is_not_the_learners_ends() -> None:
    """It would take tickets and play none."""

    async def main() -> None:
        error = ModelRefused("the weights are not of this engine's model")
        actor = actor_that_loads(Refusing(error, refusals=1))
        actor.handle(WeightsAnnounced(0))
        while actor.loading is not None:
            await asyncio.sleep(0)
        assert actor.failure is error and not actor.running

    asyncio.run(asyncio.wait_for(main(), 20))
