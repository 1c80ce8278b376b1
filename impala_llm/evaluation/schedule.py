"""Evaluations inside of a run: when one is due, what it found, which version is the best, when the run should end.

evaluation/in_run.py has them played.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from impala_llm.observability.intervals import score_interval, wilson_interval
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation
from impala_llm.settings import EvaluationConfig

LEAST_SHARE = 0.95
"""Share of the tasks whose results must have come for an evaluation to be compared with others. The missing ones are
the slow tasks, mostly unsolved: without them a score is too high."""


class Best(NamedTuple):
    """The best evaluation so far of those whose policy was kept."""

    version: int
    score: float
    update: int
    """Update of the run that made the version."""


@dataclass(frozen=True)
class Found:
    """Result of an evaluation.

    Attributes:
        metrics: by name.
        text: a sentence for the user.
        is_best: its score is higher than that of `EvaluationSchedule.best`.
    """

    metrics: dict[str, float]
    text: str
    is_best: bool


class EvaluationSchedule:
    """Decides when an evaluation is due, which one was the best, and when the run should end. No I/O, and no clock.

    Args:
        config: of evaluations.
        update: of the run, that the learner begins after. 0: the first evaluation is due at once.
        learns_after: update of the run up to which the value head alone learns. Evaluations that are begun before it
            are of the same weights, and patience does not count them.
    """

    def __init__(self, config: EvaluationConfig, update: int, learns_after: int = 0) -> None:
        self._config, self._learns_after = config, learns_after
        # Not of a version: after a lost host versions are ahead.
        self._last_update = None if update == 0 else update
        self._observed: int | None = None
        """Update of the last evaluation that has ended."""
        # Not known to a learner that goes on without a checkpoint.
        self._last_s: float | None = 0.0 if update == 0 else None
        self.best: Best | None = None
        self.highest: Best | None = None
        """The evaluation that patience counts from: the best one, or a better one whose policy could not be kept."""
        self._without_gain = 0

    def is_due(self, update: int, elapsed_s: float) -> bool:
        """Return whether to begin one. elapsed_s: seconds of training so far."""
        if self._last_update is None:
            return True
        if self._last_s is None:
            self._last_s = elapsed_s
        updates, minutes = self._config.every_updates, self._config.every_minutes
        return (updates is not None and update - self._last_update >= updates) or (
            minutes is not None and elapsed_s - self._last_s >= 60 * minutes
        )

    def is_new(self, update: int) -> bool:
        """Return whether the last evaluation that has ended was begun after another update."""
        return update != self._observed

    def begun(self, update: int, elapsed_s: float) -> None:
        """Note that an evaluation was begun."""
        self._last_update, self._last_s = update, elapsed_s

    def observe(self, evaluation: Evaluation, version: int, update: int) -> Found:
        """Take in an evaluation that has ended.

        Args:
            version: the learner's, which no weights are newer than.
            update: of the run, that made it.
        """
        results, first = evaluation.results, evaluation.version
        ahead = version - update
        self._observed = first - ahead
        num_came = len(results)
        came = f"{num_came} of {evaluation.num_tasks} validation tasks"
        metrics = {
            "evaluation/episodes": float(num_came),
            "evaluation/version": float(first),
            "evaluation/update": float(first - ahead),
        }
        if not results:
            return Found(metrics, f"evaluation of update {first - ahead}: no result came, {came} were played", False)
        score, success = (float(np.mean([getattr(r, name) for r in results])) for name in ("score", "success"))
        score_low, score_high = score_interval([r.score for r in results])
        success_low, success_high = wilson_interval(sum(r.success for r in results), num_came)
        last = max(first, min(version, max(r.last_version for r in results)))
        counts = num_came >= LEAST_SHARE * evaluation.num_tasks
        is_best = counts and (self.best is None or score > self.best.score)
        if is_best:
            self.best = Best(first, score, first - ahead)
        if is_best and (self.highest is None or score > self.highest.score):
            self.highest, self._without_gain = self.best, 0
        elif counts and first - ahead > self._learns_after:
            self._without_gain += 1
        metrics |= {
            "evaluation/score": score,
            "evaluation/score_low": score_low,
            "evaluation/score_high": score_high,
            "evaluation/success_rate": success,
            "evaluation/success_low": success_low,
            "evaluation/success_high": success_high,
            "evaluation/turns": float(np.mean([r.num_turns for r in results])),
            "evaluation/length_tokens": float(np.mean([r.num_tokens for r in results])),
            "evaluation/last_version": float(last),
            "evaluation/seconds": evaluation.seconds,
            "evaluation/without_gain": float(self._without_gain),
        }
        if self.best is not None:
            metrics |= {
                "evaluation/best_version": float(self.best.version),
                "evaluation/best_update": float(self.best.update),
                "evaluation/best_score": self.best.score,
            }
        played = "" if last == first else f" (played by {first - ahead} to {last - ahead})"
        temperature = self._config.run_temperature
        how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        text = (
            f"evaluation of update {first - ahead}{played}: "
            f"score {score:.3f} [{score_low:.3f}, {score_high:.3f}], success {success:.1%} "
            f"[{success_low:.1%}, {success_high:.1%}], {came}, {how}; {self._verdict(counts, is_best)}"
        )
        return Found(metrics, text, is_best)

    def _verdict(self, counts: bool, is_best: bool) -> str:
        """Words on an evaluation beside the others. counts: whether it may be compared with them."""
        if not counts:
            return f"too few to be compared with others: fewer than {LEAST_SHARE:.0%}"
        if is_best or self.best is None:
            return "the best so far"
        return f"the best is that of update {self.best.update} with {self.best.score:.3f}"

    @property
    def is_over(self) -> bool:
        """Whether the run should end: so many evaluations in a row were no better than the best one."""
        patience = self._config.patience
        return patience is not None and self._without_gain >= patience

    def take_over(self, found: Best) -> None:
        """Take over an evaluation that another learner of this run has made, if it is the best."""
        if self.best is None or found.score > self.best.score:
            self.best = found
        if self.highest is None or found.score > self.highest.score:
            self.highest, self._without_gain = found, 0

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers and lists."""
        best, highest = (None if found is None else list(found) for found in (self.best, self.highest))
        last = [self._last_update, self._last_s]
        return {
            "last": last,
            "observed": self._observed,
            "best": best,
            "highest": highest,
            "without_gain": self._without_gain,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._last_update, self._last_s = state["last"]
        self._observed = state["observed"]
        self.best, self.highest = (
            None if found is None else Best(*found) for found in (state["best"], state["highest"])
        )
        self._without_gain = state["without_gain"]
