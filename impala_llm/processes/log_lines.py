"""Standard streams of a supervised process: its log.

Invariant: a full disk, or any other error of the log, ends no process that writes to it; its lines are lost.
"""

import contextlib
import io
import re
import sys
import time
from typing import Any

STAMP = re.compile(r"\d\d:\d\d:\d\d ")
"""The time of day at the beginning of a line."""


class _LogFile(io.FileIO):
    """Descriptor of a log, left open by `close`. Lines get the local time of day in front."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._begins_line = True

    def write(self, data: Any) -> int:
        text = bytes(data)
        if text:
            stamp = time.strftime("%H:%M:%S ").encode()
            begin = stamp if self._begins_line else b""
            self._begins_line = text.endswith(b"\n")
            with contextlib.suppress(OSError):
                super().write(begin + text[:-1].replace(b"\n", b"\n" + stamp) + text[-1:])
        return len(text)


def log_to(descriptor: int) -> io.TextIOWrapper:
    """Text stream that writes whole lines to a log."""
    return io.TextIOWrapper(
        io.BufferedWriter(_LogFile(descriptor)), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def log_standard_streams() -> None:
    """Replace standard output and standard error by streams to the log that they are."""
    sys.stdout.flush()
    sys.stdout, sys.stderr = log_to(1), log_to(2)
