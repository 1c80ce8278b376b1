"""ScienceWorld (extra `scienceworld`; it needs Java): experiments in a simulated house.

One Java process, on loopback, serves all episodes of an actor, one call at a time, which takes 10 to 500 ms, in a
thread.
"""

import asyncio
import copy
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from impala_llm.envs.answers import first_line
from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.extras import needed
from impala_llm.envs.single_turn import ReferenceScript, Result
from impala_llm.settings import bounded

_MOST_VARIATIONS = 100_000
_SPLIT_METHODS = dict(zip(SPLITS, ("get_variations_train", "get_variations_dev", "get_variations_test"), strict=True))


class ScienceWorldSuite:
    """Tasks of ScienceWorld, with the library's own splits of their variations."""

    @dataclass
    class Options:
        """Settings env.args.*"""

        tasks: list[str] = field(default_factory=lambda: ["find-animal"])
        """Names of tasks, such as boil or find-animal; empty: all 30."""
        simplifications: str = "easy"
        """The library's simplifications, with commas: easy means all of them; empty: none."""
        max_steps: int = bounded(50, least=1)
        """Actions of an episode at most; then it is cut."""

    def __init__(self, options: Options) -> None:
        """
        Raises:
            ValueError: a task or a simplification that does not exist.
            RuntimeError: Java cannot be started.
        """
        needed("scienceworld", "scienceworld")
        self.name, self.options = "scienceworld", options
        self.system_prompt = "Answer with one action, such as: look around"
        first = _first_world()
        self._names = list(options.tasks) or first.task_names
        if unknown := sorted(set(self._names) - set(first.get_task_names())):
            known = ", ".join(sorted(first.get_task_names()))
            raise ValueError(f"env.args.tasks={unknown[0]} is no task of ScienceWorld: choose of {known}")
        self._tasks: dict[Split, list[int]] = {split: [] for split in SPLITS}
        for number, name in enumerate(self._names):
            first.load(name, 0, options.simplifications)
            for split in SPLITS:
                variations = getattr(first, _SPLIT_METHODS[split])()
                self._tasks[split] += [number * _MOST_VARIATIONS + each for each in variations]
        self._known = set().union(*self._tasks.values())
        self.has_solutions = False

    def tasks(self, split: Split) -> Sequence[int]:
        return self._tasks[split]

    def session(self, training: bool) -> "ScienceWorldSession":
        return ScienceWorldSession(self)

    def signature(self, task_id: int) -> str:
        """The name of the task."""
        return self.variation(task_id)[0]

    def script(self, noise: float, seed: int) -> ReferenceScript:
        """The library's own solution; with noise, it looks around in between. Episodes that begin later have one."""
        self.has_solutions = True
        return ReferenceScript(noise, seed, lambda rng, info: "look around")

    def variation(self, task_id: int) -> tuple[str, int]:
        """Name and variation of a task."""
        if task_id not in self._known:
            raise ValueError(f"task_id is {task_id}: there is no such variation of {', '.join(self._names)}")
        number, variation = divmod(task_id, _MOST_VARIATIONS)
        return self._names[number], variation


class ScienceWorldSession:
    """An episode of `ScienceWorldSuite`. The reward is the change of the library's score, which is then 0 to 1."""

    def __init__(self, suite: ScienceWorldSuite) -> None:
        self._suite = suite
        self._world: Any = None
        self._is_called = False
        self._score = 0.0
        self._steps = 0
        self._solution: list[str] = []
        """The rest of the script, where there is one."""

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        name, variation = self._suite.variation(task_id)
        self._score, self._steps = 0.0, 0
        return await self._call(self._begin, name, variation), self._for_script()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call Java in a thread, which continues if the episode is given up meanwhile."""

        def one_at_a_time() -> Any:
            with _LOCK:
                return function(*arguments)

        self._is_called = True
        result = await asyncio.to_thread(one_at_a_time)
        self._is_called = False
        return result

    def _begin(self, name: str, variation: int) -> str:
        if self._world is None:
            self._world = _free_worlds.pop() if _free_worlds else _another_world()
        # Finding a solution takes a third as long as all the rest of a reset, so that only a script has it.
        has_solutions = self._suite.has_solutions
        self._world.load(name, variation, self._suite.options.simplifications, generateGoldPath=has_solutions)
        self._solution = self._world.get_gold_action_sequence() if has_solutions else []
        observation, info = self._world.reset()
        return f"{info['taskDesc'].strip()}\n\n{observation}"

    async def step(self, action: str) -> Result:
        self._steps += 1
        command = first_line(action)
        observation, _, ended, info = await self._call(self._world.step, command)
        score = min(max(info["score"] / 100, 0.0), 1.0)
        reward, self._score = score - self._score, score
        truncated = not ended and self._steps >= self._suite.options.max_steps
        if not (ended or truncated):
            if self._solution and command == self._solution[0]:
                self._solution = self._solution[1:]
            return observation, reward, False, False, self._for_script()
        stats = {"steps": float(self._steps), "failed": float(info["score"] < 0)}
        return observation, reward, bool(ended), truncated, {"score": score, "success": score == 1.0, "stats": stats}

    def _for_script(self) -> dict[str, Any]:
        return {"reference": self._solution[0] if self._solution else "look around"}

    def close(self) -> None:
        """Give the world back, unless an abandoned call may still change it."""
        if self._world is not None and not self._is_called:
            _free_worlds.append(self._world)
        self._world = None


_LOCK = threading.Lock()
"""The simulator does not promise that its worlds may be called at once."""
_free_worlds: list[Any] = []
"""Worlds whose episode is over, for the next ones: Java keeps what it knows of each."""


@functools.cache
def _first_world() -> Any:
    """The world that starts Java, with a heap of 1 GB unless JAVA_TOOL_OPTIONS says otherwise."""
    library = needed("scienceworld", "scienceworld")
    os.environ.setdefault("JAVA_TOOL_OPTIONS", "-Xmx1g -XX:+UseSerialGC")
    try:
        return library.ScienceWorldEnv(envStepLimit=10**9)  # the suite counts steps
    except FileNotFoundError as error:
        raise RuntimeError(f"Java cannot be started ({error}): install a Java runtime of version 8 or later") from error


def _another_world() -> Any:
    """A world in the Java process of the first one: a process of its own would take 200 MB and two seconds."""
    world = copy.copy(_first_world())
    world.__class__ = _guest_class()
    world.server = world._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
    world.clear_run_histories()
    return world


@functools.cache
def _guest_class() -> type:
    """A kind of world that leaves Java running when it goes."""
    return type("GuestWorld", (type(_first_world()),), {"__del__": lambda self: None})
