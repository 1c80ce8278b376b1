"""The shop as a suite: splits, filters, page formats, early ends and the statistics of an episode."""

import dataclasses

import pytest

from impala_llm.envs.webshop import WebShopEnv, records_to_catalogue, synthetic_catalogue
from impala_llm.envs.webshop.prompt import PROMPT_MODES
from impala_llm.envs.webshop.shopper import ScriptedShopper
from impala_llm.envs.webshop.suite import WebShopSuite, suite_from_config
from impala_llm.settings import WebShopConfig

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def catalogue():
    return synthetic_catalogue(300)


def play(suite, task_id, training=True, shopper=None):
    """(observations, last reward, last info) of an episode of the scripted shopper."""
    shopper, session = shopper or ScriptedShopper(), suite.session(training)
    shopper.reset()
    observation, info = session.reset(task_id)
    observations, done, reward = [observation], False, 0.0
    while not done:
        observation, reward, terminated, truncated, info = session.step(shopper.act(observation, info))
        observations.append(observation)
        done = terminated or truncated
    return observations, reward, info


def goal_with_options(suite, count):
    return next(task for task in suite.tasks("train") if len(suite.goals[task].goal_options) == count)


def test_splits_are_disjoint_and_cover_all_goals(catalogue):
    suite = WebShopSuite(catalogue)
    tasks = [task for split in SPLITS for task in suite.tasks(split)]
    assert sorted(tasks) == list(range(len(catalogue.goals("synthetic"))))
    assert min(len(suite.tasks(split)) for split in SPLITS) > 100


def test_signature_is_the_query(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(goals="human"))
    task = suite.tasks("validation")[3]
    assert suite.signature(task) == catalogue.goals("human")[task].query


@pytest.mark.parametrize("observation_mode", PROMPT_MODES)
@pytest.mark.parametrize("short", [False, True])
def test_the_format_changes_what_is_shown_and_not_what_is_played(catalogue, observation_mode, short):
    suite = WebShopSuite(
        catalogue,
        WebShopConfig(observation_mode=observation_mode, results_per_page=5, instruction_once=short, delta_pages=short),
    )
    plain = WebShopEnv(catalogue, results_per_page=5, max_steps=15)
    for task in suite.tasks("test")[:20]:
        observations, reward, info = play(suite, task)
        shopper = ScriptedShopper()
        observation, plain_info = plain.reset(task)
        for _ in range(len(observations) - 1):
            observation, plain_reward, terminated, _, plain_info = plain.step(shopper.act(observation, plain_info))
        assert terminated and (reward, info["score"]) == (plain_reward, plain_info["score"])
        instruction = suite.goals[task].instruction_text
        assert instruction in observations[0]
        assert any(instruction in observation for observation in observations[1:]) != short


def test_delta_pages_show_one_line_after_an_option_and_after_nonsense(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(observation_mode="text", delta_pages=True))
    task = goal_with_options(suite, 2)
    observations, _, _ = play(suite, task)
    values = suite.goals[task].goal_options.values()
    assert [line for line in observations if line.startswith("You have clicked")] == [
        f"You have clicked {v}." for v in values
    ]
    session = suite.session(training=True)
    session.reset(task)
    assert session.step("hello")[0] == "Nothing happened."
    assert session.step("search[hat]")[0].startswith("Instruction:")


def test_default_pages_are_those_of_the_original(catalogue):
    suite, env = WebShopSuite(catalogue), WebShopEnv(catalogue, observation_mode="text_rich")
    session = suite.session(training=False)
    assert session.reset(5) == env.reset(5)
    for action in ("search[face cream]", "nonsense", "click[next >]", "click[< prev]"):
        assert session.step(action) == env.step(action)


def test_results_per_page(catalogue):
    session = WebShopSuite(catalogue, WebShopConfig(results_per_page=5)).session(training=True)
    session.reset(0)
    info = session.step("search[face cream]")[4]
    assert len(info["available_actions"]["clickables"]) == len(("back to search", "next >")) + 5


def test_thinking_before_an_action_is_allowed(catalogue):
    suite = WebShopSuite(catalogue)
    one, other = suite.session(training=True), suite.session(training=True)
    assert one.reset(0) == other.reset(0)
    assert one.step("I need cream.\nsearch[face cream]")[0] == other.step("search[face cream]")[0]


