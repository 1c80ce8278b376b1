"""Demonstrations that a folder does not take: those of another policy, and episodes that do not fit."""

import shutil
from pathlib import Path

import pytest

from impala_llm.config import ConfigError, load
from impala_llm.demonstrate import record
from impala_llm.demonstrations import read
from tests.helpers import make_tiny_model
from tests.test_demonstrations import words as words_of_six


def words(folder: Path, model: Path, *more: str) -> list[str]:
    return words_of_six(folder, model, "demonstrations.num_episodes=3", *more)


def test_a_folder_holds_the_episodes_of_one_policy(tmp_path: Path, tiny_model: Path) -> None:
    by_policy, more = "demonstrations.player=policy", "demonstrations.num_episodes=4"
    record(load(words(tmp_path, tiny_model, by_policy)))
    copied = Path(shutil.copytree(tiny_model, tmp_path / "copied"))
    assert len(list(read(record(load(words(tmp_path, copied, by_policy, more)))))) == 4, "wherever it lies"
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=f"of model.path={tiny_model} with other weights than {other} has: name"):
        record(load(words(tmp_path, other, by_policy)))
    for key, before, now in (("temperature", 1.0, 0.5), ("max_new_tokens", 2, 1)):
        with pytest.raises(ConfigError, match=f"with engine.{key}={before}, and not {now}"):
            record(load(words(tmp_path, tiny_model, by_policy, f"engine.{key}={now}")))


def test_a_script_may_be_recorded_on_with_other_weights(tmp_path: Path, tiny_model: Path) -> None:
    record(load(words(tmp_path, tiny_model)))
    other = make_tiny_model(tmp_path / "other", seed=1)
    more = "demonstrations.num_episodes=4"
    assert len(list(read(record(load(words(tmp_path, other, more, "engine.temperature=0.5")))))) == 4


@pytest.mark.parametrize("player", ["script", "policy"])
def test_an_episode_whose_next_observation_does_not_fit_is_left_out_and_counted(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], player: str
) -> None:
    # A door of the corridor has 22 tokens and an answer two: there is room for one door of three.
    folder = record(load(words(tmp_path, tiny_model, f"demonstrations.player={player}", "engine.max_length=40")))
    assert list(read(folder)) == []
    assert "3 episodes did not fit" in capsys.readouterr().err
