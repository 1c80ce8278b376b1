"""Builders for the tests of the pipeline."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import numpy as np

from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory

VOCAB_SIZE = 1000
_episodes = itertools.count()


def make_trajectory(
    ticket: Ticket | None = None,
    *,
    seed: int = 0,
    num_tokens: int = 40,
    version: int = 0,
    episode_id: str | None = None,
    unroll_index: int = 0,
    continues: bool = False,
    actor_id: str = "actor-0",
) -> Trajectory:
    """Random but valid, two turns; the same seed gives the same arrays."""
    rng = np.random.default_rng(seed)
    turns = np.array([[2, 2 + num_tokens // 4], [num_tokens // 2, num_tokens]], np.int32)
    mask = np.zeros(num_tokens, np.bool_)
    for start, end in turns:
        mask[start:end] = True
    rewards = np.zeros(num_tokens, np.float32)
    rewards[-1] = rng.random()
    return Trajectory(
        tokens=rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
        action_mask=mask,
        behaviour_log_probs=np.where(mask, -rng.random(num_tokens), 0.0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        rewards=rewards,
        turns=turns,
        bootstrap=bool(rng.integers(2)) or continues,
        continues=continues,
        episode_id=episode_id or f"episode-{next(_episodes)}",
        unroll_index=unroll_index,
        group_id=ticket.group_id if ticket else 0,
        task_id=ticket.task_id if ticket else 0,
        env="toy",
        actor_id=actor_id,
        ticket_id=ticket.ticket_id if ticket else 0,
        signature="red shoes",
        score=0.5,
        success=False,
        stats={"steps": 2.0},
    )


def contents(trajectory: Trajectory) -> dict[str, object]:
    """Everything in a trajectory, comparable with ==."""
    arrays = {name: getattr(trajectory, name) for name in ARRAY_FIELDS}
    return {
        **{name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()},
        **{name: getattr(trajectory, name) for name in METADATA_FIELDS},
    }


def turns_until(condition: Callable[[], bool], *actors: ActorChannel, timeout_s: float = 60.0) -> list[object]:
    """Poll the actors in turn until the condition holds. Returns their events; fails after `timeout_s` seconds."""
    events: list[object] = []
    for _ in _until(timeout_s):
        for actor in actors:
            events += actor.poll(0.01)
        if condition():
            return events
    raise AssertionError(f"the condition did not hold within {timeout_s} s; events: {events}")


def _until(timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield


@contextlib.contextmanager
def at_each_line_of(module: ModuleType, moment: Callable[[], None]) -> Iterator[None]:
    """Call a function before each line of a module that runs in this thread: a process may be killed there."""

    def trace(frame: FrameType, event: str, argument: object) -> object:
        if frame.f_code.co_filename != module.__file__:
            return None
        moment()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def steps_of(work: Callable[[], object]) -> int:
    """Bytecodes that our own code takes for it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count
