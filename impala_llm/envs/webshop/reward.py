"""The score of a purchase, with all of its parts, as the original benchmark computes it.

reward = r_type * (attributes matched + options matched + price kept) / (attributes + options + 1)

Invariant: with strict_compat the reward equals the original's to the last bit, its quirks too; without it only the
option matcher differs, so that buying exactly the options of a goal always counts.
"""

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.webshop.goals import Goal
from impala_llm.envs.webshop.product import Product

_MATCH = 85
_CACHED_PAIRS = 1 << 17
_COLOUR_NAMES = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green "
    "grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot "
    "midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple "
    "rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan "
    "taupe teal tiger turquoise violet walnut wheat white wine yellow"
)
_COLOURS = _COLOUR_NAMES.split()
_LATIN_1 = re.compile("[\u0080-\u00ff]")
_NOT_WORD = re.compile(r"\W")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Every part of the reward of one purchase.

    reward: the score, 0 to 1. num_attr_matches, num_option_matches: counts. r_type: factor for the kind of product.
    r_att, r_option: shares matched; r_option is None for a goal without options. r_price: whether the price is within
    the limit. w_att, w_option, w_price: weights of the three in the sum. title_score: share of the goal title's nouns
    in the bought product's title.
    """

    reward: float
    num_attr_matches: int
    num_option_matches: int
    r_type: float
    r_att: float
    w_att: float
    query_match: bool
    category_match: bool
    title_score: float
    r_option: float | None
    w_option: float | None
    r_price: bool
    w_price: float
    purchased_nouns: list[str]
    goal_nouns: list[str]


def score_purchase(
    product: Product,
    goal: Goal | Mapping[str, Any],
    options: Mapping[str, str],
    price: float,
    purchased_nouns: Sequence[str],
    goal_nouns: Sequence[str],
    strict_compat: bool = True,
) -> RewardParts:
    """Scores buying `product` with the chosen `options` (group -> value) at `price` dollars for `goal`.

    goal: a `Goal`, or a mapping with its field names as keys. purchased_nouns, goal_nouns: lower-case nouns of the
    two titles, repeated ones too. strict_compat: False repairs the option matcher.

    Raises:
        ValueError: the goal has no attributes; the share of matched ones is undefined then.
    """
    wanted = goal if isinstance(goal, Goal) else _goal_of(goal)
    if not wanted.attributes:
        raise ValueError(f"goal for asin {wanted.asin!r}: 'attributes' is empty; a goal needs at least one")
    query_match = product.query == wanted.query
    category_match = len(_categories(product.product_category) & _categories(wanted.product_category)) >= 2
    title_score = len({*purchased_nouns} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else 0.2
    r_type = _type_factor(query_match or category_match, title_score)

    num_attributes, num_options = len(wanted.attributes), len(wanted.goal_options)
    num_attr_matches = _count_attributes(product, wanted.attributes)
    count_options = _count_options if strict_compat else _count_options_repaired
    num_option_matches = count_options(list(options.values()), wanted.goal_options)
    r_price = price <= wanted.price_upper
    denominator = num_attributes + num_options + 1
    return RewardParts(
        reward=(num_attr_matches + num_option_matches + r_price) / denominator * r_type,
        num_attr_matches=num_attr_matches,
        num_option_matches=num_option_matches,
        r_type=r_type,
        r_att=num_attr_matches / num_attributes,
        w_att=num_attributes / denominator,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        r_option=num_option_matches / num_options if num_options else None,
        w_option=num_options / denominator if num_options else None,
        r_price=r_price,
        w_price=1 / denominator,
        purchased_nouns=list(purchased_nouns),
        goal_nouns=list(goal_nouns),
    )


@functools.lru_cache(_CACHED_PAIRS)
def token_set_ratio(left: str, right: str) -> int:
    """Similarity of the word sets of two texts, 0 to 100; `token_set_ratio` of thefuzz 0.19 on its difflib back end.

    Later versions, and the C extension, use another ratio.
    """
    left_words, right_words = _words(left), _words(right)
    if not left_words or not right_words:
        return 0
    common = left_words & right_words
    if common and common in (left_words, right_words):
        return 100
    both = " ".join(sorted(common))
    first = f"{both} {' '.join(sorted(left_words - right_words))}".strip()
    second = f"{both} {' '.join(sorted(right_words - left_words))}".strip()
    best = 0
    for pair in ((both, first), (both, second), (first, second)):
        shorter, longer = sorted(map(len, pair))
        # The matcher is slow, and cannot match more than all of the shorter text.
        if shorter and round(100 * (2.0 * shorter / (shorter + longer))) > best:
            best = max(best, _ratio(*pair))
    return best


def option_matches(bought: str, name: str | None, value: str, strict_compat: bool = True) -> bool:
    """Whether a bought option value counts for the goal option `value` of group `name` (None: a goal without names)."""
    wanted: dict[str, str] | list[str] = [value] if name is None else {name: value}
    return (_count_options if strict_compat else _count_options_repaired)([bought], wanted) == 1


def _goal_of(keys: Mapping[str, Any]) -> Goal:
    return Goal(
        asin=keys.get("asin", ""),
        category=keys.get("category", ""),
        query=keys["query"],
        name=keys["name"],
        product_category=keys["product_category"],
        instruction_text=keys.get("instruction_text", ""),
        attributes=keys["attributes"],
        price_upper=keys["price_upper"],
        goal_options=keys["goal_options"],
        weight=keys.get("weight", 1),
    )


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _type_factor(match: bool, title_score: float) -> float:
    # The last two rules hold even where the query is the same.
    if title_score == 0.0:
        return 0.0
    if title_score < 0.1:
        return 0.1
    return 1.0 if match or title_score > 0.2 else 0.5


def _count_attributes(product: Product, attributes: Sequence[str]) -> int:
    texts = product.title.lower(), " ".join(product.bullets).lower(), product.description.lower()

    def found(attribute: str) -> bool:
        return any(attribute in text for text in texts) or any(
            token_set_ratio(own, attribute) > _MATCH for own in product.attributes
        )

    return sum(map(found, attributes))


def _count_options(bought: Sequence[str], wanted: Mapping[str, str] | Sequence[str]) -> int:
    if isinstance(wanted, Mapping):
        targets = [_colour_equal(pair) for pair in wanted.items()]
    else:
        targets = [_colour_inside(value) for value in wanted]
    values = [_colour_inside(value) for value in bought]
    return _count_matches(values, targets, lambda value, target: token_set_ratio(value, target) > _MATCH)


def _count_options_repaired(bought: Sequence[str], wanted: Mapping[str, str] | Sequence[str]) -> int:
    def alike(value: str, target: str) -> bool:
        return (
            value == target
            or token_set_ratio(value, target) > _MATCH
            or token_set_ratio(_colour_word(value), _colour_word(target)) > _MATCH
        )

    return _count_matches(bought, list(wanted.values() if isinstance(wanted, Mapping) else wanted), alike)


def _count_matches(values: Sequence[str], targets: Sequence[str], alike: Callable[[str, str], bool]) -> int:
    return sum(any(alike(value, target) for value in values) for target in targets)


@functools.lru_cache(_CACHED_PAIRS)
def _colour_equal(pair: tuple[str, str]) -> str:
    """Value that the original compares with where a goal option has a name: (name, value) as it is.

    A colour of the list replaces it only if it equals the name or the value; otherwise it is compared as Python prints
    it, name included.
    """
    return next((colour for colour in _COLOURS if colour in pair), str(pair))


@functools.lru_cache(_CACHED_PAIRS)
def _colour_inside(text: str) -> str:
    """The first colour of the list that occurs anywhere in a text ("tan" in "standard"), or the text."""
    return next((colour for colour in _COLOURS if colour in text), text)


@functools.lru_cache(_CACHED_PAIRS)
def _colour_word(text: str) -> str:
    """The first colour of the list that is a whole word of a text, or the text."""
    words = _NOT_WORD.sub(" ", text).split()
    return next((colour for colour in _COLOURS if colour in words), text)


@functools.lru_cache(_CACHED_PAIRS)
def _words(text: str) -> frozenset[str]:
    return frozenset(_NOT_WORD.sub(" ", _LATIN_1.sub("", text)).lower().split())


def _ratio(left: str, right: str) -> int:
    return 100 if left == right else round(100 * difflib.SequenceMatcher(None, left, right).ratio())
