#!/usr/bin/env python
"""Asynchronous against synchronous training on equal resources: score by wall time, in environments of three speeds.
A long file, since the plan, the runs and the report of this one study stand together, and nothing else uses them.

    python tools/schedule_study.py                                  # what is missing, one at a time, then the report
    python tools/schedule_study.py --task corridor --minutes 90     # begins no run after 90 minutes
    python tools/schedule_study.py --task shop --arm "η = 4"        # this arm alone
    python tools/schedule_study.py --report                         # tables and plots of what has finished

Whole runs: a learner and an actor process on the same two cores, for the same minutes, with the same settings but for
those of the arm: `algorithm.max_staleness`, which is 0 in the synchronous one; in the task `unrolls` whether episodes
are learned from before they have ended; in `versions` the correction, and how many episodes are played at once. They
take turns seed by seed, so that whatever else the machine does meets all arms alike.
A finished run is one file under --runs; runs whose data stand under --out are finished too. Needs the extra `plots`.
What was decided before the runs, and what was found: docs/results/schedule.md.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from impala_llm.config import load  # noqa: E402
from impala_llm.settings import WebShopConfig  # noqa: E402
from tools import _study_report as reporting  # noqa: E402
from tools import _study_shop as shop  # noqa: E402

SLOW = "impala_llm.bench._schedule_environment:SlowSuite"
DATA = ROOT / "docs" / "results" / "schedule"
MANY = ("actor.max_episodes=512",)
"""As many episodes at once as tickets allow, in all arms: who waits for an environment waits for many of them."""
NUM_POINTS = 20
"""Points of a curve, each of the training episodes of an equal stretch of time."""
SCORE, SUCCESS = 2, 3
"""Columns of a curve's points."""
WINDOW = 3
"""Stretches of a running mean."""
GAIN = 0.8
"""Share of what an arm gains from its start to its end: the level whose time is measured."""
SMALLEST_GAIN = 0.05
"""An arm that gains less sets no level, which noise alone would reach."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: the settings that are its own."""

    words: tuple[str, ...]
    """Settings."""
    against: tuple[str, ...] = ()
    """The arms that it is compared with."""


@dataclass(frozen=True)
class Task:
    """A training task: its settings, its length, and how it is scored."""

    environment: str
    words: tuple[str, ...]
    minutes: float
    speeds: dict[str, tuple[float, float]]
    """Median in seconds, and deviation of the logarithm, of the wait before each answer of the environment."""
    arms: dict[str, Arm]
    num_tasks: int
    """Test tasks of the final evaluation, which is greedy and has no latencies."""
    num_seeds: int = 5
    args: dict[str, int] = field(default_factory=dict)
    """Settings of the environment: env.args.*"""


def stale(versions: int, *words: str, against: Sequence[str] = ()) -> Arm:
    """An arm that learns from data of at most so many versions before."""
    return Arm((f"algorithm.max_staleness={versions}", *words), tuple(against))


def schedules(batch_size: int, *clip: str) -> dict[str, Arm]:
    """Synchronous training on one batch after another, on five batches at once in as many steps, and asynchronous.

    Args:
        clip: settings of PPO's clip, for one more arm of five steps; none: there is no such arm.
    """
    five = (f"learner.batch_size={5 * batch_size}", "learner.minibatches=5")
    clipped = {"synchronous, 5 steps, clip": stale(0, *five, *clip, against=["synchronous, 5 steps"])} if clip else {}
    return {
        "synchronous": stale(0),
        "synchronous, 5 steps": stale(0, *five, against=["synchronous"]),
        **clipped,
        "η = 4": stale(4, against=["synchronous", "synchronous, 5 steps", *clipped]),
    }


def corrections_by_age() -> dict[str, Arm]:
    """Each correction with few and with many episodes at once: an update takes 16, so the others wait for theirs."""
    arms = {}
    for name in ("TOPR", "PPO clip", "no correction"):
        words = (*shop.METHODS[name], "learner.learning_rate=0.0001")
        arms[f"{name}, 16 at once"] = stale(2, "actor.max_episodes=16", *words)
        arms[f"{name}, 512 at once"] = stale(32, *MANY, *words, against=[f"{name}, 16 at once"])
    return arms


FULL_RATE = "learner.warmup_updates=0"
"""A warm-up counts updates, of which an arm with large batches makes few: it would be most of that arm's run."""
UNROLLS = ("actor.unroll_turns=2", "learner.batch_size=192")
"""Unrolls of a third of an episode, and three times as many in a batch, so that an update learns from as many turns."""

