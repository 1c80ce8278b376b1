"""What a learner that is started again knows of its run."""

import tempfile
from pathlib import Path

import pytest

from impala_llm.learner import share_done, start_model
from impala_llm.learning.publishing import VersionBoard
from impala_llm.pipeline.rundir import RunDirectory
from impala_llm.pipeline.weights import WeightPublisher
from impala_llm.settings import Config, LearnerConfig
from tests.learning.builders import save_lm


def test_the_time_of_a_run_goes_on_over_restarts() -> None:
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        began_at = run.began_at()
        assert RunDirectory.attach("t", Path(base)).began_at() == run.began_at() == began_at


def test_a_run_is_over_by_updates_or_by_time() -> None:
    config = LearnerConfig(total_updates=200, max_minutes=5.0)
    assert share_done(config, 0, 0.0) == 0.0
    assert share_done(config, 100, 60.0) == 0.5
    assert share_done(config, 100, 240.0) == pytest.approx(0.8)
    assert share_done(config, 3, 1e6) == 1.0
    assert share_done(LearnerConfig(total_updates=200), 3, 1e6) == 3 / 200


@pytest.mark.parametrize("last", ["offered", "kept"])
def test_a_learner_goes_on_from_the_newest_version_with_its_value_head(tmp_path: Path, last: str) -> None:
    config = Config()
    config.model.path = str(save_lm(tmp_path / "policy"))
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run:
        model, version = start_model(config, run)
        assert version == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / "policy").glob("*.json")}
        publishers = [WeightPublisher(path, 2, files) for path in (run.weights_path, run.kept_path)]
        board = VersionBoard(*publishers, model, 1 if last == "offered" else 3, None)
        board.begin(0, None)
        for number in (1, 2):
            for p in model.parameters():
                p.data.add_(0.125 * number)
            (board.offer if last == "offered" else board.keep)(number)
        resumed, version = start_model(config, run)
    assert version == 2
    assert {n: p.tolist() for n, p in resumed.named_parameters()} == {
        n: p.tolist() for n, p in model.named_parameters()
    }
