"""Policy losses made for stale data: M2PO and TOPR; arguments and notation are those of losses.py.

IcePop (arXiv 2510.18855) is no loss of its own: `algorithm=icepop` is importance weights without a cap under
`algorithm.reject=token`, which leaves tokens out on both sides of the ratio.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_positive, require_segment_ids
from impala_llm.algorithms.importance import ratios, segment_sum
from impala_llm.algorithms.interface import BatchLoss, Loss, LossOutput, Scored, loss
from impala_llm.algorithms.loss_parts import (
    RATIO_METRICS,
    ROUNDING,
    in_dtype,
    ratio_metrics,
    require_loss_arguments,
    share,
    where_free,
)
from impala_llm.settings import AlgorithmConfig, bounded, one_of

_INFINITY = int(np.float32(np.inf).view(np.uint32))
"""Float32 numbers that are not negative have the order of their bit patterns; this is the last."""


def departures(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Squared log-ratios of the tokens that the update moves on from μ: l² where A and l have one sign, else 0.

    They are the tokens that PPO's clip may hold: A > 0 and ρ > 1, or A < 0 and ρ < 1.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].

    Returns:
        float32[N], without gradient, in nats².
    """
    log_ratio = (log_probs - behaviour_log_probs).detach().float()
    departs = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    return torch.where(departs, log_ratio.square(), 0.0)


def second_moment_limit(
    squares: Tensor, threshold: float, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
) -> float:
    """Limit such that the mean of the squares up to it is at most `threshold`: the largest squares are removed first.

    Equal squares are kept or removed together, so the mean of the kept ones never exceeds the threshold.

    Args:
        squares: float32[n], this rank's, >= 0; infinite ones are removed.
        threshold: > 0, largest mean of the squares that are kept.
        sum_over_ranks: sums numbers over all ranks, which call it together up to 33 times; default: a single rank.

    Returns:
        The largest square that is kept; infinity if none is removed. The same on all ranks.

    Raises:
        ValueError: the threshold is not positive.
    """
    require_positive("threshold", threshold)
    ordered = np.sort(squares.detach().float().cpu().numpy())
    sums = np.concatenate([[0.0], ordered.cumsum(dtype=np.float64)])

    def holds(limit: np.float32) -> bool:
        number = int(np.searchsorted(ordered, limit, side="right"))
        count, total = sum_over_ranks([float(number), float(sums[number])])
        return total <= threshold * count

    if holds(np.float32(np.inf)):
        return math.inf
    low, high = 0, _INFINITY  # the mean grows with the limit: it holds at the lower one, and not at the higher
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(np.uint32(middle).view(np.float32)) else (low, middle)
    return float(np.uint32(low).view(np.float32))


