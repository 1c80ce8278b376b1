"""Parts by name: environments, agents, engines, credits, losses and metric writers, the packaged ones and your own.

A name is one of three: the short name of a packaged part (`parrot`); the name of an entry point that an installed
package has in the group of its kind (`impala_llm.envs`); or an import path, `module:object`, whose module lies in the
current directory or on PYTHONPATH.

Invariant: a name means one object, or is an error that says which names there are. Nothing is imported unless it is
named.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from impala_llm.part_signatures import (
    escaped,
    lacks_plain_default,
    other_methods,
    other_signature,
    parameters_of,
    takes_any,
    unusable_type,
    with_defaults,
    wrong_default,
    wrong_value,
)
from impala_llm.processes.stop_signals import ToldToStop

_OURS, _STDLIB = str(Path(__file__).parent) + os.sep, str(sysconfig.get_path("stdlib")) + os.sep
_PACKAGES = tuple(str(sysconfig.get_path(kind)) + os.sep for kind in ("purelib", "platlib"))
"""Folders of this package, of Python's library and of installed packages; one may lie in another."""


@dataclass(frozen=True)
class PartKind:
    """A kind of part."""

    key: str
    """Setting that names one."""
    options_key: str
    """Setting below which its options lie."""
    group: str
    """Group of entry points in which installed packages name theirs."""
    packaged: Mapping[str, Any]
    """Short name -> the part, or its import path."""
    base: type | None = None
    """Parts are dataclasses derived from it, whose fields are their options. None: parts are called, and their options
    are the fields of the dataclass that they have as attribute `Options`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Short name -> key below which the settings of a packaged part lie, where it has no options of this kind."""
    by_signature: bool = False
    """Where a part has no dataclass `Options`, its options are the parameters that it is called with."""
    arguments: str = ""
    """Arguments that parts of this kind without `base` are called with beside their options, with commas between."""
    protocol: str = ""
    """Import path of the protocol whose methods has what they return; of a part that is a class they are checked."""


ENVIRONMENTS = PartKind(
    "env.name",
    "env.args",
    "impala_llm.envs",
    {
        "webshop": "impala_llm.envs.webshop.suite:suite_from_config",
        "parrot": "impala_llm.envs.toy:ParrotSuite",
        "corridor": "impala_llm.envs.toy:CorridorSuite",
        "mixture": "impala_llm.envs.mixture:MixtureSuite",
        "tasks": "impala_llm.envs.task_file:TaskFileSuite",
        "gymnasium": "impala_llm.envs.gymnasium_text:GymnasiumSuite",
        "textarena": "impala_llm.envs.textarena:TextArenaSuite",
        "textworld": "impala_llm.envs.textworld:TextWorldSuite",
        "scienceworld": "impala_llm.envs.scienceworld:ScienceWorldSuite",
        "verifiers": "impala_llm.envs.verifiers:VerifiersSuite",
        "openenv": "impala_llm.envs.openenv:OpenEnvSuite",
        "reasoning_gym": "impala_llm.envs.reasoning_gym:ReasoningGymSuite",
    },
    settings={"webshop": "env.webshop"},
    by_signature=True,
    protocol="impala_llm.envs.base:Suite",
)
"""Suites, as envs/base.py describes them."""
ENGINES = PartKind(
    "engine.name",
    "engine.options",
    "impala_llm.engines",
    {"torch": "impala_llm.engines:torch_engine", "sglang": "impala_llm.engines:sglang_engine"},
    settings={"torch": "engine", "sglang": "engine"},
    arguments="setup",
    protocol="impala_llm.engines.base:Engine",
)
"""Called with an `EngineSetup` of engines/base.py, they return an `Engine`."""
VERIFIERS = PartKind(
    "env.args.verifier",
    "env.args.verifier_args",
    "impala_llm.verifiers",
    {
        **{name: f"impala_llm.envs.answers:{name}" for name in ("exact", "number", "maths")},
        "reward_model": "impala_llm.reward_model:score",
    },
)
"""Called with an answer (str), its task (dict) and env.args.verifier_args, they return a score between 0 and 1."""
AGENTS = PartKind("agent.name", "", "impala_llm.agents", {}, arguments="task, client")
"""Functions `agent(task, client)`, mostly async: see docs/agents.md. They have no options."""
OPPONENTS = PartKind(
    "env.args.opponent",
    "env.args.opponent_args",
    "impala_llm.opponents",
    {"random": "impala_llm.envs.textarena:RandomPlayer", "policy": "impala_llm.frozen_policy:FrozenPolicy"},
)
"""Called with a seed and env.args.opponent_args, they return a player, as envs/textarena.py describes it."""
METRIC_WRITERS = PartKind(
    "run.metric_writers",
    "",
    "impala_llm.metric_writers",
    {"tensorboard": "impala_llm.observability.tensorboard:TensorBoardWriter"},
    arguments="folder",
    protocol="impala_llm.observability.writers:Writer",
)
"""Called with a folder, they return a `Writer` of observability/writers.py. They have no options."""


