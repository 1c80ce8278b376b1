"""64 agents at once, killed at random moments with the processes that run them: every ticket ends once."""

import asyncio
import contextlib
import os
import random
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from impala_llm.actor import Actor
from impala_llm.config import load
from impala_llm.environment_faults import EnvironmentFaults
from impala_llm.gateway.agents import AgentPlayer
from impala_llm.gateway.chat import ChatTokens
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.rollout import EpisodeLimits
from tests.gateway.engines import RandomEngine

PROGRAM = """
import http.client, json, os, time
address = os.environ["OPENAI_BASE_URL"].split("/")[2]
connection = http.client.HTTPConnection(address)
messages = []
for turn in range(5):
    messages.append({"role": "user", "content": f"turn {turn}"})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), headers)
    messages.append(json.loads(connection.getresponse().read())["choices"][0]["message"])
print(0.5)
"""
NUM_TICKETS = 64


class Channel:
    """Notes how tickets end."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.failed: Counter[int] = Counter()
        self.reasons: set[str] = set()

    def send(self, trajectory: Any) -> None:
        self.sent[trajectory.ticket_id] += 1

    def fail(self, ticket_id: int, reason: str) -> None:
        self.failed[ticket_id] += 1
        self.reasons.add(reason)


@pytest.mark.system
def test_every_ticket_ends_once_whatever_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnvironmentFaults, "MAX_DELAY_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    policy = make_scratch_policy(tmp_path / "policy")
    rng = random.Random(0)
    actor: Any = Actor.__new__(Actor)
    command = shlex.join([sys.executable, "-S", str(program)])
    actor.config = load(["experiment=toy", f'agent.command="{command}"', f"run.dir={tmp_path}"])
    actor.actor_id, actor.episodes, actor.keep_aborted, actor.failure = "actor-0", 0, False, None
    actor.suite, actor.faults, actor.channels = suite_of(actor.config), EnvironmentFaults(20.0), Channel()
    actor.limits = EpisodeLimits(1.0, 8, 400)
    actor.engine = RandomEngine(rng, ChatTokens(AutoTokenizer.from_pretrained(policy)).encode("ab c"))
    actor.agents = AgentPlayer(actor.config, policy, actor.suite)

    there_before = set(psutil.Process().children(recursive=True))

    async def main() -> None:
        await actor.agents.start(actor.engine)
        tickets = [Ticket(i, i, i, i, 0) for i in range(NUM_TICKETS)]
        playing = [asyncio.create_task(actor.play(ticket)) for ticket in tickets]
        waiting = asyncio.gather(*playing)
        for _ in range(30):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), rng.random() * 0.2)
                break
            children = [c for c in psutil.Process().children(recursive=True) if c not in there_before]
            programs = [child for child in children if child not in psutil.Process().children()]
            if victims := programs if rng.random() < 0.9 else children:
                with contextlib.suppress(psutil.Error):
                    rng.choice(victims).kill()
        await waiting
        await actor.agents.close()

    asyncio.run(asyncio.wait_for(main(), 250))
    ended = actor.channels.sent + actor.channels.failed
    assert ended == Counter(range(NUM_TICKETS)) and actor.channels.failed
    assert actor.engine.sessions == {} and actor.engine.running == set()
    assert set(psutil.Process().children(recursive=True)) <= there_before
    assert {reason.partition(":")[0] for reason in actor.channels.reasons} == {"AgentFailed"}
