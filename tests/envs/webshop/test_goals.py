import random
from collections import Counter

import pytest

from impala_llm.envs.webshop import WebShopEnv, solvable_goals, split_goals
from impala_llm.envs.webshop.goals import draw_goal, draw_price_limit


def _keys(goal):
    return {name: getattr(goal, name) for name in goal.__slots__}


@pytest.mark.parametrize(
    ("goal_set", "file", "number"),
    [("human", "goals_human_seed0.json", 72), ("synthetic", "goals_synthetic_seed0_first100.json", 614)],
)
def test_golden_goals(shop, read_cases, goal_set, file, number):
    expected = read_cases(f"cases/{file}")
    assert len(shop.goals(goal_set)) == number
    assert [_keys(goal) for goal in shop.goals(goal_set)[: len(expected)]] == expected


def test_goals_are_made_once_and_independent_of_each_other(small_shop, item):
    human = {"A1": [{"instruction": "a brush.", "instruction_attributes": ["soft"]}]}
    first, second = (small_shop(item(pricing="$1$9"), human=human, seed=3) for _ in range(2))
    synthetic_first = first.goals("synthetic"), first.goals("human")
    human_first = second.goals("human"), second.goals("synthetic")
    assert [_keys(g) for g in synthetic_first[0]] == [_keys(g) for g in human_first[1]]
    assert [_keys(g) for g in synthetic_first[1]] == [_keys(g) for g in human_first[0]]
    assert first.goals("human") is first.goals("human")


def test_bad_goal_set(small_shop):
    with pytest.raises(ValueError, match="goal_set is 'easy'"):
        small_shop().goals("easy")
    with pytest.raises(ValueError, match="no human instructions"):
        small_shop().goals("human")


@pytest.mark.parametrize(
    ("price", "limits"),
    [
        (0.0, {20.0, 30.0, 40.0}),
        (9.99, {20.0, 30.0, 40.0}),
        (10.0, {30.0, 40.0, 50.0}),  # strictly above the price
        (959.0, {970.0, 980.0, 990.0}),
        (960.0, {980.0, 990.0}),
        (970.0, {990.0}),
        (979.99, {990.0}),
        (980.0, {1_000_000}),  # only 990 is left: no limit
        (5000.0, {1_000_000}),
    ],
)
def test_price_candidates(price, limits):
    rng = random.Random(0)
    drawn = [draw_price_limit(price, rng) for _ in range(200)]
    assert {limit for limit, _ in drawn} == limits
    for limit, text in drawn:
        assert text == ("" if limit == 1_000_000 else f", and price lower than {limit:.2f} dollars")


def test_price_limit_is_the_larger_of_two():
    rng = random.Random(0)
    counts = Counter(draw_price_limit(25.0, rng)[0] for _ in range(6000))
    assert [round(6 * counts[limit] / 6000, 1) for limit in (30.0, 40.0, 50.0, 60.0)] == [0.0, 1.0, 2.0, 3.0]


def test_nothing_is_drawn_without_two_candidates():
    rng = random.Random(5)
    draw_price_limit(985.0, rng)
    assert rng.random() == random.Random(5).random()


def test_synthetic_texts_and_options(small_shop, item):
    shop = small_shop(item(options={"Size": ["S", "M"], "Color": ["Red"]}, pricing="$985"))
    goals = {goal.instruction_text: goal.goal_options for goal in shop.goals("synthetic")}
    assert goals == {
        "Find me soft brushes with color: red, and size: s": {"color": "red", "size": "s"},
        "Find me soft brushes with color: red, and size: m": {"color": "red", "size": "m"},
    }
    assert all(list(options) == ["color", "size"] for options in goals.values())
    (goal,) = small_shop(item(pricing="$985")).goals("synthetic")
    assert (goal.instruction_text, goal.goal_options, goal.price_upper) == ("Find me soft brushes", {}, 1_000_000)
    assert (goal.asin, goal.name, goal.category) == ("A1", "Alder Hair Brush", "beauty")


def test_one_draw_a_product_even_without_combinations(small_shop, item):
    empty = item("A1", options={"Color": []})
    shop = small_shop(empty, item("A2", options={"Size": ["s", "m", "l"]}), seed=4)
    rng = random.Random(4)
    draw_price_limit(25.0, rng)
    limit, _ = draw_price_limit(25.0, rng)
    assert [goal.price_upper for goal in shop.goals("synthetic")] == [limit] * 3


def test_products_without_instruction_have_no_synthetic_goal(small_shop, item):
    attributes = {
        "A1": {"attributes": ["soft"]},
        "A2": {"attributes": ["soft"], "instruction": None, "instruction_attributes": None},
        "A3": {"attributes": ["soft"], "instruction": "Find", "instruction_attributes": ["soft"]},
    }
    shop = small_shop(*(item(asin) for asin in ("A1", "A2", "A3", "A4")), attributes=attributes, seed=1)
    (goal,) = shop.goals("synthetic")
    assert (goal.asin, goal.price_upper) == ("A3", draw_price_limit(25.0, random.Random(1))[0])


