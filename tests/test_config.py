"""Bad settings are refused with the key, the value and the fix; good ones compose."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from impala_llm.checks.familiar_names import FAMILIAR_CHOICES
from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.config_files import config_folder
from impala_llm.settings import ASSETS, Config

OF_THE_USER = {
    "pretrained": ["model.path=tiny_shopper"],
    "smollm2": ["model.path=tiny_shopper"],  # a script fetches its own
    "syllogism": ["model.path=tiny_shopper"],  # the same
    "tasks": ["env.args.file=tasks.jsonl"],
    "verifiers": ["env.args.id=a_module"],
}
"""Settings that a preset leaves to its user."""


@pytest.mark.system
def test_every_group_and_experiment_composes():
    for folder in config_folder().iterdir():
        if folder.is_dir():
            for path in folder.glob("*.yaml"):
                own = OF_THE_USER.get(path.stem, [])
                assert isinstance(load([f"{folder.name}={path.stem}", *own]), Config), path


def test_a_model_that_a_script_brings_is_asked_for_by_the_script(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path=models/smollm2 .*tools/get_smollm2.sh"):
        load(["experiment=smollm2"])


def test_each_model_preset_carries_its_own_learning_rate():
    rates = {"tiny_shopper": 2e-4, "scratch": 6e-4, "pretrained": 1e-6}
    for preset, rate in rates.items():
        config = load([f"model={preset}", *(["model.path=tiny_shopper"] if preset == "pretrained" else [])])
        assert config.learner.learning_rate == rate
    assert (
        load(["model=pretrained", "model.path=tiny_shopper", "learner.learning_rate=2e-6"]).learner.learning_rate
        == 2e-6
    )
    with pytest.raises(ConfigError, match="model.path is not set: model=pretrained needs .* model.path=FOLDER"):
        load(["model=pretrained"])


def test_a_model_keeps_its_learning_rate_in_every_experiment():
    for path in (config_folder() / "experiment").glob("*.yaml"):
        config = load([f"experiment={path.stem}", "model=pretrained", "model.path=tiny_shopper"])
        assert config.learner.learning_rate == 1e-6, path
        assert "learning_rate" not in (yaml.safe_load(path.read_text()).get("learner") or {}), "it belongs to the model"


@pytest.mark.parametrize("experiment", ["corridor", "quickstart", "syllogism"])
def test_every_algorithm_goes_with_each_kind_of_experiment(experiment: str) -> None:
    """Short episodes from random weights, the shop, single turns of a pretrained model."""
    for path in (config_folder() / "algorithm").glob("*.yaml"):
        assert load([f"experiment={experiment}", *OF_THE_USER.get(experiment, []), f"algorithm={path.stem}"])


def test_overrides_and_groups_take_effect():
    config = load(["experiment=toy", "learner.batch_size=32", "algorithm.max_staleness=null"])
    assert (config.env.name, config.model.path, config.learner.batch_size) == ("parrot", "scratch", 32)
    assert config.algorithm.max_staleness is None
    assert config.run.dir == "outputs/toy"


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Writes the settings that words give as a run leaves them, and returns the word that reads them again."""

    def save(*words: str) -> str:
        (tmp_path / "config.yaml").write_text(to_yaml(load(words)))
        return f"experiment={tmp_path}/config.yaml"

    return save


@pytest.mark.system
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (config_folder() / "experiment").glob("*.yaml")))
def test_a_preset_beside_a_file_is_that_of_the_command_line(experiment: str, saved: Callable[..., str]) -> None:
    """The file of an experiment with a preset becomes what the experiment itself becomes."""
    own = OF_THE_USER.get(experiment, [])
    file = saved(f"experiment={experiment}", "algorithm=dpo", *own)
    for choice in ("algorithm=vtrace", "algorithm=group_relative", "replay=prioritised"):
        words = [f"experiment={experiment}", *own, *(["algorithm=dpo"] if choice.startswith("replay") else []), choice]
        assert load([file, choice]) == load(words), choice


def test_presets_beside_a_file_leave_its_other_settings(saved: Callable[..., str]) -> None:
    file = saved("experiment=toy", "algorithm.entropy_coef=0.25", "learner.epochs=3", "run.name=mine")
    config = load([file, "algorithm=vtrace", "learner.minibatches=2"])
    assert (config.algorithm.credit.name, config.algorithm.loss.name) == ("vtrace", "ppo_clip")
    assert (config.algorithm.entropy_coef, config.learner.epochs, config.run.name) == (0.25, 3, "mine")
    assert (config.env.name, config.engine.max_length, config.learner.minibatches) == ("parrot", 64, 2)
    shop = load([file, "model=tiny_shopper", "env=webshop", "learner.learning_rate=1e-5"])
    assert shop == load(
        ["experiment=toy", "algorithm.entropy_coef=0.25", "learner.epochs=3", "run.name=mine"]
        + ["model=tiny_shopper", "env=webshop", "learner.learning_rate=1e-5"]
    )


