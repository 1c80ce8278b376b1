"""The benchmark of schedules: its environment waits as told without holding up others, and both runs train."""

import asyncio
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from impala_llm.bench import schedule
from impala_llm.bench._schedule_environment import SlowSuite
from impala_llm.bench.frame import BenchError, run_bench
from impala_llm.envs import contract
from tests.system.forked_command import forked_command


def test_latencies_are_log_normal_with_the_given_median_and_deviation() -> None:
    suite = SlowSuite(SlowSuite.Options(median_s=0.2, sigma=1.0))
    random.seed(0)
    logarithms = [math.log(suite.latency_s()) for _ in range(4000)]
    assert statistics.fmean(logarithms) == pytest.approx(math.log(0.2), abs=0.05)
    assert statistics.stdev(logarithms) == pytest.approx(1.0, abs=0.05)


def test_the_environment_is_the_parrot_behind_its_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    suite = SlowSuite(SlowSuite.Options(median_s=3.0, sigma=0.0))
    task = suite.tasks("train")[1]

    async def play() -> float:
        session = suite.session(True)
        observation = await contract.reset(session, task, suite.name)
        _, _, terminated, _, info = await contract.step(session, observation.removeprefix("say "), suite.name)
        assert terminated
        return float(info["score"])

    assert asyncio.run(play()) == 1.0
    assert waited == [3.0, 3.0]


def test_any_environment_can_be_slow_with_its_own_settings() -> None:
    shop = SlowSuite(SlowSuite.Options(name="webshop", args={"num_products": 50, "max_steps": 7}, median_s=0.0))
    assert shop.name == "slow-webshop"

    async def play() -> tuple[int, bool]:
        session = shop.session(True)
        observation = await contract.reset(session, shop.tasks("train")[0], shop.name)
        assert "Instruction" in observation
        for turn in range(1, 20):
            _, _, terminated, truncated, _ = await contract.step(session, "search[shirt]", shop.name)
            if terminated or truncated:
                return turn, terminated
        raise AssertionError

    assert asyncio.run(play()) == (7, True)


@pytest.mark.parametrize("options", [{"updates": "5"}, {"rounds": "0"}, {"staleness": "0"}, {"median_s": "slow"}])
def test_options_that_measure_nothing_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options)).replace('_', '-')}"):
        schedule.run(options)


def test_the_figures_are_of_the_pairs_of_each_round() -> None:
    def row(number: int, name: str, per_hour: float, score: float, idle: float) -> dict[str, object]:
        return {"round": number, "schedule": name, "updates_per_h": per_hour, "score": score, "learner_idle": idle}

    rows = [
        row(0, "synchronous", 100.0, 0.5, 0.9),
        row(0, "asynchronous", 300.0, 0.75, 0.1),
        row(1, "asynchronous", 500.0, 0.25, 0.3),
        row(1, "synchronous", 100.0, 0.5, 0.9),
    ]
    assert schedule.figures_of(rows) == {
        "async_over_sync": 4.0,
        "learner_idle_share": 0.2,
        "score_async": 0.5,
        "score_sync": 0.5,
    }


def by_forks(command: list[str], cwd: Path, **_: bool) -> "subprocess.CompletedProcess[str]":
    """In place of `subprocess.run`: the same command, which begins with its modules imported."""
    assert command[:3] == [sys.executable, "-m", "impala_llm.cli"]
    return forked_command(command[3:], cwd)


@pytest.mark.system
def test_both_schedules_train_and_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.subprocess, "run", by_forks)
    result = run_bench("schedule", {"updates": "8", "rounds": "1", "median_s": "0.01", "width": "32"})
    assert [row["schedule"] for row in result["rows"]] == ["synchronous", "asynchronous"]  # type: ignore[attr-defined]
    synchronous, asynchronous = result["rows"]  # type: ignore[misc]
    assert synchronous["staleness"] == 0.0 and 0.0 <= synchronous["score"] <= 1.0
    assert 0.0 <= asynchronous["learner_idle"] < 1.0 and asynchronous["updates_per_h"] > 0
    assert result["figures"].keys() >= {"async_over_sync", "learner_idle_share", "score_async"}  # type: ignore[attr-defined]
