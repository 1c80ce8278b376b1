"""Episodes that an agent plays: gateway, pool of processes, and the trajectory in the end.

Invariant: an episode ends with a trajectory or an exception, and its key is invalid from then on.
"""

import asyncio
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from impala_llm.engines.base import Engine, ModelRefused
from impala_llm.envs.base import Suite
from impala_llm.gateway.agent_pool import AgentFailed, AgentPool
from impala_llm.gateway.chat import ChatTokens
from impala_llm.gateway.conversation import Conversation
from impala_llm.gateway.episode import AgentResult, GatewayEpisode
from impala_llm.gateway.server import Gateway
from impala_llm.gateway.tasks import AgentSuite, Task
from impala_llm.rollout import ENGINE_AWAITED, EpisodeLimits, EpisodeSpec, Turn
from impala_llm.settings import Config, longest_record
from impala_llm.trajectory import Trajectory

__all__ = ["AgentFailed", "AgentPlayer"]


class AgentPlayer:
    """Plays the episodes of an actor by the agent of the settings.

    Args:
        policy: directory of the policy, with its tokenizer.

    Raises:
        ModelRefused: the tokenizer, or its chat template, cannot be used.
    """

    def __init__(self, config: Config, policy: Path, suite: Suite) -> None:
        agent = config.agent
        self._config, self._suite = config, suite
        try:
            tokenizer = AutoTokenizer.from_pretrained(policy)
            self._chat = ChatTokens(tokenizer, agent.tool_parser, agent.reasoning_parser)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ModelRefused(f"tokenizer or chat template of the model {policy} cannot be used: {reason}") from error
        self._pool = AgentPool(agent.name, agent.command, agent.processes, agent.process_memory_mb * 2.0**20)
        self._gateway: Gateway | None = None

    async def start(self, engine: Engine) -> None:
        """Start server and processes, unless they run. Raises AgentFailed where the agent cannot be imported."""
        if self._gateway is None:
            await self._pool.start()
            gateway = Gateway(engine.vocab_size, drops=self._config.agent.unsupported == "drop")
            await gateway.start()
            self._gateway = gateway

    async def play(
        self,
        spec: EpisodeSpec,
        engine: Engine,
        limits: EpisodeLimits,
        training: bool,
        transcript: list[Turn] | None = None,
    ) -> Trajectory:
        """Play an episode to its end.

        Args:
            transcript: gets its turns as text; None: they are not recorded.

        Raises:
            AgentFailed: the agent raised, ended without a result, or without a request.
            EngineError: the engine failed meanwhile.
        """
        gateway, suite = self._gateway, self._suite
        assert gateway is not None, "start comes first"
        episode = GatewayEpisode(spec, engine, Conversation(self._chat), limits, longest_record(self._config))
        data = suite.data(spec.task_id) if isinstance(suite, AgentSuite) else {}
        task = Task(spec.task_id, spec.seed, training, data)
        gateway.add(episode, limits.temperature if training else None)
        try:
            result = await self._result(task, gateway.url, episode)
        except AgentFailed:
            if episode.failure is not None:  # and not the agent's
                raise episode.failure from None
            raise
        finally:
            await gateway.remove(episode)
        # A program's last line may be a number that is not its reward: what it has posted counts more.
        if result is None or (self._config.agent.command is not None and episode.result is not None):
            result = episode.result
        if result is None and self._config.agent.command is not None:
            raise AgentFailed(
                "the program has ended without a reward: no result was posted, there is no reward file, and the last "
                'line of its output is no JSON number or object: print one, such as {"reward": 1.0} (docs/agents.md)'
            )
        try:
            trajectory = episode.trajectory(AgentResult.of(result))
        except ValueError as error:
            raise AgentFailed(f"the agent has ended, but {error}") from error
        if transcript is not None:
            transcript += episode.turns()
        return trajectory

    async def _result(self, task: Task, url: str, episode: GatewayEpisode) -> Any:
        """Run the agent; where this is cancelled, the error says whether the engine was awaited then."""
        running = asyncio.ensure_future(self._pool.run(task, url, episode.key))
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            awaited = episode.awaits_engine  # before the agent ends, and its requests with it
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise asyncio.CancelledError(*[ENGINE_AWAITED] * awaited) from None
        return running.result()

    def metrics(self) -> dict[str, float]:
        """Metrics since the start."""
        counters = {} if self._gateway is None else self._gateway.counters
        return {
            "actor/gateway_requests": float(counters.get("requests", 0)),
            "actor/gateway_refused": float(counters.get("refused_keys", 0) + counters.get("refused_requests", 0)),
            "actor/agent_processes_replaced": float(self._pool.num_replaced),
        }

    async def close(self) -> None:
        """End server and processes."""
        await self._pool.close()
        if self._gateway is not None:
            await self._gateway.close()
