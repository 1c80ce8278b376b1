"""The actor's side of the engine benchmark: episodes on an SGLang server, and the same requests from a bare client.

Invariant: the bare client sends, stream by stream and in the same order, the prompts that the episodes of its round
sent, and asks for as many tokens as these got, so the server does the same work twice.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from transformers import AutoConfig, AutoTokenizer

from impala_llm.bench._engine_work import Round
from impala_llm.bench.frame import BenchError
from impala_llm.engines.base import Engine, Generation, SamplingParams
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.engines.sglang.launch_args import ServerSettings
from impala_llm.engines.sglang.server import SGLangServer
from impala_llm.envs.toy import CorridorSuite
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode

_TURNS = 3
_EPISODES = 2
"""Episodes of each stream in a round, one after the other."""
_NEW_TOKENS = 96
_MAX_LENGTH = 512

Requests = dict[int, list[tuple[list[int], int]]]
"""stream -> prompts in order, and how many tokens each was answered with."""


class _Recorder:
    """An engine that notes what each stream asked for. Session ids are "stream-episode"."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: Requests = defaultdict(list)

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        completion = await self._engine.generate(session_id, prompt, params)
        self.requests[int(session_id.partition("-")[0])].append((list(prompt), len(completion.tokens)))
        return completion

    def release(self, session_id: str) -> None:
        self._engine.release(session_id)


async def measure_actor(python: str, num_rounds: int, streams: int) -> dict[str, list[Round]]:
    """Rounds of "actor" and "bare", taken in turn on one server. EngineError where the server does not come up."""
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-engine-") as folder:
        model = Path(folder) / "model"
        make_scratch_policy(model, 256, 4, 0)
        server = SGLangServer(
            ServerSettings(
                model=model,
                log=Path(folder) / "sglang.log",
                python=python,
                max_length=_MAX_LENGTH,
                max_running=streams,
            )
        )
        vocab_size = AutoConfig.from_pretrained(model, local_files_only=True).vocab_size
        engine = SGLangEngine([server], vocab_size=vocab_size, max_length=_MAX_LENGTH)
        chat = ChatFormat(AutoTokenizer.from_pretrained(model, local_files_only=True))
        rounds: dict[str, list[Round]] = {"actor": [], "bare": []}
        try:
            await engine.start()
            authorised = {"Authorization": f"Bearer {server.key}"}
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=authorised) as http:
                for index in range(-1, num_rounds):
                    played, requests = await _play_episodes(engine, chat, streams)
                    sent = await _send_bare(http, f"{server.url}/generate", requests)
                    if index >= 0:
                        rounds["actor"].append(played)
                        rounds["bare"].append(sent)
        finally:
            await engine.close()
    return rounds


async def _play_episodes(engine: Engine, chat: ChatFormat, streams: int) -> tuple[Round, Requests]:
    suite = CorridorSuite(CorridorSuite.Options(num_turns=_TURNS))
    recorder = _Recorder(engine)
    limits = EpisodeLimits(temperature=1.0, max_new_tokens=_NEW_TOKENS, max_length=_MAX_LENGTH)

    async def stream(index: int) -> None:
        for episode in range(_EPISODES):
            name, task_id = f"{index}-{episode}", index * _EPISODES + episode
            spec = EpisodeSpec(
                episode_id=name,
                task_id=task_id,
                group_id=0,
                ticket_id=task_id,
                seed=task_id,
                env=suite.name,
                actor_id="bench",
                signature=suite.signature(task_id),
            )
            await play_episode(spec, suite.session(training=True), recorder, chat, limits)

    begin, begin_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(stream, range(streams)))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    tokens = sum(length for asked in recorder.requests.values() for _, length in asked)
    return Round(seconds, cpu_seconds, tokens), recorder.requests


async def _send_bare(http: aiohttp.ClientSession, url: str, requests: Requests) -> Round:
    async def stream(asked: list[tuple[list[int], int]]) -> int:
        total = 0
        for prompt, length in asked:
            sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
            body = {
                "input_ids": prompt,
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": -1,
            }
            async with http.post(url, json=body) as response:
                answer = await response.json()
            if response.status != 200 or len(answer["meta_info"]["output_token_logprobs"]) != length:
                raise BenchError(f"the bare client asked for {length} tokens and got {response.status}: {answer}")
            total += length
        return total

    begin, begin_cpu = time.perf_counter(), time.process_time()
    totals = await asyncio.gather(*map(stream, requests.values()))
    return Round(time.perf_counter() - begin, time.process_time() - begin_cpu, sum(totals))
