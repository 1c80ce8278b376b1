"""One learner at a time in a run's folder: who is refused, who waits, and who has to go."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from impala_llm.config import ConfigError
from impala_llm.learning.checkpoints.folder_owner import FILE, FolderOwner, FolderTaken, wait_for_owner

BEAT_S = 0.02
SILENCE_S = 0.3
DEADLINE_S = 20.0


def wait(folder: Path) -> list[str]:
    """Messages while another learner is waited for."""
    said: list[str] = []
    wait_for_owner(folder, said.append, "end it first, or set another run.dir", SILENCE_S)
    return said


on_linux = pytest.mark.skipif(not psutil.LINUX, reason="elsewhere a process began by the clock, as far as is known")
ELSEWHERE = {"id": "other", "host": "node-7", "space": "another boot", "pid": 12, "started": 1}


def note(folder: Path, owner: dict[str, object]) -> None:
    new = folder / f"{FILE}.new"
    new.write_text(json.dumps(owner))
    new.rename(folder / FILE)


def of_another_host(folder: Path, beats: int) -> None:
    """Let the folder be a learner's of another host."""
    note(folder, ELSEWHERE | {"beats": beats})


@contextmanager
def beating(folder: Path, owner: dict[str, object] = ELSEWHERE) -> Iterator[None]:
    """A learner that lives, as far as its number tells."""
    is_over = threading.Event()

    def beat() -> None:
        beats = 0
        while not is_over.wait(BEAT_S):
            beats += 1
            note(folder, owner | {"beats": beats})

    note(folder, owner | {"beats": 0})
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_folder_without_an_owner_or_with_half_a_file_is_free(tmp_path: Path) -> None:
    assert wait(tmp_path / "none") == []
    (tmp_path / FILE).write_text('{"id": "a", "pid": ')
    assert wait(tmp_path) == []


def test_a_living_learner_of_this_host_is_named_at_once(tmp_path: Path) -> None:
    with FolderOwner(tmp_path) as owner:
        with pytest.raises(ConfigError, match="is in use: process .* end it first, or set another run.dir"):
            wait(tmp_path)
        owner.check()
    assert wait(tmp_path) == []


@on_linux
def test_a_living_learner_is_known_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process.create_time
    with FolderOwner(tmp_path):
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 1.0)
        with pytest.raises(ConfigError, match="is in use"):
            wait(tmp_path)


def test_a_process_of_the_same_number_is_another(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, beat_s=1000.0):
        owner = json.loads((tmp_path / FILE).read_text())
    note(tmp_path, owner | {"started": owner["started"] - 1})
    assert wait(tmp_path) == []


def test_other_ranks_leave_the_folder_to_rank_0(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, is_main=False) as owner:
        assert not (tmp_path / FILE).exists()
        owner.check()


def test_a_dead_learner_of_this_host_is_not_waited_for(tmp_path: Path) -> None:
    begin = "import os, pathlib; from impala_llm.learning.checkpoints.folder_owner import FolderOwner"
    code = f"{begin}; FolderOwner(pathlib.Path({str(tmp_path)!r})).__enter__(); os._exit(1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
    assert (tmp_path / FILE).exists() and wait(tmp_path) == []


def test_a_living_learner_of_another_host_is_refused(tmp_path: Path) -> None:
    with beating(tmp_path), pytest.raises(ConfigError, match="process 12 on node-7 is training there"):
        wait(tmp_path)


def test_a_lost_host_is_waited_for_and_said_so(tmp_path: Path) -> None:
    of_another_host(tmp_path, 5)
    (said,) = wait(tmp_path)
    assert "process 12 on node-7" in said and "sign of life" in said


def test_a_learner_whose_folder_was_taken_is_told_and_leaves_it_alone(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, beat_s=BEAT_S) as owner:
        of_another_host(tmp_path, 0)
        deadline = time.monotonic() + DEADLINE_S
        with pytest.raises(FolderTaken, match="process 12 on node-7 has gone on with the run"):
            while time.monotonic() < deadline:
                owner.check()
                threading.Event().wait(BEAT_S)
    assert json.loads((tmp_path / FILE).read_text())["id"] == "other"


def test_a_folder_that_was_taken_since_the_last_beat_is_noticed_and_left_alone(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, beat_s=1000.0) as owner:
        owner.look()
        of_another_host(tmp_path, 0)
        with pytest.raises(FolderTaken, match="process 12 on node-7 has gone on with the run"):
            owner.look()
    (tmp_path / FILE).unlink()
    with FolderOwner(tmp_path, beat_s=1000.0):
        of_another_host(tmp_path, 0)
    assert json.loads((tmp_path / FILE).read_text())["id"] == "other"


def test_a_learner_that_was_frozen_ends_where_another_has_gone_on_and_has_ended_since(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, beat_s=1000.0) as frozen:
        lost = json.loads((tmp_path / FILE).read_text())["id"]
        with FolderOwner(tmp_path, lost=lost, beat_s=1000.0):
            pass
        assert wait(tmp_path) == []
        assert frozen.is_taken()
        with pytest.raises(FolderTaken, match="has gone on with the run"):
            frozen.look()
    assert wait(tmp_path) == []


