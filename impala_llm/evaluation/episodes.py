"""Evaluation tasks at an actor: played beside its training episodes, on the same engine, in a part of its slots.

Invariant: only the tasks that the learner named last are played. A result is kept until another evaluation begins, and
sent again whenever its task is named again: the learner names a task until it has the result.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from impala_llm.pipeline.transport.messages import EvaluationGrant, EvaluationResult
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory

RESEND_S = 1.0
"""Seconds after which a result is sent again if its task is named: before, it may have been on its way."""


class Channel(Protocol):
    """The way of results to the learner."""

    def evaluated(self, result: EvaluationResult) -> None: ...

    def evaluation_failed(self, evaluation_id: int, task_id: int, reason: str) -> None: ...


class EvaluationEpisodes:
    """Evaluation tasks of one actor. For one event loop.

    Args:
        channel: to the learner.
        play: plays a task of the grant; returns the episode, or the reason why there is none.
        clock: in seconds.
    """

    def __init__(
        self,
        channel: Channel,
        play: Callable[[EvaluationGrant, int], Awaitable[Trajectory | str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._play = play
        self._clock = clock
        self._grant = EvaluationGrant(0, 0, 0.0, ())
        self._waiting: deque[int] = deque()
        self.running: dict[int, asyncio.Task[None]] = {}
        """Episodes under way, by task."""
        self._results: dict[int, tuple[EvaluationResult, float]] = {}
        """By task, with the time at which it was sent last."""

    def update(self, grant: EvaluationGrant) -> None:
        """Take over what the learner wants to have played from now on."""
        if grant.evaluation_id != self._grant.evaluation_id:
            self.clear()
            self._results.clear()
        self._grant = grant
        for task_id in self.running.keys() - set(grant.task_ids):
            self.running.pop(task_id).cancel()
        tasks = dict.fromkeys(grant.task_ids)
        self._waiting = deque(t for t in tasks if t not in self.running and t not in self._results)
        for task_id in tasks.keys() & self._results.keys():
            result, sent_at = self._results[task_id]
            if self._clock() - sent_at >= RESEND_S:
                self._send(result)

    def clear(self) -> None:
        """Play none from now on: the engine has failed, or the learner is another one."""
        self._waiting.clear()
        for task in self.running.values():
            task.cancel()
        self.running.clear()

    def start(self, slots: int, version: int) -> None:
        """Start tasks that wait.

        Args:
            slots: how many more may be under way.
            version: of the engine's weights; older ones than the learner asks for play nothing.
        """
        while self._waiting and slots > 0 and version >= self._grant.min_version:
            slots -= 1
            task_id = self._waiting.popleft()
            self.running[task_id] = task = asyncio.create_task(self._attempt(self._grant, task_id))
            task.add_done_callback(partial(self._ended, task_id))

    async def _attempt(self, grant: EvaluationGrant, task_id: int) -> None:
        played = await self._play(grant, task_id)
        if isinstance(played, str):
            self._channel.evaluation_failed(grant.evaluation_id, task_id, played)
            return
        versions = played.versions[played.action_mask]
        result = EvaluationResult(
            evaluation_id=grant.evaluation_id,
            task_id=task_id,
            score=played.score,
            success=played.success,
            num_tokens=played.num_tokens,
            num_turns=len(played.turns),
            first_version=int(versions.min()),
            last_version=int(versions.max()),
        )
        self._send(result)

    def _send(self, result: EvaluationResult) -> None:
        self._results[result.task_id] = result, self._clock()
        self._channel.evaluated(result)

    def _ended(self, task_id: int, task: asyncio.Task[None]) -> None:
        """Forget an episode, unless another attempt at its task has begun."""
        if self.running.get(task_id) is task:
            del self.running[task_id]


def evaluation_slots(config: Config) -> int:
    """Number of evaluation tasks that an actor plays at once."""
    return max(1, int(config.evaluation.run_share * config.actor.max_episodes))
