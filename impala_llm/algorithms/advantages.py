"""Advantages: from a critic by GAE, or without one from an episode's score against the others of its group.

A group is the episodes of one task from one start; there everything is per episode: `scores` float[M], `group_ids`
int64[M] in any order and with any numbers. Invariant: a group in which there is nothing to compare (one member, or all
scores equal) gets exactly 0, and within a group advantages sum to 0 up to rounding. Nothing carries a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms import kernels, scan
from impala_llm.algorithms.checks import require_bootstrap, require_float, require_same_floats


class GAEOutput(NamedTuple):
    """float[T, B] each, without gradient."""

    advantages: Tensor
    value_targets: Tensor
    """advantages + values: the λ-returns."""


class _Groups(NamedTuple):
    """For each episode [M]: the statistics of its group."""

    size: Tensor
    deviation: Tensor
    """score minus the group's mean; exactly 0 where all scores are equal."""
    std: Tensor
    """Sample standard deviation (n - 1); 0 where all scores are equal."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    discounts: Tensor,
    lam: float = 0.95,
) -> GAEOutput:
    """A_t = δ_t + γ_t λ A_{t+1} with δ_t = r_t + γ_t V_{t+1} - V_t, from 0 at the end (GAE, arXiv 1506.02438).

    It is V-trace with all ratios 1: nothing corrects for the age of the data.

    Args:
        rewards, values: float[T, B], r_t, received after step t, and V_t.
        bootstrap_value: float[B], V after the last step; 0 where the episode ended.
        discounts: float[T, B], γ_t: what discounts the step after t, 0 where the episode ended with t. What lies behind
            such a step is not looked at, and may be NaN.
        lam: λ in [0, 1].

    Raises:
        TypeError, ValueError: wrong dtype, shape or λ.
    """
    require_same_floats(("rewards", rewards), ("values", values), ("discounts", discounts), ndim=2)
    require_bootstrap(bootstrap_value, values)
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam is {lam}: λ must lie in [0, 1]")
    if values.numel() == 0:
        return GAEOutput(values.clone(), values.clone())
    following = torch.cat([values[1:], bootstrap_value[None]]).masked_fill_(discounts == 0, 0.0)
    loops = kernels if values.device.type == "cpu" else scan
    advantages = loops.scan_backwards(rewards + discounts * following - values, discounts * lam)
    return GAEOutput(advantages, advantages + values)


@torch.no_grad()
def group_relative(scores: Tensor, group_ids: Tensor, normalize_std: bool = False) -> Tensor:
    """score - mean of its group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        scores: float[M].
        group_ids: int64[M].
        normalize_std: also divide by the group's sample standard deviation (with n - 1). That makes hard and easy
            tasks weigh the same, and biases the gradient (Dr. GRPO, arXiv 2503.20783).

    Returns:
        float[M].
    """
    groups = _group_statistics(scores, group_ids)
    if not normalize_std:
        return groups.deviation
    return torch.where(groups.std > 0, groups.deviation / groups.std, groups.deviation)


@torch.no_grad()
def rloo(scores: Tensor, group_ids: Tensor) -> Tensor:
    """score - mean of the OTHER scores of its group (leave-one-out baseline, arXiv 2402.14740).

    Args:
        scores: float[M].
        group_ids: int64[M].

    Returns:
        float[M]; 0 in a group of one.
    """
    groups = _group_statistics(scores, group_ids)
    # s - (n·mean - s)/(n - 1) = n/(n - 1) (s - mean)
    return groups.deviation * groups.size / (groups.size - 1).clamp(min=1)


def _group_statistics(scores: Tensor, group_ids: Tensor) -> _Groups:
    require_float("scores", scores, ndim=1)
    if group_ids.dtype != torch.int64:
        raise TypeError(f"group_ids has dtype {group_ids.dtype}: int64 expected")
    if group_ids.shape != scores.shape:
        raise ValueError(f"group_ids has shape {list(group_ids.shape)}, scores has {list(scores.shape)}: one each")
    numbers, index = group_ids.unique(return_inverse=True)
    zeros = scores.new_zeros(numbers.shape[0])

    def total(x: Tensor) -> Tensor:
        return zeros.index_add(0, index, x)[index]

    size = total(torch.ones_like(scores))
    # the mean of equal numbers is not always that number, and a division by the std would blow its last digit up
    largest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)[index]
    smallest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)[index]
    deviation = torch.where(largest == smallest, torch.zeros_like(scores), scores - total(scores) / size)
    std = (total(deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    return _Groups(size, deviation, std)
