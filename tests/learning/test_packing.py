"""Packing: whole trajectories, a bounded number of tokens, and indices that point where the definitions say."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.scoring import action_log_probs
from impala_llm.trajectory import ARRAY_FIELDS, CONTEXT_START, METADATA_FIELDS, Trajectory
from tests.learning.builders import make_batch, make_trajectory, save_lm


def test_every_trajectory_is_whole_in_exactly_one_batch_within_the_budget() -> None:
    trajectories = make_batch()
    batches = pack(trajectories, token_budget=50)
    assert sorted(member for batch in batches for member in batch.members) == list(range(6))
    assert len(batches) == 3  # 119 tokens do not fit into two rows of 50
    for batch in batches:
        assert len(batch.tokens) == sum(batch.lengths.tolist()) <= 50
        rows = batch.tokens.split(batch.lengths.tolist())
        for member, row in zip(batch.members, rows, strict=True):
            assert row.tolist() == trajectories[member].tokens.tolist()


def test_the_same_trajectories_give_the_same_batches() -> None:
    first, second = pack(make_batch(), 50), pack(make_batch(), 50)
    assert [batch.members for batch in first] == [batch.members for batch in second]


def test_indices_agree_with_a_walk_over_the_trajectories() -> None:
    trajectories = make_batch()
    (batch,) = pack(trajectories, token_budget=1000)
    actions, segments, turn_of, turn_segments, turn_rewards, before_turn, last = [], [], [], [], [], [], []
    log_probs, positions = [], []
    offset = 0
    for row, member in enumerate(batch.members):
        trajectory = trajectories[member]
        positions += range(trajectory.num_tokens)
        for start, end in trajectory.turns.tolist():
            for index in range(start, end):
                actions.append(offset + index)
                segments.append(row)
                turn_of.append(len(turn_segments))
                log_probs.append(float(trajectory.behaviour_log_probs[index]))
            turn_segments.append(row)
            turn_rewards.append(float(trajectory.rewards[start:end].sum()))
            before_turn.append(offset + start - 1)
        offset += trajectory.num_tokens
        last.append(offset - 1)
    assert batch.position_ids.tolist() == positions
    assert batch.action_positions.tolist() == actions
    assert batch.behaviour_log_probs.tolist() == log_probs
    assert batch.versions.tolist() == [3] * len(actions)
    assert batch.segment_ids.tolist() == segments
    assert batch.turn_ids.tolist() == turn_of
    assert batch.turn_segment_ids.tolist() == turn_segments
    assert batch.turn_rewards.tolist() == turn_rewards
    assert batch.turn_value_positions.tolist() == before_turn
    assert batch.last_positions.tolist() == last
    assert batch.bootstrap.tolist() == [trajectories[member].bootstrap for member in batch.members]


def test_turns_side_by_side_keep_their_own_rewards() -> None:
    (batch,) = pack([make_trajectory(6, [(1, 3), (3, 6)])], token_budget=6)
    assert batch.turn_rewards.tolist() == [1.0, 2.0]
    assert batch.turn_ids.tolist() == [0, 0, 1, 1, 1]
    assert batch.turn_value_positions.tolist() == [0, 2]


def test_dtypes() -> None:
    (batch,) = pack(make_batch(), token_budget=1000)
    assert batch.behaviour_log_probs.dtype == batch.turn_rewards.dtype == torch.float32
    assert batch.bootstrap.dtype == torch.bool
    for name in ("tokens", "position_ids", "action_positions", "versions", "turn_ids", "last_positions"):
        assert getattr(batch, name).dtype == torch.int64, name


def test_a_trajectory_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    found = [[make_batch()[i].num_tokens for i in micro.members] for micro in pack(make_batch(), token_budget=32)]
    assert found == [[40], [33], [20, 12], [9, 5]]


def test_an_action_at_index_0_cannot_reach_packing() -> None:
    trajectory = make_trajectory(4, [(1, 4)])
    with pytest.raises(ValueError, match="action_mask is True at index 0"):
        type(trajectory)(
            **{name: getattr(trajectory, name) for name in (*ARRAY_FIELDS, *METADATA_FIELDS)}
            | {"action_mask": np.ones(4, bool), "turns": np.array([[0, 4]], np.int32)}
        )


def with_contexts(trajectory: Trajectory, *starts: int) -> Trajectory:
    """The trajectory with a further context from each of these indices on."""
    versions = trajectory.versions.copy()
    versions[list(starts)] = CONTEXT_START
    return dataclasses.replace(trajectory, versions=versions)


def test_contexts_of_an_episode_are_one_row_for_the_credit_and_see_nothing_of_each_other(tmp_path: Path) -> None:
    episode = with_contexts(make_trajectory(20, [(2, 5), (7, 9), (13, 18)]), 5, 10)
    other = make_trajectory(9, [(4, 9)], seed=1)
    (batch,) = pack([episode, other], token_budget=1000)
    assert batch.lengths.tolist() == [20, 9] and batch.context_lengths.tolist() == [5, 5, 10, 9]
    assert batch.position_ids.tolist() == [*range(5), *range(5), *range(10), *range(9)]
    assert batch.turn_segment_ids.tolist() == [0, 0, 0, 1] and batch.turn_value_positions.tolist() == [1, 6, 12, 23]
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "model"))
    alone = []
    for first, last, turn in [(0, 5, (2, 5)), (5, 10, (2, 4)), (10, 20, (3, 8))]:
        row = dataclasses.replace(make_trajectory(last - first, [turn]), tokens=episode.tokens[first:last].copy())
        alone += action_log_probs(model, pack([row], 100)[0], 1.0).tolist()
    assert action_log_probs(model, batch, 1.0).tolist()[:10] == pytest.approx(alone, abs=1e-5)


def test_a_context_begins_with_what_nobody_sampled() -> None:
    with pytest.raises(ValueError, match="versions is -2 on an action token"):
        with_contexts(make_trajectory(9, [(4, 9)]), 4)
