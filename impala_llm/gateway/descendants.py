"""Processes that agents have started, found by a variable of their environment, which children inherit.

A process group is not enough: programs put what they start into sessions of its own, and outlive who started them.
"""

import contextlib
import os

import psutil

WORKER = "IMPALA_AGENT_WORKER"
"""Variable that names the process of the pool below which a process runs."""


def kill_started(variable: str, value: str) -> None:
    """Kill all processes, but for this one, that have a variable of this value. Does nothing without a value."""
    for process in psutil.process_iter() if value else ():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                process.kill()


def folder_prefix(worker: str) -> str:
    """Beginning of the names of the temporary folders that a process of the pool makes, one for each program."""
    return f"impala-agent-{worker}-"
