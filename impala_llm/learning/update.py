"""An update on its way through the trainer: the batch of one rank, and what is summed up over its micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from impala_llm.algorithms.advantages import episode_return, levelled_returns
from impala_llm.algorithms.interface import MetricValue, parts_of
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.objective import AtStart, Denominators, MicroBatchResult
from impala_llm.settings import AlgorithmConfig
from impala_llm.trajectory import Trajectory


def optimizer_steps(
    num_trajectories: int, num_epochs: int, num_minibatches: int, seed: tuple[int, ...]
) -> list[list[int]]:
    """Return the indices in the batch of each optimizer step: passes over the batch, each in an order of its own, cut
    into minibatches; as many steps whatever the batch is.

    Args:
        seed: of the orders, an element of each pass follows.
    """
    found = []
    for epoch in range(num_epochs):
        indices = np.random.default_rng((*seed, epoch)).permutation(num_trajectories)
        found += [sorted(part.tolist()) for part in np.array_split(indices, num_minibatches)]
    return found


def have_gradients(trajectories: Sequence[Trajectory], oldest_version: int, discount: float | None) -> list[bool]:
    """Whether each trajectory teaches something, where nothing but its advantage against its group does.

    Args:
        oldest_version: of the tokens that teach.
        discount: of returns; None: groups of equal returns are not looked for.
    """
    of_groups: dict[int, set[float]] = {}
    if discount is not None:
        returns = levelled_returns([episode_return(t, discount) for t in trajectories], trajectories)
        for t, value in zip(trajectories, returns.tolist(), strict=True):
            of_groups.setdefault(t.group_id, set()).add(value)
    of_equals = {group_id for group_id, found in of_groups.items() if len(found) == 1}
    return [t.newest_version >= oldest_version and t.group_id not in of_equals for t in trajectories]


@dataclass
class Update:
    """One rank's batch on its way through an update, and what is summed up over its micro-batches."""

    batch: Batch
    version: int
    oldest_version: int
    """Older tokens do not teach."""
    counts: Denominators
    """Denominators of the whole batch."""
    shaping: list[np.ndarray]
    """float32[turns] for each trajectory: rewards beside the environment's."""
    prepared: torch.Tensor | None
    """float32[M]: advantages that the credit has prepared, one for each trajectory; None where it prepares none."""
    weights: torch.Tensor
    """float32[M]: of the draw."""
    teaching: tuple[int, ...]
    """Indices of the trajectories that have a gradient, in ascending order."""
    not_finite: frozenset[int]
    """Indices of the trajectories whose return is not finite."""
    at_start: dict[int, AtStart] = field(default_factory=dict)
    """Index -> its values as the update began; empty where there is but one optimizer step."""
    whitening: tuple[float, float] | None = None
    """Mean and deviation of all ranks' advantages, where they are whitened."""
    sizes: dict[int, float] = field(init=False)
    """Buffer item -> largest mean |A| of its trajectories."""
    culprits: set[int] = field(init=False)
    """Indices of the trajectories for which steps were left out."""
    without_advantage: set[int] = field(default_factory=set)
    """Indices of the trajectories with an advantage that is not finite."""
    entropy: float = 0.0
    weight_sums: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        self.culprits = set(self.not_finite)
        self.sizes = dict.fromkeys(self.batch.item_ids, 0.0)

    def leave_out(self, part: Sequence[int]) -> list[MetricValue]:
        """Count the trajectories of an optimizer step that are left out of the forward; return their metrics.

        Only credits of whole episodes leave trajectories out, since such credits have no values; the loss of these
        trajectories is 0. Their ratios are not computed: a token counts as rejected only if it is too stale. Too stale
        tokens have weight 0. Where the advantage is 0 no token enters the sums of weights: the weights of the fresh
        tokens are unknown, and the stale ones alone would make the batch look staler than it is.

        Args:
            part: indices of the step's trajectories in the batch.
        """
        found: list[MetricValue] = []
        num_weightless = 0.0
        for index in sorted(set(part) - set(self.teaching)):
            assert self.prepared is not None  # else all teach
            t, advantage = self.batch.trajectories[index], float(self.prepared[index])
            tokens, too_old = float(t.num_action_tokens), t.versions[t.action_mask] < self.oldest_version
            found += [("loss/policy", 0.0, tokens), ("loss/total", 0.0, tokens)]
            found += [("advantage/mean", advantage, tokens), ("advantage/std", (advantage, advantage**2), tokens)]
            found.append(("ratio/rejected_share", float(too_old.mean()), tokens))
            found.append(("staleness/span", float(t.newest_version - t.oldest_version), 1.0))
            num_weightless += tokens * (advantage != 0.0)
        count, total, squares = self.weight_sums
        self.weight_sums = count + num_weightless, total, squares
        return found

    def add(self, outcome: MicroBatchResult, indices: Sequence[int]) -> None:
        """Add a micro-batch.

        Args:
            outcome: of the micro-batch.
            indices: of its rows in the batch.
        """
        self.entropy += outcome.entropy
        sums = zip(self.weight_sums, outcome.weight_sums, strict=True)
        self.weight_sums = tuple(total + part for total, part in sums)  # type: ignore[assignment]
        for index, size in zip(indices, outcome.advantage_size.tolist(), strict=True):
            if math.isfinite(size):
                item = self.batch.item_ids[index]
                self.sizes[item] = max(size, self.sizes[item])
            else:
                self.without_advantage.add(index)

    def reason_left_out(self, algorithm: AlgorithmConfig) -> str:
        """Reason why a step is left out: a sentence that names the values that are not finite.

        Names a trajectory without an advantage first: what the loss makes of it may spoil the others.
        """
        number = min(self.culprits & self.without_advantage or self.culprits)
        first = self.batch.trajectories[number]
        others = f" and {len(self.culprits) - 1} more of the batch" if len(self.culprits) > 1 else ""
        earned = episode_return(first, algorithm.credit.discount)
        if not math.isfinite(earned):
            check = "its rewards"
        elif number in self.without_advantage:
            check = f"algorithm.credit={algorithm.credit.name}, whose advantages are not finite though the rewards are"
            if algorithm.credit.uses_values or parts_of(algorithm)[0].needs_teacher:
                of_policy = "values" if algorithm.credit.uses_values else "log-probabilities"
                check += f", or set a lower learner.learning_rate: a policy that diverges has such {of_policy}"
        else:
            can_scale = algorithm.credit.learns_from_rewards and not algorithm.credit.ignores_scale
            scale = "algorithm.normalize_reward=true or " if can_scale and not algorithm.normalize_reward else ""
            check = (
                f"algorithm.loss={algorithm.loss.name}, since the episode's rewards are finite, or set {scale}a lower "
                "learner.learning_rate"
            )
        return (
            f"episode {first.episode_id} (task {first.task_id} of {first.env}, by {first.actor_id}, return "
            f"{earned:g}){others}, at version {self.version}: check {check}"
        )
