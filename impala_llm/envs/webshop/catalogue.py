"""The catalogue: products, hidden prices, goals, nouns and search index, which all episodes of a process share.

Invariant: a catalogue never changes after it was made, and the same records and seed make the same catalogue.
"""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal

from impala_llm.envs.webshop.goals import Goal, human_goals, synthetic_goals
from impala_llm.envs.webshop.json_stream import list_items, object_entries
from impala_llm.envs.webshop.nouns import CachedNouns, NounFunction, installed_nouns
from impala_llm.envs.webshop.pages import Pages
from impala_llm.envs.webshop.product import (
    MAX_ASIN_LENGTH,
    CatalogueError,
    Product,
    Record,
    parse_human_instructions,
    parse_product,
)
from impala_llm.envs.webshop.search import MAX_HITS, SearchIndex

__all__ = ["Catalogue", "CatalogueError", "Goal", "Product", "Sources", "load_catalogue", "records_to_catalogue"]

GoalSet = Literal["synthetic", "human"]


@dataclass(frozen=True)
class Sources:
    """Names of the four inputs of a catalogue in errors: the paths of files, or these words for lists in memory."""

    items: str = "items"
    attributes: str = "attributes"
    human: str = "human instructions"
    nouns: str = "nouns"


IN_MEMORY = Sources()


class Catalogue:
    """Products by asin, with everything about them that all episodes share.

    products: in the order of the item file. prices: the hidden price of each asin in dollars, which the reward
    compares with the goal's limit. split_by_product: whether training, validation and test share no product, see
    `splits.py`. noun_source: where the nouns of titles come from ("file", "spacy:<model>" or
    "heuristic").
    """

    def __init__(
        self,
        products: Iterable[Product],
        nouns: NounFunction,
        seed: int,
        has_human: bool,
        split_by_product: bool = False,
    ) -> None:
        self.products = tuple(products)
        self._by_asin = {product.asin: product for product in self.products}
        self._has_human = has_human
        self.split_by_product = split_by_product
        self._nouns = nouns
        self.noun_source = nouns.name
        rng = random.Random(seed)
        self.prices = {product.asin: _draw_price(product, rng) for product in self.products}
        self._state_after_prices = rng.getstate()
        self._index = SearchIndex((product.search_text for product in self.products), list(self._by_asin))
        self._goals: dict[str, list[Goal]] = {}
        self.pages = functools.cache(Pages)

    def __getitem__(self, asin: str) -> Product:
        return self._by_asin[asin]

    def __contains__(self, asin: object) -> bool:
        return asin in self._by_asin

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_asin)

    def __len__(self) -> int:
        return len(self.products)

    def search(self, query: str, k: int = MAX_HITS) -> list[str]:
        """The asins of the best `k` products for the words of `query`, best first."""
        return self._index.search(query, k)

    def goals(self, goal_set: GoalSet) -> list[Goal]:
        """All goals of one set in the canonical order, made once; do not change the list.

        Each set is made as if it were the only one made after the prices, so asking for both changes neither.

        Raises:
            ValueError: an unknown set, or "human" where no human instructions were given.
        """
        if goal_set not in self._goals:
            if goal_set not in ("synthetic", "human"):
                raise ValueError(f"goal_set is {goal_set!r}; use 'synthetic' or 'human'")
            if goal_set == "human" and not self._has_human:
                raise ValueError("goal_set is 'human', but the catalogue has no human instructions; give human=")
            rng = random.Random()
            rng.setstate(self._state_after_prices)
            make = synthetic_goals if goal_set == "synthetic" else human_goals
            self._goals[goal_set] = make(self.products, self.prices, rng)
        return self._goals[goal_set]

    def nouns(self, asin: str) -> list[str]:
        """The lower-case nouns of a product's title, in order, repeated ones too."""
        return self._nouns(asin, self._by_asin[asin].title)


def records_to_catalogue(
    items: Iterable[object],
    attributes: Mapping[str, object],
    human: Mapping[str, object] | None = None,
    nouns: Mapping[str, object] | None = None,
    num_products: int | None = None,
    seed: int = 0,
    sources: Sources = IN_MEMORY,
    split_by_product: bool = False,
) -> Catalogue:
    """Makes a catalogue of records in the file formats of the original.

    items: product records. attributes: asin -> {attributes, instruction?, instruction_attributes?}. human: asin ->
    list of instructions. nouns: asin -> nouns of its title. num_products: read only so many records, counted before
    duplicates are dropped. seed: of the hidden prices and of the price limits of goals. sources: names for error
    messages. split_by_product: as in `Catalogue`.

    Raises:
        CatalogueError: a record that cannot be used; names the source, the record and what is wrong with it.
        ValueError: num_products below 1.
    """
    if num_products is not None and num_products < 1:
        raise ValueError(f"num_products is {num_products}; use at least 1, or None for all")
    shared: dict[object, object] = {}
    products: dict[str, Product] = {}
    for position, item in enumerate(itertools.islice(items, num_products)):
        record = Record(item, sources.items, f"record {position}")
        asin = record.text("asin")
        if asin == "nan" or len(asin) > MAX_ASIN_LENGTH or asin in products:
            continue
        record = Record(item, sources.items, f"record {position} (asin {asin!r})")
        entry = Record(attributes[asin], sources.attributes, f"asin {asin!r}") if asin in attributes else None
        instructions = parse_human_instructions(human[asin], sources.human, asin) if human and asin in human else ()
        products[asin] = parse_product(record, entry, instructions, shared)
    if not products:
        raise CatalogueError(f"{sources.items}: there is no usable product in it")
    noun_function = installed_nouns() if nouns is None else CachedNouns.of_products(nouns, products, sources.nouns)
    return Catalogue(products.values(), noun_function, seed, human is not None, split_by_product)


def load_catalogue(
    items: str | PathLike[str],
    attributes: str | PathLike[str],
    human: str | PathLike[str] | None = None,
    nouns: str | PathLike[str] | None = None,
    num_products: int | None = None,
    seed: int = 0,
) -> Catalogue:
    """Loads a catalogue from the original's files.

    items: `items_shuffle*.json`. attributes: `items_ins_v2*.json`. human: `items_human_ins.json`. nouns: a JSON object,
    asin -> list of nouns of the title. The rest as in `records_to_catalogue`.

    Raises:
        CatalogueError: a corrupt or truncated file; names the file, the record and what is wrong.
        OSError: a file that cannot be read.
    """
    sources = Sources(
        items=fspath(items),
        attributes=fspath(attributes),
        human=IN_MEMORY.human if human is None else fspath(human),
        nouns=IN_MEMORY.nouns if nouns is None else fspath(nouns),
    )
    return records_to_catalogue(
        list_items(sources.items),
        dict(object_entries(sources.attributes)),
        None if human is None else dict(object_entries(sources.human)),
        None if nouns is None else dict(object_entries(sources.nouns)),
        num_products,
        seed,
        sources,
    )


def _draw_price(product: Product, rng: random.Random) -> float:
    low, *high = product.price_range
    return rng.uniform(low, high[0]) if high else low