def test_a_preset_of_the_environment_or_model_takes_along_what_its_predecessor_set(saved: Callable[..., str]) -> None:
    config = load([saved("experiment=toy"), "env=corridor", "model=scratch"])
    assert (config.env.name, config.engine.max_new_tokens, config.engine.max_length) == ("corridor", 1, 64)
    assert (config.model.scratch.hidden_size, config.learner.learning_rate) == (64, 6e-4)
    config = load([saved("experiment=quickstart", "env.webshop.results_per_page=9"), "model=scratch"])
    default = Config()
    assert config.engine == dataclasses.replace(config.engine, temperature=default.engine.temperature)
    assert (config.engine.max_length, config.model.path) == (default.engine.max_length, "scratch")
    assert (config.env.webshop.results_per_page, config.env.webshop.observation_mode) == (
        9,
        default.env.webshop.observation_mode,
    )


def test_a_value_may_be_longer_than_the_name_of_a_file():
    parts = {f"part_{number}": {"name": "parrot", "args": {"num_words": 2}} for number in range(20)}
    hydra = json.dumps(parts).replace('"', "")
    for written in (json.dumps(parts), hydra):
        assert load(["env=mixture", f"env.args.parts={written}"]).env.args.parts == parts


@pytest.mark.parametrize("key", ["env", "model", "model.path", "experiment"])
def test_a_name_that_is_too_long_for_a_file_is_refused_as_any_other(key: str):
    with pytest.raises(ConfigError, match=key):
        load([f"{key}={'a' * 300}:b"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learner: [1, 2]", ["learner=[1,2]: learner is a group of settings", "learner.num_ranks=1"]),
        ("learner:", ["learner=null: learner is a group of settings"]),
        ("algorithm: ppo", ["algorithm=ppo: algorithm is a group of settings"]),
        ("env: {webshop: 5}", ["env.webshop=5: env.webshop is a group of settings", "env.webshop.items="]),
        ("engine: {urls: 'http://a:1'}", ["engine.urls=http://a:1 ", "write 'engine.urls=[http://a:1]'"]),
        ("run: {name: '${oc.env:NOT_SET}'}", ["run.name=${oc.env:NOT_SET} ", "'NOT_SET' not found"]),
        ("learner: {epochs: '${learner.epochs}'}", ["learner.epochs=${learner.epochs} ", "write the value itself"]),
        ("learner: {epochs: '${nope}'}", ["learner.epochs=${nope} ", "'nope' not found"]),
        ("learner: {batch_size: null}", ["learner.batch_size=null needs a value: the default is 64"]),
        ("run: {name: [a]}", ["run.name=[a] has the wrong type: a text is expected; the default is impala"]),
        ("run: {metric_writers: [null]}", ["run.metric_writers[0]=null has the wrong type: a text is expected"]),
        ("model: {lora: {targets: null}}", ["model.lora.targets=null needs a value: the default is "]),
        (
            "algorithm: {loss: {name: ppo_clip, clip_low: '???'}}",
            ["algorithm.loss.clip_low=??? needs a value: set it"],
        ),
        ("learner:\n  batch_size: ???", ["learner.batch_size=??? needs a value", "as learner.batch_size=VALUE"]),
        ("defaults: [nope]", ["defaults has 'nope'", "override /algorithm: vtrace"]),
    ],
)
def test_a_bad_setting_of_a_file_is_named_with_file_key_value_and_fix(tmp_path: Path, text: str, words: list[str]):
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"settings file {tmp_path}/my.yaml: ") as caught:
        load([f"experiment={tmp_path}/my.yaml"])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word", "is_there"),
    [
        ("learner:\n  batch_size: ???", "learner.batch_size=16", lambda c: c.learner.batch_size == 16),
        ("learner:\n  batch_size: ???", "learner={batch_size: 16}", lambda c: c.learner.batch_size == 16),
        ("algorithm:\n  loss: ???", "algorithm.loss=ppo_clip", lambda c: c.algorithm.loss.name == "ppo_clip"),
        ("algorithm:\n  loss: ???", "algorithm.loss={name: cispo}", lambda c: c.algorithm.loss.name == "cispo"),
        ("algorithm:\n  loss: ???", "algorithm=ppo", lambda c: c.algorithm.loss.name == "ppo_clip"),
        (
            "algorithm:\n  loss:\n    name: ppo_clip\n    clip_high: ???",
            "algorithm.loss.clip_high=0.3",
            lambda c: c.algorithm.loss.clip_high == 0.3,
        ),
        ("algorithm:\n  group_size: ???", "algorithm=topr", lambda c: c.algorithm.group_size == 8),
        ("env:\n  name: ???", "env=corridor", lambda c: c.env.name == "corridor"),
        ("env:\n  name: ???", "env.name=corridor", lambda c: c.env.name == "corridor"),
        (
            "run:\n  metric_writers: ['???']",
            "run.metric_writers=[tensorboard]",
            lambda c: c.run.metric_writers == ["tensorboard"],
        ),
    ],
)
def test_a_value_that_a_file_leaves_open_may_stand_in_a_word(tmp_path: Path, text: str, word: str, is_there):
    """And is asked for where it does not."""
    (tmp_path / "my.yaml").write_text(f"{text}\n")
    assert is_there(load([f"experiment={tmp_path}/my.yaml", word]))
    with pytest.raises(ConfigError, match=r"my.yaml: .*\?\?\?.* needs a value: "):
        load([f"experiment={tmp_path}/my.yaml"])


