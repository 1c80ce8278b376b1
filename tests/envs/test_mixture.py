"""Several environments as one."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from impala_llm.config import ConfigError, load, to_yaml
from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault

PARTS = (
    "env.args.parts.birds={name: parrot, weight: 3, args: {num_words: 2, num_tasks: 20}}",
    "env.args.parts.ways={name: corridor, args: {num_tasks: 50}}",
)


def mixture(*words: str) -> Any:
    return make_suite(load(["model=scratch", "env=mixture", *words]).env)


def test_parts_have_the_share_of_their_weight_and_all_their_tasks() -> None:
    both = mixture(*PARTS)
    train = list(both.tasks("train"))
    assert Counter(both.part_names[both.task(task)[0]] for task in train) == {"birds": 90, "ways": 30}
    times = Counter(both.task(task) for task in train)
    assert {times[0, task] for task in range(12)} == {7, 8}, "the twelve of the parrot come about equally often"
    assert {times[1, task] for task in range(30)} == {1}
    assert Counter(map(both.signature, train))["birds: a"] == 45


def test_its_splits_are_those_of_the_parts_in_turn() -> None:
    both = mixture(*PARTS)
    assert len({task for split in ("train", "validation", "test") for task in both.tasks(split)}) == 120 + 14 + 14
    inner = [both.task(task) for task in both.tasks("validation")]
    assert inner[:9] == [(0, 12), (1, 30), (0, 13), (1, 31), (0, 14), (1, 32), (0, 15), (1, 33), (1, 34)]
    assert [both.task(task) for task in both.tasks("test")][:2] == [(0, 16), (1, 40)]
    with pytest.raises(EnvironmentFault, match="no such task"):
        asyncio.run(contract.reset(both.session(True), 10**9, "mixture"))


def test_an_episode_is_that_of_the_part() -> None:
    both = mixture(*PARTS)

    async def first() -> Any:
        session = both.session(training=True)
        assert await contract.reset(session, both.tasks("test")[0], "mixture") == "say a"
        return await contract.step(session, "a", "mixture")

    assert asyncio.run(first())[4]["score"] == 1.0


def test_parts_with_other_system_prompts_begin_with_them() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    sums = "env.args.parts.sums={name: reasoning_gym, args: {task: gcd, num_train: 5, system_prompt: Think.}}"
    both = mixture(PARTS[0], sums)
    [task] = [task for task in both.tasks("train") if both.task(task) == (1, 4)][:1]
    shown = asyncio.run(contract.reset(both.session(True), task, "mixture"))
    assert both.system_prompt == "" and shown.startswith("Think.\n\n") and "Greatest Common Divisor" in shown
    assert mixture(sums).system_prompt == "Think."


def test_what_was_saved_loads_again(tmp_path: Any) -> None:
    config = load(["model=scratch", "env=mixture", *PARTS])
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert load([f"experiment={tmp_path}/saved.yaml"]) == config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.args.parts.a={weight: 1}"], "env.args.parts.a="),
        (["env.args.parts.a={name: parrot, wait: 1}"], "env.args.parts.a="),
        (["env.args.parts.a={name: webshop, args: {catalog: hard}}"], "parts.a.args.catalog=hard .*args.catalogue"),
        (
            ["env.args.parts.a={name: webshop, args: {catalogue_seed: x}}"],
            "parts.a.args.catalogue_seed=x has the wrong",
        ),
        (["env.args.parts.a={name: webshop, args: {max_steps: 0}}"], r"parts\.a\.args\.max_steps=0 is out of range"),
        (["env.args.parts.a={name: parrot, args: 3}"], r"parts\.a\.args=3 sets no option: write args: {NAME: value}"),
        (["env.args.parts.a={name: webshop, args: 3}"], r"parts\.a\.args=3 sets no option: write args: {NAME: value}"),
        (["env.args.parts.a={name: parrot, weight: 0}"], "env.args.parts.a.weight=0"),
        (["env.args.parts.a={name: parot}"], "did you mean parrot"),
        (["env.args.parts.a={name: parrot, args: {words: 3}}"], "num_words"),
        (["env.args.parts.a={name: parrot, args: {num_words: 99}}"], r"parts\.a\.args\.num_words=99 is out of range"),
    ],
)
def test_wrong_settings_of_parts_are_refused_with_the_settings(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(["model=scratch", "env=mixture", PARTS[1], *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has no parts"),
        (["env.args.parts.a={name: corridor, weight: 1e-6}", PARTS[0]], r"parts\.a has .* raise its weight"),
    ],
)
def test_parts_that_cannot_be_made_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(EnvironmentFault, match=said):
        mixture(*words)
