"""A frozen policy as an opponent in a game: it plays a seat as it was when it was saved, and learns nothing."""

import asyncio
import functools
import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_LOCK = threading.Lock()
"""One answer at a time: the others wait in threads, and not in the actor's event loop."""


class FrozenPolicy:
    """Plays one episode by sampling.

    Args:
        seed: of its samples.
        path: a Hugging Face directory with a chat template. Loaded once a process.
        max_new_tokens: longest move.
        temperature: of the sampling; 0: greedy.
    """

    def __init__(self, seed: int, path: str, max_new_tokens: int = 32, temperature: float = 1.0) -> None:
        self._model, self._tokenizer = _loaded(path)
        self._limits = max_new_tokens, temperature
        self._generator = torch.Generator().manual_seed(seed)
        self._conversation: list[dict[str, str]] = []

    async def act(self, observation: str) -> str:
        """The move for what its seat has been told."""
        self._conversation.append({"role": "user", "content": observation})
        move = await asyncio.to_thread(self._sample)
        self._conversation.append({"role": "assistant", "content": move})
        return move

    @torch.inference_mode()
    def _sample(self) -> str:
        text = self._tokenizer.apply_chat_template(self._conversation, tokenize=False, add_generation_prompt=True)
        tokens = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        max_new_tokens, temperature = self._limits
        said: list[int] = []
        cache = None
        with _LOCK:
            while len(said) < max_new_tokens:
                output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
                logits, cache = output.logits[0, -1].float(), output.past_key_values
                if temperature > 0:
                    chances = torch.softmax(logits / temperature, -1)
                    token = int(torch.multinomial(chances, 1, generator=self._generator))
                else:
                    token = int(logits.argmax())
                if token == self._tokenizer.eos_token_id:
                    break
                said.append(token)
                tokens = torch.tensor([[token]])
        return str(self._tokenizer.decode(said, skip_special_tokens=True))


@functools.cache
def _loaded(path: str) -> tuple[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    return model.eval(), AutoTokenizer.from_pretrained(path)
