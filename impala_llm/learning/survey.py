"""Survey of a batch: computes, before the first optimizer step, the values that depend on the whole batch.

If a batch has several steps, they need log π of the weights that the update begins with, the proximal policy, and the
advantages and value targets by these weights, as in PPO (arXiv 1707.06347, algorithm 1): a critic that is fitted to the
batch step by step would take its own advantages away. Whitened advantages need their mean and standard deviation over
the action tokens of all ranks. One more forward computes what no other part has computed.
"""

import math
from collections.abc import Callable, Sequence

import torch

from impala_llm.algorithms.interface import MetricValue, PackedBatch, parts_of
from impala_llm.learning.mismatch import Comparison, MismatchMonitor, compare
from impala_llm.learning.objective import AtStart, Rows, credit_metrics, score
from impala_llm.learning.own_parts import call_credit
from impala_llm.learning.packing import TokenBudget
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.update import Update
from impala_llm.settings import Config


class Survey:
    """Looks at a batch before its first optimizer step.

    Args:
        rows: `Trainer.rows`.
        take_part: `Trainer.take_part`.
    """

    def __init__(
        self,
        config: Config,
        model: PolicyModel,
        ranks: Ranks,
        budget: TokenBudget,
        monitor: MismatchMonitor,
        rows: Callable[[Update, PackedBatch, Sequence[int]], tuple[PackedBatch, Rows]],
        take_part: Callable[[PackedBatch], None],
    ) -> None:
        self._credit = parts_of(config.algorithm)[0]
        self._whitens, self._temperature = config.algorithm.whiten_advantages, config.engine.temperature
        self._model, self._ranks, self._budget, self._monitor = model, ranks, budget, monitor
        self._rows, self._take_part = rows, take_part

    def look(self, update: Update, num_steps: int) -> list[MetricValue]:
        """Set `Update.at_start` and `Update.whitening` where the update's steps need them. All ranks call it.

        Returns:
            The credit's metrics, where what it returns counts for all steps.
        """
        moments = self._prepared_moments(update) if self._whitens else None
        metrics: list[MetricValue] = []
        if num_steps > 1 or (self._whitens and moments is None):
            found, metrics = self._score(update, keeps=num_steps > 1)
            moments = moments or found
        if self._whitens:
            assert moments is not None
            count, total, squares = self._ranks.sum(moments)
            mean = total / max(1.0, count)
            update.whitening = mean, math.sqrt(max(0.0, squares / max(1.0, count) - mean * mean))
        return metrics if num_steps > 1 else []

    def _prepared_moments(self, update: Update) -> list[float] | None:
        """Number, sum, and sum of squares of this rank's advantages, where they are those of whole episodes."""
        if not self._credit.of_episodes or update.prepared is None:
            return None
        sizes = torch.tensor([t.num_action_tokens for t in update.batch.trajectories])
        return _moments(update.prepared, sizes.double())

    @torch.no_grad()
    def _score(self, update: Update, keeps: bool) -> tuple[list[float], list[MetricValue]]:
        """Score the batch by the weights that the update begins with.

        Args:
            keeps: set `Update.at_start`; then the monitor compares its log-probabilities with the engine's, and none
                of later steps.

        Returns:
            What `_prepared_moments` returns, and the credit's metrics.
        """
        taught = [update.batch.trajectories[i] for i in update.teaching]

        def scored(cpu_micro: PackedBatch) -> tuple[list[int], Rows, AtStart, list[MetricValue], Comparison]:
            indices = [update.teaching[i] for i in cpu_micro.members]
            micro, rows = self._rows(update, cpu_micro, indices)
            found = score(self._model, micro, self._temperature, rows, update.version)
            worth = call_credit(self._credit, found, micro, rows.prepared)
            comparison = compare(found.log_probs, micro, update.version, rows.is_own)
            values = AtStart.of(found.log_probs, worth, len(indices))
            return indices, rows, values, credit_metrics(worth), comparison

        moments, metrics = [0.0, 0.0, 0.0], list[MetricValue]()
        for indices, rows, values, measured, comparison in self._budget.in_micro_batches(
            taught, scored, take_part=self._take_part
        ):
            sums = _moments(values.advantages, torch.ones_like(values.advantages, dtype=torch.float64))
            moments = [total + part for total, part in zip(moments, sums, strict=True)]
            metrics += measured
            self._monitor.count(rows.recomputed, len(indices))
            if keeps:
                trajectories = [update.batch.trajectories[i] for i in indices]
                self._monitor.record(comparison)
                self._monitor.keep(trajectories, values.log_probs)
                parts = values.split([t.num_action_tokens for t in trajectories])
                update.at_start |= dict(zip(indices, parts, strict=True))
        return moments, metrics


def _moments(advantages: torch.Tensor, sizes: torch.Tensor) -> list[float]:
    """Number, sum, and sum of squares of advantages, each of which stands for as many tokens as `sizes` says.

    Those that are not finite are passed over: whitened by them all would be NaN, whose cause could not be named. Their
    own steps are left out.
    """
    finite = advantages.isfinite()
    sizes, advantages = sizes[finite], advantages[finite].double()
    return [float(part.sum()) for part in (sizes, sizes * advantages, sizes * advantages.square())]
