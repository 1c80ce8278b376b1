"""Settings that others keep from having an effect: refused where they are given, and not shown by a dry run."""

import pytest
from omegaconf import OmegaConf

from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.settings import Config, leaves


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("engine.memory_fraction=0.5", "with engine.name=torch: set engine=sglang"),
        ("engine.server_args=[--tp]", "with engine.name=torch"),
        ("engine.start_timeout_s=5", "with engine.name=torch"),
        ("engine.request_timeout_s=5", "with engine.name=torch"),
        ("agent.processes=4", "without an agent: set agent.name or agent.command"),
        ("agent.tasks=tasks.jsonl", "without an agent"),
        ("replay.uniform_floor=0.1", "with replay.max_replays=1 and no priorities, where"),
        ("algorithm.reject_low=0.9", "with algorithm.reject=none"),
        ("env.webshop.num_products=10", "with env.name=parrot: set env=webshop"),
        ("evaluation.run_tasks=8", "without evaluations inside of the run"),
        ("model.scratch.num_layers=3", "with model.path=tiny_shopper"),
    ],
)
def test_a_setting_without_effect_is_refused(word: str, reason: str) -> None:
    policy = ["model=tiny_shopper"] if word.startswith("model.scratch") else []
    with pytest.raises(ConfigError) as caught:
        load(["experiment=toy", *policy, word])
    assert reason in str(caught.value)
    assert word.partition("=")[0] in str(caught.value)


def test_it_is_taken_with_the_setting_that_gives_it_one() -> None:
    load(["experiment=toy", "replay.uniform_floor=0.1", "replay.max_replays=2"])
    load(["experiment=toy", "algorithm.reject_low=0.9", "algorithm.reject=token"])
    load(["experiment=toy", "evaluation.run_tasks=8", "evaluation.every_updates=5"])
    load(["experiment=toy", "env=webshop", "env.webshop.num_products=10"])


def test_its_default_is_no_mistake() -> None:
    load(["experiment=toy", "agent.processes=2", "engine.request_timeout_s=300", "algorithm.reject_low=0.5"])


def test_what_a_preset_sets_gives_way_to_the_part_that_is_chosen_beside_it() -> None:
    config = load(["experiment=quickstart", "env=corridor", "model=scratch", "evaluation.unseen_seed=null"])
    assert config.env.webshop.success_bonus == 1.0
    assert "webshop" not in OmegaConf.create(to_yaml(config, only_in_force=True)).env


def test_a_dry_run_shows_the_settings_that_have_an_effect() -> None:
    shown = OmegaConf.create(to_yaml(load(["experiment=toy"]), only_in_force=True))
    assert dict(shown.agent) == {"name": None, "command": None}
    assert dict(shown.model.lora) == {"rank": 0}
    assert dict(shown.model.scratch) == {"hidden_size": 128, "num_layers": 2}
    assert not {"webshop"} & set(shown.env)
    assert not {"urls", "transfer", "request_timeout_s"} & set(shown.engine)
    assert not {"reject_low", "overlong_penalty", "reference"} & set(shown.algorithm)
    assert not {"sft", "demonstrations"} & set(shown)
    shop = OmegaConf.create(to_yaml(load(["experiment=quickstart"]), only_in_force=True))
    assert shop.env.webshop.catalogue == "hard"
    assert "scratch" not in shop.model


def test_the_settings_that_a_run_keeps_are_all_of_them() -> None:
    kept = OmegaConf.create(to_yaml(load(["experiment=toy"])))
    for key, _ in leaves(Config()):
        assert OmegaConf.select(kept, key, default="missing") != "missing", key
