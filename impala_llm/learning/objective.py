"""The loss of a batch: advantages, policy loss, value loss, entropy, and what is measured on the way.

Invariant: every part is a sum over this micro-batch divided by its count over ALL ranks and micro-batches of the update
(`Denominators`), so summing gradients over micro-batches and ranks gives the gradient of the whole batch, however it is
cut. Advantages and targets carry no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from impala_llm.algorithms import importance, losses, vtrace
from impala_llm.config import Config
from impala_llm.learning.mismatch import Comparison, Recomputed, compare
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.packing import PackedBatch


@dataclass(frozen=True)
class Denominators:
    """Counts over all ranks and micro-batches of an update; at least 1 each."""

    tokens: float
    """Action tokens."""
    turns: float
    sequences: float


@dataclass(frozen=True)
class Outcome:
    """What an update wants to know beyond the gradient, per trajectory of the micro-batch."""

    loss: Tensor
    """Scalar, differentiable; this micro-batch's share of the update's loss."""
    advantage_size: Tensor
    """float32[num_segments]: mean |A| over the action tokens: the advantage factor of the replay priority."""
    log_probs: Tensor
    """float32[N]: log π of the action tokens, without gradient."""
    comparison: Comparison
    """Of the learner's log-probabilities with the engine's."""
    figures: list[tuple[str, float, float]]
    """(metric, value, weight): see observability/metrics.py for the meaning of each."""


def objective(
    config: Config,
    model: PolicyModel,
    batch: PackedBatch,
    sequence_advantages: Tensor | None,
    weights: Tensor,
    denominators: Denominators,
    version: int,
    train_policy: bool = True,
    recomputed: Recomputed | None = None,
) -> Outcome:
    """Loss of one packed micro-batch.

    Args:
        sequence_advantages: float32[num_segments] of the group baseline; None: turn-level V-trace with the value head.
        weights: float32[num_segments], importance weights of the replay draw, 1 where it was uniform.
        version: of the learner, for staleness.
        train_policy: False while only the value head warms up.
        recomputed: what enters the ratios for log μ; None: what the engine reported.
    """
    algorithm = config.algorithm
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
    actions = batch.action_positions
    log_probs, entropy = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], config.engine.temperature)
    behaviour_logprobs = batch.behaviour_logprobs if recomputed is None else recomputed.fill(log_probs)
    log_ratio = (log_probs - behaviour_logprobs).detach()
    value_loss = log_probs.new_zeros(())
    figures: list[tuple[str, float, float]] = []
    if sequence_advantages is None:
        values = model.values(hidden[batch.turn_value_positions])
        bootstrap = values.new_zeros(len(batch.lengths))
        cut = batch.bootstrap
        if bool(cut.any()):
            bootstrap[cut] = model.values(hidden[batch.last_positions[cut]]).detach()
        target = vtrace.turn_vtrace(
            log_ratio, batch.turn_ids, batch.turn_segment_ids, batch.turn_rewards, values.detach(), bootstrap,
            algorithm.discount, algorithm.rho_bar, algorithm.c_bar, algorithm.lam,
            algorithm.turn_ratio, algorithm.dead_band,
        )  # fmt: skip
        turn_advantages = target.advantages
        turn_weights = weights[batch.turn_segment_ids]
        value_loss = 0.5 * (turn_weights * (values - target.vs).square()).sum() / denominators.turns
        figures += _value_figures(target, values.detach(), algorithm.rho_bar, algorithm.c_bar)
    else:
        turn_advantages = sequence_advantages[batch.turn_segment_ids]
    advantages = turn_advantages[batch.turn_ids]

    if algorithm.loss == "truncated_is":
        output = losses.truncated_is(log_probs, behaviour_logprobs, advantages, algorithm.is_cap)
        clipped = output.metrics["truncated_share"]
    else:
        output = losses.ppo_clip(
            log_probs,
            behaviour_logprobs,
            advantages,
            algorithm.clip_low,
            algorithm.clip_high,
            algorithm.dual_clip,
        )
        clipped = sum(output.metrics[f"{side}_share"] for side in ("clip_low", "clip_high", "dual_clip"))
    denominator = denominators.tokens if algorithm.aggregate == "token_mean" else denominators.sequences
    policy_loss = losses.aggregate(
        output.per_token * weights[batch.segment_ids], batch.segment_ids, algorithm.aggregate, denominator
    )
    mean_entropy = entropy.sum() / denominators.tokens
    # A weight of 0 and not a missing term: all parameters take part in the gradient reduction.
    policy_weight = 1.0 if train_policy else 0.0
    loss = policy_weight * (policy_loss - algorithm.entropy_coef * mean_entropy) + algorithm.value_coef * value_loss

    with torch.no_grad():
        figures += _figures(batch, log_ratio, advantages, entropy, float(clipped), version)
        # A part of the update's sum, scaled so that the token-weighted mean over micro-batches and ranks is that sum.
        share, tokens = denominators.tokens / len(log_ratio), float(len(log_ratio))
        for name, part in (("policy", policy_loss), ("value", value_loss), ("total", loss)):
            figures.append((f"loss/{name}", part.item() * share, tokens))
        size = importance.segment_mean(advantages.abs(), batch.segment_ids, len(batch.lengths))
        comparison = compare(log_probs, batch, version)
    return Outcome(loss, size, log_probs.detach(), comparison, figures)


def _figures(
    batch: PackedBatch, log_ratio: Tensor, advantages: Tensor, entropy: Tensor, clipped: float, version: int
) -> list[tuple[str, float, float]]:
    """What is measured on the action tokens alone; observations never enter."""
    ratio = importance.ratios(log_ratio)
    kl = importance.kl_estimates(log_ratio)
    age = (version - batch.versions).float()
    span = batch.versions.new_zeros(len(batch.lengths))
    span = span.scatter_reduce(0, batch.segment_ids, batch.versions, "amax", include_self=False) - span.scatter_reduce(
        0, batch.segment_ids, batch.versions, "amin", include_self=False
    )
    values = {
        "loss/entropy": entropy.mean(),
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(unbiased=False),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "ratio/pg_clip_share": clipped,
        "ratio/ess": importance.effective_sample_size(ratio),
        "ratio/k1": kl.k1,
        "ratio/k3": kl.k3,
        "staleness/mean": age.mean(),
        "staleness/oldest": age.max(),
        "staleness/newest": age.min(),
    }
    figures = [(name, float(value), float(len(log_ratio))) for name, value in values.items()]
    figures.append(("staleness/span", float(span.float().mean()), float(len(span))))
    return figures


def _value_figures(
    target: vtrace.TurnVTraceOutput, values: Tensor, rho_bar: float, c_bar: float
) -> list[tuple[str, float, float]]:
    ratio = importance.ratios(target.log_ratios)
    spread = target.vs.var(unbiased=False).item()
    unexplained = (target.vs - values).var(unbiased=False).item()
    shares = {
        "ratio/rho_clip_share": (ratio > rho_bar).float().mean().item(),
        "ratio/c_clip_share": (ratio > c_bar).float().mean().item(),
        "value/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0,
    }
    return [(name, value, float(len(values))) for name, value in shares.items()]
