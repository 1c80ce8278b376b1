"""Versions on the weight board where readers are slow: what is skipped, what must wait, and who is named."""

import logging
import os
import threading
from pathlib import Path

import pytest

from impala_llm.learning.model import PolicyModel
from impala_llm.learning.publishing import VersionBoard
from impala_llm.pipeline.weights import WeightPublisher, WeightReader
from tests.learning.builders import save_lm


def make_board(path: Path, interval: int | None = 1, max_staleness: int | None = 2) -> VersionBoard:
    """With versions 0 and 1 in its two slots: whoever reads version 0 keeps the next one from being published."""
    model = PolicyModel.from_pretrained(save_lm(path / "policy"))
    board = VersionBoard(WeightPublisher(path / "board", num_slots=2), model, interval, max_staleness, patience_s=0.01)
    board.begin(0, is_there=False)
    return board


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
    board = VersionBoard(WeightPublisher(tmp_path / "board", num_slots=2), model, 1, 0, patience_s=0.01)
    with WeightReader(tmp_path / "board").lease(0):
        board.begin(1, is_there=True)
    assert board.offer(2) is True
