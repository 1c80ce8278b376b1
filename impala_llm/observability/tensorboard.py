"""Writes a run's metrics to disk: TensorBoard event files for people, `metrics.jsonl` for programs.

Invariant: both hold the same numbers. The JSONL file has one object a step, {"step", "time_s", "<name>": number, ...},
and is complete up to the last step written, whatever happens to the process next.
"""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from impala_llm.observability.metrics import describe

METRICS_FILE = "metrics.jsonl"
FLUSH_S = 10
"""An open TensorBoard is at most this many seconds behind."""


class MetricWriter:
    """Writes to `directory` (made if missing). A run that is resumed appends to both files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._events = SummaryWriter(log_dir=str(directory), flush_secs=FLUSH_S)
        self._lines = (directory / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one step. Raises MetricError for an undeclared name, before anything is written.

        A value that is not finite stays what it is in TensorBoard and is null in the JSONL file: JSON has no NaN.
        """
        for name in metrics:
            describe(name)
        now = time.time()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, global_step=step, walltime=now)
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.write(json.dumps({"step": step, "time_s": now, **numbers}) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._events.close()
        self._lines.close()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
