"""The settings as a text for people: each key with its default, the values that it may take, and its meaning.

All of it stands on the fields: the range and the choices in their metadata, the meaning in the docstring under each,
read from the source. Credits, losses and environments, which have options of their own, are listed one by one.

    python -m impala_llm.commands.settings_reference > docs/settings.md
"""

import ast
import inspect
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from impala_llm import settings
from impala_llm.algorithms.registry import PARTS
from impala_llm.checks.familiar_names import FAMILIAR_CHOICES, FAMILIAR_NAMES
from impala_llm.config import present_word
from impala_llm.config_files import known_keys
from impala_llm.part_signatures import parameters_of
from impala_llm.plugs import ENGINES, ENVIRONMENTS, PartKind, load, option_fields
from impala_llm.settings import CreditSettings, LossSettings

INTRODUCTION = """\
# Settings

Written by `python -m impala_llm.commands.settings_reference > docs/settings.md` from the fields in
`impala_llm/settings.py`;
`impala-llm train --help .` prints the same. A setting is given as `key=value`, or in a file: `--config FILE`. `null`
is no value. A preset beside a file, such as `algorithm=vtrace`, goes over it: what the presets of its group set comes
from the one that is named, all else in the file stays.

The defaults here are those without presets. A run without other words takes the presets of `configs/config.yaml`:
`algorithm=topr_gae env=webshop engine=torch model=tiny_shopper replay=use_once`. `algorithm=topr_gae` names
`algorithm.credit=gae` and `algorithm.loss=topr`; `model=tiny_shopper` sets `learner.learning_rate=2e-4` and
`env.webshop.catalogue=hard`, among others. `--dry-run` prints the values in force.
"""


@dataclass(frozen=True)
class Entry:
    """A setting, or a name that it may have."""

    key: str
    default: str
    """As on the command line."""
    allowed: str
    """Values that it may take; empty: all of its type."""
    meaning: str


def parts() -> dict[str, int]:
    """Number of settings of each part, by the part's name, in the order of settings.py."""
    keys = dict.fromkeys(entry.key for entry in _entries(settings.Config(), ""))
    return dict(Counter(key.partition(".")[0] for key in keys))


def familiar(command: str, word: str, width: int) -> str:
    """Return what a word of other trainers stands for: a setting, or those of a method; empty for no such word."""
    if (meant := FAMILIAR_NAMES.get(word.lower())) and word not in parts():
        of_command = f"{command}.{meant.rpartition('.')[2]}"  # as sft.learning_rate
        found = reference(of_command if of_command in known_keys() else meant, width)
        return f"{word}, as other trainers call it:\n{found}"
    of_word = {key.partition("=")[2]: key for key in FAMILIAR_CHOICES}
    if key := of_word.get(word.lower()):
        words = f"{key.partition('=')[0]}={FAMILIAR_CHOICES[key]}"
        wrapped = textwrap.wrap(words, width - 4, break_long_words=False, break_on_hyphens=False)
        return "\n".join([f"{word}, or what comes nearest to it here:", *(f"    {line}" for line in wrapped)])
    return ""


def reference(word: str, width: int = 100, words: Sequence[str] = ()) -> str:
    """The settings that have `word` in their key or meaning, as lines of at most `width` characters. A word of letters
    is found in a meaning where a word begins with it: "lr" is not in "already".

    Upper and lower case are the same. In the order of settings.py, those with the word in their key first. Empty where
    there is none.

    Args:
        words: `key=value`, of which some may name parts of the user's own: their options are among the settings.

    Raises:
        ValueError: there is no such part.
    """
    lines: list[str] = []
    entries = [*_entries(settings.Config(), ""), *_of_own_parts(words)]
    word = word.lower()
    named = [e for e in entries if word in e.key.lower() or word.replace(" ", "_") in e.key.lower()]
    pattern = re.compile((r"\b" if word.isalpha() else "") + re.escape(word))
    for entry in [*named, *(e for e in entries if e not in named and pattern.search(e.meaning.lower()))]:
        allowed = f"({entry.allowed})" if entry.allowed else ""
        head = "  ".join(filter(None, (f"{entry.key}={entry.default}", allowed)))
        for text, indent in ((head, ""), (entry.meaning, "    ")):
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=indent,
                subsequent_indent="    ",
                break_on_hyphens=False,
                break_long_words=False,
            )
    return "\n".join(lines)


def markdown(width: int = 120) -> str:
    """Return the page docs/settings.md."""
    lines = [INTRODUCTION]
    for part, entries in groupby(_entries(settings.Config(), ""), key=lambda entry: entry.key.partition(".")[0]):
        lines.append(f"## `{part}.*`\n")
        for entry in entries:
            allowed = f", {entry.allowed}" if entry.allowed else ""
            text = f"- `{entry.key}={entry.default}`{allowed}: {entry.meaning}"
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        lines.append("")
    return "\n".join(lines)


