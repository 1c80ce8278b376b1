"""Sharing of a host's GPUs among learner, actors and servers."""

import re
from pathlib import Path

import pytest

from impala_llm import cli
from impala_llm.config import ConfigError, load
from impala_llm.gpus import GpuShares, deal_gpus, visible_gpus, with_num_actors
from impala_llm.settings import Config

FOUR, EIGHT = list("0123"), list("01234567")


def config(*words: str, ranks: int = 1, actors: int = 1) -> Config:
    """away: the learner is on another host."""
    settings = [word for word in words if word != "away"]
    loaded = load(["experiment=toy", f"learner.num_ranks={ranks}", f"actor.num_actors={actors}", *settings])
    loaded.pipeline.connect = "tcp://learner:7400" if "away" in words else None
    return loaded


@pytest.mark.parametrize(
    ("gpus", "ranks", "actors", "words", "learner", "shares"),
    [
        # embedded engines
        (FOUR, 2, 2, (), "01", ["2", "3"]),
        (FOUR, 1, 2, (), "0", ["1", "2"]),
        (FOUR, 1, 5, (), "0", ["1", "2", "3", "1", "2"]),
        (FOUR, 4, 2, (), "0123", ["0", "1"]),
        (["0"], 1, 2, (), "0", ["0", "0"]),
        (FOUR, 1, 2, ("learner.tensor_parallel=2",), "01", ["2", "3"]),
        (FOUR, 2, 2, ("away",), "", ["0", "1"]),
        ([], 2, 2, (), "", ["", ""]),
        (FOUR, 2, 2, ("model.device=cpu",), "", ["", ""]),
        # servers
        (FOUR, 2, 2, ("engine=sglang",), "01", ["2", "3"]),
        (FOUR, 2, 2, ("engine=sglang", "model.device=cpu"), "", ["0", "1"]),
        (EIGHT, 2, 2, ("engine=sglang", "engine.tensor_parallel=2"), "01", ["23", "45"]),
        (EIGHT, 2, 4, ("engine=sglang", "engine.tensor_parallel=2", "away"), "", ["01", "23", "45", "67"]),
        (FOUR, 1, 1, ("engine=sglang", "engine.urls=[http://127.0.0.1:1]"), "0", [""]),
        ([], 1, 1, ("engine=sglang",), "", [""]),
    ],
)
def test_the_learner_has_the_first_gpus_and_the_actors_the_others(
    gpus: list[str], ranks: int, actors: int, words: tuple[str, ...], learner: str, shares: list[str]
) -> None:
    dealt = deal_gpus(config(*words, ranks=ranks, actors=actors), gpus)
    assert dealt == GpuShares(list(learner), [list(share) for share in shares])


@pytest.mark.parametrize(
    ("gpus", "ranks", "actors", "words", "said"),
    [
        (FOUR[:3], 2, 2, ("engine=sglang",), ("actor.num_actors=2", "need 2 GPUs", "has 3", "learner.num_ranks=2")),
        (FOUR, 4, 1, ("engine=sglang",), ("actor.num_actors=1", "4 of them")),
        (FOUR[:3], 1, 2, ("engine=sglang", "engine.tensor_parallel=2", "away"), ("need 4 GPUs", "has 3:")),
        (["0"], 2, 1, (), ("learner.num_ranks=2", "has 1", "model.device=cpu")),
    ],
)
def test_too_few_gpus_are_an_error_that_names_the_settings(
    gpus: list[str], ranks: int, actors: int, words: tuple[str, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        deal_gpus(config(*words, ranks=ranks, actors=actors), gpus)
    for word in said:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        (EIGHT, ("engine=sglang", "engine.tensor_parallel=2", "model.device=cpu"), 4),
        (EIGHT, ("engine=sglang", "engine.tensor_parallel=2"), 3),  # beside a learner of one rank
        ([], ("engine=sglang",), 1),
        (["0"], ("engine=sglang",), 1),
        (EIGHT, ("engine=sglang", "engine.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"), 2),
        (EIGHT, ("engine=sglang", "+actor.num_actors=2"), 2),
        (EIGHT, ("engine=sglang", "actor.num_actors=0"), 0),
        (EIGHT, (), 1),
    ],
)
def test_a_host_has_as_many_actors_as_the_learner_leaves_servers_unless_the_user_says(
    gpus: list[str], words: tuple[str, ...], expected: int
) -> None:
    given = ["experiment=toy", *words]
    settled, settled_words = with_num_actors(load(given), given, gpus)
    assert settled.num_actors == expected
    assert load(settled_words) == settled


def test_a_file_says_how_many_actors_a_host_has(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    override = "defaults:\n  - override /engine: sglang\n  - override /env: parrot\n  - override /model: scratch\n"
    file.write_text(f"{override}actor:\n  num_actors: 2\n")
    words = [f"experiment={file}"]
    assert with_num_actors(load(words), words, EIGHT)[0].num_actors == 2


def test_training_on_one_host_uses_all_of_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    words = ["experiment=toy", "engine=sglang", "learner.num_ranks=4", f"run.dir={tmp_path / 'run'}"]
    cli.main(["train", "--dry-run", *words])  # refused where SGLang is not installed, after the plan was printed
    printed = capsys.readouterr().out
    assert re.search(r"^# learner, 4 ranks: ", printed, re.MULTILINE)
    assert len(re.findall(r"^# actor \d+: ", printed, re.MULTILINE)) == 4


def test_gpus_are_those_that_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-ab12")
    assert visible_gpus() == ["3", "GPU-ab12"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1,-1,2")
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert visible_gpus() == []
