"""Advantages that need no critic: an episode's score against the others of its group (same task, same start).

Everything is per episode: `scores` float[M], `group_ids` int64[M] in any order and with any numbers.
Invariant: a group in which there is nothing to compare (one member, or all scores equal) gets exactly 0, and within a
group advantages sum to 0 up to rounding. Nothing carries a gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_float


class _Groups(NamedTuple):
    """For each episode [M]: the statistics of its group."""

    size: Tensor
    deviation: Tensor
    """score minus the group's mean; exactly 0 where all scores are equal."""
    std: Tensor
    """Sample standard deviation (n - 1); 0 where all scores are equal."""


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
