"""Learning from pairs of answers to the same task, of which one is better.

`scores` of episodes make the pairs, so the actors' own episodes are the data: with weights published at every update
this is online, with weights that are never published offline, and everything between is a matter of the schedule.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from impala_llm.algorithms.checks import require_float, require_same_floats


class PreferenceOutput(NamedTuple):
    per_pair: Tensor
    """float[M]: loss of each pair, not yet averaged."""
    metrics: dict[str, Tensor]
    """Scalars without gradient, means over the pairs (0 when M is 0)."""


class Pairs(NamedTuple):
    """int64[M] each: places in `scores`."""

    chosen: Tensor
    rejected: Tensor


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
) -> PreferenceOutput:
    """-log σ(β [(log π_w - log π_ref,w) - (log π_l - log π_ref,l)]) (DPO, arXiv 2305.18290, equation 7).

    Args:
        chosen, rejected: float[M], log π of the whole better and worse answer: sums over their action tokens.
        reference_chosen, reference_rejected: float[M], the same under the reference policy; constants.
        beta: > 0: how much it costs to move away from the reference policy.

    Returns:
        Metrics: accuracy_share (pairs that π orders rightly relative to the reference; an equal pair does not count),
        margin_mean (of the bracket, times β), chosen_reward_mean and rejected_reward_mean (β (log π - log π_ref)). Both
        rewards falling is the known failure of DPO: the margin alone does not show it.

    Raises:
        TypeError, ValueError: wrong dtype, shape or beta.
    """
    require_same_floats(
        ("chosen", chosen), ("rejected", rejected),
        ("reference_chosen", reference_chosen), ("reference_rejected", reference_rejected), ndim=1,
    )  # fmt: skip
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be positive, such as 0.1")
    chosen_reward = beta * (chosen - reference_chosen.detach())
    rejected_reward = beta * (rejected - reference_rejected.detach())
    margin = chosen_reward - rejected_reward
    figures = {
        "accuracy_share": (margin > 0).to(margin.dtype),
        "margin_mean": margin,
        "chosen_reward_mean": chosen_reward,
        "rejected_reward_mean": rejected_reward,
    }
    metrics = {name: figure.detach().sum() / max(1, len(margin)) for name, figure in figures.items()}
    return PreferenceOutput(-logsigmoid(margin), metrics)


def best_and_worst(scores: Tensor, group_ids: Tensor) -> Pairs:
    """One pair of each group: its best and its worst episode, the first of several that are equal.

    Args:
        scores: float[M].
        group_ids: int64[M], in any order and with any numbers.

    Returns:
        Pairs in the order of the groups' numbers. A group whose scores are all equal, such as one of a single member,
        gives none.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_float("scores", scores, ndim=1)
    if group_ids.dtype != torch.int64:
        raise TypeError(f"group_ids has dtype {group_ids.dtype}: int64 expected")
    if group_ids.shape != scores.shape:
        raise ValueError(f"group_ids has shape {list(group_ids.shape)}, scores has {list(scores.shape)}: one each")
    num_scores = scores.shape[0]
    numbers, index = group_ids.unique(return_inverse=True)
    places = torch.arange(num_scores, device=scores.device)

    def first(extreme: Tensor) -> Tensor:
        """The first place of each group where its score is `extreme` [groups]."""
        candidates = torch.where(scores == extreme[index], places, num_scores)
        return places.new_full((len(numbers),), num_scores).scatter_reduce(0, index, candidates, "amin")

    none = scores.new_zeros(len(numbers))
    best = none.scatter_reduce(0, index, scores, "amax", include_self=False)
    worst = none.scatter_reduce(0, index, scores, "amin", include_self=False)
    differ = best > worst
    return Pairs(first(best)[differ], first(worst)[differ])
