"""Processes that agents have started, found by a variable of their environment, which children inherit.

A process group is not enough: programs put what they start into sessions of its own, and outlive who started them.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

WORKER = "IMPALA_AGENT_WORKER"
"""Variable that names the process of the pool below which a process runs."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/PID/stat, proc_pid_stat(5)."""
_LONGEST_S = 2.0
"""Time after which processes that start others faster than they are found are left."""


def kill_started(variable: str, value: str) -> None:
    """Kill all processes, but for this one, that have a variable of this value. Does nothing without a value.

    They are looked for until two passes in a row find none, none that has ended before its variables were read, as it
    may have started another, and none that is amid the start of a program, which has no variables yet. That is read
    from /proc, since a pass has to be short.
    """
    hidden: set[int] | None = None
    quiet, until = 0, time.monotonic() + _LONGEST_S
    while value and quiet < 2 and time.monotonic() < until:
        hidden_before, hidden = hidden, set()
        found = _stop(f"{variable}={value}".encode(), hidden)
        for pid in found:
            _signal(pid, signal.SIGKILL)
        is_quiet = not found and (hidden_before is None or hidden <= hidden_before) and not any(map(_starts, hidden))
        quiet = quiet + 1 if is_quiet else 0


def _stop(entry: bytes, hidden: set[int]) -> list[int]:
    """Stop all processes, but for this one, with an entry in their environment: none starts another while they are
    killed.

    Args:
        hidden: gets the processes that show no variables: those of the kernel, those that have just ended, and those
            that are starting a program.

    Returns:
        The processes that were stopped.
    """
    found = []
    # The newest first: of a row of processes, each of which starts the next and ends, only the last one lives.
    for pid in reversed(psutil.pids()):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except PermissionError:  # another user's
            continue
        except OSError:
            environment = b""
        if not environment:
            hidden.add(pid)
        elif entry in environment.split(b"\0") and pid != os.getpid():
            _signal(pid, signal.SIGSTOP)
            found.append(pid)
    return found


def _starts(pid: int) -> bool:
    """Return whether a process is amid execve: it has memory, and its variables have no place in it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    state, flags, env_end = fields[0], int(fields[6]), int(fields[48])
    return state not in "ZX" and not flags & _KERNEL_THREAD and env_end == 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def folder_prefix(worker: str) -> str:
    """Beginning of the names of the temporary folders that a process of the pool makes, one for each program."""
    return f"impala-agent-{worker}-"