def test_invalid_actions_end_training_episodes_only(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(max_invalid_actions=2, max_steps=4))
    training, evaluation = suite.session(training=True), suite.session(training=False)
    for session, length in ((training, 2), (evaluation, 4)):
        session.reset(1)
        ends = [session.step("nonsense") for _ in range(length)]
        assert [end[2:4] for end in ends] == [(False, False)] * (length - 1) + [(True, False)]
        info = ends[-1][4]
        assert (info["score"], info["success"]) == (0.0, False)
        assert info["stats"] == {
            "bought": 0.0,
            "steps": float(length),
            "invalid_actions": float(length),
            "options_clicked": 0.0,
            "attributes_matched": 0.0,
            "options_matched": 0.0,
        }


def test_stats_of_a_purchase(catalogue):
    suite = WebShopSuite(catalogue)
    task = goal_with_options(suite, 2)
    goal, session = suite.goals[task], suite.session(training=True)
    session.reset(task)
    session.step(f"search[{goal.name}]")
    session.step(f"click[{goal.asin.lower()}]")
    session.step("click[no such thing]")
    session.step(f"click[{next(iter(goal.goal_options.values()))}]")
    _, reward, terminated, _, info = session.step("click[buy now]")
    # both options count, one of them was chosen
    parts = len(goal.attributes) + len(goal.goal_options) + 1
    assert terminated and reward == info["score"] == (parts - 1) / parts and not info["success"]
    assert info["stats"] == {
        "bought": 1.0,
        "steps": 5.0,
        "invalid_actions": 1.0,
        "options_clicked": 1.0,
        "attributes_matched": 1.0,
        "options_matched": 0.5,
    }


def test_stats_start_anew_and_leave_options_out_where_none_are_wanted(catalogue):
    suite = WebShopSuite(catalogue)
    task = goal_with_options(suite, 0)
    session = suite.session(training=True)
    for _ in range(2):
        session.reset(task)
        session.step("nonsense")
        session.step(f"search[{suite.goals[task].name}]")
        session.step(f"click[{suite.goals[task].asin.lower()}]")
        info = session.step("click[buy now]")[4]
        assert info["stats"] == {
            "bought": 1.0,
            "steps": 4.0,
            "invalid_actions": 1.0,
            "options_clicked": 0.0,
            "attributes_matched": 1.0,
        }


def test_sparse_reward_is_ten_or_nothing_and_the_score_stays(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(sparse_reward=True))
    seen = set()
    for task in suite.tasks("test")[:40]:
        _, reward, info = play(suite, task, shopper=ScriptedShopper(1.0, task))
        assert reward == (10.0 if info["score"] == 1.0 else 0.0)
        seen.add(reward)
    assert seen == {0.0, 10.0}


def test_a_bonus_is_added_where_the_score_is_one(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(success_bonus=4.0))
    seen = set()
    for task in suite.tasks("test")[:40]:
        _, reward, info = play(suite, task, shopper=ScriptedShopper(1.0, task))
        assert reward == info["score"] + (4.0 if info["score"] == 1.0 else 0.0)
        seen.add(info["success"])
    assert seen == {False, True}


def test_solvable_only_drops_goals_and_keeps_the_bounds_of_the_splits():
    # "standard" holds the colour "tan", the trap of the strict matcher (case E5); "small" does not
    item = {
        "asin": "B0A", "name": "Alder Hat", "full_description": "A hat.",
        "small_description": ["Soft"], "pricing": "$10.00", "images": ["x"],
        "category": "fashion", "query": "hat", "product_category": "A › B › C",
        "customization_options": {
            "size": [{"value": "standard"}, {"value": "small"}],
            "count": [{"value": f"{number}"} for number in range(30)],
        },
    }  # fmt: skip
    attributes = {
        "B0A": {"attributes": ["soft"], "instruction": "Find me soft hat", "instruction_attributes": ["soft"]}
    }
    catalogue = records_to_catalogue([item], attributes)
    all_tasks, kept = WebShopSuite(catalogue), WebShopSuite(catalogue, WebShopConfig(solvable_only=True))
    repaired = WebShopSuite(catalogue, WebShopConfig(solvable_only=True, strict_compat=False))
    for split in SPLITS:
        small = [task for task in all_tasks.tasks(split) if all_tasks.goals[task].goal_options["size"] == "small"]
        assert list(kept.tasks(split)) == small
        assert list(repaired.tasks(split)) == list(all_tasks.tasks(split))


