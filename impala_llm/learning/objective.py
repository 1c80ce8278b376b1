"""The loss of a micro-batch: scored once, given advantages by the credit, turned into a loss per token, and normalised.

Invariant: every part is a sum over this micro-batch divided by its count over ALL ranks and micro-batches of the update
(`Denominators`), so summing gradients over micro-batches and ranks gives the gradient of the whole batch, however it is
cut. Advantages and targets carry no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from impala_llm.algorithms import importance, losses
from impala_llm.algorithms.advantages import ROUNDING
from impala_llm.algorithms.interface import (
    BatchLoss,
    Credit,
    LossOutput,
    MetricValue,
    PackedBatch,
    Scored,
    Worth,
    moments,
    parts_of,
)
from impala_llm.learning.mismatch import Comparison, Recomputed, compare
from impala_llm.learning.own_parts import PartFault, call_credit, call_loss, call_measure
from impala_llm.learning.policy.model import PolicyModel
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
class MicroBatchResult:
    """Results of a micro-batch beside its gradient."""

    loss: Tensor
    """Scalar, differentiable; this micro-batch's share of the update's loss."""
    advantage_size: Tensor
    """float32[num_segments]: mean |A| over the action tokens: the advantage factor of the replay priority."""
    log_probs: Tensor
    """float32[N]: log π of the action tokens, without gradient."""
    entropy: float
    """Sum over the action tokens, in nats."""
    weight_sums: tuple[float, float, float]
    """Number, sum, and sum of squares of the tokens' final weights: `LossOutput.weights` times the draw's weight; 0
    where left out."""
    is_finite: Tensor
    """bool[num_segments]: whether the row's advantages and its part of the loss are."""
    comparison: Comparison
    """Comparison of the learner's log-probabilities with the engine's."""
    metrics: list[MetricValue]
    """(metric, value, weight): see observability/metrics.py for the meaning of each."""


@dataclass(frozen=True)
class Rules:
    """Values that hold for all micro-batches of an optimizer step."""

    denominators: Denominators
    version: int
    """Version of the learner's weights, for staleness."""
    oldest_version: int = 0
    """Older action tokens do not teach, though others of their trajectory may."""
    entropy_coef: float = 0.0
    whitening: tuple[float, float] | None = None
    """Mean and deviation of all advantages of the update, which make them mean 0 and deviation 1; None: left alone."""
    train_policy: bool = True
    """False while only the value head warms up."""
    batch_limit: float | None = None
    """Limit that the loss has found over the whole batch of the step; None where it needs none."""


def _values_of_rows(value_rows: Tensor, num_rows: int) -> tuple[int, ...]:
    """Number of values of each row. value_rows: int64[K], row of each value."""
    return tuple(value_rows.bincount(minlength=num_rows).tolist())


@dataclass(frozen=True)
class AtStart:
    """Values of rows by the weights that the update began with, where it has several optimizer steps."""

    log_probs: Tensor
    """float32[N]: log π of the action tokens, the proximal policy."""
    advantages: Tensor
    """float32[N]: by the credit."""
    targets: Tensor
    """float32[K]: of the values, in the order of the rows; K is 0 where no values are fitted."""
    num_values: tuple[int, ...]
    """Values of each row."""

    @staticmethod
    def of(log_probs: Tensor, worth: Worth, num_rows: int) -> "AtStart":
        """Keep the values of a micro-batch."""
        if worth.targets is None or worth.value_rows is None:
            return AtStart(log_probs, worth.advantages, worth.advantages[:0], (0,) * num_rows)
        targets = worth.targets[worth.value_rows.argsort(stable=True)]
        return AtStart(log_probs, worth.advantages, targets, _values_of_rows(worth.value_rows, num_rows))

    def split(self, num_tokens: Sequence[int]) -> list["AtStart"]:
        """Return those of each row, on the CPU.

        Args:
            num_tokens: of each row.
        """
        log_probs, advantages = (part.cpu().split(list(num_tokens)) for part in (self.log_probs, self.advantages))
        targets, num_values = self.targets.cpu().split(list(self.num_values)), [(num,) for num in self.num_values]
        return list(map(AtStart, log_probs, advantages, targets, num_values))

    @staticmethod
    def joined(rows: Sequence["AtStart"], device: torch.device) -> "AtStart":
        """Return those of several rows, on a device."""
        return AtStart(
            torch.cat([row.log_probs for row in rows]).to(device),
            torch.cat([row.advantages for row in rows]).to(device),
            torch.cat([row.targets for row in rows]).to(device),
            tuple(row.num_values[0] for row in rows),
        )

    def replace_in(self, worth: Worth, credit: Credit) -> Worth:
        """Return a credit's result of now with the advantages and targets of then, and so with the values of now.

        Raises:
            PartFault: it has other numbers of values now.
        """
        targets = worth.targets
        if targets is not None and worth.value_rows is not None:
            if (found := _values_of_rows(worth.value_rows, len(self.num_values))) != self.num_values:
                raise PartFault(
                    f"algorithm.credit={credit.name} returned {found} values for the rows of a micro-batch, and "
                    f"{self.num_values} before the first step of the update: which values it returns may not depend on "
                    "the weights, or set learner.epochs=1 and learner.minibatches=1"
                )
            targets = torch.empty_like(self.targets)
            targets[worth.value_rows.argsort(stable=True)] = self.targets
        return replace(worth, advantages=self.advantages, targets=targets, metrics=())


