"""Advantages without a critic, from an episode's score against the others of its group; and GAE as a pure function.

Below each function stands the part of an algorithm that `algorithm.credit` names; GAE's stands in vtrace.py.

A group is the episodes of one task from one start; there everything is per episode: `scores` float[M], `group_ids`
int64[M] in any order and with any numbers. Invariant: a group in which there is nothing to compare (one member, or all
scores equal, as `levelled` says) gets exactly 0, and within a group advantages sum to 0 up to rounding. Nothing carries
a gradient.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_float
from impala_llm.algorithms.interface import Credit, Episodes, PackedBatch, Prepared, Scored, Worth, credit
from impala_llm.algorithms.vtrace import vtrace
from impala_llm.trajectory import Trajectory

ROUNDING = 1e-6
"""Share of their size by which equal sums of float32 rewards differ at most, by some margin."""


class GAEOutput(NamedTuple):
    """float[T, B] each, without gradient."""

    advantages: Tensor
    value_targets: Tensor
    """V + A, the λ-returns."""


class _Groups(NamedTuple):
    """Statistics of the group of each episode, [M]."""

    size: Tensor
    deviation: Tensor
    """score minus the group's mean; exactly 0 where all scores are equal."""
    std: Tensor
    """Sample standard deviation (n - 1); 0 where all scores are equal."""
    is_equal: Tensor
    """bool: whether all scores are equal."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    discounts: Tensor,
    lam: float = 0.95,
) -> GAEOutput:
    """Generalised advantage estimation (GAE, arXiv 1506.02438): A_t = δ_t + γ_t λ A_{t+1}, and 0 after the last step.

    δ_t = r_t + γ_t V_{t+1} - V_t. Computed as V-trace with all ratios 1, as the credit `gae` is: the staleness of the
    data is not corrected.

    Args:
        rewards, values: float[T, B], r_t, received after step t, and V_t.
        bootstrap_value: float[B], V after the last step; 0 where the episode ended.
        discounts: float[T, B], γ_t, the discount of the step after t; 0 where the episode ended with t. Values behind
            such a step are ignored, and may be NaN.
        lam: λ in [0, 1].

    Raises:
        TypeError, ValueError: wrong dtype, shape, λ or discount, as in `vtrace`.
    """
    target = vtrace(torch.zeros_like(rewards), discounts, rewards, values, bootstrap_value, lam=lam)
    return GAEOutput(target.vs - values, target.vs)


def episode_return(t: Trajectory, discount: float = 1.0, extra: np.ndarray | None = None) -> float:
    """Return of an episode: the sum of its rewards, those of the k-th turn times γ^k.

    Args:
        t: the episode.
        discount: γ, per turn.
        extra: float[turns], rewards in addition to the environment's; None: there are none.
    """
    if discount == 1.0:
        return float(t.rewards.sum(dtype=np.float64)) + (0.0 if extra is None else float(extra.sum()))
    of_turns = [float(t.rewards[start:end].sum()) for start, end in t.turns.tolist()]
    if extra is not None:
        of_turns = [reward + more for reward, more in zip(of_turns, extra.tolist(), strict=True)]
    return sum(discount**k * reward for k, reward in enumerate(of_turns))


@torch.no_grad()
def levelled(scores: Tensor, group_ids: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Make the scores of a group exactly equal if they differ only by the rounding of float32 rewards.

    This function alone defines which scores are equal. 0.3 + 0.4 differs from 0.7 in the last digit, and a division by
    the standard deviation would turn this difference into an advantage of full size.

    Args:
        scores: float[M].
        group_ids: int64[M].
        sizes: float[M], sum of the absolute rewards behind each score; None: the score's own absolute value.

    Returns:
        float[M].

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_float("scores", scores, ndim=1)
    if group_ids.dtype != torch.int64:
        raise TypeError(f"group_ids has dtype {group_ids.dtype}: int64 expected")
    if group_ids.shape != scores.shape:
        raise ValueError(f"group_ids has shape {list(group_ids.shape)}, scores has {list(scores.shape)}: one each")
    numbers, index = group_ids.unique(return_inverse=True)

    def of_group(values: Tensor, reduction: str) -> Tensor:
        return values.new_zeros(len(numbers)).scatter_reduce(0, index, values, reduction, include_self=False)[index]

    largest = of_group(scores, "amax")
    apart = largest - of_group(scores, "amin")
    limit = ROUNDING * of_group(scores.abs() if sizes is None else sizes, "amax")
    # Where a score is infinite, `apart` is infinite or NaN, and the scores stay as they are.
    return torch.where(apart.isfinite() & (apart <= limit), largest, scores)


def levelled_returns(
    returns: Sequence[float], trajectories: Sequence[Trajectory], extras: Sequence[np.ndarray] | None = None
) -> Tensor:
    """Apply `levelled` to returns. The rounding is judged by the sum of absolute rewards, since rewards may cancel.

    Args:
        returns: M of them, one for each episode.
        trajectories: the M episodes.
        extras: float[turns] of each, rewards in addition to the environment's; None: there are none.

    Returns:
        float32[M].
    """
    sizes = [float(np.abs(t.rewards).sum(dtype=np.float64)) for t in trajectories]
    if extras is not None:
        sizes = [size + float(np.abs(extra).sum()) for size, extra in zip(sizes, extras, strict=True)]
    group_ids = torch.tensor([t.group_id for t in trajectories], dtype=torch.int64)
    return levelled(torch.tensor(returns), group_ids, torch.tensor(sizes))


@dataclass
class EpisodeCredit(Credit):
    """One advantage for all tokens of an episode, known before the batch is packed."""

    of_episodes: ClassVar[bool] = True
    compares_group: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, episodes: Episodes) -> Prepared: ...

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
        assert prepared is not None
        return Worth(prepared[scored.segment_ids])


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


@credit("group_relative")
@dataclass
class GroupRelative(EpisodeCredit):
    """An episode's return minus the mean of its group; see `group_relative`."""

    normalize_std: bool = False
    """Divide by the group's standard deviation."""

    @property
    def ignores_scale(self) -> bool:
        return self.normalize_std

    def prepare(self, episodes: Episodes) -> Prepared:
        return Prepared(group_relative(episodes.returns, episodes.group_ids, self.normalize_std))


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


@credit("rloo")
@dataclass
class RLOO(EpisodeCredit):
    """An episode's return minus the mean of the others of its group; see `rloo`."""

    def prepare(self, episodes: Episodes) -> Prepared:
        return Prepared(rloo(episodes.returns, episodes.group_ids))


def equal_share(episodes: Episodes) -> float:
    """Share of the episodes whose group has one return alone, and so nothing to compare."""
    return float(_group_statistics(episodes.returns, episodes.group_ids).is_equal.float().mean())


def _group_statistics(scores: Tensor, group_ids: Tensor) -> _Groups:
    scores = levelled(scores, group_ids)
    numbers, index = group_ids.unique(return_inverse=True)
    zeros = scores.new_zeros(numbers.shape[0])

    def total(x: Tensor) -> Tensor:
        return zeros.index_add(0, index, x)[index]

    size = total(torch.ones_like(scores))
    # the mean of equal numbers is not always that number, and a division by the std would blow its last digit up
    largest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)[index]
    smallest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)[index]
    is_equal = largest == smallest
    deviation = torch.where(is_equal, torch.zeros_like(scores), scores - total(scores) / size)
    std = (total(deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    return _Groups(size, deviation, std, is_equal)
