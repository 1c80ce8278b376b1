"""Rewards beside the environment's: a penalty on episodes that are too long, and on the distance to the reference."""

from collections.abc import Sequence

import numpy as np
import torch

from impala_llm.algorithms.interface import PackedBatch
from impala_llm.algorithms.shaping import overlong_share, turn_divergences
from impala_llm.learning.packing import TokenBudget
from impala_llm.learning.scoring import Scorers
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory


def are_shaped(config: Config) -> bool:
    """Return whether rewards are added to the environment's."""
    return config.algorithm.overlong_tokens is not None or config.algorithm.reward_kl_coef > 0


def shaped_rewards(
    config: Config, trajectories: Sequence[Trajectory], scorers: Scorers, budget: TokenBudget, device: torch.device
) -> list[np.ndarray]:
    """float32[turns] for each trajectory. Source of both parts: algorithms/shaping.py."""
    algorithm, limit = config.algorithm, config.engine.max_length
    found = [np.zeros(len(t.turns), np.float32) for t in trajectories]
    if algorithm.overlong_tokens is not None:
        for t, extra in zip(trajectories, found, strict=True):
            if len(extra) and not t.continues:
                share = overlong_share(int(t.context_lengths.max()), limit, algorithm.overlong_tokens)
                extra[-1] -= algorithm.overlong_penalty * share
    if algorithm.reward_kl_coef > 0:

        def divergences(cpu_micro: PackedBatch) -> tuple[Sequence[int], Sequence[torch.Tensor]]:
            micro = cpu_micro.to(device)
            reference = scorers.reference(micro)
            assert reference is not None
            apart = turn_divergences(micro.behaviour_log_probs, reference, micro.turn_ids, len(micro.turn_rewards))
            return micro.members, apart.cpu().split([len(trajectories[i].turns) for i in micro.members])

        for members, parts in budget.run(trajectories, divergences):
            for place, part in zip(members, parts, strict=True):
                found[place] -= algorithm.reward_kl_coef * part.numpy()
    return found
