"""Entry: an actor process. Many episodes at once on one engine and one channel.

    python impala_llm/actor.py --index 0 experiment=quickstart

An episode starts only with a ticket from the learner and ends in exactly one of two ways: its trajectory, or its last
unroll, is sent, or its ticket is given back with the reason. Weights are swapped between two decoding steps while
episodes continue; a ticket that asks for a newer policy version than the engine has waits for it.

Where evaluations inside of the run are wanted, a part of its slots is for their tasks (evaluation/episodes.py), which
need no ticket.

Left out on purpose: nothing here decides what to play, in which order, or how stale it may be. The learner does. The
files on the way there stand in docs/pipeline.md, "Code path of a trajectory and of the weights".
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # there is no garbage among what is imported, and to look for it took a fifth of a start
    sys.path[:1] = {*sys.path[:1]} - {str(Path(__file__).resolve().parent)}  # whose modules would hide a user's

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from impala_llm.config import ConfigError, load, threads_per_process
from impala_llm.engines import make_engine
from impala_llm.engines.base import Engine, EngineError, ModelRefused, ServerUnfit
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.environment_faults import EnvironmentBroken, EnvironmentFaults, failure_reason, watch_for_blocking
from impala_llm.envs import contract
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.evaluation.episodes import EvaluationEpisodes, evaluation_slots
from impala_llm.gateway.agents import AgentFailed, AgentPlayer
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.products import prepare_cpu, prepare_cuda
from impala_llm.observability.actor_metrics import Reporter, RunningEpisodes
from impala_llm.pipeline import ActorEndpoint
from impala_llm.pipeline.actor_endpoint import actor_name
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.learner_connection import LearnerLost
from impala_llm.pipeline.transport.messages import (
    RUN_OVER,
    Ack,
    Engines,
    EvaluationGrant,
    Grant,
    HelloWanted,
    Revoked,
    Shutdown,
    WeightsAnnounced,
)
from impala_llm.processes.supervised import end_with_supervisor, keep_exit_codes, report_progress, say, tell
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory

RELAY_POLL_S = 0.05
MAX_BACKOFF_S = 60.0
"""Longest pause between two attempts to start an engine, in seconds."""
LOAD_PAUSE_S = 10.0
"""Seconds after which weights that the engine has refused are loaded again, if no newer ones are announced before."""
ABORT_GRACE_S = 5.0
"""Seconds after the time limit of an episode in which its aborted completion or step ends and its turns are sent."""


class Actor:
    """Plays the episodes that its tickets name, on one asyncio loop, until the learner says stop."""

    evaluation: EvaluationEpisodes | None = None
    """Tasks of evaluations inside of the run; None: there are none."""
    agents: AgentPlayer | None = None
    """Plays the episodes; None: they are played by reset and step."""
    load_at = 0.0
    """Monotonic time before which weights that were refused are not loaded again."""
    stopping = False  # then no episode begins, and one that fails is not reported

    def __init__(self, config: Config, index: int) -> None:
        self.config, self.index = config, index
        self.policy = resolve_policy(config)
        self.actor_id = actor_name(config, index)
        self.suite = suite_of(config)
        if config.agent.is_set:
            self.agents = AgentPlayer(config, self.policy, self.suite)
        self.chat = ChatFormat.of(self.policy, self.suite.system_prompt)
        self.limits = EpisodeLimits(
            config.engine.temperature,
            config.engine.max_new_tokens,
            config.engine.max_length,
            unroll_turns=config.actor.unroll_turns,
            unroll_tokens=config.actor.unroll_tokens,
        )
        endpoint = ActorEndpoint(config, self.actor_id)
        self.board = endpoint.board
        self.server_key = endpoint.server_key
        self.engine = self.make_engine()
        self.is_up = False
        """Whether the engine has been started."""
        self.starting: asyncio.Task[None] | None = None
        self.failed_starts = 0
        self.engine_restarts = 0
        """Restarts inside of engines that were given up, and how often one was given up or did not start."""
        self.start_at = 0.0
        """Monotonic time before which it is not restarted."""
        # An aborted episode can be trained on only if a value is bootstrapped at its end.
        self.keep_aborted = config.algorithm.credit.uses_values
        self.channels = endpoint.connect()
        """An `ActorChannel` (transport/actor_channel.py) to each rank; a trajectory goes to that of its ticket."""
        self.waiting: deque[Ticket] = deque()
        self.running = RunningEpisodes()
        if config.evaluation.inside_run:
            self.evaluation = EvaluationEpisodes(self.channels.first, self.play_evaluation)
        self.loading: asyncio.Task[None] | None = None
        self.episodes = 0
        self.load_seconds = 0.0
        self.announced = -1
        self.num_new_learners = 0
        """Number of learners that have started since servers were reclaimed: one may have died during a transfer."""
        self.faults = EnvironmentFaults(config.actor.fault_patience_s)
        self.evaluation_faults = EnvironmentFaults(config.actor.fault_patience_s)
        """Faults of evaluation tasks: they end no actor, since it may train all the same."""
        self.is_connected = False
        """Whether the learner has answered."""
        self.failure: BaseException | None = None

    async def run(self) -> None:
        """Play until the learner says stop, or is silent for too long. Raises ModelRefused, ServerUnfit, own errors."""
        self.channels.hello()
        watch_for_blocking(self.config, lambda text: say(f"{self.actor_id}: {text}"))
        reporter = Reporter(self.engine.stats())
        try:
            while not self.stopping:
                self.tend_engine()
                if self.config.engine.transfer == "distributed":
                    servers = {} if (engine := self.fed_engine) is None else engine.fed
                    self.channels.first.offer_engines(Engines(tuple(servers.values()), tuple(servers)))
                self.start_episodes()
                for event in await self.channels.poll_async(timeout_s=self.config.pipeline.heartbeat_s / 2):
                    self.handle(event)
                if self.failure is not None:
                    raise self.failure
                if reporter.due(self.config.pipeline.heartbeat_s):
                    metrics = reporter.metrics(self.engine.stats(), self)
                    self.channels.first.report(metrics)
                    if self.episodes:
                        tell(at_play=[metrics["actor/running_episodes"], metrics["actor/generated_tokens_per_s"]])
        finally:
            self.stopping = True  # also by a signal: a second one may leave episodes that outlive engine and channels
            evaluated = [] if self.evaluation is None else self.evaluation.running.values()
            tasks = [*self.running.values(), *evaluated, *filter(None, (self.loading, self.starting))]
            for task in tasks:
                task.cancel()
            if self.agents is not None:
                await self.agents.close()  # first: it bounds the time that agents have for their end
            await asyncio.gather(*tasks, return_exceptions=True)
            await contract.closed()
            await self.engine.close()
            self.channels.close()

    def make_engine(self) -> Engine:
        return make_engine(self.config, self.policy, -1, self.index, self.newest_weights, self.server_key)

    @property
    def fed_engine(self) -> SGLangEngine | None:
        """The engine, if the learner sends new weights to its servers by itself."""
        is_fed = self.config.engine.transfer == "distributed" and self.is_up
        return self.engine if is_fed and isinstance(self.engine, SGLangEngine) else None

    @contextmanager
    def newest_weights(self) -> Iterator[tuple[Path, int]]:
        """Newest weights, for a server of the engine that was restarted."""
        with self.board.lease() as lease:
            yield lease.path, lease.version

    def tend_engine(self) -> None:
        """Start the engine, another one (without tickets meanwhile) where it has failed, and loads that it refused."""
        if self.is_up and self.engine.failure is not None:
            self.engine_failed(self.engine.failure)
        if not self.is_up and self.starting is None and time.monotonic() >= self.start_at:
            self.starting = asyncio.create_task(self.start_engine())
        if time.monotonic() >= self.load_at:
            self.start_loading()

    async def start_engine(self) -> None:
        try:
            if self.failed_starts:
                await self.engine.close()
                self.engine = self.make_engine()
            # A server that comes up is given the newest weights: there must be some.
            while self.board.latest() is None:
                await asyncio.sleep(RELAY_POLL_S)
            await self.engine.start()
            if self.agents is not None:
                await self.agents.start(self.engine)
        except Exception as error:
            # Settings with which it has played are known to work.
            is_final = isinstance(error, ModelRefused) or (isinstance(error, ServerUnfit) and not self.episodes)
            if isinstance(error, EngineError) and not is_final:
                self.engine_failed(error)
            else:
                self.failure = error
        else:
            self.is_up, self.failed_starts = True, 0
            self.channels.request(self.config.actor.max_episodes)
            if self.evaluation is not None:
                self.channels.first.request_evaluation(evaluation_slots(self.config))
            self.start_loading()
        finally:
            self.starting = None

    def engine_failed(self, error: EngineError) -> None:
        delay = min(MAX_BACKOFF_S, 2.0 ** min(self.failed_starts, 10))
        print(f"{self.actor_id}: {error}; again in {delay:.0f} s", file=sys.stderr, flush=True)
        self.is_up = False
        self.failed_starts += 1
        self.engine_restarts += 1 + self.engine.stats().restarts
        self.start_at = time.monotonic() + delay
        self.channels.request(0)
        if self.evaluation is not None:
            self.channels.first.request_evaluation(0)
            self.evaluation.clear()

    def handle(self, event: object) -> None:
        if isinstance(event, Ack):
            report_progress()
        elif isinstance(event, Grant):
            if not self.is_connected:
                self.is_connected = True
                print(f"{self.actor_id}: connected to the learner of run {self.config.run.name!r}", flush=True)
            self.waiting.extend(event.tickets)
        elif isinstance(event, WeightsAnnounced):
            self.announced = event.version
            self.start_loading()
        elif isinstance(event, EvaluationGrant) and self.evaluation is not None:
            self.evaluation.update(event)
        elif isinstance(event, HelloWanted):
            if self.evaluation is not None:
                self.evaluation.clear()
            if self.fed_engine is not None:
                self.num_new_learners += 1
                self.start_loading()
        elif isinstance(event, Revoked):
            self.waiting = deque(ticket for ticket in self.waiting if ticket.ticket_id not in event.ticket_ids)
            for ticket_id in event.ticket_ids:
                if task := self.running.get(ticket_id):
                    task.cancel()
        elif isinstance(event, Shutdown):
            self.stopping = True
            if event.reason != RUN_OVER:
                self.failure = ActorRefused(event.reason)

    def start_episodes(self) -> None:
        """Start waiting episodes, in the order of the tickets, while there is room and the weights are new enough."""
        slots = self.config.actor.max_episodes
        if self.evaluation is not None and self.is_up:
            under_way = len(self.evaluation.running)
            free = min(evaluation_slots(self.config) - under_way, slots - under_way - len(self.running))
            self.evaluation.start(free, self.engine.version)
            slots -= len(self.evaluation.running)
        for ticket in list(self.waiting) if self.is_up else ():
            if len(self.running) >= slots:
                return
            if ticket.min_version > self.engine.version:
                continue  # not break: the replacement of a ticket that was given back may demand an older version
            self.waiting.remove(ticket)
            self.running[ticket.ticket_id] = task = asyncio.create_task(self.play(ticket))
            task.add_done_callback(partial(self.ended, ticket.ticket_id))

    def ended(self, ticket_id: int, task: asyncio.Task[None]) -> None:
        """Forget an episode, unless another attempt at its ticket has begun."""
        if self.running.get(ticket_id) is task:
            del self.running[ticket_id]

    def next_episode(self, ticket: Ticket, name: str) -> EpisodeSpec:
        """Number and describe the next episode of this actor. name: of its ticket, for its id."""
        self.episodes += 1
        return EpisodeSpec(
            episode_id=f"{self.actor_id}:{name}:{self.episodes}",
            task_id=ticket.task_id,
            group_id=ticket.group_id,
            ticket_id=ticket.ticket_id,
            seed=ticket.seed,
            env=self.suite.name,
            actor_id=self.actor_id,
            signature=contract.signature(self.suite, ticket.task_id),
        )

    async def play(self, ticket: Ticket) -> None:
        """Play one episode: its trajectory is sent or its ticket is given back, whatever happens."""
        limits, timeout_s, abort = self.limits, self.config.actor.episode_timeout_s, None
        try:
            spec = self.next_episode(ticket, str(ticket.ticket_id))
            if self.keep_aborted and self.agents is None:  # of an agent's episode no part is kept
                ends_at = asyncio.get_running_loop().time() + timeout_s
                limits = replace(limits, ends_at=ends_at)
                abort = asyncio.get_running_loop().call_at(ends_at, self.engine.abort, spec.episode_id)
                timeout_s += ABORT_GRACE_S
            async with asyncio.timeout(timeout_s):
                trajectory = await self.play_spec(spec, limits, self.channels.send)
            self.channels.send(trajectory)
            self.faults.clear()
        except Exception as error:
            # The ticket goes back with the reason, which the learner counts and logs; at the end all of them go back.
            if not self.stopping:
                self.channels.fail(ticket.ticket_id, await self.episode_failed(error))
        finally:
            if abort is not None:
                abort.cancel()

    async def play_spec(
        self, spec: EpisodeSpec, limits: EpisodeLimits, on_unroll: Callable[[Trajectory], object] | None = None
    ) -> Trajectory:
        """Play an episode, by the agent or by reset and step. on_unroll: None where it is no training."""
        training = on_unroll is not None
        if self.agents is not None:
            return await self.agents.play(spec, self.engine, limits, training)
        session = contract.session(self.suite, training)
        return await play_episode(spec, session, self.engine, self.chat, limits, None, on_unroll)

    async def episode_failed(self, error: Exception) -> str:
        """Take note of an episode that has no trajectory. Returns the reason.

        Environments and agents are other people's code: one broken episode must not end the others; all of them may.
        """
        reason = failure_reason(error, self.config.actor.episode_timeout_s)
        await asyncio.sleep(self.faults.observe(error))
        if self.faults.is_broken:
            self.failure = EnvironmentBroken(
                f"{self.faults.num_in_a_row} episodes failed one after the other and none succeeded; the last one: "
                f"{reason}"
            )
        return reason

    async def play_evaluation(self, grant: EvaluationGrant, task_id: int) -> Trajectory | str:
        """Play an evaluation task. Returns its episode, or the reason why there is none."""
        greedy = grant.temperature == 0
        engine = self.config.engine
        limits = EpisodeLimits(1.0 if greedy else grant.temperature, engine.max_new_tokens, engine.max_length, greedy)
        try:
            # In place of a ticket, of which there is none.
            spec = self.next_episode(Ticket(0, task_id, 0, task_id % (1 << 63), 0), "evaluation")
            async with asyncio.timeout(self.config.actor.episode_timeout_s):
                episode = await self.play_spec(spec, limits)
        except Exception as error:
            await asyncio.sleep(self.evaluation_faults.observe(error))
            return failure_reason(error, self.config.actor.episode_timeout_s)
        self.evaluation_faults.clear()
        return episode

    def start_loading(self) -> None:
        """Swap in the newest weights in the background, unless that is under way or they are here already."""
        is_due = self.num_new_learners > 0 or self.announced > self.engine.version
        if self.is_up and self.loading is None and is_due:
            self.loading = asyncio.create_task(self.load_newest())
            self.loading.add_done_callback(self.loaded)

    async def load_newest(self) -> None:
        if (fed := self.fed_engine) is not None and (come := self.num_new_learners):
            with self.board.lease() as lease:
                await fed.reclaim(lease)
            self.num_new_learners -= come  # not before: a failed one is due again. Another learner may start.
            return
        if fed is not None and await fed.adopt(self.announced):
            return
        # On another host than the learner's, an announcement is faster than the relay.
        while (latest := self.board.latest()) is None or latest <= self.engine.version:
            await asyncio.sleep(RELAY_POLL_S)
        with self.board.lease() as lease:
            started = time.monotonic()
            await self.engine.load_shared(lease)
            self.load_seconds = time.monotonic() - started

    def loaded(self, task: asyncio.Task[None]) -> None:
        self.loading = None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, EngineError) and not isinstance(error, ModelRefused):
            # The old weights stay in use. The next announcement is another attempt, but none may come: the learner may
            # wait for episodes of these weights.
            self.load_at = time.monotonic() + LOAD_PAUSE_S
            print(f"{self.actor_id}: {error}; again in {LOAD_PAUSE_S:.0f} s", file=sys.stderr, flush=True)
        elif error is not None:
            self.failure = error
        else:
            self.start_loading()  # a version may have been announced meanwhile
            self.start_episodes()  # episodes that waited for this version


class ActorRefused(RuntimeError):
    """The learner has refused this actor, and its run continues. The message is the learner's."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when the learner said stop, 2 for an error that will come again, 3 when it is gone or refuses this
    actor, 130 after Ctrl-C."""
    end_with_supervisor()
    keep_exit_codes()
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
    prepare_cuda(config.model.cuda_products)
    try:
        asyncio.run(Actor(config, index).run())
    except (EnvironmentBroken, EnvironmentFault, EngineError, AgentFailed) as error:
        # Or an engine that cannot be made, or must not play: so it is at the next attempt.
        print(f"actor {index}: {error}", file=sys.stderr)
        return 2
    except (LearnerLost, RunDirectoryError) as error:
        print(f"actor {index}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nor is another one an error
        return 128 + signal.SIGINT
    except ActorRefused as error:
        # The supervisor of a whole run starts it again; one of actors alone does not know whose learner that is by now.
        print(f"actor {index}: refused by the learner: {error}", file=sys.stderr)
        return 3
    print(f"actor {index}: the learner has ended the run", flush=True)
    return 0


def run(argv: Sequence[str]) -> NoReturn:
    """The whole life of an actor's process."""
    gc.freeze()  # what is imported stays to the end: later collections, which stop all episodes, need not look at it
    gc.enable()
    sys.exit(main(argv))


if __name__ == "__main__":
    run(sys.argv[1:])
