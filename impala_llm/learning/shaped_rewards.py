"""Rewards beside the environment's: a penalty on episodes that are too long, and on the distance to the reference."""

from collections.abc import Sequence

import numpy as np
import torch

from impala_llm.algorithms.interface import MetricValue, PackedBatch
from impala_llm.algorithms.shaping import overlong_share, turn_divergences
from impala_llm.learning.packing import TokenBudget
from impala_llm.learning.scoring import Scorers
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory


class Shaping:
    """Computes what is added to the rewards of a batch. Source of both parts: algorithms/shaping.py."""

    def __init__(self, config: Config, scorers: Scorers, budget: TokenBudget, device: torch.device) -> None:
        self._algorithm, self._limit = config.algorithm, config.engine.max_length
        self._scorers, self._budget, self._device = scorers, budget, device
        is_asked_for = self._algorithm.overlong_tokens is not None or self._algorithm.reward_kl_coef > 0
        self.is_on = is_asked_for and self._algorithm.credit.learns_from_rewards
        """Whether anything is added; where no reward is learned from it would cost, and show in metrics alone."""

    def rewards(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """float32[turns] for each trajectory."""
        algorithm, limit = self._algorithm, self._limit
        found = [np.zeros(len(t.turns), np.float32) for t in trajectories]
        if not self.is_on:
            return found
        if algorithm.overlong_tokens is not None:
            for t, extra in zip(trajectories, found, strict=True):
                if len(extra) and not t.continues:
                    share = overlong_share(int(t.context_lengths.max()), limit, algorithm.overlong_tokens)
                    extra[-1] -= algorithm.overlong_penalty * share
        if algorithm.reward_kl_coef > 0:
            for index, divergences in self._divergences(trajectories):
                found[index] -= algorithm.reward_kl_coef * divergences
        return found

    def metrics(self, rewards: Sequence[np.ndarray]) -> list[MetricValue]:
        """Metrics of what `rewards` gave."""
        if not self.is_on:
            return []
        return [("reward/shaping", float(np.mean([extra.sum() for extra in rewards])), len(rewards))]

    def _divergences(self, trajectories: Sequence[Trajectory]) -> list[tuple[int, np.ndarray]]:
        """Index of each trajectory, and float32[turns]: `turn_divergences` of its turns from the reference."""

        def measured(cpu_micro: PackedBatch) -> list[tuple[int, np.ndarray]]:
            micro = cpu_micro.to(self._device)
            reference = self._scorers.reference(micro)
            assert reference is not None
            apart = turn_divergences(micro.behaviour_log_probs, reference, micro.turn_ids, len(micro.turn_rewards))
            parts = apart.cpu().split([len(trajectories[i].turns) for i in micro.members])
            return [(index, part.numpy()) for index, part in zip(micro.members, parts, strict=True)]

        return [found for of_micro in self._budget.in_micro_batches(trajectories, measured) for found in of_micro]
