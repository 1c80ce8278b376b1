"""Environments of one turn: a question, an answer, a score."""

import inspect
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

from impala_llm.envs.base import Split
from impala_llm.envs.scoring_process import ScorerNotStarted
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_warnings = RateLimitedWarnings(interval_s=30.0)
_ROUNDING = 1e-6  # scores that differ from 0 or 1 by less are those, but for the rounding of a sum

Result = tuple[str, float, bool, bool, dict[str, Any]]


class SingleTurnSession:
    """An episode that ends with its first answer.

    Args:
        begin: returns the question of a task id, and the task as `score` wants it.
        score: of an answer to a task, 0 to 1; it may be a coroutine function. What is below or above counts as 0 or 1.
            Where it raises, or is no number, the answer scores 0 and `scoring_errors` is counted: an answer that
            nobody has thought of must not end the run. The reason is logged now and then. `ScorerNotStarted` passes:
            no answer could have a score.
        reference: returns a right answer to a task, None where none is known. It is `info["reference"]` of `reset`, for
            `ReferenceScript`.
        warnings: log the reasons; by default those of all sessions of this process, together.
    """

    def __init__(
        self,
        begin: Callable[[int], tuple[str, Any]],
        score: Callable[[str, Any], float | Awaitable[float]],
        reference: Callable[[Any], str | None] = lambda task: None,
        warnings: RateLimitedWarnings = _warnings,
    ) -> None:
        self._begin, self._score, self._reference, self._warnings = begin, score, reference, warnings
        self._task: Any = None

    def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        question, self._task = self._begin(task_id)
        return question, {"reference": self._reference(self._task)}

    async def step(self, action: str) -> Result:
        stats = {"scoring_errors": 0.0}
        try:
            found = self._score(action, self._task)
            score = float(await found if inspect.isawaitable(found) else found)
            if math.isnan(score):
                raise ValueError("the score is not a number")
        except ScorerNotStarted:
            raise
        except Exception as error:  # a scorer is other people's code, and reads what a policy writes
            self._warnings.log("an answer cannot be scored, and scores 0", f"{type(error).__name__}: {error}"[:300])
            score, stats["scoring_errors"] = 0.0, 1.0
        if not -_ROUNDING <= score <= 1 + _ROUNDING:
            self._warnings.log(
                "a score outside of 0 to 1 counts as the nearer of them", f"{score:g}: let the verifier return 0 to 1"
            )
        score = 0.0 if score <= _ROUNDING else 1.0 if score >= 1 - _ROUNDING else score
        return "", score, True, False, {"score": score, "success": score == 1.0, "stats": stats}


class ReferenceScript:
    """Gives `info["reference"]`, the right answer or action; with noise, so large a share of them is another one.

    Args:
        other: returns another answer or action, which the generator draws, for the `info` of a step.
    """

    def __init__(self, noise: float, seed: int, other: Callable[[random.Random, dict[str, Any]], str | None]) -> None:
        self._noise, self._rng, self._other = noise, random.Random(seed), other

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """Raises ValueError where the task has no reference answer."""
        answer = self._other(self._rng, info) if self._rng.random() < self._noise else info["reference"]
        if answer is None:
            raise ValueError(
                "demonstrations.player=script: a task of this environment has no reference answer: set "
                "demonstrations.player=policy or person"
            )
        return str(answer)


def split_sizes(num_train: int, num_validation: int, num_test: int) -> dict[Split, range]:
    """Return the task ids of splits that follow each other."""
    return {
        "train": range(num_train),
        "validation": range(num_train, num_train + num_validation),
        "test": range(num_train + num_validation, num_train + num_validation + num_test),
    }


def check_task(task_id: int, splits: dict[Split, range]) -> None:
    """Raise ValueError unless a split has the task."""
    if not any(task_id in tasks for tasks in splits.values()):
        raise ValueError(f"task_id is {task_id}: this suite has the tasks 0 to {splits['test'][-1]}")
