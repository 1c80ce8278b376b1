"""The tasks of an agent: lines of a file, or mere numbers."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import Session, Split, Suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.json_lines import read_json_lines
from impala_llm.envs.task_file import given_splits
from impala_llm.settings import Config


@dataclass(frozen=True)
class Task:
    """A task for an agent."""

    id: int
    seed: int
    """Differs from episode to episode of the same task."""
    training: bool
    """False in evaluations."""
    data: dict[str, Any]
    """Its line of `agent.tasks`; empty where there is no such file."""


class AgentSuite:
    """Tasks of `agent.tasks`, or `agent.num_tasks` numbers. They are played by the agent, not by sessions.

    The splits are those of the field `split`, in all lines or in none. Without it the last two tenths of the different
    tasks are validation and test; equal lines are in one split, where the first of them is.

    Raises:
        EnvironmentFault: the file cannot be read, or has too few tasks.
    """

    name = "agent"
    system_prompt = ""

    def __init__(self, path: str | None, num_tasks: int) -> None:
        self._data: list[dict[str, Any]] | None = None
        given = None
        if path is not None:
            self._data, given = _read(Path(path))
        self._splits = given or _dealt(num_tasks, self._data, path)

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> Session:
        raise EnvironmentFault("the tasks of an agent have no reset and step: they are played by agent.name")

    def signature(self, task_id: int) -> str:
        return str(self.data(task_id).get("signature", ""))

    def data(self, task_id: int) -> dict[str, Any]:
        """The task's line; empty where there is no file."""
        return {} if self._data is None else self._data[task_id]


def suite_of(config: Config) -> Suite:
    """The tasks of a run: those of its agent, where it has one, else of its environment."""
    if config.agent.is_set:
        return AgentSuite(config.agent.tasks, config.agent.num_tasks)
    return make_suite(config.env)


def tried_suite(config: Config) -> Suite:
    """`suite_of`, with the tasks of training looked at and a session made: before a run, what would end it.

    Raises:
        EnvironmentFault: see `suite_of`; there are no tasks, or a session is none.
    """

    async def try_session() -> None:
        contract.close(contract.session(suite, training=True))
        await contract.closed()

    suite = suite_of(config)
    contract.tasks(suite, "train")
    if not config.agent.is_set:
        asyncio.run(try_session())
    return suite


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[Split, list[int]] | None]:
    """The tasks of a file, and their splits where it says them."""
    try:
        rows = read_json_lines(path.expanduser())
        return list(rows.values()), given_splits(rows, str(path))
    except OSError as error:
        raise EnvironmentFault(f"agent.tasks={path} cannot be read ({error}): correct the path") from error
    except ValueError as error:
        raise EnvironmentFault(f"agent.tasks: {error}") from error


def _dealt(num_tasks: int, data: list[dict[str, Any]] | None, path: str | None) -> dict[Split, list[int]]:
    """The task ids of each split, in the order of the file."""
    tasks = [str(k) for k in range(num_tasks)] if data is None else [json.dumps(row, sort_keys=True) for row in data]
    indices = {task: index for index, task in enumerate(dict.fromkeys(tasks))}
    count = len(indices)
    if count < 3:
        raise EnvironmentFault(
            f"agent.tasks={path} has {count} different tasks: at least 3 are needed, one for each split"
        )
    tenth = max(1, count // 10)
    bounds: dict[Split, range] = {
        "train": range(count - 2 * tenth),
        "validation": range(count - 2 * tenth, count - tenth),
        "test": range(count - tenth, count),
    }
    return {split: [k for k, task in enumerate(tasks) if indices[task] in bounds[split]] for split in bounds}
