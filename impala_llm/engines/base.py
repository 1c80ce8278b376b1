"""What a token generator is to an actor: token ids in, token ids out, with log-probability and version of each.

Invariant: an engine never turns ids into text or text into ids, so what the learner sees is what was sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """A request that the engine refuses, or an engine that cannot go on. The message says which and why."""


class ModelRefused(EngineError):
    """A model that would be computed wrongly; the message has the figure. Another attempt fails the same way."""


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is sampled. Top-p and top-k are absent on purpose: with them the engine samples from another
    distribution than the one whose log-probabilities it reports, and the importance ratios would be wrong."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    """Take the most likely token; log-probabilities are then those at temperature 1."""
    seed: int = 0
    """Seed of the episode's own random stream. Position i of the stream serves the i-th sampled token."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be > 0 (use greedy=True for an argmax)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be >= 1")


@dataclass(frozen=True)
class Generation:
    """An answer of n tokens, the stop token included."""

    tokens: np.ndarray
    """int32[n]."""
    logprobs: np.ndarray
    """float32[n]: log_softmax(logits / temperature) of each token, in nats."""
    versions: np.ndarray
    """int32[n]: policy version that sampled each token."""
    finish_reason: FinishReason


@dataclass
class EngineStats:
    """Counters since the start (differences give rates), and the load now."""

    steps: int = 0
    decode_tokens: int = 0
    """Tokens sampled."""
    prefill_tokens: int = 0
    """Prompt tokens computed. A token whose keys and values were in the cache is not counted."""
    busy_seconds: float = 0.0
    """Time spent in steps."""
    weight_loads: int = 0
    weight_load_seconds: float = 0.0
    pause_seconds: float = 0.0
    """How long answers stood still for the latest change of weights."""
    transfer_seconds: float = 0.0
    """The part of it in which weights were read."""
    is_up: bool = True
    """Whether anything can answer now."""
    restarts: int = 0
    """How often a server went away and came back."""
    running: int = 0
    """Sessions with an answer under way."""
    waiting: int = 0
    """Requests that wait for a free slot."""


class WeightSource(Protocol):
    """Weights in shared memory that stay as they are while they are loaded, such as `pipeline.weights.WeightLease`."""

    version: int
    path: Path
    """The same weights as a Hugging Face directory."""

    def tensors(self, verify: bool = True) -> Mapping[str, tuple[str, tuple[int, ...], np.ndarray]]:
        """name -> (safetensors dtype, shape, uint8[bytes]). verify: raises where a byte is not as it was written."""

    def copy_into(self, targets: Mapping[str, np.ndarray]) -> None:
        """Copy to uint8[bytes] each. Raises, with the targets to be filled again, where a byte is not as written."""


class Engine(Protocol):
    """A policy that many episodes share. All methods are called from one asyncio loop."""

    version: int
    """Policy version of the weights in use."""
    vocab_size: int

    @property
    def failure(self) -> EngineError | None:
        """Why no answer can be had any more; None while there is hope."""
        ...

    async def start(self) -> None:
        """Comes first. Raises EngineError where the engine does not come up."""
        ...

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Continue a token history.

        Args:
            session_id: the episode. An engine with a KV cache per session computes only what is new.
            prompt: the whole history of the episode, observations and earlier answers.

        Raises:
            EngineError: an id outside of the vocabulary, a history that is too long or was rewritten, a dead engine.
        """
        ...

    def release(self, session_id: str) -> None:
        """The episode has ended: forget its cache. Unknown ids are ignored."""
        ...

    def abort(self, session_id: str | None = None) -> None:
        """End one session's running answer, or all: each returns what it has, with finish reason "abort"."""
        ...

    async def load_weights(self, directory: Path, version: int) -> None:
        """Swap in the weights of a Hugging Face directory between two decoding steps.

        Raises:
            EngineError: the directory does not fit the model; the old weights stay in use.
        """
        ...

    async def load_shared(self, source: WeightSource) -> None:
        """The same from a weight board, which holds the version still meanwhile."""
        ...

    def stats(self) -> EngineStats:
        """Counters and load, as of now."""
        ...

    async def close(self) -> None:
        """End running answers and free the engine."""
        ...
