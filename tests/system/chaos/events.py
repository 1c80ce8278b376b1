"""Logs of what the processes of the chaos test did and saw.

Invariant: an event is one line, written in one call, and begins on a line of its own: a process that is killed in the
middle of one spoils no other.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """time: monotonic, in seconds, the same clock in all processes. pid: tells incarnations of a process apart."""

    time: float
    pid: int
    kind: str
    values: list[Any]


class EventLog:
    """Append-only; any number of incarnations of a process write to it, one after another."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pid = os.getpid()

    def say(self, kind: str, *values: object) -> None:
        """values: what JSON can hold."""
        os.write(self._handle, b"\n%s\n" % json.dumps([time.monotonic(), self._pid, kind, *values]).encode())


def read_events(path: Path) -> list[Event]:
    """All whole lines, in the order in which they were written; none where there is no file."""
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            at, pid, kind, *values = json.loads(line)
        except ValueError:
            continue  # blank, or cut short by a kill
        events.append(Event(at, pid, kind, values))
    return events
