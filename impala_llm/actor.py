"""Entry: an actor process. Many episodes at once on one engine and one channel.

    python impala_llm/actor.py --index 0 experiment=quickstart

An episode starts only with a ticket from the learner and ends in exactly one of two ways: its trajectory is sent, or
its ticket is given back with the reason. Weights are swapped between two decoding steps while episodes go on; a ticket
that asks for a newer policy version than the engine has waits for it.

Left out on purpose: nothing here decides what to play, in which order, or how stale it may be. The learner does.
"""

import asyncio
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from transformers import AutoTokenizer

from impala_llm.config import Config, ConfigError, load, threads_per_process
from impala_llm.engines import make_engine
from impala_llm.engines.torch_engine import EngineStats
from impala_llm.envs import make_suite
from impala_llm.hosts import rank_endpoint
from impala_llm.learning.cpu import prepare_cpu
from impala_llm.learning.policy_files import resolve_policy
from impala_llm.pipeline.channel import ActorChannel, LearnerLost
from impala_llm.pipeline.channels import ActorChannels
from impala_llm.pipeline.keys import load_actor_keys
from impala_llm.pipeline.rundir import RunDirectory, RunDirectoryError
from impala_llm.pipeline.tickets import Ticket
from impala_llm.pipeline.weights import WeightReader
from impala_llm.pipeline.wire import Grant, Revoked, Shutdown, WeightsAnnounced
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode

RELAY_POLL_S = 0.05


