"""The settings as a text for people: each key with its default, what values it may take, and what it means.

The meanings are the docstrings that stand under the fields, read from the source; the ranges are those that config.py
checks. Credits and losses, which have options of their own, are listed one by one.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from impala_llm import settings
from impala_llm.algorithms.registry import PARTS
from impala_llm.config import BOUNDS, CHOICES
from impala_llm.plugs import option_fields
from impala_llm.settings import CreditSettings, LossSettings


def reference(word: str = "", width: int = 100) -> str:
    """All settings whose key contains `word`, in the order of settings.py, as lines of at most `width` characters.

    Empty where there is none.
    """
    lines: list[str] = []
    for key, default, meaning in _entries(settings.Config(), ""):
        if word in key:
            lines.append("  ".join(filter(None, (f"{key}={_written(default)}", _allowed(key, default)))))
            lines += textwrap.wrap(
                meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    return "\n".join(lines)


def _entries(part: object, prefix: str) -> Iterator[tuple[str, object, str]]:
    """(key, default, meaning) of each setting below a part."""
    assert is_dataclass(part)
    meanings = _meanings(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, CreditSettings | LossSettings):
            yield from _of_parts(f"{prefix}{field.name}", PARTS[field.name].packaged)
        elif is_dataclass(value):
            yield from _entries(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value, meanings.get(field.name, "")


def _of_parts(key: str, built_in: Mapping[str, type]) -> Iterator[tuple[str, object, str]]:
    """The same for each credit or loss that `key` may name, and for its options: those of several come once."""
    seen: dict[tuple[object, str], list[str]] = {}
    for name, part in built_in.items():
        yield key, name, (part.__doc__ or "").partition("; see")[0].partition("\n\n")[0].strip().rstrip(".") + "."
        for field in option_fields(part):
            meaning = (field.name, field.default, _range(field), _meanings(part).get(field.name, ""))
            seen.setdefault(meaning, []).append(name)
    yield key, "my_module:MyClass", "Your own, by its import path: see impala_llm/algorithms/interface.py."
    for (name, default, allowed, meaning), owners in seen.items():
        text = f"{', '.join(owners) if len(owners) < len(built_in) else 'all'}: {meaning}"
        yield f"{key}.{name}", _Default(default, allowed), text


@dataclass(frozen=True)
class _Default:
    """A default whose range stands on its field."""

    value: object
    allowed: str


def _range(field: Field[Any]) -> str:
    if choices := field.metadata.get("choices"):
        return f"({' | '.join(choices)})"
    least, most = field.metadata.get("range", (-math.inf, math.inf))
    if least == -math.inf:
        return ""
    return f"(at least {least:g})" if most == math.inf else f"({least:g} to {most:g})"


def _allowed(key: str, default: object) -> str:
    if isinstance(default, _Default):
        return default.allowed
    if key in CHOICES:
        return f"({' | '.join(CHOICES[key])})"
    if key not in BOUNDS:
        return ""
    least, most = BOUNDS[key]
    return f"(at least {least:g})" if most == math.inf else f"({least:g} to {most:g})"


def _written(default: object) -> str:
    """As on the command line."""
    if isinstance(default, _Default):
        return _written(default.value)
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
                found[before.target.id] = " ".join(str(after.value.value).split())
    return found
