"""The settings as a text for people: each key with its default, what values it may take, and what it means.

The meanings are the docstrings that stand under the fields in settings.py, read from its source; the ranges are those
that config.py checks.
"""

import ast
import math
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

from impala_llm import settings
from impala_llm.config import BOUNDS, CHOICES


def reference(word: str = "", width: int = 100) -> str:
    """All settings whose key contains `word`, in the order of settings.py, as lines of at most `width` characters.

    Empty where there is none.
    """
    lines: list[str] = []
    for key, default, meaning in _entries(settings.Config(), ""):
        if word in key:
            lines.append("  ".join(filter(None, (f"{key}={_written(default)}", _allowed(key)))))
            lines += textwrap.wrap(
                meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    return "\n".join(lines)


def _entries(part: object, prefix: str) -> Iterator[tuple[str, object, str]]:
    """(key, default, meaning) of each setting below a part."""
    assert is_dataclass(part)
    meanings = _meanings().get(type(part).__name__, {})
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from _entries(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value, meanings.get(field.name, "")


def _allowed(key: str) -> str:
    if key in CHOICES:
        return f"({' | '.join(CHOICES[key])})"
    if key not in BOUNDS:
        return ""
    least, most = BOUNDS[key]
    return f"(at least {least:g})" if most == math.inf else f"({least:g} to {most:g})"


def _written(default: object) -> str:
    """As on the command line."""
    if default is None:
        return "null"
    return str(default).lower() if isinstance(default, bool) else str(default)


@cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it, in one line."""
    tree = ast.parse(Path(settings.__file__).read_text())
    found: dict[str, dict[str, str]] = {}
    for part in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for before, after in zip(part.body, part.body[1:], strict=False):
            if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found.setdefault(part.name, {})[before.target.id] = " ".join(str(after.value.value).split())
    return found