class Actor:
    """Plays the episodes that its tickets name, on one asyncio loop, until the learner says stop."""

    def __init__(self, config: Config, index: int) -> None:
        policy = resolve_policy(config)
        self.config = config
        self.actor_id = actor_name(config, index)
        self.suite = make_suite(config.env)
        self.chat = ChatFormat(AutoTokenizer.from_pretrained(policy), self.suite.system_prompt)
        self.limits = EpisodeLimits(config.engine.temperature, config.engine.max_new_tokens, config.engine.max_length)
        self.engine = make_engine(config, policy, version=-1)  # the learner announces the first version
        run_dir = RunDirectory.attach(config.run.name, timeout_s=config.pipeline.learner_timeout_s)
        self.weights = WeightReader(run_dir.weights_path)
        self.channel = ActorChannels([self.connect(run_dir, rank) for rank in range(config.learner.num_ranks)])
        self.waiting: deque[Ticket] = deque()
        self.running: dict[int, asyncio.Task[None]] = {}
        self.loading: asyncio.Task[None] | None = None
        self.episodes = 0
        self.load_seconds = 0.0
        self.announced = -1
        self.stopping = False
        self.failure: BaseException | None = None

    def connect(self, run_dir: RunDirectory, rank: int) -> ActorChannel:
        """To a learner rank on this host, or on the one that `pipeline.connect` names."""
        pipeline = self.config.pipeline
        remote = pipeline.connect and rank_endpoint(pipeline.connect, rank)
        return ActorChannel(
            remote or run_dir.endpoint(rank),
            self.actor_id,
            None if remote else run_dir,
            arena_bytes=pipeline.arena_mb << 20,
            keys=load_actor_keys(Path(pipeline.keys).expanduser()) if remote and pipeline.keys else None,
            heartbeat_s=pipeline.heartbeat_s,
            learner_timeout_s=pipeline.learner_timeout_s,
            arena_name=f"{self.actor_id}.rank-{rank}",
        )

    async def run(self) -> None:
        """Until the learner says stop, or is silent for too long. A defect of our own code is raised."""
        self.channel.hello()
        self.channel.request(self.config.actor.max_episodes)
        reporter = Reporter(self.engine.stats())
        try:
            while not self.stopping:
                self.start_episodes()
                for event in await self.channel.poll_async(timeout_s=self.config.pipeline.heartbeat_s / 2):
                    self.handle(event)
                if self.failure is not None:
                    raise self.failure
                if reporter.due(self.config.pipeline.heartbeat_s):
                    self.channel.report(reporter.figures(self.engine.stats(), self))
        finally:
            tasks = [*self.running.values(), *([self.loading] if self.loading else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.engine.close()
            self.channel.close()

    def handle(self, event: object) -> None:
        if isinstance(event, Grant):
            self.waiting.extend(event.tickets)
        elif isinstance(event, WeightsAnnounced):
            self.announced = event.version
            self.start_loading()
        elif isinstance(event, Revoked):
            self.waiting = deque(ticket for ticket in self.waiting if ticket.ticket_id not in event.ticket_ids)
            for ticket_id in event.ticket_ids:
                if task := self.running.get(ticket_id):
                    task.cancel()
        elif isinstance(event, Shutdown):
            self.stopping = True

    def start_episodes(self) -> None:
        """Start what waits, in the order of the tickets, as far as there is room and the weights are new enough."""
        while self.waiting and len(self.running) < self.config.actor.max_episodes:
            if self.waiting[0].min_version > self.engine.version:
                return
            ticket = self.waiting.popleft()
            self.running[ticket.ticket_id] = task = asyncio.create_task(self.play(ticket))
            task.add_done_callback(partial(self.ended, ticket.ticket_id))

    def ended(self, ticket_id: int, task: asyncio.Task[None]) -> None:
        """Unless another attempt at the ticket has begun."""
        if self.running.get(ticket_id) is task:
            del self.running[ticket_id]

    async def play(self, ticket: Ticket) -> None:
        """One episode: its trajectory is sent or its ticket given back, whatever happens."""
        self.episodes += 1
        spec = EpisodeSpec(
            episode_id=f"{self.actor_id}:{ticket.ticket_id}:{self.episodes}",
            task_id=ticket.task_id,
            group_id=ticket.group_id,
            ticket_id=ticket.ticket_id,
            seed=ticket.seed,
            env=self.suite.name,
            actor_id=self.actor_id,
            signature=self.suite.signature(ticket.task_id),
        )
        try:
            async with asyncio.timeout(self.config.actor.episode_timeout_s):
                trajectory = await play_episode(spec, self.suite.session(True), self.engine, self.chat, self.limits)
            self.channel.send(trajectory)
        except Exception as error:
            # Environments and engines are other people's code: one broken episode must not end the others. The ticket
            # goes back with the reason, which the learner counts and logs.
            self.channel.fail(ticket.ticket_id, f"{type(error).__name__}: {error}")

    def start_loading(self) -> None:
        """Swap in the newest weights in the background, unless that is under way or they are here already."""
        if self.loading is None and self.announced > self.engine.version:
            self.loading = asyncio.create_task(self.load_newest())
            self.loading.add_done_callback(self.loaded)

    async def load_newest(self) -> None:
        # On another host than the learner's, an announcement is faster than the relay.
        while (latest := self.weights.latest()) is None or latest <= self.engine.version:
            await asyncio.sleep(RELAY_POLL_S)
        with self.weights.lease() as lease:
            started = time.monotonic()
            self.engine.load_shared(lease, lease.version)
            self.load_seconds = time.monotonic() - started

    def loaded(self, task: asyncio.Task[None]) -> None:
        self.loading = None
        if task.cancelled():
            return
        self.failure = task.exception()
        if self.failure is None:
            self.start_loading()  # what was announced meanwhile
            self.start_episodes()  # what waited for this version


def actor_name(config: Config, index: int) -> str:
    """Unique among all actors of a run: hosts count theirs from 0."""
    if config.pipeline.connect is None:
        return f"actor-{index}"
    host = re.sub(r"[^A-Za-z0-9-]", "-", platform.node()).strip("-")[:32]
    return f"{host or 'host'}-actor-{index}"


class Reporter:
    """Turns the engine's counters into rates for the learner's metrics, once a heartbeat."""

    def __init__(self, stats: EngineStats) -> None:
        self.last, self.at = stats, time.monotonic()

    def due(self, interval_s: float) -> bool:
        return time.monotonic() - self.at >= interval_s

    def figures(self, stats: EngineStats, actor: Actor) -> dict[str, float]:
        now = time.monotonic()
        seconds, last, self.last, self.at = now - self.at, self.last, stats, now
        return {
            "actor/generated_tokens_per_s": (stats.decode_tokens - last.decode_tokens) / seconds,
            "actor/prefill_tokens_per_s": (stats.prefill_tokens - last.prefill_tokens) / seconds,
            "actor/idle_share": max(0.0, 1.0 - (stats.busy_seconds - last.busy_seconds) / seconds),
            "actor/running_episodes": float(len(actor.running)),
            "actor/resident_memory_gb": psutil.Process().memory_info().rss / 1e9,
            "pipeline/queue_fill": actor.channel.arena_fill,
            "weights/load_s": actor.load_seconds,
        }


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 when the learner said stop, 2 for bad settings, 3 when the learner is gone."""
    words = list(argv)
    index = 0
    if "--index" in words:
        at = words.index("--index")
        index = int(words[at + 1])
        del words[at : at + 2]
    try:
        config = load(words)
    except ConfigError as error:
        print(f"actor: {error}", file=sys.stderr)
        return 2
    prepare_cpu(threads_per_process(config))
    try:
        asyncio.run(Actor(config, index).run())
    except (LearnerLost, RunDirectoryError) as error:
        print(f"actor {index}: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
