"""What a token generator is to an actor: token ids in, token ids out, with log-probability and version of each.

Invariant: an engine never turns ids into text or text into ids, so what the learner sees is what was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """A request that the engine refuses, or an engine that cannot go on. The message says which and why."""


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


class Engine(Protocol):
    """A policy that many episodes share. All methods are called from one asyncio loop."""

    version: int
    """Policy version of the weights in use."""
    vocab_size: int

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

    async def close(self) -> None:
        """End running answers and free the engine."""
        ...
