"""Policy losses under importance correction, per action token, and how they become one number.

Each is a pure function, and below it the part of an algorithm that `algorithm.loss` names: its fields are options.
All inputs are flat float[N] over action tokens: `log_probs` is log π with gradient, `behaviour_log_probs` is log μ as
the engine reported it, `advantages` is the advantage of each token. Only `log_probs` is differentiated.
ρ = e^(log π - log μ), with the log-ratio clamped to ±20.

Invariant: the inputs hold action tokens only, so no masked token can enter a loss or a statistic. A micro-batch without
tokens gives a loss of 0 that can be differentiated: every rank runs its backward pass.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from impala_llm.algorithms.checks import (
    require_at_least,
    require_float,
    require_positive,
    require_same_floats,
    require_segment_ids,
)
from impala_llm.algorithms.importance import log_linear_proximal, ratios, segment_mean, segment_sum
from impala_llm.algorithms.interface import Loss, LossOutput, Scored, loss
from impala_llm.algorithms.loss_parts import (
    CLIP_METRICS,
    ROUNDING,
    TRUNCATION_METRICS,
    clipped,
    in_dtype,
    ratio_metrics,
    require_loss_arguments,
    share,
    truncated,
    where_free,
)
from impala_llm.settings import AlgorithmConfig, bounded, one_of


@loss("reinforce")
@dataclass
class Reinforce(Loss):
    """-A log π: no ratio, and so no correction."""

    vanishes_with_advantage = True
    bounds_steps = False

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        return LossOutput(-advantages * scored.log_probs, {}, torch.ones_like(advantages))


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
        ρ < 1 - clip_low), dual_clip_share (A < 0 and ρ > dual_clip): tokens whose gradient the clip has cut to 0;
        clip_share, the sum of the three.

    Raises:
        TypeError, ValueError: wrong dtype, shape or bounds.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    ratio = ratios(log_probs - behaviour_log_probs.detach())
    per_token, shares, weights = clipped(ratio, advantages, clip_low, clip_high, dual_clip)
    weights = where_free(log_probs - behaviour_log_probs, weights)
    return LossOutput(per_token, in_dtype(ratio_metrics(ratio) | shares, log_probs), weights)


@loss("ppo_clip")
@dataclass
class PPOClip(Loss):
    """PPO with a dual clip; see `ppo_clip`."""

    vanishes_with_advantage = True
    metrics = CLIP_METRICS
    clip_low: float = bounded(0.2, 0, 1)
    """Ratios are clipped at 1 - clip_low."""
    clip_high: float = bounded(0.28, 0)
    """Ratios are clipped at 1 + clip_high."""
    dual_clip: float | None = bounded(3.0, 1)
    """Largest ratio that counts for a negative advantage; None: any."""

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        return ppo_clip(
            scored.log_probs, scored.behaviour_log_probs, advantages, self.clip_low, self.clip_high, self.dual_clip
        )


def decoupled_ppo(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    proximal_log_probs: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float = math.inf,
) -> LossOutput:
    """-w min(rA, clip(r, 1 - clip_low, 1 + clip_high) A) with r = π/π_prox and the constant weight w = π_prox/μ.

    Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298. The clip holds π near a recent policy, whatever the
    staleness of the data; the weight corrects for that. Where π_prox = μ this is `ppo_clip`, where π_prox = π nothing
    is clipped.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        proximal_log_probs: float[N], log π_prox: recomputed when the step began, or `importance.log_linear_proximal`.
        clip_low, clip_high, dual_clip: as in `ppo_clip`, on r.
        cap: largest w, > 0; infinity does not truncate.

    Returns:
        Metrics: those of `ppo_clip`, on r, but that clip_share also has the tokens with w > 1.01 cap;
        weight_mean, weight_max; weight_truncated_share (w > cap).

    Raises:
        TypeError, ValueError: wrong dtype, shape, bounds or cap.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    require_same_floats(("log_probs", log_probs), ("proximal_log_probs", proximal_log_probs), ndim=1)
    require_positive("cap", cap)
    proximal_log_probs = proximal_log_probs.detach()
    ratio = ratios(log_probs - proximal_log_probs)
    weight = ratios(proximal_log_probs - behaviour_log_probs.detach())
    per_token, shares, free = clipped(ratio, advantages, clip_low, clip_high, dual_clip)
    free = where_free(log_probs - proximal_log_probs, free)
    metrics = ratio_metrics(ratio) | ratio_metrics(weight, "weight") | shares
    metrics["weight_truncated_share"] = share(weight > cap)
    is_bounded = weight > cap * (1.0 + ROUNDING)
    metrics["clip_share"] = share(is_bounded | ((free == 0.0) & (advantages != 0.0)))
    weight = weight.clamp(max=cap)
    return LossOutput(weight * per_token, in_dtype(metrics, log_probs), weight * free)


