"""Interface of a text environment: a `Suite` of tasks that makes `Session`s.

A suite is the immutable part that all episodes of a process share (a catalogue, an index); a session is one episode
at a time and is small. Neither knows tokens or models. Identical states give identical text.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Session(Protocol):
    """One episode at a time. Used from one thread.

    It may have a method `close()`, which is called when the episode is over, or was given up: to end connections. That
    may be a coroutine function: no other episode waits for it, and the process does for two seconds before it ends.
    """

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        """Start the episode of a task: (first observation, info).

        Raises:
            ValueError: `task_id` is not a task of the suite.
        """
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play an action: (observation, reward, terminated, truncated, info).

        terminated: the end belongs to the task, its own limits on steps or mistakes included: nothing is to come.
        truncated: a limit from outside has cut the episode, and it could have gone on: the observation is the one that
        the next action would have answered, and the learner's value of it stands for what would have come.

        When terminated or truncated, `info` holds `score` (float in [0, 1]) and `success` (bool), and may hold
        `stats` (dict of float).
        """
        ...


class AsyncSession(Protocol):
    """A `Session` that waits for something, such as a server, without holding up the other episodes of its actor."""

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        """See `Session.reset`."""
        ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Session.step`."""
        ...


class Suite(Protocol):
    """The tasks of an environment and what their episodes share."""

    name: str
    system_prompt: str
    """Text before the first observation; may be empty."""

    def tasks(self, split: Split) -> Sequence[int]:
        """Task ids of a split, in canonical order, the same in every process. Splits are disjoint."""
        ...

    def session(self, training: bool) -> Session | AsyncSession:
        """A fresh session. `training` switches on what only training does, such as an early end."""
        ...

    def signature(self, task_id: int) -> str:
        """The kind of a task: what the rarity factor of the replay priority counts."""
        ...


class Script(Protocol):
    """A player of one episode that needs no model."""

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """The action for an observation and the `info` that came with it."""
        ...


@runtime_checkable
class Scripted(Protocol):
    """A suite that has a script: it can show how its tasks are done."""

    def script(self, noise: float, seed: int) -> Script:
        """A script for one episode.

        Args:
            noise: from 0, as well as it can, to 1, sloppily.
            seed: of its slips.
        """
        ...


@runtime_checkable
class Compared(Protocol):
    """A suite that has baselines: evaluations show their scores beside a policy's."""

    def baselines(self) -> dict[str, Callable[[], Script]]:
        """Makers of scripts by name, each called for every episode. They know what a session shows, and no more."""
        ...
