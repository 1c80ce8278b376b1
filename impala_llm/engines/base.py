"""Interface of token generators: token ids in, token ids out, with log-probability and version of each.

Invariant: an engine never turns ids into text or text into ids, so what the learner sees is what was sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from impala_llm.settings import Config

FinishReason = Literal["stop", "length", "abort"]
MAX_STOP_TOKENS = 16
"""Limit of the stop tokens of a request."""


class EngineError(RuntimeError):
    """Refused request, or an engine that cannot continue. The message says which and why."""


class ModelRefused(EngineError):
    """Model that would be computed wrongly; the message has the error. Another attempt fails the same way."""


class ServerUnfit(EngineError):
    """Server that cannot work with its settings; the message has the fix. Another start fails the same way."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of a completion. Top-p and top-k are left out on purpose: with them the engine samples from another
    distribution than the one whose log-probabilities it reports, and the importance ratios would be wrong."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    """Take the most likely token; log-probabilities are then those at temperature 1."""
    seed: int = 0
    """Seed of the episode's own random stream. Position i of the stream draws the i-th token."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be > 0 (use greedy=True for an argmax)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be >= 1")


@dataclass(frozen=True)
class Generation:
    """A completion of n tokens, the stop token included."""

    tokens: np.ndarray
    """int32[n]."""
    log_probs: np.ndarray
    """float32[n]: log_softmax(logits / temperature) of each token, in nats."""
    versions: np.ndarray
    """int32[n]: policy version that sampled each token."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        """Raise EngineError unless each token has a log-probability and a version."""
        shapes = [np.shape(values) for values in (self.tokens, self.log_probs, self.versions)]
        if shapes != [(len(self.tokens),)] * 3:
            raise EngineError(
                "a completion has tokens, log_probs and versions of the shapes {}, {}, {}".format(*shapes)
            )


@dataclass
class EngineStats:
    """Counters since the start (differences give rates), and the current load."""

    decode_tokens: int = 0
    """Tokens sampled."""
    prefill_tokens: int = 0
    """Prompt tokens computed. A token whose keys and values were in the cache is not counted; those of a
    completion's last token are not there. So an agent's completions with `stop`, asked for token by token, count as
    well."""
    busy_seconds: float = 0.0
    """Time spent in steps."""
    pause_seconds: float = 0.0
    """Duration for which completions stood still at the latest change of weights."""
    transfer_seconds: float = 0.0
    """The part of it in which weights were read."""
    is_up: bool = True
    """Whether the engine can answer requests now."""
    restarts: int = 0
    """Number of times that a server was lost and came back."""
    running: int = 0
    """Number of sessions with a completion under way."""
    waiting: int = 0
    """Number of requests that wait for a free slot."""


class WeightSource(Protocol):
    """Weights in shared memory that do not change while they are loaded, such as `board.WeightLease`."""

    version: int
    path: Path
    """The same weights as a Hugging Face directory."""

    def tensors(self, verify: bool = True) -> Mapping[str, tuple[str, tuple[int, ...], np.ndarray]]:
        """Return name -> (safetensors dtype, shape, uint8[bytes]). verify: raise where a byte was changed."""

    def copy_into(self, targets: Mapping[str, np.ndarray]) -> None:
        """Copy to uint8[bytes] each. Raises where a byte was changed; the targets must then be filled again."""


class TokenGenerator(Protocol):
    """The part of an engine that an episode uses."""

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Continue a token history.

        Args:
            session_id: of the episode. An engine with a KV cache for each session computes only new tokens.
            prompt: the whole history of the episode, observations and earlier completions.

        Raises:
            EngineError: an id outside of the vocabulary, a history that is too long or was rewritten, a dead engine.
        """
        ...

    def release(self, session_id: str) -> None:
        """Free the cache of an episode that has ended. Unknown ids are ignored."""
        ...


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine of an actor is made from."""

    config: Config
    """`config.engine.options` are the engine's own, and `config.engine.urls` of an actor's engine are its share."""
    policy: Path
    """Hugging Face directory with model and tokenizer."""
    version: int
    """Policy version of its weights; -1: they stand for none, and the newest ones are loaded before an episode."""
    device: str
    """cpu | cuda."""
    index: int = 0
    """Index of the actor on this host, which names its log."""
    weights: Callable[[], AbstractContextManager[tuple[Path, int]]] | None = None
    """Source of the newest weights, as (directory, version), for an engine that restarts a server; None: those of
    `policy`, until others are loaded."""
    server_key: str | None = None
    """API key of a server that the engine starts; None: a new random one."""


class Engine(TokenGenerator, Protocol):
    """Generator that many episodes share. All methods are called from one asyncio loop."""

    version: int
    """Policy version of the weights in use."""
    vocab_size: int

    @property
    def failure(self) -> EngineError | None:
        """Reason why the engine cannot answer any more; None while it can, or may recover."""
        ...

    async def start(self) -> None:
        """Start the engine, before any other call. Raises EngineError where it does not come up."""
        ...

    def abort(self, session_id: str | None = None) -> None:
        """End one session's running completion, or all: each returns its tokens so far, with finish reason "abort"."""
        ...

    async def load_weights(self, directory: Path, version: int) -> None:
        """Swap in the weights of a Hugging Face directory between two decoding steps.

        Raises:
            EngineError: it could not be loaded; the old weights stay in use, and an actor tries again.
            ModelRefused: the directory is of another model, which ends an actor.
        """
        ...

    async def load_shared(self, source: WeightSource) -> None:
        """Swap in weights from a weight board, which keeps the version unchanged meanwhile; see `load_weights`."""
        ...

    def stats(self) -> EngineStats:
        """Return counters and current load."""
        ...

    async def close(self) -> None:
        """End running completions and free the engine."""
        ...


def check_request(prompt: Sequence[int], params: SamplingParams, vocab_size: int, max_length: int) -> np.ndarray:
    """Check a request. Returns its history as int32[T]. Raises EngineError where it cannot be answered."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        raise EngineError(
            f"prompt has shape {tokens.shape} and dtype {tokens.dtype}: it must be a non-empty sequence of token ids"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        index = int(outside[0])
        raise EngineError(
            f"prompt[{index}] is {tokens[index]}: token ids of this model lie in 0 .. {vocab_size - 1};"
            " was the prompt tokenised for another model?"
        )
    if len(tokens) >= max_length:
        raise EngineError(
            f"prompt has {len(tokens)} tokens: with max_length={max_length} there is no room for a completion;"
            " end the episode earlier or raise max_length"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise EngineError(
            f"stop_token_ids has {len(params.stop_token_ids)} entries: at most {MAX_STOP_TOKENS} are supported"
        )
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise EngineError(f"stop_token_ids is {params.stop_token_ids}: ids must lie in 0 .. {vocab_size - 1}")
    return tokens.astype(np.int32)
