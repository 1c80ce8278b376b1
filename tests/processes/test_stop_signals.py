"""Signals that come while other people's code runs: it is not the code that has failed."""

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import Suite
from impala_llm.learner import Learner
from impala_llm.learning.checkpoints.resume import Start
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.saving import Saving
from impala_llm.processes.stop_signals import STOP_SIGNALS, StopSignals
from impala_llm.processes.supervised import PROGRESS


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


def test_a_signal_amid_an_update_of_several_ranks_waits_for_its_end_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can only end, and save a checkpoint, together. The supervisor is told at once, so that it waits as well."""
    heard, told = os.pipe()
    os.set_blocking(heard, False)
    stops, ranks = StopSignals(), Ranks("cpu")
    settings = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}", "run.terminal=false"]
    with ExitStack() as stack:
        learner = Learner(load(settings), ranks, stack, Start(), stops)
        learner.saving.begin_update()
        learner.update = learner.version = 1
        with monkeypatch.context() as several:
            several.setattr(ranks, "num_processes", 2)
            several.setenv(PROGRESS, str(told))
            ask_to_stop()
            assert json.loads(os.read(heard, 4096)) == {"saving": True}
            os.kill(os.getpid(), signal.SIGALRM)  # as the timer does after STOP_PATIENCE_S
            learner.saving.end_update()
            with pytest.raises(SystemExit) as stop:  # beside the others it would not wait for ever
                os.kill(os.getpid(), signal.SIGALRM)
        assert stop.value.code == 128 + signal.SIGTERM


def test_a_signal_while_a_finished_run_saves_its_policy_waits_for_the_whole_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the run counts as finished."""
    stops, save, told = StopSignals(), Saving.save_policy, []

    def save_slowly(self: Saving, target: Path, update: int) -> bool:
        ask_to_stop()
        os.kill(os.getpid(), signal.SIGALRM)  # as the timer does after STOP_PATIENCE_S
        told.append(stops.number)
        return save(self, target, update)

    monkeypatch.setattr(Saving, "save_policy", save_slowly)
    settings = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", f"run.dir={tmp_path}", "run.terminal=false"]
    with ExitStack() as stack:
        learner = Learner(load(settings), Ranks("cpu"), stack, Start(), stops)
        learner.update = learner.version = 1
    assert told == [signal.SIGTERM] and learner.is_saved
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "checkpoints" / "update-000001" / "manifest.json").is_file()
