"""Child processes of a supervisor: their start, their pipe and log, their restarts, and their end.

Invariant: `end` leaves no process of a child alive, also of those that have a session of their own.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import psutil

from impala_llm.processes.fork_server import ForkServer
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.processes.log_lines import STAMP
from impala_llm.processes.supervised import PROGRESS, RENDEZVOUS, SUPERVISOR, WORKED, signal_name

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
SAVING_S = 120.0
"""Seconds between SIGTERM and SIGKILL for a process that has reported that it is saving."""
GUARD_S = 3.0
"""Seconds that orphans have for ending by themselves."""
MAX_RESTARTS = 20
"""Restarts of an actor without a trajectory acknowledged in between."""
POLL_S = 0.02
"""Seconds between two checks of processes that are ending."""
LOG_END = 4096
"""Bytes at the end of a log in which the last line is looked for."""
MOST_READS = 16
"""Most reads of a pipe in a row: a child that floods its pipe must not keep the supervisor from its other children."""
PROGRESS_BAR = re.compile(r"\d%\|")
FAMILY = "IMPALA_LLM_FAMILY"
"""Environment variable by which a supervisor recognises the descendants of a child: a server has a session of its own,
and may outlive its actor."""


class Process(Protocol):
    """A process as a supervisor sees it."""

    @property
    def pid(self) -> int | None:
        """None: it is about to start."""
        ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int:
        """Exit code, once it has ended."""
        ...

    def signal_group(self, number: int) -> None:
        """Send a signal to its whole process group, also where the process itself has ended."""
        ...


class OwnProcess(subprocess.Popen[bytes]):
    """A process that the supervisor starts itself, in a session of its own."""

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@dataclass
class Child:
    """A supervised process and its log; or the learner's ranks, which are started together, and together again when one
    of them has died."""

    name: str
    command: list[str]
    log: Path | None
    environment: dict[str, str]
    num_ranks: int | None = None
    """None: one process that is no rank."""
    rendezvous_dir: Path | None = None
    """Folder in which several ranks find each other."""
    forks: ForkServer | None = None
    """Starts its processes; None: the supervisor does."""
    processes: list[Process] = field(default_factory=list)
    restarts: int = 0
    """Number of restarts since it last made progress."""
    restart_at: float = 0.0
    """Monotonic time of the next start, while it is down."""
    is_given_up: bool = False
    """Whether it has died once too often."""
    pipe: int | None = None
    """Descriptor from which its progress and its messages are read: see processes/supervised.py."""
    worked: bool = False
    has_ever_worked: bool = False
    """Whether it made progress at any start before the last one that ended."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""
    """The last line for the user that came since this start."""
    saving: bool = False
    """The process's last word on whether it saves, see `is_saving`."""
    unread: bytes = b""
    """Beginning of a line whose rest has not been read yet."""
    log_begin: int = 0
    """Size of the log at this start."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic time in seconds."""
    warnings: RateLimitedWarnings = field(default_factory=lambda: RateLimitedWarnings(60.0))

    def start(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
        self.pipe, told = os.pipe()
        self.worked, self.unread, self.saving, self.said = False, b"", False, ""
        self.log_begin = self.log.stat().st_size if self.log is not None and self.log.exists() else 0
        token = uuid.uuid4().hex
        try:
            for descriptor in (self.pipe, told):
                os.set_blocking(descriptor, False)
            self.processes = []
            for rank in range(self.num_ranks or 1):
                environment = self.environment
                if self.num_ranks is not None:
                    environment = environment | self.rank_environment(rank, token)
                self.processes.append(self.start_process(environment, told))
        finally:
            os.close(told)

    def rank_environment(self, rank: int, token: str) -> dict[str, str]:
        """Variables that torchrun would set; but the ranks meet in a file, so that no process listens on a port."""
        number, total = str(rank), str(self.num_ranks)
        ranks = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": total, "LOCAL_WORLD_SIZE": total}
        return ranks | (
            {} if self.rendezvous_dir is None else {RENDEZVOUS: f"file://{self.rendezvous_dir}/ranks-{token}"}
        )

    def start_process(self, environment: dict[str, str], told: int) -> Process:
        if self.forks is not None:
            return self.forks.start(self.command, environment, self.log, told)
        # A session of its own: Ctrl-C reaches the supervisor alone, which ends the others in order.
        with contextlib.nullcontext() if self.log is None else self._open_log(self.log) as out:
            return OwnProcess(
                self.command,
                env={**environment, PROGRESS: str(told), SUPERVISOR: str(os.getpid())},
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=(told,),
            )

    def _open_log(self, path: Path) -> BinaryIO:
        """The log, or the null device where it cannot be written."""
        try:
            return path.open("ab")
        except OSError as error:
            say(f"{path} cannot be written ({error.strerror}): what {self.name} prints is lost")
            return open(os.devnull, "ab")

    def poll(self) -> int | None:
        """Exit code; of several ranks one that is not 0. None while it runs."""
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes or not codes else 0

    def receive(self) -> list[dict[str, Any]]:
        """Messages that it has sent since the last call."""
        self._read_pipe()
        messages, self.messages = self.messages, []
        return messages

    def is_saving(self) -> bool:
        """Whether it has said that it is saving a policy, and not yet that it is done."""
        self._read_pipe()
        return self.saving

    def has_worked(self) -> bool:
        """Whether it has made progress since this was last asked."""
        self._read_pipe()
        worked, self.worked = self.worked, False
        return worked

    def _read_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST_READS):
                if self.pipe is None or not (data := os.read(self.pipe, 1 << 16)):
                    break
                *lines, self.unread = (self.unread + data).split(b"\n")
                if len(self.unread) > select.PIPE_BUF:  # no message is as long
                    self.unread = b""
                self.worked = self.worked or WORKED in lines
                for line in lines:
                    if line != WORKED:
                        self._take(line)

    def _take(self, line: bytes) -> None:
        """Keep a message. A line that is not a message is ignored: other code in the process may write to the pipe."""
        try:
            message = json.loads(line, parse_int=_parse_number)
        except (ValueError, RecursionError, OverflowError):
            message = None
        if isinstance(message, dict):
            text = str(message.get("say", ""))
            if text and text == self.said:  # of several ranks each may say it
                return
            self.said = text or self.said
            self.messages.append(message)
            self.saving = message.get("saving", self.saving)
        else:
            self.warnings.log(
                f"{self.name}, its pipe to the supervisor",
                f"{line[:80]!r} is no message and is passed over: an environment or an agent writes to a descriptor "
                "that it has not opened",
            )

    def last_log_line(self) -> str:
        """Last line of its log since its start, without progress bars, and the path of the log; empty without one.

        After a signal it is not the cause of the death, and does not stand for it.
        """
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(self.log_begin, self.log.stat().st_size - LOG_END))
            lines = log.read().decode(errors="replace").splitlines()
        texts = [STAMP.sub("", line.strip() + " ", count=1).strip() for line in lines if not PROGRESS_BAR.search(line)]
        said = [text for text in texts if text]
        begin = "; the last line of its log" if (code := self.poll() or 0) < 0 else ""
        if code == -signal.SIGKILL:
            begin = f"; where nobody has sent that, the system did, for lack of memory{begin}"
        if not said:
            return ""
        return f"{begin}: {said[-1]} (more in {self.log})" if said[-1] != self.said else f" (more in {self.log})"

    def death(self) -> tuple[str, str]:
        """How it has died, and the last line of its log.

        Where a signal has killed one of several ranks, the last line is another's, about the loss of this one: the log
        alone is named. SIGABRT may itself come of such a loss, as NCCL's does.
        """
        codes = [process.poll() or 0 for process in self.processes]
        if len(codes) > 1 and (code := min(codes)) < 0 and code != -signal.SIGABRT:
            where = "" if self.log is None else f"; its log is {self.log}"
            return f"rank {codes.index(code)} {exit_reason(code)}", where
        return exit_reason(self.poll() or 0), self.last_log_line()


