"""Metrics of an actor, which its heartbeats bring to the learner."""

import time
from collections.abc import Sized
from typing import Any, Protocol

import psutil

from impala_llm.engines.base import EngineStats


class Playing(Protocol):
    """The parts of an actor that are measured."""

    is_up: bool
    engine_restarts: int
    load_seconds: float
    channels: Any
    agents: Any

    @property
    def running(self) -> Sized: ...

    @property
    def fed_engine(self) -> object | None: ...


class Reporter:
    """Turns the engine's counters into rates for the learner's metrics, once a heartbeat."""

    def __init__(self, stats: EngineStats) -> None:
        self.last, self.at = stats, time.monotonic()

    def due(self, interval_s: float) -> bool:
        return time.monotonic() - self.at >= interval_s

    def metrics(self, stats: EngineStats, actor: Playing) -> dict[str, float]:
        now = time.monotonic()
        # An engine that was made anew counts from 0 again.
        last = self.last if stats.busy_seconds >= self.last.busy_seconds else EngineStats()
        seconds, self.last, self.at = now - self.at, stats, now
        load_times = {
            "weights/load_s": actor.load_seconds,
            "weights/pause_s": stats.pause_seconds,
            "weights/transfer_s": stats.transfer_seconds,
        }
        return {
            "actor/generated_tokens_per_s": (stats.decode_tokens - last.decode_tokens) / seconds,
            "actor/prefill_tokens_per_s": (stats.prefill_tokens - last.prefill_tokens) / seconds,
            "actor/idle_share": max(0.0, 1.0 - (stats.busy_seconds - last.busy_seconds) / seconds),
            "actor/running_episodes": float(len(actor.running)),
            "actor/resident_memory_gb": psutil.Process().memory_info().rss / 1e9,
            "pipeline/queue_fill": actor.channels.arena_fill,
            # The learner measures the times of weights that it sends itself.
            **({} if actor.fed_engine is not None else load_times),
            "actor/engine_up": float(actor.is_up and stats.is_up),
            # The actor's number includes the restarts of engines that were given up.
            "actor/engine_restarts": float(actor.engine_restarts + (stats.restarts if actor.is_up else 0)),
            **({} if actor.agents is None else actor.agents.metrics()),
        }