@dataclass(frozen=True)
class Rows:
    """Values of a micro-batch's S rows, and of their N action tokens, beside those that are packed."""

    weights: Tensor
    """float32[S]: importance weights of the replay draw, 1 where it was uniform."""
    prepared: Tensor | None = None
    """float32[S]: advantages that the credit has prepared; None where it prepares none."""
    recomputed: Recomputed | None = None
    """Log-probabilities that enter the ratios for log μ; None: those that the engine reported."""
    scores: TokenScores = NO_SCORES
    """Log-probabilities by the reference policy and the teacher."""
    at_start: AtStart | None = None
    """Their values as the update began; None: it has one step, where they are those of the forward at hand."""
    is_own: Tensor | None = None
    """bool[S]: drawn by this rank, whose engines the mismatch monitor compares; None: all."""


def objective(config: Config, model: PolicyModel, batch: PackedBatch, rows: Rows, rules: Rules) -> MicroBatchResult:
    """Loss of one packed micro-batch."""
    algorithm, weights, denominators = config.algorithm, rows.weights, rules.denominators
    scored, worth, keep = credited(config, model, batch, rows, rules)
    # Taken out of the loss's inputs: a ratio of a whole row must not reach tokens that do not teach, and 0 times what
    # is infinite is no number.
    output = call_loss(parts_of(algorithm)[1], scored.select(keep), worth.advantages[keep])

    per_token, kl_metrics = _with_reference(algorithm, scored, output, keep)
    per_token = per_token * weights[batch.segment_ids]
    denominator = denominators.tokens if algorithm.aggregate == "token_mean" else denominators.sequences
    mode: Any = algorithm.aggregate  # checked by config.load
    of_policy = losses.aggregate(per_token, batch.segment_ids, mode, denominator)
    # The bonus is a part of what the policy learns, so it has the same mask: a state that the policy left long ago says
    # nothing of the entropy that it needs. The value loss has none: targets are corrected (V-trace) or have no
    # ratio at all (GAE), and the values of old turns are what the advantages of the young ones before them rest on.
    # Without a bonus not even with a weight of 0: its backward pass is as long as that of the policy's logits.
    bonus: Tensor | float = 0.0
    if rules.entropy_coef:
        bonus = rules.entropy_coef * (torch.where(keep, scored.entropy, 0.0).sum() / denominators.tokens)
    value_errors, of_values = _value_loss(worth, weights, denominators)
    # A weight of 0 and not a missing term: all parameters take part in the gradient reduction.
    policy_weight = 1.0 if rules.train_policy else 0.0
    total = policy_weight * (of_policy - bonus) + worth.value_coef * of_values

    sums = importance.segment_sum((per_token + scored.entropy).detach(), batch.segment_ids, len(batch.lengths))
    if worth.value_rows is not None:
        sums = sums + importance.segment_sum(value_errors.detach(), worth.value_rows, len(batch.lengths))
    # A part of the update's sum, scaled so that the token-weighted mean over micro-batches and ranks is that sum.
    share, tokens = denominators.tokens / len(keep), float(len(keep))
    parts = {"loss/policy": of_policy, "loss/value": of_values, "loss/total": total}
    metrics: list[MetricValue] = [(name, part.item() * share, tokens) for name, part in parts.items()]
    metrics += [
        *kl_metrics,
        *_loss_metrics(output),
        *(credit_metrics(worth) if rows.at_start is None else ()),  # else those of the beginning count
        *_token_metrics(scored, worth.advantages, keep, batch),
    ]
    final_weights = output.weights * weights[batch.segment_ids[keep]]
    comparison = compare(scored.log_probs, batch, scored.version, rows.is_own)
    return _outcome(total, scored, worth, final_weights, sums, metrics, batch, comparison)


@torch.no_grad()
def _outcome(
    total: Tensor,
    scored: Scored,
    worth: Worth,
    final_weights: Tensor,
    sums: Tensor,
    metrics: list[MetricValue],
    batch: PackedBatch,
    comparison: Comparison,
) -> MicroBatchResult:
    """Collect the results of a micro-batch.

    Args:
        sums: float[num_segments], over everything in a row that must be finite.
    """
    size = importance.segment_mean(worth.advantages.abs(), batch.segment_ids, len(batch.lengths))
    return MicroBatchResult(
        total,
        size,
        scored.log_probs.detach(),
        float(scored.entropy.sum()),
        (float(len(scored.log_probs)), float(final_weights.sum()), float(final_weights.square().sum())),
        (size + sums).isfinite(),
        comparison,
        metrics,
    )


