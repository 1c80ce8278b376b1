"""Signals that come while other people's code runs: it is not the code that has failed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import Suite
from impala_llm.stop_signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers of this process as they were."""
    numbers = (*STOP_SIGNALS, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class SlowSuite:
    """Is told to stop while it lists its tasks."""

    name, system_prompt = "slow", ""

    def tasks(self, split: str) -> list[int]:
        ask_to_stop()
        return [0]


def test_an_environment_during_whose_call_a_signal_comes_is_not_at_fault() -> None:
    StopSignals()
    suite: Suite = SlowSuite()  # type: ignore[assignment]  # no more of it is called
    with pytest.raises(SystemExit) as stop:
        contract.tasks(suite, "train")
    assert stop.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("when", ["while it is imported", "while it is made"])
def test_an_environment_is_not_called_broken_for_a_signal(when: str, user_folder: Path) -> None:
    told = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    indented = told.replace("\n", "\n    ")
    source = {"while it is imported": f"{told}def make(): ...", "while it is made": f"def make():\n    {indented}pass"}
    name = f"stopped_{len(when)}"
    (user_folder / f"{name}.py").write_text(source[when])
    sys.modules.pop(name, None)
    StopSignals()
    with pytest.raises(SystemExit) as stop:
        make_suite(load([f"env={name}:make", "model=scratch"]).env)
    assert stop.value.code == 128 + signal.SIGTERM
