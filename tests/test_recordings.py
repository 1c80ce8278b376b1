"""Demonstrations that a folder does not take: those of another policy, episodes that do not fit, any on a full disk."""

import shutil
from pathlib import Path

import pytest

from impala_llm.cli import main
from impala_llm.config import ConfigError, load
from impala_llm.demonstrate import record
from impala_llm.demonstrations import read
from tests.helpers import files_of_at_most, make_tiny_model
from tests.test_demonstrations import before_each_episode
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
    # A door of the corridor has 22 tokens and a completion two: there is room for one door of three.
    folder = record(load(words(tmp_path, tiny_model, f"demonstrations.player={player}", "engine.max_length=40")))
    assert list(read(folder)) == []
    assert "3 episodes did not fit" in capsys.readouterr().err


def test_a_recording_that_never_began_does_not_claim_its_folder(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unscripted = ("env=mixture", "env.args.parts.a={name: parrot}")
    (tmp_path / "demonstrations").mkdir()  # it stays, with a header alone
    assert main(["demonstrate", *words(tmp_path, tiny_model, *unscripted)]) == 2
    assert "set demonstrations.player=policy" in capsys.readouterr().err
    assert main(["sft", *words(tmp_path, tiny_model, f"sft.data=[{tmp_path / 'demonstrations'}]")]) == 2
    assert f"sft.data=[{tmp_path / 'demonstrations'}]: there are no demonstrations: " in capsys.readouterr().err
    folder = record(load(words(tmp_path, tiny_model, *unscripted, "demonstrations.player=policy")))
    assert len(list(read(folder))) == 3
    with pytest.raises(ConfigError, match="demonstrations.player=policy, and not script: name another folder"):
        record(load(words(tmp_path, tiny_model, *unscripted)))


def test_a_disk_that_is_full_is_noticed_before_an_episode_is_played(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(load(words(tmp_path, tiny_model)))
    played: list[int] = []
    before_each_episode(monkeypatch, played.append)
    with files_of_at_most(0):
        assert main(["demonstrate", *words(tmp_path, tiny_model)]) == 0, "nothing is missing, and nothing is written"
        assert main(["demonstrate", *words(tmp_path, tiny_model, "demonstrations.num_episodes=6")]) == 2
    assert f"demonstrations.dir={tmp_path / 'demonstrations'} cannot be written to" in capsys.readouterr().err
    assert played == []


def test_a_disk_that_becomes_full_is_said_and_what_was_written_stays(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(load(words(tmp_path, tiny_model)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with files_of_at_most(None) as limit, monkeypatch.context() as patch:
        before_each_episode(patch, lambda number: limit(100) if number == 2 else None)
        assert main(["demonstrate", *words(tmp_path, tiny_model, "demonstrations.num_episodes=6")]) == 2
    assert f"demonstrations.dir={folder} cannot be written to" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert len(list(read(record(load(words(tmp_path, tiny_model, "demonstrations.num_episodes=6")))))) == 6


def test_a_filtered_folder_that_cannot_be_written_is_said_and_leaves_nothing(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(load(words(tmp_path, tiny_model, "demonstrations.num_episodes=30")))
    header, arrays = ((folder / name).stat().st_size for name in ("demonstrations.json", "part-00000.safetensors"))
    assert header < arrays
    with files_of_at_most(header):
        assert main(["demonstrations", str(folder), "--out", str(tmp_path / "good")]) == 2
    assert f"--out {tmp_path / 'good'} cannot be written to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["demonstrations"]
