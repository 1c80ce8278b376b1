"""The loss of a micro-batch: scored once, judged by the credit, turned into a loss per token, and normalised.

Invariant: every part is a sum over this micro-batch divided by its count over ALL ranks and micro-batches of the update
(`Denominators`), so summing gradients over micro-batches and ranks gives the gradient of the whole batch, however it is
cut. Advantages and targets carry no gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from impala_llm.algorithms import importance, losses
from impala_llm.algorithms.interface import Figure, LossOutput, PackedBatch, Scored, Worth
from impala_llm.learning.mismatch import Comparison, Recomputed, compare
from impala_llm.learning.model import PolicyModel
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
    """Of the tokens' final weights (`LossOutput.weights` times the draw's weight; 0 where left out): their number, sum,
    and sum of squares."""
    is_finite: Tensor
    """bool[num_segments]: whether the row's advantages and its part of the loss are."""
    comparison: Comparison
    """Of the learner's log-probabilities with the engine's."""
    figures: list[Figure]
    """(metric, value, weight): see observability/metrics.py for the meaning of each."""


def objective(
    config: Config,
    model: PolicyModel,
    batch: PackedBatch,
    prepared: Tensor | None,
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
        prepared: float32[num_segments], what the credit has prepared for each row; None where it has nothing.
        weights: float32[num_segments], importance weights of the replay draw, 1 where it was uniform.
        version: of the learner, for staleness.
        train_policy: False while only the value head warms up.
        recomputed: what enters the ratios for log μ; None: what the engine reported.
        scores: of the reference policy and the teacher.
        oldest_version: older action tokens do not teach, though others of their trajectory may.
    """
    algorithm = config.algorithm
    credit: Any = algorithm.credit
    policy_loss: Any = algorithm.loss
    scored = score(model, batch, config.engine.temperature, version, recomputed, scores)
    worth = credit(scored, batch, prepared)
    keep = teaches(algorithm, scored, worth.advantages, oldest_version)
    # Taken out of the loss's inputs: a ratio of a whole row must not reach tokens that do not teach, and 0 times what
    # is infinite is no number.
    output = policy_loss(scored.select(keep), worth.advantages[keep])

    per_token, kl_figures = _with_reference(algorithm, scored, output, keep)
    per_token = per_token * weights[batch.segment_ids]
    denominator = denominators.tokens if algorithm.aggregate == "token_mean" else denominators.sequences
    mode: Any = algorithm.aggregate  # checked by config.py
    of_policy = losses.aggregate(per_token, batch.segment_ids, mode, denominator)
    # The bonus is a part of what the policy learns, so it has the same mask: a state that the policy left long ago says
    # nothing of the entropy that it needs. The value loss has none: targets are corrected for age (V-trace) or have no
    # ratio at all (GAE), and the values of old turns are what the advantages of the young ones before them rest on.
    of_entropy = torch.where(keep, scored.entropy, 0.0).sum() / denominators.tokens
    value_errors, of_values = _value_loss(worth, weights, denominators)
    # A weight of 0 and not a missing term: all parameters take part in the gradient reduction.
    policy_weight = 1.0 if train_policy else 0.0
    total = policy_weight * (of_policy - entropy_coef * of_entropy) + worth.value_coef * of_values

    with torch.no_grad():
        tokens = float(len(keep))
        figures = [*worth.figures, *kl_figures, *_loss_figures(output), *_figures(scored, worth.advantages, batch)]
        figures += _ages((version - scored.versions)[keep].float())
        figures.append(("ratio/rejected_share", 1.0 - float(keep.float().mean()), tokens))
        # A part of the update's sum, scaled so that the token-weighted mean over micro-batches and ranks is that sum.
        share = denominators.tokens / len(keep)
        for name, part in (("policy", of_policy), ("value", of_values), ("total", total)):
            figures.append((f"loss/{name}", part.item() * share, tokens))
        final = output.weights * weights[batch.segment_ids[keep]]
        weight_sums = (tokens, float(final.sum()), float(final.square().sum()))
        num_rows = len(batch.lengths)
        size = importance.segment_mean(worth.advantages.abs(), batch.segment_ids, num_rows)
        sums = importance.segment_sum(per_token + scored.entropy, batch.segment_ids, num_rows)
        if worth.value_rows is not None:
            sums = sums + importance.segment_sum(value_errors, worth.value_rows, num_rows)
        is_finite = (size + sums).isfinite()
        comparison = compare(scored.log_probs, batch, version)
    total_entropy = float(scored.entropy.detach().sum())
    return Outcome(total, size, scored.log_probs.detach(), total_entropy, weight_sums, is_finite, comparison, figures)


def score(
    model: PolicyModel,
    batch: PackedBatch,
    temperature: float,
    version: int,
    recomputed: Recomputed | None = None,
    scores: TokenScores = NO_SCORES,
) -> Scored:
    """One forward over a micro-batch. See `objective` for the arguments."""
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
    actions = batch.action_positions
    log_probs, entropy = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], temperature)
    return Scored(
        log_probs,
        entropy,
        batch.behaviour_logprobs if recomputed is None else recomputed.fill(log_probs),
        batch.segment_ids,
        batch.versions,
        version,
        lambda places: model.values(hidden[places]),
        scores.reference,
        scores.teacher,
    )


def teaches(algorithm: AlgorithmConfig, scored: Scored, advantages: Tensor, oldest_version: int) -> Tensor:
    """bool[N]: the action tokens that the policy learns from: young enough, and kept by what the settings reject."""
    keep = scored.versions >= oldest_version
    if algorithm.reject != "none":
        level: Any = algorithm.reject  # checked by config.py
        keep = keep & importance.rejection_mask(
            scored.log_ratio, scored.segment_ids, level, algorithm.reject_low, algorithm.reject_high
        )
    if algorithm.probability_limit is not None:
        keep = keep & importance.probability_difference_mask(
            scored.log_probs.detach(), scored.behaviour_log_probs, advantages, algorithm.probability_limit
        )
    return keep


def _with_reference(
    algorithm: AlgorithmConfig, scored: Scored, output: LossOutput, keep: Tensor
) -> tuple[Tensor, list[Figure]]:
    """float32[N]: the loss of each token, 0 where it does not teach, with what holds it near the reference."""
    per_token = scored.log_probs.new_zeros(len(keep)).masked_scatter(keep, output.per_token)
    reference = scored.reference_log_probs
    if reference is None or algorithm.kl_coef == 0:
        return per_token, []
    # From samples of μ: weighted as the policy gradient is, so that it is the divergence under π.
    weight = importance.ratios(scored.log_ratio).clamp(max=1.0)
    limit = importance.LOG_RATIO_LIMIT
    apart = (reference - scored.log_probs.detach()).clamp(-limit, limit)
    divergence = weight * (apart.exp() - apart - 1.0)
    penalty = algorithm.kl_coef * weight * losses.reference_penalty(scored.log_probs, reference)
    return per_token + torch.where(keep, penalty, 0.0), [
        ("loss/reference_kl", float(divergence.mean()), float(len(keep)))
    ]


def _value_loss(worth: Worth, weights: Tensor, denominators: Denominators) -> tuple[Tensor, Tensor]:
    """float32[K]: weighted squared errors of the values; and their part of the loss, a scalar."""
    if worth.values is None or worth.targets is None or worth.value_rows is None:
        none = worth.advantages.new_zeros(0)
        return none, none.sum()
    errors = weights[worth.value_rows] * (worth.values - worth.targets).square()
    count = denominators.tokens if worth.num_values == "tokens" else denominators.turns
    return errors, 0.5 * errors.sum() / count


def _loss_figures(output: LossOutput) -> list[Figure]:
    """Every metric that the loss names."""
    count = float(len(output.per_token))
    figures = [(n if "/" in n else f"loss/{n}", float(value), count) for n, value in output.metrics.items()]
    clipped = float(output.metrics["clip_share"]) if "clip_share" in output.metrics else 0.0
    return [*figures, ("ratio/pg_clip_share", clipped, count)]


def _figures(scored: Scored, advantages: Tensor, batch: PackedBatch) -> list[Figure]:
    """What is measured on the action tokens alone; observations never enter."""
    log_ratio = scored.log_ratio
    ratio = importance.ratios(log_ratio)
    kl = importance.kl_estimates(log_ratio)
    span = batch.versions.new_zeros(len(batch.lengths))
    span = span.scatter_reduce(0, batch.segment_ids, batch.versions, "amax", include_self=False) - span.scatter_reduce(
        0, batch.segment_ids, batch.versions, "amin", include_self=False
    )
    values = {
        "loss/entropy": scored.entropy.mean(),
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(unbiased=False),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "ratio/ess": importance.effective_sample_size(ratio),
        "ratio/k1": kl.k1,
        "ratio/k3": kl.k3,
    }
    figures = [(name, float(value), float(len(log_ratio))) for name, value in values.items()]
    figures.append(("staleness/span", float(span.float().mean()), float(len(span))))
    return figures


def _ages(ages: Tensor) -> list[Figure]:
    """Staleness of the tokens that teach, in versions; nothing where there are none."""
    if not len(ages):
        return []
    values = {"staleness/mean": ages.mean(), "staleness/oldest": ages.max(), "staleness/newest": ages.min()}
    return [(name, float(value), float(len(ages))) for name, value in values.items()]
