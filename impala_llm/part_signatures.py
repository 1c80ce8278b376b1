"""Signatures, annotations and defaults of parts that users bring, as far as they tell before anything is called."""

import contextlib
import copy
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
"""Types as OmegaConf names them, in words."""
_CONTAINERS = {
    "is not a subclass of str": "a text",
    "is not a subclass of": "a mapping of its options",
    "is not a ListConfig": "a list",
    "DictConfig with ListConfig": "a list",
    "to Dict[": "a mapping",
    "to string": "a text",
}
"""Words of OmegaConf's, by which it refuses a value -> what is right in its place."""


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
    """Return what is wrong with the type of an option, or of one inside of it, and what to write; "" where nothing is.

    It begins with the name of the option.
    """
    try:
        hint = get_type_hints(options)[option.name]
    except (TypeError, NameError):  # of types that are imported for type checkers alone
        return ""
    if get_origin(hint) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(hint))
        fix = f"write {option.name}: str = one_of({choices}), with one_of of impala_llm.settings"
        return f"{option.name} is a Literal: {fix}"
    written = _written(hint)
    try:
        OmegaConf.structured(make_dataclass("Option", [(option.name, hint)]))
    except (OmegaConfBaseException, AssertionError):  # it asserts that keys are no tuples
        fix = f"write {option.name}: Any, with Any of typing"
        fix += "" if _is_plain(_default(option)) else ", and a plain default, such as a list"
        return f"{option.name} is {written}, which is no type of a setting: {fix}"
    if option.default is None and hint not in (Any, type(None)) and type(None) not in get_args(hint):
        return f"{option.name} is {written} and its default is None: write {option.name}: {written} | None = None"
    if isinstance(hint, type) and is_dataclass(hint) and hint is not options:
        if hint.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            return f"{option.name} is frozen, so that its options cannot be set: write @dataclass above {written}"
        if reason := next(filter(None, (unusable_type(each, hint) for each in fields(hint))), ""):
            return f"{option.name}.{reason}"
    default = _default(option)
    with contextlib.suppress(OmegaConfBaseException, ValueError, TypeError):  # a default of a wrong type
        if default is not MISSING and not _is_kept(hint, default):
            fix = f"write {option.name}: {_written(_type_of(default))}, or a plain default, such as a text"
            return f"{option.name} is {written} and a file of settings does not keep its default {default!r}: {fix}"
    return ""


def _written(hint: Any) -> str:
    """Return an annotation as code has it."""
    return str(hint).replace("typing.", "") if get_args(hint) else getattr(hint, "__name__", str(hint))


def _type_of(value: Any) -> Any:
    """Return an annotation for a value, with the type of the items of a list or mapping where that is one."""
    if isinstance(value, list | dict):
        types = {_type_of(each) for each in (value.values() if isinstance(value, dict) else value)}
        if len(types) == 1:
            return dict[str, types.pop()] if isinstance(value, dict) else list[types.pop()]  # type: ignore[misc]
    return Path if isinstance(value, Path) else type(value)


def _is_kept(hint: Any, default: Any) -> bool:
    """Return whether the default of an option is the same when it is read again from a file of settings.

    Raises:
        OmegaConfBaseException: it is of a wrong type.
    """
    read = OmegaConf.structured(with_defaults(make_dataclass("Option", [("x", hint, _given(default))])))
    saved: Any = OmegaConf.to_object(read)
    again = OmegaConf.to_object(OmegaConf.merge(read, escaped(plain(asdict(saved)))))
    return repr(again) == repr(saved)  # values of other types can be equal


def _given(default: Any) -> Any:
    """Return a field of a dataclass with a default, a copy of it for each instance."""
    return field(default_factory=partial(copy.copy, default))


def _default(option: Field[Any]) -> Any:
    """Return the default of an option; MISSING where it has none, or where a function makes it and raises."""
    if option.default_factory is not MISSING:
        with contextlib.suppress(Exception):  # it may be other people's code; `with_defaults` calls it again
            return option.default_factory()
    return option.default


def _is_plain(value: Any) -> bool:
    """Return whether a value comes back from a file of settings as it was, without a type that says what it is."""
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_simple = isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
    return is_simple or value is None or value is MISSING


def wrong_default(defaults: Any, error: OmegaConfBaseException) -> str:
    """Return a sentence with the default that OmegaConf refused, an option's or one inside of it.

    Args:
        defaults: instance of the options, see `with_defaults`; None where a default could not be made.
        error: by which OmegaConf refused it.
    """
    path = (defaults and _wrong_inside(defaults)) or str(error.full_key)
    option = re.split(r"[.\[]", path)[0]
    default = f"default {getattr(defaults, option)!r}" if hasattr(defaults, option) else "default"
    return f"the {default} of its option {path} has the wrong type: {type_expected(error)}"


def _wrong_inside(options: Any) -> str:
    """Return the path of a wrong default in a nested dataclass, such as `inner.x`; "" where there is none."""
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    for name, value in list(values.items()):
        if isinstance(value, list):
            values |= {f"{name}[{place}]": each for place, each in enumerate(value)}
    for name, value in values.items():
        try:
            OmegaConf.structured(value) if is_dataclass(value) else None
        except OmegaConfBaseException as error:
            return f"{name}.{_wrong_inside(value) or error.full_key}"
    return ""


