"""Processes of a run forked from one that has imported what they need, so that only the first start of each kind pays
for the import: 4 to 5 s of a core and some 200 MB, as measured with CPU builds of torch. For hosts without a GPU, on
Linux: CUDA must not have been touched before a fork, which no import promises.

    supervisor ──requests──► fork server ──fork──► learner, actors
         ▲──── started, ended ────┘

Requests are lines of JSON on the server's standard input, events on a pipe of their own, see `start_with_pipe`.
Invariants: the server runs no other thread and no code of a user's; a forked process has the session, environment, log
and arguments that it would have if it were started by itself, and shows them in /proc (its command line with NULs
behind it; of its environment, values that are as long as the server's); all of them end with the server, and the server
with its supervisor.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from impala_llm.processes.supervised import PROGRESS, SUPERVISOR, die_with_parent, keep_exit_codes, start_with_pipe

_COMMAND_LINE_ROOM = 8192
"""Bytes of a forked process's command line that `ps` shows."""
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 47, 48, 49, 50
"""Indices of the fields of /proc/PID/stat, proc_pid_stat(5)."""
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of GPUs: by NVIDIA, by AMD, and in Windows' Linux."""
_POLL_S = 0.01


def can_fork() -> bool:
    """Whether this host is one for a fork server."""
    if sys.platform != "linux" or any(map(os.path.exists, _GPU_DEVICES)):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))  # some sandboxes have none
    except OSError:
        return False
    return True


@dataclass
class ForkedProcess:
    """A process that a fork server starts; the part of `subprocess.Popen` that a supervisor uses."""

    server: "ForkServer"
    pid: int | None = None
    """None: not forked yet."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or is about to."""
        self.server.receive()
        return self.returncode

    def wait(self) -> int:
        """Exit code, once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code

    def signal_group(self, number: int) -> None:
        """Send a signal to its process group. One that is not forked yet counts as ended by it, and is killed
        as soon as it is forked."""
        self.server.receive()
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)
        elif self.returncode is None:
            self.returncode = -number


def begin_server(environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], BinaryIO]":
    """Start a fork server as a program, with these variables alone: its process, and the pipe of its events."""
    script = str(Path(__file__).resolve())
    return start_with_pipe(
        lambda events: [sys.executable, script, str(events), " " * _COMMAND_LINE_ROOM],
        environment,
    )


@dataclass
class ForkServer:
    """The supervisor's side. The server is started at the first request, and again if it has died.

    Args:
        environment: variables of all its processes. Those that are read when a program or library is loaded, such as
            OMP_NUM_THREADS, must be in it.
        begin: starts the server with these variables, and returns its process and the pipe of its events.
    """

    environment: Mapping[str, str]
    begin: "Callable[[Mapping[str, str]], tuple[subprocess.Popen[bytes], BinaryIO]]" = begin_server
    _process: "subprocess.Popen[bytes] | None" = None
    _events: BinaryIO | None = None
    _asked: list[tuple[ForkedProcess, int]] = field(default_factory=list)
    """Processes that are not forked yet, in the order of their requests, with descriptors to close then."""
    _running: dict[int, ForkedProcess] = field(default_factory=dict)
    _unread: bytes = b""

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None, pipe: int
    ) -> ForkedProcess:
        """Have a process started.

        Args:
            command: interpreter, script of this package, arguments.
            environment: all of it, without what names its supervisor and its pipe.
            log: its standard output and error are appended there; None: where the supervisor's go.
            pipe: descriptor to which it reports progress; may be closed afterwards.
        """
        if self._process is None or self._process.poll() is not None:
            self._begin()
        assert self._process is not None and self._process.stdin is not None
        kept = os.dup(pipe)  # until it is forked
        changed = {key: value for key, value in environment.items() if self.environment.get(key) != value}
        request = {
            "command": list(command),
            "environment": changed,
            "log": None if log is None else str(log),
            "pipe": f"/proc/{os.getpid()}/fd/{kept}",
        }
        process = ForkedProcess(self)
        self._asked.append((process, kept))
        with suppress(BrokenPipeError):  # it has died: `receive` says so
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return process

    def receive(self) -> None:
        """Note what has been started and what has ended. All that a server has started ends with it."""
        process = self._process
        if process is None or self._events is None:
            return
        has_ended = process.poll() is not None  # before what it wrote last is read
        with suppress(BlockingIOError):
            while data := os.read(self._events.fileno(), 1 << 16):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._note(json.loads(line))
        if has_ended:
            for forked, pipe in self._asked:
                os.close(pipe)
                self._end(forked, -signal.SIGKILL)
            for forked in self._running.values():
                self._end(forked, -signal.SIGKILL)
            self._asked, self._running = [], {}

    def close(self) -> None:
        """End the server, and with it whatever it has started."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.receive()
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # a request that it has not read
                self._process.stdin.close()

    def _begin(self) -> None:
        self.close()
        self._unread = b""
        self._process, self._events = self.begin({**self.environment, SUPERVISOR: str(os.getpid())})
        os.set_blocking(self._events.fileno(), False)

    def _note(self, event: Mapping[str, int]) -> None:
        if "failed" in event:
            forked, pipe = self._asked.pop(0)
            os.close(pipe)
            self._end(forked, event["failed"])
        elif "started" in event:
            forked, pipe = self._asked.pop(0)
            os.close(pipe)
            forked.pid = event["started"]
            self._running[forked.pid] = forked
            if forked.returncode is not None:  # signalled before it was forked
                with suppress(ProcessLookupError):
                    os.kill(forked.pid, signal.SIGKILL)
        else:
            self._end(self._running.pop(event["ended"]), event["code"])

    def _end(self, forked: ForkedProcess, code: int) -> None:
        if forked.returncode is None:
            forked.returncode = code


