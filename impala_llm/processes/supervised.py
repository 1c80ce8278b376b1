"""Environment variables and pipe between a process and its supervisor (launch.py).

Invariants: a supervised process ends with its supervisor, whatever ends that. Nothing here blocks: messages are
lost while the pipe is full because the supervisor does not read.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from impala_llm.processes.log_lines import log_standard_streams

SUPERVISED = "IMPALA_LLM_SUPERVISED"
"""Set for a learner whose run directory belongs to its supervisor and outlives the learner."""
NOT_SAVED = 4
"""Exit code of a learner: training is over, and its policy could not be saved. It stays in the run's folder in shared
memory."""
LOST_OWNER = "IMPALA_LLM_LOST_OWNER"
"""Environment variable by which a supervisor passes the result of `wait_for_owner` to its learner."""
SUPERVISOR = "IMPALA_LLM_SUPERVISOR"
"""Process id of the supervisor."""
PROGRESS = "IMPALA_LLM_PROGRESS"
"""Descriptor of the pipe on which a process reports progress and sends messages, a line each."""
WORKED = b"."
"""The line that reports progress; all others are JSON objects."""
RENDEZVOUS = "IMPALA_LLM_RENDEZVOUS"
"""URL of the file through which the ranks of a learner find each other."""
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc's settings, by which processes keep freed memory: fresh pages cost more than the work on them."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's variable: memory of large tensors on a CPU comes in pages of 2 MB."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_supervisor() -> None:
    """Have the kernel kill this process when its supervisor is gone, and time the lines of its log.

    Does nothing without a supervisor.
    """
    supervisor = os.environ.pop(SUPERVISOR, None)  # not for what this process starts itself
    if supervisor is None:
        return
    log_standard_streams()
    die_with_parent(int(supervisor))


def keep_exit_codes() -> None:
    """Give SIGCHLD its default back where it is ignored, as some launchers hand it on: the exit codes of children would
    be lost, and one that was killed would count as one that ended well."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def start_with_pipe(
    command: Callable[[int], Sequence[str]], env: Mapping[str, str] | None = None, bufsize: int = -1
) -> tuple["subprocess.Popen[bytes]", BinaryIO]:
    """Start a process in a session of its own, which reads from its standard input and writes to a pipe of its own.

    On standard output what the interpreter runs at its start, such as a sitecustomize, may print: it goes where
    standard error goes.

    Args:
        command: called with the descriptor to which the process writes.
        env, bufsize: as for subprocess.Popen.

    Returns:
        (process, the pipe's other end, unbuffered).
    """
    reading, writing = os.pipe()
    pipe = os.fdopen(reading, "rb", 0)
    try:
        process = subprocess.Popen(
            command(writing),
            env=env,
            bufsize=bufsize,
            stdin=subprocess.PIPE,
            stdout=2,
            start_new_session=True,
            pass_fds=(writing,),
        )
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(writing)
    return process, pipe


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exits at once if `parent` is not the parent any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        sys.exit("the supervisor of this process has ended")


def report_progress() -> None:
    """Tell the supervisor, where there is one, that this process does its work: it is not in a loop of crashes."""
    _write(WORKED)


def tell(**message: object) -> bool:
    """Send a message to the supervisor, which owns the terminal; see `child_processes.Child.receive`.

    Returns:
        Whether it was sent: not without a supervisor, nor where there is no room, nor if it has PIPE_BUF bytes or more.
    """
    return _write(json.dumps(message).encode())


def say(text: str) -> None:
    """Print a line for the user: above the live view, where a supervisor shows one, and in the log that it keeps.

    It is lost where it cannot be printed: standard output may lie on the disk whose being full is said.
    """
    tell(say=text)
    with suppress(OSError):
        print(text, flush=True)


def say_last(text: str, is_alone: bool = True) -> None:
    """Print why this process ends, and have torchrun's long report end with it too.

    Args:
        is_alone: whether no other process writes to its log. The supervisor shows the last line of that, which may
            otherwise be of another process, about the loss of this one: so it is told by a message.
    """
    if is_alone:
        print(text, file=sys.stderr, flush=True)
    else:
        say(text)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # as torch.distributed.elastic.multiprocessing.errors writes
        why = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": why}))


def _write(line: bytes) -> bool:
    descriptor = os.environ.get(PROGRESS)
    if descriptor is None or len(line) >= select.PIPE_BUF:  # up to that a pipe takes all of it or nothing
        return False
    with suppress(OSError):  # the supervisor is gone, or the pipe is full
        os.write(int(descriptor), line + b"\n")
        return True
    return False


def signal_name(number: int) -> str:
    """SIGTERM of 15; of real-time signals only the first and the last have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
