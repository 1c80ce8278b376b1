"""The nouns of a product title, which the reward compares between the bought and the wanted product.

The original asks a spaCy model, and published numbers differ in which. Here: a cached file if the user has one, an
installed spaCy model, or a built-in heuristic; `name` says which it was, and every result should.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from impala_llm.envs.webshop.product import CatalogueError

_SPACY_MODELS = ("en_core_web_sm", "en_core_web_lg")
_NOUN_TAGS = frozenset(("NOUN", "PROPN"))
_CACHED_TITLES = 1 << 16

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_OTHER_WORDS = (
    "a about above after all an and any are as at be been best big black blue but by can cheap clean clear "
    "compatible cool dark deep dry each easy every extra fast fine for free fresh from full good gray great green "
    "grey hard has have heavy high hot how if in into is it its large light long loose low made make many men's "
    "mini modern more most natural new non not of off old on one only or original other our out over own per pink "
    "plus pure purple quick real red rich s same set-up sheer short single slim small smart smooth soft special "
    "strong such super sweet than that the their them these they thick thin this those through tight to too two "
    "ultra under universal up upgraded use very vintage vs warm was wet when which white wide wild with within "
    "without women's yellow you your"
)
_NOT_NOUNS = frozenset(_OTHER_WORDS.split())
_NOT_NOUN_ENDINGS = ("able", "ible", "ful", "less", "ous", "ish", "ical", "ly", "ized", "ated")


class NounFunction(Protocol):
    """asin and title -> lower-case nouns of the title, in order, repeated ones too."""

    name: str

    def __call__(self, asin: str, title: str) -> list[str]: ...


class CachedNouns:
    """Nouns read from a file, which one tagger has written, so that results stay comparable."""

    name = "file"

    def __init__(self, nouns: dict[str, tuple[str, ...]]) -> None:
        self._nouns = nouns

    @classmethod
    def of_products(cls, nouns: Mapping[str, object], asins: Iterable[str], source: str) -> "CachedNouns":
        """Keeps the nouns of the given products.

        Raises:
            CatalogueError: `source`, the file, lacks a product or has something else than a list of strings for it.
        """
        shared: dict[object, str] = {}
        kept: dict[str, tuple[str, ...]] = {}
        for asin in asins:
            found = nouns.get(asin)
            if not isinstance(found, list) or not all(isinstance(noun, str) for noun in found):
                problem = "is missing" if asin not in nouns else f"must be a list of strings, is {found!r:.80}"
                raise CatalogueError(f"{source}: asin {asin!r}: {problem}")
            kept[asin] = tuple(shared.setdefault(noun, noun) for noun in found)
        return cls(kept)

    def __call__(self, asin: str, title: str) -> list[str]:
        return list(self._nouns[asin])


class TaggedNouns:
    """Nouns that a function finds in titles, each title once."""

    def __init__(self, name: str, find: Callable[[str], list[str]]) -> None:
        self.name = name
        self._find = functools.lru_cache(_CACHED_TITLES)(lambda title: tuple(find(title)))

    def __call__(self, asin: str, title: str) -> list[str]:
        return list(self._find(title))


def installed_nouns() -> NounFunction:
    """Nouns by the tagger that `installed_tagger` names."""
    name = installed_tagger()
    model = name.removeprefix("spacy:")
    return TaggedNouns(name, heuristic_nouns if model == name else _spacy_tagger(model))


def installed_tagger() -> str:
    """Name of a spaCy model if one is installed, of the built-in heuristic otherwise."""
    has_spacy = importlib.util.find_spec("spacy") is not None
    models = (model for model in _SPACY_MODELS if has_spacy and importlib.util.find_spec(model) is not None)
    return next((f"spacy:{model}" for model in models), "heuristic")


def heuristic_nouns(title: str) -> list[str]:
    """The words of a title that are no function words, common adjectives or adverbs, nor look like one by their
    ending.

    Titles are mostly noun phrases, so what is left is mostly nouns. No tagger is equal to another; see the module.
    """
    words = [word.lower() for word in _WORD.findall(title)]
    return [word for word in words if word not in _NOT_NOUNS and not word.endswith(_NOT_NOUN_ENDINGS)]


def _spacy_tagger(model: str) -> Callable[[str], list[str]]:
    import spacy  # optional, and slow to import

    tagger = spacy.load(model)
    return lambda title: [token.text.lower() for token in tagger(title) if token.pos_ in _NOUN_TAGS]