def check(kind: PartKind, name: str) -> None:
    """Import a part unless it is a packaged one. Raises ValueError where `load` does."""
    if import_path(kind, name) not in kind.packaged.values():
        load(kind, name)


def load(kind: PartKind, name: str) -> Any:
    """Import the part that a name means.

    Raises:
        ValueError: there is none, its import fails, or it is no part of this kind.
    """
    path = import_path(kind, name)
    if not isinstance(path, str):
        return path
    try:
        found = _imported(path)
    except ValueError as error:
        raise ValueError(f"{kind.key}={name} {error}") from error
    if kind.base is None and not callable(found):
        raise ValueError(f"{kind.key}={name} is a {type(found).__name__}: name a class or a function")
    if kind.base and not isinstance(found, type):
        raise ValueError(f"{kind.key}={name} is a {type(found).__name__}: name a class")
    if kind.base and not (issubclass(found, kind.base) and is_dataclass(found)):
        raise ValueError(
            f"{kind.key}={name} cannot be used: derive it from {kind.base.__module__}.{kind.base.__name__}"
        )
    if kind.base and inspect.isabstract(found):
        raise ValueError(f"{kind.key}={name} cannot be used: it lacks {', '.join(sorted(found.__abstractmethods__))}")
    annotations = {} if kind.base is None or "__dataclass_fields__" in vars(found) else inspect.get_annotations(found)
    if own := [option for option, annotation in annotations.items() if "ClassVar" not in str(annotation)]:
        raise ValueError(f"{kind.key}={name} cannot be used: its {own[0]} is an option only with @dataclass above it")
    if path not in kind.packaged.values() and (reason := _misuse(kind, found)):
        raise ValueError(f"{kind.key}={name} cannot be used: {reason}")
    return found


def _misuse(kind: PartKind, part: Any) -> str:
    """Return why a part of the user's cannot be called as those of its kind are, as far as signatures tell; else ""."""
    arguments = [word.strip() for word in kind.arguments.split(",") if word]
    if arguments and (takes := other_signature(part, arguments)):
        return f"it takes {takes}, and is called with ({', '.join(arguments)})"
    like = kind.base or (_imported(kind.protocol) if kind.protocol else None)
    return other_methods(part, like) if like is not None and isinstance(part, type) else ""


def import_path(kind: PartKind, name: str) -> Any:
    """Return the import path that a name stands for, or the packaged part itself. Imports nothing.

    Raises:
        ValueError: there is none.
    """
    if name in kind.packaged:
        return kind.packaged[name]
    if ":" in name and not name.startswith(("{", "[")):
        return name
    installed = installed_parts(kind)
    if name in installed:
        return installed[name]
    names = [*kind.packaged, *(each for each in installed if each not in kind.packaged)]
    hint = part_suggestion(name, names)
    choices = f"choose one of {', '.join(names)}, or " if names else "give "
    own = "module:Class" if kind.base else "module:Class or module:function"
    raise ValueError(f"{kind.key}={name} is not known: {hint}{choices}your own as {own}")


def closest(name: str, names: Iterable[str]) -> str:
    """Return the one of `names` that is most like `name`, else one that begins like it; "" if none. Case is ignored."""
    if not name:
        return ""
    lower = {each.lower(): each for each in names}
    begins = {each[: len(name)]: whole for each, whole in lower.items()}
    found = [known[each] for known in (lower, begins) for each in difflib.get_close_matches(name.lower(), known, n=1)]
    return next(iter(found), "")


def suggestion(name: str, names: Iterable[str], before: str = "") -> str:
    """Return "did you mean ...? " with the closest name, preceded by `before`; "" if none is like it."""
    close = closest(name, names)
    return f"did you mean {before}{close}? " if close else ""


def part_suggestion(name: str, names: Iterable[str], before: str = "") -> str:
    """Return `suggestion` for the name of a part, else `module:object` where it was written `module.object`."""
    own = [":".join(name.rsplit(".", 1))] if "." in name.strip(".") else []
    return suggestion(name, names, before) or suggestion(name, own, before)


def installed_parts(kind: PartKind) -> dict[str, str]:
    """Return the import paths that installed packages have given names of this kind, without their extras in []."""
    return {each.name: "".join(each.value.partition("[")[0].split()) for each in entry_points(group=kind.group)}


