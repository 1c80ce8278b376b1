"""Time of the learner's step by stage."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from impala_llm.observability.metrics import OVERHEAD, STAGES, MetricError


class StageTimer:
    """Accounts for all of the learner's time: every moment belongs to one stage of `STAGES` or to `unaccounted`.

    Invariant: the shares of stages and of the unaccounted time are non-negative and sum to 1, since no stages overlap.

        with timer.stage("forward"):
            ...
        log.update(timer.end_step())
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._running: str | None = None
        self._step_start = clock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time of the block for stage `name`. Raises MetricError for an unknown stage, or inside another."""
        if name not in self._seconds:
            raise MetricError(f"unknown stage {name!r}: one of {', '.join(STAGES)}")
        if self._running is not None:
            raise MetricError(f"stage {name!r} inside {self._running!r}: end that one first, or time would count twice")
        self._running = name
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start
            self._running = None

    def end_step(self) -> dict[str, float]:
        """Metrics `time/*` of the step that ends here; the next step begins at the same moment."""
        if self._running is not None:
            raise MetricError(f"the step ended inside stage {self._running!r}: leave the stage first")
        now = self._clock()
        step = now - self._step_start
        shares = {name: seconds / step if step > 0.0 else 0.0 for name, seconds in self._seconds.items()}
        working = 1.0 - shares["idle"]
        overhead = sum(shares[name] for name in OVERHEAD)
        self._step_start = now
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return {
            "time/step_s": step,
            **{f"time/{name}_share": share for name, share in shares.items()},
            "time/unaccounted_share": max(0.0, 1.0 - sum(shares.values())),
            "time/overhead_share": overhead / working if working > 0.0 else 0.0,
        }
