"""Effect of a click on an option value on the options chosen so far.

A page shows option values without saying which group a value belongs to, so a value that two groups share is
ambiguous.
"""

from collections.abc import Mapping

from impala_llm.envs.webshop.product import Product

# A click on one of these texts goes elsewhere, or nowhere, even where an option is called so.
NEVER_OPTIONS = frozenset(
    ("search", "back to search", "< prev", "buy now", "description", "features", "reviews", "attributes")
)


def option_groups(product: Product) -> dict[str, tuple[str, ...]]:
    """Value -> the groups that have it, in page order."""
    groups: dict[str, tuple[str, ...]] = {}
    for name, values in product.options.items():
        for value in dict.fromkeys(values):
            groups[value] = (*groups.get(value, ()), name)
    return groups


def choose_strict(groups: Mapping[str, tuple[str, ...]], chosen: dict[str, str], value: str) -> None:
    """As in the original: the last group that has the value takes it; the others can never be given it."""
    chosen[groups[value][-1]] = value


def choose_repaired(groups: Mapping[str, tuple[str, ...]], chosen: dict[str, str], value: str) -> None:
    """Like `choose_strict`, but a value that several groups share does not push out another one while there is room.

    The first of its groups without a choice takes the value. If there is none, choices move to other groups that have
    them as well, until one is free. So the values of any combination of options can be chosen, in any order.
    """

    def place(moving: str, tried: set[str]) -> bool:
        for group in groups[moving]:
            if group not in tried:
                tried.add(group)
                if group not in chosen or place(chosen[group], tried):
                    chosen[group] = moving
                    return True
        return False

    candidates = groups[value]
    free = next((group for group in candidates if group not in chosen), None)
    if free is not None:
        chosen[free] = value
    elif not place(value, set()) and all(chosen[group] != value for group in candidates):
        chosen[candidates[-1]] = value
