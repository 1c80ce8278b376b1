"""Metrics of an actor, which its heartbeats bring to the learner."""

import asyncio
import time
from collections import UserDict
from typing import Any, Protocol

import psutil

from impala_llm.engines.base import EngineStats

_COUNTERS = ("decode_tokens", "prefill_tokens", "busy_seconds")


class RunningEpisodes(UserDict[int, asyncio.Task[None]]):
    """Episodes under way, by ticket, and how long they have run."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds, self._at = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Seconds that episodes have been under way since the start, all of them together."""
        now = time.monotonic()
        self._seconds, self._at = self._seconds + len(self) * (now - self._at), now
        return self._seconds

    def __setitem__(self, ticket_id: int, task: asyncio.Task[None]) -> None:
        self.seconds()  # up to here with the number before
        super().__setitem__(ticket_id, task)

    def __delitem__(self, ticket_id: int) -> None:
        self.seconds()
        super().__delitem__(ticket_id)


class Playing(Protocol):
    """The parts of an actor that are measured."""

    is_up: bool
    engine_restarts: int
    load_seconds: float
    channels: Any
    agents: Any
    running: RunningEpisodes

    @property
    def fed_engine(self) -> object | None: ...


class Reporter:
    """Turns the engine's counters into rates for the learner's metrics, once a heartbeat."""

    def __init__(self, stats: EngineStats) -> None:
        self.last, self.at = stats, time.monotonic()
        self.episode_seconds = 0.0

    def due(self, interval_s: float) -> bool:
        return time.monotonic() - self.at >= interval_s

    def metrics(self, stats: EngineStats, actor: Playing) -> dict[str, float]:
        now = time.monotonic()
        # An engine that was made anew counts from 0 again.
        is_new = any(getattr(stats, name) < getattr(self.last, name) for name in _COUNTERS)
        last = EngineStats() if is_new else self.last
        seconds, self.last, self.at = now - self.at, stats, now
        # Not the number of now: short episodes may all have ended when a heartbeat is due.
        before, self.episode_seconds = self.episode_seconds, actor.running.seconds()
        load_times = {
            "weights/load_s": actor.load_seconds,
            "weights/pause_s": stats.pause_seconds,
            "weights/transfer_s": stats.transfer_seconds,
        }
        return {
            "actor/generated_tokens_per_s": (stats.decode_tokens - last.decode_tokens) / seconds,
            "actor/prefill_tokens_per_s": (stats.prefill_tokens - last.prefill_tokens) / seconds,
            "actor/idle_share": max(0.0, 1.0 - (stats.busy_seconds - last.busy_seconds) / seconds),
            "actor/running_episodes": (self.episode_seconds - before) / seconds,
            "actor/resident_memory_gb": psutil.Process().memory_info().rss / 1e9,
            "pipeline/queue_fill": actor.channels.arena_fill,
            # The learner measures the times of weights that it sends itself.
            **({} if actor.fed_engine is not None else load_times),
            "actor/engine_up": float(actor.is_up and stats.is_up),
            # The actor's number includes the restarts of engines that were given up.
            "actor/engine_restarts": float(actor.engine_restarts + (stats.restarts if actor.is_up else 0)),
            **({} if actor.agents is None else actor.agents.metrics()),
        }
