"""An SGLang engine with a real server, small policies for it, and what these say without any engine or cache."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from impala_llm.engines.base import Generation, SamplingParams
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.engines.sglang.external_server import RemoteServer
from impala_llm.engines.sglang.launch_args import ServerSettings
from impala_llm.engines.sglang.server import SGLangServer
from impala_llm.learning.policy.model import PolicyModel
from tests.system.sglang import sglang_python, tiny_checkpoint

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
    def log_probs(self, version: int, tokens: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
        """float64[len(tokens) - start], of tokens[start:]."""
        logits = self.models[version](input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        return picked(logits / temperature, tokens, start)

    @torch.no_grad()
    def learners_log_probs(
        self, version: int, completions: Sequence[tuple[list[int], Generation]], temperature: float
    ) -> list[np.ndarray]:
        """Log-probabilities of the tokens of each (prompt, completion): by the model that trains, on rows packed as the
        learner packs them."""
        model = PolicyModel.from_pretrained(self.directories[version]).eval()
        rows = [torch.tensor([*prompt, *completion.tokens.tolist()]) for prompt, completion in completions]
        lengths = torch.tensor([len(row) for row in rows])
        hidden = model.hidden(torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows]), lengths)
        before = [
            row[len(prompt) - 1 : -1]
            for row, (prompt, _) in zip(hidden.split(lengths.tolist()), completions, strict=True)
        ]
        targets = [row[len(prompt) :] for row, (prompt, _) in zip(rows, completions, strict=True)]
        found, _ = model.action_log_probs(torch.cat(before), torch.cat(targets), temperature)
        return [part.numpy() for part in found.split([len(part) for part in targets])]

    def check(self, prompt: list[int], completion: Generation, temperature: float = 1.0) -> None:
        """Each token's log-probability is the forward of its own version over all tokens before it."""
        tokens = [*prompt, *completion.tokens.tolist()]
        for version in set(completion.versions.tolist()):
            own = completion.versions == version
            expected = self.log_probs(version, tokens, len(prompt), temperature)
            np.testing.assert_allclose(completion.log_probs[own], expected[own], rtol=0, atol=TOLERANCE)


def picked(logits: torch.Tensor, tokens: list[int], start: int) -> np.ndarray:
    log_probs = logits.log_softmax(-1)
    return np.array([log_probs[index - 1, tokens[index]].item() for index in range(start, len(tokens))])


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
            async with asyncio.timeout(300):  # a new start of a server on a busy machine included
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

    def check(self, prompt: list[int], completion: Generation, temperature: float = 1.0) -> None:
        models = np.array([self.model_of(version) for version in completion.versions], np.int32)
        self.policies.check(
            prompt, Generation(completion.tokens, completion.log_probs, models, completion.finish_reason), temperature
        )

    @contextlib.asynccontextmanager
    async def second_engine(self, in_flight: str):
        """On the same server, as one that others own."""
        engine = self.make([RemoteServer(self.server.url, 10, self.server.key)], self.engine.version, in_flight)
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
def running_rig(root: Path, radix_cache: bool = False, as_remote: bool = False) -> Iterator[Rig]:
    """A rig whose server runs.

    Args:
        root: for its files.
        radix_cache: whether the server has a prefix cache.
        as_remote: the engine takes the server for one that others own, and does not start it again when it dies.
    """
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
        try:
            if as_remote:
                runner.run(server.start())
            seen = RemoteServer(server.url, 10, server.key) if as_remote else server
            rig.engine = rig.make([seen], 0, "recompute_kv")
            runner.run(rig.engine.start())
            yield rig
        finally:
            if rig.engine is not None:
                runner.run(rig.engine.close())
            runner.run(server.close())


async def has_decoded(engine: SGLangEngine, more: int) -> None:
    """Wait until so many more tokens have arrived, of completions that are all still under way.

    A server does not wait for this process: on a busy machine it may end short completions before any of this is run.
    """
    await asyncio.sleep(0)  # completions that were asked for just now begin
    completions = dict(engine.completions)
    target = sum(len(completion.tokens) for completion in completions.values()) + more
    async with asyncio.timeout(60):
        while True:
            ended = {name: len(each.tokens) for name, each in completions.items() if name not in engine.completions}
            assert completions and not ended, f"a completion ended early: ask for longer ones ({ended=}, by tokens)"
            if sum(len(completion.tokens) for completion in completions.values()) >= target:
                return
            await asyncio.sleep(0.002)


def start_completions(engine: SGLangEngine, prompts: list[list[int]], length: int) -> list[asyncio.Task[Generation]]:
    params = SamplingParams(max_new_tokens=length)
    return [
        asyncio.create_task(engine.generate(f"episode-{index}", prompt, params)) for index, prompt in enumerate(prompts)
    ]
