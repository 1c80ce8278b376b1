"""Settings that tests load are those that Hydra composes without what tests/compositions.py keeps."""

from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.config_files import config_folder
from impala_llm.settings import Config
from tests import compositions


def write_settings(path: Path) -> None:
    path.write_text("defaults: [override /algorithm: vtrace]\nalgorithm: {entropy_coef: 0.25}\nrun: {name: mine}\n")


@pytest.mark.system
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["experiment=quickstart"],
        ["experiment=toy", "algorithm=ppo", "env=corridor"],
        ["env=mixture", "env.args.parts={first: {name: parrot}, second: {name: corridor}}"],
        ["engine=sglang", "engine.urls=['http://host:1']", "actor.num_actors=1", "run.metric_writers=[]"],
        ["experiment=my.yaml"],
        ["experiment=my.yaml", "algorithm=group_relative"],
    ],
)
def test_kept_compositions_are_those_of_hydra(words: list[str], user_folder: Path) -> None:
    write_settings(user_folder / "my.yaml")

    def loaded(seeds: list[int]) -> list[Config]:
        return [load([*words, f"run.seed={seed}", "learner.batch_size=32"]) for seed in seeds]

    kept = loaded([1, 2, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compositions, "are_kept", False)
        anew = loaded([1, 2])
    anew.append(anew[0])
    assert kept == anew
    assert list(map(to_yaml, kept)) == list(map(to_yaml, anew))
    assert [config.run.seed for config in kept] == [1, 2, 1]


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=nope"],
        ["env=nope", "learner.batch_size=32"],
        ["learner.batch_size=many"],
        ["learner.epochs=${nope}"],
        ["experiment=my.yaml", "engine.max_length=many"],
        ["experiment=my.yaml", "algorithm=nope"],
    ],
)
def test_refusals_are_those_of_hydra_s_own_errors(words: list[str], user_folder: Path) -> None:
    write_settings(user_folder / "my.yaml")

    def refusal() -> str:
        with pytest.raises(ConfigError) as caught:
            load(words)
        return str(caught.value)

    kept = [refusal(), refusal()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compositions, "are_kept", False)
        assert kept == [refusal()] * 2


def test_a_file_that_has_changed_is_read_anew(user_folder: Path) -> None:
    write_settings(user_folder / "my.yaml")
    config = load(["experiment=my.yaml"])
    assert (config.algorithm.credit.name, config.run.name, config.run.dir) == ("vtrace", "mine", "outputs/mine")
    (user_folder / "my.yaml").write_text("run: {name: yours}\n")
    config = load(["experiment=my.yaml"])
    assert (config.run.name, config.run.dir) == ("yours", "outputs/yours")
    assert config.algorithm == load([]).algorithm


def test_a_composition_that_is_changed_leaves_the_others_as_they_are() -> None:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        first = hydra.compose("config", overrides=["experiment=toy", "run.seed=123401"])
        before = OmegaConf.to_yaml(first)
        OmegaConf.update(first, "engine.max_length", 7)
        OmegaConf.update(first, "run.metric_writers", ["changed"], merge=False)
        OmegaConf.update(first, "algorithm.credit.name", "changed")
        second = hydra.compose("config", overrides=["experiment=toy", "run.seed=123402"])
    assert OmegaConf.to_yaml(second) == before.replace("seed: 123401", "seed: 123402")