def test_what_is_not_read_of_a_file_may_be_left_open(tmp_path: Path):
    (tmp_path / "my.yaml").write_text("algorithm:\n  group_size: ???\n")
    assert load([f"experiment={tmp_path}/my.yaml"], left_out=["algorithm."]).algorithm.group_size == 1


@pytest.mark.parametrize(
    ("key", "name", "slot", "value", "said"),
    [
        ("env", "corridor", "args", "num_words=5", "env.args=num_words=5"),
        ("env", "corridor", "args", "[{num_words: 5}]", "env.args=[{'num_words': 5}]"),
        ("env", "corridor", "args", "'${run.seed}'", "env.args=0"),
        ("engine", "torch", "options", "3", "engine.options=3"),
    ],
)
@pytest.mark.parametrize("words", [[], ["env.args.num_turns=2", "engine.options.x=2"]])
def test_options_in_a_file_are_a_mapping(
    tmp_path: Path, key: str, name: str, slot: str, value: str, said: str, words: list[str]
) -> None:
    (tmp_path / "my.yaml").write_text(f"{key}: {{name: {name}, {slot}: {value}}}")
    words = ["model=scratch", *(word for word in words if word.startswith(key))]
    with pytest.raises(ConfigError, match=f"^{re.escape(said)} sets no option: write {slot}: {{NAME: value}}$"):
        load([*words, f"experiment={tmp_path}/my.yaml"])


def test_a_mapping_beside_a_group_sets_several_settings_of_it() -> None:
    config = load(["model=scratch", "env={name: corridor}", "engine={name: torch}"])
    assert (config.env.name, config.engine.name) == ("corridor", "torch")


@pytest.mark.parametrize("value", ["{a", '{"a": }', "[1, 2"])
def test_a_value_that_cannot_be_read_is_named(value: str):
    with pytest.raises(ConfigError, match=re.escape(f"env.args.parts={value} cannot be read")):
        load(["env=mixture", f"env.args.parts={value}"])


