"""Imitation of demonstrations: the loss of a policy, and of its value head, and the step that lowers them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from impala_llm.algorithms.interface import PackedBatch
from impala_llm.learning.kept_budget import conditions
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import TokenBudget, memory_of_step
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import MetricLog
from impala_llm.processes.supervised import say
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory


def returns_to_go(t: Trajectory, discount: float) -> np.ndarray:
    """float32[turns]: the sum of the rewards from each turn on, those k turns later times γ^k; NaN where the episode
    was cut, and the rest of its reward is unknown.

    Args:
        discount: γ, a turn.
    """
    found = np.zeros(len(t.turns), np.float32)
    total = float("nan") if t.bootstrap else 0.0
    for k in range(len(t.turns) - 1, -1, -1):
        start, end = t.turns[k]
        total = float(t.rewards[start:end].sum()) + discount * total
        found[k] = total
    return found


class Imitation:
    """A policy that learns to say what was said, and a value head that learns what came of it.

    Args:
        model: placed on its device.
    """

    def __init__(self, config: Config, model: PolicyModel, ranks: Ranks, log: MetricLog) -> None:
        self.config, self.model, self.ranks, self.log = config, model, ranks, log
        learner, sft = config.learner, config.sft
        model.compute_in(learner.precision, learner.activation_checkpointing, learner.compile_layers)
        of_steps = replace(
            learner,
            learning_rate=sft.learning_rate,
            value_learning_rate=sft.value_learning_rate,
            warmup_updates=sft.warmup_updates,
            value_warmup_updates=0,
        )
        self.optimizer = Optimizer(model, of_steps, "sft.learning_rate")
        self.budget = TokenBudget(learner.token_budget, ranks, conditions(config, ranks, model))
        self.value_coef = sft.value_coef if config.algorithm.credit.uses_values else 0.0

    def accumulate(self, rows: Sequence[Trajectory]) -> None:
        """Compute the gradient of an update."""
        if self.budget.must_choose(self.ranks):
            to_come = self.optimizer.bytes_to_come(self.ranks.device.type)
            self.budget.choose(rows, self._trial, to_come, self.ranks)
        weight = sum(self._weight(row) for row in rows)
        turns = max(1, sum(len(row.turns) for row in rows if not row.bootstrap))

        def learned(cpu_micro: PackedBatch) -> tuple[float, ...]:
            of_tokens, of_completions, of_values = self._sums(cpu_micro, rows)
            (of_tokens / weight + self.value_coef * of_values / turns).backward()
            return of_completions.item(), of_values.item()

        found = self.budget.in_micro_batches(rows, learned, self.model.zero_grad)
        tokens = sum(row.num_action_tokens for row in rows)
        self.log.add("sft/loss", sum(each[0] for each in found) / tokens, tokens)
        if self.value_coef:
            self.log.add("sft/value_loss", sum(each[1] for each in found) / turns, turns)

    def step(self, number: int, progress: float) -> None:
        """Change the weights by the gradient.

        Args:
            number: of the update, from 0.
            progress: share of the warm start that is over.

        Raises:
            OutOfMemory: memory does not suffice for it.
        """
        with memory_of_step("model.lora.rank=16"):  # one process learns: there are no ranks to share with
            result = self.optimizer.step(number, progress)
        if result.skipped:
            say(
                f"sft: A STEP IS LEFT OUT: update {number + 1} has a loss or gradient that is not finite; lower "
                f"sft.learning_rate={self.config.sft.learning_rate:g}, or look for damage in the model"
            )
        self.log.add("optimizer/gradient_norm", result.gradient_norm)
        self.log.add("optimizer/clipped_share", float(result.clipped))
        self.log.add("optimizer/skipped", float(result.skipped))
        self.log.add("optimizer/learning_rate", result.learning_rate)

    @torch.no_grad()
    def measure(self, rows: Sequence[Trajectory]) -> None:
        """Log the losses of demonstrations that are not learned from."""

        def sums(cpu_micro: PackedBatch) -> tuple[float, float]:
            _, of_completions, of_values = self._sums(cpu_micro, rows)
            return of_completions.item(), of_values.item()

        found = self.budget.in_micro_batches(rows, sums)
        self.log.add("sft/held_out_loss", sum(e[0] for e in found) / sum(row.num_action_tokens for row in rows))
        turns = sum(len(row.turns) for row in rows if not row.bootstrap)
        if self.value_coef and turns:
            self.log.add("sft/held_out_value_loss", sum(e[1] for e in found) / turns)

    def _weight(self, row: Trajectory) -> float:
        """Sum of the weights of a row's tokens but the first of each context, which nothing predicts."""
        others = row.num_tokens - len(row.context_lengths) - row.num_action_tokens
        return row.num_action_tokens + self.config.sft.observation_weight * others

    def _sums(
        self, cpu_micro: PackedBatch, rows: Sequence[Trajectory]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums over a micro-batch: weighted negative log-likelihood of its tokens, that of its completions without
        gradient, and squared errors of its values; scalars, in nats and squared rewards."""
        micro, sft = cpu_micro.to(self.ranks.device), self.config.sft
        hidden = self.model.hidden(micro.tokens, micro.position_ids, micro.context_lengths)
        indices = self._target_indices(micro)
        is_completion = torch.zeros_like(micro.tokens, dtype=torch.bool)
        is_completion[micro.action_positions] = True
        is_completion = is_completion[indices]
        # At temperature 1: that of later sampling is no property of the demonstrations.
        losses = -self.model.action_log_probs(hidden[indices - 1], micro.tokens[indices], 1.0)[0]
        of_tokens = torch.where(is_completion, losses, sft.observation_weight * losses).sum()
        of_completions = losses.detach()[is_completion].sum()
        if not self.value_coef:
            return of_tokens, of_completions, of_completions.new_zeros(())
        discount = self.config.algorithm.credit.discount
        targets = torch.from_numpy(np.concatenate([returns_to_go(rows[i], discount) for i in micro.members]))
        errors = self.model.values(hidden[micro.turn_value_positions]) - targets.to(hidden.device)
        return of_tokens, of_completions, errors[errors.detach().isfinite()].square().sum()

    def _target_indices(self, micro: PackedBatch) -> torch.Tensor:
        """int64[N]: the tokens with a weight; never the first of a row, which nothing predicts."""
        return micro.position_ids.nonzero().squeeze(1) if self.config.sft.observation_weight else micro.action_positions

    def _trial(self, cpu_micro: PackedBatch) -> None:
        """Compute a micro-batch forward and backward, for its time and memory alone."""
        micro = cpu_micro.to(self.ranks.device)
        hidden = self.model.hidden(micro.tokens, micro.position_ids, micro.context_lengths)
        indices = self._target_indices(micro)
        try:
            self.model.action_log_probs(hidden[indices - 1], micro.tokens[indices], 1.0)[0].sum().backward()
        finally:  # memory may run out before the backward has ended
            self.model.zero_grad(set_to_none=True)
