"""One host, everything on it: the learner (through torchrun) and its actors as supervised processes.

Invariant: whatever ends the run, its end, an error, Ctrl-C or a signal, ends every process of it within ten seconds and
leaves no file of it in shared memory. A dead actor is reported with its signal and last words, and started again with
back-off; a dead learner ends the run.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from impala_llm.config import PACKAGE, Config, threads_per_process, to_yaml
from impala_llm.pipeline.rundir import remove_run_dir

GRACE_S = 5.0
"""Time between the polite signal and the kill."""
MAX_RESTARTS = 20


@dataclass
class Child:
    """A supervised process and its log."""

    name: str
    command: list[str]
    log: Path | None
    environment: dict[str, str]
    process: subprocess.Popen | None = None
    restarts: int = 0
    restart_at: float = 0.0
    """Monotonic time of the next start, while it is down."""
    started_at: float = field(default=0.0)

    def start(self) -> None:
        # A session of its own: Ctrl-C reaches the supervisor alone, which ends the others in order.
        if self.log is None:
            self.process = subprocess.Popen(self.command, env=self.environment, start_new_session=True)
        else:
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    self.command, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        return self.process.poll() if self.process else None

    def signal(self, number: int) -> None:
        """To the whole process group, so that torchrun's workers are reached when torchrun itself is gone."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def last_words(self, lines: int = 8) -> str:
        if self.log is None or not self.log.exists():
            return ""
        tail = self.log.read_bytes()[-4096:].decode(errors="replace").splitlines()[-lines:]
        return "".join(f"\n    {line}" for line in tail)


def exit_reason(code: int) -> str:
    """What a return code of subprocess means, for people."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def plan(config: Config, overrides: Sequence[str]) -> list[Child]:
    """The processes of a run: the learner first, then the actors."""
    threads = str(threads_per_process(config))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "PYTHONPATH": os.pathsep.join(p for p in (str(PACKAGE.parent), os.environ.get("PYTHONPATH")) if p),
    }
    learner = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(config.learner.num_ranks),
        ),
        *(str(PACKAGE / "learner.py"), *overrides),
    ]
    logs = Path(config.run.dir) / "logs"
    children = [Child("learner", learner, None, environment)]
    for index in range(config.actor.num_actors):
        command = [sys.executable, str(PACKAGE / "actor.py"), "--index", str(index), *overrides]
        children.append(Child(f"actor {index}", command, logs / f"actor-{index}.log", environment))
    return children


def dry_run(config: Config, overrides: Sequence[str]) -> str:
    """What `train` would do: the resolved configuration and the command line of every process."""
    lines = [to_yaml(config), f"# threads a process: {threads_per_process(config)}"]
    lines += [f"# {child.name}: {' '.join(child.command)}" for child in plan(config, overrides)]
    return "\n".join(lines)


def supervise(config: Config, overrides: Sequence[str]) -> int:
    """Run to the end of training. Returns the learner's exit code, 130 after Ctrl-C, 143 after SIGTERM."""
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    (Path(config.run.dir) / "config.yaml").write_text(to_yaml(config))
    children = plan(config, overrides)
    learner, actors = children[0], children[1:]
    stop_signal = 0

    def remember(number: int, _frame: object) -> None:
        nonlocal stop_signal
        stop_signal = number

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for child in children:
            child.start()
        while learner.poll() is None and not stop_signal:
            for actor in actors:
                _keep_alive(actor)
            try:
                assert learner.process is not None
                learner.process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
    finally:
        end(children, polite=not stop_signal and learner.poll() == 0)
        remove_run_dir(config.run.name)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stop_signal:
        return 128 + stop_signal
    code = learner.poll()
    assert code is not None
    if code:
        _say(f"learner ended: {exit_reason(code)}")
    return code if code >= 0 else 128 - code


def end(children: Sequence[Child], polite: bool) -> None:
    """End all processes: after a finished run actors go by themselves, else they are told to; then they are killed."""
    if not polite:
        for child in children:
            if child.poll() is None:
                child.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for child in children:
        if child.process is not None:
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(f"{child.name} does not end: killing it")
        child.signal(signal.SIGKILL)  # also what is left of its group
    for child in children:
        if child.process is not None:
            child.process.wait()


def _keep_alive(actor: Child) -> None:
    code = actor.poll()
    if code is None:
        return
    now = time.monotonic()
    if actor.restart_at == 0.0:
        if code == 0:
            return  # it was told to end
        if now - actor.started_at > 60:
            actor.restarts = 0  # it had worked: not a crash loop
        if actor.restarts >= MAX_RESTARTS:
            return
        delay = min(30.0, 2.0**actor.restarts)
        actor.restart_at = now + delay
        actor.restarts += 1
        _say(f"{actor.name} died ({exit_reason(code)}), again in {delay:.0f} s; its last words:{actor.last_words()}")
    elif now >= actor.restart_at:
        actor.restart_at = 0.0
        actor.start()


def _say(text: str) -> None:
    print(f"impala-llm: {text}", file=sys.stderr, flush=True)
