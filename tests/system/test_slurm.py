"""The Slurm scripts as jobs: `srun` starts the command here, with a /dev/shm of its own."""

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.helpers import write_program
from tests.system.runs import ROOT, START_S, Run

SRUN = """
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "node", *words])
"""
"""Each node has a /dev/shm of its own, and a job that is started again is on another one."""
UPDATES = 20


def may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def two_free_ports() -> int:
    """The first of two."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
                return port
            except OSError:
                continue


@pytest.fixture
def job_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LEARNER_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("BIND_ADDRESS", "127.0.0.1")


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.skipif(not may_mount(), reason="no right to give jobs a /dev/shm of their own: it needs root")
@pytest.mark.usefixtures("job_environment")
def test_a_learner_that_loses_its_node_goes_on_at_another_address_with_the_actors_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("experiment=toy", f"learner.total_updates={UPDATES}", "learner.checkpoint_every=3")
    with Run(tmp_path / "unused", *settings) as run:
        monkeypatch.setenv("PORT", str(two_free_ports()))
        actors = run.start("bash", str(ROOT / "deploy/slurm/actors.sh"))  # before its learner
        learner = run.start("bash", str(ROOT / "deploy/slurm/learner.sh"))
        run.directory = tmp_path / "runs" / run.name  # where the scripts put it
        run.wait_for(lambda: len(run.rows()) >= 7, "update 7", 240)
        first = (run.directory / "learner").read_text()
        processes = [process for process in run.processes() if "impala_llm.learner" in process.cmdline()]
        for process in processes:  # torchrun and its rank, with the memory of their node
            process.kill()
        psutil.wait_procs(processes)
        learner.wait(20)

        monkeypatch.setenv("PORT", str(two_free_ports()))
        learner = run.start("bash", str(ROOT / "deploy/slurm/learner.sh"))
        assert learner.wait(240) == 0, run.printed()
        assert actors.wait(START_S) == 0, run.printed()
        assert (run.directory / "learner").read_text() != first
        assert [row["step"] for row in run.rows()] == list(range(1, UPDATES + 1))
        assert [path.name for path in (run.directory / "actors").iterdir()] == [socket.gethostname()]
        assert run.processes() == []
