"""The loss of a batch: advantages, policy loss, value loss, entropy, and what is measured on the way.

Invariant: every part is a sum over this micro-batch divided by its count over ALL ranks and micro-batches of the update
(`Denominators`), so summing gradients over micro-batches and ranks gives the gradient of the whole batch, however it is
cut. Advantages and targets carry no gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from impala_llm.algorithms import distillation, importance, losses, vtrace
from impala_llm.learning.mismatch import Comparison, Recomputed, compare
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.packing import PackedBatch
from impala_llm.learning.scoring import TokenScores
from impala_llm.settings import AlgorithmConfig, Config

NO_SCORES = TokenScores()


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
    entropy: float
    """Sum over the action tokens, in nats."""
    weight_sums: tuple[float, float, float]
    """Of the tokens' final weights (what the policy loss multiplies -A grad log π with, see `_loss_weights`, times the
    draw's weight; 0 where left out): their number, sum, and sum of squares."""
    is_finite: Tensor
    """bool[num_segments]: whether the row's advantages and its part of the loss are."""
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
    scores: TokenScores = NO_SCORES,
    entropy_coef: float = 0.0,
    oldest_version: int = 0,
) -> Outcome:
    """Loss of one packed micro-batch.

    Args:
        sequence_advantages: float32[num_segments], of whole episodes; None: from the value head, or from the teacher.
        weights: float32[num_segments], importance weights of the replay draw, 1 where it was uniform.
        version: of the learner, for staleness.
        train_policy: False while only the value head warms up.
        recomputed: what enters the ratios for log μ; None: what the engine reported.
        scores: of the reference policy and the teacher.
        oldest_version: older action tokens do not teach, though others of their trajectory may.
    """
    algorithm = config.algorithm
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
    actions = batch.action_positions
    log_probs, entropy = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], config.engine.temperature)
    behaviour_logprobs = batch.behaviour_logprobs if recomputed is None else recomputed.fill(log_probs)
    log_ratio = (log_probs - behaviour_logprobs).detach()
    value_errors = log_probs.new_zeros(0)
    steps_of = batch.segment_ids[:0]
    num_steps = 1.0
    figures: list[tuple[str, float, float]] = []
    if sequence_advantages is not None:
        advantages = sequence_advantages[batch.segment_ids]
    elif scores.teacher is not None:
        advantages = distillation.reverse_kl_signal(scores.teacher, log_probs.detach())
    else:
        advantages, value_errors, figures = _from_values(algorithm, model, hidden, batch, log_ratio)
        by_token = algorithm.granularity == "token"
        steps_of = batch.segment_ids if by_token else batch.turn_segment_ids
        num_steps = denominators.tokens if by_token else denominators.turns
        value_errors = weights[steps_of] * value_errors
    value_loss = 0.5 * value_errors.sum() / num_steps

    keep = _kept(algorithm, log_probs.detach(), behaviour_logprobs, log_ratio, advantages, batch, oldest_version)
    # Taken out of the loss's inputs: a ratio of a whole row must not reach tokens that do not teach, and 0 times what
    # is infinite is no number.
    teaching = (
        log_probs[keep], behaviour_logprobs[keep], advantages[keep], batch.segment_ids[keep], batch.versions[keep]
    )  # fmt: skip
    output = _policy_loss(algorithm, *teaching, version)
    per_token = log_probs.new_zeros(len(keep)).masked_scatter(keep, output.per_token)
    if scores.reference is not None and algorithm.kl_coef > 0:
        # From samples of μ: weighted as the policy gradient is, so that it is the divergence under π.
        weight = importance.ratios(log_ratio).clamp(max=1.0)
        apart = (scores.reference - log_probs.detach()).clamp(-importance.LOG_RATIO_LIMIT, importance.LOG_RATIO_LIMIT)
        divergence = weight * (apart.exp() - apart - 1.0)
        figures.append(("loss/reference_kl", float(divergence.mean()), float(len(log_ratio))))
        penalty = algorithm.kl_coef * weight * losses.reference_penalty(log_probs, scores.reference)
        per_token = per_token + torch.where(keep, penalty, 0.0)
    per_token = per_token * weights[batch.segment_ids]
    denominator = denominators.tokens if algorithm.aggregate == "token_mean" else denominators.sequences
    policy_loss = losses.aggregate(per_token, batch.segment_ids, algorithm.aggregate, denominator)
    # The bonus is a part of what the policy learns, so it has the same mask: a state that the policy left long ago says
    # nothing of the entropy that it needs. The value loss has none: targets are corrected for age (V-trace) or have no
    # ratio at all (GAE), and the values of old turns are what the advantages of the young ones before them rest on.
    mean_entropy = torch.where(keep, entropy, 0.0).sum() / denominators.tokens
    # A weight of 0 and not a missing term: all parameters take part in the gradient reduction.
    policy_weight = 1.0 if train_policy else 0.0
    loss = policy_weight * (policy_loss - entropy_coef * mean_entropy) + algorithm.value_coef * value_loss

    with torch.no_grad():
        clipped = float(output.metrics["clip_share"]) if "clip_share" in output.metrics else 0.0
        figures += _figures(batch, log_ratio, advantages, entropy, clipped)
        figures += _ages((version - batch.versions)[keep].float())
        figures.append(("ratio/rejected_share", 1.0 - float(keep.float().mean()), float(len(log_ratio))))
        # A part of the update's sum, scaled so that the token-weighted mean over micro-batches and ranks is that sum.
        share, tokens = denominators.tokens / len(log_ratio), float(len(log_ratio))
        for name, part in (("policy", policy_loss), ("value", value_loss), ("total", loss)):
            figures.append((f"loss/{name}", part.item() * share, tokens))
        final = _loss_weights(algorithm, *teaching, version) * weights[batch.segment_ids[keep]]
        weight_sums = (tokens, float(final.sum()), float(final.square().sum()))
        num_rows = len(batch.lengths)
        size = importance.segment_mean(advantages.abs(), batch.segment_ids, num_rows)
        rows = importance.segment_sum(per_token + entropy, batch.segment_ids, num_rows)
        is_finite = (size + rows + importance.segment_sum(value_errors, steps_of, num_rows)).isfinite()
        comparison = compare(log_probs, batch, version)
    total_entropy = float(entropy.detach().sum())
    return Outcome(loss, size, log_probs.detach(), total_entropy, weight_sums, is_finite, comparison, figures)


