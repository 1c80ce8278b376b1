"""What an environment must return, and what is said of one that does not."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.gateway.tasks import suite_of
from impala_llm.settings import EnvConfig

END = {"score": 0.5, "success": False, "stats": {"clicks": 2}}


class Scripted:
    """Returns what it is given, or raises it."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def reset(self, task_id: int) -> Any:
        return self.step("")

    def step(self, action: str) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    "result",
    [
        ("page", 0.0, False, False, {}),
        ("page", np.float32(1.0), True, False, END),
        ("page", 1, np.bool_(False), np.bool_(True), {"score": 1, "success": np.bool_(True)}),
    ],
)
def test_what_keeps_the_protocol_comes_through(result: Any) -> None:
    assert asyncio.run(contract.step(Scripted(result), "go", "maze")) == result


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (KeyError("door"), ["raised KeyError", "door"]),
        (("page", 0.0, False, {}), ["observation, reward, terminated, truncated, info"]),
        ((None, 0.0, False, False, {}), ["observation is None", "str"]),
        (("page", "high", False, False, {}), ["reward is 'high'", "finite number"]),
        (("page", float("nan"), False, False, {}), ["reward is nan: a finite number is expected"]),
        (("page", 0.0, True, False, {"success": True}), ["info['score'] is None at the end", "[0, 1] is expected"]),
        (("page", 0.0, False, True, {"score": 7.0, "success": True}), ["info['score'] is 7.0"]),
        (("page", 0.0, True, False, {"score": 1.0}), ["info['success'] is None at the end: a bool is expected"]),
        (("page", 0.0, True, False, END | {"stats": {"clicks": "two"}}), ["info['stats']", "finite numbers"]),
        (("page", 0.0, True, False, END | {"stats": {"": 2.0}}), ["info['stats']", "names"]),
        (("page", 0.0, True, False, END | {"stats": {7: 2.0}}), ["info['stats']", "names"]),
        (("page", 0.0, True, False, END | {"success": np.array([True, False])}), ["info['success']", "bool"]),
        (("page", 1e39, False, False, {}), ["reward is 1e+39", "finite number"]),
        (("page", -3e38, False, False, {}), ["reward is -3e+38", "at most 1e+06", "divide"]),
        (("page", 10**400, False, False, {}), ["reward is 1000", "finite number"]),
        (("page", 0.0, True, False, None), ["info is None", "dict"]),
        (("page", 0.0, np.array([True, False]), False, END), ["terminated is array(", "a bool is expected"]),
        (("page", 0.0, False, None, {}), ["truncated is None", "a bool is expected"]),
    ],
)
def test_what_does_not_is_named(result: Any, words: list[str]) -> None:
    with pytest.raises(EnvironmentFault) as fault:
        asyncio.run(contract.step(Scripted(result), "go", "maze"))
    for word in ["env maze", "step", *words]:
        assert word in str(fault.value)
    # What it returned ends the run at once; what it raised may be over soon.
    assert (fault.value.__cause__ is None) == (not isinstance(result, Exception))


@pytest.mark.parametrize("result", ["page", ("page",), (7, {}), RuntimeError("no such task")])
def test_a_reset_that_returns_no_observation_is_named(result: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"env maze: reset\(3\)"):
        asyncio.run(contract.reset(Scripted(result), 3, "maze"))


class Waiting:
    """A session whose steps wait for its partner's."""

    def __init__(self, mine: asyncio.Event, other: asyncio.Event) -> None:
        self.mine, self.other = mine, other

    async def reset(self, task_id: int) -> Any:
        return "page", {}

    async def step(self, action: str) -> Any:
        self.mine.set()
        await self.other.wait()
        if action == "break":
            raise KeyError("door")
        return "page", 0.0, False, False, {}


def test_a_session_of_coroutines_waits_without_holding_up_others() -> None:
    async def both(word: str) -> list[Any]:
        events = asyncio.Event(), asyncio.Event()
        sessions = Waiting(*events), Waiting(*events[::-1])
        assert [await contract.reset(session, 3, "maze") for session in sessions] == ["page", "page"]
        steps = (contract.step(session, word, "maze") for session in sessions)
        return await asyncio.wait_for(asyncio.gather(*steps, return_exceptions=True), timeout=20)

    assert asyncio.run(both("go")) == 2 * [("page", 0.0, False, False, {})]
    for fault in asyncio.run(both("break")):
        assert isinstance(fault, EnvironmentFault) and "env maze: step raised KeyError" in str(fault)


class Tasks:
    name = "maze"

    def __init__(self, found: Any) -> None:
        self.found = found

    def tasks(self, split: str) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_tasks_are_numbers_and_at_least_one() -> None:
    assert contract.tasks(Tasks(range(3)), "train") == [0, 1, 2]  # type: ignore[arg-type]
    for found in ([], None, ["first"], KeyError("no file")):
        with pytest.raises(EnvironmentFault, match=r"env maze: tasks\('train'\)"):
            contract.tasks(Tasks(found), "train")  # type: ignore[arg-type]


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="env.name=chess cannot be made"):
        make_suite(EnvConfig(name="chess"))


def test_a_suite_without_all_of_its_parts_is_refused_before_it_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Suite:\n    name = system_prompt = ''\n    def tasks(self, split): return [0]\n"
    (tmp_path / "half_a_suite.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match="half_a_suite:Suite: its suite has no session and no signature"):
        suite_of(load(["model=scratch", "env=half_a_suite:Suite"]))
