"""Processes that a fork server starts are as those that start by themselves."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from impala_llm.processes.child_processes import FAMILY, Child, end
from impala_llm.processes.fork_server import ForkedProcess, ForkServer, can_fork
from impala_llm.settings import PACKAGE
from tests.system.runs import START_S, Run

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not can_fork(), reason="no fork server on this host"),
    pytest.mark.xdist_group("fork_server"),  # several use the same one
]


@contextlib.contextmanager
def fork_server(**environment: str) -> Iterator[ForkServer]:
    forks = ForkServer({**os.environ, "PYTHONPATH": str(PACKAGE.parent), FAMILY: "0" * 32, **environment})
    try:
        yield forks
    finally:
        forks.close()


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A server that a test may kill."""
    with fork_server() as forks:
        yield forks


@pytest.fixture(scope="module")
def shared() -> Iterator[ForkServer]:
    """A server that stays."""
    with fork_server() as forks:
        yield forks


def start(server: ForkServer, log: Path, *settings: str, **environment: str) -> ForkedProcess:
    """An actor; one of a run that nobody has started waits for its learner."""
    reading, writing = os.pipe()
    words = ["--index", "3", "experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}", *settings]
    command = [sys.executable, str(PACKAGE / "actor.py"), *words]
    process = server.start(command, {**server.environment, **environment}, log, writing)
    os.close(writing)
    os.close(reading)
    return process


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_started(process: ForkedProcess) -> bool:
    return process.poll() is None and process.pid is not None


def test_a_forked_process_has_its_own_session_command_line_environment_and_log(
    shared: ForkServer, tmp_path: Path
) -> None:
    log = tmp_path / "a log"
    waiting = start(shared, log, GREETING="hello to you", **{FAMILY: "1" * 32})
    wait_for(lambda: has_started(waiting))
    assert waiting.pid is not None
    seen = psutil.Process(waiting.pid)
    assert seen.cmdline()[:2] == [sys.executable, str(PACKAGE / "actor.py")] and "--index" in seen.cmdline()
    assert seen.environ()[FAMILY] == "1" * 32, "by which its descendants are found"
    assert os.getsid(waiting.pid) == waiting.pid == os.getpgid(waiting.pid)
    assert Path(f"/proc/{waiting.pid}/fd/0").readlink() == Path("/dev/null")
    assert Path(f"/proc/{waiting.pid}/fd/1").readlink() == Path(f"/proc/{waiting.pid}/fd/2").readlink() == log
    waiting.signal_group(signal.SIGTERM)
    assert waiting.wait() == -signal.SIGTERM

    refused = start(shared, tmp_path / "another", "actor.num_actors=many", GREETING="hello")
    assert refused.wait() == 2
    assert "actor.num_actors" in (tmp_path / "another").read_text()
    assert "actor.num_actors" not in log.read_text()


def test_what_the_interpreter_prints_at_its_start_is_no_event_and_exit_codes_come_although_sigchld_was_ignored(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello from the site')")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some launchers have it
    try:
        with fork_server(PYTHONPATH=path, PYTHONUNBUFFERED="1") as forks:
            refused = start(forks, tmp_path / "log", "actor.num_actors=many")  # which starts the server, too
            signal.signal(signal.SIGCHLD, before)
            assert refused.wait() == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_all_end_with_their_server_and_another_one_starts_the_next(server: ForkServer, tmp_path: Path) -> None:
    first = start(server, tmp_path / "log")
    wait_for(lambda: has_started(first))
    assert first.pid is not None
    forker = psutil.Process(first.pid).parent()
    assert forker is not None
    forker.kill()
    assert first.wait() == -signal.SIGKILL
    wait_for(lambda: not psutil.pid_exists(first.pid or 0))

    second = start(server, tmp_path / "log")
    wait_for(lambda: has_started(second))
    server.close()
    assert second.poll() == -signal.SIGKILL


def test_a_request_that_a_dead_server_has_not_read_leaves_no_error_behind(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    first = start(server, tmp_path / "log")
    wait_for(lambda: has_started(first))
    forker = psutil.Process(first.pid).parent()
    assert forker is not None
    forker.kill()
    assert first.wait() == -signal.SIGKILL
    with monkeypatch.context() as unseen:
        unseen.setattr(subprocess.Popen, "poll", lambda _process: None)
        lost = start(server, tmp_path / "log")
    last = start(server, tmp_path / "log")
    wait_for(lambda: has_started(last))
    assert lost.poll() == -signal.SIGKILL
    gc.collect()
    assert errors == []


def test_what_is_told_to_end_before_it_is_forked_does_not_stay(shared: ForkServer, tmp_path: Path) -> None:
    cancelled = start(shared, tmp_path / "cancelled")  # it would wait for ever
    cancelled.signal_group(signal.SIGTERM)
    assert cancelled.poll() == -signal.SIGTERM
    behind = start(shared, tmp_path / "log")
    wait_for(lambda: has_started(behind))
    assert cancelled.poll() == -signal.SIGTERM
    forker = psutil.Process(behind.pid).parent()
    assert forker is not None
    wait_for(lambda: [child.pid for child in forker.children()] == [behind.pid])


def test_a_run_whose_fork_server_is_killed_goes_on_to_its_end(tmp_path: Path) -> None:
    with Run(tmp_path, "experiment=toy", "learner.total_updates=12", "pipeline.heartbeat_s=0.2") as run:
        supervisor = run.train(as_users_do=True)
        run.wait_for_updates(3)
        [forker] = run.processes(str(PACKAGE / "processes/fork_server.py"))
        assert {child.pid for child in forker.children()} == {
            process.pid for name in ("learner.py", "actor.py") for process in run.processes(str(PACKAGE / name))
        }
        forker.kill()
        assert supervisor.wait(START_S) == 0, run.printed()
        assert "killed by SIGKILL" in run.printed()
        assert (tmp_path / "policy").is_dir()
        run.assert_gone()


def test_forked_processes_draw_different_random_numbers(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a user's environment, which may draw from the generators of the modules. Its module has the name of
    one in processes/, where the server's own file is."""
    draws = "import random, numpy, torch\nprint('drew', random.random(), numpy.random.random(), torch.rand(1).item())\n"
    (tmp_path / "programs.py").write_text(draws)
    monkeypatch.chdir(tmp_path)
    drawn = []
    for name in ("first", "second"):
        assert start(server, tmp_path / name, "env=programs:no_such_suite").wait() == 2
        [line] = [line for line in (tmp_path / name).read_text().splitlines() if "drew" in line]
        drawn.append(line.split()[-3:])
    assert all(one != other for one, other in zip(*drawn, strict=True)), drawn


def test_processes_end_although_their_server_is_stopped(server: ForkServer, tmp_path: Path) -> None:
    words = ["--index", "3", "experiment=toy", f"run.name=test-{uuid.uuid4().hex[:12]}"]
    command = [sys.executable, str(PACKAGE / "actor.py"), *words]
    child = Child("actor 3", command, tmp_path / "log", {**server.environment, FAMILY: "2" * 32}, forks=server)
    child.start()
    wait_for(lambda: child.poll() is None and child.processes[0].pid is not None)
    pid = child.processes[0].pid
    forker = psutil.Process(pid).parent()
    assert forker is not None
    forker.suspend()
    end([child], polite=False)
    wait_for(lambda: not psutil.pid_exists(pid or 0))
    assert child.poll() is not None and not psutil.pid_exists(forker.pid)
