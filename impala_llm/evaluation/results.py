"""Results of policies on a set of tasks, and how one differs from another on the same tasks."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from impala_llm.observability.intervals import change_interval, score_interval, wilson_interval

NEGLIGIBLE = 0.01
"""Difference of scores, which lie in [0, 1], below which policies count as equally good, however sure it is."""
FEWEST_TASKS = 6
"""Least number of tasks for a verdict: with equally good policies all of five tasks rise, or all fall, in 6 % of
cases."""


@dataclass(frozen=True)
class Result:
    """Outcome of a policy on a set of tasks."""

    label: str
    """Name of the policy: before | after | its model.path | name of a baseline."""
    tasks: str
    """Name of the tasks: environment, catalogue, goals, split."""
    num_tasks: int
    score: float
    score_interval: tuple[float, float]
    """See `score_interval`."""
    success: float
    success_interval: tuple[float, float]
    """Wilson's interval of a proportion."""
    turns: float
    tokens: float | None
    """Mean tokens of an episode, observations included; None for a script, which reads none."""
    scores: tuple[float, ...]
    """Score of each task, in order."""
    successes: tuple[int, ...]
    """1 for each task that succeeded, else 0, in the same order."""
    task_ids: tuple[int, ...]
    """Id of each task, in the same order."""


def result_of(
    label: str,
    tasks_label: str,
    tasks: Sequence[int],
    scores: Sequence[float],
    successes: Sequence[bool],
    turns: float,
    tokens: float | None,
) -> Result:
    """Sum up the tasks that a policy has played; turns and tokens are means of an episode."""
    return Result(
        label=label,
        tasks=tasks_label,
        num_tasks=len(scores),
        score=float(np.mean(scores)),
        score_interval=score_interval(scores),
        success=sum(successes) / len(scores),
        success_interval=wilson_interval(sum(successes), len(scores)),
        turns=turns,
        tokens=tokens,
        scores=tuple(scores),
        successes=tuple(map(int, successes)),
        task_ids=tuple(tasks),
    )


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean difference of two policies' values on the same tasks, each compared with itself, and its 95 % interval."""
    return float(np.mean(np.subtract(after, before))), change_interval(before, after)


def difference(before: Result, after: Result) -> str:
    """A sentence on how the second policy differs from the first on the same tasks, each compared with itself.

    A difference whose interval lies within `NEGLIGIBLE` of zero is no progress, even where it is significant.
    """
    mean, (low, high) = change(before.scores, after.scores)
    share, (least, most) = change(before.successes, after.successes)
    if after.num_tasks < FEWEST_TASKS:
        verdict = f"fewer than {FEWEST_TASKS} tasks cannot tell policies apart: raise evaluation.num_tasks"
    elif -NEGLIGIBLE < low <= high < NEGLIGIBLE:
        verdict = f"practically the same, by less than {NEGLIGIBLE}"
    else:
        verdict = "within noise" if low <= 0.0 <= high else "better" if low > 0.0 else "worse"
    return (
        f"{after.tasks}: {after.label} - {before.label} over {after.num_tasks} tasks: "
        f"success {before.success:.3f} to {after.success:.3f}, {share:+.3f} [{least:+.3f}, {most:+.3f}]; "
        f"score {before.score:.3f} to {after.score:.3f}, {mean:+.3f} [{low:+.3f}, {high:+.3f}], {verdict}"
    )


def paired(results: Sequence[Result], before: str, after: str) -> list[tuple[Result, Result]]:
    """The results of two policies, by label, for each set of tasks that both have played."""
    first, second = ({r.tasks: r for r in results if r.label == label} for label in (before, after))
    return [(first[tasks], second[tasks]) for tasks in first]


def results_json(results: Sequence[Result], pairs: Sequence[tuple[Result, Result]] = ()) -> str:
    """The results, and how the second one of each pair differs from the first, as docs/evaluation.md has them."""
    rows = [{**dataclasses.asdict(r), "scores": [round(s, 4) for s in r.scores], "difference": None} for r in results]
    for before, after in pairs:
        found: dict[str, Any] = {"to": before.label}
        found["score"], found["score_interval"] = change(before.scores, after.scores)
        found["success"], found["success_interval"] = change(before.successes, after.successes)
        rows[results.index(after)]["difference"] = found
    return json.dumps(rows)