def test_a_learner_that_was_frozen_looks_at_the_folder_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic
    with FolderOwner(tmp_path, beat_s=1000.0) as owner:
        of_another_host(tmp_path, 0)
        owner.check()
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3000.0)
        with pytest.raises(FolderTaken):
            owner.check()


def test_a_learner_of_another_host_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    note(tmp_path, ELSEWHERE | {"beats": 7, "over": True})
    assert wait(tmp_path) == []
    with FolderOwner(tmp_path, silence_s=1000.0) as owner:
        owner.look()


def test_a_learner_that_is_started_again_leaves_the_folder_to_one_that_has_gone_on(tmp_path: Path) -> None:
    released: list[bool] = []
    owner = FolderOwner(tmp_path, beat_s=BEAT_S, silence_s=DEADLINE_S)
    owner.on_taken = lambda: released.append(True)
    with beating(tmp_path), pytest.raises(FolderTaken, match="process 12 on node-7 has gone on with the run"):
        owner.__enter__()
    assert released and json.loads((tmp_path / FILE).read_text())["id"] == "other"


def test_a_learner_that_begins_beside_a_living_one_of_its_host_leaves_the_folder_to_it(tmp_path: Path) -> None:
    """Both were started before either had its name there: the folder was free when it was looked at."""
    with FolderOwner(tmp_path, beat_s=BEAT_S):
        first = json.loads((tmp_path / FILE).read_text())["id"]
        with pytest.raises(FolderTaken, match="has gone on with the run"):
            FolderOwner(tmp_path, silence_s=DEADLINE_S).__enter__()
        assert json.loads((tmp_path / FILE).read_text())["id"] == first


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_that_begin_at_the_same_moment_the_one_whose_name_does_not_stay_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The other one has looked at the folder at the same moment, and writes just before this one does: without an
    earlier record that name stays. Beside an earlier record it writes just after."""
    open_file, close_file = os.open, os.close

    def open_late(*words: object) -> int:
        if is_first:
            of_another_host(tmp_path, 0)
        return open_file(*words)

    def close_early(file: int) -> None:
        close_file(file)
        if not is_first:
            of_another_host(tmp_path, 0)

    if not is_first:
        with FolderOwner(tmp_path):
            pass
    owner = FolderOwner(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(FolderTaken, match="process 12 on node-7"):
        patch.setattr(os, "open", open_late)
        patch.setattr(os, "close", close_early)
        owner.__enter__()
    assert json.loads((tmp_path / FILE).read_text())["id"] == "other"


def test_a_learner_that_is_started_again_on_its_host_takes_its_folder_at_once(tmp_path: Path) -> None:
    with FolderOwner(tmp_path, beat_s=1000.0):
        killed = json.loads((tmp_path / FILE).read_text())
    note(tmp_path, killed | {"started": killed["started"] - 1})
    with FolderOwner(tmp_path, silence_s=1000.0) as owner:
        owner.look()


def test_a_lost_host_is_waited_for_once(tmp_path: Path) -> None:
    of_another_host(tmp_path, 5)
    lost = wait_for_owner(tmp_path, lambda _said: None, "end it first", SILENCE_S)
    with FolderOwner(tmp_path, lost=lost, silence_s=1000.0) as owner:
        owner.look()
    of_another_host(tmp_path, 5)
    with FolderOwner(tmp_path, silence_s=SILENCE_S) as owner:
        owner.look()


@pytest.mark.parametrize("is_over", [True, False])
def test_a_start_that_takes_long_takes_the_folder_of_one_that_lives_no_longer(tmp_path: Path, is_over: bool) -> None:
    """Longer than two beats, after which a learner looks at the folder as one that was frozen does."""
    note(tmp_path, ELSEWHERE | {"beats": 7, "over": is_over})
    owner = FolderOwner(tmp_path, beat_s=1e-6, silence_s=SILENCE_S)
    owner.on_taken = lambda: pytest.fail("shared memory is given up")
    with owner:
        owner.look()


def test_the_record_of_one_that_lives_no_longer_is_not_a_new_one_where_it_cannot_be_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FolderOwner(tmp_path):
        pass

    def refuse(path: object, *_: object) -> int:
        raise OSError("disk quota exceeded")

    monkeypatch.setattr(os, "open", refuse)
    with FolderOwner(tmp_path, beat_s=BEAT_S) as owner:
        owner.look()
    monkeypatch.undo()
    with FolderOwner(tmp_path, beat_s=BEAT_S) as owner:
        of_another_host(tmp_path, 1)
        with pytest.raises(FolderTaken):
            owner.look()


def test_a_folder_that_cannot_be_written_to_does_not_replace_the_exit_code_of_a_learner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(SystemExit) as ended, FolderOwner(folder, beat_s=BEAT_S):
        shutil.rmtree(folder)
        sys.exit(4)
    assert ended.value.code == 4
