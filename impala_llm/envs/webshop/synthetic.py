"""A shop of any size made from a seed, in the file formats of the original's data.

The records are read by the same function as the original's files (`records_to_catalogue`), so the rest of the shop
treats both alike. Invariants: the same (num_products, seed) gives the same records on every machine; products that
share a query differ in attributes, options and price, and every attribute that an instruction asks for is the product's
own, so every goal can be met.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.webshop.catalogue import Catalogue, records_to_catalogue
from impala_llm.envs.webshop.shelves import (
    ADJECTIVES,
    ATTRIBUTES,
    BRANDS,
    OPTION_VALUES,
    QUALIFIERS,
    SHELVES,
    TAILS,
    Shelf,
)

Item = dict[str, Any]
Records = tuple[list[Item], dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]], dict[str, list[str]]]

PRODUCTS_PER_QUERY = 8
ATTRIBUTES_PER_SHELF = 10  # of the category's attributes, those that fit the product type
ATTRIBUTES_PER_PRODUCT = 4
_SYLLABLES = [consonant + vowel for consonant in "BCDFGHJKLMNPQRSTVWXZ" for vowel in "AEIOU"]
ASIN_WORDS = tuple(random.Random(0).sample([first + last for first in _SYLLABLES for last in _SYLLABLES], 1000))
"""Words of all asins, in every catalogue: a tokenizer with a token for each word reads an asin as one or two tokens."""

# weights of 0, 1, 2, 3 option groups, and for each number of groups the weights of 2..6 values
GROUP_COUNT_WEIGHTS = (6, 32, 50, 12)
VALUE_COUNT_WEIGHTS = {1: (15, 25, 25, 20, 15), 2: (32, 36, 20, 8, 4), 3: (70, 25, 5, 0, 0)}


def make_records(num_products: int = 1000, seed: int = 0) -> Records:
    """Makes the four records of a shop: (items, attributes, human instructions, nouns of titles).

    items: list of products as in `items_shuffle*.json`. attributes: asin -> attributes, instruction and
    instruction_attributes, as in `items_ins_v2*.json`. human: asin -> instructions, as in `items_human_ins.json`.
    nouns: asin -> lowercased nouns of the title. Raises ValueError for num_products < 1.
    """
    if num_products < 1:
        raise ValueError(f"num_products is {num_products}; a shop needs at least 1 product")
    rng = random.Random(seed)
    drafts = [draft for shelf, fitting, size in _stock(num_products, rng) for draft in _fill(shelf, fitting, size, rng)]
    rng.shuffle(drafts)
    asins = _draw_asins(num_products, rng)

    items, attributes, human, nouns = [], {}, {}, {}
    for asin, draft in zip(asins, drafts, strict=True):
        items.append(draft.item(asin, rng))
        attributes[asin] = {
            "attributes": list(draft.attributes),
            "instruction": f"Find me {', '.join(draft.wanted)} {draft.shelf.query}",
            "instruction_attributes": list(draft.wanted),
        }
        human[asin] = [
            human_instruction(asin, draft.wanted, draft.shelf.query, draft.attributes, draft.options, rng)
            for _ in range(rng.choice((0, 1, 1, 2)))
        ]
        nouns[asin] = [word for word in draft.title.split() if word not in ADJECTIVES]
    return items, attributes, {asin: entries for asin, entries in human.items() if entries}, nouns


def synthetic_catalogue(num_products: int = 1000, seed: int = 0) -> Catalogue:
    """The catalogue of `make_records(num_products, seed)`; the seed also draws its hidden prices and price limits."""
    items, attributes, human, nouns = make_records(num_products, seed)
    return records_to_catalogue(items, attributes, human, nouns, num_products, seed)


def shelf_fields(asin: str, shelf: Shelf, options: Mapping[str, Sequence[str]]) -> Item:
    """Fields of an item record that follow from its asin, its shelf and its options, by group."""
    return {
        "images": [f"https://example.invalid/{asin}.jpg"],
        "category": shelf.category,
        "query": shelf.query,
        "product_category": shelf.product_category,
        "customization_options": {
            group: [{"value": value, "image": None} for value in values] for group, values in options.items()
        },
    }


@dataclass(frozen=True)
class _Draft:
    """A product before it has its asin. `wanted`: the attributes an instruction asks for. `options`: group ->
    values."""

    shelf: Shelf
    brand: str
    title: str
    attributes: tuple[str, ...]
    in_title: tuple[str, ...]
    wanted: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float

    def item(self, asin: str, rng: random.Random) -> Item:
        told = [attribute for attribute in self.attributes if attribute not in self.in_title]
        bullets = [
            f"{_upper_first(attribute)} {self.shelf.query}"
            for attribute in rng.sample(self.attributes, len(self.attributes))
        ]
        return {
            "asin": asin,
            "name": self.title.title(),
            "full_description": f"This {self.shelf.query} by {self.brand.title()} is {' and '.join(told)}.",
            "small_description": bullets,
            "pricing": _price_text(self.price, rng),
            **shelf_fields(asin, self.shelf, self.options),
        }


def _stock(num_products: int, rng: random.Random) -> list[tuple[Shelf, list[str], int]]:
    """(shelf, attributes that fit it, number of products) of each query in the shop.

    A query has about eight products, from five to eleven; only when all qualified queries are in use do they grow.
    """
    # The attributes of a product type do not depend on the seed: shops of other seeds have the same.
    fitting = [random.Random(shelf.query).sample(ATTRIBUTES[shelf.category], ATTRIBUTES_PER_SHELF) for shelf in SHELVES]
    plain = list(zip(SHELVES, fitting, strict=True))
    qualified = [
        (shelf._replace(query=f"{word} {shelf.query}"), attributes)
        for word in QUALIFIERS
        for shelf, attributes in plain
    ]
    num_queries = max(1, min(num_products // PRODUCTS_PER_QUERY, len(plain) + len(qualified)))
    sizes = [num_products // num_queries + (i < num_products % num_queries) for i in range(num_queries)]
    for i in range(0, num_queries - 1, 2):
        moved = rng.randint(0, min(3, sizes[i + 1] - 1))
        sizes[i] += moved
        sizes[i + 1] -= moved
    return [(*entry, size) for entry, size in zip((plain + qualified)[:num_queries], sizes, strict=True)]


def _fill(shelf: Shelf, fitting: list[str], size: int, rng: random.Random) -> list[_Draft]:
    owned = [tuple(rng.sample(fitting, ATTRIBUTES_PER_PRODUCT)) for _ in range(size)]
    shelf_sets = [frozenset(own) for own in owned]
    brands = _cycle_sample(BRANDS, size, rng)
    return [_draft(shelf, brand, own, shelf_sets, rng) for brand, own in zip(brands, owned, strict=True)]


def _draft(
    shelf: Shelf, brand: str, own: tuple[str, ...], shelf_sets: list[frozenset[str]], rng: random.Random
) -> _Draft:
    in_title = own[: rng.choice((1, 2))]
    tail = [rng.choice(TAILS)] if len(in_title) == 1 or rng.random() < 0.3 else []
    return _Draft(
        shelf=shelf,
        brand=brand,
        title=" ".join([brand, *in_title, shelf.query, *tail]),
        attributes=own,
        in_title=in_title,
        wanted=_telling_attributes(own, shelf_sets, rng),
        options=_options(shelf, rng),
        price=round(shelf.price * rng.uniform(0.6, 1.7) * 2) / 2,
    )


def _telling_attributes(own: tuple[str, ...], shelf_sets: list[frozenset[str]], rng: random.Random) -> tuple[str, ...]:
    """One to three of the product's attributes; of a few draws, the one that fewest products of the shelf share."""
    count = rng.choices((1, 2, 3), (10, 65, 25))[0]
    draws = [tuple(rng.sample(own, count)) for _ in range(4)]
    return min(draws, key=lambda draw: sum(other.issuperset(draw) for other in shelf_sets))


