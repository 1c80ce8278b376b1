"""Agents whose time is over: it is the engine's fault where it was awaited then, and else theirs."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from impala_llm.config import load
from impala_llm.engines.base import EngineError
from impala_llm.environment_faults import is_fault
from impala_llm.gateway.agents import AgentPlayer
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.scratch import make_scratch_policy
from impala_llm.rollout import EpisodeLimits, EpisodeSpec

AGENT = """
import asyncio

async def agent(task, client):
    if task.id == 1:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
    open(f"{__file__}.{task.id}", "w").close()
    await asyncio.sleep(1000)
"""


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


@pytest.mark.system
def test_a_time_out_is_the_agents_fault_unless_the_engine_was_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
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
                async with asyncio.timeout(None) as limit:
                    playing = asyncio.create_task(reached(engine, tmp_path / f"slow_agent.py.{task_id}", limit))
                    await player.play(spec, engine, EpisodeLimits(1.0, 8, 400), training=True)
            await playing
            found.append(is_fault(caught.value))
        await player.close()
        return found

    assert asyncio.run(asyncio.wait_for(main(), 250)) == [True, False]


async def reached(engine: SlowEngine, file: Path, limit: asyncio.Timeout) -> None:
    """Let the time be over once the agent sleeps, or the engine is asked."""
    while not file.exists() and not engine.asked.is_set():
        await asyncio.sleep(0.01)
    limit.reschedule(asyncio.get_running_loop().time())