@pytest.mark.parametrize("results_per_page", [5, 10])
def test_row_numbers_change_what_is_shown_and_not_what_is_played(catalogue, results_per_page):
    config = WebShopConfig(observation_mode="compact", results_per_page=results_per_page)
    by_asin, by_row = (WebShopSuite(catalogue, dataclasses.replace(config, row_numbers=on)) for on in (False, True))
    clicks = []
    for task in by_asin.tasks("test")[:40]:
        sessions = by_asin.session(training=True), by_row.session(training=True)
        asin_script, row_script = ScriptedShopper(), ScriptedShopper()
        (asin_page, asin_info), (row_page, row_info) = (session.reset(task) for session in sessions)
        ended = False
        while not ended:
            asin_action, row_action = asin_script.act(asin_page, asin_info), row_script.act(row_page, row_info)
            clicks += [row_action] if row_action != asin_action else []
            asin_page, reward, ended, _, asin_info = sessions[0].step(asin_action)
            row_page, row_reward, row_ended, _, row_info = sessions[1].step(row_action)
            assert (reward, ended, asin_info["invalid"]) == (row_reward, row_ended, row_info["invalid"])
            assert asin_page == row_page or len(asin_page.splitlines()) == len(row_page.splitlines())
    assert len(clicks) >= 40 and all(click[len("click[") : -1].isdecimal() for click in clicks)


def test_with_row_numbers_asins_can_still_be_clicked_and_opened_results_are_marked(catalogue):
    suite = WebShopSuite(catalogue, WebShopConfig(observation_mode="compact", row_numbers=True, results_per_page=5))
    numbered, by_asin = suite.session(training=True), suite.session(training=True)
    for session in (numbered, by_asin):
        session.reset(0)
    page, _, _, _, info = numbered.step("search[face cream]")
    assert info["available_actions"]["clickables"][-5:] == ["1", "2", "3", "4", "5"]
    assert [line.rpartition(" ")[2] for line in page.splitlines()[-5:]] == ["1", "2", "3", "4", "5"]
    by_asin.step("search[face cream]")
    third = catalogue.search("face cream")[2].lower()
    item = numbered.step("I take the third: click[3]")
    assert item == by_asin.step(f"click[{third}]") and not item[4]["invalid"]
    page = numbered.step("click[< prev]")[0]
    assert [line.rpartition(" ")[2] for line in page.splitlines()[-5:]] == ["1", "2", "[3]", "4", "5"]
    assert numbered.step("click[6]")[4]["invalid"]


def test_row_numbers_need_compact_pages(catalogue):
    with pytest.raises(ValueError, match=r"row_numbers=true.*observation_mode=compact"):
        WebShopSuite(catalogue, WebShopConfig(observation_mode="text", row_numbers=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("observation_mode", "html"),
        ("max_steps", 0),
        ("results_per_page", 0),
        ("max_invalid_actions", 0),
        ("goals", "robots"),
    ],
)
def test_bad_arguments_are_named(catalogue, field, value):
    with pytest.raises(ValueError, match=str(value)):
        WebShopSuite(catalogue, WebShopConfig(**{field: value}))


def test_suite_from_config():
    config = WebShopConfig(
        num_products=40, catalogue_seed=3, observation_mode="compact", results_per_page=5, delta_pages=True
    )
    suite = suite_from_config(config)
    assert len(suite.catalogue) == 40 and suite.config.delta_pages and suite.system_prompt == ""
    assert set(suite.catalogue) == set(synthetic_catalogue(40, 3))
    with pytest.raises(ValueError, match="env.webshop.attributes is not set"):
        suite_from_config(dataclasses.replace(config, items="items.json"))
    with pytest.raises(OSError, match="no_such"):
        suite_from_config(dataclasses.replace(config, items="no_such_items.json", attributes="no_such_attributes.json"))
