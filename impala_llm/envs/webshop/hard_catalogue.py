"""A synthetic shop in which the right product can only be found by reading, made from a seed.

A product type has about a dozen products with alike titles. A few of them are cheap, and each of these has attributes
and option values of its own; the others are too dear for an instruction with a low price limit, and have nearly all
attributes and options. Attributes stand on the features page alone, where the search does not look, and some
instructions name the product type in words that no product has. So the first hit is seldom right, the price limit rules
most hits out, and what is left has to be opened and read.

Invariants: the same (num_products, seed) gives the same records on every machine; no asin is in two catalogues of one
size; every goal can be met, and by no other product of its type.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.webshop.catalogue import Catalogue, records_to_catalogue
from impala_llm.envs.webshop.shelves import (
    ADJECTIVES,
    ATTRIBUTES,
    BRANDS,
    OPTION_VALUES,
    SHELVES,
    SYNONYMS,
    TAILS,
    Shelf,
)
from impala_llm.envs.webshop.synthetic import Item, Records, human_instruction, shelf_fields

PRODUCTS_PER_TYPE = 10
MAX_PRODUCTS = PRODUCTS_PER_TYPE * len(SHELVES)
CHEAP_SHARE = 1 / 2
ATTRIBUTES_WANTED = 4
MOST_SHARED = 1
"""Wanted attributes that two cheap products of a type may share."""
DEAR_ATTRIBUTES = 12
CHEAP_OFFER, DEAR_OFFER = 0.87, 0.4
"""Share of the values of an option group that a product has."""
SYNONYM_EVERY = 14
"""One in so many instructions names the product type in other words than the products do."""
PRICE_GAP = 45
"""Dollars between cheap and dear products: a price limit is at most 40 dollars above the price of its product."""

NAMING = ("A {}.", "You will love this {}.", "The {} that people ask for.")
CHEAP_NAMINGS, DEAR_NAMINGS = (0, 1, 2), (2, 3)
"""Number of times that a description may name the product type. Dear products are praised more, and so mostly found
first."""
CLOSING = ("Comes in a plain box.", "Sent within a day.", "Made with care, and sent to you in a box within two days.")

_SYLLABLES = [consonant + vowel for consonant in "BCDFGHJKLMNPQRSTVWXZ" for vowel in "AEIOU"]
_NUM_ASINS = len(_SYLLABLES) ** 4
_ASIN_STEP = 61_803_399  # has no divisor in common with their number, so that multiples of it are all different


def check_limits(num_products: int, seed: int, seed_key: str = "env.webshop.catalogue_seed") -> None:
    """Raises ValueError where there is no hard catalogue of this size and seed, which the setting `seed_key` has."""
    if not 1 <= num_products <= MAX_PRODUCTS:
        raise ValueError(
            f"env.webshop.num_products={num_products}: set 1 to {MAX_PRODUCTS}, a hard catalogue has no more"
        )
    if seed >= (seeds := _NUM_ASINS // num_products):
        raise ValueError(
            f"{seed_key}={seed}: set one below {seeds}, up to which hard catalogues of {num_products} products "
            "have asins of their own"
        )


def make_hard_records(num_products: int = 1000, seed: int = 0) -> Records:
    """Makes the four records of a shop; see `synthetic.make_records`.

    Raises:
        ValueError: num_products is not in 1..MAX_PRODUCTS, or the seed is so high that asins would come twice.
    """
    check_limits(num_products, seed)
    rng = random.Random(seed)
    num_types = max(1, num_products // PRODUCTS_PER_TYPE)
    shelves = rng.sample(SHELVES, num_types)
    sizes = [num_products // num_types + (i < num_products % num_types) for i in range(num_types)]
    # Shares that are dealt out in turn, not drawn, keep catalogues of different seeds equally hard.
    synonyms = (number % SYNONYM_EVERY == 0 for number in itertools.count())
    drafts = [
        draft
        for number, (shelf, size) in enumerate(zip(shelves, sizes, strict=True))
        for draft in _fill(shelf, size, rng, synonyms, 2 if number % 3 == 0 else 1)
    ]
    rng.shuffle(drafts)

    items, human, nouns = [], {}, {}
    attributes = {}
    for position, draft in enumerate(drafts):
        asin = _asin(seed * num_products + position)
        items.append(draft.item(asin))
        entry: dict[str, Any] = {"attributes": list(draft.attributes)}
        attributes[asin] = entry
        if draft.wanted:
            entry |= {
                "instruction": f"Find me {', '.join(draft.wanted)} {draft.wanted_as}",
                "instruction_attributes": list(draft.wanted),
            }
            human[asin] = [human_instruction(asin, draft.wanted, draft.wanted_as, draft.attributes, draft.options, rng)]
        nouns[asin] = [word for word in draft.title.split() if word not in ADJECTIVES]
    return items, attributes, human, nouns


def hard_catalogue(num_products: int = 1000, seed: int = 0) -> Catalogue:
    """The catalogue of `make_hard_records(num_products, seed)`, whose goals are split by product; the seed also draws
    its price limits.
    """
    items, attributes, human, nouns = make_hard_records(num_products, seed)
    return records_to_catalogue(items, attributes, human, nouns, seed=seed, split_by_product=True)


@dataclass(frozen=True)
class _Draft:
    """A product before it has its asin.

    wanted: the attributes that its instruction asks for; () where it has no instruction. wanted_as: the product type
    there.
    """

    shelf: Shelf
    brand: str
    title: str
    description: str
    attributes: tuple[str, ...]
    wanted: tuple[str, ...]
    wanted_as: str
    options: dict[str, tuple[str, ...]]
    price: int

    def item(self, asin: str) -> Item:
        # The first feature is searched with the title, the others are not.
        features = [f"By {self.brand.title()}", *(attribute.capitalize() for attribute in self.attributes)]
        return {
            "asin": asin,
            "name": self.title.title(),
            "full_description": self.description,
            "small_description": features,
            "pricing": f"${self.price:.2f}",
            **shelf_fields(asin, self.shelf, self.options),
        }


def _fill(shelf: Shelf, size: int, rng: random.Random, synonyms: Iterator[bool], num_groups: int) -> list[_Draft]:
    """The products of one type, the cheap ones first."""
    num_cheap = max(1, round(size * CHEAP_SHARE))
    brands = rng.sample(BRANDS, len(BRANDS))
    pool = ATTRIBUTES[shelf.category]
    cheap_attributes = _different_sets(pool, num_cheap, rng)
    values = _option_values(shelf, num_groups, rng)
    # All cheap prices lie within one ten, so that the price limit says nothing about which of them is wanted.
    lowest = 10 * max(2, round(shelf.price * rng.uniform(0.7, 1.3) / 10))
    drafts = []
    for number in range(size):
        cheap = number < num_cheap
        attributes = cheap_attributes[number] if cheap else tuple(rng.sample(pool, DEAR_ATTRIBUTES))
        offer = CHEAP_OFFER if cheap else DEAR_OFFER
        title = (brands[number % len(brands)], shelf.query, *([rng.choice(TAILS)] if rng.random() < 0.5 else []))
        drafts.append(
            _Draft(
                shelf=shelf,
                brand=title[0],
                title=" ".join(title),
                description=_description(shelf, cheap, rng),
                attributes=attributes,
                wanted=tuple(rng.sample(attributes, len(attributes))) if cheap else (),
                wanted_as=SYNONYMS[shelf.query] if cheap and next(synonyms) else shelf.query,
                options={group: _some(of_group, offer, rng) for group, of_group in values.items()},
                price=lowest + rng.randint(0, 9) + (0 if cheap else 10 + PRICE_GAP + rng.randint(0, 30)),
            )
        )
    return drafts


def _different_sets(pool: tuple[str, ...], count: int, rng: random.Random) -> list[tuple[str, ...]]:
    """Sets of attributes of which no two share more than `MOST_SHARED`."""
    sets: list[tuple[str, ...]] = []
    while len(sets) < count:
        drawn = tuple(rng.sample(pool, ATTRIBUTES_WANTED))
        if all(len({*drawn} & {*other}) <= MOST_SHARED for other in sets):
            sets.append(drawn)
    return sets


def _option_values(shelf: Shelf, num_groups: int, rng: random.Random) -> dict[str, tuple[str, ...]]:
    """Option groups of a product type, with all values that its products have; by name, as instructions list them."""
    groups = sorted(rng.sample(shelf.groups, min(num_groups, len(shelf.groups))))
    size = 6 if len(groups) == 1 else 3
    return {group: tuple(rng.sample(OPTION_VALUES[group], min(size, len(OPTION_VALUES[group])))) for group in groups}


def _some(values: tuple[str, ...], share: float, rng: random.Random) -> tuple[str, ...]:
    """A share of the values, at least one of them."""
    exact = share * len(values)
    count = int(exact) + (rng.random() < exact - int(exact))
    return tuple(rng.sample(values, max(1, count)))


def _description(shelf: Shelf, cheap: bool, rng: random.Random) -> str:
    """A text that names the product type: of how often, and of its length, depends the rank of a hit."""
    count = rng.choice(CHEAP_NAMINGS if cheap else DEAR_NAMINGS)
    return " ".join([*(text.format(shelf.query) for text in rng.sample(NAMING, count)), rng.choice(CLOSING)])


def _asin(number: int) -> str:
    """The asin of a number below `_NUM_ASINS`: B0 and four syllables, others for each number."""
    mixed = number * _ASIN_STEP % _NUM_ASINS
    syllables = []
    for _ in range(4):
        mixed, digit = divmod(mixed, len(_SYLLABLES))
        syllables.append(_SYLLABLES[digit])
    return "B0" + "".join(syllables)
