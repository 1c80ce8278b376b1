"""How processes are ended: politely first, then for certain, wherever they hang by then."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from impala_llm import launch
from impala_llm.config import load
from impala_llm.launch import FAMILY, Child

SLEEP = "import time; time.sleep(600)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
# Starts a stubborn process in a session of its own, as torchrun does, says its pid, and sleeps.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def make_child(name: str, code: str, log: Path | None = None) -> Child:
    return Child(name, [sys.executable, "-c", code], log, {**os.environ, FAMILY: "test-supervision"})


def first_line(log: Path, child: Child) -> str:
    """What the child said first, once it has."""
    while not log.exists() or "\n" not in log.read_text():
        assert child.poll() is None
        try:
            child.process.wait(0.02)  # type: ignore[union-attr]
        except subprocess.TimeoutExpired:
            continue
    return log.read_text().splitlines()[0]


@pytest.mark.system
@pytest.mark.parametrize("parent_is_gone", [False, True])
def test_a_grandchild_that_ignores_signals_is_ended_too(
    parent_is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    parent = make_child("parent", PARENT, tmp_path / "log")
    other = make_child("other", SLEEP)
    parent.start()
    other.start()
    grandchild = psutil.Process(int(first_line(tmp_path / "log", parent)))
    if parent_is_gone:
        parent.process.kill()  # type: ignore[union-attr]
        parent.process.wait()  # type: ignore[union-attr]
    launch.end([parent, other], polite=False)
    assert parent.poll() is not None and other.poll() is not None
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


@pytest.mark.system
@pytest.mark.parametrize(
    ("codes", "expected", "said"),
    [((0, 0), 0, ""), ((0, 3), 1, "actor 1 failed (exit code 3)")],
)
def test_actors_alone_tell_whether_one_failed(
    codes: tuple[int, ...],
    expected: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    children = [
        make_child(f"actor {i}", f"raise SystemExit({code})", tmp_path / f"{i}") for i, code in enumerate(codes)
    ]
    monkeypatch.setattr(launch, "plan_actors", lambda config, overrides: children)
    assert launch.supervise_actors(load(["experiment=toy", f"run.dir={tmp_path}"]), []) == expected
    assert said in capfd.readouterr().err
