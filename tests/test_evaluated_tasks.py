"""Statements of an evaluation about the tasks that it plays."""

from pathlib import Path

import pytest

from impala_llm.commands.evaluated_policy import unfit_policy
from impala_llm.config import load, to_yaml
from impala_llm.envs.webshop.learned_catalogues import learned_of, with_learned
from impala_llm.envs.webshop.nouns import installed_nouns
from impala_llm.evaluate import evaluate_policies
from impala_llm.learning.policy.model_files import policy_files
from impala_llm.settings import model_directory

DATA = Path(__file__).parent / "fixtures" / "webshop" / "data"


def names(tmp_path: Path, *words: str) -> list[str]:
    """The names of the tasks that an evaluation plays."""
    small = ["evaluation.num_tasks=1", "env.webshop.num_products=40", f"run.dir={tmp_path}"]
    results, _ = evaluate_policies(load([*small, *words]), {})
    return list(dict.fromkeys(result.tasks for result in results))


def test_results_on_other_catalogues_goals_or_limits_have_other_names(tmp_path: Path) -> None:
    usual = "webshop, hard catalogue 0, num_products=40, split test"
    assert names(tmp_path) == [usual]
    assert names(tmp_path, "env.webshop.catalogue=easy") == [usual.replace("hard", "easy")]
    assert names(tmp_path, "env.webshop.catalogue_seed=7", "env.webshop.max_steps=9", "evaluation.unseen_seed=3") == [
        "webshop, hard catalogue 7, num_products=40, max_steps=9, split test",
        "webshop, unseen catalogue 3, num_products=40, max_steps=9, split test",
    ]


def test_the_files_of_a_catalogue_and_the_goals_of_people_are_named(tmp_path: Path) -> None:
    files = {"items": "items_shuffle", "attributes": "items_ins_v2", "human": "items_human_ins", "nouns": "nouns"}
    of_files = [f"env.webshop.{key}={DATA / name}.json" for key, name in files.items()]
    found = names(tmp_path, *of_files, "env.webshop.goals=human", "evaluation.split=train")
    catalogue = f"catalogue 0 of {DATA / 'items_shuffle.json'}"
    assert found == [f"webshop, {catalogue}, num_products=40, goals=human, split train"]


@pytest.mark.parametrize("folder", ["policy", "checkpoints/update-000004/policy"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.args.num_train=50"], "num_train=200, and not 50: it may have been trained on tasks that are held out"),
        (["env.args.num_train=200", "env.args.config.max_terms=4"], "env.args.config={}, and not {'max_terms': 4}"),
        (["env.args.num_train=200"], None),
    ],
)
def test_other_settings_of_the_tasks_than_those_of_the_training_are_named(
    tmp_path: Path, words: list[str], said: str | None, folder: str
) -> None:
    gym = ["env=reasoning_gym", "env.args.task=chain_sum"]
    policy = tmp_path / "run" / folder
    policy.mkdir(parents=True)
    (policy / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load([*gym, "model=scratch", "env.args.num_train=200"])))
    found = unfit_policy(load([*gym, "model=pretrained", f"model.path={policy}", *words]))
    assert found is None if said is None else said in str(found)


OTHER = f"env.webshop.items={DATA.parent / 'edge' / 'items_shuffle.json'}"
FILES = tuple(
    f"env.webshop.{key}={DATA / name}.json"
    for key, name in {"items": "items_shuffle", "attributes": "items_ins_v2", "human": "items_human_ins"}.items()
)
HARD = ("env.webshop.catalogue=hard", "env.webshop.catalogue_seed=7")


@pytest.mark.parametrize(
    ("trained", "words", "said"),
    [
        (HARD, ["evaluation.unseen_seed=7"], "has learned from catalogue 7, which evaluation.unseen_seed=7 plays as"),
        ((*HARD, "demonstrations.num_catalogues=3"), ["evaluation.unseen_seed=9"], "has learned from catalogue 9, "),
        ((*HARD, "demonstrations.num_catalogues=2"), ["evaluation.unseen_seed=9"], None),
        (HARD, ["env.webshop.catalogue_seed=7", "evaluation.unseen_seed=7"], None),
        (HARD, ["env.webshop.catalogue=easy", "evaluation.unseen_seed=7"], None),
        (HARD, ["env.webshop.catalogue_seed=7", "env.webshop.goals=human"], None),
        (FILES, [*FILES, "env.webshop.catalogue_seed=7"], None),
        (FILES, [*FILES, "env.webshop.num_products=100"], "env.webshop.num_products=1000, and not 100: it may have"),
        (FILES, [*FILES, "env.webshop.goals=human"], "env.webshop.goals=synthetic, and not human: it may have been"),
        (FILES, [*FILES, OTHER], "edge/items_shuffle.json: it may have been trained on tasks that are held out now"),
        (FILES, ["evaluation.unseen_seed=0", "env.webshop.catalogue_seed=3"], None),
        (("env.webshop.catalogue=easy",), ["env.webshop.catalogue=easy", "env.webshop.goals=human"], "goals=synthetic"),
    ],
)
def test_tasks_of_the_shop_that_a_policy_has_learned_from_are_named(
    tmp_path: Path, trained: tuple[str, ...], words: list[str], said: str | None
) -> None:
    policy = tmp_path / "run" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load(["env=webshop", *trained])))
    usual = ["env=webshop", "env.webshop.catalogue=hard", "model=pretrained", f"model.path={policy}"]
    found = unfit_policy(load([*usual, *words]))
    assert found is None if said is None else said in str(found)


def test_catalogues_that_a_policy_was_shown_are_named_whatever_its_settings_were(tmp_path: Path) -> None:
    """Its own start's among them: settings name the last training alone."""
    shop = ("env=webshop", "env.webshop.catalogue=hard", "env.webshop.observation_mode=compact")
    said = "has learned from catalogue 1000, which evaluation.unseen_seed=1000 plays as an unseen one"
    assert said in str(unfit_policy(load([*shop, "evaluation.unseen_seed=1000"])))
    assert unfit_policy(load([*shop, "evaluation.unseen_seed=1100"])) is None
    assert unfit_policy(load([*shop, "evaluation.unseen_seed=1000", "env.webshop.num_products=40"])) is None

    start = model_directory("tiny_shopper")
    assert start is not None
    recording = {"env": {"webshop": {"catalogue": "hard", "num_products": 1000}}}
    learned = learned_of(recording, ["webshop, catalogue 7", "webshop, catalogue 8", "corridor"])
    policy = tmp_path / "sft" / "policy"
    policy.mkdir(parents=True)
    for name, content in with_learned(policy_files(start), learned).items():
        (policy / name).write_bytes(content)
    (policy.parent / "config.yaml").write_text(to_yaml(load(["env=webshop"])))
    usual = [*shop, "model=pretrained", f"model.path={policy}"]
    for seed, is_learned in ((7, True), (8, True), (1099, True), (9, False)):
        found = unfit_policy(load([*usual, f"evaluation.unseen_seed={seed}"]))
        assert (f"has learned from catalogue {seed}, " in str(found)) == is_learned


def test_who_tagged_the_nouns_of_files_is_named(tmp_path: Path) -> None:
    files = {"items": "items_shuffle", "attributes": "items_ins_v2"}
    of_files = [f"env.webshop.{key}={DATA / name}.json" for key, name in files.items()]
    [found] = names(tmp_path, *of_files, "evaluation.split=train")
    assert found.endswith(f"items_shuffle.json, num_products=40, nouns={installed_nouns().name}, split train")
