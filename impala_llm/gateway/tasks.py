"""The tasks of an agent: lines of a file, or mere numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import Session, Split, Suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.json_lines import read_json_lines
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
    """Tasks of `agent.tasks`, or `agent.num_tasks` numbers. The last two tenths are validation and test.

    They are played by the agent, not by sessions.

    Raises:
        EnvironmentFault: the file cannot be read, or has too few tasks.
    """

    name = "agent"
    system_prompt = ""

    def __init__(self, path: str | None, num_tasks: int) -> None:
        self._data = None if path is None else _read(Path(path))
        count = num_tasks if self._data is None else len(self._data)
        if count < 3:
            raise EnvironmentFault(f"agent.tasks={path} has {count} tasks: at least 3 are needed, one for each split")
        tenth = max(1, count // 10)
        self._splits: dict[Split, range] = {
            "train": range(count - 2 * tenth),
            "validation": range(count - 2 * tenth, count - tenth),
            "test": range(count - tenth, count),
        }

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
    suite = make_suite(config.env)
    contract.check_parts(suite, config.env.name)
    return suite


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(read_json_lines(path.expanduser()).values())
    except OSError as error:
        raise EnvironmentFault(f"agent.tasks={path} cannot be read ({error}): correct the path") from error
    except ValueError as error:
        raise EnvironmentFault(f"agent.tasks: {error}") from error
