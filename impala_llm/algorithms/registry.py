"""Credits and losses by name, and made from settings: the built-in ones by short name, your own by import path.

Invariant: what comes out is the part that was named, with the options that it has; an unknown name or option is an
error that says which there are.
"""

import difflib
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

# Imported so that they register themselves.
from impala_llm.algorithms import advantages, distillation, losses, preference, vtrace
from impala_llm.algorithms.interface import CREDITS, LOSSES, Credit, Loss

__all__ = ["CREDITS", "LOSSES", "PARTS", "compose_part", "find", "limits", "option_problems", "options"]
_REGISTERING = (advantages, distillation, losses, preference, vtrace)


@dataclass(frozen=True)
class Kind:
    """A kind of part."""

    base: type[Credit] | type[Loss]
    built_in: Mapping[str, type[Credit] | type[Loss]]
    """By short name."""


PARTS = {"credit": Kind(Credit, CREDITS), "loss": Kind(Loss, LOSSES)}
"""By the setting of `AlgorithmConfig` that names one."""


def find(kind: Kind, name: str) -> type[Credit] | type[Loss]:
    """The part of a short name or import path.

    Raises:
        ValueError: there is none; to be read after the setting.
    """
    if name in kind.built_in:
        return kind.built_in[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, kind.built_in, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"is not known: {hint}choose one of {', '.join(sorted(kind.built_in))}, or your own as module:Class"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that nothing of the user's hides a module of ours
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise ValueError(
            f"cannot be imported ({error}): put {module_name} into the current directory or onto PYTHONPATH"
        ) from error
    if found is None:
        raise ValueError(f"is not there: {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, kind.base) and is_dataclass(found)):
        raise ValueError(f"cannot be used: derive it from impala_llm.algorithms.interface.{kind.base.__name__}")
    return found


def options(part: type[Credit] | type[Loss]) -> list[Field[Any]]:
    """The fields of a part that settings may set."""
    return [f for f in fields(part) if f.name != "name"]


def compose_part(key: str, kind: Kind, in_files: Any, words: Sequence[str]) -> Credit | Loss:
    """The part that settings name, with its options.

    A word that chooses another part than the files do leaves their options behind: those were for theirs.

    Args:
        key: the setting, for words and messages.
        in_files: `{name: ..., option: ...}` as the files compose it.
        words: `key=NAME` and `key.option=value`, in Hydra's grammar.

    Raises:
        ValueError: an unknown name or option, a wrong type.
        HydraException: a word that cannot be read.
    """
    chosen: dict[str, Any] = OmegaConf.to_container(in_files) if isinstance(in_files, DictConfig) else {}  # type: ignore[assignment]
    given: dict[str, Any] = {}
    for word in words:
        override = OverridesParser.create().parse_override(word.lstrip("+"))
        given[override.key_or_group.removeprefix(key).removeprefix(".") or "name"] = override.value()
    name = str(given.pop("name", chosen.get("name")))
    if name != chosen.pop("name", None):
        chosen = {}
    try:
        part = find(kind, name)
    except ValueError as error:
        raise ValueError(f"{key}={name} {error}") from None
    chosen |= given
    defaults = {f.name: f.default for f in options(part)}
    for option, value in chosen.items():
        if option not in defaults:
            raise ValueError(
                f"{key}.{option}={value} is no option of {key}={name}: {_suggestion(key, kind, option, list(defaults))}"
            )
    try:
        made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(part), chosen, {"name": name}))
    except OmegaConfBaseException as error:
        option = error.full_key or ""
        reason = str(error.msg or error).splitlines()[0]
        raise ValueError(
            f"{key}.{option}={chosen.get(option)} has the wrong type: {reason}; the default is {defaults.get(option)!r}"
        ) from None
    assert isinstance(made, kind.base)
    return made


def option_problems(key: str, part: object) -> list[str]:
    """Options out of the range, or not among the choices, that stand on their fields."""
    found = []
    assert is_dataclass(part)
    for f in fields(part):
        value = getattr(part, f.name)
        choices, (low, high) = f.metadata.get("choices"), f.metadata.get("range", (-math.inf, math.inf))
        if choices and value not in choices:
            found.append(f"{key}.{f.name}={value} is not known: choose one of {', '.join(choices)}")
        if isinstance(value, int | float) and not low <= value <= high:
            found.append(f"{key}.{f.name}={value} is out of range: set it to {limits(low, high)}")
    return found


def limits(low: float, high: float) -> str:
    """A range, as a message says it."""
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:.12g}"


def _suggestion(key: str, kind: Kind, option: str, own: Sequence[str]) -> str:
    """The option that may be meant, or the parts that have it."""
    others = sorted(name for name, part in kind.built_in.items() if option in {f.name for f in options(part)})
    if others:
        return (
            f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} it; leave it out, or choose one of these"
        )
    close = difflib.get_close_matches(option, own, n=1, cutoff=0.5)
    if close:
        return f"did you mean {key}.{close[0]}?"
    return f"its options are {', '.join(own)}" if own else "it has no options"