def _options(shelf: Shelf, rng: random.Random) -> dict[str, tuple[str, ...]]:
    num_groups = min(rng.choices((0, 1, 2, 3), GROUP_COUNT_WEIGHTS)[0], len(shelf.groups))
    if num_groups == 0:
        return {}
    # By name, as instructions list them: the page then offers the options in the order in which they are asked for.
    groups = sorted(rng.sample(shelf.groups, num_groups))
    weights = VALUE_COUNT_WEIGHTS[num_groups]
    options = {}
    for group in groups:
        count = min(rng.choices((2, 3, 4, 5, 6), weights)[0], len(OPTION_VALUES[group]))
        options[group] = tuple(rng.sample(OPTION_VALUES[group], count))
    return options


def _price_text(price: float, rng: random.Random) -> str:
    if rng.random() < 0.25:
        return f"${price:.2f} - ${round(price * rng.uniform(1.1, 1.6) * 2) / 2:.2f}"
    return f"${price:.2f}"


def human_instruction(
    asin: str,
    wanted: tuple[str, ...],
    query: str,
    own: tuple[str, ...],
    options: dict[str, tuple[str, ...]],
    rng: random.Random,
) -> dict[str, Any]:
    """An instruction as people write them, in the format of `items_human_ins.json`.

    Args:
        asin: of the product.
        wanted: the attributes that it asks for.
        query: the product type, in its words.
        own: all attributes of the product.
        options: group -> values, of which it asks for one each.
        rng: draws them, and the form of the sentence.
    """
    chosen = {group: rng.choice(values) for group, values in options.items()}
    attributes, values = " and ".join(wanted), " and ".join(chosen.values())
    templates = (
        f"i am looking for {attributes} {query}" + (f" in {values}" if values else ""),
        f"i need {query} that is {attributes}" + (f", and i want it in {values}" if values else ""),
        f"please find {query}, it should be {attributes}" + (f", i prefer {values}" if values else ""),
        f"show me {attributes} {query}" + (f" with {values}" if values else "") + " please",
        f"i want to buy {query} which is {attributes}" + (f", {values} would be best" if values else ""),
    )
    return {
        "asin": asin,
        "instruction": rng.choice(templates) + ".",
        "attributes": list(own),
        "options": [f"{group}: {value}" for group, value in chosen.items()],
        "instruction_attributes": list(wanted),
        "instruction_options": list(chosen.values()),
        "assignment_id": "synthetic",
        "worker_id": "synthetic",
    }


def _draw_asins(count: int, rng: random.Random) -> list[str]:
    """`count` different asins of at most 10 characters, in the order drawn: `B0` and one word, or two for more products
    than there are words.

    Few tokens are easy to copy. A small model learned to copy an asin of one token, and never one of three syllables.
    """
    num_words = 1 if count <= len(ASIN_WORDS) else 2
    if num_words == 1:
        return ["B0" + word for word in rng.sample(ASIN_WORDS, count)]
    if count > len(ASIN_WORDS) ** 2 // 2:
        raise ValueError(f"num_products is {count}: there are asins for {len(ASIN_WORDS) ** 2 // 2} products")
    asins: dict[str, None] = {}
    while len(asins) < count:
        asins["B0" + "".join(rng.choices(ASIN_WORDS, k=num_words))] = None
    return list(asins)


def _cycle_sample(values: tuple[str, ...], count: int, rng: random.Random) -> list[str]:
    rounds = -(-count // len(values))
    return [value for _ in range(rounds) for value in rng.sample(values, len(values))][:count]


def _upper_first(text: str) -> str:
    return text[0].upper() + text[1:]
