import difflib
import random
import re

import pytest

from impala_llm.envs.webshop import RewardParts, records_to_catalogue, score_purchase
from impala_llm.envs.webshop.reward import option_matches, token_set_ratio


def test_golden_rewards(read_cases, shop):
    for case in read_cases("cases/rewards.jsonl"):
        goal, expected = case["goal"], case["expected"]
        nouns = expected["purchased_nouns"], expected["goal_nouns"]
        assert nouns == (shop.nouns(case["asin"]), shop.nouns(goal["asin"]))
        parts = score_purchase(shop[case["asin"]], goal, case["options"], case["price"], *nouns)
        for name in RewardParts.__slots__:
            value = getattr(parts, name)
            assert value == (pytest.approx(expected[name], abs=1e-12) if name in expected else None), (case["id"], name)


HAND = {
    "E1": (1.0, 1.0),
    "E2": (0.4, 1.0),
    "E3": (0.0, 0.0),
    "E4": (0.6, 1.0),
    "E5": (2 / 3, 1.0),
    "E5b human list": (1.0, 1.0),
    "E6": (0.1, 0.5),
    "E7": (0.04, 0.1),
    "E8 none nouns": (0.3, 0.5),
    "E9 fuzzy attr": (0.6, 1.0),
}


def _nouns(title):
    return re.findall(r"[a-z]+", title.lower())


@pytest.fixture
def hand_case(read_cases, item):
    """Makes (product, rest of the arguments) of a hand-computed case."""
    cases = {case["id"]: case for case in read_cases("cases/hand.jsonl")}

    def make(name):
        case = cases[name]
        record = case["product"]
        made = item(
            name=record["name"],
            query=record["query"],
            product_category=record["product_category"],
            small_description=record["BulletPoints"],
            full_description=record["Description"],
        )
        product = records_to_catalogue([made], {"A1": {"attributes": record["Attributes"]}})["A1"]
        titles = _nouns(record["name"]), _nouns(case["goal"]["name"])
        return product, case["goal"], case["options"], case["price"], *titles

    return make


@pytest.mark.parametrize("name", HAND)
def test_hand_computed(hand_case, name):
    parts = score_purchase(*hand_case(name))
    reward, r_type = HAND[name]
    assert parts.reward == pytest.approx(reward, abs=1e-12)
    assert parts.r_type == r_type


def test_repaired_matcher_counts_the_exact_option(hand_case):
    assert score_purchase(*hand_case("E5"), strict_compat=False).reward == 1.0
    assert score_purchase(*hand_case("E5b human list"), strict_compat=False).reward == 1.0


def test_goal_object_and_mapping_score_alike(shop):
    goal = shop.goals("synthetic")[5]
    keys = {name: getattr(goal, name) for name in goal.__slots__}
    product, nouns = shop[goal.asin], shop.nouns(goal.asin)
    arguments = (goal.goal_options, shop.prices[goal.asin], nouns, nouns)
    assert score_purchase(product, goal, *arguments) == score_purchase(product, keys, *arguments)


def test_goal_without_attributes_is_refused(shop):
    goal = {
        "query": "x",
        "name": "x",
        "product_category": "x",
        "attributes": [],
        "price_upper": 1.0,
        "goal_options": {},
    }
    with pytest.raises(ValueError, match="'attributes' is empty"):
        score_purchase(shop.products[0], goal, {}, 1.0, [], [])


@pytest.fixture
def score(small_shop, item):
    """Scores buying a product with changed record keys for a goal with changed keys; one attribute, no options."""

    def make(record=None, options=None, price=25.0, nouns=(("x",), ("x",)), strict_compat=True, **goal):
        product = small_shop(item(**(record or {})))["A1"]
        wanted = {
            "query": "hair brushes",
            "name": "Alder Hair Brush",
            "product_category": "Beauty › Hair Care › Brushes",
            "attributes": ["soft"],
            "price_upper": 30.0,
            "goal_options": {},
        }
        return score_purchase(
            product, wanted | goal, options or {}, price, *map(list, nouns), strict_compat=strict_compat
        )

    return make


def test_price_is_kept_up_to_the_limit(score):
    assert score(price=30.0).r_price is True
    assert score(price=30.000001).r_price is False


@pytest.mark.parametrize(
    ("bought", "wanted", "match"),
    [
        ("A › B › C", "A › B › D", True),
        ("A › B", "B › A", True),  # as sets
        (" A›B ", "A › B", True),  # stripped
        ("A › B", "A › C", False),
        ("A › A", "A › A", False),  # one part, however often
        ("a › b", "A › B", False),
    ],
)
def test_categories_match_with_two_parts(score, bought, wanted, match):
    assert score({"product_category": bought}, product_category=wanted).category_match is match


@pytest.mark.parametrize(
    ("bought", "wanted", "title_score"),
    [
        (["a", "b"], ["a", "b"], 1.0),
        (["a", "a"], ["a", "b"], 0.5),
        (["a"], ["a", "a"], 0.5),  # the goal's duplicates count
        ([], ["a"], 0.0),
        (["a"], [], 0.2),
    ],
)
def test_title_score(score, bought, wanted, title_score):
    assert score(nouns=(bought, wanted)).title_score == title_score


