"""Signatures and annotations of parts that users bring, as far as they tell before anything is called."""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import Field, field, make_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def other_methods(part: type, like: type) -> str:
    """Return which methods a class lacks, or which of them takes other arguments; "" where all are as they must be.

    Args:
        like: base class or protocol; its methods are called with as many arguments as it has parameters.
    """
    lacking = []
    may_set = {
        name for base in part.__mro__ for each in vars(base).values() if inspect.isfunction(each)
        for name in each.__code__.co_names
    }  # fmt: skip
    for base in like.__mro__:
        for method, expected in vars(base).items():
            own = inspect.getattr_static(part, method, None)
            if not inspect.isfunction(expected) or (method.startswith("_") and method != "__call__") or own is expected:
                continue
            names = list(inspect.signature(expected).parameters)
            if own is None:
                if method not in may_set and not hasattr(part, "__getattr__"):  # on its instances
                    lacking.append(method)
            elif inspect.isfunction(own) and (takes := other_signature(own, names)):
                return f"its {method} takes {takes}, and is called with ({', '.join(names[1:])})"
    return f"it lacks {', '.join(lacking)}" if lacking else ""


def other_signature(function: Any, arguments: Sequence[str]) -> str:
    """Return the parameters of a function that cannot be called with so many arguments; "" where it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is no Python function
        return ""
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"({', '.join(str(each) for each in signature.parameters.values() if each.name != 'self')})"
    return ""


def unusable_type(option: Field[Any], options: type) -> str:
    """Return what is wrong with the type of an option, and what to write; "" where nothing is."""
    hint = option.type
    with contextlib.suppress(TypeError, NameError):  # of types that are imported for type checkers alone
        hint = get_type_hints(options)[option.name]
    if get_origin(hint) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(hint))
        return f"is a Literal: write {option.name}: str = one_of({choices}), with one_of of impala_llm.settings"
    if option.default is None and hint is not Any and type(None) not in get_args(hint):
        written = getattr(hint, "__name__", str(hint))
        return f"is {written} and its default is None: write {option.name}: {written} | None = None"
    return ""


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