def short_name(kind: PartKind, name: Any) -> str:
    """Return the short name of the packaged part that a name of any sort leads to; any other value as a text."""
    text = "null" if name is None else str(name)
    if text in kind.packaged:
        return text
    path = text if ":" in text else installed_parts(kind).get(text)
    for short, part in kind.packaged.items():
        if path == (part if isinstance(part, str) else f"{part.__module__}:{part.__qualname__}"):
            return short
    return text


def _imported(path: str) -> Any:
    """Import `module:object`. Raises ValueError, to be read after the setting."""
    module, _, names = path.partition(":")
    if not module or not names:
        raise ValueError("is no import path: write module:Class")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that nothing of the user's hides a module of ours
    found: Any = None
    try:
        found = importlib.import_module(module)
    except (KeyboardInterrupt, ToldToStop):
        raise
    except BaseException as error:  # a module is other people's code; a script's last line may be sys.exit()
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        is_absent = bool(missing) and f"{module}.".startswith(f"{missing}.")
        fix = f"put {module} into the current directory or onto PYTHONPATH" if is_absent else "correct it"
        reason = " ".join(str(error).split())
        where = "" if is_absent else raised_at(error)
        raise ValueError(f"cannot be imported ({module}: {type(error).__name__}: {reason}{where}): {fix}") from error
    parts = names.split(".")
    for place, name in enumerate(parts):
        holder, found = found, getattr(found, name, None)
        if found is None:
            meant = [closest(name, [each for each in dir(holder) if not each.startswith("_")]), *parts[place + 1 :]]
            there = functools.reduce(lambda inner, each: getattr(inner, each, None), meant, holder)
            hint = "" if there is None else f": did you mean {module}:{'.'.join(parts[:place] + meant)}?"
            raise ValueError(f"is not there: {module} has no {names}{hint}")
    return found


def read_word(word: str) -> tuple[str, Any]:
    """Key and value of `key=value` in Hydra's grammar; a list or mapping may be JSON, whose quoted keys that lacks.

    Raises:
        HydraException: it cannot be read, or has several values.
    """
    key, _, value = word.lstrip("+").partition("=")
    if value.startswith(("{", "[")):
        with contextlib.suppress(json.JSONDecodeError):
            return key, json.loads(value)
    [parsed] = OverridesParser.create().parse_overrides([word.lstrip("+")])
    if parsed.is_sweep_override():
        raise HydraException(f"Ambiguous value for argument '{word}'")  # as Hydra says it of other words
    return parsed.key_or_group, parsed.value()


def option_fields(part: type) -> list[Field[Any]]:
    """Return the fields of a credit or loss that are its options."""
    return [f for f in fields(part) if f.name != "name"]


def option_values(kind: PartKind, values: Any) -> dict[str, Any]:
    """Return the options of a part by name; none where there are no values.

    Raises:
        ValueError: they are no mapping of names.
    """
    key = kind.options_key
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(f"{key}={values} sets no option: write {key.rpartition('.')[2]}: {{NAME: value}}")
    if others := [name for name in values or {} if not isinstance(name, str)]:
        raise ValueError(f"{key}={values}: the name of an option is a text, and {others[0]} is none: write NAME: value")
    return dict(values or {})


def make_options(kind: PartKind, name: str, options: type | None, values: Any) -> Any:
    """Make the options of a part from plain values.

    Args:
        name: of the part, for messages.
        options: their dataclass, which for a kind with `base` is the part; None where there are none.
        values: by field; None for none.

    Returns:
        The dataclass; None where the part has no options.

    Raises:
        ValueError: an unknown option, a wrong type, an option without default that is not given.
    """
    key, chosen, values = kind.options_key, f"{kind.key}={name}", option_values(kind, values)
    declared = [] if options is None else option_fields(options) if kind.base else fields(options)
    own = [f.name for f in declared]
    for option, value in values.items():
        if option not in own:
            meant = _meant_option(kind, name, option, own)
            raise ValueError(f"{key}.{option}={value} is no option of {chosen}: {meant}")
    if options is None:
        return None
    for f in declared:
        if reason := unusable_type(f, options):
            raise ValueError(f"{chosen} cannot be used: its option {reason}")
    option, value, defaults = "", None, None
    try:
        defaults = with_defaults(options)
        read = merged = OmegaConf.structured(defaults)
        for option, value in ({**values, "name": name} if kind.base else values).items():
            merged = OmegaConf.merge(merged, {option: escaped(value)})
        option = ""  # what is wrong from here on, the error says
        return OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        missing = f"{key}.{error.full_key} is not set, and {chosen} has no default for it: set it"
        raise ValueError(missing) from None
    except OmegaConfBaseException as error:
        if not option and (found := str(error.full_key).partition(".")[0]) in values:
            option, value = found, values[found]
        if option:
            raise ValueError(wrong_value(key, read, option, value, error)) from None
        raise ValueError(f"{chosen} cannot be used: {wrong_default(defaults, error)}") from None
    except Exception as error:  # its __post_init__ is other people's code
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{chosen} refuses its options: {type(error).__name__}: {reason}") from error


