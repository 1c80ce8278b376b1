"""A trajectory that exists is valid; each malformed field is refused by name."""

import dataclasses

import numpy as np
import pytest

from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory, TrajectoryError


def fields(**changes) -> dict:
    """Two turns: tokens 2..3 and 5..6 of seven are actions."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.bool_)
    values = {
        "tokens": np.arange(7, dtype=np.int32),
        "action_mask": mask,
        "behaviour_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "versions": np.where(mask, [0, 0, 3, 3, 0, 3, 4], -1).astype(np.int32),
        "rewards": np.array([0, 0, 0, 0, 0, 0, 1], np.float32),
        "turns": np.array([[2, 4], [5, 7]], np.int32),
        "bootstrap": False,
        "episode_id": "e",
        "group_id": 1,
        "task_id": 2,
        "env": "toy",
        "actor_id": "a",
        "ticket_id": 3,
        "score": 1.0,
        "success": True,
    }
    return values | changes


def replaced(name: str, index: object, value: object) -> np.ndarray:
    array = fields()[name].copy()
    array[index] = value
    return array


def test_valid_trajectory_answers_about_itself():
    trajectory = Trajectory(**fields())
    assert (trajectory.num_tokens, trajectory.num_action_tokens) == (7, 4)
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 4)
    assert trajectory.nbytes == 7 * (4 + 1 + 4 + 4 + 4) + 2 * 2 * 4


def test_every_field_is_an_array_or_metadata():
    names = {f.name for f in dataclasses.fields(Trajectory) if f.init}
    assert names == {*ARRAY_FIELDS, *METADATA_FIELDS}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tokens": np.arange(7)}, "tokens has dtype int64"),
        ({"tokens": [1, 2]}, "tokens is a list"),
        ({"tokens": np.arange(8, dtype=np.int32)}, "action_mask has length 7"),
        ({"tokens": np.zeros(0, np.int32)}, "tokens is empty"),
        ({"tokens": replaced("tokens", 1, -1)}, "tokens holds the negative id -1"),
        ({"action_mask": np.zeros(7, np.bool_)}, "action_mask is False everywhere"),
        ({"action_mask": replaced("action_mask", 0, True)}, "action_mask is True at place 0"),
        ({"action_mask": replaced("action_mask", 2, False)}, "turns must cover exactly"),
        ({"turns": np.array([[2, 4]], np.int32)}, "turns must cover exactly"),
        ({"turns": np.array([[5, 7], [2, 4]], np.int32)}, "turns must be non-empty, ordered and disjoint"),
        ({"turns": np.array([[2, 4], [5, 9]], np.int32)}, "turns reaches outside"),
        ({"turns": np.array([2, 4], np.int32)}, "turns has 1 dimensions"),
        ({"turns": np.array([[2, 3, 4]], np.int32)}, "turns has shape"),
        ({"versions": replaced("versions", 0, 0)}, "versions must be -1"),
        ({"versions": replaced("versions", 2, -1)}, "versions is -1 on an action token"),
        ({"behaviour_logprobs": replaced("behaviour_logprobs", 2, np.nan)}, "behaviour_logprobs holds a value"),
        ({"behaviour_logprobs": replaced("behaviour_logprobs", 2, 0.3)}, "behaviour_logprobs reaches"),
        ({"behaviour_logprobs": replaced("behaviour_logprobs", 0, -1)}, "behaviour_logprobs must be 0"),
        ({"rewards": replaced("rewards", 6, np.inf)}, "rewards holds a value"),
        ({"rewards": replaced("rewards", 0, 1)}, "rewards must be 0 wherever"),
        ({"score": 1.5}, "score is 1.5"),
        ({"score": float("nan")}, "score is nan"),
        ({"episode_id": ""}, "episode_id is empty"),
        ({"task_id": "2"}, "task_id is '2'"),
        ({"success": 1}, "success is 1"),
        ({"ticket_id": True}, "ticket_id is True"),
        ({"unroll_index": -1}, "unroll_index is -1"),
        ({"stats": {"a": "b"}}, "stats\\['a'\\]"),
    ],
)
def test_malformed_field_is_named(changes, names):
    with pytest.raises(TrajectoryError, match=names):
        Trajectory(**fields(**changes))


def test_vocabulary_is_checked_at_the_door():
    trajectory = Trajectory(**fields())
    trajectory.validate_vocabulary(7)
    with pytest.raises(TrajectoryError, match="id 6: the vocabulary has 6 entries"):
        trajectory.validate_vocabulary(6)
