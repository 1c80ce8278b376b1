"""Splits of the goals into training, validation and test, and the goals that can be reached at all.

Invariant: splits are the same for everybody and share no goal, so no test goal is trained on. Those of the original are
ranges of positions in the canonical order, in which one product has goals in several splits; where a catalogue says
so, splits share no product.
"""

import random
from collections.abc import Sequence

from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.webshop.catalogue import Catalogue
from impala_llm.envs.webshop.goals import CANONICAL_SEED, Goal
from impala_llm.envs.webshop.options import NEVER_OPTIONS, choose_repaired, choose_strict, option_groups
from impala_llm.envs.webshop.product import Product
from impala_llm.envs.webshop.reward import option_matches, score_purchase

_TEST_END, _VALIDATION_END = 500, 1500
_SMALL = 3000
_PRODUCT_DEAL: tuple[Split, ...] = (
    "test", "train", "test", "train", "validation", "test", "train", "test", "train", "train"
)  # fmt: skip


def split_goals(num_goals: int, split: Split) -> range:
    """Positions of a split among `num_goals` goals in the canonical order.

    test 0-499, validation 500-1499, train from 1500. Below 3,000 goals the same shares as with 3,000: the first
    sixth, the next third, and the second half.

    Raises:
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; use one of {', '.join(SPLITS)}")
    scale = min(num_goals, _SMALL)
    test_end, validation_end = scale * _TEST_END // _SMALL, scale * _VALIDATION_END // _SMALL
    bounds = {"test": (0, test_end), "validation": (test_end, validation_end), "train": (validation_end, num_goals)}
    return range(*bounds[split])


def split_goals_by_product(goals: Sequence[Goal], split: Split) -> list[int]:
    """Positions of a split in the canonical order, where splits share no product.

    Of each kind of product, four tenths are dealt to the test, one to validation and five to training.
    """
    positions: dict[str, list[int]] = {}
    for position, goal in enumerate(goals):
        positions.setdefault(goal.asin, []).append(position)
    asins = sorted(positions)
    random.Random(CANONICAL_SEED).shuffle(asins)
    asins.sort(key=lambda asin: goals[positions[asin][0]].query)  # of each kind some in every split
    return sorted(
        p
        for number, asin in enumerate(asins)
        if _PRODUCT_DEAL[number % len(_PRODUCT_DEAL)] == split
        for p in positions[asin]
    )


def solvable_goals(catalogue: Catalogue, goals: Sequence[Goal], strict_compat: bool = True) -> list[int]:
    """Positions of the goals that reach 1.0 by buying the target with exactly the goal's options, as the page offers
    them.

    Without `strict_compat` all synthetic goals are there but for rare ones, say with an option named "buy now". A
    human goal may want an option that no page offers.
    """
    return [position for position, goal in enumerate(goals) if _solvable(catalogue, goal, strict_compat)]


def _solvable(catalogue: Catalogue, goal: Goal, strict_compat: bool) -> bool:
    product = catalogue[goal.asin]
    nouns = catalogue.nouns(goal.asin)
    options = _options_after_clicks(product, goal, strict_compat)
    parts = score_purchase(product, goal, options, catalogue.prices[goal.asin], nouns, nouns, strict_compat)
    return parts.reward == 1.0


def _options_after_clicks(product: Product, goal: Goal, strict_compat: bool) -> dict[str, str]:
    groups = option_groups(product)
    offered = [value for value in groups if value and value not in NEVER_OPTIONS]
    choose = choose_strict if strict_compat else choose_repaired
    wanted = goal.goal_options
    pairs = list(wanted.items()) if isinstance(wanted, dict) else [(None, value) for value in wanted]
    options: dict[str, str] = {}
    for name, value in pairs:
        if value not in offered:
            alike = (other for other in offered if option_matches(other, name, value, strict_compat))
            value = next(alike, "")
        if value in offered:
            choose(groups, options, value)
    return options