def test_a_preset_leaves_the_options_of_another_part_behind(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("algorithm:\n  credit:\n    name: group_relative\n    normalize_std: true\n")
    assert load([f"experiment={tmp_path}/my.yaml", "algorithm=vtrace"]).algorithm.credit.name == "vtrace"
    (tmp_path / "my.yaml").write_text("algorithm:\n  credit: group_relative\n  entropy_coef: 0.5\n")
    config = load([f"experiment={tmp_path}/my.yaml", "algorithm=vtrace"])
    assert (config.algorithm.credit.name, config.algorithm.entropy_coef) == ("vtrace", 0.5)
    with pytest.raises(ConfigError, match="algorithm=nope is not known: choose one of"):
        load([f"experiment={tmp_path}/my.yaml", "algorithm=nope"])


@pytest.mark.parametrize("choice", ["icepop", "decoupled_ppo"])
@pytest.mark.parametrize("loss", ["{clip_low: 0.11}", "decoupled_ppo"])
def test_a_preset_leaves_the_options_of_the_part_that_the_presets_of_the_file_name(
    tmp_path: Path, loss: str, choice: str
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"defaults: [{{override /algorithm: icepop}}]\nalgorithm: {{loss: {loss}}}")
    found = load(["model=scratch", f"experiment={file}", f"algorithm={choice}"]).algorithm.loss
    assert (found.name, found.clip_low) == ("decoupled_ppo", 0.11 if "0.11" in loss else 0.2)  # type: ignore[attr-defined]
    file.write_text("defaults: [{override /env: reasoning_gym}]\nenv: {args: {config: {min_terms: 3}}}")
    env = load(["model=scratch", f"experiment={file}", f"algorithm={choice}", "env=reasoning_gym"]).env
    assert env.args.config == {"min_terms": 3}


def test_none_is_null_on_the_command_line() -> None:
    config = load(["experiment=toy", "algorithm.max_staleness=None", "learner.sync_interval=None"])
    assert config.algorithm.max_staleness is None and config.learner.sync_interval is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["agent.command=python agent.py", "agent.max_tokens=100"],
            ["agent.max_tokens=100", "engine.max_length=", "raise"],
        ),
        (["agent.command='python \"agent.py'"], ["agent.command=", "correct its quotes"]),
        (["agent.command=''"], ["agent.command=", "correct its path"]),
        (["agent.command=no-such-program --fast"], ["agent.command=", "no-such-program", "correct its path"]),
        (
            ["engine.max_length=8192", "learner.batch_size=2048", "algorithm.group_size=8", "replay.capacity_mb=512"],
            ["replay.capacity_mb=512", "6144 episodes", "822 MiB", "at least 822", "algorithm.max_staleness"],
        ),
        (
            ["learner.warmup_updates=1000", "learner.total_updates=150"],
            ["learner.warmup_updates=1000", "learner.total_updates=150", "at most 150"],
        ),
        (
            ["learner.value_warmup_updates=150", "learner.total_updates=150"],
            ["learner.value_warmup_updates=150", "learner.total_updates=150", "less than 150"],
        ),
        (
            ["algorithm=group_relative", "learner.value_warmup_updates=20"],
            ["learner.value_warmup_updates=20", "algorithm.credit=group_relative", "learner.value_warmup_updates=0"],
        ),
        (
            ["learner.total_updates=100", "learner.value_warmup_updates=90", "learner.warmup_updates=11"],
            ["learner.warmup_updates=11", "learner.value_warmup_updates=90", "learner.total_updates=100", "at most 10"],
        ),
        (
            ["algorithm.reference=tiny_shopper"],
            ["algorithm.reference=tiny_shopper has no effect with algorithm.kl_coef=0", "algorithm.reference=null"],
        ),
        (
            ["algorithm.overlong_penalty=5"],
            ["algorithm.overlong_penalty=5.0", "algorithm.overlong_tokens=null", "algorithm.overlong_penalty=1.0"],
        ),
        (["algorithm.entropy_rate=1"], ["algorithm.entropy_rate=1.0", "algorithm.entropy_target=null", "=0.01"]),
        (
            ["learner.checkpoint_every=5", "learner.checkpoints_kept=0"],
            ["learner.checkpoint_every=5", "learner.checkpoints_kept=0", "learner.checkpoints_kept=2"],
        ),
        (["learner.batch_size="], ["learner.batch_size= has the wrong type", "a whole number is expected", "64"]),
        (["learner.total_updates=null"], ["learner.total_updates=null needs a value: the default is 400"]),
        (["learner.learning_rate=fast"], ["learner.learning_rate=fast", "a number is expected"]),
        (["algorithm=grpo"], ["algorithm=grpo is not known: here it is algorithm=group_relative_by_std"]),
        (["algorithm=pppo"], ["algorithm=pppo is not known: did you mean algorithm=ppo? choose one of decoupled_ppo,"]),
        (["algoritm=ppo"], ["algoritm=ppo is an unknown key: did you mean algorithm?"]),
        (["learner.decay=lineer"], ["learner.decay=lineer is not known: did you mean linear? choose one of"]),
        (["replay=Prioritized"], ["did you mean replay=prioritised?"]),
        (["model=tinny"], ["did you mean model=tiny_shopper?"]),
        (["engine=sglan"], ["did you mean engine=sglang?"]),
        (["env=parot"], ["did you mean env=parrot?"]),
        (["env=my_env.MySuite"], ["did you mean env=my_env:MySuite?", "your own as module:Class or module:function"]),
        (["model=Qwen/Qwen3-0.6B"], ["here it is model=pretrained model.path=FOLDER, of a model on this disk"]),
        (["algorithm.max_staleness=none"], ["a whole number or null is expected; the default is 2"]),
        (["learner.batch_size=many"], ["a whole number is expected; the default is 64"]),
        (["run.metric_writers=my:W"], ["write 'run.metric_writers=[my:W]'", "'run.metric_writers=[tensorboard,my:W]'"]),
        (["data.train_batch_size=8"], ["did you mean learner.batch_size?"]),
        (["algorithm=my.Loss"], ["algorithm=my.Loss is not known: choose one of decoupled_ppo,"]),
        (["experiment=tooy"], ["did you mean experiment=toy?"]),
        (["algorithm.whiten_advantages=yess"], ["yess has the wrong type: true or false is expected; the default"]),
        (["learner.epoch=2", "algorithm.los=x"], ["learner.epoch=2", "learner.epochs?\nalgorithm.los=x", "thm.loss?"]),
        (["learner.batchsize=3"], ["learner.batchsize=3", "unknown key", "learner.batch_size"]),
        (["learner.lr=3"], ["learner.lr=3", "unknown key", "learner.learning_rate"]),
        (["sft.lr=3"], ["sft.lr=3", "unknown key", "did you mean sft.learning_rate"]),
        (["+learner.lr=3"], ["learner.lr=3", "unknown key", "learner.learning_rate"]),
        (["++foo.bar=3"], ["foo.bar=3", "unknown key", "--help"]),
        (["algorithm.clip_low=0.1"], ["unknown key", "algorithm.loss.clip_low", "decoupled_ppo", "ppo_clip"]),
        (["~learner.batch_size"], ["~learner.batch_size", "key=value"]),
        (["model.path=Qwen/Qwen3-0.6B"], ["model.path=Qwen/Qwen3-0.6B", "hf download", "--local-dir"]),
        (["learning_rate=3"], ["learning_rate=3", "unknown key", "learner.learning_rate"]),
        (["experiment=nope"], ["experiment=nope", "choose one of", "toy"]),
        (["env=nope"], ["env=nope", "webshop"]),
        (["learner.batch_size=many"], ["learner.batch_size=many", "a whole number", "64"]),
        (["engine.top_p=0.9"], ["engine.top_p=0.9", "leave engine.top_p=1.0"]),
        (["engine.top_k=20"], ["engine.top_k=20", "leave engine.top_k=-1"]),
        (["algorithm.max_staleness=-1"], ["algorithm.max_staleness=-1", "at least 0"]),
        (["algorithm.mismatch_alarm=0"], ["algorithm.mismatch_alarm=0", "at least 1e-09"]),
        (
            ["algorithm.reward_kl_coef=0.1", "algorithm.recompute_behaviour=always"],
            ["algorithm.reward_kl_coef=0.1", "algorithm.recompute_behaviour=always", "algorithm.kl_coef"],
        ),
        (
            ["algorithm=decoupled_ppo", "algorithm.recompute_behaviour=always"],
            ["algorithm.recompute_behaviour=always", "algorithm.loss=decoupled_ppo", "proximal=recomputed"],
        ),
        (
            ["algorithm.recompute_behaviour=often"],
            ["algorithm.recompute_behaviour=often", "never, on_mismatch, always"],
        ),
        (["learner.batch_size=128", "replay.capacity=64"], ["learner.batch_size=128", "replay.capacity=64", "raise"]),
        (["algorithm=group_relative", "algorithm.group_size=1"], ["algorithm.group_size=1", "at least 2"]),
        (["actor.unroll_turns=0"], ["actor.unroll_turns=0", "at least 1"]),
        (
            ["algorithm=group_relative", "actor.unroll_turns=2"],
            ["actor.unroll_turns=2", "algorithm.credit=group_relative", "algorithm.group_size=", "=vtrace"],
        ),
        (
            ["algorithm.max_staleness=0", "actor.unroll_tokens=9"],
            ["actor.unroll_tokens=9", "algorithm.max_staleness=0"],
        ),
        (["algorithm.group_size=7"], ["algorithm.group_size=7", "64", "multiple of 7"]),
        (
            ["algorithm.overlong_tokens=4096"],
            ["algorithm.overlong_tokens=4096", "engine.max_length=2048", "such as 512"],
        ),
        (["algorithm.refill=1"], ["algorithm.refill=1", "algorithm.credit=gae", "group_relative"]),
        (["learner.minibatches=65"], ["learner.minibatches=65", "at most 64"]),
        (["run.metric_writers=wandb"], ["run.metric_writers=wandb has the wrong type", "'run.metric_writers=[wandb]'"]),
        (["engine.max_length = 64"], ["spaces", "write engine.max_length=64"]),
        (["num_generations=8"], ["did you mean algorithm.group_size?"]),
        (["rollout.n=8"], ["did you mean algorithm.group_size?"]),
        (["learner.ppo_epochs=4"], ["learner.ppo_epochs=4", "did you mean learner.epochs?"]),
        (["learner.num_ranks=3"], ["learner.batch_size=64", "learner.num_ranks=3", "multiple"]),
        (["learner.num_ranks=64", "pipeline.arena_mb=1"], ["arena_mb=1", "num_ranks=64", "max_length=2048", "least 5"]),
        (["learner.token_budget=1"], ["learner.token_budget=1", "at least 2"]),
        (["learner.token_budget=most"], ["learner.token_budget=most", "auto", "at least 2"]),
        (["engine.max_new_tokens=4096"], ["engine.max_new_tokens=4096", "lower"]),
        (["replay.samples_per_insert=inf"], ["replay.samples_per_insert=inf", "1000"]),
        (["algorithm.loss.positive_low=inf", "algorithm.loss.positive_high=inf"], ["algorithm.loss.positive_low=inf"]),
        (["replay.samples_per_insert=2"], ["replay.samples_per_insert=2", "replay.max_replays"]),
        (
            ["replay.samples_per_insert=0.5"],
            ["replay.samples_per_insert=0.5", "algorithm.max_staleness=2", "algorithm.max_staleness=null"],
        ),
        (["replay.max_replays=2", "algorithm.max_staleness=0"], ["replay.max_replays=2", "algorithm.max_staleness=0"]),
        (["env.webshop.items=nowhere.json"], ["env.webshop.items=nowhere.json", "not a file"]),
        (["model.path=nowhere"], ["model.path=nowhere", "does not exist"]),
        (["engine.in_flight=drain"], ["engine.in_flight=drain", "engine=sglang"]),
        (
            ["engine=sglang", "engine.transfer=distributed", "engine.in_flight=drain"],
            ["engine.transfer=distributed", "engine.in_flight=drain", "recompute_kv or keep_kv"],
        ),
        (
            ["engine=sglang", "engine.transfer=distributed", "pipeline.connect=tcp://127.0.0.1:7400"],
            ["engine.transfer=distributed", "pipeline.connect=tcp://127.0.0.1:7400", "engine.urls="],
        ),
        (
            [
                "engine=sglang",
                "engine.transfer=distributed",
                "pipeline.connect=tcp://127.0.0.1:7400",
                "engine.urls=[http://localhost:30000]",
            ],
            ["engine.transfer=distributed", "pipeline.connect=tcp://127.0.0.1:7400", "engine.urls="],
        ),
        (
            ["engine=sglang", "engine.prefix_cache=true", "engine.in_flight=keep_kv"],
            ["engine.prefix_cache=True", "set engine.in_flight"],
        ),
        (["engine=sglang", "engine.urls=[host:1]"], ["'host:1'", "write it as http://host:port"]),
        (["engine=sglang", "engine.urls=['http://a:1','http://A:1/']"], ["engine.urls", "http://A:1/ twice"]),
        (["engine=sglang", "engine.urls=['http://localhost:1','http://127.0.0.1:1']"], ["http://127.0.0.1:1 twice"]),
        (["engine=sglang", "engine.urls=['http://a:1']", "actor.num_actors=2"], ["engine.urls", "actor.num_actors=2"]),
        (["engine=sglang", "engine.server_args=[--config,mine.yaml]"], ["engine.server_args has --config", "Leave"]),
        (
            ["engine=sglang", "engine.urls=http://10.0.0.1:30000"],
            ["engine.urls=http://10.0.0.1:30000", "write 'engine.urls=[http://10.0.0.1:30000]'"],
        ),
        (
            ["run.name=${oc.env:NOT_SET}"],
            ["run.name=${oc.env:NOT_SET} ", "'NOT_SET' not found", "write the value itself"],
        ),
        (["env.args={1: 2}"], ["env.args={1: 2}: the name of an option is a text, and 1 is none: write NAME: value"]),
        (["env.name={a: 1}"], ["env.name={'a': 1} is not known: choose one of webshop"]),
        (["algorithm.loss={name: {a: 1}}"], ["algorithm.loss={'a': 1} is not known: choose one of reinforce"]),
        (["run.metric_writers=[{a: 1}]"], ["run.metric_writers={'a': 1} is not known: choose one of tensorboard"]),
        (["engine.urls={a: 1}"], ["engine.urls={a: 1} has the wrong type: a list is expected"]),
        (["algorithm=ppo", "algorithm.loss.clip_low=???"], ["algorithm.loss.clip_low=??? needs a value: set it"]),
        (["algorithm.loss=???"], ["algorithm.loss=??? needs a value: set it"]),
        (["env=corridor", 'env.args={a: {null: "what???"}}'], ["env.args.a=", "has the wrong type"]),
        (["learner={batch_size: ???}"], ["learner.batch_size=??? needs a value: write it there, or as learner.ba"]),
        (
            ["algorithm=ppo", "algorithm.loss.clip_low='\\${x}'"],
            ["algorithm.loss.clip_low=${x} has the wrong type: a number is expected; the default is 0.2"],
        ),
        (["learner.batch_size=1,2"], ["learner.batch_size=1,2 has several values", "give one"]),
        (["run.name=${nosuch:x}"], ["run.name=${nosuch:x} ", "nosuch", "write the value itself"]),
        (
            ["learner.batch_size=${learner.batch_size}"],
            ["learner.batch_size=${learner.batch_size} ", "Recursive", "write the value itself"],
        ),
        (["engine=sglang", "engine.python=nowhere"], ["engine.python=nowhere", "tools/install_sglang_cpu.sh"]),
        (["env.name=chess"], ["env.name=chess", "webshop"]),
        (["run.name=a/b"], ["run.name='a/b'", "rename"]),
        (["pipeline.bind=tcp://0.0.0.0:7400"], ["pipeline.bind=tcp://0.0.0.0:7400", "impala-llm keys"]),
        (["pipeline.bind=tcp://127.0.0.1:7400"], ["pipeline.bind=tcp://127.0.0.1:7400", "every user", "pipeline.keys"]),
        (["pipeline.connect=tcp://localhost:1"], ["pipeline.connect=tcp://localhost:1", "every user", "pipeline.keys"]),
        (["pipeline.bind='tcp://*:7400'"], ["pipeline.bind=tcp://*:7400", "impala-llm keys"]),
        (["pipeline.bind=0.0.0.0:7400"], ["pipeline.bind=0.0.0.0:7400", "write tcp://ADDRESS:PORT"]),
        (["pipeline.bind=ipc:///tmp/x"], ["pipeline.bind=ipc:///tmp/x", "write tcp://ADDRESS:PORT"]),
        (["pipeline.bind='tcp://127.0.0.1:*'"], ["pipeline.bind=tcp://127.0.0.1:*", "give a number"]),
        (["pipeline.bind=tcp://127.0.0.1:65535"], ["pipeline.bind=tcp://127.0.0.1:65535", "65535 with 1 more"]),
        (["pipeline.connect=tcp://learner:7400"], ["pipeline.connect=tcp://learner:7400", "pipeline.keys"]),
        (["pipeline.connect=tcp://0.0.0.0:7400"], ["pipeline.connect=tcp://0.0.0.0:7400", "no address to connect to"]),
        (["pipeline.connect=tcp://learner:0"], ["pipeline.connect=tcp://learner:0", "from 1 to 65535"]),
        (["pipeline.keys=nowhere"], ["pipeline.keys=nowhere", "not a folder", "impala-llm keys"]),
        (["learner.attention=flash"], ["learner.attention=flash", "learner.precision=float32", "=bfloat16"]),
        (["learner.attention=flex", "model.device=cpu"], ["learner.attention=flex", "model.device=cpu", "GPUs alone"]),
        (["model.lora.alpha=4"], ["model.lora.alpha=4", "model.lora.rank=0", "or model.lora.alpha=32"]),
        (["model.lora.targets=[q_proj]"], ["model.lora.targets=[q_proj]", "model.lora.rank"]),
        (
            ["model.lora.rank=4", "model.lora.targets=[all-linear,q_proj]"],
            ["model.lora.targets=['all-linear', 'q_proj']", "set model.lora.targets=[all-linear]", "[q_proj]"],
        ),
        (["model.lora.rank=4", "model.lora.targets=[]"], ["targets=[] leaves nothing", "set [all-linear]"]),
        (["run.resume=0"], ["run.resume=0", "choose one of auto, true, false"]),
        (
            ["algorithm=ppo", "algorithm.credit.value_coef=0", "learner.value_warmup_updates=3"],
            ["learner.value_warmup_updates=3", "algorithm.credit.value_coef=0", "nothing would learn"],
        ),
        (["model.lora.rank=100000"], ["model.lora.rank=100000", "1024"]),
        (
            ["algorithm=group_relative", "learner.num_ranks=3", "learner.batch_size=64"],
            ["does not divide", "such as 48"],
        ),
        (["learner.cpu_offload=true"], ["learner.cpu_offload=true", "learner.sharding=fsdp2"]),
        (
            ["learner.tensor_parallel=2", "learner.sharding=fsdp2"],
            ["learner.tensor_parallel=2", "learner.sharding=fsdp2", "learner.sharding=replicated"],
        ),
        (["learner.tensor_parallel=2", "model.lora.rank=4"], ["learner.tensor_parallel=2", "model.lora.rank=0"]),
        (
            ["learner.tensor_parallel=2", "learner.compile_layers=true"],
            ["learner.tensor_parallel=2", "learner.compile_layers=true", "learner.compile_layers=false"],
        ),
        (
            ["learner.tensor_parallel=2", "algorithm.recompute_behaviour=always"],
            ["algorithm.recompute_behaviour=always", "algorithm.recompute_behaviour=never"],
        ),
    ],
)
def test_bad_setting_names_key_value_and_fix(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", *overrides])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("size", "heads", "reason"),
    [
        (3, {}, "num_attention_heads=4"),
        (4, {}, "num_key_value_heads=2"),
        (2, {}, None),
        (4, {"num_key_value_heads": None}, None),
        (4, {"text_config": {"num_attention_heads": 6}}, "num_attention_heads=6"),
    ],
)
def test_heads_that_tensor_parallelism_does_not_divide_are_found_before_a_model_is_loaded(
    tmp_path: Path, size: int, heads: dict[str, object], reason: str | None
) -> None:
    config = json.loads((ASSETS / "tiny_shopper" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    words = [f"model.path={tmp_path}", f"learner.tensor_parallel={size}", "engine.max_length=128"]
    if reason is None:
        load(words)
        return
    said = f"learner.tensor_parallel={size} cannot be used: .*{tmp_path} .* has {reason}, which it does not divide; set"
    with pytest.raises(ConfigError, match=f"{said} another number, or learner.tensor_parallel=1"):
        load(words)


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=ppo", "learner.value_warmup_updates=20"],
        ["learner.total_updates=100", "learner.value_warmup_updates=90", "learner.warmup_updates=10"],
        ["algorithm=ppo", "learner.total_updates=4", "learner.value_warmup_updates=2"],
        *(["algorithm.reference=tiny_shopper", word] for word in ("algorithm.kl_coef=1", "algorithm.reward_kl_coef=1")),
        ["algorithm.reference=tiny_shopper", "algorithm=dpo"],
        ["algorithm=icepop"],
        ["algorithm.entropy_rate=1", "algorithm.entropy_target=1"],
        ["algorithm.overlong_penalty=5", "algorithm.overlong_tokens=9"],
        ["replay.samples_per_insert=0.5", "algorithm.max_staleness=null"],
    ],
)
def test_settings_that_have_an_effect_together_are_taken(words: list[str]) -> None:
    load(words)


