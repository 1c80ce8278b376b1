"""Policy losses under importance correction, per action token, and how they become one number.

All inputs are flat float[N] over action tokens: `log_probs` is log π with gradient, `behaviour_log_probs` is log μ as
the engine reported it, `advantages` is the advantage of each token. Only `log_probs` is differentiated.
ρ = e^(log π - log μ), with the log-ratio clamped to ±20.

Invariant: what is not an action token is not in the input, so nothing masked can enter a loss or a statistic. A
micro-batch without tokens gives a loss of 0 that can be differentiated: every rank runs its backward pass.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms.checks import (
    require_at_least,
    require_float,
    require_same_floats,
    require_segment_ids,
)
from impala_llm.algorithms.importance import ratios, segment_mean


class LossOutput(NamedTuple):
    per_token: Tensor
    """float[N]: loss of each token, not yet averaged; see `aggregate`."""
    metrics: dict[str, Tensor]
    """Scalars without gradient. Names in `_mean` and `_share` are means over the N tokens (0 when N is 0), so
    micro-batches combine weighted by N; names in `_max` combine by maximum."""


def ppo_clip(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> LossOutput:
    """-min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347, equation 7), bounded for A < 0.

    For A < 0 the term of PPO grows with ρ without bound, and with stale data ρ is large. Dual clip (arXiv 1912.09729)
    holds it at dual_clip·|A|.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        clip_low: in [0, 1].
        clip_high: >= 0.
        dual_clip: largest ratio for A < 0, >= 1; None: no bound, for the textbook.

    Returns:
        Metrics: ratio_mean, ratio_max; clip_high_share (A > 0 and ρ > 1 + clip_high), clip_low_share (A < 0 and
        ρ < 1 - clip_low), dual_clip_share (A < 0 and ρ > dual_clip): tokens whose gradient the clip has cut to 0.

    Raises:
        TypeError, ValueError: wrong dtype, shape or bounds.
    """
    _require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low is {clip_low}: it must lie in [0, 1]")
    require_at_least("clip_high", clip_high, 0.0)
    dual = math.inf if dual_clip is None else dual_clip
    require_at_least("dual_clip", dual, 1.0)

    advantages = advantages.detach()
    ratio = ratios(log_probs - behaviour_log_probs.detach())
    gain, loss = advantages > 0, advantages < 0
    # the minimum of the two products is a clamp of ρ from above where A > 0, and from below where A < 0
    effective = torch.where(loss, ratio.clamp(1.0 - clip_low, dual), ratio.clamp(max=1.0 + clip_high))
    ratio = ratio.detach()
    metrics = _ratio_metrics(ratio)
    metrics["clip_high_share"] = _share(gain & (ratio > 1.0 + clip_high))
    metrics["clip_low_share"] = _share(loss & (ratio < 1.0 - clip_low))
    metrics["dual_clip_share"] = _share(loss & (ratio > dual))
    return LossOutput(-effective * advantages, _in_dtype(metrics, log_probs))


def truncated_is(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    cap: float = 1.0,
) -> LossOutput:
    """-sg(min(ρ, cap)) A log π: REINFORCE with truncated importance weights.

    IMPALA, arXiv 1802.01561, section 4.2; AIPO, arXiv 2505.24034. sg: the weight is a constant for the gradient, so a
    truncated token still learns, unlike a clipped one.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        cap: C > 0; infinity does not truncate.

    Returns:
        Metrics: ratio_mean, ratio_max; truncated_share (ρ > cap).

    Raises:
        TypeError, ValueError: wrong dtype, shape or cap.
    """
    _require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    if not cap > 0:
        raise ValueError(f"cap is {cap}: it must be positive, such as 1 or 2")
    ratio = ratios((log_probs - behaviour_log_probs).detach())
    metrics = _ratio_metrics(ratio)
    metrics["truncated_share"] = _share(ratio > cap)
    per_token = -ratio.clamp(max=cap) * advantages.detach() * log_probs
    return LossOutput(per_token, _in_dtype(metrics, log_probs))


def aggregate(
    per_token: Tensor,
    segment_ids: Tensor,
    mode: Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"] = "token_mean",
    denominator: float | Tensor | None = None,
) -> Tensor:
    """One loss from the losses of the tokens.

    Args:
        per_token: float[N].
        segment_ids: int64[N], non-decreasing, the row of each token.
        mode: `token_mean`: sum over all tokens / number of tokens; every token weighs the same.
            `sequence_mean_token_sum`: sum over all tokens / number of rows; every token weighs the same, and the scale
            does not depend on the lengths. `sequence_mean_token_mean`: mean over rows of the mean over their tokens;
            every row weighs the same.
        denominator: the number of tokens (token_mean) or rows (the others) over ALL ranks and micro-batches of the
            step, so that the parts add up to the loss of the whole. None: those of this call.

    Returns:
        Scalar; 0, and differentiable, when N is 0.

    Raises:
        TypeError, ValueError: wrong dtype, shape, mode, or a denominator that is not positive.
    """
    require_float("per_token", per_token, ndim=1)
    require_segment_ids("segment_ids", segment_ids, per_token.shape[0])
    if denominator is not None and not denominator > 0:
        raise ValueError(f"denominator is {denominator}: it counts the tokens or rows of the whole step, so at least 1")
    if mode in ("token_mean", "sequence_mean_token_sum"):
        total = per_token.sum()
    elif mode == "sequence_mean_token_mean":
        total = segment_mean(per_token, segment_ids).sum()
    else:
        raise ValueError(f"mode is {mode!r}: choose token_mean, sequence_mean_token_sum or sequence_mean_token_mean")
    if denominator is None:
        counted = per_token if mode == "token_mean" else segment_ids.unique_consecutive()
        denominator = max(1, counted.numel())
    return total / denominator


def _require_loss_arguments(log_probs: Tensor, behaviour_log_probs: Tensor, advantages: Tensor) -> None:
    require_same_floats(
        ("log_probs", log_probs), ("behaviour_log_probs", behaviour_log_probs), ("advantages", advantages), ndim=1
    )


def _ratio_metrics(ratio: Tensor) -> dict[str, Tensor]:
    if ratio.numel() == 0:
        zero = ratio.new_zeros(())
        return {"ratio_mean": zero, "ratio_max": zero}
    return {"ratio_mean": ratio.mean(), "ratio_max": ratio.max()}


def _share(mask: Tensor) -> Tensor:
    return mask.sum() / max(1, mask.numel())


def _in_dtype(metrics: dict[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    return {name: value.to(like.dtype) for name, value in metrics.items()}