def m2po(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor, limit: float = math.inf) -> LossOutput:
    """-Mρ A, M = 0 where l² of a token that the update moves on from μ is above `limit`, else 1.

    M2PO, arXiv 2510.01161: no clip and no cap; `limit` is the `second_moment_limit` of the `departures` of the batch.
    Tokens on their way back to μ always teach. The masked ones count in the denominator of the loss, as in the paper.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        limit: >= 0, in nats²; infinity masks none.

    Returns:
        Metrics: ratio_mean, ratio_max; clip_share (M = 0); departing_share, and departure_mean: the mean over all
        tokens of l² where it departs, so that departure_mean / departing_share is the second moment before the mask.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    log_ratio = log_probs - behaviour_log_probs.detach()
    ratio = ratios(log_ratio)
    squares = departures(log_probs, behaviour_log_probs, advantages)
    is_masked = squares > limit
    metrics = ratio_metrics(ratio)
    metrics |= {
        "clip_share": share(is_masked),
        "departing_share": share(squares > 0),
        "departure_mean": squares.sum() / max(1, squares.numel()),
    }
    per_token = torch.where(is_masked, 0.0, -ratio * advantages.detach())
    weights = where_free(log_ratio, torch.where(is_masked, 0.0, ratio.detach()))
    return LossOutput(per_token, in_dtype(metrics, log_probs), weights)


@loss("m2po")
@dataclass
class M2PO(BatchLoss):
    """-ρA without the tokens that have departed farthest from μ, until their second moment is small; see `m2po`."""

    vanishes_with_advantage = True
    metrics = RATIO_METRICS | {
        "departing_share": "share of the action tokens that teach which the update moves on from μ: A > 0 and a ratio "
        "above 1, or A < 0 and a ratio below 1",
        "departure_mean": "squared log-ratio of those tokens, 0 for others, per action token that teaches: divided by "
        "departing_share it is the second moment before the mask",
    }
    threshold: float = bounded(0.04, 1e-6)
    """Largest mean of the squared log-ratios, in nats², of the tokens that the update moves on from μ, over the batch
    of an optimizer step on all ranks. To find what to leave out takes one more forward pass."""

    def measure(self, scored: Scored, advantages: Tensor) -> Tensor:
        squares = departures(scored.log_probs, scored.behaviour_log_probs, advantages)
        return squares[squares > 0]

    def batch_limit(self, measured: Tensor, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> float:
        return second_moment_limit(measured, self.threshold, sum_over_ranks)

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        limit = scored.batch_limit
        if limit is None:
            limit = self.batch_limit(self.measure(scored, advantages), list)
        return m2po(scored.log_probs, scored.behaviour_log_probs, advantages, limit)


def topr(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    segment_ids: Tensor | None = None,
    positive: tuple[float, float] = (1.0, 1.0),
    negative: tuple[float, float] = (0.0, 1.0),
) -> LossOutput:
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286): the loss -sg(w) A log π of each token.

    w is ρ clamped to `positive` where A >= 0, and to `negative` where A < 0; sg stops its gradient. With the default
    bounds a token with A >= 0 has the full weight 1 even if it has become unlikely, and the weight of a token with
    A < 0 falls with its probability.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        segment_ids: int64[N], non-decreasing, the row of each token: ρ is that of the whole row, as in the paper; None:
            ρ of each token.
        positive, negative: least and largest weight; 0 <= least <= largest. Equal bounds are a constant weight.

    Returns:
        Metrics: ratio_mean, ratio_max; clip_share (w differs from ρ by more than 1 %); taper_mean, taper_max (of w).

    Raises:
        TypeError, ValueError: wrong dtype, shape, order or bounds.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    for name, (least, largest) in (("positive", positive), ("negative", negative)):
        if not 0 <= least <= largest:
            raise ValueError(f"{name} is ({least}, {largest}): 0 <= least <= largest is needed")
    log_ratio = (log_probs - behaviour_log_probs).detach()
    if segment_ids is not None:
        require_segment_ids("segment_ids", segment_ids, log_probs.shape[0])
        log_ratio = segment_sum(log_ratio, segment_ids)[segment_ids]
    ratio = ratios(log_ratio)
    weights = torch.where(advantages < 0, ratio.clamp(*negative), ratio.clamp(*positive))
    metrics = ratio_metrics(ratio) | ratio_metrics(weights, "taper")
    metrics["clip_share"] = share((weights - ratio).abs() > ROUNDING * ratio)
    return LossOutput(-weights * advantages.detach() * log_probs, in_dtype(metrics, log_probs), weights)


@loss("topr")
@dataclass
class TOPR(Loss):
    """REINFORCE with a weight of 1 where A >= 0, and the ratio of the episode, at most 1, where A < 0; see `topr`."""

    vanishes_with_advantage = True
    bounds_steps = False
    metrics = RATIO_METRICS | {
        "taper_mean": "mean of TOPR's weight, per action token that teaches",
        "taper_max": "largest of TOPR's weights",
    }
    level: str = one_of("sequence", "token")
    """The ratio is of all tokens of an episode together (sequence) | of a token."""
    positive_low: float = bounded(1.0, 0, 1e6)
    """Least weight of what has a positive advantage, or none."""
    positive_high: float = bounded(1.0, 0)
    """Largest weight of what has a positive advantage, or none."""
    negative_low: float = bounded(0.0, 0, 1e6)
    """Least weight of what has a negative advantage."""
    negative_high: float = bounded(1.0, 0)
    """Largest weight of what has a negative advantage."""

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        return topr(
            scored.log_probs, scored.behaviour_log_probs, advantages,
            scored.segment_ids if self.level == "sequence" else None,
            (self.positive_low, self.positive_high), (self.negative_low, self.negative_high),
        )  # fmt: skip

    def problems(self, algorithm: AlgorithmConfig) -> list[str]:
        bounds = {
            "positive": (self.positive_low, self.positive_high),
            "negative": (self.negative_low, self.negative_high),
        }
        return [
            f"algorithm.loss.{sign}_low={low:g} is above algorithm.loss.{sign}_high={high:g}: exchange them"
            for sign, (low, high) in bounds.items()
            if low > high
        ]
