"""Pieces that the policy losses share: checks of their arguments, bounds on a ratio, and metrics of both.

All tensors are [N] over action tokens; see losses.py. Metrics carry no gradient, and are 0 where N is 0.
"""

import math

import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_at_least, require_same_floats
from impala_llm.algorithms.importance import LOG_RATIO_LIMIT
from impala_llm.algorithms.interface import LossOutput

RATIO_METRICS = {
    "ratio_mean": "mean of the ratio that the loss bounds, per action token that teaches",
    "ratio_max": "largest ratio that the loss bounds",
    "clip_share": "share of the action tokens that teach where a bound of the loss has an effect",
}
ROUNDING = 0.01
"""A weight counts as bounded (clip_share) where it differs by more than this share of it from the ratio: with a cap of
1 half of all ratios lie above by numerical noise."""
TRUNCATION_METRICS = RATIO_METRICS | {
    "truncated_share": "share of the action tokens that teach with a ratio above the cap of the weight",
}
CLIP_METRICS = RATIO_METRICS | {
    "clip_high_share": "share of the action tokens that teach with A > 0 and a ratio above 1 + clip_high: no gradient",
    "clip_low_share": "share of the action tokens that teach with A < 0 and a ratio below 1 - clip_low: no gradient",
    "dual_clip_share": "share of the action tokens that teach with A < 0 and a ratio above dual_clip: no gradient",
}


def require_loss_arguments(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor) -> None:
    """Check the arguments that all policy losses have.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N], of one dtype.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_same_floats(
        ("log_probs", log_probs), ("behaviour_log_probs", behaviour_log_probs), ("advantages", advantages), ndim=1
    )


def truncated(log_probs: Tensor, ratio: Tensor, advantages: Tensor, cap: float) -> LossOutput:
    """REINFORCE weighted by truncated ratios, which are constants: -min(ratio, cap) A log π.

    Args:
        log_probs, ratio, advantages: float[N].
        cap: largest weight.
    """
    metrics = ratio_metrics(ratio)
    metrics["truncated_share"] = share(ratio > cap)
    metrics["clip_share"] = share(ratio > cap * (1.0 + ROUNDING))
    weights = ratio.clamp(max=cap)
    return LossOutput(-weights * advantages.detach() * log_probs, in_dtype(metrics, log_probs), weights)


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """PPO's clipped loss for ratios of any kind.

    Args:
        ratio, advantages: float[N].
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: largest ratio where A < 0; None: no limit.

    Returns:
        The loss, float[N]; by metric, the share of the tokens at each bound; the ratios, with 0 for tokens at a bound.

    Raises:
        ValueError: a bound is out of range.
    """
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}: it must lie in [0, 1]")
    require_at_least("clip_high", clip_high, 0.0)
    dual = math.inf if dual_clip is None else dual_clip
    require_at_least("dual_clip", dual, 1.0)
    advantages = advantages.detach()
    gain, loss = advantages > 0, advantages < 0
    # the minimum of the two products is a clamp of the ratio from above where A > 0, and from below where A < 0
    effective = torch.where(loss, ratio.clamp(1.0 - clip_low, dual), ratio.clamp(max=1.0 + clip_high))
    ratio = ratio.detach()
    shares = {
        "clip_high_share": share(gain & (ratio > 1.0 + clip_high)),
        "clip_low_share": share(loss & (ratio < 1.0 - clip_low)),
        "dual_clip_share": share(loss & (ratio > dual)),
    }
    shares["clip_share"] = sum(shares.values(), start=torch.zeros_like(shares["dual_clip_share"]))
    is_free = torch.where(loss, (ratio >= 1.0 - clip_low) & (ratio <= dual), ratio <= 1.0 + clip_high)
    return -effective * advantages, shares, torch.where(is_free, ratio, 0.0)


def where_free(log_ratio: Tensor, weights: Tensor) -> Tensor:
    """Return the weights, with 0 where the log-ratio was clamped and therefore has no gradient.

    Args:
        log_ratio, weights: float[N].
    """
    return torch.where(log_ratio.detach().abs() <= LOG_RATIO_LIMIT, weights, 0.0)


def ratio_metrics(ratio: Tensor, name: str = "ratio") -> dict[str, Tensor]:
    """Mean and maximum of the ratios, as metrics.

    Args:
        ratio: float[N].
        name: first part of the metrics' names.
    """
    ratio = ratio.detach()
    if ratio.numel() == 0:
        zero = ratio.new_zeros(())
        return {f"{name}_mean": zero, f"{name}_max": zero}
    return {f"{name}_mean": ratio.mean(), f"{name}_max": ratio.max()}


def share(mask: Tensor) -> Tensor:
    """Share of the elements of bool[N] that are true; 0 where N is 0."""
    return mask.sum() / max(1, mask.numel())


def in_dtype(metrics: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Convert metrics to the dtype of a tensor.

    Args:
        metrics: scalars by name.
        like: tensor with the dtype.
    """
    return {name: value.to(like.dtype) for name, value in metrics.items()}
