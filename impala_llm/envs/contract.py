"""Calls an environment and holds what it returns against the protocol in base.py.

Invariant: all values that are returned from here obey base.py; anything else raises an `EnvironmentFault`.
"""

import asyncio
import contextlib
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from numbers import Real
from typing import Any

import numpy as np

from impala_llm.envs.base import AsyncSession, Script, Session, Split, Suite
from impala_llm.part_signatures import missing_methods
from impala_llm.plugs import raised_at
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.processes.stop_signals import ToldToStop

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_REWARD = 1e6
"""Beyond it a single reward decides every mean, and float32 has no digits left for the others."""
_MOST_TASKS = 10_000_000
"""Most tasks of a split: their ids are kept in a list, and more would take gigabytes."""
_warnings = RateLimitedWarnings(math.inf, on_terminal=True)
_closing: set[asyncio.Future[Any]] = set()
"""Calls of `close` that are under way: asyncio itself keeps only weak references to its tasks."""


_NOT_ITS_OWN = (KeyboardInterrupt, ToldToStop, GeneratorExit)
"""Errors that come through an environment from outside, beside a cancellation: a signal, and the end of a coroutine.
All others are its own, those that derive from BaseException alone included, such as SystemExit and the panics of
libraries in Rust."""


class EnvironmentFault(ValueError):
    """An environment raised, or returned what it must not. The message names the call, the value, what is expected."""


def is_cancelled() -> bool:
    """Return whether the task that runs is being cancelled. Where it is not, a CancelledError is of other people's
    code: what that waited for was cancelled."""
    with contextlib.suppress(RuntimeError):  # there is no event loop
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return False


def _is_from_outside(error: BaseException) -> bool:
    return isinstance(error, _NOT_ITS_OWN) or (isinstance(error, asyncio.CancelledError) and is_cancelled())


