"""Functions of users behind decorators, as libraries for tracing and retries have them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite
from impala_llm.gateway.worker import Worker, function_runner

DECORATOR = """
import functools

def traced(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)
    return call

"""


def test_an_async_agent_behind_a_decorator_is_awaited(user_folder: Path) -> None:
    (user_folder / "traced_agent.py").write_text(
        f"{DECORATOR}@traced\nasync def agent(task, client):\n    return 0.5\n"
    )

    async def main() -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        worker = Worker(function_runner("traced_agent:agent"), said.append)
        task = {"id": 1, "seed": 2, "training": True, "data": {}}
        worker.handle({"episode": 0, "task": task, "url": "http://127.0.0.1:1/v1", "key": "k"})
        while not said:
            await asyncio.sleep(0.01)
        return said

    pytest.importorskip("openai", reason="openai is not installed")
    assert asyncio.run(asyncio.wait_for(main(), 60)) == [{"episode": 0, "result": 0.5}]


def test_an_async_verifier_behind_a_decorator_is_awaited(user_folder: Path) -> None:
    (user_folder / "traced_verifier.py").write_text(
        f"{DECORATOR}@traced\nasync def verify(answer, task):\n    return 0.25\n"
    )
    Path("tasks.jsonl").write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abc"))
    named = ["env=tasks", "env.args.file=tasks.jsonl", "env.args.verifier=traced_verifier:verify"]
    suite = make_suite(load(["model=scratch", *named]).env)

    async def score() -> float:
        session = contract.session(suite, training=True)
        await contract.reset(session, 0, suite.name)
        *_, info = await contract.step(session, "a", suite.name)
        return float(info["score"])

    assert asyncio.run(score()) == 0.25
