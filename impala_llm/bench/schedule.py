"""Updates an hour of asynchronous training over synchronous training, where the environment is slow to answer.

Two whole runs take turns, each with one learner and one actor process. With `algorithm.max_staleness=0` the learner
waits for every episode of its batch, the slowest included, and the actor for the learner; otherwise both continue. All
else is the same: a policy with random weights, as many updates, each of as many episodes, and as many episodes at once
as tickets allow. That is (max_staleness + 1) batches of 64: by default up to 320 asynchronously against 64 in turn, so
that the ratio is what both differences do together. The environment is the toy parrot, whose `reset` and `step` wait
for a log-normal time.

Figures: `async_over_sync`, updates an hour of the asynchronous run over those of the synchronous one, median over the
rounds; `learner_idle_share` of the asynchronous run; `score_async` and `score_sync`, greedy on 200 held-out tasks,
means over the rounds. The first updates are left out of times and shares: engines come up in them. Rows: each run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from impala_llm.bench.frame import BenchError, whole_number
from impala_llm.settings import PACKAGE

OPTIONS = {
    "updates": "updates of a run; default 80",
    "rounds": "pairs of runs; default 2",
    "median_s": "median of a latency, in seconds; default 0.2",
    "sigma": "standard deviation of its logarithm; default 1",
    "staleness": "algorithm.max_staleness of the asynchronous run; default 4",
    "width": "width of the policy, whose size makes the learner's step long; default 512",
}
WARM_UP = 5
"""Updates that do not count."""
NUM_TASKS = 200


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Train in turns; see the module for figures and rows. BenchError where an option is malformed or a run fails."""
    try:
        median_s, sigma = float(options.get("median_s", 0.2)), float(options.get("sigma", 1.0))
    except ValueError as error:
        raise BenchError(f"--median-s and --sigma take numbers: {error}") from error
    updates = whole_number("updates", options.get("updates", 80), least=WARM_UP + 1)
    rounds = whole_number("rounds", options.get("rounds", 2))
    staleness = whole_number("staleness", options.get("staleness", 4))
    width = whole_number("width", options.get("width", 512))
    words = [
        *("experiment=toy", "model=scratch", f"model.scratch.hidden_size={width}", "model.scratch.num_layers=3"),
        *("env=impala_llm.bench._schedule_environment:SlowSuite", f"env.args.median_s={median_s}"),
        *(f"env.args.sigma={sigma}", f"learner.total_updates={updates}", "actor.num_actors=1"),
        *("actor.max_episodes=512", "run.terminal=false", "model.device=cpu"),
    ]
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        arms = [("synchronous", 0), ("asynchronous", staleness)]
        for name, most in arms if number % 2 == 0 else arms[::-1]:
            found = measure([*words, f"algorithm.max_staleness={most}", f"run.seed={number}"])
            rows.append({"round": number, "schedule": name, **found})
    return figures_of(rows), rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of pairs of runs."""
    runs = {name: [row for row in rows if row["schedule"] == name] for name in ("synchronous", "asynchronous")}
    by_round = [
        {row["schedule"]: row["updates_per_h"] for row in rows if row["round"] == number}
        for number in sorted({row["round"] for row in rows})
    ]
    return {
        "async_over_sync": statistics.median(pair["asynchronous"] / pair["synchronous"] for pair in by_round),
        "learner_idle_share": statistics.median(row["learner_idle"] for row in runs["asynchronous"]),
        "score_async": statistics.fmean(row["score"] for row in runs["asynchronous"]),
        "score_sync": statistics.fmean(row["score"] for row in runs["synchronous"]),
    }


def measure(words: list[str]) -> dict[str, float]:
    """A run, and the evaluation of what it has learned. Returns a row."""
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-schedule-") as folder:
        target = Path(folder) / "run"
        _call("train", *words, f"run.name=bench-{uuid.uuid4().hex[:12]}", f"run.dir={target}")
        lines = (target / "tensorboard" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines][WARM_UP:]
        # Latencies change no score.
        evaluated = _call(
            *("evaluate", "--json", f"experiment={target / 'config.yaml'}", "env.args.median_s=0"),
            *(f"evaluation.num_tasks={NUM_TASKS}", "evaluation.num_examples=0"),
        )
    seconds = [step["time/step_s"] for step in steps]

    def share(name: str) -> float:
        return float(sum(step[name] * s for step, s in zip(steps, seconds, strict=True)) / sum(seconds))

    return {
        "updates_per_h": 3600 * len(steps) / sum(seconds),
        "step_s": statistics.median(seconds),
        "learner_idle": share("time/idle_share"),
        "staleness": statistics.fmean(step["staleness/mean"] for step in steps),
        "lost_tokens": statistics.fmean(step.get("buffer/lost_tokens_share", 0.0) for step in steps),
        "score": json.loads(evaluated)[0]["score"],
    }


def _call(*words: str) -> str:
    """A command of impala-llm. Returns what it printed. BenchError where it fails."""
    command = [sys.executable, "-m", "impala_llm.cli", *words]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise BenchError(f"impala-llm {words[0]} ended with code {done.returncode}: {' '.join(reason)}")
    return done.stdout
