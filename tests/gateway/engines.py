"""An engine for the tests of the gateway: random completions, each token with a number of its own."""

import asyncio
import random

import numpy as np

from impala_llm.engines.base import EngineError, Generation, SamplingParams


class RandomEngine:
    """Keeps the rules of the embedded engine: a session's history only grows, and there is one request of it at a time.

    Args:
        ids: tokens that it draws from.
        slots: sessions that it keeps at once; requests of others wait.
    """

    version, vocab_size = 0, 1000

    def __init__(self, rng: random.Random, ids: list[int], slots: int = 1 << 30) -> None:
        self.rng, self.ids, self.slots = rng, ids, slots
        self.sampled: list[tuple[int, list[int]]] = []
        """Token and all before it, of each that was sampled; its number here is -log-probability · 1024."""
        self.params: list[SamplingParams] = []
        self.sessions: dict[str, list[int]] = {}
        self.running: set[str] = set()
        self.aborted: set[str] = set()

    async def generate(self, session_id, prompt, params):
        assert session_id not in self.running, "one request of a session at a time"
        self.running.add(session_id)
        self.params.append(params)
        try:
            while session_id not in self.sessions and len(self.sessions) >= self.slots:
                if session_id in self.aborted:
                    return self._generation([], [], "abort")
                await asyncio.sleep(0)
            before = self.sessions.setdefault(session_id, [])
            assert list(prompt[: len(before)]) == before, "a history may only grow"
            return await self._complete(session_id, list(prompt), params)
        finally:
            self.running.discard(session_id)
            self.aborted.discard(session_id)

    async def _complete(self, session_id, history, params):
        tokens, serials = [], []
        reason = "length"
        while len(tokens) < params.max_new_tokens:
            for _ in range(self.rng.randrange(3)):
                await asyncio.sleep(0)
            if session_id in self.aborted:
                reason = "abort"
                break
            token = self.rng.choice([*self.ids, *params.stop_token_ids])
            serials.append(len(self.sampled))
            self.sampled.append((token, [*history, *tokens]))
            tokens.append(token)
            if token in params.stop_token_ids:
                reason = "stop"
                break
        self.sessions[session_id] = [*history, *tokens]
        return self._generation(tokens, serials, reason)

    def _generation(self, tokens, serials, reason):
        log_probs = -np.array(serials, np.float32) / 1024
        return Generation(np.array(tokens, np.int32), log_probs, np.zeros(len(tokens), np.int32), reason)

    def abort(self, session_id=None):
        self.aborted |= self.running if session_id is None else self.running & {session_id}

    def release(self, session_id):
        self.abort(session_id)
        self.sessions.pop(session_id, None)


class FailingEngine(RandomEngine):
    """Fails with every request."""

    async def generate(self, session_id, prompt, params):
        raise EngineError("the engine is broken")