def test_adapters_without_the_library_that_makes_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model.lora.rank=8 needs peft.*pip install"):
        load(["model.lora.rank=8"])


@pytest.mark.parametrize(
    "words",
    ["[--api-key,opensesame]", "['--api-key=opensesame']", "[--admin-api,opensesame]", "[--ssl-keyfile-p,opensesame]"],
)
def test_secrets_among_the_arguments_of_servers_are_refused_and_not_repeated(words):
    with pytest.raises(ConfigError, match="engine.server_args has --[a-z-]+: each run makes a key") as caught:
        load(["model=scratch", "engine=sglang", f"engine.server_args={words}"])
    assert "opensesame" not in str(caught.value)
    load(["model=scratch", "engine=sglang", "engine.server_args=['--max-total-tokens=9',--ssl-keyfile,--tp,-v]"])


BIND, CONNECT = "pipeline.bind=tcp://0.0.0.0:7400", "pipeline.connect=tcp://learner:7400"


def test_other_hosts_are_served_with_keys(tmp_path):
    for name in ("learner.secret.json", "learner.public.json", "gpu1.secret.json"):
        (tmp_path / name).touch()
    (tmp_path / "authorised").mkdir()
    for settings in ([BIND], [CONNECT], [BIND, CONNECT]):
        load(["model=scratch", f"pipeline.keys={tmp_path}", *settings])


