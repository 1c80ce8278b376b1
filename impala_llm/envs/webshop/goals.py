"""The goals of a catalogue: instructions of products to buy, in the canonical order of the benchmark.

Invariant: the same products, hidden prices and random state give the same goals in the same order, to the character,
as the original benchmark; the order itself depends only on how many goals there are.
"""

import itertools
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from impala_llm.envs.webshop.product import Product

CANONICAL_SEED = 233
NO_PRICE_LIMIT = 1_000_000
_PRICE_STEPS = [10.0 * step for step in range(1, 100)]
_PRICE_CANDIDATES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """Goal of an episode: the product to buy.

    attributes: those that the product must have. goal_options: a dict group -> value for synthetic goals and a list of
    values for human ones. price_upper: dollars, 1,000,000 where the instruction sets no limit. weight: relative
    probability of this goal in a weighted draw.
    """

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: list[str]
    price_upper: float
    goal_options: dict[str, str] | list[str]
    weight: float


def draw_price_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """Draws the price limit of a goal whose target costs `price` dollars: (limit, text to add to the instruction).

    The limit is the larger of two of the next four multiples of ten above the price. Where fewer than two are left
    below 1,000 dollars there is no limit and no text, and nothing is drawn.
    """
    first = bisect_right(_PRICE_STEPS, price)
    candidates = _PRICE_STEPS[first : first + _PRICE_CANDIDATES]
    if len(candidates) < 2:
        return NO_PRICE_LIMIT, ""
    limit = max(rng.sample(candidates, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def synthetic_goals(products: Iterable[Product], prices: Mapping[str, float], rng: random.Random) -> list[Goal]:
    """One goal for every combination of option values of every product with an instruction, in canonical order.

    prices: hidden price of each asin. rng: in the state that drawing the prices left it in.
    """
    drafts = []
    for product in products:
        if product.instruction is None:
            continue
        # The limit is drawn even where an empty option group leaves no combination, as in the original.
        limit, price_text = draw_price_limit(prices[product.asin], rng)
        attributes = list(product.instruction_attributes)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{product.instruction}{' with ' + chosen if chosen else ''}{price_text}"
            drafts.append((product, attributes, text, limit, options))
    counts = Counter(attribute for _, attributes, *_ in drafts for attribute in attributes)
    goals = [
        _goal(product, text, attributes, limit, options, sum(1.0 / counts[a] for a in attributes) / len(attributes))
        for product, attributes, text, limit, options in drafts
    ]
    return _canonical_order(goals)


def human_goals(products: Iterable[Product], prices: Mapping[str, float], rng: random.Random) -> list[Goal]:
    """One goal for every human instruction that names at least one attribute, in canonical order."""
    goals = []
    for product in products:
        for human in product.human_instructions:
            if not human.attributes:
                continue
            limit, price_text = draw_price_limit(prices[product.asin], rng)
            text = human.instruction.strip(".") + price_text
            goals.append(_goal(product, text, human.attributes, limit, human.options, 1))
    return _canonical_order(goals)


def draw_goal(goals: Sequence[Goal], rng: random.Random) -> int:
    """Draws the position of a goal with probability proportional to its weight."""
    cumulative = list(itertools.accumulate(goal.weight for goal in goals))
    return min(bisect_right(cumulative, rng.uniform(0.0, cumulative[-1])), len(goals) - 1)


def _goal(
    product: Product,
    text: str,
    attributes: list[str],
    limit: float,
    options: dict[str, str] | list[str],
    weight: float,
) -> Goal:
    return Goal(
        asin=product.asin,
        category=product.category,
        query=product.query,
        name=product.title,
        product_category=product.product_category,
        instruction_text=text,
        attributes=attributes,
        price_upper=limit,
        goal_options=options,
        weight=weight,
    )


def _canonical_order(goals: list[Goal]) -> list[Goal]:
    random.Random(CANONICAL_SEED).shuffle(goals)
    return goals