def type_expected(error: OmegaConfBaseException) -> str:
    """Return what OmegaConf says of a value of a wrong type, in plain words where it names the type that is right."""
    reason = str(error.msg or error).splitlines()[0]
    if "is not Optional" in reason or "Incompatible value 'None'" in reason:
        return "it needs a value"
    if match := re.search(r"could not be converted to (\w+)|is not a valid (bool)", reason):
        named = match[1] or match[2]
        hints = get_type_hints(error.object_type) if is_dataclass(error.object_type) else {}
        or_null = " or null" if type(None) in get_args(hints.get(str(error.key))) else ""
        return f"{_TYPES.get(named, named)}{or_null} is expected"
    return next((f"{expected} is expected" for said, expected in _CONTAINERS.items() if said in reason), reason)


def list_expected(key: str, value: str, usual: Any) -> str:
    """Return how a value stands in a list, alone and beside those of the setting's default, `usual`, if it has any."""
    both = f", or beside the default '{key}=[{','.join([*map(str, usual), value])}]'" if usual else ""
    return f"it is a list: write '{key}=[{value}]'{both}"


def wrong_value(key: str, read: DictConfig, option: str, value: Any, error: OmegaConfBaseException) -> str:
    """Return a sentence with the value that OmegaConf refused, an option's or one inside of it, and with its default.

    Args:
        key: below which the options lie.
        read: options with their defaults.
        option: name of the option.
        value: it was given.
        error: by which OmegaConf refused it.
    """
    path, inside = error.full_key or "", ""
    given = _at(OmegaConf.create({option: escaped(value)}), path)
    if not path.startswith(option) or given is MISSING:  # it does not say in which item of a list, or a name has dots
        path, given, inside = option, value, path
    what = f"{key}.{path}={given}" + (f": {inside}" if inside else "")
    if isinstance(error, ConfigKeyError):
        owner = getattr(error.object_type, "__name__", "") if inside else f"{key}.{path.rpartition('.')[0]}"
        own = fields(error.object_type) if is_dataclass(error.object_type) else ()
        return f"{what} is no option" + (f": {owner} has {', '.join(each.name for each in own)}" if own else "")
    default, reason = _at(read, path), type_expected(error)
    for container, expected in ((list, "a list"), (dict, "a mapping of its options")):
        if isinstance(default, container) and not isinstance(given, container | None):
            reason = f"{expected} is expected"
    known = "" if default is MISSING or inside else f"; the default is {default!r}"
    return f"{what} has the wrong type: {reason}{known}"


def _at(settings: DictConfig, path: str) -> Any:
    """Return the plain value at a path such as `inner.list[0]`; MISSING where there is none."""
    try:
        found = OmegaConf.select(settings, path, default=MISSING)
    except AttributeError:  # OmegaConf's, inside of a dataclass that has no default
        return MISSING
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def with_defaults(options: type) -> Any:
    """Return an instance of a dataclass from which OmegaConf reads its defaults, `${` in their texts as itself.

    It was not initialised: what has no default is `???`, which OmegaConf takes for a value that is missing.
    """
    instance: Any = object.__new__(options)
    for each in fields(options):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        object.__setattr__(instance, each.name, "???" if default is MISSING else escaped(default))
    return instance


def plain(value: Any) -> Any:
    """A value as YAML and JSON have it: of an enumeration the name, of a path the text."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, os.PathLike) else value


def escaped(value: Any) -> Any:
    """Return a copy of a value for OmegaConf to read, in whose texts `${` stands for itself and refers to nothing.

    Backslashes before it are doubled, as OmegaConf's grammar wants it.
    """
    if isinstance(value, Mapping):
        return {key: escaped(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(inner) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        value = copy.copy(value)
        for each in fields(value):
            object.__setattr__(value, each.name, escaped(getattr(value, each.name)))
        return value
    # Other texts stay as they are: one may be a member of an enumeration.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) and "${" in value else value


def takes_any(part: Any) -> bool:
    """Whether a part takes arguments of any name, as `def __init__(self, **settings)` does."""
    try:
        return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(part).parameters.values())
    except (TypeError, ValueError):  # of what is no Python function
        return False


def parameters_of(part: Any) -> type | None:
    """The parameters that a part is called with, as a dataclass; None where it has none.

    A parameter whose type OmegaConf does not know, or with which a file of settings does not keep the default, takes
    any value, or values of its default's type. One whose default no type keeps is left out.
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
        has_default = each.default is not each.empty
        own: Any = _given(each.default) if has_default else field()
        for hint in (hints.get(each.name, Any), Any, _type_of(each.default)):
            try:
                OmegaConf.structured(with_defaults(make_dataclass("Parameter", [(each.name, hint, own)])))
                if has_default and not _is_kept(hint, each.default):
                    continue
            except (OmegaConfBaseException, ValueError, TypeError, AssertionError):
                continue
            found.append((each.name, hint, own))
            break
    return make_dataclass("Parameters", found, kw_only=True) if found else None


def lacks_plain_default(part: Any, name: str) -> str:
    """Return why a parameter of a part is none of `parameters_of`; "" where the part has no parameter of this name."""
    with contextlib.suppress(TypeError, ValueError):  # of what is no Python function
        if name in (parameters := inspect.signature(part).parameters):
            default = parameters[name].default
            return (
                f"it is a parameter, and a file of settings does not keep its default {default!r}: give it a plain one"
            )
    return ""