@pytest.mark.parametrize(
    ("setting", "missing"),
    [
        (BIND, "learner.secret.json"),
        (BIND, "learner.public.json"),
        (BIND, "authorised"),
        (CONNECT, "learner.public.json"),
        (CONNECT, "actor.secret.json"),
    ],
)
def test_a_folder_that_lacks_a_key_is_refused(tmp_path, setting, missing):
    for name in {"learner.secret.json", "learner.public.json", "actor.secret.json", "authorised"} - {missing}:
        (tmp_path / name).mkdir() if name == "authorised" else (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"pipeline.keys={tmp_path} has no {missing}: .*impala-llm keys"):
        load(["model=scratch", f"pipeline.keys={tmp_path}", setting])


def test_a_host_of_actors_is_not_told_to_copy_the_learners_secret_key(tmp_path):
    for name in ("learner.public.json", "gpu1.secret.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="has no authorised, learner.secret.json: only .* set pipeline.bind=null"):
        load(["model=scratch", f"pipeline.keys={tmp_path}", BIND, CONNECT])


def test_an_actor_does_not_guess_which_key_is_its_own(tmp_path):
    for name in ("learner.public.json", "a.secret.json", "b.secret.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="several actors, a.secret.json, b.secret.json"):
        load(["model=scratch", f"pipeline.keys={tmp_path}", CONNECT])


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", "algorithm.max_staleness=-1", "algorithm.credit.discount=2"])
    assert len(str(caught.value).splitlines()) == 2


def test_threads_never_exceed_the_cores():
    config = load(["model=scratch", "actor.num_actors=1000"])
    assert threads_per_process(config) == 1


@pytest.mark.parametrize("section", ["run", "sft", "demonstrations"])
def test_a_folder_of_a_file_of_settings_may_lie_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "settings.yaml"
    file.write_text(f"{section}:\n  dir: ~/runs/toy\n")
    assert getattr(load([f"experiment={file}"]), section).dir == str(tmp_path / "runs" / "toy")


@pytest.mark.system
@pytest.mark.parametrize("entry", [["-m", "impala_llm.cli", "train"], ["impala_llm/actor.py"]])
def test_entries_stop_before_any_work(entry):
    """A learner's entry, tests/system/test_refusals.py and test_train.py show."""
    done = subprocess.run(
        [sys.executable, *entry, "algorithm.max_staleness=-1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "algorithm.max_staleness=-1" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_amid_the_imports_ends_quietly_too(tmp_path: Path) -> None:
    interrupted = tmp_path / "omegaconf.py"  # one of the first that the commands import
    interrupted.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    command = [sys.executable, "-c", "import sys; from impala_llm.cli import main; sys.exit(main())", "train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_what_needs_no_settings_loads_no_torch() -> None:
    """The import takes seconds, and 250 MB."""
    code = "import sys; from impala_llm import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("word", FAMILIAR_CHOICES)
def test_what_others_call_otherwise_is_answered_with_settings_that_load(word: str) -> None:
    choice = f"{word.partition('=')[0]}={FAMILIAR_CHOICES[word]}"
    with pytest.raises(ConfigError, match=f"^{word} is not known: here it is {choice}$"):
        load(["model=scratch", word])
    load(["model=scratch", *choice.split()])
