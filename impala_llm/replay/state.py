"""Trajectories as plain dictionaries of arrays, numbers and strings, for `state_dict`. No pickle."""

from typing import Any

from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory

State = dict[str, Any]
"""A tree of dicts and lists whose leaves are numpy arrays, ints, floats, bools and strings."""


def trajectory_to_state(trajectory: Trajectory) -> State:
    return {name: getattr(trajectory, name) for name in (*ARRAY_FIELDS, *METADATA_FIELDS)}


def trajectory_from_state(state: State) -> Trajectory:
    """The inverse of `trajectory_to_state`; validates like every construction."""
    return Trajectory(**state)
