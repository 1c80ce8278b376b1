"""Time of a run: for how long it has trained, over all of its processes, and which share of it is over."""

import math
import time

from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.settings import LearnerConfig


class TrainingTime:
    """Clock of a run, which counts from its first batch: how long engines take to come up is not the learner's.

    Args:
        config: of the learner.
        run_dir: of the run, which keeps the time for a learner that is started again.
        before_s: seconds for which the run has trained, by the checkpoint that it continues from.
    """

    def __init__(self, config: LearnerConfig, ranks: Ranks, run_dir: RunDirectory, before_s: float) -> None:
        self._config, self._ranks, self._run_dir = config, ranks, run_dir
        self._before_s = max(before_s, run_dir.used_s)
        self._began_at = math.inf

    def begin(self) -> None:
        """Begin to count at the first batch; later calls do nothing. All ranks call it, and count by rank 0's clock."""
        if math.isinf(self._began_at):
            began_at = self._run_dir.began_at(self._before_s) if self._ranks.is_main else 0.0
            self._began_at = self._ranks.sum([began_at])[0]

    @property
    def elapsed_s(self) -> float:
        """Seconds for which the run has trained."""
        return self._before_s if math.isinf(self._began_at) else time.monotonic() - self._began_at

    @property
    def ends_at(self) -> float:
        """When `learner.max_minutes` are over, in seconds of `time.monotonic`; infinite before the first batch."""
        minutes = self._config.max_minutes
        return math.inf if minutes is None else self._began_at + 60 * minutes

    def note(self, elapsed_s: float) -> None:
        """Keep the time for a learner that is started again. On rank 0."""
        self._run_dir.note_used(elapsed_s)


def share_done(config: LearnerConfig, update: int, elapsed_s: float) -> float:
    """Return the share of a run that is over, by updates or by time, whichever is further, at most 1.

    Args:
        config: of the learner.
        update: updates that the run has made.
        elapsed_s: see `TrainingTime`.
    """
    share = update / config.total_updates
    if config.max_minutes is not None:
        share = max(share, elapsed_s / 60 / config.max_minutes)
    return min(1.0, share)
