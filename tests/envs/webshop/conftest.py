"""The golden catalogues, the synthetic one, and small ones made of hand-written records."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from impala_llm.envs.webshop import Catalogue, load_catalogue, records_to_catalogue, synthetic_catalogue

GOLDEN = Path(__file__).parents[2] / "fixtures" / "webshop"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of the golden cases."""
    return GOLDEN


@pytest.fixture(scope="session")
def read_cases() -> Callable[[str], Any]:
    """Reads a golden file: the value of a .json file, the list of lines of a .jsonl file."""

    def read(name: str) -> Any:
        text = (GOLDEN / name).read_text(encoding="utf-8")
        return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]

    return read


def _load(folder: str) -> Catalogue:
    path = GOLDEN / folder
    names = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json", "nouns.json")
    return load_catalogue(*(path / name for name in names), seed=0)


@pytest.fixture(scope="session")
def shop() -> Catalogue:
    """The 300 products of the golden cases, with the random state of seed 0."""
    return _load("data")


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    """The 1,000 products of the synthetic shop."""
    return synthetic_catalogue()


@pytest.fixture
def edge_shop(monkeypatch: pytest.MonkeyPatch) -> Catalogue:
    """The 20 nasty products. Their traces were recorded with a search that finds everything, but nothing for "none"."""
    catalogue = _load("edge")
    monkeypatch.setattr(catalogue, "search", lambda query: [] if query == "none" else list(catalogue))
    return catalogue


@pytest.fixture
def item() -> Callable[..., dict[str, Any]]:
    """Makes a product record in the original's format; keyword arguments replace keys."""

    def make(asin: str = "A1", **changes: Any) -> dict[str, Any]:
        options = changes.pop("options", {})
        record = {
            "asin": asin,
            "name": "Alder Hair Brush",
            "full_description": "A brush.",
            "pricing": "$25.00",
            "images": ["http://x/i.jpg"],
            "small_description": ["Soft bristles", "Wooden handle"],
            "customization_options": {k: v and [{"value": value} for value in v] for k, v in options.items()},
            "category": "beauty",
            "query": "hair brushes",
            "product_category": "Beauty › Hair Care › Brushes",
        }
        return record | changes

    return make


@pytest.fixture
def small_shop(item: Callable[..., dict[str, Any]]) -> Callable[..., Catalogue]:
    """Makes a catalogue of records, each with the same instruction; each title's words are its nouns."""

    def make(*items: Mapping[str, Any], seed: int = 0, **sources: Any) -> Catalogue:
        records = list(items) or [item()]
        wanted = {"attributes": ["soft"], "instruction": "Find me soft brushes", "instruction_attributes": ["soft"]}
        attributes = {record["asin"]: wanted for record in records}
        nouns = {record["asin"]: record["name"].lower().split() for record in records}
        defaults: dict[str, Any] = {"attributes": attributes, "nouns": nouns, "seed": seed}
        return records_to_catalogue(records, **(defaults | sources))

    return make
