"""Signatures and annotations of parts that users bring, as far as they tell before anything is called."""

import contextlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import Field, field, make_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
"""Types as OmegaConf names them, in words."""


def other_methods(part: type, like: type) -> str:
    """Return which method of a class takes other arguments than it is called with; "" where none does.

    Methods that the class has not are no fault: an instance may get them when it is made.

    Args:
        like: base class or protocol; its methods are called with as many arguments as it has parameters.
    """
    for base in like.__mro__:
        for method, expected in vars(base).items():
            own = inspect.getattr_static(part, method, None)
            if not inspect.isfunction(expected) or (method.startswith("_") and method != "__call__") or own is expected:
                continue
            names = list(inspect.signature(expected).parameters)
            if inspect.isfunction(own) and (takes := other_signature(own, names)):
                return f"its {method} takes {takes}, and is called with ({', '.join(names[1:])})"
    return ""


def missing_methods(instance: Any, like: type) -> list[str]:
    """Return the methods of a protocol that an instance has not."""
    methods = {
        name for base in like.__mro__ for name, each in vars(base).items()
        if inspect.isfunction(each) and not name.startswith("_")
    }  # fmt: skip
    return sorted(name for name in methods if not callable(getattr(instance, name, None)))


def other_signature(function: Any, arguments: Sequence[str]) -> str:
    """Return the parameters of a function that cannot be called with so many arguments; "" where it can.

    Of one with a decorator those of the decorator's count, which may supply others itself.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of what is no Python function
        return ""
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"({', '.join(str(each) for each in signature.parameters.values() if each.name != 'self')})"
    return ""


def is_async(function: Any) -> bool:
    """Return whether a function, or an object that is called as one, returns coroutines.

    What a decorator of functools.wraps returns is taken for what the function behind it returns.
    """
    calls = (function, type(function).__call__)
    return any(inspect.iscoroutinefunction(call) for each in calls for call in (each, inspect.unwrap(each)))


def unusable_type(option: Field[Any], options: type) -> str:
    """Return what is wrong with the type of an option, and what to write; "" where nothing is."""
    try:
        hint = get_type_hints(options)[option.name]
    except (TypeError, NameError):  # of types that are imported for type checkers alone
        return ""
    if get_origin(hint) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(hint))
        return f"is a Literal: write {option.name}: str = one_of({choices}), with one_of of impala_llm.settings"
    if option.default is None and hint not in (Any, type(None)) and type(None) not in get_args(hint):
        written = getattr(hint, "__name__", str(hint))
        return f"is {written} and its default is None: write {option.name}: {written} | None = None"
    return ""


def type_expected(error: OmegaConfBaseException) -> str:
    """Return what OmegaConf says of a value of a wrong type, in plain words where it names the type that is right."""
    reason = str(error.msg or error).splitlines()[0]
    if "is not Optional" in reason or "Incompatible value 'None'" in reason:
        return "it needs a value"
    match = re.search(r"could not be converted to (\w+)|is not a valid (bool)", reason)
    named = match and (match[1] or match[2])
    return f"{_TYPES.get(named, named)} is expected" if named else reason


def takes_any(part: Any) -> bool:
    """Whether a part takes arguments of any name, as `def __init__(self, **settings)` does."""
    try:
        return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(part).parameters.values())
    except (TypeError, ValueError):  # of what is no Python function
        return False


def parameters_of(part: Any) -> type | None:
    """The parameters that a part is called with, as a dataclass; None where it has none.

    A parameter whose type OmegaConf does not know takes any value. One whose default is no plain value keeps it.
    """
    try:
        parameters = list(inspect.signature(part).parameters.values())
    except (TypeError, ValueError):  # of what is no Python function
        return None
    hints: dict[str, Any] = {}
    with contextlib.suppress(TypeError, NameError):  # of types that are imported for type checkers alone
        hints = get_type_hints(inspect.getattr_static(part, "__init__") if isinstance(part, type) else part)
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    found = []
    for each in named:
        given: Any = {}
        if each.default is not each.empty:
            is_mutable = isinstance(each.default, list | dict)
            given = {"default_factory": each.default.copy} if is_mutable else {"default": each.default}
        for hint in (hints.get(each.name, Any), Any):
            try:
                OmegaConf.structured(make_dataclass("Parameter", [(each.name, hint, field(**given))]))
            except (OmegaConfBaseException, ValueError, TypeError):
                continue
            found.append((each.name, hint, field(**given)))
            break
    return make_dataclass("Parameters", found, kw_only=True) if found else None
