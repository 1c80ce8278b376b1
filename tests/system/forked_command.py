"""The command `impala-llm` in a process of its own that begins with its modules imported, torch among them.

Such a process is the fork of a server, which has imported them and done nothing else, so that a command costs its own
work and no start. It has the words, the directory, the environment and the files for its output that it is given, and
the process group and session of who has begun the server. /proc shows the server's command line and environment as its
own; what it starts itself shows its own. Run as a program, this is the server: it answers each line of JSON with one.

The fork server of a run (processes/fork_server.py), which would import as much once more, is such a fork too, of the
command, and does what the program does: see `Standby`. One that dies is followed by the program, which also comes where
a sitecustomize.py is to act. As users have it, test_fork_server.py shows it, and each run that is started as a program.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from impala_llm.processes.child_processes import FAMILY
from impala_llm.processes.supervised import ALLOCATOR, die_with_parent

ROOT = Path(__file__).parents[2]
MARK = "IMPALA_LLM_TEST_RUN"
"""Environment variable that every descendant of a run's processes inherits."""
NO_RUN, NO_FAMILY = f"test-{'0' * 12}", "0" * 32
"""Values of `MARK` and `FAMILY` that no run has, as long as all others: forks show theirs in the same place."""
SCRIPTS = ("actor", "learner")
"""Words in place of a command that mean a program of this name in impala_llm/, as it is started by hand."""
COMMAND_LINE_ROOM = 8192
"""Bytes for the command lines that its forks will show."""


class ForkedProcess:
    """A command under way: the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "CommandServer", words: Sequence[str], pid: int) -> None:
        self.args = words
        self.pid = pid
        """Its number, which no other process has before `poll` or `wait` has returned its exit code."""
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once it has ended. Raises TimeoutExpired after so many seconds."""
        if self.returncode is None and timeout is not None:
            ended = os.pidfd_open(self.pid)
            try:
                if not select.select([ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            finally:
                os.close(ended)
        if self.returncode is None:
            self.returncode = self._server.ask("wait", self.pid)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class CommandServer:
    """The server, as its client sees it. It ends with this process."""

    def __init__(self) -> None:
        # As in processes of a run: what libraries read when they are loaded, and the C library and Python themselves.
        of_imports = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONHASHSEED": "0"}
        of_names = {MARK: NO_RUN, FAMILY: NO_FAMILY}
        self._process = subprocess.Popen(
            [sys.executable, __file__, " " * COMMAND_LINE_ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **of_imports, **ALLOCATOR, **of_names},
        )
        atexit.register(self._end)

    def start(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], out: Path, errors: Path
    ) -> ForkedProcess:
        """Start a command. What it prints is appended to these files, which are there when this returns."""
        files = [str(path.absolute()) for path in (out, errors)]
        pid = self.ask("start", list(words), str(folder), dict(environment), *files)
        return ForkedProcess(self, words, pid)

    def ask(self, request: str, *arguments: object) -> Any:
        """The server's answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([request, *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@functools.cache
def command_server() -> CommandServer:
    """The server of this process, which takes seconds to come up."""
    return CommandServer()


def forked_command(
    words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """The command with these words, called in a folder, once it has ended. environment: None: that of this process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} if environment is None else environment
    with tempfile.NamedTemporaryFile("w+") as out, tempfile.NamedTemporaryFile("w+") as errors:
        process = command_server().start(words, folder, environment, Path(out.name), Path(errors.name))
        return subprocess.CompletedProcess(words, process.wait(), out.read(), errors.read())


# --- the server


def serve() -> None:
    """Do what each line of stdin asks for, and print the answer. In a forked process it does not return."""
    del sys.path[0]  # this folder, in which a module has the name of SGLang's package
    gc.disable()  # there is no garbage among what is imported
    import impala_llm.actor
    import impala_llm.algorithms.registry
    import impala_llm.commands.parser
    import impala_llm.commands.preflight
    import impala_llm.learner
    import impala_llm.observability.tensorboard  # noqa: F401
    from impala_llm.compiled import import_registries

    import_registries()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no thread but the one that forks"
    gc.freeze()  # a fork that looks through all that was imported copies its memory
    gc.enable()
    answers: dict[str, Callable[..., int | None]] = {"start": start, "poll": poll, "wait": wait}
    for line in sys.stdin:
        request, *arguments = json.loads(line)
        print(json.dumps(answers[request](*arguments)), flush=True)


def start(words: list[str], folder: str, environment: dict[str, str], out: str, errors: str) -> int:
    """Fork a process that runs a command. Returns its number."""
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY
    streams = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, append, 0o666) for path in (out, errors))]
    child = os.fork()
    for own, stream in enumerate(streams):
        if child == 0:
            os.dup2(stream, own)
        os.close(stream)
    if child == 0:
        become(words, folder, environment)
    return child


def become(words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Run a command, in a process that was forked for it, to the end of the process."""
    from impala_llm import cli

    os.chdir(folder)
    path = environment["PYTHONPATH"].split(os.pathsep)
    if words[0] in ("train", "actors") and not any((Path(each) / "sitecustomize.py").exists() for each in path):
        stand_by()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [folder, *path]  # as `python -m` has it
    np.random.seed()  # the generator of `random` does so by itself
    if sys.stdout.isatty():
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if words[0] in SCRIPTS:
        importlib.import_module(f"impala_llm.{words[0]}").run(words[1:])
    sys.argv[1:] = words
    sys.exit(cli.main())


class Standby:
    """A run's fork server, from before it is asked for: the part of `subprocess.Popen` that the run's supervisor uses.

    It is forked while the command has done nothing yet, waits for its environment, and is then what the program would
    be. It ends with the command.
    """

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._events, events = os.pipe()
        command = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(command)
            os.setsid()
            os.dup2(requests, 0)
            for descriptor in (requests, self._requests, self._events):
                os.close(descriptor)
            os.dup2(2, 1)
            serve_forks(events)
        os.close(requests)
        os.close(events)
        self.stdin = os.fdopen(self._requests, "wb")
        self.events = os.fdopen(self._events, "rb", buffering=0)
        self.returncode: int | None = None
        self.is_new = True

    def begin(self, environment: Mapping[str, str]) -> None:
        self.is_new = False
        self.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
        self.stdin.flush()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = poll(self.pid)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = wait(self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def stand_by() -> None:
    """Fork the fork server that this process, a command that trains, will ask for."""
    from impala_llm import launch
    from impala_llm.processes.fork_server import ForkServer, begin_server

    standby = Standby()

    def begin(environment: Mapping[str, str]) -> Any:
        if not standby.is_new:
            return begin_server(environment)
        standby.begin(environment)
        return standby, standby.events

    launch.ForkServer = functools.partial(ForkServer, begin=begin)  # type: ignore[misc,assignment]


def serve_forks(events: int) -> NoReturn:
    """The life of a run's fork server, from when it is told its environment, on standard input. events: descriptor."""
    from impala_llm.processes import fork_server

    line = b""
    while not line.endswith(b"\n"):  # and no byte more: what follows is for the fork server
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        line += byte
    environment = json.loads(line)
    fork_server.show_environment(environment)
    fork_server.show_command_line([sys.executable, fork_server.__file__])
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [str(Path(fork_server.__file__).parent), *environment["PYTHONPATH"].split(os.pathsep)]
    fork_server.main(events)


def poll(pid: int) -> int | None:
    """The exit code of a process; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def wait(pid: int) -> int:
    """The exit code of a process, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    serve()