def _from_values(
    algorithm: AlgorithmConfig,
    model: PolicyModel,
    hidden: Tensor,
    batch: PackedBatch,
    log_ratio: Tensor,
) -> tuple[Tensor, Tensor, list[tuple[str, float, float]]]:
    """From the value head by V-trace or GAE: advantages float32[N], the squared error of each value (float32[K], or [N]
    by token), and figures."""
    by_token = algorithm.granularity == "token"
    values = model.values(hidden[batch.action_positions - 1 if by_token else batch.turn_value_positions])
    bootstrap = values.new_zeros(len(batch.lengths))
    cut = batch.bootstrap
    if bool(cut.any()):
        bootstrap[cut] = model.values(hidden[batch.last_positions[cut]]).detach()
    # GAE is V-trace whose ratios are all 1, and nothing caps them, with A = v - V.
    is_vtrace = algorithm.advantage == "vtrace"
    corrected = log_ratio if is_vtrace else torch.zeros_like(log_ratio)
    rho_bar, c_bar = (algorithm.rho_bar, algorithm.c_bar) if is_vtrace else (1.0, 1.0)
    data = (corrected, batch.turn_ids, batch.turn_segment_ids, batch.turn_rewards, values.detach(), bootstrap)
    rules = (algorithm.discount, rho_bar, c_bar, algorithm.lam)
    if by_token:
        target = vtrace.token_vtrace(*data, *rules, algorithm.dead_band)
    else:
        target = vtrace.turn_vtrace(*data, *rules, algorithm.turn_ratio, algorithm.dead_band)
    advantages = target.advantages if is_vtrace else target.vs - values.detach()
    figures = _value_figures(target, values.detach(), rho_bar, c_bar)
    return advantages if by_token else advantages[batch.turn_ids], (values - target.vs).square(), figures


