"""Sessions of an engine: token history, progress and sampling state of each, as arrays by cache slot.

Invariant: slot s of the cache holds the keys and values of tokens[s, :cached[s]]. A running session always knows at
least one token more than is cached: the last one, whose logits are what the next draw needs.
"""

import numpy as np

from impala_llm.engines.base import MAX_STOP_TOKENS, EngineError, FinishReason, Generation, SamplingParams
from impala_llm.engines.embedded.kv_cache import KVCache


class SessionTable:
    """Sessions in slots. The public arrays are indexed by slot, [slots] or [slots, max_length].

    Attributes:
        tokens, log_probs, versions: the history, and for sampled tokens their log-probability and version.
        length, cached: number of known tokens, and of those in the cache.
        running: a completion is being computed.
        prompt_length, limit: length at which it begins, and at which it ends.
        inverse_temperature, greedy, stops, key, drawn: state of the sampling; `drawn` counts the session's draws.
        order: number of the request, in order of arrival.
    """

    def __init__(self, cache: KVCache) -> None:
        slots, max_length = cache.slots, cache.max_length
        self._cache = cache
        self._state = np.zeros(
            slots,
            dtype=[
                ("tokens", np.int32, (max_length,)),
                ("log_probs", np.float32, (max_length,)),
                ("versions", np.int32, (max_length,)),
                ("length", np.int64),
                ("cached", np.int64),
                ("running", np.bool_),
                ("prompt_length", np.int64),
                ("limit", np.int64),
                ("inverse_temperature", np.float32),
                ("greedy", np.bool_),
                ("stops", np.int64, (MAX_STOP_TOKENS,)),
                ("key", np.uint64),
                ("drawn", np.int64),
                ("order", np.int64),
            ],
        )
        self.tokens = self._state["tokens"]
        self.log_probs = self._state["log_probs"]
        self.versions = self._state["versions"]
        self.length = self._state["length"]
        self.cached = self._state["cached"]
        self.running = self._state["running"]
        self.prompt_length = self._state["prompt_length"]
        self.limit = self._state["limit"]
        self.inverse_temperature = self._state["inverse_temperature"]
        self.greedy = self._state["greedy"]
        self.stops = self._state["stops"]
        self.key = self._state["key"]
        self.drawn = self._state["drawn"]
        self.order = self._state["order"]
        self._session: list[str | None] = [None] * slots
        self._slot: dict[str, int] = {}
        self._requests = 0

    def slot(self, session_id: str) -> int | None:
        """Find the slot of a session; None where it is unknown."""
        return self._slot.get(session_id)

    def session(self, slot: int) -> str:
        """Id of the session in a slot in use."""
        session_id = self._session[slot]
        assert session_id is not None, f"slot {slot} is free"
        return session_id

    def is_full(self) -> bool:
        """Whether no slot is free."""
        return len(self._slot) == len(self._session)

    def open(self, session_id: str) -> int:
        """Give a new session the lowest free slot. Returns it. Raises ValueError where none is free."""
        slot = self._session.index(None)
        self._session[slot] = session_id
        self._slot[session_id] = slot
        self._state[slot] = np.zeros((), dtype=self._state.dtype)
        return slot

    def close(self, session_id: str) -> None:
        """Free the slot of a session that is not running."""
        slot = self._slot.pop(session_id)
        self._session[slot] = None
        self._cache.free(slot)

    def check_prefix(self, slot: int, prompt: np.ndarray) -> None:
        """Check that a history int32[T] continues the session's cached tokens. Raises EngineError where it does not."""
        shared = min(int(self.cached[slot]), len(prompt))
        differs = np.flatnonzero(self.tokens[slot, :shared] != prompt[:shared])
        if len(differs):
            index = int(differs[0])
            raise EngineError(
                f"session {self.session(slot)!r}: token {index} of the history is {prompt[index]}, but the cache was"
                f" computed from {self.tokens[slot, index]}: a history may only grow; release the session to start anew"
            )

    def start(self, slot: int, prompt: np.ndarray, params: SamplingParams, key: np.uint64) -> None:
        """Begin a completion to a history int32[T] that agrees with the cache, T < max_length."""
        self.tokens[slot, : len(prompt)] = prompt
        # The last token goes through the model in any case: the completion's first logits are its output.
        self.cached[slot] = min(self.cached[slot], len(prompt) - 1)
        self.length[slot] = self.prompt_length[slot] = len(prompt)
        self.limit[slot] = min(len(prompt) + params.max_new_tokens, self._cache.max_length)
        self.inverse_temperature[slot] = 1.0 if params.greedy else 1.0 / params.temperature
        self.greedy[slot] = params.greedy
        self.stops[slot] = -1
        self.stops[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self.key[slot] = key
        self._cache.reserve(slot, int(self.limit[slot]))
        self.order[slot] = self._requests
        self._requests += 1
        self.running[slot] = True

    def append(
        self, slots: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add one sampled token to each of `slots`; all arrays [R]. Returns bool[R] twice: stopped, at the limit."""
        indices = self.length[slots]
        self.tokens[slots, indices] = tokens
        self.log_probs[slots, indices] = log_probs
        self.versions[slots, indices] = version
        self.length[slots] = indices + 1
        self.drawn[slots] += 1
        return (tokens[:, None] == self.stops[slots]).any(axis=1), indices + 1 >= self.limit[slots]

    def finish(self, slot: int, reason: FinishReason) -> Generation:
        """End the completion of a running session; its history stays."""
        completion = slice(int(self.prompt_length[slot]), int(self.length[slot]))
        self.running[slot] = False
        return Generation(
            tokens=self.tokens[slot, completion].copy(),
            log_probs=self.log_probs[slot, completion].copy(),
            versions=self.versions[slot, completion].copy(),
            finish_reason=reason,
        )

    def forget(self, slot: int) -> None:
        """Drop and zero a session's cache, whose values may not be finite."""
        self.cached[slot] = 0
        self._cache.clear(slot)
