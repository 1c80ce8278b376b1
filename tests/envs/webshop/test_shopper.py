"""The scripted shopper: what it reads, that it plays by the rules, and how well it plays with and without noise."""

import pytest

from impala_llm.envs.webshop import WebShopEnv
from impala_llm.envs.webshop.shopper import ScriptedShopper, read_instruction


def play(env, shopper, task_id):
    """(score, actions, bought) of one episode."""
    shopper.reset()
    observation, info = env.reset(task_id=task_id)
    actions, done = [], False
    while not done:
        available = info["available_actions"]
        actions.append(shopper.act(observation, info))
        name, argument = actions[-1][:-1].split("[", 1)
        assert name == "search" or argument in available["clickables"]
        observation, _, terminated, truncated, info = env.step(actions[-1])
        done = terminated or truncated
    return info["score"], actions, terminated


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("instruction", "words", "limit", "options"),
    [
        (
            "Find me oil free, vegan soap with count: 2 pack, and scent: citrus, and price lower than 30.00 dollars",
            "oil free vegan soap",
            30.0,
            ("2 pack", "citrus"),
        ),
        ("Find me vegan lip balm, and price lower than 110.00 dollars", "vegan lip balm", 110.0, None),
        ("Find me vegan lip balm with color: red", "vegan lip balm", float("inf"), ("red",)),
        ("i am looking for vegan lip balm in red", "vegan lip balm red", float("inf"), None),
        ("", "", float("inf"), None),
    ],
)
def test_read_instruction(instruction, words, limit, options):
    wish = read_instruction(instruction)
    assert (" ".join(wish.words), wish.price_limit, wish.options) == (words, limit, options)


def test_wanted_values_are_whole_words():
    named = read_instruction("Find me vegan hat with color: red, and size: x-large")
    assert named.wants("red") and named.wants("x-large") and not named.wants("large")
    free = read_instruction("i need a vegan hat in red and x-large, and price lower than 50.00 dollars")
    assert free.wants("red") and free.wants("x-large")
    assert not free.wants("large") and not free.wants("50")


@pytest.mark.parametrize("observation_mode", ["text", "text_rich"])
@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_plays_well(catalogue, goals, observation_mode):
    env = WebShopEnv(catalogue, goals=goals, observation_mode=observation_mode, max_steps=15)
    shopper = ScriptedShopper()
    scores, _, bought = zip(*(play(env, shopper, task_id) for task_id in range(80)), strict=True)
    assert mean(scores) >= 0.95
    assert all(bought)


def test_noise_makes_it_sloppy_but_it_still_clicks_options(catalogue):
    env = WebShopEnv(catalogue, max_steps=15)
    shopper = ScriptedShopper(noise=1.0, seed=0)
    episodes = [play(env, shopper, task_id) for task_id in range(250)]
    assert mean(score for score, _, _ in episodes) == pytest.approx(0.6, abs=0.05)
    # beside its search, the product and the purchase
    clicks_options = mean(len(actions) > 3 for _, actions, _ in episodes)
    assert clicks_options == pytest.approx(0.5, abs=0.1)
    half = ScriptedShopper(noise=0.5, seed=0)
    assert 0.7 < mean(play(env, half, task_id)[0] for task_id in range(120)) < 0.9


def test_same_seed_same_actions(catalogue):
    env = WebShopEnv(catalogue, max_steps=15)
    runs = [
        [play(env, shopper, task_id)[1] for task_id in range(20)]
        for shopper in (ScriptedShopper(1.0, 5), ScriptedShopper(1.0, 5))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != [
        play(env, shopper, task_id)[1] for shopper in (ScriptedShopper(1.0, 6),) for task_id in range(20)
    ]


def test_finds_its_way_out_of_dead_ends():
    shopper = ScriptedShopper()
    start = "WebShop [SEP] Instruction: [SEP] Find me vegan lip balm [SEP] Search"
    assert shopper.act(start, info(["search"], search_bar=True)) == "search[vegan lip balm]"
    assert shopper.act("Page 1", info(["back to search", "next >"])) == "click[back to search]"
    assert shopper.act("some reviews", info(["back to search", "< prev"])) == "click[< prev]"


def test_looks_at_other_results_when_an_option_is_lacking_and_at_last_buys_the_best():
    shopper = ScriptedShopper()
    shopper.act("Instruction:\nFind me vegan hat with color: red, and size: xl\n", info(["search"], search_bar=True))
    results = info(["back to search", "next >", "b0a", "b0b", "b0c"])
    page = "B0A Vegan Hat $5.0\nB0B Vegan Hat $6.0\nB0C Vegan Hat $7.0"
    pages = {"b0a": ["small"], "b0b": ["red", "small"], "b0c": ["blue"]}
    for asin, options in pages.items():
        assert shopper.act(page, results) == f"click[{asin}]"
        assert shopper.act("", item(options)) == "click[< prev]"
    assert shopper.act(page, results) == "click[b0b]"
    assert shopper.act("", item(pages["b0b"])) == "click[red]"
    assert shopper.act("", item(pages["b0b"])) == "click[buy now]"


def test_passes_over_what_is_too_dear():
    shopper = ScriptedShopper()
    first = "Instruction:\nFind me vegan hat, and price lower than 20.00 dollars\n"
    shopper.act(first, info(["search"], search_bar=True))
    page = "B0A Vegan Hat $25.0 to $30.0\nB0B Vegan Hat $15.0"
    assert shopper.act(page, info(["back to search", "next >", "b0a", "b0b"])) == "click[b0b]"


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="noise is 1.5"):
        ScriptedShopper(noise=1.5)
    with pytest.raises(ValueError, match="Instruction:"):
        ScriptedShopper().act("Page 1", info(["back to search"]))


def info(clickables, search_bar=False):
    return {"available_actions": {"has_search_bar": search_bar, "clickables": clickables}}


def item(options):
    return info(["back to search", "< prev", "description", "features", "reviews", "buy now", *options])
