"""The environment of the schedule benchmark: the parrot, whose every answer comes after a random, long-tailed wait."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.base import Split
from impala_llm.envs.toy import ParrotSession, ParrotSuite
from impala_llm.settings import bounded


class SlowParrot:
    """`ParrotSuite` with log-normal latencies, as of a server, during which other episodes of an actor go on."""

    name = "slow-parrot"
    system_prompt = ""

    @dataclass
    class Options:
        """Settings env.args.*"""

        median_s: float = bounded(0.2, least=0, most=3600)
        """Median of the latency of `reset` and of `step`, in seconds."""
        sigma: float = bounded(1.0, least=0, most=5)
        """Deviation of its logarithm: with 1 the mean is 1.65 times the median, and one in a hundred 10 times."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._parrot = ParrotSuite(num_words=4)

    def tasks(self, split: Split) -> Sequence[int]:
        return self._parrot.tasks(split)

    def session(self, training: bool) -> "SlowSession":
        return SlowSession(self, self._parrot.session(training))

    def signature(self, task_id: int) -> str:
        return self._parrot.signature(task_id)

    def latency_s(self) -> float:
        """Draw a latency."""
        return self.options.median_s * random.lognormvariate(0.0, self.options.sigma)


class SlowSession:
    """An episode of `SlowParrot`."""

    def __init__(self, suite: SlowParrot, parrot: ParrotSession) -> None:
        self._suite, self._parrot = suite, parrot

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(self._suite.latency_s())
        return self._parrot.reset(task_id)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(self._suite.latency_s())
        return self._parrot.step(action)
