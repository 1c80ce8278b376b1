"""The Slurm scripts as jobs: `srun` starts the command here, that of the actors with a /dev/shm of its own."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.helpers import write_program
from tests.system.runs import ROOT, START_S, Run

SRUN = """
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    del words[0]
if "impala_llm.learner" not in words:  # another node has another /dev/shm
    words = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "node", *words]
os.execvp(words[0], words)
"""
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


@pytest.mark.system
@pytest.mark.skipif(not may_mount(), reason="no right to give the actors a /dev/shm of their own: it needs root")
def test_a_learner_and_actors_in_jobs_of_their_own_train_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "srun", SRUN)
    with Run(tmp_path / "unused", "experiment=toy", f"learner.total_updates={UPDATES}") as run:
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
        monkeypatch.setenv("LEARNER_ADDRESS", "127.0.0.1")
        monkeypatch.setenv("BIND_ADDRESS", "127.0.0.1")
        monkeypatch.setenv("PORT", str(two_free_ports()))
        actors = run.start("bash", str(ROOT / "deploy/slurm/actors.sh"))
        learner = run.start("bash", str(ROOT / "deploy/slurm/learner.sh"))
        run.directory = tmp_path / "runs" / run.name  # where the scripts put it
        run.wait_for_updates(5)
        assert (run.directory / "learner").read_text().startswith("tcp://127.0.0.1:")
        assert learner.wait(START_S) == 0, run.printed()
        assert actors.wait(START_S) == 0, run.printed()
        assert len(run.rows()) == UPDATES
        assert [path.name for path in (run.directory / "actors").iterdir()] == [socket.gethostname()]
        run.assert_gone()
