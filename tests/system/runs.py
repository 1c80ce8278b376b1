"""A run as real processes, seen from outside: its metrics, its processes, what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from impala_llm.pipeline.shm.run_directory import remove_run_dir
from impala_llm.processes.fork_server import can_fork
from tests.system.forked_command import MARK, SCRIPTS, ForkedProcess, command_server

ROOT = Path(__file__).parents[2]
START_S = 120.0
"""Deadline for whatever includes the start of processes, which import PyTorch on a busy machine."""
IMPATIENT = "actor.fault_patience_s=1"
"""Setting of runs of which only how they end is looked at; that faults are borne, tests/test_actor_faults.py shows."""
SMALL = "replay.capacity_mb=64"
"""Setting of all runs: the default of 512 MB would be reserved, and set to zero, at each start, a second of a core."""
Process = subprocess.Popen[bytes] | ForkedProcess


class Run:
    """Processes that share one run name. Leaving the context kills and removes whatever is left of them."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.directory = directory
        self.settings = [f"run.name={self.name}", f"run.dir={directory}", "run.terminal=false", SMALL, *settings]
        self.started: list[Process] = []
        self.python_path = [str(ROOT)]
        """PYTHONPATH of what is started."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of what is started."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, MARK: self.name, "PATH": path, "PYTHONPATH": os.pathsep.join(self.python_path)}

    def start(self, *command: str, errors: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a command with the run's settings behind it; what it prints goes to `log`, its errors where told."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out, (errors or self.log).open("ab") as err:
            process = subprocess.Popen(
                [*command, *self.settings],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )
        self.started.append(process)
        return process

    def call(self, command: str, *words: str, errors: Path | None = None) -> Process:
        """Start a command of impala-llm as `start` does, by a fork, see forked_command.py, where this host has them.

        A sitecustomize.py on `python_path` acts in what it starts, and not in itself.

        Args:
            command: `actor` and `learner` are the programs, as they are started by hand.
        """
        if not can_fork():
            program = [f"impala_llm/{command}.py"] if command in SCRIPTS else ["-m", "impala_llm.cli", command]
            return self.start(sys.executable, *program, *words, errors=errors)
        self.directory.mkdir(parents=True, exist_ok=True)
        words = (command, *words, *self.settings)
        process = command_server().start(words, ROOT, self.environment, self.log, errors or self.log)
        self.started.append(process)
        return process

    def train(self, as_users_do: bool = False) -> Process:
        """Start `impala-llm train`. as_users_do: as a program, which takes seconds longer."""
        return self.start(sys.executable, "-m", "impala_llm.cli", "train") if as_users_do else self.call("train")

    def train_until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Train, and end the run as Ctrl-C does once a level is reached; one that never does trains to its end."""
        training = self.train()
        deadline = time.monotonic() + timeout_s
        while training.poll() is None and not reached():
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.2)
        training.send_signal(signal.SIGINT)
        assert training.wait(timeout_s) in (0, 128 + signal.SIGINT), self.printed()
        self.assert_gone()

    def refused(self, command: str = "train") -> str:
        """Call a command of impala-llm that must end with status 2 and at most three lines of errors; returns these."""
        errors = self.directory / "errors.log"
        code = self.call(command, errors=errors).wait(START_S)
        said = errors.read_text()
        assert code == 2 and len(said.splitlines()) <= 3, f"{code}\n{said}\n{self.printed()}"
        assert "Traceback" not in said + self.log.read_text()
        self.assert_gone()
        return said

    @property
    def log(self) -> Path:
        return self.directory / "printed.log"

    def rows(self) -> list[dict[str, Any]]:
        """Metrics of each update so far."""
        path = self.directory / "tensorboard" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def processes(self, *words: str) -> list[psutil.Process]:
        """Living processes of the run, those with all these words on their command line."""
        forked = {each.pid for each in self.started if isinstance(each, ForkedProcess) and each.poll() is None}
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.pid in forked or process.environ().get(MARK) == self.name
                if ours and process.status() != psutil.STATUS_ZOMBIE and set(words) <= set(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def listening(self) -> set[str]:
        """IP addresses at which processes of the run listen."""
        found = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                connections = process.net_connections("inet")
                found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float = START_S) -> None:
        """Until the condition holds; fails at the deadline, or when everything that was started has ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            alive = any(process.poll() is None for process in self.started)
            assert alive and time.monotonic() < deadline, f"{what} did not happen; printed:\n{self.printed()}"
            time.sleep(0.05)

    def wait_for_updates(self, count: int) -> None:
        """Until there are this many more updates than now."""
        target = len(self.rows()) + count
        self.wait_for(lambda: len(self.rows()) >= target, f"update {target}")

    def printed(self) -> str:
        logs = [self.log, *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in logs if path.exists())

    def assert_gone(self) -> None:
        """No process of the run lives and nothing of it is in shared memory."""
        assert self.processes() == [], self.printed()
        assert [path.name for path in Path("/dev/shm").glob(f"*{self.name}*")] == [], self.printed()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        left = self.processes()
        for relative in left:
            relative.kill()
        psutil.wait_procs(left)
        remove_run_dir(self.name)


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A metric of the updates that have it."""
    return [row[name] for row in rows if row.get(name) is not None]
