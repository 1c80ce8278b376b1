"""Writes a run's metrics: to `metrics.jsonl` for programs, and with the writers that `run.metric_writers` names.

One of your own, named by its import path, `run.metric_writers=[tensorboard,my_module:Console]`:

    class Console:
        def __init__(self, directory):         # config.yaml lies in the folder above
            self.file = open(directory / "scores.txt", "a")

        def write(self, step, metrics, time_s):
            print(step, metrics.get("rollout/score"), file=self.file, flush=True)

        def close(self):
            self.file.close()

A writer that also has `write_text(name, text)` gets texts of the run, such as its settings.

Invariant: every writer gets the same numbers, and none of them can end the training. The JSONL file has one object a
step, {"step", "time_s", "<name>": number, ...}, and is complete up to the last step written, whatever happens to the
process next.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from impala_llm.config import ConfigError
from impala_llm.observability.metrics import describe
from impala_llm.plugs import METRIC_WRITERS, load
from impala_llm.processes.stop_signals import ToldToStop
from impala_llm.processes.supervised import say

METRICS_FILE = "metrics.jsonl"
_TAIL_BYTES = 1 << 18
"""Bytes at the end of the JSONL file in which a line of a training step is found."""


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
        """Write what is left. Called once: at the end of training, or where another method has failed."""


class _JsonLines:
    """Writer of the JSONL file."""

    def __init__(self, directory: Path) -> None:
        self._lines = (directory / METRICS_FILE).open("ab", buffering=0)

    def write(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = (json.dumps({"step": step, "time_s": time_s, **numbers}) + "\n").encode()
        if self._lines.write(line) != len(line):
            raise OSError(errno.ENOSPC, "only a part of a line was written")

    def close(self) -> None:
        self._lines.close()


class MetricWriter:
    """Writes to `directory` (made if missing). A run that is resumed appends.

    Args:
        names: of the writers beside the JSONL file.
        after: step from which the run continues: lines of later steps are removed from the JSONL file, since these are
            made again. None: there are none.
        with_lines: whether the JSONL file is written. The comparison after a run is no step and stands in
            evaluation.json.
        retry_s: seconds until a writer that found no room on its disk is made anew.

    Raises:
        ConfigError: a writer cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = ("tensorboard",),
        after: int | None = None,
        with_lines: bool = True,
        retry_s: float = 60.0,
    ) -> None:
        self._directory = directory
        self._is_full_said = False
        self._retry_s = retry_s
        self._writers: dict[str, Writer] = {}
        self._retries: dict[str, float] = {}
        """Writers whose disk was full, and when each is made anew, in seconds of time.monotonic."""
        self._made_anew: set[str] = set()
        """Writers that were made anew and have not written yet."""
        for name in (METRICS_FILE, *names) if with_lines else names:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                if name == METRICS_FILE and after is not None:
                    _cut(directory / METRICS_FILE, after)
                self._writers[name] = _made(name, directory)
            except (OSError, ConfigError) as error:
                # A learner that is restarted in the middle of a run must not fail because of its metrics.
                if not is_disk_full(error.__cause__ or error):
                    raise
                self._leave_out(name, "at its start", error.__cause__ or error)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. A writer that fails is left out from then on, and said so: training does not depend on it.
        One whose disk is full misses the steps until there is room.

        A value that is not finite is null in the JSONL file: JSON has no NaN.

        Raises:
            MetricError: an undeclared name; nothing is written.
        """
        for name in metrics:
            describe(name)
        self._retry(step)
        now = time.time()
        for name, writer in list(self._writers.items()):
            error = _error_of(writer, "write", step, dict(metrics), now)  # a copy: it may change it
            if error is not None:
                self._leave_out(name, f"at step {step}", error)
            elif name in self._made_anew:
                self._made_anew.remove(name)
                self._is_full_said = False
                say(f"metric writer {name} writes again, from step {step} on")

    def write_text(self, name: str, text: str) -> None:
        """Hand a text to the writers that take texts. One that fails is left out from then on."""
        for key, writer in list(self._writers.items()):
            if (error := _error_of(writer, "write_text", name, text)) is not None:
                self._leave_out(key, f"at the text {name!r}", error)

    def close(self) -> None:
        for name, writer in self._writers.items():
            if (error := _error_of(writer, "close")) is not None:
                say(f"metric writer {name} could not be closed: {type(error).__name__}: {error}")

    def _leave_out(self, name: str, when: str, error: BaseException) -> None:
        """Leave out a writer that has failed, and warn of it; of a full disk once for all writers."""
        if (failed := self._writers.pop(name, None)) is not None:
            _error_of(failed, "close")  # that it fails too is no news
        if not is_disk_full(error):
            say(f"metric writer {name} failed {when} and is left out: {type(error).__name__}: {error}")
            return
        self._retries[name] = time.monotonic() + self._retry_s
        if not self._is_full_said:
            self._is_full_said = True
            say(
                f"the disk of {self._directory} is full: metric writer {name} failed {when}; training goes on, and "
                "writers that find no room miss its steps until there is some: make room before the policy is saved"
            )

    def _retry(self, step: int) -> None:
        """Make writers anew whose disk was full."""
        for name in [name for name, due in self._retries.items() if time.monotonic() >= due]:
            del self._retries[name]
            try:
                if name == METRICS_FILE:
                    _cut(self._directory / METRICS_FILE, step)  # a last line that was cut short
                writer = _made(name, self._directory)
            except (OSError, ConfigError) as error:
                self._leave_out(name, f"at step {step}", error.__cause__ or error)
            else:
                self._writers[name] = writer
                self._made_anew.add(name)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def last_metrics(directory: Path) -> dict[str, float]:
    """Metrics of the last step of training that lies whole in a folder's JSONL file; none where there is none."""
    try:
        with (directory / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines[:-1]):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if "learner/version" in row:
                return {name: value for name, value in row.items() if value is not None}
    return {}


