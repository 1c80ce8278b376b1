"""`impala-llm` whose learner and actors begin with their modules imported, torch among them.

    IMPALA_LLM_TEST_ROOM=SPARE python tests/system/forked_run.py SPARE train key=value ...

SPARE: any word, as long as the command line and the environment of a child may be longer than those of this process.

They are forks of the supervisor, which has imported what they need: three quarters of what a short run costs are
imports. All else is as it is: they are children of the supervisor with sessions, descriptors, signals, environment and
command line of their own, and run the same `main` to the same exit code. Where the supervisor has more than one thread,
a child is started as ever.
"""

import atexit
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from impala_llm import cli
from impala_llm.settings import PACKAGE

ROOM, SPARE = "IMPALA_LLM_TEST_ROOM", "-" * 2000
MODULES = {str(PACKAGE / f"{name}.py"): f"impala_llm.{name}" for name in ("learner", "actor")}
ALSO = ("impala_llm.engines.embedded.engine", "transformers.models.qwen3.modeling_qwen3")
"""What most of them import later."""


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process that is forked, where its command is that of a learner or an actor."""

    def _execute_child(self, args: Any, *how: Any) -> None:
        (_, _, _, pass_fds, _, environment, _, _, _, *pipes, _, _, _, _, _, _, _) = how
        if len(args) < 2 or args[1] not in MODULES or len(os.listdir("/proc/self/task")) > 1:
            super()._execute_child(args, *how)  # type: ignore[misc]
            return
        module = import_all(args[1])
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            live(module, args, environment, pass_fds, (pipes[0], pipes[3], pipes[5]))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def import_all(path: str) -> Any:
    """Import what a learner or an actor needs. Returns the module of the one at this path."""
    gc.disable()
    for name in (*MODULES.values(), *ALSO):
        importlib.import_module(name)
    gc.enable()
    return sys.modules[MODULES[path]]


def live(
    module: Any, args: Sequence[str], environment: dict[str, str], kept: Sequence[int], streams: Sequence[int]
) -> NoReturn:
    """The life of a child, to its end. What it has of its parent's objects is neither used nor finalized.

    Args:
        kept: descriptors. streams: those that take the places of the standard ones, -1 where these stay.
    """
    status = 1
    try:
        gc.freeze()
        atexit._clear()
        os.setsid()
        for place, stream in enumerate(streams):
            if stream >= 0:
                os.dup2(stream, place)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            try:
                os.close(descriptor)
            except OSError:
                continue  # that of the listing itself
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        show(args, 45)
        show([f"{name}={value}" for name, value in environment.items() if name != ROOM], 47)
        sys.argv = list(args[1:])
        status = module.main(sys.argv[1:])
    except SystemExit as end:
        print(end.code or "", file=sys.stderr) if not isinstance(end.code, int) else None
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def show(words: Sequence[str], field: int) -> None:
    """Put these words where other processes see those of this one.

    Args:
        field: of /proc/self/stat behind the name of the program, that holds where they begin; the next, where they end.
    """
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[field : field + 2])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(text) < end - begin, "SPARE is too short"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


if __name__ == "__main__":
    subprocess.Popen = Forked  # type: ignore[misc]
    sys.argv[1:] = sys.argv[2:]
    sys.exit(cli.main())
