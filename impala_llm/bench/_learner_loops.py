"""Contenders of the learner's benchmark: each makes an update of the same rows, and returns its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from impala_llm.config import load
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.log_probs import token_log_probs
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import action_log_probs
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory

_CLIP = 1.0


def rows_of_actions(folder: Path, lengths: Sequence[int], share: float = 1.0, scored: bool = True) -> list[Trajectory]:
    """Random rows with random returns, of one group, sampled by the model itself as far as a learner can see.

    Args:
        share: of the tokens, at the end of a row, that are actions; the first one never is.
        scored: whether they have the model's log-probabilities; else some number.
    """
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    rng = np.random.default_rng(1)
    rows = []
    for number, length in enumerate(lengths):
        begin = max(1, length - int(share * length))
        rows.append(random_row(rng, number, begin, length, vocabulary))
    if not scored:
        return rows
    model = PolicyModel.from_pretrained(folder)
    for micro in pack(rows, 2048):
        found = action_log_probs(model, micro, 1.0).split([rows[i].num_action_tokens for i in micro.members])
        for i, log_probs in zip(micro.members, found, strict=True):
            rows[i].behaviour_log_probs[rows[i].action_mask] = log_probs.numpy()
    return rows


def random_row(rng: np.random.Generator, number: int, begin: int, length: int, vocabulary: int) -> Trajectory:
    """Random tokens with a random return; all from `begin` on are one action, as a uniform policy samples it."""
    mask = np.arange(length) >= begin
    rewards = np.zeros(length, np.float32)
    rewards[-1] = rng.normal()
    return Trajectory(
        tokens=rng.integers(0, vocabulary, length).astype(np.int32),
        action_mask=mask,
        behaviour_log_probs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        rewards=rewards,
        turns=np.array([[begin, length]], np.int32),
        bootstrap=False,
        episode_id=str(number),
        group_id=0,
        task_id=0,
        env="bench",
        actor_id="bench",
        ticket_id=number,
        score=0.0,
        success=False,
    )


def trainer(folder: Path, rows: Sequence[Trajectory], *words: str) -> tuple[Callable[[], float], int, PolicyModel]:
    """The learner's own update; its micro-batch in tokens; and its model, which the bare loop shares."""
    settings = [
        f"model.path={folder}",
        "engine.temperature=1",
        "algorithm=group_relative",
        "algorithm.loss=reinforce",
        "algorithm.group_size=8",
        "learner.learning_rate=0",
        "learner.token_budget=auto",
        f"learner.max_grad_norm={_CLIP}",
        *words,
    ]
    config = load(settings)
    model = PolicyModel.from_pretrained(folder, config.model.value_hidden_size, config.model.value_trunk_gradient)
    made = Trainer(config, Ranks("cpu"), model)
    batch = Batch(tuple(rows), (1.0,) * len(rows), tuple(range(len(rows))), 1.0)

    def update() -> float:
        return made.update(batch, 0, 0.0).metrics.flush()["loss/total"]

    update()
    return update, made.budget.tokens, model


def advantages(rows: Sequence[Trajectory]) -> list[float]:
    """Advantage of each row: its return less the mean of all rows."""
    returns = np.array([float(t.rewards.sum()) for t in rows])
    values: list[float] = (returns - returns.mean()).tolist()
    return values


def _update(
    parameters: Sequence[torch.nn.Parameter], losses: Sequence[Callable[[], Tensor]], optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    """An update by a loss for each micro-batch."""

    def update() -> float:
        total = 0.0
        for loss_of in losses:
            loss = loss_of()
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return update


@cache
def _optimizer(model: Any) -> torch.optim.Optimizer:
    """One for all sizes of a contender, for its memory."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


def bare_loop(model: PolicyModel, rows: Sequence[Trajectory], token_budget: int) -> Callable[[], float]:
    """Packed rows with attention row by row, log-probabilities in chunks."""
    of_rows, num_actions = torch.tensor(advantages(rows)), sum(t.num_action_tokens for t in rows)
    head: Any = model.lm.get_output_embeddings()

    def loss_of(micro: Any, weights: Tensor) -> Tensor:
        hidden = model.hidden(micro.tokens, micro.position_ids, micro.context_lengths)
        indices = micro.action_positions
        log_probs = token_log_probs(hidden[indices - 1], head.weight, None, micro.tokens[indices], 1.0)[0]
        return -(weights * log_probs).sum() / num_actions

    losses = []
    for micro in pack(rows, token_budget):
        weights = of_rows[list(micro.members)][micro.segment_ids]
        losses.append(lambda micro=micro, weights=weights: loss_of(micro, weights))
    return _update(list(model.lm.parameters()), losses, _optimizer(model.lm))


@cache
def _hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def hf_packed(folder: Path, rows: Sequence[Trajectory], token_budget: int) -> Callable[[], float]:
    """transformers' model on packed rows, which it tells apart by their position ids."""
    model = _hf_model(folder)
    of_rows, num_actions = torch.tensor(advantages(rows)), sum(t.num_action_tokens for t in rows)

    def loss_of(micro: Any, weights: Tensor) -> Tensor:
        logits: Tensor = model(
            input_ids=micro.tokens[None], position_ids=micro.position_ids[None], use_cache=False
        ).logits[0]
        indices = micro.action_positions
        log_probs = logits[indices - 1].log_softmax(-1).gather(-1, micro.tokens[indices][:, None]).squeeze(-1)
        return -(weights * log_probs).sum() / num_actions

    losses = []
    for micro in pack(rows, token_budget):
        weights = of_rows[list(micro.members)][micro.segment_ids]
        losses.append(lambda micro=micro, weights=weights: loss_of(micro, weights))
    return _update(list(model.parameters()), losses, _optimizer(model))


def padded(folder: Path, rows: Sequence[Trajectory]) -> Callable[[], float]:
    """transformers' model on all rows at once, padded at their ends."""
    model = _hf_model(folder)
    num_actions, width = sum(t.num_action_tokens for t in rows), max(t.num_tokens for t in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    weights = torch.zeros(len(rows), width)
    for i, (row, advantage) in enumerate(zip(rows, advantages(rows), strict=True)):
        tokens[i, : row.num_tokens] = torch.from_numpy(row.tokens.astype(np.int64))
        mask[i, : row.num_tokens] = 1
        weights[i, : row.num_tokens] = advantage * torch.from_numpy(np.array(row.action_mask)).float()

    def loss_of() -> Tensor:
        logits: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return -(weights[:, 1:] * log_probs).sum() / num_actions

    return _update(list(model.parameters()), [loss_of], _optimizer(model))
