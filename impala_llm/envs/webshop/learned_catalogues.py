"""The made catalogues that a policy has learned from, in a file beside its weights, which further training takes along.

    {"hard, 1000 products": [1000, 1001, ...]}        seeds, by kind and size

Settings say only what the last training was of: a warm start on `sft.data` learns from what its folders were recorded
in, and a policy has learned from what its start had learned from.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from impala_llm.settings import Config

FILE = "learned_catalogues.json"
_SOURCE = "webshop, catalogue "
"""How the source of a demonstration begins, before the seed."""


def kind_of(shop: Mapping[str, Any]) -> str:
    """Kind and size of a made catalogue.

    Args:
        shop: settings `env.webshop`.
    """
    return f"{shop['catalogue']}, {shop['num_products']} products"


def learned_of(settings: Mapping[str, Any], sources: Iterable[str]) -> dict[str, set[int]]:
    """Seeds of the made catalogues that demonstrations are of, by kind.

    Args:
        settings: of their recording, see `demonstrations.Header`.
        sources: of the demonstrations.

    Returns:
        Empty where they are of files, or of another environment.
    """
    shop = settings.get("env", {}).get("webshop")
    numbers = [each.removeprefix(_SOURCE) for each in sources if each.startswith(_SOURCE)]
    seeds = {int(number) for number in numbers if number.isdecimal()}
    return {kind_of(shop): seeds} if seeds and shop and {"catalogue", "num_products"} <= shop.keys() else {}


def learned_in_training(config: Config) -> dict[str, set[int]]:
    """Seed of the made catalogue that a run learns from, by its kind; empty where it learns from none."""
    shop = config.env.webshop
    return {kind_of(vars(shop)): {shop.catalogue_seed}} if config.plays_shop and shop.items is None else {}


def seeds_of(content: bytes, kind: str) -> set[int]:
    """Seeds of a kind in the file. A file that is damaged has none: what it says is a caution."""
    try:
        return set(json.loads(content).get(kind, ()))
    except (ValueError, TypeError, AttributeError):
        return set()


def with_learned(files: Mapping[str, bytes], learned: Mapping[str, set[int]]) -> dict[str, bytes]:
    """Files of a policy with further catalogues.

    Args:
        files: those of its start, by name.
        learned: seeds by kind.

    Returns:
        The same files where nothing was learned from a made catalogue.
    """
    if not learned:
        return dict(files)
    before = files.get(FILE, b"{}")
    try:
        found = dict(json.loads(before))
    except (ValueError, TypeError):
        found = {}
    found |= {kind: sorted(seeds | seeds_of(before, kind)) for kind, seeds in learned.items()}
    return {**files, FILE: json.dumps(found).encode() + b"\n"}