def credited(
    config: Config, model: PolicyModel, batch: PackedBatch, rows: Rows, rules: Rules
) -> tuple[Scored, Worth, Tensor]:
    """Score a micro-batch by one forward; return also its worth, and bool[N]: the action tokens that teach."""
    scored = score(model, batch, config.engine.temperature, rows, rules.version)
    credit = parts_of(config.algorithm)[0]
    worth = call_credit(credit, scored, batch, rows.prepared)
    if rows.at_start is not None:
        worth = rows.at_start.replace_in(worth, credit)
    worth = whitened(worth, rules.whitening)
    keep = teaches(config.algorithm, scored, worth.advantages, rules.oldest_version)
    return replace(scored, batch_limit=rules.batch_limit), worth, keep


@torch.no_grad()
def measured(
    loss: BatchLoss, config: Config, model: PolicyModel, batch: PackedBatch, rows: Rows, rules: Rules
) -> Tensor:
    """Return `BatchLoss.measure` of a micro-batch, float32[n], which the loss needs before any token has its loss."""
    scored, worth, keep = credited(config, model, batch, rows, rules)
    return call_measure(loss, scored.select(keep), worth.advantages[keep])


def score(model: PolicyModel, batch: PackedBatch, temperature: float, rows: Rows, version: int) -> Scored:
    """One forward over a micro-batch."""
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.context_lengths)
    actions = batch.action_positions
    log_probs, entropy = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], temperature)
    proximal = None if rows.at_start is None else rows.at_start.log_probs
    return Scored(
        log_probs,
        entropy,
        batch.behaviour_log_probs
        if rows.recomputed is None
        else rows.recomputed.fill(log_probs if proximal is None else proximal),
        batch.segment_ids,
        batch.versions,
        version,
        lambda indices: model.values(hidden[indices]),
        proximal,
        rows.scores.reference,
        rows.scores.teacher,
    )


def whitened(worth: Worth, whitening: tuple[float, float] | None) -> Worth:
    """The advantages with mean 0 and deviation 1 over the update; a deviation that is rounding counts as 1."""
    if whitening is None:
        return worth
    mean, deviation = whitening
    is_spread = deviation > max(1e-8, ROUNDING * abs(mean))
    return replace(worth, advantages=(worth.advantages - mean) / (deviation if is_spread else 1.0))


def teaches(algorithm: AlgorithmConfig, scored: Scored, advantages: Tensor, oldest_version: int) -> Tensor:
    """bool[N]: the action tokens that the policy learns from: young enough, and kept by what the settings reject."""
    keep = scored.versions >= oldest_version
    if algorithm.reject != "none":
        level: Any = algorithm.reject  # checked by config.load
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
) -> tuple[Tensor, list[MetricValue]]:
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


def named(part: str, metrics: Sequence[MetricValue]) -> list[MetricValue]:
    """Metrics of a credit or loss under their whole names: one without `/` is under that of the part."""
    return [(name if "/" in name else f"{part}/{name}", value, weight) for name, value, weight in metrics]


def credit_metrics(worth: Worth) -> list[MetricValue]:
    """Metrics of a credit under their whole names, and how well the values explain their targets."""
    found = named("credit", worth.metrics)
    if worth.values is None or worth.targets is None:
        return found
    spread = moments(worth.targets) + moments(worth.targets - worth.values)
    return [*found, ("value/explained_variance", spread, float(len(worth.targets)))]


def _loss_metrics(output: LossOutput) -> list[MetricValue]:
    """Every metric that the loss names."""
    count = float(len(output.per_token))
    return named("loss", [(name, float(value), count) for name, value in output.metrics.items()])


@torch.no_grad()
def _token_metrics(scored: Scored, advantages: Tensor, keep: Tensor, batch: PackedBatch) -> list[MetricValue]:
    """Measure the action tokens; observations never enter."""
    log_ratio = scored.log_ratio
    ratio = importance.ratios(log_ratio)
    kl = importance.kl_estimates(log_ratio)
    values: dict[str, Tensor | float] = {
        "loss/entropy": scored.entropy.mean(),
        "advantage/mean": advantages.mean(),
        "ratio/mean": ratio.mean(),
        "ratio/max": ratio.max(),
        "ratio/k1": kl.k1,
        "ratio/k3": kl.k3,
        "ratio/rejected_share": 1.0 - float(keep.float().mean()),
    }
    count = float(len(log_ratio))
    metrics: list[MetricValue] = [(name, float(value), count) for name, value in values.items()]
    metrics += [("advantage/std", moments(advantages), count), ("ratio/ess", moments(ratio), count)]
    newest, oldest = (
        batch.versions.new_zeros(len(batch.lengths)).scatter_reduce(
            0, batch.segment_ids, batch.versions, edge, include_self=False
        )
        for edge in ("amax", "amin")
    )
    metrics.append(("staleness/span", float((newest - oldest).float().mean()), float(len(newest))))
    ages = (scored.version - scored.versions)[keep].float()
    if not len(ages):
        return metrics
    staleness = {"staleness/mean": ages.mean(), "staleness/oldest": ages.max(), "staleness/newest": ages.min()}
    return metrics + [(name, float(value), float(len(ages))) for name, value in staleness.items()]
