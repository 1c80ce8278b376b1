"""Several environments as one, with weights.

Invariant: a task id of the mixture means one task of one part, in every process; the tasks of a part's splits stay in
these splits.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np

from impala_llm.checks.settings_checks import field_problems
from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import SPLITS, Split, Suite
from impala_llm.envs.single_turn import Result
from impala_llm.plugs import ENVIRONMENTS, make_options, name_part, short_name
from impala_llm.settings import EnvConfig, WebShopConfig

_MOST_TASKS = 1_000_000


class MixtureSuite:
    """The tasks of all parts. In training each part has the share of the episodes that its weight says.

    For that, the tasks of a part come several times in an epoch where its share asks for more than it has. Validation
    and test have every task once, part by part in turn, so that the first ones are of all parts.
    """

    @dataclass
    class Options:
        """Settings env.args.*"""

        parts: dict[str, Any] = field(default_factory=dict)
        """Name of a part -> its environment: `name`, `args`, and its `weight`, 1 unless given, such as
        env.args.parts.sums={name: reasoning_gym, weight: 2, args: {task: chain_sum}}."""

        def __post_init__(self) -> None:
            """Check names, options and weights of the parts, so that wrong settings are refused before any process
            starts. ValueError for the first problem."""
            for name, part in self.parts.items():
                _weight(name, part)
                _config(name, part)

    def __init__(self, options: Options) -> None:
        """
        Raises:
            ValueError: no parts, or one that is not as it should be.
            EnvironmentFault: a part cannot be made.
        """
        if not options.parts:
            raise ValueError("env.args.parts has no parts: set env.args.parts.NAME={name: ENVIRONMENT, weight: 1}")
        self.name, self.part_names = "mixture", list(options.parts)
        weights = [_weight(name, part) for name, part in options.parts.items()]
        self.suites: list[Suite] = [make_suite(_config(name, part)) for name, part in options.parts.items()]
        prompts = {suite.system_prompt for suite in self.suites}
        self._is_one_prompt = len(prompts) == 1
        self.system_prompt = prompts.pop() if self._is_one_prompt else ""
        train = [contract.tasks(suite, "train") for suite in self.suites]
        sizes = _sizes(dict(zip(self.part_names, map(len, train), strict=True)), weights)
        # Task ids of each part: those of training, each as often as it is played, then validation, then test.
        self._ids: list[np.ndarray] = []
        self._splits: dict[Split, list[int]] = {split: [] for split in SPLITS}
        held_out: dict[Split, list[list[int]]] = {"validation": [], "test": []}
        for part, (suite, tasks, size) in enumerate(zip(self.suites, train, sizes, strict=True)):
            others = [contract.tasks(suite, split) for split in SPLITS[1:]]
            self._ids.append(np.concatenate([np.resize(np.asarray(tasks, np.int64), size), *others]))
            numbers = iter(part + len(self.suites) * k for k in range(len(self._ids[-1])))
            self._splits["train"] += [next(numbers) for _ in range(size)]
            for split, there in zip(SPLITS[1:], others, strict=True):
                held_out[split].append([next(numbers) for _ in there])
        for split, by_part in held_out.items():
            longest = max(map(len, by_part))
            self._splits[split] = [ids[k] for k in range(longest) for ids in by_part if k < len(ids)]

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> "MixtureSession":
        return MixtureSession(self, training)

    def signature(self, task_id: int) -> str:
        """The name of the part, and the kind within it."""
        part, inner = self.task(task_id)
        return f"{self.part_names[part]}: {self.suites[part].signature(inner)}"

    def task(self, task_id: int) -> tuple[int, int]:
        """Number of the part that a task is of, and its id there. ValueError if there is no such task."""
        number, part = divmod(task_id, len(self.suites))
        if not 0 <= number < len(self._ids[part]):
            raise ValueError(f"task_id is {task_id}: the mixture has no such task")
        return part, int(self._ids[part][number])

    def introduction(self, part: int) -> str:
        """Text before the first observation of a part, where the parts differ in their system prompts."""
        prompt = "" if self._is_one_prompt else self.suites[part].system_prompt
        return f"{prompt}\n\n" if prompt else ""


class MixtureSession:
    """An episode of one part of a `MixtureSuite`."""

    def __init__(self, suite: MixtureSuite, training: bool) -> None:
        self._suite, self._training = suite, training
        self._session: Any = None

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        part, inner = self._suite.task(task_id)
        self.close()
        self._session = self._suite.suites[part].session(self._training)
        found = self._session.reset(inner)
        observation, info = await found if inspect.isawaitable(found) else found
        return self._suite.introduction(part) + observation, info

    async def step(self, action: str) -> Result:
        found = self._session.step(action)
        result: Result = await found if inspect.isawaitable(found) else found
        return result

    def close(self) -> None:
        if self._session is not None:
            contract.close(self._session)


def _weight(name: str, part: Any) -> float:
    """The weight of a part, whose settings are checked with it."""
    known = ("name", "args", "weight")
    if not isinstance(part, Mapping) or "name" not in part or set(part) - set(known):
        raise ValueError(f"env.args.parts.{name}={part}: give it {', '.join(known)}, and nothing else")
    weight = part.get("weight", 1)
    if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ValueError(f"env.args.parts.{name}.weight={weight}: a number above 0 is expected")
    return float(weight)


def _config(name: str, part: Mapping[str, Any]) -> EnvConfig:
    """The settings of a part as those of an environment of its own."""
    args, here, key = part.get("args"), f"env.args.parts.{name}", ENVIRONMENTS.options_key
    try:
        if short_name(ENVIRONMENTS, part["name"]) == "webshop":
            shop = make_options(ENVIRONMENTS, "webshop", WebShopConfig, args)
            config = EnvConfig(name="webshop", webshop=shop)
            found = field_problems(config.webshop, f"{key}.")
        else:
            chosen, options = name_part(ENVIRONMENTS, part["name"], args)
            config = EnvConfig(name=chosen, args=options)
            found = field_problems(options, f"{key}.") if is_dataclass(options) else []
        if found:
            raise ValueError(found[0])
    except ValueError as error:
        said = str(error).replace(f"{key}.", f"{here}.args.").replace(f"{key}=", f"{here}.args=")
        raise ValueError(said.replace(ENVIRONMENTS.key, f"{here}.name")) from None
    return config


def _sizes(present: Mapping[str, int], weights: Sequence[float]) -> list[int]:
    """Number of tasks of each part in an epoch: in the ratio of the weights, and at least all tasks of each part."""
    sums = {name: size * sum(weights) / weight for (name, size), weight in zip(present.items(), weights, strict=True)}
    rarest = max(sums, key=sums.__getitem__)
    if sums[rarest] > _MOST_TASKS:
        raise ValueError(
            f"env.args.parts.{rarest} has {present[rarest]} tasks and so small a weight that an epoch with all of them "
            f"has {sums[rarest]:.0f}, of {_MOST_TASKS} at most: raise its weight, or give it fewer tasks"
        )
    return [max(1, round(sums[rarest] * weight / sum(weights))) for weight in weights]