def make_part(kind: PartKind, settings: Mapping[str, Any]) -> Any:
    """Make the part that settings name, beside its options, of a kind whose parts are dataclasses. For what is raised
    see `load` and `make_options`."""
    name = short_name(kind, settings.get("name"))
    return make_options(kind, name, load(kind, name), {key: value for key, value in settings.items() if key != "name"})


def name_part(kind: PartKind, name: str, values: Any) -> tuple[str, Any]:
    """Return the short name of a part and its options, of a kind whose parts are called later on.

    Raises:
        ValueError: see `load` and `make_options`.
    """
    name, values = short_name(kind, name), option_values(kind, values)
    part = None if name in kind.settings else load(kind, name)
    options: Any = getattr(part, "Options", None)
    if options is not None and not (isinstance(options, type) and is_dataclass(options)):
        raise ValueError(f"{kind.key}={name} cannot be used: its class Options is no dataclass; make it one")
    if part is None or options is not None or not kind.by_signature:
        return name, make_options(kind, name, options, values)
    parameters = parameters_of(part)
    own = [] if parameters is None else [each.name for each in fields(parameters)]
    others = {option: value for option, value in values.items() if option not in own}
    if not takes_any(part):
        for option, value in others.items():
            if reason := lacks_plain_default(part, option):
                raise ValueError(f"{kind.options_key}.{option}={value} is no option of {kind.key}={name}: {reason}")
        others = {}
    named = make_options(kind, name, parameters, {k: v for k, v in values.items() if k not in others})
    return name, {**({} if named is None else vars(named)), **others} or None


def check_call(kind: PartKind, name: str, part: Any, *given: Any, **arguments: Any) -> None:
    """Raise ValueError unless a part can be called with these arguments. arguments: options, by name."""
    try:
        inspect.signature(part).bind(*given, **arguments)
    except TypeError as error:
        raise ValueError(f"{kind.key}={name} cannot be called: {error}: correct {kind.options_key}.*") from None
    except ValueError:  # it does not say what it takes
        pass


def parts_with(kind: PartKind, option: str) -> list[str]:
    """Short names of the packaged parts that have an option, sorted."""
    parts = {name: part for name, part in kind.packaged.items() if is_dataclass(part)}
    return sorted(name for name, part in parts.items() if option in {f.name for f in fields(part)})


def _meant_option(kind: PartKind, name: str, option: str, own: Sequence[str]) -> str:
    """The option that may be meant, and the parts that have it where the chosen one has not."""
    parts = [part for part in kind.packaged.values() if is_dataclass(part)]
    options = {*own, *(f.name for part in parts for f in fields(part) if f.name != "name")}
    close = difflib.get_close_matches(option, sorted(options), n=1)
    close = close or difflib.get_close_matches(option, own, n=1, cutoff=0.5)
    if close and close[0] in own:
        return f"did you mean {kind.options_key}.{close[0]}?"
    if close:
        having = parts_with(kind, close[0])
        it = "it" if close[0] == option else f"{kind.options_key}.{close[0]}"
        way = f"set {kind.key}={having[0]}" if len(having) == 1 else "choose one of these"
        return f"{', '.join(having)} {'has' if len(having) == 1 else 'have'} {it}; leave it out, or {way}"
    if name in kind.settings:
        return f"its settings are {kind.settings[name]}.*"
    return f"its options are {', '.join(own)}" if own else "it has no options"


def raised_at(error: BaseException) -> str:
    """Return `own_line` of the place at which an error arose."""
    return own_line(traceback.extract_tb(error.__traceback__))


def own_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return ", in FILE:LINE" for the line of somebody's own code on a stack; empty if there is none.

    That is the innermost frame outside of this package, of installed packages and of Python's library; else the
    outermost one of an installed package, and the innermost frame of all where the code is ours.
    """
    frames = [frame for frame in stack if not frame.filename.startswith("<")]
    outside = [frame for frame in frames if is_outside(frame.filename)]
    own = [frame for frame in outside if not frame.filename.startswith(_PACKAGES)] or outside[:1] or frames
    return f", in {own[-1].filename}:{own[-1].lineno}" if own else ""


def is_outside(filename: str) -> bool:
    """Return whether a file belongs neither to this package nor to Python's library."""
    is_library = filename.startswith(_STDLIB) and not filename.startswith(_PACKAGES)
    return not (is_library or filename.startswith(_OURS))
