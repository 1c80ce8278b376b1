"""Folders of checkpoints where a part of the work fails, or the best one is marked amid it."""

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest

from impala_llm.learning.checkpoints import files as checkpoint_files
from impala_llm.learning.checkpoints import writer as checkpoint
from impala_llm.learning.checkpoints.files import VersionMark
from impala_llm.learning.checkpoints.policy_folders import remove_folder
from impala_llm.learning.checkpoints.writer import Checkpointer, RankState
from impala_llm.learning.origin import find_origin
from impala_llm.learning.ranks.parallel import Ranks
from tests.learning.builders import save_lm
from tests.learning.test_checkpoint import make, make_state, names, write


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_lm(tmp_path / "model")


def test_what_other_ranks_have_left_of_a_checkpoint_that_failed_makes_room_for_the_next(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make(policy)
    ranks = [Checkpointer(tmp_path, 1, rank, 2) for rank in range(2)]

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write_file", no_room)
        assert ranks[0].save(make_state(3, model, optimizer, policy)) and not ranks[0].wait()
    assert ranks[1].save(RankState(3, 8, 77, 1.5, {}, {}, {})) and ranks[1].wait()
    assert names(tmp_path) == ["update-000003.new"]
    assert ranks[0].save(make_state(4, model, optimizer, policy)) and ranks[1].save(
        RankState(4, 9, 77, 1.5, {}, {}, {})
    )
    assert all([rank.wait() for rank in ranks])
    assert names(tmp_path) == ["update-000004"]


def test_a_learner_whose_folder_was_taken_amid_a_checkpoint_leaves_the_others_alone(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that was frozen: its successor has written this update, and is at the next."""
    model, optimizer = make(policy)
    looks = iter([False])  # when it began
    frozen = Checkpointer(tmp_path, 2, is_taken=lambda: next(looks, True))
    write(tmp_path, policy, 3)
    manifest = tmp_path / "checkpoints" / "update-000003" / "manifest.json"
    written = manifest.stat().st_ino
    assert frozen.save(make_state(3, model, optimizer, policy)) and not frozen.wait()
    assert manifest.stat().st_ino == written
    begun = tmp_path / "checkpoints" / "update-000004.new"
    begun.mkdir()
    assert frozen.save(make_state(4, model, optimizer, policy)) and not frozen.wait()
    assert begun.is_dir()
    assert "another learner has taken the run's folder" in capsys.readouterr().out


def test_an_old_checkpoint_that_cannot_be_removed_is_said_and_the_new_one_counts(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, policy, 1, 2)
    checkpointer = Checkpointer(tmp_path, 1)
    model, optimizer = make(policy)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "update-000002":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert checkpointer.save(make_state(3, model, optimizer, policy)) and checkpointer.wait()
    said = capsys.readouterr().out
    assert f"checkpoint {tmp_path}/checkpoints/update-000002 cannot be removed (Permission denied)" in said
    assert "cannot be written" not in said
    assert names(tmp_path) == ["update-000002", "update-000003"]


def test_a_checkpoint_that_was_moved_and_linked_goes_as_others_do_and_what_the_link_leads_to_stays(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = write(tmp_path, policy, 1, 2, num_kept=2)
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("update-000001", "update-000002"):
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)
    model, optimizer = make(policy)
    assert checkpointer.save(make_state(3, model, optimizer, policy)) and checkpointer.wait()
    assert names(tmp_path) == ["update-000002", "update-000003"]
    assert checkpointer.save(make_state(2, model, optimizer, policy)) and checkpointer.wait()  # anew
    assert names(tmp_path) == ["update-000002", "update-000003"] and not (folder / "update-000002").is_symlink()
    Checkpointer(tmp_path, 2).begin()
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in elsewhere.glob("*/manifest.json")) == ["manifest.json"] * 2
    for suffix in (".new", ".old", ".damaged"):  # as an earlier release has left them
        (folder / f"update-000002{suffix}").symlink_to(elsewhere / "update-000002")
    checkpoint_files.remove_unfinished(tmp_path)
    checkpoint_files.set_aside(folder / "update-000002")
    assert names(tmp_path) == ["update-000002.damaged", "update-000003"]


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("rename", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None if ignore_errors else refuse())


def test_what_cannot_be_removed_or_renamed_at_the_start_is_said_to_stay_and_keeps_no_learner_from_going_on(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, policy, 1, 2, 3)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "update-000003", folder / "update-000004.new")
    (folder / "update-000001").rename(folder / "update-000001.old")
    records = folder / "update-000003" / "rank-0.records"
    records.write_bytes(b"damaged")
    before = names(tmp_path)
    checkpointer = Checkpointer(tmp_path, 1)
    with monkeypatch.context() as read_only:
        make_read_only(read_only)
        checkpointer.begin()
        assert find_origin(tmp_path, None, checkpointer.versions, Ranks("cpu")).update == 2
    assert names(tmp_path) == before
    said = capsys.readouterr().out
    new = folder / "update-000004.new"
    assert f"update-000004 is half-written, since its learner died, and stays: {new} cannot be removed" in said
    assert "rank-0.records has" in said and "passed over, and cannot be renamed (Read-only file system)" in said
    checkpointer.went_on_from(2)
    model, optimizer = make(policy)
    for update, kept in ((5, ["update-000003", "update-000005"]), (6, ["update-000003", "update-000006"])):
        assert checkpointer.save(make_state(update, model, optimizer, policy)) and checkpointer.wait()
        assert names(tmp_path) == kept, "the damaged one takes no place of another"


def refuse_links(path: Path, target: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_folder_that_takes_no_links_does_not_end_training_for_the_best_checkpoint(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer = write(tmp_path, policy, 1)
    model, optimizer = make(policy)
    monkeypatch.setattr(Path, "symlink_to", refuse_links)
    said = f"the best checkpoint cannot be marked in {tmp_path}/checkpoints (Operation not permitted)"
    checkpointer.mark_best(6, 1)
    assert said in capsys.readouterr().out and not checkpointer.is_wanted
    checkpointer.mark_best(7, 2)  # in no checkpoint
    assert checkpointer.save(make_state(2, model, optimizer, policy)) and checkpointer.wait()
    found = capsys.readouterr().out
    assert said in found and "cannot be written" not in found
    assert names(tmp_path) == ["update-000001", "update-000002"] and not checkpointer.is_wanted


def test_a_disk_that_refuses_the_checkpoint_of_the_best_is_not_asked_at_every_update(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, 1)
    model, optimizer = make(policy)
    checkpointer.mark_best(6, 1)
    assert checkpointer.is_wanted

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(checkpoint, "write_file", no_room)
        assert checkpointer.save(make_state(1, model, optimizer, policy)) and not checkpointer.wait()
    assert not checkpointer.is_wanted
    assert checkpointer.save(make_state(2, model, optimizer, policy)) and checkpointer.wait()  # due by time
    assert checkpoint_files.best_of(tmp_path) == "update-000002"


def test_the_best_that_a_learner_died_before_it_marked_is_marked_by_the_next(tmp_path: Path, policy: Path) -> None:
    write(tmp_path, policy, 1, 3).mark_best(6, 1)
    Checkpointer(tmp_path, 2).mark_best(7, 2)  # and it dies before the next checkpoint
    later = Checkpointer(tmp_path, 2)
    assert not later.is_wanted
    later.mark_best(7, 2)
    assert later.is_wanted and checkpoint_files.best_of(tmp_path) == "update-000001"
    model, optimizer = make(policy)
    assert later.save(make_state(4, model, optimizer, policy)) and later.wait()
    assert checkpoint_files.best_of(tmp_path) == "update-000004"
    again = Checkpointer(tmp_path, 2)
    again.mark_best(7, 2)
    assert not again.is_wanted and checkpoint_files.best_of(tmp_path) == "update-000004"
    checkpoint_files.mark_best(tmp_path, "somewhere else")
    again.mark_best(7, 2)
    assert again.is_wanted, "a link that somebody has made is none of a checkpoint"


def test_a_best_checkpoint_that_somebody_removed_makes_room_for_the_next_one(tmp_path: Path, policy: Path) -> None:
    write(tmp_path, policy, 5)
    checkpoint_files.mark_best(tmp_path, "update-000020")  # whose folder is gone
    assert checkpoint_files.best_of(tmp_path) is None
    checkpointer = Checkpointer(tmp_path, 2)
    checkpointer.mark_best(11, 11)
    assert checkpointer.is_wanted


def test_the_best_checkpoint_is_not_removed_as_it_is_marked(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its evaluation ends while the thread that has written the next one removes it."""
    checkpointer = write(tmp_path, policy, 1, num_kept=1)
    model, optimizer = make(policy)
    marking = threading.Thread(target=checkpointer.mark_best, args=(6, 1))
    best_of = checkpoint_files.best_of

    def look(folder: Path) -> str | None:
        found = best_of(folder)
        marking.start()
        marking.join(0.3)  # it cannot end before the thread has removed what is old
        return found

    monkeypatch.setattr(checkpoint_files, "best_of", look)
    assert checkpointer.save(make_state(2, model, optimizer, policy)) and checkpointer.wait()
    marking.join()
    best = best_of(tmp_path)
    assert checkpointer.is_wanted if best is None else (tmp_path / "checkpoints" / best).is_dir()


def test_the_best_checkpoint_is_marked_while_old_ones_are_removed(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk that takes long, and the learner's thread marks it."""
    checkpointer = write(tmp_path, policy, 1, 2, num_kept=2)
    removing, may_end = threading.Event(), threading.Event()

    def remove_slowly(path: Path) -> None:
        if path.name.endswith(".removed"):
            removing.set()
            assert may_end.wait(30)
        remove_folder(path)

    monkeypatch.setattr(checkpoint, "remove_folder", remove_slowly)
    model, optimizer = make(policy)
    assert checkpointer.save(make_state(3, model, optimizer, policy)) and removing.wait(30)
    marking = threading.Thread(target=checkpointer.mark_best, args=(7, 2))
    marking.start()
    marking.join(5)
    assert not marking.is_alive() and checkpoint_files.best_of(tmp_path) == "update-000002"
    may_end.set()
    assert checkpointer.wait() and names(tmp_path) == ["best", "update-000002", "update-000003"]


def test_a_bit_that_the_disk_has_changed_does_not_lower_what_is_reserved(tmp_path: Path) -> None:
    mark = VersionMark(tmp_path)
    mark.run_id = 2**63 - 1
    mark.reserve(1240, ahead=0)
    file = tmp_path / "versions.json"
    written = file.read_bytes()
    assert len(written) == 192, "of one length, whatever the numbers"
    for bit in range(8 * len(written)):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert VersionMark(tmp_path).unused(1240) > mark.reserved, changed


def test_the_note_of_versions_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    values = {"reserved": 1496, "ahead": 3, "life": 1, "run_id": 77, "has_ended": False}
    (tmp_path / "versions.json").write_text(json.dumps(values))
    mark = VersionMark(tmp_path)
    assert (mark.reserved, mark.ahead, mark.life, mark.run_id) == (1496, 3, 1, 77)