@pytest.mark.parametrize(
    ("shared", "total", "same_query", "r_type"),
    [
        (3, 10, False, 1.0),
        (2, 10, False, 0.5),  # exactly 0.2 is not above 0.2
        (2, 10, True, 1.0),
        (1, 10, True, 1.0),  # exactly 0.1 is not below 0.1
        (1, 10, False, 0.5),
        (1, 11, True, 0.1),  # these override the query
        (0, 5, True, 0.0),
    ],
)
def test_type_factor(score, shared, total, same_query, r_type):
    nouns = [str(n) for n in range(shared)], [str(n) for n in range(total)]
    query = "hair brushes" if same_query else "combs"
    assert score(nouns=nouns, query=query, product_category="none").r_type == r_type


@pytest.mark.parametrize(
    ("record", "attribute", "found"),
    [
        ({}, "soft", True),  # an attribute of the product
        ({}, "handle wooden", False),  # words of a bullet point count only as they stand there
        ({}, "wooden handle", True),
        ({}, "bristles wooden", True),  # across bullet points, joined by a space
        ({"name": "BRUSH with COMB"}, "with comb", True),
        ({"full_description": "Has a BRUSH bag"}, "brush bag", True),
        ({}, "Wooden", False),  # the texts are lower-cased, the goal's attribute is not
        ({"small_description": "just ONE text"}, "one text", True),
    ],
)
def test_attributes_in_attributes_title_bullets_and_description(score, record, attribute, found):
    assert score(record, attributes=[attribute]).num_attr_matches == found


def test_attribute_fuzzily_equal(score):
    # token set ratio of "soft" and "sofft": no common word, 2 * 4 / 9 -> 89
    assert score(attributes=["sofft"]).num_attr_matches == 1
    assert score(attributes=["softer"]).num_attr_matches == 0  # 2 * 4 / 10 -> 80


@pytest.mark.parametrize(
    ("bought", "goal_options", "strict", "repaired"),
    [
        ("standard", {"size": "standard"}, 0, 1),  # "tan" is inside: compared with "size standard"
        ("tan", {"color": "tan"}, 1, 1),  # a value that equals a colour is replaced by it
        ("light blue", {"color": "blue"}, 1, 1),
        ("blue", {"color": "light blue"}, 1, 1),  # all words of the bought one are in the pair
        ("navy blue", {"color": "light blue"}, 1, 1),  # both blue
        ("red", {"red": "x"}, 1, 0),  # the name equals a colour
        ("x-large", {"size": "large"}, 0, 1),
        ("large", {"size": "x-large"}, 1, 1),
        ('12" x 18"', {"size": '12" x 18"'}, 1, 1),
        ("café", {"flavor": "café"}, 1, 1),
        ("★", {"style": "★"}, 0, 1),  # nothing is left of it to compare
        ("standard", ["standard"], 1, 1),
        ("tan", ["standard"], 1, 0),  # both are "tan" to the original
        ("120ml", ["120ml"], 1, 1),
        ("steady", ["standard"], 0, 0),
    ],
)
def test_option_matcher(score, bought, goal_options, strict, repaired):
    assert score(options={"g": bought}, goal_options=goal_options).num_option_matches == strict
    assert score(options={"g": bought}, goal_options=goal_options, strict_compat=False).num_option_matches == repaired


def test_option_of_any_group_counts(score):
    parts = score(options={"strap color": "black"}, goal_options={"color": "black", "strap color": "black"})
    assert parts.num_option_matches == 2
    assert (parts.r_option, parts.w_option) == (1.0, 2 / 4)


def test_no_goal_options(score):
    parts = score()
    assert (parts.r_option, parts.w_option) == (None, None)
    assert (parts.w_att, parts.w_price) == (0.5, 0.5)


def test_option_matches_of_single_values():
    assert not option_matches("standard", "size", "standard")
    assert option_matches("standard", "size", "standard", strict_compat=False)
    assert option_matches("tan", None, "standard")


def _ratio_by_definition(left, right):
    """token_set_ratio as the specification words it, without a short cut."""

    def clean(text):
        text = "".join(c for c in text if not "\u0080" <= c <= "\u00ff")
        return "".join(c if re.match(r"\w", c) else " " for c in text).lower().strip()

    def ratio(s, t):
        if s == t:
            return 100
        if not s or not t:
            return 0
        return int(round(100 * difflib.SequenceMatcher(None, s, t).ratio()))

    left, right = clean(left), clean(right)
    if not left or not right:
        return 0
    a, b = set(left.split()), set(right.split())
    i = " ".join(sorted(a & b))
    x = (i + " " + " ".join(sorted(a - b))).strip()
    y = (i + " " + " ".join(sorted(b - a))).strip()
    return max(ratio(i, x), ratio(i, y), ratio(x, y))


def test_token_set_ratio_equals_its_definition():
    rng = random.Random(0)
    words = ["soft", "softer", "anti", "static", "a", "b_c", "café", '12"', "(x)", "BLUE", "blue", "é", "-", "日本"]
    for _ in range(3000):
        left, right = (" ".join(rng.choices(words, k=rng.randrange(5))) for _ in range(2))
        assert token_set_ratio(left, right) == _ratio_by_definition(left, right), (left, right)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("anti static", "static ANTI!", 100),
        ("anti", "anti static", 100),  # one side covered
        ("café", "caf", 100),  # U+0080 to U+00FF are deleted
        ("a-b", "a b", 100),
        ("a_b", "a b", 67),  # underscores stay: a_b against "a b", 2 * 2 / 6
        ("", "x", 0),
        ("é", "é", 0),
        ("!!", "!!", 0),
    ],
)
def test_token_set_ratio_examples(left, right, expected):
    assert token_set_ratio(left, right) == expected
