"""A command watched in a pseudo terminal: its screen as a terminal shows it, over time.

    python -m tests.system.watching 80 impala-llm train experiment=quickstart     prints what was seen

Two emulated terminals get the same bytes. One has the width that the command is told and shows what people see; the
other is far wider, so that a row of it that is longer than the width is a line that people see wrapped.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil
import pyte

from tests.system.forked_command import ForkedProcess, command_server

ROWS = 200
"""Rows of both terminals: nothing of a short run scrolls away."""
WIDE = 1000


class Watched:
    """A command under way in a terminal of this many columns. Leaving the context kills it, with its process group.

    Args:
        command: a program with its arguments; or where `is_forked` the words of a `forked_command`.
    """

    def __init__(
        self,
        columns: int,
        command: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        is_forked: bool = False,
    ) -> None:
        self.columns = columns
        self.seen: list[tuple[float, str]] = []
        """Every picture of the screen: seconds since the start at which it was first seen, and what it showed."""
        self._screens = [pyte.Screen(columns, ROWS), pyte.Screen(WIDE, ROWS)]
        self._streams = [pyte.ByteStream(screen) for screen in self._screens]
        self.has_ended = False
        self._long: set[str] = set()
        self._started = time.monotonic()
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {
            **os.environ,
            **(environment or {}),
            "TERM": "xterm-256color",
            "COLUMNS": str(columns),
            "LINES": "50",
        }
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if is_forked:
            name = Path(os.ttyname(theirs))
            self._process = command_server().start(command, cwd, environment, name, name)
        else:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
            )
        os.close(theirs)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            if isinstance(self._process, ForkedProcess):
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._terminal)

    @property
    def rows(self) -> list[str]:
        """Rows of the screen as of the last look, without the empty ones."""
        return [row.rstrip() for row in self._screens[0].display if row.strip()]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    @property
    def long_rows(self) -> list[str]:
        """Lines that were ever longer than the terminal, or cut to fit into it."""
        return sorted(self._long)

    @property
    def longest_pause(self) -> tuple[float, float, str]:
        """Seconds of the longest time without any change, when it began, and what the screen ended with."""
        times = [0.0, *(at for at, _ in self.seen)]
        screens = ["", *(text for _, text in self.seen)]
        pause, at = max((after - before, i) for i, (before, after) in enumerate(zip(times, times[1:], strict=False)))
        return pause, times[at], screens[at][-300:]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def processes(self, script: str) -> list[psutil.Process]:
        """Descendants that run a script of this name."""
        found = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in found if any(Path(word).name == script for word in process.cmdline())]

    def wait_for(self, condition: Callable[[], object], what: str, timeout_s: float, patience_s: float = 60.0) -> None:
        """Until the condition holds. Fails at the deadline, at the end of the command, and where nothing changes."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert not self.has_ended, f"the command ended before {what}; the screen:\n{self.text}"
            self.look()
            now = time.monotonic()
            assert now < deadline, f"{what} did not happen; the screen:\n{self.text}"
            still = now - self._started - (self.seen[-1][0] if self.seen else 0.0)
            assert still < patience_s, f"nothing has changed for {still:.0f} s; the screen:\n{self.text}"

    def wait(self, timeout_s: float, patience_s: float = 60.0) -> int:
        """The exit code, once it has ended."""
        self.wait_for(lambda: self.has_ended, "its end", timeout_s, patience_s)
        return self._process.wait()

    def look(self, most_s: float = 0.25) -> None:
        """Take in what is shown within this time."""
        until = time.monotonic() + most_s
        has_changed = False
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._terminal], [], [], left)[0]:
                break
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # nobody has the other end
                self.has_ended = True
                break
            for stream in self._streams:
                stream.feed(data)
            self._note_long_rows()
            has_changed = True
        if not self.seen or (has_changed and self.text != self.seen[-1][1]):
            self.seen.append((time.monotonic() - self._started, self.text))

    def _note_long_rows(self) -> None:
        """Note those of the rows that have changed: to draw all of a wide screen takes a tenth of a second."""
        wide = self._screens[1]
        for number in wide.dirty:
            cells = wide.buffer[number]
            end = 1 + max((column for column, cell in cells.items() if cell.data.strip()), default=-1)
            if end > self.columns or (end and cells[end - 1].data == "…"):
                self._long.add("".join(cells[column].data for column in range(end)))
        wide.dirty.clear()


def main(argv: Sequence[str]) -> int:
    """Watch a command to its end and print the figures and the last screen."""
    with Watched(int(argv[0]), argv[1:], Path.cwd()) as watched:
        code = watched.wait(timeout_s=3600, patience_s=3600)
        pause, at, screen = watched.longest_pause
        print(watched.text)
        print(f"\n{argv[0]} columns, exit code {code}, {len(watched.seen)} pictures in {watched.seen[-1][0]:.0f} s")
        print(f"longest time without a change: {pause:.1f} s, {at:.1f} s after the start, below this:\n{screen}")
        times = [0.0, *(seen_at for seen_at, _ in watched.seen)]
        pauses = sorted((round(b - a, 1), round(a, 1)) for a, b in zip(times, times[1:], strict=False))
        print(f"longest ones (seconds, begin): {pauses[-8:][::-1]}")
        print(f"lines longer than the terminal: {watched.long_rows}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