def tasks(suite: Suite, split: Split, asked_by: str = "evaluation.split") -> Sequence[int]:
    """The task ids of a split: at least one.

    Args:
        asked_by: key of the setting that names the split, for messages.

    Raises:
        EnvironmentFault: it has none, or they are not what base.py asks for.
    """
    what = f"env {suite.name}: tasks({split!r})"
    given = call(what, lambda: suite.tasks(split))
    if isinstance(given, Sequence) and call(what, lambda: len(given)) > _MOST_TASKS:
        raise EnvironmentFault(f"{what} returned {_shown(given)}: at most {_MOST_TASKS} tasks are expected")
    found: list[int] = call(what, lambda: list(given))
    if not found:
        other = f", or choose another ({asked_by})" if split != "train" or asked_by != "evaluation.split" else ""
        more = "raise env.webshop.num_products" if suite.name == "webshop" else "give it one"
        raise EnvironmentFault(f"{what} returned {_shown(given)}: at least one task is expected; {more}{other}")
    if not all(isinstance(task, int | np.integer) for task in found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: a sequence of task ids (int) is expected")
    if min(found) < 0 or max(found) >= 2**63:
        raise EnvironmentFault(f"{what} returned {_shown(found)}: task ids from 0 to 2^63 - 1 are expected")
    if len(set(found)) < len(found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: each task id once is expected")
    return [int(task) for task in found]  # those of numpy have no JSON, and are no int to a trajectory


def shared_tasks(suite: Suite, split: Split) -> str:
    """Return a sentence if a split shares tasks with training, so that its scores are not of unseen tasks; else ""."""
    if split == "train":
        return ""
    shared = set(tasks(suite, split))
    try:
        shared &= set(tasks(suite, "train"))
    except EnvironmentFault:  # it is not played here, and what is not there shares nothing
        return ""
    if not shared:
        return ""
    return (
        f"env {suite.name} has {len(shared)} tasks of the split {split!r} in 'train' too, such as {min(shared)}: "
        "scores on them say nothing of unseen tasks; give each split its own"
    )


def warn_of_shared_tasks(suite: Suite, split: Split) -> None:
    """Log `shared_tasks`, where there are any."""
    if said := shared_tasks(suite, split):
        _warnings.log("SPLITS SHARE TASKS", said)


def kinds(suite: Suite, tasks: Sequence[int]) -> dict[int, str]:
    """The signature of each task."""
    return {task: signature(suite, task) for task in tasks}


def signature(suite: Suite, task_id: int) -> str:
    """The signature of a task."""
    what = f"env {suite.name}: signature({task_id})"
    found: str = call(what, lambda: suite.signature(task_id))
    if problem := text_problem(found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: {problem}")
    return found


def session(suite: Suite, training: bool) -> Session | AsyncSession:
    """A fresh session."""
    what = f"env {suite.name}: session"
    found: Session | AsyncSession = call(what, lambda: suite.session(training))
    if missing := missing_methods(found, Session):
        raise EnvironmentFault(
            f"{what} returned {_shown(found)}, which has no method {' and no '.join(missing)}: see docs/environments.md"
        )
    return found


def check_suite(suite: Any, name: str) -> None:
    """Raise EnvironmentFault unless it has what a suite must. name: of the environment, for messages."""
    for part in ("name", "system_prompt"):
        if problem := text_problem(found := getattr(suite, part, None)):
            raise EnvironmentFault(f"env.name={name}: {part} of its suite is {_shown(found)}: {problem}")
    if missing := missing_methods(suite, Suite):
        raise EnvironmentFault(
            f"env.name={name}: its suite, a {type(suite).__name__}, has no method {' and no '.join(missing)}: add what "
            "is missing (docs/environments.md, or `impala-llm new-env NAME` for one that is whole)"
        )


async def reset(session: Session | AsyncSession, task_id: int, env: str) -> str:
    """The first observation of a task. env: name for messages."""
    return (await begin(session, task_id, env))[0]


async def begin(session: Session | AsyncSession, task_id: int, env: str) -> tuple[str, Any]:
    """The first observation of a task, and the info that came with it. env: name for messages."""
    result = await _call_session(f"env {env}: reset({task_id})", lambda: session.reset(task_id))
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
        raise EnvironmentFault(
            f"env {env}: reset({task_id}) returned {_shown(result)}: (observation str, info) expected"
        )
    if problem := text_problem(result[0]):
        raise EnvironmentFault(f"env {env}: reset({task_id}): observation is {_shown(result[0])}: {problem}")
    return result


def act(script: Script, observation: str, info: Any, env: str) -> str:
    """The action of a script."""
    what = f"env {env}: act of its script"
    found: str = call(what, lambda: script.act(observation, info))
    if problem := text_problem(found):
        raise EnvironmentFault(f"{what} returned {_shown(found)}: {problem}")
    return found


async def step(session: Session | AsyncSession, action: str, env: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """An action: (observation, reward, terminated, truncated, info). At an end `info` has `score` and `success`."""
    result = await _call_session(f"env {env}: step", lambda: session.step(action))
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvironmentFault(
            f"env {env}: step returned {_shown(result)}: (observation, reward, terminated, truncated, info) is expected"
        )
    observation, reward, terminated, truncated, info = result
    problems = []
    if problem := text_problem(observation):
        problems.append(f"observation is {_shown(observation)}: {problem}")
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


class Timed:
    """A session none of whose calls may wait for longer than a time: one that hangs would be waited for for ever.

    Raises:
        TimeoutError: from its calls.
    """

    def __init__(self, session: Session | AsyncSession, timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s

    async def reset(self, task_id: int) -> Any:
        return await self._awaited(self._session.reset(task_id))

    async def step(self, action: str) -> Any:
        return await self._awaited(self._session.step(action))

    def close(self) -> None:
        close(self._session)

    async def _awaited(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await result
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"not done in actor.episode_timeout_s={self._timeout_s:g}") from None
            raise


def close(session: Session | AsyncSession) -> None:
    """Call a session's method `close`, if it has one. Its errors are ignored: the episode is over.

    A coroutine function continues in the event loop; see `closed`.
    """
    if (method := getattr(session, "close", None)) is not None:
        with _suppressed():
            if inspect.isawaitable(found := method()):
                task = asyncio.ensure_future(_awaited(found))
                _closing.add(task)
                task.add_done_callback(_closing.discard)


async def closed(timeout_s: float = 2.0) -> None:
    """Wait for the calls of `close` that are under way in this event loop, which would otherwise end during them."""
    loop = asyncio.get_running_loop()
    if waited_for := [task for task in _closing if task.get_loop() is loop]:
        await asyncio.wait(waited_for, timeout=timeout_s)


async def end_episodes(episodes: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the episodes that still play, and wait until all have ended and their sessions are closed."""
    episodes = list(episodes)
    for episode in episodes:
        episode.cancel()
    await asyncio.gather(*episodes, return_exceptions=True)
    await closed()


async def _awaited(call: Awaitable[Any]) -> None:
    with _suppressed():
        await call


@contextlib.contextmanager
def _suppressed() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if _is_from_outside(error):
            raise


def call(what: str, function: Callable[[], Any]) -> Any:
    """Call other people's code. what: the call, for messages."""
    try:
        return function()
    except BaseException as error:
        if _is_from_outside(error) or isinstance(error, EnvironmentFault):
            raise
        raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}{raised_at(error)}") from error


async def _call_session(what: str, function: Callable[[], Any]) -> Any:
    """Call a method that may be a coroutine function."""
    try:
        result = function()
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        if _is_from_outside(error):
            raise
        raise EnvironmentFault(f"{what} raised {type(error).__name__}: {error}{raised_at(error)}") from error


def _is_number(value: object) -> bool:
    # Numbers of numpy are accepted, and bool as 0 or 1. They become float32.
    magnitude: Any = abs(value) if isinstance(value, Real | np.bool_) else None
    return magnitude is not None and bool(magnitude <= _LARGEST)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool | np.bool_ | Real) and value in (True, False)


def _is_name(value: object) -> bool:
    return value != "" and not text_problem(value)


def text_problem(value: object) -> str:
    """Problem of a text, empty where there is none: neither tokenizers nor messages take what has no UTF-8."""
    if not isinstance(value, str):
        return "a str is expected"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        return f"{half!r} is half of a surrogate pair, which has no UTF-8: read its source with errors='replace'"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
