"""Embedded engine: continuous batching on a Hugging Face causal LM in plain PyTorch, inside the actor's process.

Invariant: a step is one forward over every running session plus one draw for each, and no other work interrupts it.
Requests, aborts and new weights therefore always fall between two steps, and a token's version is the version of the
weights that computed its logits.

Keys and values stay in the cache over all turns of a session and over a change of weights (policy "keep_kv"): after a
change, the logits of a session are those of the new weights on keys and values of the old ones.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from impala_llm.engines.base import EngineError, EngineStats, Generation, SamplingParams, WeightSource, check_request
from impala_llm.engines.embedded import sampling
from impala_llm.engines.embedded.decoder import make_decoder
from impala_llm.engines.embedded.kv_cache import KVCache
from impala_llm.engines.embedded.loading import load_whole
from impala_llm.engines.embedded.model_check import (
    check_agreement,
    describe,
    plain_log_probs,
    random_rows,
    refusing,
    row_pairs,
)
from impala_llm.engines.embedded.model_weights import ModelWeights
from impala_llm.engines.embedded.scheduler import Plan, plan_step, prompt_tokens_of_step
from impala_llm.engines.embedded.sessions import SessionTable

_PATH = "the embedded engine"
_CHECKED_COMPLETION = 8
"""Tokens of a completion in the model check at the start."""
_TURNS_OF_LOOP = 8
"""Turns of the event loop between two steps."""
MOST_FAILED_STEPS = 3
"""Steps that fail one after the other, from which on the engine counts as broken: after some errors of a GPU all do."""

_log = logging.getLogger(__name__)


@dataclass
class _Request:
    session_id: str
    prompt: np.ndarray
    params: SamplingParams
    completion: asyncio.Future[Generation]


def _make_cache(model: PreTrainedModel, device: torch.device, max_sessions: int, max_length: int) -> KVCache:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return KVCache(
        layers=config.num_hidden_layers,
        slots=max_sessions,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        max_length=max_length,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        # On a CPU, half-precision products are slow for the uneven widths of attention, so the cache is float32 there.
        dtype=torch.float32 if device.type == "cpu" else model.dtype,
        device=device,
    )


class TorchEngine:
    """Engine in this process, see `impala_llm.engines.base.Engine`. All methods are called from one asyncio loop."""

    _failed_steps = 0
    """Steps that have failed since the last one that did not."""
    _failure: EngineError | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sessions: int,
        max_length: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefill_budget: int = 2048,
        version: int = 0,
    ) -> None:
        """
        Args:
            model: belongs to the engine from now on: its attention and the storage of its parameters are changed.
            max_sessions: cache slots. A session holds one from its first request until `release`; more sessions wait.
            max_length: tokens of a session at most; the cache has room for max_sessions * max_length of them.
            seed: mixed into the random stream of every session.
            prefill_budget: prompt tokens in one step at most; bounds a step's memory and how long decoding waits. On a
                CPU large models have fewer, see `scheduler.prompt_tokens_of_step`.
            version: policy version of the model's weights.

        Raises:
            EngineError: a limit that is not positive, more tokens than the model has positions for, or a model whose
                attention this engine cannot compute.
        """
        for name, value in (
            ("max_sessions", max_sessions),
            ("max_length", max_length),
            ("prefill_budget", prefill_budget),
        ):
            if value < 1:
                raise EngineError(f"{name} is {value}: it must be >= 1")
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and max_length > positions:
            raise EngineError(
                f"max_length is {max_length}, but the model has {positions} positions:"
                " lower max_length or take another model"
            )
        self.version = version
        self.vocab_size = config.vocab_size
        self.max_length = max_length
        self._seed = seed
        self._device = torch.device(device)
        self._prefill_budget = prompt_tokens_of_step(
            prefill_budget, sum(p.numel() for p in model.parameters()), is_cpu=self._device.type == "cpu"
        )
        self._model = model
        model = model.to(self._device).eval()  # type: ignore[arg-type]  # transformers wraps `to` without its self
        with refusing(f"{describe(model)} cannot be computed by {_PATH}"):
            self._decoder = make_decoder(model, max_length)
            self._cache = _make_cache(model, self._device, max_sessions, max_length)
        # After the decoder, which may move the parameters.
        self._weights = ModelWeights(model)
        self._table = SessionTable(self._cache)
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._stats = EngineStats()
        self._runner: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        *,
        dtype: torch.dtype = torch.float32,
        max_sessions: int,
        max_length: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefill_budget: int = 2048,
        version: int = 0,
    ) -> "TorchEngine":
        """Make an engine of a local Hugging Face directory; nothing is downloaded. Arguments and errors as above."""
        if not (Path(path) / "config.json").is_file():
            raise EngineError(f"model path {path}: no config.json there; give a local Hugging Face model directory")
        model = load_whole(path, "model.path", dtype=dtype)
        return cls(
            model,
            max_sessions=max_sessions,
            max_length=max_length,
            seed=seed,
            device=device,
            prefill_budget=prefill_budget,
            version=version,
        )

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Continue a history; only tokens outside of the session's cache are computed. Waits while no slot is free.

        Where less than `max_new_tokens` fit into `max_length` the completion ends early, with reason "length". A
        history that is an earlier state of the session takes the session back to it.

        Raises:
            EngineError: a token id outside of the vocabulary, a history without room for a completion or at odds with
                the session's cache, a second request of a session that has one, or a failed step.
        """
        if self._closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(str(self._failure))  # one that is raised again and again keeps all of its callers' frames
        if session_id in self._requests:
            raise EngineError(f"session {session_id!r} has a running request: await it or abort it first")
        tokens = check_request(prompt, params, self.vocab_size, self.max_length)
        slot = self._table.slot(session_id)
        if slot is not None:
            self._table.check_prefix(slot, tokens)
        request = _Request(session_id, tokens, params, asyncio.get_running_loop().create_future())
        self._requests[session_id] = request
        if slot is None:
            self._waiting.append(request)
            self._admit()
        else:
            self._start(slot, request)
        try:
            return await request.completion
        finally:
            # Only a cancelled caller leaves a request behind.
            if self._requests.get(session_id) is request:
                self.abort(session_id)

    def release(self, session_id: str) -> None:
        """Free a session's slot for the next that waits; a running completion is aborted. Unknown ids are ignored."""
        self.abort(session_id)
        if self._table.slot(session_id) is not None:
            self._table.close(session_id)
            self._admit()

    def abort(self, session_id: str | None = None) -> None:
        """End one session's completion, or all: callers get the tokens so far, with reason "abort". The cache stays."""
        for name in list(self._requests) if session_id is None else [session_id]:
            request = self._requests.get(name)
            if request is None:
                continue
            slot = self._table.slot(name)
            if slot is None:
                self._waiting.remove(request)
                empty = np.zeros(0, dtype=np.int32)
                completion = Generation(empty, np.zeros(0, dtype=np.float32), empty.copy(), "abort")
            else:
                if self._table.length[slot] == self._table.prompt_length[slot]:
                    self._forget(slot)  # no draw has shown that what was computed of the history is finite
                completion = self._table.finish(slot, "abort")
            self._resolve(name, completion)

    async def start(self) -> None:
        """Compare sessions of two turns with a plain forward of the model, see `model_check`; before any request.

        Raises:
            ModelRefused: they differ, or the model's own code cannot run on the engine's path.
        """
        for long, short, point in row_pairs(self._model.config.get_text_config(), self.max_length):
            with refusing(f"{describe(self._model)} cannot be computed by {_PATH}"):
                completions = await asyncio.gather(self._play("long", long), self._play("short", short))
                plain = plain_log_probs(self._model, [row for row, _ in completions])
            check_agreement(self._model, _PATH, [log_probs for _, log_probs in completions], plain, point)
        self._stats = EngineStats()

    async def _play(self, name: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Play a session of two turns with `length` tokens.

        Returns:
            Its history, and the log-probabilities of the last completion.
        """
        completion = max(1, min(_CHECKED_COMPLETION, length // 4))
        observation = min(completion, length - 2 * completion - 1)
        tokens = random_rows(self.vocab_size, [length], torch.device("cpu"))[0].tolist()
        params = SamplingParams(max_new_tokens=completion)
        if observation > 0:
            prompt = tokens[: length - 2 * completion - observation]
            first = await self.generate(name, prompt, params)
            history = [*prompt, *first.tokens.tolist(), *tokens[len(prompt) : len(prompt) + observation]]
        else:
            history = tokens[: length - completion]
        last = await self.generate(name, history, params)
        self.release(name)
        row = torch.tensor([*history, *last.tokens.tolist()], device=self._device)
        return row, torch.from_numpy(last.log_probs)

    @property
    def failure(self) -> EngineError | None:
        """Error of the last of `MOST_FAILED_STEPS` steps, if so many have failed one after the other."""
        return self._failure

    async def load_weights(self, directory: Path, version: int) -> None:
        """Copy the weights of a Hugging Face directory (model.safetensors) in place; completions continue with them.

        Raises:
            EngineError: a version below the present one, an unreadable file; ModelRefused: names or shapes of another
                model. The old weights stay in use.
        """
        self._check_version(version)
        begin = time.perf_counter()
        self._weights.load_file(directory)
        self._finish_load(version, begin)

    async def load_shared(self, source: WeightSource) -> None:
        """Load weights from shared memory, with checksums compared and in half the time; see `load_weights`.

        Also raises the source's error for damaged weights: the engine must load again before it is used.
        """
        self._check_version(source.version)
        begin = time.perf_counter()
        self._weights.load_source(source)
        self._finish_load(source.version, begin)

    def load_state(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Load weights from tensors in memory, for a learner in this process; see `load_weights`."""
        self._check_version(version)
        begin = time.perf_counter()
        self._weights.load_state(state)
        self._finish_load(version, begin)

    def stats(self) -> EngineStats:
        """Return counters and current load."""
        return replace(self._stats, running=int(self._table.running.sum()), waiting=len(self._waiting))

    async def close(self) -> None:
        """Abort all completions, refuse further requests, and free the memory of model and cache: callers may still
        hold this engine while its successor is made."""
        self._closed = True
        self.abort()
        try:
            if self._runner is not None:
                await self._runner
        finally:
            self._cache.drop()
            for name in ("_model", "_decoder", "_weights"):
                self.__dict__.pop(name, None)

    def _check_version(self, version: int) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if version < self.version:
            raise EngineError(
                f"version {version} is older than the engine's {self.version}: versions never decrease;"
                " after a restart of the learner, resume it from its checkpoint"
            )

    def _finish_load(self, version: int, begin: float) -> None:
        transferred = time.perf_counter()
        self._decoder.refresh()
        self.version = version
        seconds = time.perf_counter() - begin
        # No step runs during a load: no completion continues before it is complete.
        self._stats.pause_seconds, self._stats.transfer_seconds = seconds, transferred - begin

    def _admit(self) -> None:
        while self._waiting and not self._table.is_full():
            request = self._waiting.popleft()
            self._start(self._table.open(request.session_id), request)

    def _start(self, slot: int, request: _Request) -> None:
        self._table.start(slot, request.prompt, request.params, sampling.stream_key(self._seed, request.params.seed))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    def _resolve(self, session_id: str, completion: Generation | EngineError) -> None:
        future = self._requests.pop(session_id).completion
        if future.done():
            return
        if isinstance(completion, EngineError):
            future.set_exception(completion)
        else:
            future.set_result(completion)

    async def _run(self) -> None:
        while self._table.running.any():
            begin = time.perf_counter()
            try:
                self._step()
                self._failed_steps = 0
            except Exception as error:  # a forward may raise any error: the requests fail, the engine continues
                self._step_failed(error)
            self._stats.busy_seconds += time.perf_counter() - begin
            # Callers with a completion run now and may send the next request before the next batch is packed; one that
            # comes over HTTP takes several turns of the loop. A turn costs 2 µs where there is nothing to do.
            for _ in range(_TURNS_OF_LOOP):
                await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self) -> None:
        table = self._table
        plan = plan_step(table, self._prefill_budget)
        if plan is None:
            return
        of_prompts = np.clip(table.prompt_length[plan.slots] - table.cached[plan.slots], 0, plan.computed).sum()
        logits = self._decoder(plan, self._cache)[: len(plan.sampled)]
        table.cached[plan.slots] += plan.computed
        self._stats.prefill_tokens += int(of_prompts)
        if len(plan.sampled):
            self._draw(plan, logits)

    def _draw(self, plan: Plan, logits: torch.Tensor) -> None:
        table, slots = self._table, plan.sampled
        draws = sampling.uniforms(table.key[slots], table.drawn[slots])
        tokens, log_probs = sampling.draw(logits, table.inverse_temperature[slots], table.greedy[slots], draws)
        finite = np.isfinite(log_probs)
        if not finite.all():
            for slot in slots[~finite]:
                self._fail(int(slot), f"the weights of version {self.version} give logits that are not finite", None)
            slots, tokens, log_probs = slots[finite], tokens[finite], log_probs[finite]
        stopped, at_limit = table.append(slots, tokens, log_probs, self.version)
        self._stats.decode_tokens += len(slots)
        for row in np.flatnonzero(stopped | at_limit):
            slot = int(slots[row])
            completion = table.finish(slot, "stop" if stopped[row] else "length")
            self._resolve(table.session(slot), completion)

    def _step_failed(self, error: Exception) -> None:
        """Fail all running completions; those that wait as well where the engine counts as broken now."""
        self._failed_steps += 1
        if self._failed_steps == 1:
            _log.error("a decoding step failed", exc_info=error)
        error.with_traceback(None)  # its frames hold the tensors of the step, and callers keep the error for a while
        for slot in np.flatnonzero(self._table.running):
            self._fail(int(slot), f"a decoding step failed: {error!r}", error)
        if self._failed_steps >= MOST_FAILED_STEPS:
            self._break(f"{self._failed_steps} decoding steps failed one after the other: {error!r}")

    def _break(self, reason: str) -> None:
        """Fail all requests that wait, and each later one."""
        self._failure = EngineError(reason)
        while self._waiting:
            self._resolve(self._waiting.popleft().session_id, EngineError(reason))

    def _forget(self, slot: int) -> None:
        try:
            self._table.forget(slot)
        except Exception as error:  # after some errors of a GPU all of its operations fail
            self._break(f"the cache of a session cannot be cleared: {error!r}")

    def _fail(self, slot: int, reason: str, cause: Exception | None) -> None:
        session_id = self._table.session(slot)
        self._table.finish(slot, "abort")
        self._forget(slot)
        error = EngineError(f"session {session_id!r}: {reason}")
        error.__cause__ = cause
        self._resolve(session_id, error)
