"""Evaluations inside of a run: when one is due, what it found, which version is the best.

Actors play the tasks with the published weights (`Receiver.begin_evaluation`), and training goes on meanwhile. Their
weights change while they play, so a score belongs to a span of versions: from the one that the evaluation was begun
with to the newest that sampled a token. The policy that is kept as the best one is that of the first of them. The user
is told updates of the run: versions are ahead of them after a lost host.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from impala_llm.learning.parallel import Ranks
from impala_llm.learning.policy_folders import replace_folder
from impala_llm.observability.intervals import score_interval, wilson_interval
from impala_llm.observability.metrics import MetricLog
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.settings import EvaluationConfig
from impala_llm.supervised import say

POLL_S = 0.1
DEAL_GRACE_S = 10.0
"""Seconds in which an actor is expected to have the first task of an evaluation that is awaited, and in which one is
expected to be there again."""
LEAST_SHARE = 0.95
"""Share of the tasks whose results must have come for an evaluation to be compared with others. The missing ones are
the slow tasks, mostly unsolved: without them a score is too high."""
BEST, CANDIDATE = "policy-best", "policy-candidate"
"""Folders of the policy with the best score, and of the one that is being evaluated, in the run's folder."""
_SCORE_FILE = "evaluation.json"


class Best(NamedTuple):
    """The best evaluation so far."""

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
        is_best: its score is higher than all before.
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
        self._update = update
        self._last_update = None if update == 0 else update
        # Not known to a learner that goes on without a checkpoint.
        self._last_s: float | None = 0.0 if update == 0 else None
        self.best: Best | None = None
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
        """Return whether no evaluation was begun after this update."""
        return update != self._last_update

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
            self.best, self._without_gain = Best(first, score, first - ahead), 0
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
            metrics |= {f"evaluation/best_{name}": float(value) for name, value in self.best._asdict().items()}
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
            self.best, self._without_gain = found, 0

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers and lists."""
        best = None if self.best is None else list(self.best)
        return {"last": [self._last_update, self._last_s], "best": best, "without_gain": self._without_gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        last, self._last_s = state["last"]
        # Checkpoints of before evaluations were due by updates have a version there, which may be ahead.
        self._last_update = None if last is None else min(last, self._update)
        # Those of before have no update: it was the version, unless a host had been lost.
        self.best = None if state["best"] is None else Best(*[*state["best"], state["best"][0]][:3])
        self._without_gain = state["without_gain"]


class InRunEvaluation:
    """Evaluations of a run. For the thread of learner rank 0.

    Args:
        config: of evaluations.
        receiver: that has actors play.
        tasks: ids of the validation tasks, of which the first ones are played.
        run_folder: the best policy is kept there. Where one lies there already, of an earlier learner of this run,
            only a better one takes its place.
        update, learns_after: see `EvaluationSchedule`.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        receiver: Receiver,
        tasks: Sequence[int],
        run_folder: Path,
        update: int,
        learns_after: int = 0,
    ) -> None:
        self._config = config
        self._receiver = receiver
        self._tasks = tasks[: config.run_tasks]
        self._of = [len(self._tasks), config.run_temperature]
        """What makes two evaluations comparable."""
        self.candidate = run_folder / CANDIDATE
        """Folder for the policy that is being evaluated."""
        self._best = run_folder / BEST
        self.schedule = EvaluationSchedule(config, update, learns_after)
        self._is_told = False
        if update > 0:
            self._compare_with_kept()

    @property
    def is_over(self) -> bool:
        """Whether the run should end early."""
        return self.schedule.is_over

    @property
    def is_under_way(self) -> bool:
        """Whether results are waited for."""
        return self._receiver.is_evaluating

    @property
    def has_actors(self) -> bool:
        """Whether there is an actor to play tasks."""
        return self._receiver.num_actors > 0

    def begin(self, version: int, update: int, elapsed_s: float, at_the_end: bool = False) -> bool:
        """Begin an evaluation of the learner's version, if it is due and was published, and none is under way.

        Args:
            update: of the run, that made the version.
            elapsed_s: seconds of training so far.
            at_the_end: it is due unless this version was the last one to be evaluated.

        Returns:
            Whether it was begun: the policy must then be saved as the candidate.
        """
        is_due = self.schedule.is_new(update) if at_the_end else self.schedule.is_due(update, elapsed_s)
        if not is_due or self.is_over or self.is_under_way or self._receiver.published != version:
            return False
        self._receiver.begin_evaluation(self._tasks, self._config.run_temperature, self._config.run_timeout_s)
        self.schedule.begun(update, elapsed_s)
        shutil.rmtree(self.candidate, ignore_errors=True)
        return True

    def collect(self, version: int, update: int) -> dict[str, float]:
        """Take in the evaluation that has ended, say what it found, and keep the policy if it is the best one.

        Args:
            version: the learner's.
            update: of the run, that made it.

        Returns:
            Metrics by name; none where none has ended.
        """
        ended = self._receiver.evaluation()
        if ended is None:
            return {}
        former, found = self.schedule.best, self.schedule.observe(ended, version, update)
        metrics = found.metrics
        say(f"learner: {found.text}")
        if found.is_best and not self._keep(metrics):
            self.schedule.best = former  # what comes next need only be better than the policy that is there
            metrics = {name: value for name, value in metrics.items() if not name.startswith("evaluation/best_")}
        if self.is_over and self.schedule.best is not None:
            say(
                f"learner: the run ends early, by evaluation.patience={self._config.patience}: no evaluation since "
                f"that of update {self.schedule.best.update} was better"
            )
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers and lists."""
        return {**self.schedule.state_dict(), "of": self._of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A better policy that was found since, and kept, remains the best one."""
        if not self._is_comparable(state):  # patience counts anew as well
            state = {**state, "best": None, "without_gain": 0}
        self.schedule.load_state_dict(state)
        self._compare_with_kept()

    def _is_comparable(self, state: Mapping[str, Any]) -> bool:
        """Whether earlier evaluations were of these tasks and this temperature. Earlier releases did not note them."""
        return list(state.get("of", self._of)) == self._of

    def close(self) -> None:
        """Remove the policy whose evaluation has not ended."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def _compare_with_kept(self) -> None:
        """Take over the score of the policy that is kept as the best one, if it is higher than what is known."""
        with suppress(OSError, ValueError, KeyError):
            kept = json.loads((self._best / _SCORE_FILE).read_text())
            version, score = int(kept["evaluation/version"]), float(kept["evaluation/score"])
            found = Best(version, score, int(kept.get("evaluation/update", version)))
            if self._is_comparable(kept):
                self.schedule.take_over(found)
            elif not self._is_told:
                self._is_told = True
                say(
                    f"learner: {self._best} is of other evaluation.run_tasks or evaluation.run_temperature: no later "
                    "evaluation is compared with it, and the best of them takes its place"
                )

    def _keep(self, metrics: dict[str, float]) -> bool:
        """Keep the candidate as the best policy. Returns whether it is kept."""
        if not self.candidate.is_dir():  # it could not be saved, which was said
            return False
        try:
            (self.candidate / _SCORE_FILE).write_text(json.dumps({**metrics, "of": self._of}, indent=1) + "\n")
            replace_folder(self.candidate, self._best)
        except OSError as error:
            say(f"learner: the best policy cannot be kept in {self._best}: {error}")
            return False
        return True


class EvaluationRounds:
    """Evaluations of a run, in step on all ranks of the learner: all of them call each method.

    Args:
        config: of evaluations.
        ranks: of the learner.
        evaluation: of rank 0; None on the others, and where there are none inside of the run.
        log: takes the metrics.
        save: saves the policy in a folder, called on all ranks; the one that rank 0 names counts.
        mark_best: called on rank 0 with version and score of an evaluation that is the best so far.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        ranks: Ranks,
        evaluation: InRunEvaluation | None,
        log: MetricLog,
        save: Callable[[Path], object],
        mark_best: Callable[[int, float], object],
    ) -> None:
        self._config, self._ranks, self._evaluation, self._log = config, ranks, evaluation, log
        self._save, self._mark_best = save, mark_best

    def turn(self, version: int, update: int, elapsed_s: float, at_the_end: bool = False) -> bool:
        """Take in an evaluation that has ended, and begin one that is due.

        Args:
            version: the learner's.
            update: of the run, that made it.
            elapsed_s: seconds of training so far.
            at_the_end: one is due unless this version was evaluated.

        Returns:
            Whether the run should end early.
        """
        if not self._config.inside_run:
            return False
        begins = is_over = False
        if self._evaluation is not None:
            self._collect(self._evaluation, version, update)
            begins = self._evaluation.begin(version, update, elapsed_s, at_the_end)
            is_over = self._evaluation.is_over
        begins, is_over = (n > 0 for n in self._ranks.sum([float(begins), float(is_over)]))
        if begins:
            self._save(Path(CANDIDATE) if self._evaluation is None else self._evaluation.candidate)
        return is_over

    def finish(
        self,
        version: int,
        update: int,
        elapsed_s: float,
        is_told_to_stop: Callable[[], bool],
        publish: Callable[[], object],
        write: Callable[[], object],
    ) -> bool:
        """Wait for the evaluation that is under way, and then for one of the last version.

        Args:
            version: the learner's.
            update: of the run, that made it.
            is_told_to_stop: whether this process is; one that is ends the wait of all.
            publish: called on all ranks before the last one begins: publishes the version, if it was not due.
            write: called after each evaluation: writes what the log has.

        Returns:
            Whether a process was told to stop: all ranks then return at the same place.
        """
        if not self._config.inside_run:
            return False
        goes_on, is_stopped = self._await(version, update, is_told_to_stop)
        write()
        if goes_on:
            publish()
            self.turn(version, update, elapsed_s, at_the_end=True)
            _, is_stopped = self._await(version, update, is_told_to_stop)
            write()
        return is_stopped

    def _await(self, version: int, update: int, is_told_to_stop: Callable[[], bool]) -> tuple[bool, bool]:
        """Wait until no evaluation is under way, for as long as one may take and an actor is there.

        Returns:
            Whether none is under way and no process was told to stop; whether one was. The same on all ranks.
        """
        # Its own time begins when an actor has the first task, if any comes for one.
        now = time.monotonic()
        until, leaves_at = now + self._config.run_timeout_s + DEAL_GRACE_S, now + DEAL_GRACE_S
        is_said = is_under_way = is_awaited = False
        while True:
            if self._evaluation is not None:
                self._collect(self._evaluation, version, update)
                now = time.monotonic()
                if self._evaluation.has_actors:
                    leaves_at = now + DEAL_GRACE_S  # one that was lost may be started again
                is_under_way = self._evaluation.is_under_way
                is_awaited = is_under_way and now < min(until, leaves_at)
            mine = is_told_to_stop(), is_under_way, is_awaited
            told, under_way, awaited = self._ranks.sum(mine, of_processes=True)
            if told or not awaited:
                if is_under_way and not told:
                    say("learner: the evaluation that is under way has too few actors to end: the run ends without it")
                return not told and not under_way, told > 0
            if is_awaited and not is_said:
                is_said = True
                say("learner: training is over, and an evaluation is under way: Ctrl-C ends without it")
            time.sleep(POLL_S)

    def _collect(self, evaluation: InRunEvaluation, version: int, update: int) -> None:
        """Take in the evaluation that has ended, if one has."""
        before = evaluation.schedule.best
        self._log.update(evaluation.collect(version, update))
        if (best := evaluation.schedule.best) is not None and best != before:
            self._mark_best(best.version, best.score)