@loss("decoupled_ppo")
@dataclass
class DecoupledPPO(Loss):
    """(π_prox/μ) times PPO's clip on π/π_prox; see `decoupled_ppo`."""

    vanishes_with_advantage = True
    metrics = CLIP_METRICS | {
        "weight_mean": "mean of π_prox/μ before its cap, per action token that teaches",
        "weight_max": "largest π_prox/μ before its cap",
        "weight_truncated_share": "share of the action tokens that teach whose π_prox/μ is above proximal_cap",
    }
    clip_low: float = bounded(0.2, 0, 1)
    """π/π_prox is clipped at 1 - clip_low."""
    clip_high: float = bounded(0.28, 0)
    """π/π_prox is clipped at 1 + clip_high."""
    dual_clip: float | None = bounded(3.0, 1)
    """Largest π/π_prox that counts for a negative advantage; None: any."""
    proximal: str = one_of("auto", "log_linear", "recomputed")
    """π_prox is π when the update begins (recomputed), as in the papers, or lies between μ and π by the tokens'
    versions (log_linear). auto: recomputed where an update has several steps, see learner.minibatches, else log_linear:
    with one step the ratio π/π_prox of the former is 1, and the weight acts alone."""
    proximal_cap: float | None = bounded(None, 1e-3)
    """Cap of the weight π_prox/μ; None: not truncated."""

    def needs_sampling_policy(self, num_steps: int) -> bool:
        return self.proximal == "log_linear" or (self.proximal == "auto" and num_steps == 1)

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        at_start = scored.proximal_log_probs
        if self.proximal == "log_linear" or (self.proximal == "auto" and at_start is None):
            proximal = log_linear_proximal(
                scored.log_probs, scored.behaviour_log_probs, scored.versions, scored.version
            )
        else:
            proximal = scored.log_probs if at_start is None else at_start
        return decoupled_ppo(
            scored.log_probs, scored.behaviour_log_probs, advantages, proximal,
            self.clip_low, self.clip_high, self.dual_clip, self.proximal_cap or math.inf,
        )  # fmt: skip