def _parse_number(text: str) -> int:
    """Raises OverflowError where no sum or text can be made of it with numbers that are not whole."""
    number = int(text)
    float(number)
    return number


def exit_reason(code: int) -> str:
    """Text for a return code of subprocess."""
    if code < 0:
        return f"killed by {signal_name(-code)}"
    return f"exit code {code}"


def keep_alive(
    child: Child, final: Sequence[int], most: int = MAX_RESTARTS, unless_worked: Collection[int] = ()
) -> bool:
    """Restart a dead child after its back-off.

    Args:
        final: exit codes after which it is not restarted.
        most: restarts without progress in between.
        unless_worked: those of `final` after which a child that has made progress before is restarted all the same.

    Returns:
        False where it has ended: with a final code, or after `most` restarts.
    """
    code = child.poll()
    if code is None:
        return True
    now = child.clock()
    if child.restart_at == 0.0:
        if child.has_worked():
            child.restarts, child.has_ever_worked = 0, True  # not a crash loop
        if child.is_given_up or (code in final and not (code in unless_worked and child.has_ever_worked)):
            return False
        how, log = child.death()  # before others are killed
        _signal_groups(child.processes, signal.SIGKILL)  # the other ranks, and what is left of its group
        if child.restarts >= most:
            child.is_given_up = True
            say(f"{child.name} died ({how}) and is not started again{log}")
            return False
        delay = min(30.0, 2.0**child.restarts)
        child.restart_at = now + delay
        child.restarts += 1
        say(f"{child.name} died ({how}), again in {delay:.0f} s{log}")
    elif now >= child.restart_at:
        child.restart_at = 0.0
        _kill_relatives([child])
        child.start()
    return True


