"""Writes a run's metrics: to `metrics.jsonl` for programs, and with the writers that `run.metric_writers` names.

One of your own, named by its import path, `run.metric_writers=[tensorboard,my_module:Console]`:

    class Console:
        def __init__(self, directory):         # config.yaml lies in the folder above
            self.file = open(directory / "scores.txt", "a")

        def write(self, step, metrics, time_s):
            print(step, metrics.get("rollout/score"), file=self.file, flush=True)

        def close(self):
            self.file.close()

Invariant: every writer gets the same numbers. The JSONL file has one object a step, {"step", "time_s", "<name>":
number, ...}, and is complete up to the last step written, whatever happens to the process next.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from impala_llm.config import ConfigError
from impala_llm.observability.metrics import describe
from impala_llm.plugs import METRIC_WRITERS, load
from impala_llm.supervised import say

METRICS_FILE = "metrics.jsonl"


class Writer(Protocol):
    """A writer, made from the folder that it may write to."""

    def write(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Write one step.

        Args:
            step: policy version that it has made.
            metrics: by name; values may be infinite or NaN.
            time_s: seconds since the epoch.
        """

    def close(self) -> None:
        """Write what is left. Called once, at the end of training."""


class MetricWriter:
    """Writes to `directory` (made if missing). A run that is resumed appends.

    Args:
        names: of the writers beside the JSONL file.

    Raises:
        ConfigError: a writer cannot be made.
    """

    def __init__(self, directory: Path, names: Sequence[str] = ("tensorboard",)) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._writers = {name: _made(name, directory) for name in names}
        self._lines = (directory / METRICS_FILE).open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. A writer that fails is left out from then on, and said so: training does not depend on it.

        A value that is not finite is null in the JSONL file: JSON has no NaN.

        Raises:
            MetricError: an undeclared name; nothing is written.
        """
        for name in metrics:
            describe(name)
        now = time.time()
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.write(json.dumps({"step": step, "time_s": now, **numbers}) + "\n")
        self._lines.flush()
        for name, writer in list(self._writers.items()):
            try:
                writer.write(step, metrics, now)
            except Exception as error:  # a writer is other people's code
                del self._writers[name]
                say(f"metric writer {name} failed at step {step} and is left out: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._lines.close()
        for name, writer in self._writers.items():
            try:
                writer.close()
            except Exception as error:  # a writer is other people's code
                say(f"metric writer {name} could not be closed: {type(error).__name__}: {error}")

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _made(name: str, directory: Path) -> Writer:
    """The writer of a name."""
    try:
        writer: Writer = load(METRIC_WRITERS, name)(directory)
        return writer
    except Exception as error:  # a writer is other people's code
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"run.metric_writers: {name} cannot be made: {type(error).__name__}: {reason}: correct it or leave it out"
        ) from error
