"""Preference learning: losses on pairs of completions of the same task, of which one is better.

The scores of the actors' own episodes determine the pairs. Learning is online if weights are published at every update,
and offline if they are never published.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from impala_llm.algorithms.advantages import EpisodeCredit, levelled
from impala_llm.algorithms.checks import require_positive, require_same_floats
from impala_llm.algorithms.interface import Episodes, Prepared, credit
from impala_llm.algorithms.losses import Reinforce
from impala_llm.settings import AlgorithmConfig, bounded


class PreferenceOutput(NamedTuple):
    per_pair: Tensor
    """float[M]: loss of each pair, not yet averaged."""
    metrics: dict[str, Tensor]
    """Scalars without gradient, means over the pairs (0 when M is 0)."""


class Pairs(NamedTuple):
    """int64[M] each: indices into `scores`."""

    chosen: Tensor
    rejected: Tensor


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
) -> PreferenceOutput:
    """-log σ(β [(log π_w - log π_ref,w) - (log π_l - log π_ref,l)]) (DPO, arXiv 2305.18290, equation 7).

    Args:
        chosen, rejected: float[M], log π of the whole better and worse completion: sums over their action tokens.
        reference_chosen, reference_rejected: float[M], the same under the reference policy; constants.
        beta: > 0: how much it costs to move away from the reference policy.

    Returns:
        Metrics: accuracy_share (pairs that π orders rightly relative to the reference; an equal pair does not count),
        margin_mean (of the bracket, times β), chosen_reward_mean and rejected_reward_mean (β (log π - log π_ref)). Both
        rewards falling is the known failure of DPO: the margin alone does not show it.

    Raises:
        TypeError, ValueError: wrong dtype, shape or beta.
    """
    require_same_floats(
        ("chosen", chosen), ("rejected", rejected),
        ("reference_chosen", reference_chosen), ("reference_rejected", reference_rejected), ndim=1,
    )  # fmt: skip
    require_positive("beta", beta)
    chosen_reward = beta * (chosen - reference_chosen.detach())
    rejected_reward = beta * (rejected - reference_rejected.detach())
    margin = chosen_reward - rejected_reward
    per_pair = {
        "accuracy_share": (margin > 0).to(margin.dtype),
        "margin_mean": margin,
        "chosen_reward_mean": chosen_reward,
        "rejected_reward_mean": rejected_reward,
    }
    metrics = {name: value.detach().sum() / max(1, len(margin)) for name, value in per_pair.items()}
    return PreferenceOutput(-logsigmoid(margin), metrics)


def best_and_worst(scores: Tensor, group_ids: Tensor) -> Pairs:
    """One pair of each group: its best and its worst episode, the first of several that are equal.

    Args:
        scores: float[M].
        group_ids: int64[M], in any order and with any numbers.

    Returns:
        Pairs in the order of the groups' numbers. A group whose scores are all equal, as `levelled` says, such as one
        of a single member, gives none.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    scores = levelled(scores, group_ids)
    num_scores = scores.shape[0]
    numbers, index = group_ids.unique(return_inverse=True)
    indices = torch.arange(num_scores, device=scores.device)

    def first(extreme: Tensor) -> Tensor:
        """The first index of each group where its score is `extreme` [groups]."""
        candidates = torch.where(scores == extreme[index], indices, num_scores)
        return indices.new_full((len(numbers),), num_scores).scatter_reduce(0, index, candidates, "amin")

    none = scores.new_zeros(len(numbers))
    best = none.scatter_reduce(0, index, scores, "amax", include_self=False)
    worst = none.scatter_reduce(0, index, scores, "amin", include_self=False)
    differ = best > worst
    return Pairs(first(best)[differ], first(worst)[differ])


class PairAdvantages(NamedTuple):
    advantages: Tensor
    """float32[M]: minus the gradient of the sum of the pairs' losses; 0 for an episode of no pair."""
    loss: float
    """Sum over the pairs."""
    num_pairs: int
    metrics: dict[str, float]
    """Means over the pairs."""