def end(children: Sequence[Child], polite: bool) -> None:
    """End all processes, and what has forked them.

    Args:
        polite: wait for them to end by themselves, as actors do after a finished run; else SIGTERM is sent first. Those
            that are left after `GRACE_S` are killed, those that are saving after `SAVING_S`.
    """
    # The number of a process that has ended before may be that of a stranger by now.
    running = [(child, [process for process in child.processes if process.poll() is None]) for child in children]
    if not polite:
        for _, processes in running:
            _signal_groups(processes, signal.SIGTERM)
    began = time.monotonic()
    for child, processes in running:
        while any([process.poll() is None for process in processes]):
            waited = time.monotonic() - began
            if waited > SAVING_S or (waited > GRACE_S and not child.is_saving()):
                say(f"{child.name} does not end: killing it")
                break
            time.sleep(POLL_S)
        _signal_groups(processes, signal.SIGKILL)  # also what is left of their groups
    # The fork server reports the exit of its processes. If it is stopped, no report arrives before the time is over:
    # closing it kills it, and its processes with it.
    killed = [process for _, processes in running for process in processes]
    until = time.monotonic() + GUARD_S
    while any([process.poll() is None for process in killed]) and time.monotonic() < until:
        time.sleep(POLL_S)
    for child in children:
        if child.forks is not None:
            child.forks.close()
    for process in killed:
        process.wait()
    _kill_relatives(children)


def _signal_groups(processes: Sequence[Process], number: int) -> None:
    """Send a signal to the whole groups of processes."""
    for process in processes:
        process.signal_group(number)


def _kill_relatives(children: Sequence[Child]) -> None:
    """Kill the descendants of dead children that are left: an actor's SGLang server has a session of its own."""
    relatives = _relatives({child.environment[FAMILY] for child in children})
    # The guard of a server ends by itself when its owner is gone, and removes the server's files then.
    _, relatives = psutil.wait_procs(relatives, timeout=GUARD_S)
    for relative in relatives:
        try:
            relative.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(relatives, timeout=GRACE_S)


def _relatives(families: set[str]) -> list[psutil.Process]:
    """Living processes of these families, whatever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(FAMILY) in families:
                found.append(process)
        except psutil.Error:
            continue  # gone, or another user's
    return found


def say(text: str) -> None:
    """Print a line for the user. On a full disk the line is lost, and the run continues."""
    with contextlib.suppress(OSError):
        print(f"impala-llm: {text}", file=sys.stderr, flush=True)
