"""Evaluations inside of a run: they are begun and collected, and the best policy is kept.

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
from pathlib import Path
from typing import Any

from impala_llm.evaluation.schedule import Best, EvaluationSchedule
from impala_llm.learning.checkpoints.policy_folders import CANDIDATE, SCORE_FILE, replace_folder
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.metrics import MetricLog
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.processes.supervised import say
from impala_llm.settings import EvaluationConfig

POLL_S = 0.1
DEAL_GRACE_S = 10.0
"""Seconds in which an actor is expected to have the first task of an evaluation that is awaited, and in which one is
expected to be there again."""
BEST = "policy-best"
"""Folder of the policy with the best score, in the run's folder."""


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
        self._of = {"run_tasks": len(self._tasks), "run_temperature": config.run_temperature}
        """Settings in which two evaluations must agree to be compared."""
        self.candidate = run_folder / CANDIDATE
        """Folder for the policy that is being evaluated."""
        self._best = run_folder / BEST
        self.schedule = EvaluationSchedule(config, update, learns_after)
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
            at_the_end: it is due unless this version was the last one whose evaluation has ended.

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
        self._say_if_over()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State as plain numbers and lists."""
        return {**self.schedule.state_dict(), **self._of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A better policy that was found since, and kept, remains the best one."""
        kept = self.schedule.best
        if not self._is_comparable(state):  # patience counts anew as well
            state = {**state, "best": None, "highest": None, "without_gain": 0}
        self.schedule.load_state_dict(state)
        if kept is not None:
            self.schedule.take_over(kept)
        self._say_if_over()

    def _is_comparable(self, state: Mapping[str, Any]) -> bool:
        """Whether earlier evaluations were of these tasks and this temperature."""
        return all(state[name] == value for name, value in self._of.items())

    def close(self) -> None:
        """Remove the policy whose evaluation has not ended."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def _say_if_over(self) -> None:
        """Say why the run ends, if patience ends it."""
        if self.is_over and self.schedule.highest is not None:
            say(
                f"learner: the run ends early, by evaluation.patience={self._config.patience}: no evaluation since "
                f"that of update {self.schedule.highest.update} was better"
            )

    def _compare_with_kept(self) -> None:
        """Take over the score of the policy that is kept as the best one, if it is higher than what is known."""
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            kept = json.loads((self._best / SCORE_FILE).read_text())
            version, score = int(kept["evaluation/version"]), float(kept["evaluation/score"])
            found = Best(version, score, int(kept["evaluation/update"]))
            if self._is_comparable(kept):
                self.schedule.take_over(found)
            else:
                say(
                    f"learner: {self._best} is of other evaluation.run_tasks or evaluation.run_temperature: no later "
                    "evaluation is compared with it, and the best of them takes its place"
                )

    def _keep(self, metrics: dict[str, float]) -> bool:
        """Keep the candidate as the best policy. Returns whether it is kept."""
        if not self.candidate.is_dir():  # it could not be saved, which was said
            return False
        try:
            (self.candidate / SCORE_FILE).write_text(json.dumps({**metrics, **self._of}, indent=1) + "\n")
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
        mark_best: called on rank 0 with version and update of the best evaluation so far, also of an earlier learner:
            that one may have died before it was marked.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        ranks: Ranks,
        evaluation: InRunEvaluation | None,
        log: MetricLog,
        save: Callable[[Path], object],
        mark_best: Callable[[int, int], object],
    ) -> None:
        self._config, self._ranks, self._evaluation, self._log = config, ranks, evaluation, log
        self._save, self._mark_best = save, mark_best
        if evaluation is not None and (best := evaluation.schedule.best) is not None:
            mark_best(best.version, best.update)

    @property
    def is_over(self) -> bool:
        """Whether `evaluation.patience` has ended the run; on rank 0, and False on others."""
        return self._evaluation is not None and self._evaluation.is_over

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
            is_told_to_stop: whether this process is; one that is ends the wait of all. It may raise an error.
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
        clock = ActiveClock(monotonic=time.monotonic)  # a process that was stopped has not waited
        until, leaves_at = self._config.run_timeout_s + DEAL_GRACE_S, DEAL_GRACE_S
        is_said = is_under_way = is_awaited = False
        while True:
            is_told = is_told_to_stop()  # first: it may raise, and then nothing is kept
            if self._evaluation is not None:
                self._collect(self._evaluation, version, update)
                now = clock.tick()
                if self._evaluation.has_actors:
                    leaves_at = now + DEAL_GRACE_S  # one that was lost may be started again
                is_under_way = self._evaluation.is_under_way
                is_awaited = is_under_way and now < min(until, leaves_at)
            mine = is_told, is_under_way, is_awaited
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
            self._mark_best(best.version, best.update)
