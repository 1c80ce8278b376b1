"""Packing of trajectories into micro-batches: rows end to end without padding, and the places of their actions.

Invariant: a trajectory is never cut, and every token of every trajectory is in exactly one micro-batch. The same
trajectories in the same order give the same micro-batches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.interface import PackedBatch
from impala_llm.trajectory import Trajectory

__all__ = ["PackedBatch", "pack"]


def pack(trajectories: Sequence[Trajectory], token_budget: int) -> list[PackedBatch]:
    """Cut trajectories into micro-batches of at most `token_budget` tokens, long ones first (first-fit decreasing).

    A trajectory that is longer than the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(trajectories)), key=lambda i: (-trajectories[i].num_tokens, i))
    bins: list[tuple[list[int], int]] = []
    for i in order:
        size = trajectories[i].num_tokens
        for place, (members, used) in enumerate(bins):
            if used + size <= token_budget:
                members.append(i)
                bins[place] = members, used + size
                break
        else:
            bins.append(([i], size))
    return [_pack_rows(trajectories, members) for members, _ in bins]


def _pack_rows(trajectories: Sequence[Trajectory], members: list[int]) -> PackedBatch:
    rows = [trajectories[i] for i in members]
    lengths = np.array([row.num_tokens for row in rows])
    starts = np.cumsum(lengths) - lengths
    context_lengths = np.concatenate([row.context_lengths for row in rows])
    masks = np.concatenate([row.action_mask for row in rows])
    positions = np.flatnonzero(masks)
    turns = np.concatenate([row.turns + start for row, start in zip(rows, starts, strict=True)]).astype(np.int64)
    rewards = np.concatenate([row.rewards for row in rows])
    # sums over spans as differences of a running sum would round: reduceat adds each span by itself
    turn_rewards = np.add.reduceat(np.append(rewards, 0.0), turns.reshape(-1))[::2] if len(turns) else np.zeros(0)

    def flat(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name) for row in rows])[positions]

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)

    return PackedBatch(
        members=tuple(members),
        tokens=tensor(np.concatenate([row.tokens for row in rows])),
        position_ids=tensor(np.concatenate([np.arange(n) for n in context_lengths])),
        lengths=tensor(lengths),
        context_lengths=tensor(context_lengths),
        action_positions=tensor(positions),
        behaviour_log_probs=tensor(flat("behaviour_logprobs"), torch.float32),
        versions=tensor(flat("versions")),
        segment_ids=tensor(np.repeat(np.arange(len(rows)), [row.num_action_tokens for row in rows])),
        turn_ids=tensor(np.repeat(np.arange(len(turns)), turns[:, 1] - turns[:, 0])),
        turn_segment_ids=tensor(np.repeat(np.arange(len(rows)), [len(row.turns) for row in rows])),
        turn_rewards=tensor(turn_rewards, torch.float32),
        turn_value_positions=tensor(turns[:, 0] - 1),
        last_positions=tensor(starts + lengths - 1),
        bootstrap=tensor(np.array([row.bootstrap for row in rows]), torch.bool),
    )
