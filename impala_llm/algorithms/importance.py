"""Importance ratios between the learner's policy π and the behaviour policy μ, and what is measured on them.

`log_ratio` is l = log π - log μ in nats, [N], of the action tokens only; rows lie end to end and `segment_ids` names
the row of each token. Invariant: log-ratios are clamped to [-20, 20] before any exponential, so every ratio and weight
is finite and positive; weights and masks are constants for the gradient; no mask keeps a token whose ratio is NaN.

Order of use: reject, truncate, normalise. Rejected tokens are removed from all inputs of the loss, as in
`log_probs[mask]`, and not multiplied by 0 afterwards: 0 times an infinite loss, or its gradient, is NaN.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms.checks import (
    require_at_least,
    require_float,
    require_same_floats,
    require_segment_ids,
)

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats before the exponential: e^20 and its square are finite in float32."""


class Caps(NamedTuple):
    """Bounds of the ratios in V-trace's recursion, with its λ; see vtrace.py."""

    rho_bar: float
    c_bar: float
    lam: float


class KLEstimates(NamedTuple):
    """Divergence of π from μ estimated from samples of μ; scalars of the dtype of the log-ratios."""

    k1: Tensor
    """mean(-l): unbiased for KL(μ‖π), of high variance, may be negative."""
    k3: Tensor
    """mean(e^l - l - 1): unbiased, never negative."""