# --- the server


@dataclass(frozen=True)
class _Request:
    command: list[str]
    environment: dict[str, str]
    log: str | None
    pipe: str


def _serve(requests: int, events: int) -> _Request | None:
    """Serve until the supervisor closes its end, and return None; in a forked process, return what it is to run."""
    server = os.getpid()
    children: dict[int, int] = {}
    """Descriptor -> process id."""
    unread = b""
    while True:
        ready, _, _ = select.select([requests, *children], [], [])
        for ended in set(ready) - {requests}:
            os.close(ended)
            pid, status = os.waitpid(children.pop(ended), 0)
            _write(events, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if requests in ready:
            data = os.read(requests, 1 << 16)
            if not data:
                return None
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                request = _Request(**json.loads(line))
                _prepare(request)
                reading, writing = os.pipe()
                try:
                    pid = os.fork()
                except OSError as error:  # no more processes, or no memory
                    print(f"fork server: {error}", file=sys.stderr, flush=True)
                    _write(events, {"failed": 1})
                    os.close(reading)
                    os.close(writing)
                    continue
                if pid == 0:
                    for descriptor in (events, reading, *children):
                        os.close(descriptor)
                    _become(request, server)
                    os.close(writing)
                    return request
                os.close(writing)
                os.read(reading, 1)  # until it has a process group, to which signals can be sent
                os.close(reading)
                children[os.pidfd_open(pid)] = pid
                _write(events, {"started": pid})


def _prepare(request: _Request) -> None:
    """Import what a request needs. A failure is raised once more, by the forked process, and stands in its log."""
    if request.log is not None:
        with suppress(OSError), open(request.log, "ab") as log:  # without it, the one before
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    with suppress(Exception):
        importlib.import_module(_module(request.command))
        importlib.import_module("impala_llm.compiled").import_registries()
    gc.freeze()  # it stays to the end, in all processes: no collection need look at it


def _module(command: Sequence[str]) -> str:
    return f"impala_llm.{Path(command[1]).stem}"


def _become(request: _Request, server: int) -> None:
    """Give a forked process what one that is started by itself would have. server: process id of its parent."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    show_environment(request.environment)
    os.environ.update(request.environment)
    os.environ[SUPERVISOR] = str(server)
    os.environ[PROGRESS] = str(os.open(request.pipe, os.O_WRONLY | os.O_NONBLOCK))
    sys.argv, sys.orig_argv = request.command[1:], list(request.command)
    show_command_line(request.command)
    np.random.seed()  # the generator of `random` does so by itself
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def show_command_line(command: Sequence[str]) -> None:
    """Let `ps` show a command line in place of the server's, cut where there is no more room."""
    start, end = _memory(_ARG_START, _ARG_END)
    shown = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in command)[: max(0, end - start - 1)]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def show_environment(changed: Mapping[str, str]) -> None:
    """Let /proc/PID/environ show new values in place of the server's, which are as long: a search for the descendants
    of a process, including those that it forks itself, reads them there."""
    start, end = _memory(_ENV_START, _ENV_END)
    area = ctypes.string_at(start, end - start)
    for key, value in changed.items():
        old, new = (f"{key}={each}\0".encode(errors="surrogateescape") for each in (os.environ.get(key, ""), value))
        if len(old) == len(new) and (offset := area.find(old)) >= 0:
            ctypes.memmove(start + offset, new, len(new))


def _memory(first: int, last: int) -> tuple[int, int]:
    """The addresses in two fields of this process's stat; equal where the system does not tell."""
    stat = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    return int(stat[first - 2]), int(stat[last - 2])


def _write(events: int, event: Mapping[str, int]) -> None:
    with suppress(BrokenPipeError):  # the supervisor is gone, and takes this process along
        os.write(events, json.dumps(event).encode() + b"\n")


def main(events: int) -> NoReturn:
    """Serve; in a forked process, run the script that it was asked for. events: their descriptor."""
    gc.disable()  # there is no garbage among what is imported, and to look for it took a fifth of a start
    sys.path[:1] = {*sys.path[:1]} - {str(Path(__file__).resolve().parent)}  # as in actor.py
    die_with_parent(int(os.environ.pop(SUPERVISOR)))
    keep_exit_codes()
    os.set_inheritable(events, False)
    request = _serve(0, events)
    if request is None:
        sys.exit(0)
    importlib.import_module(_module(request.command)).run(sys.argv[1:])
    raise AssertionError("run does not return")


if __name__ == "__main__":
    main(int(sys.argv[1]))