def _entries(part: object, prefix: str) -> Iterator[Entry]:
    """Each setting below a part."""
    assert is_dataclass(part) and not isinstance(part, type)
    meanings = _meanings(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, CreditSettings | LossSettings):
            yield from _of_parts(f"{prefix}{field.name}", PARTS[field.name].packaged)
        elif is_dataclass(value):
            yield from _entries(value, f"{prefix}{field.name}.")
        else:
            key = prefix + field.name
            yield Entry(key, _written(value), _allowed(field), meanings.get(field.name, ""))
            if key == ENVIRONMENTS.options_key:
                yield from _of_environments()


def _of_environments() -> Iterator[Entry]:
    """The options of each packaged environment."""
    owners: dict[Entry, list[str]] = {}
    for name in ENVIRONMENTS.packaged:
        options = None if name in ENVIRONMENTS.settings else getattr(load(ENVIRONMENTS, name), "Options", None)
        for field in () if options is None else fields(options):
            entry = _option(ENVIRONMENTS, field, _meanings(options)[field.name])
            owners.setdefault(entry, []).append(name)
    for entry, names in owners.items():
        yield replace(entry, meaning=f"{', '.join(names)}: {entry.meaning}")


def _of_own_parts(words: Sequence[str]) -> Iterator[Entry]:
    """The options of each part that is no packaged one among those that words name."""
    named = dict(present_word(word).lstrip("+").partition("=")[::2] for word in words)
    for kind in (*PARTS.values(), ENVIRONMENTS, ENGINES):
        name = named.get(kind.key)
        if name is None or name in kind.packaged:
            continue
        part = load(kind, name)
        options = part if kind.base else getattr(part, "Options", None)
        meanings = {} if options is None else _meanings(options)
        if options is None and kind.by_signature:
            options = parameters_of(part)
        for field in () if options is None else option_fields(options) if kind.base else fields(options):
            yield _option(kind, field, f"{name}: {meanings.get(field.name, 'its own option.')}")


def _option(kind: PartKind, field: Field[Any], meaning: str) -> Entry:
    """An option of a part."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    is_given = default is not MISSING
    return Entry(
        f"{kind.options_key}.{field.name}",
        _written(default) if is_given else "...",
        _allowed(field) if is_given else "must be set",
        meaning,
    )


def _of_parts(key: str, packaged: Mapping[str, type]) -> Iterator[Entry]:
    """Each credit or loss that `key` may name, and their options: those of several come once."""
    owners: dict[Entry, list[str]] = {}
    for name, part in sorted(packaged.items()):  # they register in the order of the imports
        meaning = (part.__doc__ or "").partition("; see")[0].partition("\n\n")[0].strip().rstrip(".") + "."
        yield Entry(key, name, "", " ".join(meaning.split()))
        meanings = _meanings(part)
        for field in option_fields(part):
            entry = Entry(f"{key}.{field.name}", _written(field.default), _allowed(field), meanings.get(field.name, ""))
            owners.setdefault(entry, []).append(name)
    where = 'docs/algorithms.md, "One of your own", and impala_llm/algorithms/interface.py'
    yield Entry(key, "my_module:MyClass", "", f"Your own, by its import path: see {where}.")
    for entry, names in owners.items():
        having = ", ".join(names) if len(names) < len(packaged) else "all"
        yield replace(entry, meaning=f"{having}: {entry.meaning}")


def _allowed(field: Field[Any]) -> str:
    """The values that the metadata of a field allow."""
    allowed = list(map(_written, field.metadata.get("choices", ())))
    least, most = field.metadata.get("range", (-math.inf, math.inf))
    if least > -math.inf:
        allowed.append(f"at least {least:.12g}" if most == math.inf else f"{least:.12g} to {most:.12g}")
    return " | ".join(allowed)


def _written(default: object) -> str:
    """A default as on the command line."""
    if default is None:
        return "null"
    return str(default).lower() if isinstance(default, bool) else str(default)


@cache
def _meanings(part: type) -> dict[str, str]:
    """Field -> the docstring under it, in one line; of a class and those that it is derived from."""
    found: dict[str, str] = {}
    for kind in reversed(part.__mro__):
        if not is_dataclass(kind):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(tree, ast.ClassDef)
        for before, after in zip(tree.body, tree.body[1:], strict=False):
            if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                meaning = re.sub(r"\bNone\b", "null", str(after.value.value))  # as on the command line
                found[before.target.id] = " ".join(meaning.split())
    return found


if __name__ == "__main__":
    print(markdown(), end="")
