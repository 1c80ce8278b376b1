"""Episodes a second through the gateway, over those of the direct way.

One embedded engine plays the same episodes of the toy corridor (three turns, completions of up to --tokens tokens, same
seeds) in turn in every round, --episodes of them at once; which way begins changes from round to round:

    direct              `impala_llm.rollout.play_episode`: reset and step
    gateway             `impala_llm.gateway`: agents with the unmodified `openai` client in --processes processes

The model is random, in float32 with one thread: 4 layers of SmolLM2-135M's width, 16 M parameters. What the gateway
costs does not depend on it, so that a smaller model (--hidden=256: 3 M parameters) makes the ratios smaller. Both ways
give the same tokens, which is checked.

Figures, medians of the rounds' ratios: `gateway_over_direct`, episodes a second through the gateway over those of the
direct way; `own_over_direct`, the same per second of processor time of the engine's process, which is what remains
where the agents have cores of their own. Rows: episodes and sampled tokens a second, and milliseconds of processor time
an episode in this process and in those of the agents.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from impala_llm.bench._gateway_agent import TURNS, agent
from impala_llm.bench.frame import BenchError, whole_number

OPTIONS = {
    "rounds": "measured rounds; default 5",
    "episodes": "episodes at once; default 64",
    "tokens": "tokens of a completion at most; default 96",
    "hidden": "width of the model, of 4 layers; default 576",
    "processes": "processes of agents; default 2",
}
_MAX_LENGTH = 1024


class _Round(NamedTuple):
    seconds: float
    own_seconds: float
    """Processor time of this process."""
    agents_seconds: float
    """Processor time of the agents' processes."""
    tokens: int


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures; see the module for figures and rows. BenchError where an option is malformed."""
    defaults = {"rounds": 5, "episodes": 64, "tokens": 96, "hidden": 576, "processes": 2}
    numbers = {name: whole_number(name, options.get(name, default)) for name, default in defaults.items()}
    rounds = asyncio.run(_measure(**numbers))
    pairs = list(zip(rounds["direct"], rounds["gateway"], strict=True))
    figures = {
        "gateway_over_direct": statistics.median(direct.seconds / gateway.seconds for direct, gateway in pairs),
        "own_over_direct": statistics.median(direct.own_seconds / gateway.own_seconds for direct, gateway in pairs),
    }
    rows = []
    for name, found in rounds.items():
        episodes = numbers["episodes"]
        rows.append(
            {
                "way": name,
                "episodes_per_s": round(statistics.median(episodes / each.seconds for each in found), 1),
                "tokens_per_s": round(statistics.median(each.tokens / each.seconds for each in found)),
                "own_ms": round(1e3 * statistics.median(each.own_seconds / episodes for each in found), 2),
                "agents_ms": round(1e3 * statistics.median(each.agents_seconds / episodes for each in found), 2),
            }
        )
    return figures, rows


async def _measure(rounds: int, episodes: int, tokens: int, hidden: int, processes: int) -> dict[str, list[_Round]]:
    import torch

    from impala_llm.config import load
    from impala_llm.engines.embedded.engine import TorchEngine
    from impala_llm.envs.toy import CorridorSuite
    from impala_llm.gateway.agents import AgentPlayer
    from impala_llm.learning.policy.scratch import make_scratch_policy
    from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
    from impala_llm.trajectory import Trajectory

    torch.set_num_threads(1)
    suite, limits = CorridorSuite(CorridorSuite.Options(num_turns=TURNS)), EpisodeLimits(1.0, tokens, _MAX_LENGTH)
    found: dict[str, list[_Round]] = {"direct": [], "gateway": []}
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-gateway-") as folder:
        policy = make_scratch_policy(Path(folder) / "policy", hidden, 4)
        engine = TorchEngine.from_pretrained(policy, max_sessions=episodes, max_length=_MAX_LENGTH)
        config = load([f"agent.name={agent.__module__}:agent", f"agent.processes={processes}", "model=scratch"])
        player, chat = AgentPlayer(config, policy, suite), ChatFormat.of(policy, "")

        async def direct(spec: EpisodeSpec) -> Trajectory:
            return await play_episode(spec, suite.session(True), engine, chat, limits)

        async def gateway(spec: EpisodeSpec) -> Trajectory:
            return await player.play(spec, engine, limits, training=True)

        async def play(way: Callable[[EpisodeSpec], Awaitable[Trajectory]], number: int) -> list[Trajectory]:
            specs = [
                EpisodeSpec(f"{number}-{task}", task, 0, task, number * episodes + task, suite.name, "bench", "")
                for task in range(episodes)
            ]
            return list(await asyncio.gather(*map(way, specs)))

        ways = [("direct", direct), ("gateway", gateway)]
        try:
            await engine.start()
            await player.start(engine)
            for number in range(-1, rounds):
                played = {}
                for name, way in ways if number % 2 == 0 else ways[::-1]:
                    begin, own, others = time.perf_counter(), time.process_time(), _children_seconds()
                    played[name] = await play(way, number + 1)
                    taken = (time.perf_counter() - begin, time.process_time() - own, _children_seconds() - others)
                    if number >= 0:
                        found[name].append(_Round(*taken, sum(t.num_action_tokens for t in played[name])))
                for one, other in zip(*played.values(), strict=True):
                    if not np.array_equal(one.tokens, other.tokens):
                        raise BenchError(f"episode {one.episode_id} has other tokens through the gateway")
        finally:
            await player.close()
            await engine.close()
    return found


def _children_seconds() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times))
