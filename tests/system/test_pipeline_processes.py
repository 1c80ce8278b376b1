"""Receiver and actors as processes, one of them killed: nothing that was acknowledged is lost, nothing comes twice."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUM_TRAJECTORIES = 1000


def start(role: str, run_name: str, log: Path, argument: str) -> subprocess.Popen[bytes]:
    log.touch()
    command = [sys.executable, "-m", "tests.system.pipeline_process", role, run_name, str(log), argument]
    return subprocess.Popen(command, cwd=ROOT)


def read_lines(log: Path) -> list[list[str]]:
    """Words of each complete line."""
    return [line.split() for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def count(log: Path, word: str) -> int:
    return sum(line[0] == word for line in read_lines(log))


@pytest.mark.system
def test_nothing_acknowledged_is_lost_or_doubled_when_an_actor_is_killed(tmp_path: Path) -> None:
    run_name = f"test-{os.getpid()}"
    logs = {name: tmp_path / name for name in ("receiver", "victim", "survivor")}
    processes = {
        "receiver": start("receiver", run_name, logs["receiver"], str(NUM_TRAJECTORIES)),
        "victim": start("actor", run_name, logs["victim"], "victim"),
        "survivor": start("actor", run_name, logs["survivor"], "survivor"),
    }
    try:
        deadline = time.monotonic() + 120
        while count(logs["victim"], "acknowledged") < 50 or count(logs["survivor"], "acknowledged") < 50:
            assert time.monotonic() < deadline and processes["receiver"].poll() is None
            time.sleep(0.01)
        processes["victim"].kill()
        assert processes["receiver"].wait(120) == 0
        assert processes["survivor"].wait(30) == 0
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

    sent = {
        words[1]: words[2] for name in ("victim", "survivor") for words in read_lines(logs[name]) if words[0] == "sent"
    }
    acknowledged = Counter(
        words[1] for name in ("victim", "survivor") for words in read_lines(logs[name]) if words[0] == "acknowledged"
    )
    arrived = read_lines(logs["receiver"])
    arrived_digests = {episode: digest for _, episode, _, digest in arrived}
    assert len(arrived) >= NUM_TRAJECTORIES
    assert max(Counter((episode, unroll) for _, episode, unroll, _ in arrived).values()) == 1
    assert max(Counter(ticket for ticket, _, _, _ in arrived).values()) == 1
    assert max(acknowledged.values()) == 1
    assert acknowledged.keys() <= arrived_digests.keys()
    assert arrived_digests.items() <= sent.items()
    # The victim's open tickets were granted again: all but those at the end of the run have arrived.
    tickets = {int(ticket) for ticket, _, _, _ in arrived}
    assert len(set(range(max(tickets) + 1)) - tickets) <= 3 * 32
    assert list(Path("/dev/shm").glob(f"impala_llm-*-{run_name}*")) == []
