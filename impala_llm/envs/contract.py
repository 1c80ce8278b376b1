"""Calls an environment and holds what it returns against the protocol in base.py.

Invariant: what comes through here is what base.py promises; whatever else happens is an `EnvironmentFault`.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from impala_llm.envs.base import AsyncSession, Session, Split, Suite

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_REWARD = 1e6
"""Beyond it a single reward decides every mean, and float32 has no digits left for the others."""
_MOST_TASKS = 10_000_000
"""They are listed: more take gigabytes."""
_PARTS = ("name", "system_prompt", "tasks", "session", "signature")
"""Of a suite, see base.py."""
_closing: set[asyncio.Future[Any]] = set()
"""Calls of `close` that are under way: what nobody holds may be dropped."""


class EnvironmentFault(ValueError):
    """An environment raised, or returned what it must not. The message names the call, the value, what is expected."""


def check_parts(suite: Suite, name: str) -> None:
    """Raise EnvironmentFault where a suite lacks a part: an actor would fail its episodes one after the other.

    Args:
        name: of the environment, `env.name`.
    """
    if missing := [part for part in _PARTS if not hasattr(suite, part)]:
        raise EnvironmentFault(
            f"env.name={name}: its suite has no {' and no '.join(missing)}: add what is missing "
            "(docs/environments.md, or `impala-llm new-env NAME` for one that is whole)"
        )


def tasks(suite: Suite, split: Split) -> Sequence[int]:
    """The task ids of a split: at least one."""
    what = f"env {suite.name}: tasks({split!r})"
    given = _call(what, lambda: suite.tasks(split))
    if isinstance(given, Sequence) and _call(what, lambda: len(given)) > _MOST_TASKS:
        raise EnvironmentFault(f"{what} returned {_shown(given)}: at most {_MOST_TASKS} tasks are expected")
    found: list[int] = _call(what, lambda: list(given))
    if not found:
        raise EnvironmentFault(
            f"{what} returned {_shown(given)}: at least one task is expected; give the split one, or choose another "
            "(evaluation.split)"
        )
    if not all(isinstance(task, int | np.integer) for task in found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: a sequence of task ids (int) is expected")
    if min(found) < 0 or max(found) >= 2**63:
        raise EnvironmentFault(f"{what} returned {_shown(found)}: task ids from 0 to 2^63 - 1 are expected")
    if len(set(found)) < len(found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: each task id once is expected")
    return found


def kinds(suite: Suite, tasks: Sequence[int]) -> dict[int, str]:
    """The signature of each task."""
    what = f"env {suite.name}: signature"
    found = _call(what, lambda: {task: suite.signature(task) for task in tasks})
    if wrong := [kind for kind in found.values() if not isinstance(kind, str)]:
        raise EnvironmentFault(f"{what} returned {_shown(wrong[0])}: a str is expected")
    return found


async def reset(session: Session | AsyncSession, task_id: int, env: str) -> str:
    """The first observation of a task. env: name for messages."""
    result = await _call_session(f"env {env}: reset({task_id})", lambda: session.reset(task_id))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
        raise EnvironmentFault(
            f"env {env}: reset({task_id}) returned {_shown(result)}: (observation str, info) expected"
        )
    return result[0]


async def step(session: Session | AsyncSession, action: str, env: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """An action: (observation, reward, terminated, truncated, info). At an end `info` has `score` and `success`."""
    result = await _call_session(f"env {env}: step", lambda: session.step(action))
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentFault(
            f"env {env}: step returned {_shown(result)}: (observation, reward, terminated, truncated, info) is expected"
        )
    observation, reward, terminated, truncated, info = result
    problems = []
    if not isinstance(observation, str):
        problems.append(f"observation is {_shown(observation)}: a str is expected")
    if not _is_number(reward):
        problems.append(f"reward is {_shown(reward)}: a finite number is expected")
    elif abs(float(reward)) > _LARGEST_REWARD:
        problems.append(f"reward is {_shown(reward)}: at most {_LARGEST_REWARD:g} either way is expected; divide it")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not _is_bool(flag):
            problems.append(f"{name} is {_shown(flag)}: a bool is expected")
    if not isinstance(info, dict):
        problems.append(f"info is {_shown(info)}: a dict is expected")
    elif _is_bool(terminated) and _is_bool(truncated) and (terminated or truncated):
        score: Any = info.get("score")
        stats = info.get("stats", {})
        if not (_is_number(score) and 0.0 <= score <= 1.0):
            problems.append(f"info['score'] is {_shown(score)} at the end: a number in [0, 1] is expected")
        if not _is_bool(info.get("success")):
            problems.append(f"info['success'] is {_shown(info.get('success'))} at the end: a bool is expected")
        if not (isinstance(stats, dict) and all(map(_is_number, stats.values())) and all(map(_is_name, stats))):
            problems.append(f"info['stats'] is {_shown(stats)}: a dict from names to finite numbers is expected")
    if problems:
        raise EnvironmentFault(f"env {env}: step: " + "; ".join(problems))
    return observation, float(reward), bool(terminated), bool(truncated), info


def close(session: Session | AsyncSession) -> None:
    """Call a session's method `close`, where it has one. What it raises is of no interest: the episode is over.

    Where it is a coroutine function it goes on in the event loop, and nobody waits for it.
    """
    if (method := getattr(session, "close", None)) is not None:
        with contextlib.suppress(Exception):
            if inspect.isawaitable(found := method()):
                task = asyncio.ensure_future(_suppressed(found))
                _closing.add(task)
                task.add_done_callback(_closing.discard)


async def _suppressed(call: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception):
        await call


def _call(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}") from error


async def _call_session(what: str, function: Callable[[], Any]) -> Any:
    """Call a method that may be a coroutine function."""
    try:
        result = function()
        return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the episode is given up
        raise EnvironmentFault(f"{what} raised CancelledError: what it waited for was cancelled") from error
    except (Exception, SystemExit) as error:  # a library may call sys.exit()
        raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}") from error


def _is_number(value: object) -> bool:
    # Numbers of numpy count as well; of bool, which is one, nobody means a reward but as 0 or 1. They become float32.
    magnitude: Any = abs(value) if isinstance(value, Real) else None
    return magnitude is not None and bool(magnitude <= _LARGEST)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_ | Real) and value in (True, False)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
