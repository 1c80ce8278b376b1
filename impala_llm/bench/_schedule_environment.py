"""An environment whose every answer comes after a random, long-tailed wait: for comparisons of schedules."""

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs import make_suite
from impala_llm.envs.base import AsyncSession, Session, Split
from impala_llm.settings import EnvConfig, WebShopConfig, bounded


class SlowSuite:
    """Another environment with log-normal latencies, such as a server's. Other episodes of the actor run meanwhile."""

    @dataclass
    class Options:
        """Settings env.args.*"""

        name: str = "parrot"
        """Name of the environment."""
        args: dict[str, Any] = field(default_factory=dict)
        """Its settings: env.args.* of it, or env.webshop.*"""
        median_s: float = bounded(0.2, least=0, most=3600)
        """Median of the latency of `reset` and of `step`, in seconds."""
        sigma: float = bounded(1.0, least=0, most=5)
        """Deviation of its logarithm: with 1 the mean is 1.65 times the median, and one in a hundred 10 times."""

    def __init__(self, options: Options) -> None:
        """Raises EnvironmentFault for an environment that cannot be made."""
        is_shop = options.name == "webshop"
        settings = {"webshop": WebShopConfig(**options.args)} if is_shop else {"args": options.args}
        self._suite = make_suite(EnvConfig(name=options.name, **settings))
        self.options = options
        self.name, self.system_prompt = f"slow-{self._suite.name}", self._suite.system_prompt

    def tasks(self, split: Split) -> Sequence[int]:
        return self._suite.tasks(split)

    def session(self, training: bool) -> "SlowSession":
        return SlowSession(self, self._suite.session(training))

    def signature(self, task_id: int) -> str:
        return self._suite.signature(task_id)

    def latency_s(self) -> float:
        """Draw a latency."""
        return self.options.median_s * random.lognormvariate(0.0, self.options.sigma)


class SlowSession:
    """An episode of `SlowSuite`."""

    def __init__(self, suite: SlowSuite, session: Session | AsyncSession) -> None:
        self._suite, self._session = suite, session

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        begun: tuple[str, dict[str, Any]] = await self._later(lambda: self._session.reset(task_id))
        return begun

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        played: tuple[str, float, bool, bool, dict[str, Any]] = await self._later(lambda: self._session.step(action))
        return played

    async def _later(self, call: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._suite.latency_s())
        answer = call()
        return await answer if inspect.isawaitable(answer) else answer