def last_step(directory: Path) -> int | None:
    """The last step in the JSONL file of this folder; None where it has none."""
    return max((step for step, _ in _steps(directory / METRICS_FILE)), default=None)


def _steps(path: Path) -> Iterator[tuple[int, bytes]]:
    """Steps of a JSONL file, each with its line. Lines that are not whole, to their end, are passed over."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if not line.endswith(b"\n"):  # what is written next would be of this line
                    break
                yield int(json.loads(line)["step"]), line


def _cut(path: Path, after: int) -> None:
    """Remove the lines of later steps from a JSONL file, in place: a disk that is full has no room for another."""
    if path.is_file():
        with path.open("r+b") as file:
            for step, line in _steps(path):
                if step <= after:
                    file.write(line)  # never beyond what was read
            file.truncate()


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error says that a disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _error_of(writer: Writer, method: str, *arguments: object) -> BaseException | None:
    """Call a method of a writer, if it has it, and return the error; None where there is none.

    A writer is other people's code, and may raise SystemExit too. Signals to this process come through.
    """
    try:
        if hasattr(writer, method):
            getattr(writer, method)(*arguments)
    except (KeyboardInterrupt, ToldToStop):
        raise
    except BaseException as error:
        return error
    return None


def _made(name: str, directory: Path) -> Writer:
    """The writer of a name."""
    if name == METRICS_FILE:
        return _JsonLines(directory)
    try:
        writer: Writer = load(METRIC_WRITERS, name)(directory)
        if not callable(getattr(writer, "write", None)):
            raise TypeError("it has no method write")
        return writer
    except (KeyboardInterrupt, ToldToStop):
        raise
    except BaseException as error:  # a writer is other people's code, and may call sys.exit()
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"run.metric_writers: {name} cannot be made: {type(error).__name__}: {reason}: correct it or leave it out"
        ) from error