def ratios(log_ratio: Tensor) -> Tensor:
    """e^l with l clamped to ±20. Any shape; differentiable inside of the clamp."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()


def apply_dead_band(log_ratio: Tensor, width: float) -> Tensor:
    """Set small log-ratios to 0, that is, their ratios to 1.

    They are numerical noise between the kernels that sample and those that train, not a difference of policies.

    Args:
        log_ratio: float, any shape: l.
        width: l becomes 0 where |l| < width; 0 changes nothing.

    Raises:
        ValueError: width is negative.
    """
    require_at_least("width", width, 0.0)
    if width == 0.0:
        return log_ratio
    return torch.where(log_ratio.abs() < width, torch.zeros_like(log_ratio), log_ratio)


def rejection_mask(
    log_ratio: Tensor,
    segment_ids: Tensor,
    level: Literal["token", "sequence", "geometric"] = "token",
    low: float = 0.0,
    high: float = float("inf"),
) -> Tensor:
    """Keep the tokens whose ratio ρ lies in [low, high].

    Args:
        log_ratio: float[N].
        segment_ids: int64[N], non-decreasing.
        level: what ρ is. `token`: e^l. `sequence`: e^(sum of l over the row), which rejects long rows. `geometric`:
            e^(mean of l over the row), which does not look at the length. The last two keep or reject whole rows.
        low, high: 0 <= low <= high.

    Returns:
        bool[N].

    Raises:
        TypeError, ValueError: wrong dtype, shape, level or bounds.
    """
    _require_ratio_arguments(log_ratio, segment_ids)
    if not 0 <= low <= high:
        raise ValueError(f"low is {low} and high is {high}: 0 <= low <= high is needed")
    log_ratio = log_ratio.detach()
    if level == "sequence":
        log_ratio = segment_sum(log_ratio, segment_ids)[segment_ids]
    elif level == "geometric":
        log_ratio = segment_mean(log_ratio, segment_ids)[segment_ids]
    elif level != "token":
        raise ValueError(f"level is {level!r}: choose token, sequence or geometric")
    ratio = ratios(log_ratio)
    return (ratio >= low) & (ratio <= high)


def probability_difference_mask(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    limit: float = 0.2,
) -> Tensor:
    """Keep the tokens whose probability has not yet moved by more than `limit` where A pushes it.

    Rejected is where A > 0 and π - μ > limit, and where A < 0 and μ - π > limit (Binary-TV of DPPO, arXiv 2602.04879).
    Unlike a bound on the ratio it lets a rare token move freely and holds a frequent one.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N]: log π, log μ, A.
        limit: in [0, 1]; 1 keeps all.

    Returns:
        bool[N].

    Raises:
        TypeError, ValueError: wrong dtype, shape or limit.
    """
    require_same_floats(
        ("log_probs", log_probs), ("behaviour_log_probs", behaviour_log_probs), ("advantages", advantages), ndim=1
    )
    if not 0.0 <= limit <= 1.0:
        raise ValueError(f"limit is {limit}: a difference of probabilities lies in [0, 1]")
    moved = (log_probs.detach().exp() - behaviour_log_probs.exp()) * advantages.sign()
    return moved <= limit


@torch.no_grad()
def log_linear_proximal(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    versions: Tensor,
    version: int,
) -> Tensor:
    """log π_prox, taken to lie on the straight line from log μ to log π, without a forward pass of its own.

    For π_prox = the policy one version before π, and d = version - versions: log μ + (1 - 1/d)·l; where d <= 1, μ was
    that policy or is newer, and it is log μ (A-3PO, arXiv 2512.06547, with AReaL's choice of versions).

    Args:
        log_probs, behaviour_log_probs: float[N]: log π, log μ.
        versions: int[N], the version that sampled each token.
        version: of the weights that gave `log_probs`.

    Returns:
        float[N], without gradient, for `losses.decoupled_ppo`.

    Raises:
        TypeError, ValueError: wrong dtype or shape, a token newer than `version` or without a version.
    """
    require_same_floats(("log_probs", log_probs), ("behaviour_log_probs", behaviour_log_probs), ndim=1)
    if versions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"versions has dtype {versions.dtype}: int32 or int64 expected")
    if versions.shape != log_probs.shape:
        raise ValueError(f"versions has shape {list(versions.shape)}, log_probs has {list(log_probs.shape)}: one each")
    if versions.numel():
        oldest, newest = (int(edge) for edge in torch.aminmax(versions))
        if oldest < 0 or newest > version:
            raise ValueError(f"versions lie in [{oldest}, {newest}]: 0 <= versions <= version = {version} is needed")
    steps = (version - versions).clamp(min=1).to(log_probs.dtype)
    return behaviour_log_probs + (1 - 1 / steps) * (log_probs - behaviour_log_probs)


def kl_estimates(log_ratio: Tensor) -> KLEstimates:
    """Estimates of KL(μ‖π) from tokens that μ sampled (Schulman, "Approximating KL divergence", 2020).

    Args:
        log_ratio: float[N] in nats; clamped to ±20.

    Returns:
        Two scalars, differentiable; all 0 when N is 0.
    """
    require_float("log_ratio", log_ratio, ndim=1)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if log_ratio.numel() == 0:
        zero = log_ratio.sum()
        return KLEstimates(zero, zero)
    return KLEstimates(
        k1=-log_ratio.mean(),
        # expm1 keeps the digits that e^l - 1 loses near 0, where nearly all tokens are
        k3=(log_ratio.expm1() - log_ratio).mean(),
    )


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Sum of the values of each segment; 0 for an empty one.

    Args:
        values: float[N].
        segment_ids: int64[N], in any order.
        num_segments: length of the result; None: the largest id plus one.

    Returns:
        float[num_segments].
    """
    if num_segments is None:
        num_segments = int(segment_ids.max()) + 1 if segment_ids.numel() else 0
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def segment_mean(values: Tensor, segment_ids: Tensor, num_segments: int | None = None) -> Tensor:
    """Mean of the values of each segment; 0 for an empty one.

    Args:
        values, segment_ids, num_segments: as for `segment_sum`.

    Returns:
        float[num_segments].
    """
    counts = segment_sum(torch.ones_like(values), segment_ids, num_segments)
    return segment_sum(values, segment_ids, num_segments) / counts.clamp(min=1)


def _require_ratio_arguments(log_ratio: Tensor, segment_ids: Tensor) -> None:
    require_float("log_ratio", log_ratio, ndim=1)
    require_segment_ids("segment_ids", segment_ids, log_ratio.shape[0])
