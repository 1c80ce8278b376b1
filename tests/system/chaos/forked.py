"""Processes of the chaos test, each the fork of this one, which has imported what they need.

So a process that is started again costs its own work and no import, which of a rank takes seconds of a core: the monkey
hits processes at work, and seldom one that is still importing. Invariant: this process has one thread, and a forked
one neither its open files nor its way back.
"""

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

_FIRST_OWN = 3
"""Descriptors from here on are of who has forked."""


def prepare(modules: Sequence[str]) -> None:
    """Import what will be started."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork that looks through all that was imported copies its memory


class Forked:
    """`main` of a module, with these arguments, in a process: the part of `subprocess.Popen` that the world uses."""

    def __init__(self, module: str, arguments: list[str], output: Path) -> None:
        """output: what it prints is appended there."""
        assert len(os.listdir("/proc/self/task")) == 1, "a fork has no thread but the one that forks"
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _live(module, arguments, output)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        """Exit code, once it has ended."""
        return self._look(0)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended: its number is its own until then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode


def _live(module: str, arguments: list[str], output: Path) -> None:
    """The life of a forked process, to its end: whatever happens it does not come back into the loop of its parent."""
    code = 1
    try:
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for own, wanted in enumerate((os.open(os.devnull, os.O_RDONLY), printed, printed)):
            os.dup2(wanted, own)
        os.closerange(_FIRST_OWN, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        sys.modules[module].main(arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
