"""Processes that agents have started are killed, even if they try to escape."""

import os
import subprocess
import sys

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
