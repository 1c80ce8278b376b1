"""The synthetic shop: its records, that its goals can be met, and that titles, options and attributes must be
read."""

import math
import re
from collections import Counter, defaultdict

import pytest

from impala_llm.envs.webshop.reward import score_purchase
from impala_llm.envs.webshop.shelves import ATTRIBUTES, OPTION_VALUES, SHELVES
from impala_llm.envs.webshop.synthetic import ASIN_WORDS, make_records


def test_same_seed_same_records_other_seed_other_products():
    assert make_records(60, seed=3) == make_records(60, seed=3)
    ours, theirs = make_records(200, seed=3)[0], make_records(200, seed=4)[0]
    assert not {item["asin"] + item["name"] for item in ours} & {item["asin"] + item["name"] for item in theirs}
    assert {item["query"] for item in ours} == {item["query"] for item in theirs}


@pytest.mark.parametrize("num_products", [1, 2, 7, 8, 100, 3000])
def test_any_size(num_products):
    items, attributes, human, nouns = make_records(num_products, seed=1)
    asins = [item["asin"] for item in items]
    assert len(set(asins)) == len(asins) == num_products
    assert set(attributes) == set(nouns) == set(asins) >= set(human)


def test_no_products_are_refused():
    with pytest.raises(ValueError, match="num_products is 0"):
        make_records(0)


def test_records_have_the_keys_of_the_original_files():
    items, attributes, human, nouns = make_records(100)
    for item in items:
        assert {
            "asin",
            "name",
            "full_description",
            "small_description",
            "pricing",
            "images",
            "category",
            "query",
            "product_category",
            "customization_options",
        } <= set(item)
        assert item["category"] in {"beauty", "electronics", "fashion", "garden", "grocery"}
        assert len(item["product_category"].split(" › ")) == 3
        assert re.fullmatch(r"\$\d+\.\d\d( - \$\d+\.\d\d)?", item["pricing"])
    for asin, entry in attributes.items():
        assert set(entry["instruction_attributes"]) <= set(entry["attributes"])
        assert set(nouns[asin]) <= set(next(item for item in items if item["asin"] == asin)["name"].lower().split())
    for entries in human.values():
        for entry in entries:
            assert {"instruction", "instruction_attributes", "instruction_options", "options", "asin"} <= set(entry)
            assert all(value in entry["instruction"] for value in entry["instruction_options"])


def test_asins_are_words_of_at_most_ten_characters():
    for num_products, num_words in ((1000, 1), (2000, 2)):
        asins = [item["asin"] for item in make_records(num_products)[0]]
        assert len(set(asins)) == num_products and max(map(len, asins)) <= 10
        for asin in asins:
            words = [asin[start : start + 4] for start in range(2, len(asin), 4)]
            assert asin.startswith("B0") and len(words) == num_words and set(words) <= set(ASIN_WORDS)


def test_a_thousand_products_fill_all_shelves(catalogue):
    queries = Counter(product.query for product in catalogue.products)
    assert len(queries) == len(SHELVES) >= 60
    assert min(queries.values()) >= 5 and max(queries.values()) <= 12
    assert {product.category for product in catalogue.products} == set(ATTRIBUTES)
    assert 6000 <= len(catalogue.goals("synthetic")) <= 8000
    assert len(catalogue.goals("human")) >= 500
    words = [len(product.title.split()) for product in catalogue.products]
    assert min(words) >= 6 and sum(words) / len(words) <= 8 and max(words) <= 10


def test_option_groups_have_two_to_six_values(catalogue):
    groups = Counter(len(product.options) for product in catalogue.products)
    assert set(groups) == {0, 1, 2, 3}
    for product in catalogue.products:
        for values in product.options.values():
            assert 2 <= len(values) <= 6 and len(set(values)) == len(values)
        values = [value for group in product.options.values() for value in group]
        assert len(set(values)) == len(values), f"{product.asin}: a value stands in two groups"


def test_every_goal_can_be_met_and_only_by_its_own_options(catalogue):
    for goal in catalogue.goals("synthetic")[::17]:
        product, nouns = catalogue[goal.asin], catalogue.nouns(goal.asin)
        price = catalogue.prices[goal.asin]
        met = score_purchase(product, goal, goal.goal_options, price, nouns, nouns)
        assert met.reward == 1.0, goal.instruction_text
        for group, wanted in goal.goal_options.items():
            for value in product.options[group]:
                options = {**goal.goal_options, group: value}
                reward = score_purchase(product, goal, options, price, nouns, nouns).reward
                assert (reward == 1.0) == (value == wanted), (goal.instruction_text, options)


@pytest.mark.parametrize("group", sorted(OPTION_VALUES))
def test_no_option_value_passes_for_another_of_its_group(group, catalogue):
    goal = catalogue.goals("synthetic")[0]
    product, nouns = catalogue[goal.asin], catalogue.nouns(goal.asin)
    for wanted in OPTION_VALUES[group]:
        asked = {
            "asin": goal.asin,
            "category": goal.category,
            "query": goal.query,
            "name": goal.name,
            "product_category": goal.product_category,
            "instruction_text": "",
            "attributes": goal.attributes,
            "price_upper": goal.price_upper,
            "goal_options": {group: wanted},
            "weight": 1,
        }
        for value in OPTION_VALUES[group]:
            parts = score_purchase(product, asked, {group: value}, 1.0, nouns, nouns)
            assert (parts.reward == 1.0) == (value == wanted), (wanted, value)


def test_prices_are_single_and_ranges(catalogue):
    assert Counter(len(product.price_range) for product in catalogue.products).keys() == {1, 2}
    assert all(low < high for low, high in (p.price_range for p in catalogue.products if len(p.price_range) == 2))
    assert all(0 < price < 1000 for price in catalogue.prices.values())


def test_the_target_is_found_by_its_attributes_and_not_by_its_noun_alone(catalogue):
    goals = catalogue.goals("synthetic")[::13]
    by_noun = by_attributes = 0
    for goal in goals:
        by_noun += goal.asin in catalogue.search(goal.query)[:5]
        by_attributes += goal.asin in catalogue.search(f"{' '.join(goal.attributes)} {goal.query}")[:5]
    assert by_attributes / len(goals) >= 0.95
    assert by_noun / len(goals) <= 0.75


def test_attributes_are_partly_in_titles_and_partly_elsewhere(catalogue):
    told = Counter()
    for product in catalogue.products:
        for attribute in product.attributes:
            told[attribute in product.title.lower()] += 1
            assert any(attribute in bullet.lower() for bullet in product.bullets)
    assert min(told.values()) / sum(told.values()) >= 0.25


def test_products_of_a_query_differ(catalogue):
    shelves = defaultdict(list)
    for product in catalogue.products:
        shelves[product.query].append(product)
    for products in shelves.values():
        looks = {(p.title, p.attributes, p.price_tag, tuple(p.options.items())) for p in products}
        assert len(looks) == len(products)


def test_goal_count_is_the_product_of_the_options(catalogue):
    expected = sum(math.prod(len(values) for values in product.options.values()) for product in catalogue.products)
    assert len(catalogue.goals("synthetic")) == expected
