"""The SGLang engine on real servers. Expected log-probabilities are those of a plain forward without any cache."""

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from impala_llm.engines.base import EngineError, Generation, SamplingParams
from impala_llm.engines.sglang_engine import SGLangEngine
from impala_llm.engines.sglang_remote import RemoteServer
from impala_llm.engines.sglang_server import SGLangServer
from impala_llm.engines.sglang_settings import ServerSettings
from tests.system.sglang import needs_sglang, sglang_python, tiny_checkpoint

pytestmark = [pytest.mark.system, needs_sglang]

MAX_LENGTH = 1024
TOLERANCE = 1e-4
EPISODES = 16


class Policies:
    """Versions of one model: directories, and what they say."""

    def __init__(self, first: Path, root: Path) -> None:
        self.directories = [first]
        self.models = [AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).eval()]
        self.vocab_size = self.models[0].config.vocab_size
        for version in range(1, 5):
            model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).eval()
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(root / f"version-{version}")
            self.directories.append(root / f"version-{version}")
            self.models.append(model)

    @torch.no_grad()
    def logprobs(self, version: int, tokens: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
        """float64[len(tokens) - start], of tokens[start:]."""
        logits = self.models[version](input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        return picked(logits / temperature, tokens, start)

    def check(self, prompt: list[int], answer: Generation, temperature: float = 1.0) -> None:
        """Each token's log-probability is the forward of its own version over all tokens before it."""
        tokens = [*prompt, *answer.tokens.tolist()]
        for version in set(answer.versions.tolist()):
            own = answer.versions == version
            expected = self.logprobs(version, tokens, len(prompt), temperature)
            np.testing.assert_allclose(answer.logprobs[own], expected[own], rtol=0, atol=TOLERANCE)


def picked(logits: torch.Tensor, tokens: list[int], start: int) -> np.ndarray:
    logprobs = logits.log_softmax(-1)
    return np.array([logprobs[place - 1, tokens[place]].item() for place in range(start, len(tokens))])


@dataclass
class Rig:
    """An engine with a server of its own, and the loop that both live on."""

    runner: asyncio.Runner
    server: SGLangServer
    engine: SGLangEngine
    policies: Policies
    newest: tuple[Path, int] = field(default=(Path(), 0))

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(120):
                await test()

        self.runner.run(bounded())

    async def load(self, engine: SGLangEngine, version: int) -> None:
        """Versions repeat the models from the second on."""
        self.newest = (self.directory(version), version)
        await engine.load_weights(*self.newest)

    def directory(self, version: int) -> Path:
        return self.policies.directories[self.model_of(version)]

    def model_of(self, version: int) -> int:
        return 0 if version == 0 else 1 + (version - 1) % (len(self.policies.directories) - 1)

    def check(self, prompt: list[int], answer: Generation, temperature: float = 1.0) -> None:
        models = np.array([self.model_of(version) for version in answer.versions], np.int32)
        self.policies.check(
            prompt, Generation(answer.tokens, answer.logprobs, models, answer.finish_reason), temperature
        )

    @contextlib.asynccontextmanager
    async def second_engine(self, in_flight: str):
        """On the same server, as one that others own."""
        engine = self.make([RemoteServer(self.server.url, timeout_s=10)], self.engine.version, in_flight)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()
            await self.engine.load_weights(*self.newest)

    def make(self, servers, version: int, in_flight: str) -> SGLangEngine:
        return SGLangEngine(
            servers,
            vocab_size=self.policies.vocab_size,
            max_length=MAX_LENGTH,
            version=version,
            in_flight=in_flight,
            weights=lambda: contextlib.nullcontext(self.newest),
        )

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        random = np.random.default_rng(seed)
        return [random.integers(0, self.policies.vocab_size, random.integers(3, 60)).tolist() for _ in range(count)]


@contextlib.contextmanager
def running_rig(root: Path, radix_cache: bool) -> Iterator[Rig]:
    policies = Policies(tiny_checkpoint(root / "version-0"), root)
    settings = ServerSettings(
        model=policies.directories[0],
        log=root / "server.log",
        python=sglang_python(),
        max_length=MAX_LENGTH,
        max_running=EPISODES,
        radix_cache=radix_cache,
    )
    with asyncio.Runner() as runner:
        server = SGLangServer(settings)
        rig = Rig(runner, server, None, policies, (policies.directories[0], 0))
        rig.engine = rig.make([server], 0, "recompute_kv")
        try:
            runner.run(rig.engine.start())
            yield rig
        finally:
            runner.run(rig.engine.close())


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[Rig]:
    with running_rig(tmp_path_factory.mktemp("sglang"), radix_cache=False) as rig:
        yield rig


async def has_decoded(engine: SGLangEngine, more: int) -> None:
    """Wait until so many more tokens have arrived, of answers that are all still under way."""
    answers = dict(engine._answers)
    target = sum(len(answer.tokens) for answer in answers.values()) + more
    async with asyncio.timeout(60):
        while sum(len(answer.tokens) for answer in engine._answers.values()) < target:
            await asyncio.sleep(0.002)
            assert answers.keys() <= engine._answers.keys(), "an answer ended early: ask for longer ones"


def start_answers(engine: SGLangEngine, prompts: list[list[int]], length: int) -> list[asyncio.Task[Generation]]:
    params = SamplingParams(max_new_tokens=length)
    return [
        asyncio.create_task(engine.generate(f"episode-{place}", prompt, params)) for place, prompt in enumerate(prompts)
    ]


def test_logprobs_are_those_of_a_plain_forward_in_every_turn(rig):
    async def test():
        answers = 0

        async def episode(place: int, prompt: list[int]) -> None:
            nonlocal answers
            random = np.random.default_rng(place)
            for _ in range(4):
                params = SamplingParams(
                    temperature=[1.0, 0.7, 1.3][place % 3],
                    max_new_tokens=int(random.integers(1, 40)),
                    stop_token_ids=tuple(random.integers(0, rig.policies.vocab_size, 8).tolist()),
                    greedy=place % 8 == 7,
                )
                answer = await rig.engine.generate(f"turns-{place}", prompt, params)
                rig.check(prompt, answer, 1.0 if params.greedy else params.temperature)
                assert set(answer.versions.tolist()) == {rig.engine.version}
                assert answer.tokens.dtype == answer.versions.dtype == np.int32 and answer.logprobs.dtype == np.float32
                stops = np.isin(answer.tokens, params.stop_token_ids)
                if answer.finish_reason == "stop":
                    assert stops[-1] and stops.sum() == 1
                else:
                    assert answer.finish_reason == "length" and len(answer.tokens) == params.max_new_tokens
                    assert not stops.any()
                answers += 1
                prompt = [*prompt, *answer.tokens.tolist(), *random.integers(0, rig.policies.vocab_size, 9).tolist()]
            rig.engine.release(f"turns-{place}")

        for batch in range(3):
            prompts = rig.prompts(EPISODES, seed=batch)
            await asyncio.gather(*(episode(place, prompt) for place, prompt in enumerate(prompts)))
        assert answers == 192

    rig.run(test)


def test_a_greedy_answer_is_the_argmax(rig):
    async def test():
        prompt = rig.prompts(1, seed=5)[0]
        answer = await rig.engine.generate("greedy", prompt, SamplingParams(max_new_tokens=12, greedy=True))
        tokens = [*prompt, *answer.tokens.tolist()]
        model = rig.policies.models[rig.model_of(rig.engine.version)]
        with torch.no_grad():
            best = model(input_ids=torch.tensor([tokens])).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == answer.tokens.tolist()

    rig.run(test)


def test_recompute_kv_makes_every_token_the_forward_of_its_version(rig):
    async def test():
        version = rig.engine.version
        prompts = rig.prompts(EPISODES, seed=1)
        answers = start_answers(rig.engine, prompts, 900)
        for step in (1, 2, 3):
            await has_decoded(rig.engine, 20 * EPISODES)
            await rig.load(rig.engine, version + step)
            assert rig.engine.version == version + step
            times = rig.engine.last_update
            assert 0 < times.transfer_s < times.pause_s
        for prompt, task in zip(prompts, answers, strict=True):
            answer = await task
            assert len(answer.tokens) == 900
            assert (np.diff(answer.versions) >= 0).all() and len(set(answer.versions.tolist())) >= 3
            rig.check(prompt, answer)
        after = await rig.engine.generate("after", prompts[0], SamplingParams(max_new_tokens=20))
        assert set(after.versions.tolist()) == {version + 3}
        rig.check(prompts[0], after)

    rig.run(test)


def test_keep_kv_goes_on_with_new_weights_over_old_keys_and_values(rig):
    @torch.no_grad()
    def expected(prompt: list[int], answer: Generation, old: PreTrainedModel, new: PreTrainedModel) -> np.ndarray:
        """Tokens are fed one by one, to the weights that sample what follows."""
        tokens = [*prompt, *answer.tokens.tolist()]
        # One token is under way when the server pauses: it is labelled new, but it is of the old weights.
        switch = len(prompt) + int((answer.versions == answer.versions[0]).sum()) + 1
        cache = DynamicCache()
        first = old(input_ids=torch.tensor([tokens[: switch - 1]]), past_key_values=cache).logits
        rest = new(input_ids=torch.tensor([tokens[switch - 1 :]]), past_key_values=cache).logits
        return picked(torch.cat([first, rest], dim=1)[0].double(), tokens, len(prompt))

    async def test():
        async with rig.second_engine("keep_kv") as engine:
            before = engine.version
            prompts = rig.prompts(EPISODES, seed=2)
            answers = start_answers(engine, prompts, 300)
            await has_decoded(engine, 40 * EPISODES)
            await rig.load(engine, before + 1)
            models = [rig.policies.models[rig.model_of(version)] for version in (before, before + 1)]
            for prompt, task in zip(prompts, answers, strict=True):
                answer = await task
                assert set(answer.versions.tolist()) == {before, before + 1}
                np.testing.assert_allclose(answer.logprobs, expected(prompt, answer, *models), rtol=0, atol=TOLERANCE)

    rig.run(test)


def test_drain_mixes_no_versions_in_an_answer(rig):
    async def test():
        async with rig.second_engine("drain") as engine:
            before = engine.version
            prompts = rig.prompts(EPISODES, seed=3)
            early = start_answers(engine, prompts, 300)
            await has_decoded(engine, 16 * EPISODES)
            loading = asyncio.create_task(rig.load(engine, before + 1))
            while not engine._replicas[0].is_draining:
                await asyncio.sleep(0)
            late = await engine.generate("late", prompts[0], SamplingParams(max_new_tokens=8))
            assert loading.done()
            for prompt, task in zip(prompts, early, strict=True):
                answer = await task
                assert set(answer.versions.tolist()) == {before} and len(answer.tokens) == 300
                rig.check(prompt, answer)
            assert set(late.versions.tolist()) == {before + 1}
            rig.check(prompts[0], late)
            assert engine.last_update.pause_s > engine.last_update.transfer_s

    rig.run(test)


def test_wrong_directories_are_refused_and_answers_go_on(rig, tmp_path):
    async def test():
        version = rig.engine.version
        prompts = rig.prompts(4, seed=4)
        answers = start_answers(rig.engine, prompts, 500)
        await has_decoded(rig.engine, 4 * 16)
        cut = shutil.copytree(rig.directory(version), tmp_path / "cut")
        with (cut / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        wide = tmp_path / "wide"
        config = json.loads((rig.directory(0) / "config.json").read_text())
        other = type(rig.policies.models[0].config)(**{**config, "intermediate_size": config["intermediate_size"] * 2})
        type(rig.policies.models[0])(other).save_pretrained(wide)
        for directory, complaint in (
            (tmp_path / "nowhere", "nowhere.*safetensors"),
            (cut, "cut"),
            (wide, "wide.*of another shape"),
        ):
            with pytest.raises(EngineError, match=complaint):
                await rig.engine.load_weights(directory, version + 1)
            assert rig.engine.version == version
        with pytest.raises(EngineError, match="older"):
            await rig.engine.load_weights(rig.directory(0), version - 1)
        for prompt, task in zip(prompts, answers, strict=True):
            answer = await task
            assert set(answer.versions.tolist()) == {version} and len(answer.tokens) == 500
            rig.check(prompt, answer)

    rig.run(test)


def test_requests_that_would_harm_the_server_are_refused(rig):
    async def test():
        size = rig.policies.vocab_size
        for prompt, complaint in (
            ([1, size], f"{size}"),
            ([1, -1], "-1"),
            ([1] * MAX_LENGTH, f"max_length={MAX_LENGTH}"),
        ):
            with pytest.raises(EngineError, match=complaint):
                await rig.engine.generate("wrong", prompt, SamplingParams())
        nearly_full = [1] * (MAX_LENGTH - 3)
        answer = await rig.engine.generate("full", nearly_full, SamplingParams(max_new_tokens=50))
        assert answer.finish_reason == "length" and len(answer.tokens) == 3
        assert rig.engine.restarts == 0

    rig.run(test)


def test_aborted_and_cancelled_answers(rig):
    async def test():
        prompts = rig.prompts(4, seed=6)
        answers = start_answers(rig.engine, prompts, 900)
        await has_decoded(rig.engine, 4 * 20)
        rig.engine.abort("episode-0")
        partial = await answers[0]
        assert partial.finish_reason == "abort" and 0 < len(partial.tokens) < 900
        rig.check(prompts[0], partial)
        answers[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await answers[1]
        async with asyncio.timeout(10):
            while await running_requests(rig) > 2:
                await asyncio.sleep(0.02)
        rig.engine.abort()
        for prompt, task in list(zip(prompts, answers, strict=True))[2:]:
            partial = await task
            assert partial.finish_reason == "abort" and len(partial.tokens) < 900
            rig.check(prompt, partial)
        async with asyncio.timeout(10):
            while await running_requests(rig) > 0:
                await asyncio.sleep(0.02)
        again = await rig.engine.generate("episode-0", prompts[0], SamplingParams(max_new_tokens=5))
        assert again.finish_reason == "length"

    rig.run(test)


async def running_requests(rig: Rig) -> int:
    async with rig.engine._http.get(f"{rig.server.url}/v1/loads?include=core") as response:
        return sum(load["num_running_reqs"] for load in (await response.json())["loads"])


def test_a_killed_server_comes_back_with_the_newest_version_and_loses_nothing(rig):
    async def test():
        version = rig.engine.version + 1
        await rig.load(rig.engine, version)
        prompts = rig.prompts(EPISODES, seed=7)
        counted = rig.engine.stats().decode_tokens
        answers = start_answers(rig.engine, prompts, 500)
        await has_decoded(rig.engine, 40 * EPISODES)
        partial = {name: list(answer.tokens) for name, answer in rig.engine._answers.items()}
        port = int(rig.server.url.rsplit(":", 1)[1])
        for process in psutil.Process().children(recursive=True):
            if any(each.status == "LISTEN" and each.laddr.port == port for each in process.net_connections("tcp")):
                process.send_signal(signal.SIGKILL)
        rig.newest = (rig.directory(version + 3), version + 3)  # what the learner publishes meanwhile
        generations = await asyncio.gather(*answers)
        for place, (prompt, answer) in enumerate(zip(prompts, generations, strict=True)):
            assert len(answer.tokens) == 500 and answer.finish_reason == "length"
            before = partial[f"episode-{place}"]
            assert answer.tokens[: len(before)].tolist() == before and len(before) > 16
            assert set(answer.versions.tolist()) == {version, version + 3}
            rig.check(prompt, answer)
        # No token arrived that is in no answer, and none is in an answer twice.
        assert rig.engine.stats().decode_tokens - counted == EPISODES * 500
        assert rig.engine.restarts == 1 and rig.engine.version == version + 3

    rig.run(test)


def test_the_prefix_cache_never_serves_old_keys_and_values(tmp_path):
    async def test():
        with pytest.raises(EngineError, match="--disable-radix-cache"):
            async with rig.second_engine("keep_kv"):
                raise AssertionError("this server must not be used with keep_kv")
        histories = dict(enumerate(rig.prompts(EPISODES, seed=8)))
        prompt_tokens = 0
        for turn in range(3):
            prompt_tokens += sum(map(len, histories.values()))
            answers = {
                place: asyncio.create_task(rig.engine.generate(f"{place}", tokens, SamplingParams(max_new_tokens=250)))
                for place, tokens in histories.items()
            }
            await has_decoded(rig.engine, 20 * EPISODES)
            if turn:
                await rig.load(rig.engine, turn)
            for place, task in answers.items():
                answer = await task
                rig.check(histories[place], answer)
                assert set(answer.versions.tolist()) == ({turn - 1, turn} if turn else {0})
                histories[place] = [*histories[place], *answer.tokens.tolist(), 5, 6, 7]
        assert rig.engine.stats().prefill_tokens < prompt_tokens  # the cache was of use

    with running_rig(tmp_path, radix_cache=True) as rig:
        rig.run(test)
