"""Ends of processes: SIGTERM first, then SIGKILL, wherever they hang by then."""

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from impala_llm import launch
from impala_llm.config import load
from impala_llm.processes import child_processes
from impala_llm.processes.child_processes import FAMILY, Child
from impala_llm.processes.supervised import SUPERVISOR as SUPERVISOR_PID

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
    """First line of the child's log, once it is there."""
    while not log.exists() or "\n" not in log.read_text():
        assert child.poll() is None
        try:
            child.processes[0].wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    return log.read_text().splitlines()[0]


@pytest.mark.system
@pytest.mark.parametrize("parent_is_gone", [False, True])
def test_a_grandchild_that_ignores_signals_is_ended_too(
    parent_is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "GRACE_S", 0.5)
    parent = make_child("parent", PARENT, tmp_path / "log")
    other = make_child("other", SLEEP)
    parent.start()
    other.start()
    grandchild = psutil.Process(int(first_line(tmp_path / "log", parent)))
    if parent_is_gone:
        parent.processes[0].kill()
        parent.processes[0].wait()
    child_processes.end([parent, other], polite=False)
    assert parent.poll() is not None and other.poll() is not None
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


@pytest.mark.system
@pytest.mark.parametrize(
    ("codes", "expected", "said"),
    [((0, 0), 0, ""), ((0, 3), 1, "actor 1 failed (exit code 3)"), ((0, 2), 2, "actor 1 failed (exit code 2)")],
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
    monkeypatch.setattr(launch, "plan_actors", lambda *_: children)
    assert launch.supervise_actors(load(["experiment=toy", f"run.dir={tmp_path}"]), []) == expected
    assert said in capfd.readouterr().err


# A supervisor that starts a child, says its pid, and is killed; the child says when it follows.
SUPERVISOR = """
import os, sys, time
from pathlib import Path
from impala_llm.processes.child_processes import FAMILY, Child
here = "from impala_llm.processes.supervised import end_with_supervisor as follow; follow(); print('here', flush=True)"
code = here + "; import time; time.sleep(600)"
child = Child("child", [sys.executable, "-c", code], Path(sys.argv[1]), {**os.environ, FAMILY: "test-orphan"})
child.start()
while not Path(sys.argv[1]).read_text():
    time.sleep(0.01)
print(child.processes[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.system
def test_a_child_ends_with_its_supervisor(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.system
def test_a_child_that_starts_after_its_supervisor_has_ended_ends_at_once() -> None:
    code = "from impala_llm.processes.supervised import end_with_supervisor; end_with_supervisor(); print('went on')"
    environment = {**os.environ, SUPERVISOR_PID: "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "has ended" in ended.stderr and not ended.stdout


@pytest.mark.system
def test_progress_is_what_a_child_has_reported_since_it_was_asked(tmp_path: Path) -> None:
    """More often than the pipe holds, and after that it dies."""
    report = "from impala_llm.processes.supervised import report_progress"
    code = f"{report}\nfor _ in range(100_000): report_progress()\nprint('ready')"
    child = make_child("child", code, tmp_path / "log")
    assert not child.has_worked()
    child.start()
    child.processes[0].wait(60)
    assert child.has_worked()
    child.command[-1] = "pass"
    child.start()
    child.processes[0].wait(60)
    assert not child.has_worked()


# Ranks of which the second dies of a signal at its first start, and the first of its loss; at the second all end well.
RANK = """
import os, sys, time
from pathlib import Path
starts = Path(sys.argv[1]) / f"starts-{os.environ['RANK']}"
with starts.open("a") as file:
    file.write(f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {os.environ['IMPALA_LLM_RENDEZVOUS']}\\n")
if len(starts.read_text().splitlines()) == 1:
    while not (starts.parent / "starts-0").exists():
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 35)
    time.sleep(0.3)
    sys.exit("RuntimeError: Connection closed by peer")  # as gloo says it
"""


@pytest.mark.system
def test_ranks_start_together_again_when_one_has_died(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    learner = Child(
        "learner",
        [sys.executable, "-c", RANK, str(tmp_path)],
        tmp_path / "log",
        {**os.environ, FAMILY: "test-ranks"},
        num_ranks=2,
        rendezvous_dir=tmp_path,
    )
    learner.start()
    deadline = time.monotonic() + 60
    learner.processes[0].wait(60)  # type: ignore[call-arg]
    while child_processes.keep_alive(learner, final=(0,)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert learner.poll() == 0
    assert f"died (rank 1 killed by signal 35), again in 1 s; its log is {tmp_path}/log\n" in capfd.readouterr().err
    lines = [(tmp_path / f"starts-{rank}").read_text().splitlines() for rank in range(2)]
    assert [line.split()[:2] for line in lines[1]] == [["2", "1"], ["2", "1"]]
    first, second = ({of_rank[start].split()[2] for of_rank in lines} for start in range(2))
    assert len(first) == len(second) == 1 and first != second  # each start meets at a place of its own


@pytest.mark.system
def test_the_last_line_of_a_log_is_of_the_last_start_and_no_progress_bar(tmp_path: Path) -> None:
    bar = "print('Loading weights:  50%|#####     | 1/2\\rLoading weights: 100%|##########| 2/2')"
    child = make_child("actor 0", f"print('no such model'); {bar}", tmp_path / "log")
    child.start()
    child.processes[0].wait(60)
    assert child.last_log_line() == f": no such model (more in {tmp_path / 'log'})"
    child.command[-1] = bar
    child.start()
    child.processes[0].wait(60)
    assert child.last_log_line() == ""


@pytest.mark.system
def test_after_a_signal_the_last_line_of_a_log_does_not_stand_for_the_cause(tmp_path: Path) -> None:
    child = make_child(
        "learner", "import os; print('all is well', flush=True); os.kill(os.getpid(), 9)", tmp_path / "log"
    )
    child.start()
    child.processes[0].wait(60)
    cause, _, last = child.last_log_line().partition("; the last line of its log")
    assert cause == "; where nobody has sent that, the system did, for lack of memory"
    assert last == f": all is well (more in {tmp_path / 'log'})"


LOGS = """
import sys
from impala_llm.processes.supervised import end_with_supervisor
end_with_supervisor()
print("first")
print("second\\nthird", file=sys.stderr)
"""


@pytest.mark.system
def test_the_lines_of_a_log_are_timed_and_a_full_disk_takes_them_from_nobody(tmp_path: Path) -> None:
    child = make_child("learner", LOGS, tmp_path / "log")
    child.start()
    child.processes[0].wait(60)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 3 and all(re.fullmatch(r"\d\d:\d\d:\d\d (first|second|third)", line) for line in lines)
    assert child.last_log_line() == f": third (more in {tmp_path / 'log'})"
    (tmp_path / "full").symlink_to("/dev/full")
    child.log = tmp_path / "full"
    child.start()
    assert child.processes[0].wait(60) == 0


@pytest.mark.system
def test_messages_arrive_whole_and_in_order_among_reports_of_progress(tmp_path: Path) -> None:
    """A message that does not fit into the pipe, by its own length or for all that is in there already, is lost and
    blocks nobody."""
    code = """
from impala_llm.processes.supervised import report_progress, say, tell
assert not tell(say="x" * 5000)
say("one\\ntwo")
report_progress()
tell(update=[7, {"rollout/score": 0.5, "loss/policy": float("nan")}, None])
while tell(wait="actors" * 100):
    pass
"""
    child = make_child("learner", code, tmp_path / "log")
    child.start()
    child.processes[0].wait(60)
    assert child.poll() == 0, child.last_log_line()
    messages = child.receive()
    assert messages[0] == {"say": "one\ntwo"}
    step, metrics, progress = messages[1]["update"]
    assert (step, metrics["rollout/score"], progress) == (7, 0.5, None) and metrics["loss/policy"] != 0
    assert len(messages) > 3 and all(message == {"wait": "actors" * 100} for message in messages[2:])
    assert child.receive() == []
    assert child.has_worked() and not child.has_worked()


@pytest.mark.system
def test_lines_on_the_pipe_of_a_child_that_are_no_messages_are_passed_over_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An environment has the descriptor too."""
    code = """
import os
from impala_llm.processes.supervised import PROGRESS, report_progress, tell
for line in (b"hello", b"5", b"[]", b"\\xff", b"", b"[" * 50_000, b'{"at_play": [' + b"9" * 400 + b", 1.5]}"):
    os.write(int(os.environ[PROGRESS]), line + b"\\n")
report_progress()
tell(say="one")
"""
    child = make_child("actor 0", code)
    child.start()
    assert child.processes[0].wait() == 0
    assert child.receive() == [{"say": "one"}] and child.has_worked()
    [warning] = caplog.messages
    assert "actor 0" in warning and "hello" in warning


@pytest.mark.system
def test_a_look_at_the_pipe_of_a_child_ends_while_the_child_floods_it() -> None:
    """With lines and without any; SIGALRM ends the flood."""
    for line in (b".\n", b"."):
        code = f"""
import os, signal
from impala_llm.processes.supervised import PROGRESS
pipe = int(os.environ[PROGRESS])
os.set_blocking(pipe, True)
signal.alarm(20)
while True:
    os.write(pipe, {line!r} * 50_000)
"""
        child = make_child("actor 0", code)
        child.start()
        assert child.pipe is not None and select.select([child.pipe], [], [], 60)[0]
        for _ in range(10):
            child.receive()
        assert child.poll() is None and len(child.unread) <= select.PIPE_BUF
        child_processes.end([child], polite=False)