TASKS = {
    "corridor": Task(
        "corridor", ("experiment=corridor", "algorithm=topr_gae", "algorithm.entropy_coef=0.02", FULL_RATE, *MANY),
        minutes=2, speeds={"fast": (0.0, 0.0), "long-tailed": (0.02, 1.5), "slow": (0.2, 0.25)}, num_tasks=200,
        arms=schedules(64),
    ),
    "shop": Task(
        # By its folder: of its short name it is known to be for a shop, which a slow one is not by its name.
        "webshop", ("experiment=quickstart", "model.path=impala_llm/assets/tiny_shopper", FULL_RATE, *MANY),
        minutes=8, speeds={"slow": (1.0, 0.25)}, num_tasks=500,
        arms=schedules(64, "algorithm.loss=ppo_clip"),
    ),
    "unrolls": Task(
        "corridor",
        (
            "experiment=corridor", "algorithm=topr_gae", "algorithm.entropy_coef=0.02", "engine.max_length=128",
            FULL_RATE, *MANY,
        ),
        minutes=3, speeds={"long-tailed": (0.05, 1.5)}, num_tasks=200, args={"num_turns": 6},
        arms={
            "η = 1": stale(1),
            "η = 1, unrolls": stale(1, *UNROLLS, against=["η = 1"]),
            "η = 4": stale(4),
            "η = 4, unrolls": stale(4, *UNROLLS, against=["η = 4"]),
        },
    ),
    "versions": Task(
        # The settings of COMMON in tools/_study_shop.py that are not the lab's own; the model by its folder, as above.
        "webshop",
        (
            "model=tiny_shopper", "model.path=impala_llm/assets/tiny_shopper", "algorithm=topr_gae",
            "algorithm.aggregate=sequence_mean_token_mean", "learner.batch_size=16", "learner.adam_beta2=0.99",
            "learner.decay=constant", "learner.token_budget=4096",
        ),
        minutes=5, speeds={"fast": (0.0, 0.0)}, num_tasks=500, num_seeds=3, arms=corrections_by_age(),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: str
    speed: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its file and of its folder."""
        words = f"{self.task}-{self.speed}-{self.arm}-seed{self.seed}".replace("η", "eta")
        return re.sub("[^a-z0-9]+", "-", words.lower())

    def words(self) -> list[str]:
        """Its settings, but for those that only say where it is."""
        task = TASKS[self.task]
        median_s, sigma = task.speeds[self.speed]
        of_environment = asdict(load(task.words).env.webshop) if task.environment == "webshop" else task.args
        return [
            *task.words, *task.arms[self.arm].words, f"env={SLOW}", f"env.args.name={task.environment}",
            f"env.args.args={json.dumps(of_environment)}",
            f"env.args.median_s={median_s}", f"env.args.sigma={sigma}", f"run.seed={self.seed}", "run.terminal=false",
            f"learner.max_minutes={task.minutes}", "learner.total_updates=100000",
            "evaluation.before_and_after=false", "evaluation.unseen_seed=null", "evaluation.every_updates=null",
        ]  # fmt: skip


def planned(tasks: Sequence[str], num_seeds: int | None = None) -> list[Run]:
    """All runs; the arms of a seed one after the other, in an order that turns around from seed to seed.

    Args:
        num_seeds: of a task with more, the first so many; None: all.
    """
    runs = []
    for name in tasks:
        task = TASKS[name]
        for seed in range(min(num_seeds or task.num_seeds, task.num_seeds)):
            in_order = list(task.arms) if seed % 2 == 0 else list(task.arms)[::-1]
            runs += [Run(name, speed, arm, seed) for speed in task.speeds for arm in in_order]
    return runs


def run_of(result: dict[str, Any]) -> Run | None:
    """The run that a result is of; None where today's has other settings."""
    run = Run(**{field.name: result["settings"][field.name] for field in fields(Run)})
    plan = TASKS.get(run.task)
    if plan is None or run.arm not in plan.arms or run.speed not in plan.speeds or result["minutes"] != plan.minutes:
        return None
    same = _in_full(plan.environment, result["settings"]["overrides"]) == _in_full(plan.environment, run.words())
    return run if same else None


def _in_full(environment: str, words: Sequence[str]) -> list[str | dict[str, Any]]:
    """Settings of a run; those of the shop with all that it has today, of which one that is newer had its default."""
    key = "env.args.args="
    in_full: list[str | dict[str, Any]] = list(words)
    if environment == "webshop":
        for place, word in enumerate(words):
            if word.startswith(key):
                in_full[place] = asdict(WebShopConfig()) | json.loads(word.removeprefix(key))
    return in_full


def play(run: Run, folder: Path) -> dict[str, Any]:
    """Train and evaluate. Raises SystemExit where a command failed."""
    target = folder / run.name
    shutil.rmtree(target, ignore_errors=True)  # of a run that was interrupted: its clock would begin anew
    _call("train", *run.words(), f"run.name=schedule-{os.getpid()}", f"run.dir={target}")
    task = TASKS[run.task]
    evaluation = json.loads(
        _call(
            *("evaluate", "--json", *task.words, f"model.path={target / 'policy'}"),
            *(f"env.args.{key}={value}" for key, value in task.args.items()),
            *("evaluation.unseen_seed=null", f"evaluation.num_tasks={task.num_tasks}", "evaluation.num_examples=0"),
        )
    )
    lines = (target / "tensorboard" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    shutil.rmtree(target)
    ours = next(r for r in evaluation if r["label"] == str(target / "policy"))
    return {
        "settings": asdict(run) | {"overrides": run.words()},
        "minutes": task.minutes,
        "updates": len(steps),
        "curve": curve(steps, 60 * task.minutes),
        "learner_idle": idle_share(steps),
        "actor_idle": idle_share(steps, "actor/idle_share"),
        "staleness": mean_of(steps, "staleness/mean"),
        "score": ours["score"],
        "success": ours["success"],
    }


def curve(steps: Sequence[dict[str, float]], seconds: float) -> list[tuple[float, int, float, float]]:
    """(seconds, update, score, success) of the training episodes: means over the steps of each stretch of a run.

    Args:
        steps: metrics of the updates.
        seconds: length of the run; a step that ends later belongs to the last stretch.
    """
    stretches: dict[int, list[dict[str, float]]] = {}
    for step in steps:
        if "rollout/score" in step:  # else no episode has arrived since the step before
            index = int(NUM_POINTS * step["progress/seconds"] / seconds)
            stretches.setdefault(min(index, NUM_POINTS - 1), []).append(step)
    return [
        (
            mean_of(inside, "progress/seconds"),
            int(inside[-1]["step"]),
            mean_of(inside, "rollout/score"),
            mean_of(inside, "rollout/success_rate"),
        )
        for _, inside in sorted(stretches.items())
    ]


def mean_of(steps: Sequence[dict[str, float]], name: str) -> float:
    """Mean of a metric over the steps that have it."""
    return float(np.mean([step[name] for step in steps if name in step]))


def idle_share(steps: Sequence[dict[str, float]], name: str = "time/idle_share") -> float:
    """Share of the run's time in which the learner, or by "actor/idle_share" the engines, had nothing to compute; the
    first step is left out: engines start."""
    known = [step for step in steps[1:] if name in step]
    seconds = sum(step["time/step_s"] for step in known)
    return sum(step[name] * step["time/step_s"] for step in known) / seconds if seconds else math.nan


Pairs = list[tuple[dict[str, Any], dict[str, Any]]]


def paired(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str, str], Pairs]:
    """By (task, speed, arm, arm that it is compared with): its runs with those of the same seed of the other."""
    arms = reporting.group_by(results, "task", "speed", "arm")
    found = {}
    for (task, speed, arm), runs in arms.items():
        for other in TASKS[task].arms[arm].against:
            of_seed = {run["settings"]["seed"]: run for run in arms.get((task, speed, other), [])}
            pairs = [(run, of_seed[run["settings"]["seed"]]) for run in runs if run["settings"]["seed"] in of_seed]
            if pairs:
                found[task, speed, arm, other] = pairs
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each arm: means over seeds."""
    header = ["task", "environment", "arm", "seeds", "updates", "age", "learner waits", "actor waits", "test score",
              "success"]  # fmt: skip
    rows = []
    for (task, speed, arm), runs in reporting.group_by(results, "task", "speed", "arm").items():
        rows.append([
            task, speed, arm, str(len(runs)), f"{np.mean([r['updates'] for r in runs]):.0f}",
            f"{np.mean([r['staleness'] for r in runs]):.1f}", f"{np.mean([r['learner_idle'] for r in runs]):.0%}",
            f"{np.mean([r['actor_idle'] for r in runs]):.0%}", reporting.with_interval([r["score"] for r in runs]),
            f"{np.mean([r['success'] for r in runs]):.1%}",
        ])  # fmt: skip
    return reporting.table(header, rows)


def gain_table(results: Sequence[dict[str, Any]]) -> str:
    """Differences of two arms on the test tasks after the same time, paired by seed; Student's 95 % intervals."""
    rows = []
    for (task, speed, arm, other), pairs in paired(results).items():
        gains = []
        for name in ("score", "success"):
            values = [ours[name] - theirs[name] for ours, theirs in pairs]
            middle, half = reporting.mean_and_half_width(values)
            gains.append(
                f"{middle:+.3f}" + (f" [{middle - half:+.3f}, {middle + half:+.3f}]" if len(pairs) > 1 else "")
            )
        rows.append([task, speed, arm, other, str(len(pairs)), *gains])
    return reporting.table(["task", "environment", "arm", "less", "pairs", "test score", "success"], rows)


def seconds_to(level: float, points: Sequence[tuple[float, float]]) -> float:
    """Time at which a curve of (seconds, score) reaches a score, in a straight line between two points; infinite where
    it never does."""
    before = None
    for seconds, score in points:
        if score >= level:
            if before is None or score == before[1]:
                return seconds
            return before[0] + (level - before[1]) / (score - before[1]) * (seconds - before[0])
        before = (seconds, score)
    return math.inf


def by_policy(run: dict[str, Any], column: int) -> list[tuple[float, float]]:
    """(seconds, value): points of a run's curve, each at the time when the policy that it is of was published.

    A step's metrics are written at its end; the episodes were played by a policy of (age + 1) updates before, which is
    seconds where updates are many, and a minute where each waits for five batches. Means of the run stand for both.
    """
    delay = (run["staleness"] + 1) * 60 * run["minutes"] / run["updates"]
    return [(max(point[0] - delay, 0.0), point[column]) for point in run["curve"]]


def running_means(run: dict[str, Any], column: int) -> list[tuple[float, float]]:
    """(seconds, value) of a run at the end of each stretch: the mean of the points of the last `WINDOW` stretches.

    Arms that are compared are so looked at in the same instants and over equally long times, however many updates
    they make: more points, or noisier ones, would reach any level sooner. A stretch without an update has no point.
    """
    stretch = 60 * run["minutes"] / NUM_POINTS
    values: dict[int, list[float]] = {}
    for seconds, value in by_policy(run, column):
        values.setdefault(min(int(seconds / stretch), NUM_POINTS - 1), []).append(value)
    means = []
    for last in range(WINDOW - 1, NUM_POINTS):
        inside = [np.mean(values[index]) for index in range(last - WINDOW + 1, last + 1) if index in values]
        if inside:
            means.append(((last + 1) * stretch, float(np.mean(inside))))
    return means


def end_of(run: dict[str, Any], column: int) -> float:
    """Mean over the last quarter of a run's time."""
    points = by_policy(run, column)
    begin = 0.75 * 60 * run["minutes"]
    return float(np.mean([value for seconds, value in points if seconds >= begin] or [points[-1][1]]))


def speed_table(results: Sequence[dict[str, Any]], column: int = SCORE) -> str:
    """How long an arm takes to a level of the arm that it is compared with, and how long that took.

    The level of a seed is `GAIN` of the way from where that arm starts, in the mean over seeds, to where it ends: the
    mean of its last quarter, since the highest of many noisy points is reached late, or never, by an arm that is as
    fast. An arm that gains less than `SMALLEST_GAIN` in a seed has no level there, nor one whose running means do not
    reach its own level.

    Args:
        column: of a curve's points.
    """
    rows = []
    for (task, speed, arm, other), pairs in paired(results).items():
        start = float(np.mean([theirs["curve"][0][column] for _, theirs in pairs]))
        times, levels = [], []
        for ours, theirs in pairs:
            if (gain := end_of(theirs, column) - start) >= SMALLEST_GAIN:
                level = start + GAIN * gain
                before, own = (seconds_to(level, running_means(run, column)) for run in (theirs, ours))
                if before < math.inf:
                    times.append([before, own])
                    levels.append(level)
        ratios = [before / own for before, own in times]
        rows.append([
            task, speed, arm, other, f"{len(times)} of {len(pairs)}",
            *(
                [
                    f"{np.median(levels):.3f} ({min(levels):.3f} to {max(levels):.3f})",
                    *(f"{np.median(each):.0f} s" for each in zip(*times, strict=True)),
                    f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    str(sum(own == math.inf for _, own in times)),
                ]
                if times
                else ["", "", "", "", ""]
            ),
        ])  # fmt: skip
    header = ["task", "environment", "arm", "compared with", "has learned", "level", "which takes",
              "this takes", "ratio: median (all seeds)", "never"]  # fmt: skip
    return reporting.table(header, rows)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Score of the training episodes by minutes: a panel for each environment, a colour for each arm, a line a run; one
    scale for all."""
    panels = reporting.group_by(results, "task", "speed")
    size = (4.2 * len(panels), 3.5)
    figure, axes = reporting.pyplot().subplots(1, len(panels), figsize=size, squeeze=False, sharey=True)
    for axis, ((task, speed), runs) in zip(axes[0], panels.items(), strict=True):
        for colour, ((arm,), of_arm) in enumerate(reporting.group_by(runs, "arm").items()):
            for number, run in enumerate(of_arm):
                seconds, scores = zip(*by_policy(run, SCORE), strict=True)
                name = "" if number else re.sub(r"^η = \d", r"asynchronous (\g<0>)", arm)
                axis.plot([at / 60 for at in seconds], scores, color=f"C{colour}", alpha=0.7, linewidth=1.2, label=name)
        axis.set_title(f"{task}, {speed} environment", fontsize=10)
        axis.set_xlabel("minutes of training when the policy was published")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("score of the training episodes")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})  # the same data give the same bytes


def plot_by_age(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Test score by the age of the data: a colour for each correction, a dot for each run, a line through the means."""
    figure, axis = reporting.pyplot().subplots(figsize=(5.5, 3.8))
    corrections: dict[str, list[list[dict[str, Any]]]] = {}
    for (arm,), runs in reporting.group_by(results, "arm").items():
        corrections.setdefault(arm.rsplit(", ", 1)[0], []).append(runs)
    for number, (name, arms) in enumerate(corrections.items()):
        line, marker = reporting.style(number), reporting.marker(number)
        means = [(mean_of(runs, "staleness"), mean_of(runs, "score")) for runs in arms]
        axis.plot(*zip(*means, strict=True), marker=marker, label=name, **line)
        dots = [(run["staleness"], run["score"]) for runs in arms for run in runs]
        axis.scatter(*zip(*dots, strict=True), color=line["color"], marker=marker, alpha=0.5, s=25)
    axis.set_xlabel("versions between playing and learning, mean of the run")
    axis.set_ylabel("score of 500 test goals, greedy")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _call(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "impala_llm.cli", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        raise SystemExit(f"impala-llm {words[0]} ended with code {done.returncode}; the same command goes on")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, action="append", help="all, where none is named")
    parser.add_argument("--arm", action="append", help="all, where none is named")
    parser.add_argument("--seeds", type=int, help="the first so many of each task; default: all")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "schedule", help="folder of finished runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--report", action="store_true", help="run nothing that trains")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of data and plots")
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least 1 is needed")
    if unknown := {*(arguments.arm or ())} - {arm for task in TASKS.values() for arm in task.arms}:
        parser.error(f"--arm {min(unknown)!r} is not known: the arms stand in TASKS in {Path(__file__).name}")
    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.runs.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = arguments.out / "runs.jsonl"
    kept = [json.loads(line) for line in data.read_text().splitlines()] if data.exists() else []
    kept += [json.loads(path.read_text()) for path in sorted(arguments.runs.glob("*.json"))]
    results = {run: result for result in kept if (run := run_of(result)) is not None}
    if strange := sum(run_of(result) is None for result in kept):
        raise SystemExit(
            f"{strange} runs in {data} or {arguments.runs} have other settings than this program's: move them away, or "
            "name other folders with --runs and --out"
        )
    if not arguments.report:
        wanted = planned(arguments.task or list(TASKS), arguments.seeds)
        missing = [run for run in wanted if run not in results and run.arm in (arguments.arm or [run.arm])]
        for number, run in enumerate(missing):
            if time.monotonic() > deadline:
                print(f"time is up, {len(missing) - number} runs are left: the same command goes on")
                break
            print(f"{number + 1} of {len(missing)}: {run.name}", flush=True)
            results[run] = play(run, arguments.runs)
            aside = arguments.runs / f"{run.name}.part"
            aside.write_text(json.dumps(results[run]))
            aside.rename(arguments.runs / f"{run.name}.json")
    found = [results[run] for run in planned(list(TASKS)) if run in results]
    if found:
        reporting.write_lines(data, found)
        found = [json.loads(line) for line in data.read_text().splitlines()]  # as they were written: six digits
        by_age = [result for result in found if result["settings"]["task"] == "versions"]
        if len(by_age) < len(found):
            plot([result for result in found if result not in by_age], arguments.out / "curves.svg")
        if by_age:
            plot_by_age(by_age, arguments.out / "versions.svg")
        tables = [table(found), gain_table(found), speed_table(found), speed_table(found, SUCCESS)]
        print("\n" + "\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
