"""Processes that agents have started are killed, even if they try to escape."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from impala_llm.gateway.descendants import kill_started

ROW = """
import os, sys, time
pipe, until = int(sys.argv[1]), time.monotonic() + 5.0
os.setsid()
os.write(pipe, b"begun ")
while time.monotonic() < until:
    if os.fork():
        os._exit(0)
os.write(pipe, b"survived")
"""
"""Each of these processes starts the next one, and ends."""


@pytest.mark.system
def test_a_row_of_processes_that_start_one_another_is_killed() -> None:
    key = f"sk-{os.getpid()}"
    reading, writing = os.pipe()
    command = [sys.executable, "-S", "-c", ROW, str(writing)]
    with (
        subprocess.Popen(command, env={**os.environ, "OPENAI_API_KEY": key}, pass_fds=[writing]),
        open(reading, "rb") as pipe,
    ):
        os.close(writing)
        assert pipe.read(6) == b"begun "
        kill_started("OPENAI_API_KEY", key)
        assert pipe.read() == b""  # its end comes once all of them have ended


@pytest.mark.parametrize("num_passes", [1, 4])
def test_a_process_amid_the_start_of_its_program_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, num_passes: int
) -> None:
    """Its variables are empty, and have no place in its memory yet, on a busy machine for several passes."""
    key = f"sk-{os.getpid()}-{num_passes}"
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "OPENAI_API_KEY": key}) as started:
        looks, read_bytes, read_text = Counter[str](), Path.read_bytes, Path.read_text
        folder = Path(f"/proc/{started.pid}")

        def bytes_of(path: Path) -> bytes:
            looks[str(path)] += 1
            return b"" if path == folder / "environ" and looks[str(path)] <= num_passes else read_bytes(path)

        def text_of(path: Path) -> str:
            text = read_text(path)
            if path != folder / "stat" or looks[str(folder / "environ")] > num_passes:
                return text
            command, _, fields = text.rpartition(") ")
            before = fields.split()
            return f"{command}) {' '.join([*before[:47], '0', '0', *before[49:]])}"  # env_start and env_end

        monkeypatch.setattr(Path, "read_bytes", bytes_of)
        monkeypatch.setattr(Path, "read_text", text_of)
        kill_started("OPENAI_API_KEY", key)
        monkeypatch.undo()
        try:
            assert started.wait(5) == -signal.SIGKILL
        finally:
            started.kill()
