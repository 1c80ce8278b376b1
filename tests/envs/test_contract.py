"""The contract of an environment's returns, and the messages about one that breaks it."""

import asyncio
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.settings import EnvConfig

END = {"score": 0.5, "success": False, "stats": {"clicks": 2}}


class Scripted:
    """Returns what it is given, or raises it."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def reset(self, task_id: int) -> Any:
        return self.step("")

    def step(self, action: str) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Panic(BaseException):
    """As the panics of libraries in Rust are."""


@pytest.mark.parametrize(
    "result",
    [
        ("page", 0.0, False, False, {}),
        ("page", np.float32(1.0), True, False, END),
        ("page", 1, np.bool_(False), np.bool_(True), {"score": 1, "success": np.bool_(True)}),
        ("page", np.bool_(True), True, False, {"score": np.bool_(False), "success": np.bool_(False)}),
    ],
)
def test_what_keeps_the_protocol_comes_through(result: Any) -> None:
    assert asyncio.run(contract.step(Scripted(result), "go", "maze")) == result


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (KeyError("door"), ["raised KeyError", "door"]),
        (Panic("index out of bounds"), ["raised Panic", "index out of bounds"]),
        (("caf\udce9", 0.0, False, False, {}), ["observation is 'caf\\udce9'", "half of a surrogate pair", "UTF-8"]),
        (("page", 0.0, True, False, END | {"stats": {"\ud83d": 2.0}}), ["info['stats']", "names"]),
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
    assert (fault.value.__cause__ is None) == (not isinstance(result, BaseException))


@pytest.mark.parametrize("result", ["page", ("page",), (7, {}), ("\ud83d", {}), RuntimeError("no such task"), Panic()])
def test_a_reset_that_returns_no_observation_is_named(result: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"env maze: reset\(3\)"):
        asyncio.run(contract.reset(Scripted(result), 3, "maze"))


def test_an_error_names_the_line_of_the_environment_and_not_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost_door.py").write_text("import json\n\ndef step(action):\n    return json.loads(action)\n")
    monkeypatch.syspath_prepend(tmp_path)
    session = SimpleNamespace(step=importlib.import_module("lost_door").step)
    with pytest.raises(
        EnvironmentFault, match=rf"raised JSONDecodeError: .*, in {re.escape(str(tmp_path))}/lost_door\.py:4$"
    ):
        asyncio.run(contract.step(session, "{", "maze"))


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


class Splits:
    name = "splits"

    def tasks(self, split: str) -> range:
        return {"train": range(10), "validation": range(8, 12), "test": range(12, 14)}[split]


def test_a_split_that_shares_tasks_with_training_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "test"):
        contract.warn_of_shared_tasks(Splits(), split)  # type: ignore[arg-type]
    assert caplog.text == ""
    contract.warn_of_shared_tasks(Splits(), "validation")  # type: ignore[arg-type]
    assert "env splits has 2 tasks of the split 'validation' in 'train' too, such as 8" in caplog.text


def test_an_evaluation_does_not_fail_over_a_split_that_it_does_not_play(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Splits):
        def tasks(self, split: str) -> range:
            if split == "train":
                raise KeyError("no file")
            return range(3)

    class Empty(Splits):
        def tasks(self, split: str) -> range:
            return range(0 if split == "train" else 3)

    for suite in (Failing(), Empty()):
        contract.warn_of_shared_tasks(suite, "test")  # type: ignore[arg-type]
    assert caplog.text == ""


def test_an_empty_split_is_told_with_the_settings_that_can_mend_it() -> None:
    suite = Tasks([])
    with pytest.raises(EnvironmentFault, match=r"give it one, or choose another \(evaluation.split\)"):
        contract.tasks(suite, "test")  # type: ignore[arg-type]
    suite.name = "webshop"
    said = r"raise env.webshop.num_products, or choose another \(demonstrations.split\)"
    with pytest.raises(EnvironmentFault, match=said):
        contract.tasks(suite, "train", "demonstrations.split")  # type: ignore[arg-type]


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


@pytest.mark.parametrize("found", [np.arange(3), [np.int32(0), 1, np.int64(2)]])
def test_task_ids_of_numpy_become_those_of_python(found: Any) -> None:
    tasks = contract.tasks(Tasks(found), "train")  # type: ignore[arg-type]
    assert tasks == [0, 1, 2] and {type(task) for task in tasks} == {int}


@pytest.mark.parametrize("kind", [7, None, "\ud83d", KeyError("no file"), Panic()])
def test_a_signature_that_is_no_text_is_named(kind: Any) -> None:
    suite: Any = SimpleNamespace(name="maze", signature=Scripted(kind).step)
    with pytest.raises(EnvironmentFault, match=r"env maze: signature\(3\)"):
        contract.signature(suite, 3)


def test_an_environment_that_cannot_be_made_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="env.name=chess cannot be made"):
        make_suite(EnvConfig(name="chess"))


MADE = """
import sys

class Nameless:
    system_prompt = ""
    def tasks(self, split): return range(3)
    def session(self, training): return None
    def signature(self, task_id): return ""

class Exits(Nameless):
    def __init__(self): sys.exit(0)

class Panics(Nameless):
    def __init__(self): raise BaseException("index out of bounds")

class Promptless(Nameless):
    name, system_prompt = "maze", None

class Half:
    name, system_prompt = "maze", ""
    def tasks(self, split): return range(3)

def incomplete():
    return Half()
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Exits", "cannot be made: SystemExit: 0"),
        ("Panics", "cannot be made: BaseException: index out of bounds"),
        ("Nameless", "name of its suite is None: a str is expected"),
        ("Promptless", "system_prompt of its suite is None: a str is expected"),
        ("incomplete", "has no method session and no signature: add what is missing"),
    ],
)
def test_what_is_no_suite_is_named(name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_suites.py").write_text(MADE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match=f"env.name=no_suites:{name}.*{said}"):
        make_suite(EnvConfig(name=f"no_suites:{name}"))


def test_a_module_that_ends_its_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script.py").write_text("class Suite: ...\nimport sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFault, match="env.name=a_script:Suite cannot be imported .*SystemExit"):
        make_suite(EnvConfig(name="a_script:Suite"))


class Closing:
    """Raises when it is closed."""

    def close(self) -> None:
        raise SystemExit(0)


class ClosingSlowly:
    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.is_closed = error, False

    async def close(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.is_closed = True


class Hanging:
    async def close(self) -> None:
        await asyncio.Event().wait()


def test_a_session_without_a_method_is_refused_before_it_plays() -> None:
    """Else each episode would fail at its first step, as if the environment were away for a while."""
    suite: Any = SimpleNamespace(name="maze", session=lambda training: SimpleNamespace(reset=lambda task_id: ("", {})))
    with pytest.raises(EnvironmentFault, match=r"env maze: session returned namespace\(.*no method step: see"):
        contract.session(suite, training=True)


def test_what_a_session_raises_when_it_is_closed_ends_nothing() -> None:
    async def end() -> None:
        for session in (Closing(), ClosingSlowly(SystemExit(0)), ClosingSlowly(Panic())):
            contract.close(session)  # type: ignore[arg-type]
        await contract.closed()

    asyncio.run(end())


def test_sessions_that_take_time_to_close_are_waited_for_and_those_that_hang_are_not() -> None:
    sessions = [ClosingSlowly() for _ in range(64)]

    async def end() -> None:
        for session in [*sessions, Hanging()]:
            contract.close(session)  # type: ignore[arg-type]
        await contract.closed(timeout_s=0.2)

    asyncio.run(end())
    assert all(session.is_closed for session in sessions)
