"""DPO as a policy gradient: what a pair's loss asks of each of its two episodes.

The gradient of -log σ(margin) with respect to the log-probability of a whole episode is one number, ∓β σ(-margin). It
is found from a first forward without gradient, and stands for the advantage of the episode in a loss without ratio. So
the two episodes of a pair need not lie in one micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from impala_llm.algorithms.preference import best_and_worst, dpo


@dataclass(frozen=True)
class PairAdvantages:
    advantages: Tensor
    """float32[M]: minus the gradient of the sum of the pairs' losses; 0 for an episode of no pair."""
    loss: float
    """Sum over the pairs."""
    num_pairs: int
    metrics: dict[str, float]
    """Means over the pairs."""


def pair_advantages(
    log_probs: Tensor, reference_log_probs: Tensor, scores: Tensor, group_ids: Tensor, beta: float
) -> PairAdvantages:
    """The best against the worst episode of each group.

    Args:
        log_probs, reference_log_probs: float32[M], of all action tokens of each episode together.
        scores: float[M]. group_ids: int64[M].
    """
    pairs = best_and_worst(scores, group_ids)
    with torch.enable_grad():
        policy = log_probs.detach().requires_grad_()
        output = dpo(
            policy[pairs.chosen],
            policy[pairs.rejected],
            reference_log_probs[pairs.chosen],
            reference_log_probs[pairs.rejected],
            beta,
        )
        total = output.per_pair.sum()
        (gradient,) = torch.autograd.grad(total, policy)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    return PairAdvantages(-gradient, total.item(), len(pairs.chosen), metrics)
