"""Agents whose time is over: it is the engine's fault where it was awaited then, and else theirs."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from impala_llm.actor import Actor
from impala_llm.config import load
from impala_llm.engines.base import EngineError, Generation
from impala_llm.environment_faults import EnvironmentFaults, is_fault
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.evaluate import evaluate
from impala_llm.gateway.agents import AgentPlayer
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.rollout import EpisodeLimits, EpisodeSpec

AGENT = """
import asyncio

async def asks(task, client):
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])

async def sleeps(task, client):
    open(f"{__file__}.asleep", "w").close()
    await asyncio.sleep(1000)

async def agent(task, client):
    await (asks if task.id == 1 else sleeps)(task, client)
"""
TIMEOUT_S = 300


class SlowEngine:
    """Answers when it is told to abort."""

    vocab_size, version = 1000, 0

    def __init__(self) -> None:
        self.asked, self.aborted = asyncio.Event(), asyncio.Event()

    async def generate(self, *_: object) -> None:
        self.asked.set()
        await self.aborted.wait()
        raise EngineError("aborted")

    def abort(self, session: str) -> None:
        self.aborted.set()

    def release(self, session: str) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the agent makes before it sleeps."""
    (tmp_path / "slow_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    return tmp_path / "slow_agent.py.asleep"


@pytest.mark.system
def test_a_time_out_is_the_agents_fault_unless_the_engine_was_awaited(tmp_path: Path, asleep: Path) -> None:
    policy = make_scratch_policy(tmp_path / "policy")
    config = load(["experiment=toy", "agent.name=slow_agent:agent", "agent.processes=1", f"run.dir={tmp_path}"])

    async def main() -> list[bool]:
        engine: Any = SlowEngine()
        player = AgentPlayer(config, policy, suite_of(config))
        await player.start(engine)
        found = []
        for task_id in (0, 1):
            spec = EpisodeSpec(f"e{task_id}", task_id, 1, 1, seed=1, env="agent", actor_id="a", signature="")
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(TIMEOUT_S):
                    watching = asyncio.create_task(end_time(engine, asleep))
                    await player.play(spec, engine, EpisodeLimits(1.0, 8, 400), training=True)
            await watching
            asleep.unlink(missing_ok=True)
            found.append(is_fault(caught.value))
        await player.close()
        return found

    assert asyncio.run(main()) == [True, False]


@pytest.mark.system
def test_a_time_out_of_an_agent_is_no_fault_where_values_are_learned(tmp_path: Path, asleep: Path) -> None:
    """With values the turns of an episode of reset and step are kept, and its completion is aborted: not an agent's."""

    class Engine(SlowEngine):
        async def generate(self, *_: object) -> Any:
            self.asked.set()
            await self.aborted.wait()
            return Generation(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "abort")

    policy = make_scratch_policy(tmp_path / "policy")
    settings = ["experiment=toy", "agent.name=slow_agent:asks", "agent.processes=1", f"run.dir={tmp_path}"]
    failed: list[str] = []

    async def main() -> None:
        actor: Any = Actor.__new__(Actor)
        actor.config, actor.actor_id = load([*settings, f"actor.episode_timeout_s={TIMEOUT_S}"]), "actor-0"
        actor.episodes, actor.keep_aborted, actor.failure, actor.faults = 0, True, None, EnvironmentFaults(20.0)
        actor.suite, actor.engine, actor.limits = suite_of(actor.config), Engine(), EpisodeLimits(1.0, 8, 400)
        actor.channels = SimpleNamespace(send=None, fail=lambda ticket, reason: failed.append(reason))
        actor.agents = AgentPlayer(actor.config, policy, actor.suite)
        await actor.agents.start(actor.engine)
        watching = asyncio.create_task(end_time(actor.engine, asleep))
        await actor.play(Ticket(1, 1, 1, 1, 0))
        await watching
        await actor.agents.close()
        assert actor.faults.num_in_a_row == 0, failed

    asyncio.run(main())
    assert len(failed) == 1 and "the engine was still at a completion" in failed[0]


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "kind", "said"),
    [
        ("sleeps", EnvironmentFault, r"the agent failed at task 900: .*actor.episode_timeout_s=300$"),
        ("asks", EngineError, r"^task 900 .*actor.episode_timeout_s=300, when the engine was .*raise it"),
    ],
)
def test_an_evaluation_says_whether_the_agent_or_the_engine_was_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asleep: Path, agent: str, kind: type[Exception], said: str
) -> None:
    policy = make_scratch_policy(tmp_path / "policy")
    settings = [f"agent.name=slow_agent:{agent}", "agent.processes=1", "evaluation.num_tasks=1"]
    config = load(["experiment=toy", *settings, f"actor.episode_timeout_s={TIMEOUT_S}", f"run.dir={tmp_path}"])

    class Engine(SlowEngine):
        async def start(self) -> None:
            self.watching = asyncio.create_task(end_time(self, asleep))

    monkeypatch.setattr("impala_llm.evaluate.make_engine", lambda *_, **__: Engine())
    with pytest.raises(kind, match=said):
        evaluate(config, policy, suite_of(config), "policy", "tasks")


async def end_time(engine: SlowEngine, file: Path) -> None:
    """Put the clock of the loop forward once the agent sleeps, or the engine is asked."""
    while not file.exists() and not engine.asked.is_set():
        await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + TIMEOUT_S  # type: ignore[method-assign]
