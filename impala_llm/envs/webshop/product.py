"""One product of the shop, read from one record of the original's item file.

Invariant: a `Product` holds what the pages, the search index and the reward read, and nothing else; the many unused
keys of a record are dropped at once, so that a catalogue of 100,000 products stays small.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import NoReturn, TypeVar, cast

MAX_ASIN_LENGTH = 10
MISSING_PRICE = 100.0
DUMMY_ATTRIBUTES = ("DUMMY_ATTR",)
_NOT_PRICE = re.compile(r"[^\d.]")
T = TypeVar("T")


class CatalogueError(ValueError):
    """A catalogue file, or a record of it, cannot be used. The message names the file, the record and the problem."""


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """One instruction that a person wrote for a product. Unlike synthetic ones its options are values without names."""

    instruction: str
    attributes: list[str]
    options: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product as the shop shows it. Compared and hashed by identity: one catalogue holds each product once.

    title: as in the file, not stripped. bullets: the features, empty ones too. price_range: one
    value, or two between which the hidden price lies (dollars). options: group name -> values, both lower case, in
    page order; a group may be empty and values may repeat. query: the search term under which the product was found,
    lower case. instruction, instruction_attributes: what synthetic goals are made of; None and () where the file has
    none.
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    price_range: tuple[float, ...]
    price_tag: str
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human_instructions: tuple[HumanInstruction, ...] = ()

    @property
    def search_text(self) -> str:
        """The document that the search engine indexes: title, description, first bullet point and options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first_bullet = self.bullets[0] if self.bullets else ""
        return " ".join((self.title, self.description, first_bullet, options)).lower()


class Record:
    """Typed access to one JSON object of a catalogue file; every error names the file and the record.

    source: the file, or a word for an in-memory list. name: which record, for example "record 17 (asin 'B01')".
    """

    def __init__(self, data: object, source: str, name: str) -> None:
        self._source, self._name = source, name
        if not isinstance(data, Mapping):
            self.fail(f"must be a JSON object, is {_kind(data)}")
        self.data: Mapping[str, object] = data

    def fail(self, problem: str) -> NoReturn:
        """Stop with a `CatalogueError` about this record."""
        raise CatalogueError(f"{self._source}: {self._name}: {problem}")

    def text(self, key: str) -> str:
        """A string that must be there."""
        if key not in self.data:
            self.fail(f"key {key!r} is missing")
        value = self.data[key]
        if not isinstance(value, str):
            self.fail(f"{key!r} must be a string, is {_kind(value)}")
        return value

    def optional_text(self, key: str) -> str:
        """A string; "" where it is missing or null."""
        return "" if self.data.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; () where it is missing or null."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(f"{key!r} must be a list of strings, is {_kind(value)}")
        return tuple(value)


def parse_product(
    record: Record,
    attributes: Record | None,
    human: tuple[HumanInstruction, ...],
    shared: dict[object, object],
) -> Product:
    """Builds the product of one record of the item file.

    attributes: its entry in the attribute file, if any. shared: equal strings and tuples found here are reused, which
    keeps the many repeated categories, option groups and attributes in memory once.

    Raises:
        CatalogueError: a key is missing or has a wrong type.
    """

    def share(value: T) -> T:
        return cast(T, shared.setdefault(value, value))

    price_range, price_tag = _prices(record)
    instruction, instruction_attributes = (None, ()) if attributes is None else _instruction(attributes)
    return Product(
        asin=record.text("asin"),
        title=record.text("name"),
        description=record.optional_text("full_description"),
        bullets=_bullets(record),
        price_range=share(price_range),
        price_tag=price_tag,
        options={share(name): share(tuple(map(share, values))) for name, values in _options(record).items()},
        attributes=share(tuple(map(share, _attributes(attributes)))),
        category=share(record.text("category")),
        query=share(record.text("query").lower().strip()),
        product_category=share(record.text("product_category")),
        instruction=instruction,
        instruction_attributes=share(tuple(map(share, instruction_attributes))),
        human_instructions=human,
    )


def parse_human_instructions(records: object, source: str, asin: str) -> tuple[HumanInstruction, ...]:
    """The human instructions of one product: the value at `asin` in the human instruction file."""
    if not isinstance(records, list):
        raise CatalogueError(f"{source}: asin {asin!r}: must be a list of instructions, is {_kind(records)}")
    found = []
    for position, data in enumerate(records):
        record = Record(data, source, f"asin {asin!r}, instruction {position}")
        instruction = record.text("instruction")
        found.append(
            HumanInstruction(
                instruction, list(record.texts("instruction_attributes")), list(record.texts("instruction_options"))
            )
        )
    return tuple(found)


def _attributes(entry: Record | None) -> tuple[str, ...]:
    return DUMMY_ATTRIBUTES if entry is None or "attributes" not in entry.data else entry.texts("attributes")


def _instruction(entry: Record) -> tuple[str | None, tuple[str, ...]]:
    attributes = entry.texts("instruction_attributes")
    if entry.data.get("instruction") is None:
        return None, attributes
    if not attributes:
        entry.fail("has an 'instruction' but no 'instruction_attributes'")
    return entry.text("instruction"), attributes


def _bullets(record: Record) -> tuple[str, ...]:
    if isinstance(record.data.get("small_description"), list):
        return record.texts("small_description")
    return (record.optional_text("small_description"),)


def _prices(record: Record) -> tuple[tuple[float, ...], str]:
    # A price without a dollar sign is treated as a missing one; the original stops with an IndexError there.
    pieces = record.optional_text("pricing").split("$")[1:]
    if not pieces:
        return (MISSING_PRICE,), f"${MISSING_PRICE}"
    try:
        values = tuple(float(Decimal(_NOT_PRICE.sub("", piece))) for piece in pieces[:2])
    except InvalidOperation:
        record.fail(f"'pricing' {record.data['pricing']!r} has a part after '$' that is no number")
    if len(values) == 1:
        return values, f"${values[0]}"
    return values, f"${values[0]} to ${values[1]}"


def _options(record: Record) -> dict[str, list[str]]:
    groups = record.data.get("customization_options")
    if not groups:
        return {}
    if not isinstance(groups, Mapping):
        record.fail(f"'customization_options' must be an object of lists, is {_kind(groups)}")
    options: dict[str, list[str]] = {}
    for name, contents in groups.items():
        if contents is None:
            continue
        if not isinstance(contents, list):
            record.fail(f"'customization_options' {name!r} must be a list, is {_kind(contents)}")
        options[name.lower()] = [_option_value(record, name, content) for content in contents]
    return options


def _option_value(record: Record, name: str, content: object) -> str:
    value = content.get("value") if isinstance(content, Mapping) else None
    if not isinstance(value, str):
        record.fail(f"'customization_options' {name!r} has an item without a string 'value': {content!r:.80}")
    return value.strip().replace("/", " | ").lower()


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", type(None): "null"}.get(type(value), repr(value))
