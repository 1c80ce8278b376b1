import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from impala_llm.pipeline.shm.run_directory import RunDirectory, RunDirectoryError, find_run, remove_run_dir
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader

OWNER = """
import sys
from pathlib import Path
from impala_llm.pipeline.shm.run_directory import RunDirectory
RunDirectory.create("run", Path(sys.argv[1]))
print("made", flush=True)
sys.stdin.read()
"""


IN_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")


def start_owner(base: Path, *inside: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*inside, sys.executable, "-c", OWNER, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    return process


def test_the_owner_makes_and_removes_a_private_directory(tmp_path: Path) -> None:
    run = RunDirectory.create("run", tmp_path)
    root = tmp_path / f"impala_llm-{os.getuid()}-run"
    assert run.path.parent == root
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root, run.path)] == [0o700, 0o700]
    (run.path / "left over").write_text("x")
    run.remove()
    run.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_actor_may_remove_its_file_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create("run", tmp_path)
    for name in ("actor-0.arena", "actor-1.arena"):
        (run.path / name).write_text("x")
    unlink, faster = os.unlink, []

    def unlink_second(name: str, **where: int) -> None:
        unlink(name, **where)
        if not faster:
            faster.append(name)
            raise FileNotFoundError(name)

    monkeypatch.setattr("os.unlink", unlink_second)
    run.remove()
    assert faster and list(tmp_path.iterdir()) == []


def test_a_living_owner_keeps_its_directory_and_a_dead_one_loses_it(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"living process {owner.pid}"):
        RunDirectory.create("run", tmp_path)
    with pytest.raises(RunDirectoryError, match="in use"):
        remove_run_dir("run", tmp_path, timeout_s=0)
    assert RunDirectory.attach("run", tmp_path).path.is_dir()
    (RunDirectory.attach("run", tmp_path).path / "stale").touch()
    owner.kill()
    owner.wait()
    with pytest.raises(RunDirectoryError, match="living owner"):
        RunDirectory.attach("run", tmp_path)
    with RunDirectory.create("run", tmp_path) as run:
        assert [path.name for path in run.path.iterdir()] == ["clock"]
        assert {path.name for path in run.path.parent.iterdir()} == {"run.json", run.path.name}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*IN_PID_NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="no right to make PID namespaces here",
)
def test_an_owner_in_another_pid_namespace_keeps_its_directory(tmp_path: Path) -> None:
    """As two containers that share /dev/shm: its process id means nothing here, or another process."""
    owner = start_owner(tmp_path, *IN_PID_NAMESPACE)
    try:
        with pytest.raises(RunDirectoryError, match="in use"):
            RunDirectory.create("run", tmp_path)
        assert RunDirectory.attach("run", tmp_path).path.is_dir()
    finally:
        owner.kill()
        owner.wait()
    with RunDirectory.create("run", tmp_path):
        pass


def test_a_run_has_a_key_for_its_servers_which_it_keeps_when_it_is_gone_on_with(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    key = RunDirectory.attach("run", tmp_path).server_key
    owner.kill()
    owner.wait()
    with RunDirectory.create("run", tmp_path, take_over=True) as again, RunDirectory.create("other", tmp_path) as other:
        assert again.server_key == key != other.server_key
        assert len(key) == 32


def test_a_run_keeps_its_number_when_it_is_gone_on_with(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    first = RunDirectory.attach("run", tmp_path)
    (first.path / "kept").touch()
    owner.kill()
    owner.wait()
    second = RunDirectory.create("run", tmp_path, take_over=True)
    assert (second.run_id, second.path) == (first.run_id, first.path)
    assert (second.path / "kept").exists() and not first.has_ended()
    second.remove()
    assert first.has_ended()
    with RunDirectory.create("run", tmp_path, take_over=True) as third:
        assert third.run_id != first.run_id
        assert first.has_ended() and not third.has_ended()
        assert not first.path.exists()  # what an earlier run's process writes by path goes nowhere


def test_a_publisher_of_an_earlier_run_reaches_no_board_of_a_later_one(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    old = WeightPublisher(RunDirectory.attach("run", tmp_path).weights_path)
    owner.kill()
    owner.wait()
    tensors = {"w": ("F32", (1,), np.zeros(4, np.uint8))}
    with RunDirectory.create("run", tmp_path) as run:
        new = WeightPublisher(run.weights_path)
        with pytest.raises(FileNotFoundError):
            old.publish(tensors, version=57)
        new.publish(tensors, version=0)
        assert WeightReader(run.weights_path).latest() == 0


def test_a_directory_that_is_being_made_or_removed_is_not_attached_to(tmp_path: Path) -> None:
    with RunDirectory.create("run", tmp_path) as run:
        (run.path.parent / "run.json").unlink()
        with pytest.raises(RunDirectoryError, match="living owner"):
            RunDirectory.attach("run", tmp_path)


def test_a_supervisor_removes_what_a_dead_owner_left(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    owner.kill()
    remove_run_dir("run", tmp_path)
    owner.wait()
    remove_run_dir("run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_attached_directories_are_not_removed_by_who_attached_them(tmp_path: Path) -> None:
    with RunDirectory.create("run", tmp_path):
        attached = RunDirectory.attach("run", tmp_path)
        with pytest.raises(RunDirectoryError, match="owner removes it"):
            attached.remove()


def test_attach_says_what_to_do_when_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="start its learner first"):
        RunDirectory.attach("run", tmp_path)


def test_a_path_of_somebody_else_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"impala_llm-{os.getuid()}-run").symlink_to(elsewhere)
    with pytest.raises(RunDirectoryError, match="not a directory of user"):
        RunDirectory.create("run", tmp_path)
    assert elsewhere.is_dir()


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "x" * 65, "a b"])
def test_names_that_could_leave_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        RunDirectory.create(name, tmp_path)
    with RunDirectory.create("run", tmp_path) as run, pytest.raises(ValueError, match="actor_id"):
        run.arena_path(name)


def test_a_socket_path_that_the_system_cannot_hold_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with RunDirectory.create("run", deep) as run, pytest.raises(RunDirectoryError, match="shorter run name"):
        run.endpoint(0)


def test_what_must_be_kept_outlives_all_owners_until_it_is_released(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner that takes it over may end before it has saved anything."""
    with RunDirectory.create("run", tmp_path) as owned:
        (owned.path / "policy").touch()
        RunDirectory.attach("run", tmp_path).keep()
    assert find_run("run", tmp_path).run.run_id == owned.run_id
    [said] = caplog.messages
    assert f"{owned.path.parent} stays in memory" in said and "the same command goes on with it, with run" in said
    with RunDirectory.create("run", tmp_path, take_over=True):
        pass
    with RunDirectory.create("run", tmp_path, take_over=True) as resumed:
        assert resumed.run_id == owned.run_id and (resumed.path / "policy").exists()
        RunDirectory.attach("run", tmp_path).release()
    assert list(tmp_path.iterdir()) == [] and len(caplog.messages) == 2
