"""A trajectory that exists is valid; each malformed field is refused by name."""

import copy
import dataclasses
from collections import Counter

import numpy as np
import pytest

from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, DeferredTrajectory, Trajectory, TrajectoryError


def fields(**changes) -> dict:
    """Two turns: tokens 2..3 and 5..6 of seven are actions."""
    mask = np.array([0, 0, 1, 1, 0, 1, 1], np.bool_)
    values = {
        "tokens": np.arange(7, dtype=np.int32),
        "action_mask": mask,
        "behaviour_log_probs": np.where(mask, -0.5, 0.0).astype(np.float32),
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
        ({"tokens": np.arange(8, dtype=np.int32)}, "behaviour_log_probs has length 7, tokens has 8"),
        ({"tokens": np.zeros(0, np.int32)}, "tokens is empty"),
        ({"tokens": replaced("tokens", 1, -1)}, "tokens holds the negative id -1"),
        ({"action_mask": np.zeros(7, np.bool_)}, "action_mask is False everywhere"),
        ({"action_mask": replaced("action_mask", 0, True)}, "action_mask is True at index 0"),
        ({"action_mask": replaced("action_mask", 2, False)}, "turns must cover exactly"),
        ({"turns": np.array([[2, 4]], np.int32)}, "turns must cover exactly"),
        ({"turns": np.array([[5, 7], [2, 4]], np.int32)}, "turns must be non-empty, ordered and disjoint"),
        ({"turns": np.array([[2, 4], [5, 9]], np.int32)}, "turns reaches outside"),
        ({"turns": np.array([2, 4], np.int32)}, "turns has 1 dimensions"),
        ({"turns": np.array([[2, 3, 4]], np.int32)}, "turns has shape"),
        ({"versions": replaced("versions", 0, 0)}, "versions must be -1"),
        ({"versions": replaced("versions", 2, -1)}, "versions is -1 on an action token"),
        ({"behaviour_log_probs": replaced("behaviour_log_probs", 2, np.nan)}, "behaviour_log_probs holds a value"),
        ({"behaviour_log_probs": replaced("behaviour_log_probs", 2, 0.3)}, "behaviour_log_probs reaches"),
        ({"behaviour_log_probs": replaced("behaviour_log_probs", 0, -1)}, "behaviour_log_probs must be 0"),
        ({"rewards": replaced("rewards", 6, np.inf)}, "rewards holds a value"),
        ({"rewards": replaced("rewards", 0, 1)}, "rewards must be 0 wherever"),
        ({"score": 1.5}, "score is 1.5"),
        ({"score": float("nan")}, "score is nan"),
        ({"episode_id": ""}, "episode_id is empty"),
        ({"task_id": "2"}, "task_id is '2'"),
        ({"success": 1}, "success is 1"),
        ({"ticket_id": True}, "ticket_id is True"),
        ({"ticket_id": -1}, "ticket_id is -1: tickets count from 0"),
        ({"ticket_id": 2**63}, f"ticket_id is {2**63}: a record has 64 bits"),
        ({"group_id": -(2**63) - 1}, f"group_id is {-(2**63) - 1}: a record has 64 bits"),
        ({"unroll_index": -1}, "unroll_index is -1"),
        ({"unroll_index": 2**15}, "unroll_index is 32768"),
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


# --- where the arrays lie


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("num_tokens", range(3, 20))
def test_arrays_lie_end_to_end_in_one_block(num_tokens):
    mask = np.arange(num_tokens) > 1
    trajectory = Trajectory(
        **fields(
            tokens=np.arange(num_tokens, dtype=np.int32)[::-1],  # from any memory
            action_mask=mask,
            behaviour_log_probs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=np.where(mask, 3, -1).astype(np.int32),
            rewards=np.zeros(num_tokens, np.float32),
            turns=np.array([[2, num_tokens]], np.int32),
        )
    )
    assert trajectory.tokens.tolist() == list(range(num_tokens))[::-1]
    assert list(ARRAY_FIELDS) == ["tokens", "behaviour_log_probs", "versions", "rewards", "turns", "action_mask"]
    arrays = [getattr(trajectory, name) for name in ARRAY_FIELDS]
    content = b"".join(array.tobytes() for array in arrays)
    assert trajectory.block.dtype == np.uint64
    assert trajectory.block.tobytes() == content + bytes(-len(content) % 8)
    start = address(trajectory.block)
    assert start % 8 == 0
    for array in arrays:
        assert address(array) == start
        start += array.nbytes


def test_a_trajectory_keeps_nothing_of_the_arrays_it_was_made_from():
    values = fields()
    trajectory = Trajectory(**values)
    values["tokens"][:] = 99
    values["action_mask"][:] = False
    assert trajectory.tokens.tolist() == list(range(7)) and trajectory.num_action_tokens == 4


def test_metadata_can_be_replaced_without_a_copy_and_arrays_with_one():
    trajectory = Trajectory(**fields())
    renamed = dataclasses.replace(trajectory, episode_id="other", group_id=9)
    assert renamed.block is trajectory.block and renamed.tokens is trajectory.tokens
    assert (renamed.episode_id, renamed.group_id, renamed.task_id) == ("other", 9, 2)
    rewarded = dataclasses.replace(trajectory, rewards=replaced("rewards", 6, 2.0))
    assert rewarded.block is not trajectory.block
    assert (rewarded.rewards[6], trajectory.rewards[6]) == (2.0, 1.0)
    assert rewarded.tokens.tolist() == trajectory.tokens.tolist()
    # The block of one with other arrays, or of another order, is not shared.
    swapped = dataclasses.replace(trajectory, rewards=trajectory.behaviour_log_probs * 0)
    assert swapped.block is not trajectory.block and not swapped.rewards.any()


def test_parts_of_a_block_are_no_block():
    longer = Trajectory(**fields())
    cut = {"tokens", "action_mask", "behaviour_log_probs", "versions", "rewards"}
    shorter = dataclasses.replace(longer, turns=longer.turns[:1], **{name: getattr(longer, name)[:4] for name in cut})
    assert shorter.tokens.tolist() == [0, 1, 2, 3]
    content = b"".join(getattr(shorter, name).tobytes() for name in ARRAY_FIELDS)
    assert shorter.block.tobytes() == content + bytes(-len(content) % 8)


# --- deferred ones


def deferred(counts: Counter, **changes) -> Trajectory:
    whole = Trajectory(**fields(**changes))

    def load(name: str) -> object:
        counts[name] += 1
        return getattr(whole, name)

    return DeferredTrajectory.of(load, 3)


def test_a_deferred_trajectory_loads_each_field_once_and_only_when_asked_for():
    counts: Counter = Counter()
    trajectory = deferred(counts)
    assert not counts
    assert trajectory.episode_id == "e" and trajectory.episode_id == "e"
    assert counts == {"episode_id": 1}
    for _ in range(2):
        for name in (*ARRAY_FIELDS, *METADATA_FIELDS, "block"):
            getattr(trajectory, name)
    loaded = {*ARRAY_FIELDS, *METADATA_FIELDS, "block"} - {"ticket_id"}  # which is given
    assert counts == dict.fromkeys(loaded, 1) and trajectory.ticket_id == 3
    assert (trajectory.num_tokens, trajectory.num_action_tokens, trajectory.newest_version) == (7, 4, 4)


def test_a_deferred_trajectory_has_no_other_attributes():
    counts: Counter = Counter()
    trajectory = deferred(counts)
    for name in ("reward", "__array__", "__len__", "_private", "task_ids"):
        with pytest.raises(AttributeError, match=name):
            getattr(trajectory, name)
        assert not hasattr(trajectory, name)
    assert not counts
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.episode_id = "f"


def test_a_field_that_cannot_be_loaded_is_an_error_and_is_tried_again():
    answers: list[object] = [RuntimeError("not now"), "e"]

    def load(name: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trajectory = DeferredTrajectory.of(load, 3)
    with pytest.raises(RuntimeError, match="not now"):
        _ = trajectory.env
    assert trajectory.env == "e"


def test_a_deferred_trajectory_can_be_replaced_and_is_checked_then():
    replaced_one = dataclasses.replace(deferred(Counter()), episode_id="other")
    whole = Trajectory(**fields(episode_id="other"))
    assert [getattr(replaced_one, name) for name in METADATA_FIELDS] == [getattr(whole, n) for n in METADATA_FIELDS]
    assert replaced_one.block.tobytes() == whole.block.tobytes()
    with pytest.raises(TrajectoryError, match="score is 2"):
        dataclasses.replace(deferred(Counter()), score=2.0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_trajectory_can_be_copied(duplicate):
    for trajectory in (Trajectory(**fields()), deferred(Counter())):
        same = duplicate(trajectory)
        assert same.episode_id == "e" and same.block.tobytes() == trajectory.block.tobytes()
