"""Bad settings stop at the door with the key, the value and the fix; good ones compose."""

import subprocess
import sys

import pytest

from impala_llm.config import BOUNDS, CHOICES, Config, ConfigError, _leaves, config_folder, load, threads_per_process


def test_every_group_and_experiment_composes():
    for folder in config_folder().iterdir():
        if folder.is_dir():
            for path in folder.glob("*.yaml"):
                assert isinstance(load([f"{folder.name}={path.stem}"]), Config), path


def test_checks_name_existing_keys():
    known = dict(_leaves(Config()))
    assert set(CHOICES) | set(BOUNDS) <= set(known)


def test_overrides_and_groups_take_effect():
    config = load(["experiment=toy", "learner.batch_size=32", "algorithm.max_staleness=null"])
    assert (config.env.name, config.model.path, config.learner.batch_size) == ("parrot", "scratch", 32)
    assert config.algorithm.max_staleness is None
    assert config.run.dir == "outputs/toy"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.batchsize=3"], ["learner.batchsize=3", "unknown key", "learner.batch_size"]),
        (["learning_rate=3"], ["learning_rate=3", "unknown key", "learner.learning_rate"]),
        (["experiment=nope"], ["experiment=nope", "choose one of", "toy"]),
        (["env=nope"], ["env=nope", "webshop"]),
        (["learner.batch_size=many"], ["learner.batch_size=many", "Integer", "64"]),
        (["engine.top_p=0.9"], ["engine.top_p=0.9", "leave engine.top_p=1.0"]),
        (["engine.top_k=20"], ["engine.top_k=20", "leave engine.top_k=-1"]),
        (["algorithm.max_staleness=-1"], ["algorithm.max_staleness=-1", "at least 0"]),
        (["learner.batch_size=128", "replay.capacity=64"], ["learner.batch_size=128", "replay.capacity=64", "raise"]),
        (["algorithm=group_relative", "algorithm.group_size=1"], ["algorithm.group_size=1", "at least 2"]),
        (["algorithm.group_size=7"], ["algorithm.group_size=7", "64", "multiple of 7"]),
        (["learner.num_ranks=3"], ["learner.batch_size=64", "learner.num_ranks=3", "multiple"]),
        (["learner.num_ranks=2"], ["actor.num_actors=1", "at least 2"]),
        (["learner.token_budget=100"], ["learner.token_budget=100", "at least 2048"]),
        (["engine.max_new_tokens=4096"], ["engine.max_new_tokens=4096", "lower"]),
        (["replay.samples_per_insert=2"], ["replay.samples_per_insert=2", "replay.max_replays"]),
        (["replay.max_replays=2", "algorithm.max_staleness=0"], ["replay.max_replays=2", "algorithm.max_staleness=0"]),
        (["env.webshop.items=nowhere.json"], ["env.webshop.items=nowhere.json", "not a file"]),
        (["model.path=nowhere"], ["model.path=nowhere", "correct it"]),
        (["env.name=chess"], ["env.name=chess", "webshop"]),
        (["run.name=a/b"], ["run.name='a/b'", "rename"]),
    ],
)
def test_bad_setting_names_key_value_and_fix(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *overrides])
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", "algorithm.max_staleness=-1", "algorithm.discount=2"])
    assert len(str(caught.value).splitlines()) == 2


def test_threads_never_exceed_the_cores():
    config = load(["model=scratch", "actor.num_actors=1000"])
    assert threads_per_process(config) == 1


@pytest.mark.parametrize(
    "entry", [["-m", "impala_llm.cli", "train"], ["impala_llm/actor.py"], ["impala_llm/learner.py"]]
)
def test_entries_stop_before_any_work(entry):
    done = subprocess.run(
        [sys.executable, *entry, "algorithm.max_staleness=-1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "algorithm.max_staleness=-1" in done.stderr
    assert "Traceback" not in done.stderr
