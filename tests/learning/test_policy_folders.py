"""A policy that takes the place of another: one of the two is there whenever its learner is killed."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from impala_llm.learning.checkpoints.policy_folders import put_policies_back, replace_folder


class Killed(BaseException):
    """In place of a kill."""


def folder_with(path: Path, content: str) -> Path:
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_text(content)
    return path


@pytest.mark.parametrize("number", range(4))
def test_a_policy_that_replaces_another_is_there_whenever_its_learner_is_killed(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder_with(tmp_path / "policy-best", "old")
    new = folder_with(tmp_path / "policy-candidate", "new")
    rename, rmtree, num_calls = Path.rename, shutil.rmtree, 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > number:
            raise Killed

    def removed_by_half(path: Path, **_: object) -> None:
        if path.exists():
            (path / "model.safetensors").unlink()
            count()
            rmtree(path)

    def renamed(path: Path, to: Path) -> None:
        count()
        rename(path, to)

    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(shutil, "rmtree", removed_by_half)
        patch.setattr(Path, "rename", renamed)
        replace_folder(new, target)
    put_policies_back(tmp_path)
    found = {path.name: path.read_text() for path in target.iterdir()}
    assert found in ({"config.json": text, "model.safetensors": text} for text in ("old", "new"))
    assert {path.name for path in tmp_path.iterdir()} <= {"policy-best", "policy-candidate"}


def test_a_policy_whose_learner_died_as_it_wrote_it_takes_no_room(tmp_path: Path) -> None:
    for name in ("policy.new-123", "policy-40.new-7", "policy", "policy.new", "policy.old"):
        folder_with(tmp_path / name, "x")
    put_policies_back(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"policy", "policy.new", "policy.old"}


def test_a_policy_that_cannot_take_the_place_of_another_leaves_it(tmp_path: Path) -> None:
    target = folder_with(tmp_path / "policy", "old")
    with pytest.raises(OSError):
        replace_folder(tmp_path / "missing", target)
    assert (target / "config.json").read_text() == "old"


def test_a_link_to_a_policy_gives_way_to_each_later_one_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    elsewhere = folder_with(tmp_path / "elsewhere", "old")
    target = tmp_path / "policy"
    target.symlink_to(elsewhere)
    for content in ("first", "second"):
        replace_folder(folder_with(tmp_path / "new", content), target)
        assert (target / "config.json").read_text() == content
    assert (elsewhere / "config.json").read_text() == "old"
    (tmp_path / "policy-best.replaced").symlink_to(elsewhere)
    folder_with(tmp_path / "policy-best", "best")
    put_policies_back(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "policy", "policy-best"}