def test_weights_are_mean_inverse_attribute_counts(small_shop, item):
    attributes = {
        "A1": {"instruction": "one", "instruction_attributes": ["soft", "light"]},
        "A2": {"instruction": "two", "instruction_attributes": ["soft"]},
    }
    shop = small_shop(item("A1", options={"Size": ["s", "m"]}), item("A2"), attributes=attributes)
    weights = {goal.asin: goal.weight for goal in shop.goals("synthetic")}
    assert weights == {"A1": (1 / 3 + 1 / 2) / 2, "A2": 1 / 3}


def test_human_goals(small_shop, item):
    human = {
        "A1": [
            {"instruction": "..a brush..", "instruction_attributes": ["soft"], "instruction_options": ["red"]},
            {"instruction": "no attributes", "instruction_attributes": [], "instruction_options": []},
            {"instruction": "another.", "instruction_attributes": ["light"], "instruction_options": []},
        ],
        "A9": [{"instruction": "of no product"}],
    }
    shop = small_shop(item(), human=human, seed=2)
    rng = random.Random(2)
    first, second = draw_price_limit(25.0, rng), draw_price_limit(25.0, rng)  # none for the one without attributes
    goals = {goal.instruction_text: goal for goal in shop.goals("human")}
    assert set(goals) == {"a brush" + first[1], "another" + second[1]}
    goal = goals["a brush" + first[1]]
    assert (goal.goal_options, goal.attributes, goal.weight, goal.price_upper) == (["red"], ["soft"], 1, first[0])


def test_canonical_order_depends_on_the_count_only(small_shop, item):
    values = [f"v{n}" for n in range(20)]
    expected = list(values)
    random.Random(233).shuffle(expected)
    for seed in (0, 1):
        goals = small_shop(item(options={"Size": values}), seed=seed).goals("synthetic")
        assert [goal.goal_options["size"] for goal in goals] == expected


def test_weighted_draw(shop):
    goals = shop.goals("synthetic")[:3]
    rng = random.Random(0)
    counts = Counter(draw_goal(goals, rng) for _ in range(20_000))
    total = sum(goal.weight for goal in goals)
    for position, goal in enumerate(goals):
        assert counts[position] / 20_000 == pytest.approx(goal.weight / total, abs=0.02)


@pytest.mark.parametrize(
    ("number", "test", "validation", "train"),
    [
        (6910, range(500), range(500, 1500), range(1500, 6910)),
        (3000, range(500), range(500, 1500), range(1500, 3000)),
        (2999, range(499), range(499, 1499), range(1499, 2999)),
        (600, range(100), range(100, 300), range(300, 600)),
        (6, range(1), range(1, 3), range(3, 6)),
        (0, range(0), range(0), range(0)),
    ],
)
def test_splits(number, test, validation, train):
    assert [split_goals(number, split) for split in ("test", "validation", "train")] == [test, validation, train]


def test_splits_cover_all_goals_once():
    for number in range(0, 3200, 7):
        together = [*split_goals(number, "test"), *split_goals(number, "validation"), *split_goals(number, "train")]
        assert together == list(range(number))
    with pytest.raises(ValueError, match="split is 'dev'"):
        split_goals(10, "dev")


def _reached(shop, goal_set, strict_compat):
    """Positions of the goals that reach 1.0 when a shopper opens the target and clicks each of the goal's options."""
    env = WebShopEnv(shop, goals=goal_set, strict_compat=strict_compat, results_per_page=len(shop))
    reached = []
    for position, goal in enumerate(shop.goals(goal_set)):
        env.reset(task_id=position)
        env.step(f"search[{goal.name} {goal.query}]")
        env.step(f"click[{goal.asin}]")
        options = goal.goal_options
        for value in options.values() if isinstance(options, dict) else options:
            env.step(f"click[{value}]")
        _, reward, terminated, _, _ = env.step("click[buy now]")
        assert terminated
        if reward == 1.0:
            reached.append(position)
    return reached


@pytest.mark.parametrize("goal_set", ["synthetic", "human"])
@pytest.mark.parametrize("strict_compat", [True, False])
def test_solvable_goals_are_those_a_shopper_can_reach(shop, goal_set, strict_compat):
    goals = shop.goals(goal_set)
    solvable = solvable_goals(shop, goals, strict_compat)
    assert solvable == _reached(shop, goal_set, strict_compat)
    assert strict_compat or solvable == list(range(len(goals)))


def test_strict_goals_with_a_shared_value_or_a_hidden_colour_are_not_solvable(small_shop, item):
    strap = item("A1", options={"Color": ["black", "white"], "Strap Color": ["black", "blue"]})
    shop = small_shop(strap, item("A2", options={"Size": ["standard", "small"]}))
    goals = shop.goals("synthetic")
    solvable = [goals[position].goal_options for position in solvable_goals(shop, goals)]
    assert {"size": "standard"} not in solvable and {"size": "small"} in solvable
    assert {"color": "black", "strap color": "blue"} not in solvable
    assert {"color": "white", "strap color": "blue"} in solvable
    assert len(solvable_goals(shop, goals, strict_compat=False)) == len(goals)
    assert _reached(shop, "synthetic", False) == list(range(len(goals)))


def test_an_option_named_like_a_button_is_never_solvable(small_shop, item):
    shop = small_shop(item(options={"Style": ["Buy Now", "plain"]}))
    goals = shop.goals("synthetic")
    for strict_compat in (True, False):
        solvable = solvable_goals(shop, goals, strict_compat)
        assert [goals[position].goal_options for position in solvable] == [{"style": "plain"}]