def _policy_loss(
    algorithm: AlgorithmConfig,
    log_probs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    versions: Tensor,
    version: int,
) -> losses.LossOutput:
    """The configured policy loss of each action token that teaches."""
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "truncated_is" if algorithm.is_level == "token":
            return losses.truncated_is(log_probs, behaviour, advantages, algorithm.is_cap)
        case "truncated_is":
            log_ratio = (log_probs - behaviour).detach()
            weight = importance.truncated_weights(log_ratio, segment_ids, "sequence", algorithm.is_cap)
            return losses.LossOutput(-weight * advantages * log_probs, {})
        case "ppo_clip":
            return losses.ppo_clip(log_probs, behaviour, advantages, low, high, algorithm.dual_clip)
        case "decoupled_ppo":
            proximal = log_probs.detach()
            if algorithm.proximal == "log_linear":
                proximal = importance.log_linear_proximal(log_probs, behaviour, versions, version).detach()
            cap = algorithm.proximal_cap or math.inf
            return losses.decoupled_ppo(log_probs, behaviour, advantages, proximal, low, high, algorithm.dual_clip, cap)
        case "cispo":
            return losses.cispo(log_probs, behaviour, advantages, high)
        case "gspo":
            return losses.gspo(log_probs, behaviour, advantages, segment_ids, low, high, algorithm.dual_clip)
        case _:  # reinforce, and dpo, whose advantages say it all
            return losses.LossOutput(-advantages * log_probs, {})


def _loss_weights(
    algorithm: AlgorithmConfig,
    log_probs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    segment_ids: Tensor,
    versions: Tensor,
    version: int,
) -> Tensor:
    """float32[N]: what the policy loss multiplies -A grad log π with: its importance weight, 0 where it clips."""
    signs = torch.where(advantages < 0, -1.0, 1.0)
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        per_token = _policy_loss(algorithm, log_probs, behaviour, signs, segment_ids, versions, version).per_token
        (slopes,) = torch.autograd.grad(per_token.sum(), log_probs)
    return -slopes * signs


def _kept(
    algorithm: AlgorithmConfig,
    log_probs: Tensor,
    behaviour: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    batch: PackedBatch,
    oldest_version: int,
) -> Tensor:
    """bool[N]: the action tokens that teach."""
    keep = batch.versions >= oldest_version
    if algorithm.reject != "none":
        keep = keep & importance.rejection_mask(
            log_ratio, batch.segment_ids, algorithm.reject, algorithm.reject_low, algorithm.reject_high
        )
    if algorithm.probability_limit is not None:
        keep = keep & importance.probability_difference_mask(
            log_probs, behaviour, advantages, algorithm.probability_limit
        )
    return keep


def _figures(
    batch: PackedBatch, log_ratio: Tensor, advantages: Tensor, entropy: Tensor, clipped: float
) -> list[tuple[str, float, float]]:
    """What is measured on the action tokens alone; observations never enter."""
    ratio = importance.ratios(log_ratio)
    kl = importance.kl_estimates(log_ratio)
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
    }
    figures = [(name, float(value), float(len(log_ratio))) for name, value in values.items()]
    figures.append(("staleness/span", float(span.float().mean()), float(len(span))))
    return figures


def _ages(ages: Tensor) -> list[tuple[str, float, float]]:
    """Staleness of the tokens that teach, in versions; nothing where there are none."""
    if not len(ages):
        return []
    values = {"staleness/mean": ages.mean(), "staleness/oldest": ages.max(), "staleness/newest": ages.min()}
    return [(name, float(value), float(len(ages))) for name, value in values.items()]


def _value_figures(
    target: vtrace.TurnVTraceOutput, values: Tensor, rho_bar: float, c_bar: float
) -> list[tuple[str, float, float]]:
    ratio = importance.ratios(target.log_ratios)
    spread = target.vs.var(unbiased=False).item()
    unexplained = (target.vs - values).var(unbiased=False).item()
    shares = {
        "ratio/rho_clip_share": (ratio > rho_bar).float().mean().item(),
        "ratio/c_clip_share": (ratio > c_bar).float().mean().item(),
        # Targets that are all but equal leave nothing to explain.
        "value/explained_variance": 1.0 - unexplained / spread if spread > 1e-6 else 0.0,
    }
    return [(name, value, float(len(values))) for name, value in shares.items()]