def gspo(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> LossOutput:
    """-min(sA, clip(s, 1 - clip_low, 1 + clip_high) A) with s = e^(mean of l over the row) (GSPO, arXiv 2507.18071).

    All tokens of a row share its ratio, so the row's gradient follows the mean of its advantages: use it with
    advantages that are equal over the row, and with `sequence_mean_token_mean` for the equation of the paper.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        segment_ids: int64[N], non-decreasing, the row of each token; rows must be whole.
        clip_low, clip_high, dual_clip: as in `ppo_clip`, on s, which stays much nearer to 1 than the ratio of a token:
            the defaults are the paper's.

    Returns:
        Metrics: those of `ppo_clip`, on s, as means over the tokens.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order or bounds.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    require_segment_ids("segment_ids", segment_ids, log_probs.shape[0])
    log_ratio = segment_mean(log_probs - behaviour_log_probs.detach(), segment_ids)
    ratio = ratios(log_ratio)[segment_ids]
    per_token, shares, weights = clipped(ratio, advantages, clip_low, clip_high, dual_clip)
    # A token moves its row's ratio, and with it the terms of all tokens of the row.
    signs = torch.where(advantages < 0, -1.0, 1.0)
    weights = signs * segment_mean(signs * where_free(log_ratio[segment_ids], weights), segment_ids)[segment_ids]
    return LossOutput(per_token, in_dtype(ratio_metrics(ratio) | shares, log_probs), weights)


@loss("gspo")
@dataclass
class GSPO(Loss):
    """PPO's clip on the geometric mean of an episode's ratios; see `gspo`."""

    vanishes_with_advantage = True
    metrics = CLIP_METRICS
    clip_low: float = bounded(3e-4, 0, 1)
    """The ratio of an episode is clipped at 1 - clip_low; it stays much nearer to 1 than that of a token."""
    clip_high: float = bounded(4e-4, 0)
    """The ratio of an episode is clipped at 1 + clip_high."""
    dual_clip: float | None = bounded(3.0, 1)
    """Largest ratio that counts for a negative advantage; None: any."""

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        return gspo(
            scored.log_probs, scored.behaviour_log_probs, advantages, scored.segment_ids,
            self.clip_low, self.clip_high, self.dual_clip,
        )  # fmt: skip

    def problems(self, algorithm: AlgorithmConfig) -> list[str]:
        if getattr(algorithm.credit, "of_episodes", False):
            return []
        return [
            f"algorithm.credit={algorithm.credit.name} does not go with algorithm.loss=gspo, whose ratio is one for a "
            "whole episode: set algorithm.credit=group_relative"
        ]


def cispo(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    advantages: Tensor,
    clip_high: float = 0.2,
) -> LossOutput:
    """-sg(min(ρ, 1 + clip_high)) A log π (CISPO of MiniMax-M1, arXiv 2506.13585, without a lower clip).

    It is `truncated_is` with cap = 1 + clip_high, under the name and with the parameter that the field uses.

    Args:
        log_probs, behaviour_log_probs, advantages: float[N].
        clip_high: >= 0; infinity does not truncate.

    Returns:
        Metrics: those of `truncated_is`.

    Raises:
        TypeError, ValueError: wrong dtype, shape or bound.
    """
    require_at_least("clip_high", clip_high, 0.0)
    return truncated_is(log_probs, behaviour_log_probs, advantages, 1.0 + clip_high)


@loss("cispo")
@dataclass
class CISPO(Loss):
    """-sg(min(ρ, 1 + clip_high)) A log π, where sg(x) is x as a constant, without a gradient; see `cispo`."""

    vanishes_with_advantage = True
    bounds_steps = False
    metrics = TRUNCATION_METRICS
    clip_high: float = bounded(0.28, 0)
    """Ratios are truncated at 1 + clip_high."""

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        return cispo(scored.log_probs, scored.behaviour_log_probs, advantages, self.clip_high)


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
        Metrics: ratio_mean, ratio_max; truncated_share (ρ > cap); clip_share (ρ > 1.01 cap).

    Raises:
        TypeError, ValueError: wrong dtype, shape or cap.
    """
    require_loss_arguments(log_probs, behaviour_log_probs, advantages)
    require_positive("cap", cap)
    return truncated(log_probs, ratios((log_probs - behaviour_log_probs).detach()), advantages, cap)


@loss("truncated_is")
@dataclass
class TruncatedIS(Loss):
    """-sg(min(ρ, cap)) A log π, where sg(x) is x as a constant, without a gradient; see `truncated_is`."""

    vanishes_with_advantage = True
    bounds_steps = False
    metrics = TRUNCATION_METRICS
    cap: float = bounded(1.0, 1e-3)
    """Cap C of the weight min(π/μ, C)."""
    level: str = one_of("token", "sequence")
    """The ratio is of a token | sequence: of all tokens of an episode together."""

    def __call__(self, scored: Scored, advantages: Tensor) -> LossOutput:
        if self.level == "token":
            return truncated_is(scored.log_probs, scored.behaviour_log_probs, advantages, self.cap)
        ratio = ratios(segment_sum(scored.log_ratio, scored.segment_ids)[scored.segment_ids])
        return truncated(scored.log_probs, ratio, advantages, self.cap)


def reference_penalty(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(log π - log π_ref)² / 2 (k2; Schulman, "Approximating KL divergence", 2020): to hold π near a reference policy.

    Over tokens that π samples, the mean of its gradient (log π - log π_ref) grad log π is the gradient of KL(π‖π_ref).
    k3 is the better estimate of the divergence itself, but the gradient of k3 has the mean of that of KL(π_ref‖π).

    Args:
        log_probs, reference_log_probs: float[N].

    Returns:
        float[N].

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_same_floats(("log_probs", log_probs), ("reference_log_probs", reference_log_probs), ndim=1)
    return (log_probs - reference_log_probs.detach()).square() / 2


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
