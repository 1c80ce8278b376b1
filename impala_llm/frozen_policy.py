"""A frozen policy as an opponent in a game: it plays a seat as it was when it was saved, and learns nothing."""

import asyncio
import functools
import os
import threading
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from impala_llm.engines.embedded.loading import load_whole
from impala_llm.rollout import ChatFormat

_LOCK = threading.Lock()
"""One completion at a time: the others wait in threads, and not in the actor's event loop."""


class FrozenPolicy:
    """Plays one episode by sampling.

    Args:
        seed: of its samples.
        path: a Hugging Face directory with a chat template. Loaded once a process.
        max_new_tokens: longest move.
        temperature: of the sampling; 0: greedy.
        max_length: tokens that it sees and writes at most; of a longer game it sees the latest.

    Raises:
        ValueError: max_length leaves nothing to see.
    """

    def __init__(
        self, seed: int, path: str, max_new_tokens: int = 32, temperature: float = 1.0, max_length: int = 4096
    ) -> None:
        if max_length <= max_new_tokens:
            raise ValueError(
                f"env.args.opponent_args.max_length={max_length}: it must be above max_new_tokens={max_new_tokens}"
            )
        self._model, self._chat = _loaded(path)
        self._most_seen = max_length - max_new_tokens
        self._limits = max_new_tokens, temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._tokens: list[int] = []

    async def act(self, observation: str) -> str:
        """The move for what its seat has been told. Special tokens are text there, as for the policy."""
        chat, before = self._chat, self._tokens
        self._tokens = [*before, *(chat.following(observation, before[-1]) if before else chat.first(observation))]
        said = await asyncio.to_thread(self._sample)
        self._tokens += said
        return chat.text(np.asarray(said, np.int64))

    @torch.inference_mode()
    def _sample(self) -> list[int]:
        """The ids of a move, with the token that ended it."""
        tokens, cache = torch.tensor([self._tokens[-self._most_seen :]]), None
        max_new_tokens, temperature = self._limits
        said: list[int] = []
        with _LOCK:
            while len(said) < max_new_tokens and (not said or said[-1] not in self._chat.stop_token_ids):
                output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
                logits, cache = output.logits[0, -1].float(), output.past_key_values
                if temperature > 0:
                    chances = torch.softmax(logits / temperature, -1)
                    token = int(torch.multinomial(chances, 1, generator=self._generator))
                else:
                    token = int(logits.argmax())
                said.append(token)
                tokens = torch.tensor([[token]])
        return said


@functools.cache
def _loaded(path: str) -> tuple[Any, ChatFormat]:
    folder = os.path.expanduser(path)
    model: Any = load_whole(folder, "env.args.opponent_args.path")
    return model.eval(), ChatFormat(AutoTokenizer.from_pretrained(folder))
