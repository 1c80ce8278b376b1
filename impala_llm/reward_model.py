"""A reward model as a verifier: any sequence classifier of Hugging Face, beside the actor, for batches of answers.

The verifier `reward_model` of env=tasks:

    env.args.verifier=reward_model env.args.verifier_args.path=DIRECTORY
"""

import asyncio
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from impala_llm.engines.embedded.loading import load_whole

_Waiting = tuple[str, str, asyncio.Future[float]]


async def score(
    answer: str,
    task: Mapping[str, Any],
    path: str,
    label: int = -1,
    batch_size: int = 16,
    max_length: int = 2048,
    device: str = "cpu",
) -> float:
    """Score an answer. Answers that arrive while others are computed go together, in a thread.

    Args:
        task: with the field `prompt`.
        path: Hugging Face directory of a sequence classifier and its tokenizer. Loaded once an actor.
        label: whose probability is the score; -1: the last. Of a classifier with one output its sigmoid is.
        batch_size: answers that are computed together, at most.
        max_length: tokens; of more, the first are left out.
        device: of the model.
    """
    return await _model(path, label, batch_size, max_length, device).score(str(task["prompt"]), answer)


class RewardModel:
    """A classifier with a queue. Its arguments are those of `score`."""

    def __init__(self, path: str, label: int, batch_size: int, max_length: int, device: str) -> None:
        path = os.path.expanduser(path)
        model: Any = load_whole(path, "env.args.verifier_args.path", AutoModelForSequenceClassification)
        self._model = model.to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left", padding_side="right")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        special = {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        if self._model.config.pad_token_id is None:  # decoders look for the last token before the padding
            self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._label, self._batch_size, self._max_length = label, batch_size, max_length
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def score(self, prompt: str, answer: str) -> float:
        """Score an answer to a prompt, between 0 and 1."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, answer, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # other episodes that are ready add their requests to this batch
            batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            try:
                scores = await asyncio.to_thread(self.scores, [each[:2] for each in batch])
            except Exception as error:
                for *_, future in batch:
                    if not future.done():
                        future.set_exception(RuntimeError(f"the reward model has failed: {error}"))
                continue
            for (*_, future), found in zip(batch, scores, strict=True):
                if not future.done():  # given up meanwhile
                    future.set_result(found)

    def _plain(self, text: str) -> str:
        """Break up the special tokens in a text: an answer could end its turn with one and praise itself after it."""
        return self._special.sub(lambda found: " ".join((found[0][:1], found[0][1:])), text)

    @torch.inference_mode()
    def scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Score pairs of a prompt and an answer as one batch, each between 0 and 1."""
        pairs = [(self._plain(prompt), self._plain(answer)) for prompt, answer in pairs]
        options: dict[str, Any] = {"truncation": True, "max_length": self._max_length, "padding": True}
        if self._tokenizer.chat_template:
            texts = [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], tokenize=False
                )
                for prompt, answer in pairs
            ]
            rows = self._tokenizer(texts, add_special_tokens=False, return_tensors="pt", **options)
        else:
            prompts, answers = map(list, zip(*pairs, strict=True))
            rows = self._tokenizer(prompts, answers, return_tensors="pt", **options)
        logits = self._model(**rows.to(self._model.device)).logits.float()
        chances = torch.sigmoid(logits[:, 0]) if logits.shape[1] == 1 else torch.softmax(logits, -1)[:, self._label]
        found: list[float] = chances.tolist()
        return found


@functools.cache
def _model(path: str, label: int, batch_size: int, max_length: int, device: str) -> RewardModel:
    return RewardModel(path, label, batch_size, max_length, device)
