"""Versions on the weight board where readers are slow: what is skipped, what must wait, and who is named."""

import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from impala_llm.learning.model import PolicyModel
from impala_llm.learning.publishing import VersionBoard
from impala_llm.pipeline.weights import WeightPublisher, WeightReader
from tests.learning.builders import save_lm


def make_board(path: Path, interval: int | None = 1, max_staleness: int | None = 2) -> VersionBoard:
    """With versions 0 and 1 in its two slots: whoever reads version 0 keeps the next one from being published."""
    model = PolicyModel.from_pretrained(save_lm(path / "policy"))
    board = again(path, model, interval, max_staleness)
    board.begin(0, found=None)
    return board


def again(path: Path, model: PolicyModel, interval: int | None, max_staleness: int | None) -> VersionBoard:
    publishers = [WeightPublisher(path / name, num_slots=2) for name in ("board", "kept")]
    return VersionBoard(*publishers, model, interval, max_staleness, patience_s=0.01)


def test_a_version_is_skipped_while_a_reader_holds_on_and_the_reader_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, reader = make_board(tmp_path), WeightReader(tmp_path / "board")
    assert board.offer(1) is True
    with reader.lease(0), caplog.at_level(logging.WARNING):
        assert board.offer(2) is False
        assert board.offer(3) is False
        assert reader.latest() == board.published == 1
    assert f"2 is skipped: all 2 slots of {tmp_path / 'board'}" in caplog.text
    assert f"process {os.getpid()} (" in caplog.text
    assert board.offer(4) is True
    assert reader.latest() == 4


def test_a_version_without_which_no_batch_would_come_waits_for_the_reader(tmp_path: Path) -> None:
    board, reader = make_board(tmp_path, max_staleness=0), WeightReader(tmp_path / "board")
    assert board.offer(1) is True
    done = threading.Event()

    def publish() -> None:
        assert board.offer(2) is True
        done.set()

    with reader.lease(0):
        learner = threading.Thread(target=publish)
        learner.start()
        assert not done.wait(0.1)
        assert reader.latest() == 1
    assert done.wait(20)
    learner.join()
    assert reader.latest() == 2


def test_only_every_so_manyth_version_is_due_and_none_offline(tmp_path: Path) -> None:
    board = make_board(tmp_path / "third", interval=3)
    assert [board.offer(version) for version in range(1, 8)] == [None, None, True, None, None, True, None]
    offline = make_board(tmp_path / "offline", interval=None, max_staleness=None)
    assert [offline.offer(version) for version in (1, 2)] == [None, None]


def test_a_learner_that_is_started_again_does_not_wait_for_a_version_that_is_there(tmp_path: Path) -> None:
    make_board(tmp_path).offer(1)
    model = PolicyModel.from_pretrained(tmp_path / "policy")
    board = again(tmp_path, model, 1, 0)
    with WeightReader(tmp_path / "board").lease(0):
        board.begin(1, found=1)
    assert board.offer(2) is True


@pytest.mark.parametrize("interval", [None, 4])
def test_what_is_kept_is_for_learners_alone(tmp_path: Path, interval: int | None) -> None:
    board = make_board(tmp_path, interval, max_staleness=None)
    board.keep(2)
    actors, learners = WeightReader(tmp_path / "board"), WeightReader(tmp_path / "kept")
    assert (actors.latest(), learners.latest()) == (0, 2)
    model = PolicyModel.from_pretrained(tmp_path / "policy")
    resumed = again(tmp_path, model, interval, None)
    resumed.begin(2, found=0)
    assert actors.latest() == resumed.published == (0 if interval is None else 2)


def test_a_version_without_which_nothing_comes_is_published_before_it_is_due(tmp_path: Path) -> None:
    board, reader = make_board(tmp_path, interval=3), WeightReader(tmp_path / "board")
    assert [board.offer(1), board.publish_late(1), reader.latest()] == [None, True, 1]
    assert [board.offer(version) for version in (2, 3)] == [None, True]
    assert board.offer(4) is None
    with reader.lease(1):
        assert not board.publish_late(4), "its two slots are the latest one, and one that is being read"
    assert board.publish_late(4)


@pytest.mark.parametrize("interval", [None, 4])
def test_the_room_of_what_may_be_kept_is_reserved_at_the_start(tmp_path: Path, interval: int | None) -> None:
    make_board(tmp_path, interval, max_staleness=None)
    sizes = {path.stat().st_size for path in tmp_path.glob("*/slot-*/model.safetensors")}
    assert len(list(tmp_path.glob("kept/slot-*/model.safetensors"))) == 2 and len(sizes) == 1


def test_each_version_comes_with_its_value_head(tmp_path: Path) -> None:
    board = make_board(tmp_path)
    heads = {}
    for version in (1, 2):
        torch.nn.init.constant_(board._model.value_head[-1].bias, float(version))
        (board.keep if version == 2 else board.offer)(version)
        heads[version] = board._model.value_head[-1].bias.tolist()
    for name, version in (("board", 1), ("kept", 2)):
        with WeightReader(tmp_path / name).lease() as lease:
            model = PolicyModel.from_pretrained(tmp_path / "policy")
            assert model.load_value_head(lease.extra()) and model.value_head[-1].bias.tolist() == heads[version]
            assert sorted(path.name for path in lease.path.iterdir()) == ["model.safetensors"], "what engines read"
    other = PolicyModel.from_pretrained(tmp_path / "policy", value_hidden_size=8)
    assert not other.load_value_head(board._model.value_head_bytes())
