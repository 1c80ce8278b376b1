"""Which of the tickets that wait an actor starts, and which order to end is a failure."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from impala_llm.actor import Actor
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.messages import RUN_OVER, Shutdown


def test_a_ticket_that_waits_for_newer_weights_does_not_hold_up_those_behind_it() -> None:
    async def started(version: int, places: int) -> list[int]:
        actor: Any = Actor.__new__(Actor)
        actor.config = SimpleNamespace(actor=SimpleNamespace(max_episodes=places))
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

    assert asyncio.run(started(version=0, places=8)) == [0, 2]
    assert asyncio.run(started(version=2, places=3)) == [0, 1, 2]


@pytest.mark.parametrize(("reason", "failure"), [(RUN_OVER, "None"), ("no arena", "ActorRefused('no arena')")])
def test_a_refused_actor_fails_and_one_whose_run_is_over_does_not(reason: str, failure: str) -> None:
    """Within a run what fails is started again."""
    actor: Any = Actor.__new__(Actor)
    actor.failure = None
    actor.handle(Shutdown(reason))
    assert actor.stopping and repr(actor.failure) == failure