def pair_advantages(
    log_probs: Tensor, reference_log_probs: Tensor, scores: Tensor, group_ids: Tensor, beta: float
) -> PairAdvantages:
    """DPO as a policy gradient: the best against the worst episode of each group.

    The gradient of a pair's loss with respect to the log-probability of a whole episode is one number, ∓β σ(-margin).
    It is found from a forward without gradient, and stands for the advantage of the episode in a loss without ratio. So
    the two episodes of a pair need not lie in one micro-batch.

    Args:
        log_probs, reference_log_probs: float32[M], of all action tokens of each episode together.
        scores: float[M].
        group_ids: int64[M].
        beta: see `dpo`.
    """
    pairs = best_and_worst(scores, group_ids)
    with torch.enable_grad():
        policy = log_probs.detach().requires_grad_()
        output = dpo(
            policy[pairs.chosen],
            policy[pairs.rejected],
            reference_log_probs[pairs.chosen],
            reference_log_probs[pairs.rejected],
            beta,
        )
        total = output.per_pair.sum()
        (gradient,) = torch.autograd.grad(total, policy)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    return PairAdvantages(-gradient, total.item(), len(pairs.chosen), metrics)


@credit("preference")
@dataclass
class Preference(EpisodeCredit):
    """DPO: the best episode of each group is preferred to its worst; see `pair_advantages`.

    With algorithm.loss=reinforce and algorithm.aggregate=sequence_mean_token_sum the gradient is the mean over the
    pairs of all ranks. A pair is learned from whole: max_staleness only bounds which groups are dropped.
    """

    needs_reference: ClassVar[bool] = True
    teaches_at_any_age: ClassVar[bool] = True
    is_for_one_step: ClassVar[bool] = True
    metrics = {
        "preference/accuracy_share": "share of a batch's pairs that the policy orders rightly, against the reference",
        "preference/margin_mean": "implicit reward of the better minus that of the worse episode, per pair",
        "preference/chosen_reward_mean": "implicit reward of the better episode, per pair",
        "preference/rejected_reward_mean": "implicit reward of the worse episode, per pair",
    }
    beta: float = bounded(0.1, 1e-6, 1000)
    """β, how strongly the policy is held to the reference."""

    def prepare(self, episodes: Episodes) -> Prepared:
        found = pair_advantages(*episodes.log_probs(), episodes.returns, episodes.group_ids, self.beta)
        num_pairs, num_episodes = episodes.sum_over_ranks([found.num_pairs, len(episodes.trajectories)])
        metrics = [(f"preference/{name}", value, float(found.num_pairs)) for name, value in found.metrics.items()]
        return Prepared(found.advantages * (num_episodes / max(1.0, num_pairs)), metrics)

    @property
    def ignores_scale(self) -> bool:
        return True

    def problems(self, algorithm: AlgorithmConfig) -> list[str]:
        found = list[str]()
        if algorithm.aggregate != "sequence_mean_token_sum":
            found.append(
                f"algorithm.aggregate={algorithm.aggregate} does not go with algorithm.credit={self.name}, whose pairs "
                "are compared as wholes: set algorithm.aggregate=sequence_mean_token_sum"
            )
        # A class that derives from it may compute another loss.
        if type(algorithm.loss).__call__ is not Reinforce.__call__:
            found.append(
                f"algorithm.loss={algorithm.loss.name} does not go with algorithm.credit={self.name}, whose advantages "
                "are the gradient of DPO already: set algorithm.loss=reinforce, or algorithm=dpo for both"
            )
        rejects = {"reject": (algorithm.reject, "none"), "probability_limit": (algorithm.probability_limit, None)}
        found += [
            f"algorithm.{key}={value} does not go with algorithm.credit={self.name}, as a pair of which one half was "
            f"left out is no comparison: set algorithm.{key}={'null' if off is None else off}"
            for key, (value, off) in rejects.items()
            if value != off
        ]
        if algorithm.whiten_advantages:
            found.append(
                f"algorithm.whiten_advantages=true does not go with algorithm.credit={self.name}, as an episode of no "
                "pair would be learned from: set algorithm.whiten_advantages=false"
            )
        return found
