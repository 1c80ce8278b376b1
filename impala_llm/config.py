"""Composes the settings with Hydra and has them checked. Meaning of each: settings.py; rules: checks/.

Invariant: every `Config` has been checked. `load` composes it from configs/ and `key=value` overrides, and fails before
any process, socket or file exists, with sentences that name key, value and fix. No module but this one and
part_settings.py reads raw Hydra dicts.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from impala_llm.checks.familiar_names import FAMILIAR_CHOICES, meant_by, unknown_choice
from impala_llm.checks.idle_settings import in_force
from impala_llm.checks.settings_checks import problems
from impala_llm.part_settings import (
    algorithm_parts,
    choose_part,
    culprit,
    flat,
    kind_of,
    kinds,
    leave_options_behind,
    part_values,
    without_value,
)
from impala_llm.part_signatures import escaped, list_expected, plain, type_expected
from impala_llm.plugs import (
    AGENTS,
    ENGINES,
    ENVIRONMENTS,
    METRIC_WRITERS,
    PartKind,
    check,
    installed_parts,
    make_part,
    name_part,
    option_fields,
    parts_with,
    read_word,
    short_name,
)
from impala_llm.processes.cgroups import num_cores, thread_limit
from impala_llm.settings import PACKAGE, AlgorithmConfig, Config, EngineConfig, EnvConfig, leaves, written


class ConfigError(ValueError):
    """Settings that cannot work. Each line of the message names a key, its value and the fix."""

    MOST_LINES = 3

    @classmethod
    def of(cls, found: Sequence[str]) -> "ConfigError":
        """With a line for each problem, or for the first ones and the number of the others."""
        if len(found) <= cls.MOST_LINES:
            return cls("\n".join(found))
        shown = found[: cls.MOST_LINES - 1]
        return cls("\n".join([*shown, f"and {len(found) - len(shown)} more problems: mend these first"]))


@dataclass
class _RawAlgorithm(AlgorithmConfig):
    """As it stands in files, before the names of its parts are looked up."""

    credit: Any = field(default_factory=dict)
    loss: Any = field(default_factory=dict)


@dataclass
class _RawConfig(Config):
    algorithm: _RawAlgorithm = field(default_factory=_RawAlgorithm)


ConfigStore.instance().store(name="schema", node=_RawConfig)


_NO_REFERENCE = "it is no reference"
_Section = TypeVar("_Section", EnvConfig, EngineConfig)


def load(overrides: Sequence[str] = (), left_out: Sequence[str] = ()) -> Config:
    """Compose, type-check and check a configuration.

    Args:
        overrides: Hydra's `key=value` and `group=choice` words, such as `experiment=quickstart learner.batch_size=32`.
            `experiment` may also be the path of a YAML file: one like those in configs/experiment/, or the config.yaml
            that a run has left in its folder.
        left_out: beginnings of keys, such as `algorithm.`: what such a file sets there is not read.

    Raises:
        ConfigError: an unknown key, a wrong type, an impossible value or combination.
    """
    overrides = [present_word(word) for word in overrides]
    refuse_unknown_keys(overrides)
    _refuse_bad_values(overrides)
    _refuse_whole_methods(overrides)
    overrides = [f"{word.removesuffix('=None')}=null" if word.endswith("=None") else word for word in overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            words = _hydra_words(overrides, left_out)
            raw = compose("config", overrides=words)
            if "experiment=file" in words:
                leave_options_behind(raw, words)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_explain(error, overrides)) from None
    try:
        for kind in kinds():
            choose_part(raw, kind, overrides)
        composed = OmegaConf.to_object(raw)
        assert isinstance(composed, _RawConfig)
        algorithm = {
            name: make_part(kind, part_values(getattr(composed.algorithm, name)))
            for name, kind in algorithm_parts().items()
        }
        for writer in composed.run.metric_writers:
            check(METRIC_WRITERS, str(writer))  # which OmegaConf lets be a mapping
        if composed.agent.name is not None:
            check(AGENTS, composed.agent.name)
        env, engine = _with_part(composed.env, ENVIRONMENTS), _with_part(composed.engine, ENGINES)
    except InterpolationValidationError as error:  # it leads to a value of a wrong type
        raise ConfigError(_explain(error, overrides)) from None
    except InterpolationResolutionError as error:
        raise ConfigError(_explain_reference(error, overrides, raw)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts = {"algorithm": AlgorithmConfig(**(vars(composed.algorithm) | algorithm)), "env": env, "engine": engine}
    config = Config(**(vars(composed) | parts))
    for section in (config.run, config.sft, config.demonstrations):
        section.dir = os.path.expanduser(section.dir)
    if reasons := problems(config, overrides):
        raise ConfigError.of(reasons)
    return config


def _with_part(section: _Section, kind: PartKind) -> _Section:
    """A section with the short name and the options of the part that it names. ValueError where that cannot be."""
    slot = kind.options_key.rpartition(".")[2]
    name, options = name_part(kind, section.name, getattr(section, slot))
    return replace(section, **{"name": name, slot: options})


def present_word(word: str) -> str:
    """A word of the command line as the settings have it.

    `env=module:Class`, and `env=NAME` of an installed part that no preset has the name of, mean `env.name=...`, as for
    engines.
    """
    key, equals, value = word.lstrip("+").partition("=")
    if value.startswith("~/"):  # which no shell expands there, and Hydra does not read
        value = os.path.expanduser(value)
        word = f"{key}={value}"
    for kind in (ENVIRONMENTS, ENGINES):
        group = kind.key.partition(".")[0]
        is_path = ":" in value and not value.startswith(("{", "["))  # a mapping sets several settings of the group
        is_named = key == group and (is_path or value in installed_parts(kind))
        if is_named and not os.path.isfile(config_folder() / group / f"{value}.yaml"):
            return f"{kind.key}={value}"
    return word


def _hydra_words(overrides: Sequence[str], left_out: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them, without those of parts, which `choose_part` reads: the settings of an
    `experiment=FILE.yaml` are an experiment of that name."""
    words = []
    for word in (word.lstrip("+") for word in overrides if kind_of(word) is None):
        key, _, value = word.partition("=")
        if key == "experiment" and Path(value).suffix in (".yaml", ".yml"):
            file = _settings_file(Path(value))
            for name, of_name in flat(OmegaConf.to_container(file)):
                if not isinstance(of_name, dict) and (reason := _of_group(name, known_keys())):
                    raise ConfigError(f"settings file {value}: {name}={written(of_name)}: {reason}")
            defaults = {"defaults": file.defaults} if "defaults" in file else {}
            ConfigStore.instance().store(group="experiment", name="presets", node=defaults, package="_global_")
            settings = _with_presets(file, overrides, left_out)
            if missing := without_value(settings, overrides):
                raise ConfigError(f"settings file {value}: {missing}")
            ConfigStore.instance().store(group="experiment", name="file", node=settings, package="_global_")
            word = "experiment=file"
        words.append(word)
    return words


def _with_presets(file: DictConfig, overrides: Sequence[str], left_out: Sequence[str]) -> DictConfig:
    """The settings of a file under the presets that words choose, such as `algorithm=vtrace`, which take the place of
    those in the file: a run's config.yaml holds every setting, and would hide them.

    A preset's settings go over the file's. What the group's presets set in its own section, and what the file has
    elsewhere from the preset that it was made with, gives way to the defaults. All else in the file stays.
    """
    settings = {key: value for key, value in flat(OmegaConf.to_container(file)) if not key.startswith(tuple(left_out))}
    for group, _, choice in (word.lstrip("+").partition("=") for word in overrides):
        if group == "experiment" or not (config_folder() / group / f"{choice}.yaml").is_file():
            continue  # no choice of a preset, or one that Hydra refuses
        presets = _presets(group)
        dropped = set[str]()
        for preset in presets.values():
            own = {key for key in preset if key.startswith(f"{group}.")}
            is_origin = all(settings.get(key) == preset[key] for key in own)
            dropped |= own | {key for key in preset if is_origin and settings.get(key) == preset[key]}
        chosen, of_file = presets[choice], compose("config", overrides=["experiment=presets"])
        for kind in kinds():
            name = f"{kind.key}.name" if kind.base else kind.key
            if name not in chosen:
                continue
            before = settings.get(name, settings.get(kind.key, OmegaConf.select(of_file, name)))
            dropped.add(kind.key)  # where the file has a name alone
            if short_name(kind, chosen[name]) != short_name(kind, before):  # its options are those of another part
                dropped |= {key for key in settings if f"{key}.".startswith(f"{kind.options_key}.")}
        settings = {key: value for key, value in settings.items() if key not in dropped} | chosen
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, last = key.split(".", 2)  # the name of an option may have dots
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return OmegaConf.create(nested)


@cache
def _presets(group: str) -> dict[str, dict[str, Any]]:
    """Full key -> value of each preset of a group, by the preset's name. Hydra must be initialised."""
    names = [path.stem for path in (config_folder() / group).glob("*.yaml")]
    return {name: dict(flat(OmegaConf.to_container(compose(f"{group}/{name}")))) for name in names}


def _settings_file(path: Path) -> DictConfig:
    """Contents of a YAML file with settings. Raises ConfigError if the file is not one."""
    try:
        text = path.expanduser().read_text()
        settings = OmegaConf.create(text) if isinstance(yaml.safe_load(text), dict | list | None) else None
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read ({error.strerror}): correct the path") from None
    except GrammarParseError as error:
        raise ConfigError(_unresolved(f"settings file {path}: {error.full_key}", _NO_REFERENCE)) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:  # not of UTF-8 included
        line = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"settings file {path}{line}: this is not YAML ({reason}): correct it") from None
    if not isinstance(settings, DictConfig) or not settings:
        raise ConfigError(f"settings file {path} holds no settings: write lines such as `learner: {{batch_size: 32}}`")
    return settings


@cache
def known_keys() -> Mapping[str, object]:
    """All settings with their defaults, those of every built-in credit and loss included."""
    keys = {key: default for key, default in leaves(Config()) if kind_of(key) not in algorithm_parts().values()}
    for kind in algorithm_parts().values():
        keys[kind.key] = None
        for part in kind.packaged.values():
            keys |= {f"{kind.options_key}.{f.name}": f.default for f in option_fields(part)}
    return keys


def refuse_unknown_keys(overrides: Sequence[str]) -> None:
    """Hydra would take `+key=value` of any key, and leave out `~key`."""
    known = known_keys()
    parts = {key.rsplit(".", n)[0] for key in known for n in range(1, key.count(".") + 1)}
    found = []
    for word in overrides:
        key, equals, value = word.partition("=")
        name = key.lstrip("+")
        if not equals or name.startswith("~"):
            found.append(f"{word} is no setting: write key=value, such as learner.batch_size=32")
        elif name != name.strip():
            found.append(f"{word} has spaces around its =: write {name.strip()}={value.strip()}")
        elif kind_of(name) is not None:
            continue  # what options there are, the part that is chosen says
        elif name not in known and name not in parts and name not in _groups():
            found.append(f"{name}={value} is an unknown key: {_suggestion(name, [*known, *_groups()])}")
    if found:
        raise ConfigError("\n".join(found))


def _suggestion(key: str, known: Sequence[str]) -> str:
    """A sentence with the setting that an unknown key may stand for, and, of an option, the parts that have it."""
    if (meant := meant_by(key, known)) is None:
        return "`impala-llm train --help WORD` searches all keys"
    kind = kind_of(meant)
    having = parts_with(kind, meant.rpartition(".")[2]) if kind else []
    owners = f", which {', '.join(having)} {'has' if len(having) == 1 else 'have'}" if having else ""
    return f"did you mean {meant}{owners}?"


def _unknown_in(file: str, known: Mapping[str, object]) -> list[str]:
    """Keys of a file that are no settings, each with the setting that it may stand for."""
    keys = [key for key, _ in flat(OmegaConf.to_container(_settings_file(Path(file))))]
    unknown = [key for key in keys if key not in known and key != "defaults" and kind_of(key) is None]
    meant = {key: meant_by(key, list(known)) for key in unknown}
    return [f"{key} (did you mean {name}?)" if name else key for key, name in meant.items()]


def _groups() -> list[str]:
    """Names of the groups of choices in configs/."""
    return [path.name for path in config_folder().iterdir() if path.is_dir()]


def config_folder() -> Path:
    """configs/: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def to_yaml(config: Config, only_in_force: bool = False) -> str:
    """The configuration as YAML that `load` reads; with `only_in_force` without what has no effect in `train`."""
    settings = escaped(plain(asdict(config)))
    for section, usual in vars(Config()).items():
        if "dir" in vars(usual) and getattr(config, section).dir == usual.dir:
            settings[section]["dir"] = usual.dir  # it follows the run.name of whoever reads it
    return OmegaConf.to_yaml(OmegaConf.create(in_force(settings, config) if only_in_force else settings))


def threads_per_process(config: Config) -> int:
    """Threads of each learner rank and actor: together no more than this host's cores, each no more than the limit.

    Oversubscribed OpenMP barriers spin and cost 5 to 100 times the work.
    """
    return min(thread_limit(), max(1, num_cores() // max(1, config.learner_processes_here + config.num_actors)))


def _of_group(key: str, known: Mapping[str, object]) -> str:
    """Reason why a key takes no value: it is a group of settings. Empty for any other key."""
    inside = [f"{name}={default}" for name, default in known.items() if name.startswith(f"{key}.")]
    if not inside or key in known or kind_of(key) is not None:
        return ""
    return f"{key} is a group of settings: set them one by one, such as {inside[0]}"


def _file_of(overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The file of settings that words name, and what it sets by full key; "" and nothing where they name none."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides).get("experiment", "")
    file = given if given.endswith((".yaml", ".yml")) else ""
    return file, dict(flat(OmegaConf.to_container(_settings_file(Path(file))))) if file else {}


def _refuse_bad_values(overrides: Sequence[str]) -> None:
    """Refuse a word in which `${` begins no reference, or a mapping leaves a value open. A word that cannot be read at
    all is refused later."""
    for word in (word for word in overrides if "${" in word or "???" in word):
        try:
            key, value = read_word(word)
            setting = OmegaConf.create({key: value})
            if isinstance(value, dict) and (missing := without_value(setting, overrides)):
                raise ConfigError(missing)
        except GrammarParseError:
            raise ConfigError(_unresolved(word, _NO_REFERENCE)) from None
        except (HydraException, OmegaConfBaseException):
            continue


def _refuse_whole_methods(overrides: Sequence[str]) -> None:
    """Refuse the name of a method, such as GRPO, in place of a loss or a credit, which are parts of it."""
    for key, _, value in (word.lstrip("+").partition("=") for word in overrides):
        method, kind = FAMILIAR_CHOICES.get(f"algorithm={value}".lower()), kind_of(key)
        if not method or kind is None or key not in (kind.key, f"{kind.key}.name") or not key.startswith("algorithm."):
            continue
        if value.lower() not in kind.packaged and value not in installed_parts(kind):
            raise ConfigError(f"{key}={value} is not known: as a whole it is algorithm={method}")


def _unresolved(setting: str, reason: str) -> str:
    """Sentence on a setting with a reference that cannot be followed."""
    fix = "write the value itself, with \\${ for ${, or correct the reference"
    return f"{setting} cannot be resolved ({reason}): {fix}"


def _explain_reference(error: InterpolationResolutionError, overrides: Sequence[str], raw: DictConfig) -> str:
    """Sentence on the reference in the composed settings that leads nowhere."""
    reason = str(error).splitlines()[0].rpartition(": ")[2].strip('"')
    if "ecursive" not in reason:
        reason = f"what it refers to does not exist, or is not set: {reason}"
    (key, value), (file, in_file) = culprit(raw, error), _file_of(overrides)
    where = f"settings file {file}: " if key in in_file and in_file[key] == value else ""
    return _unresolved(f"{where}{key}={value}", reason)


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence with key, value and fix from what Hydra or OmegaConf raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    known = known_keys()
    file, in_file = _file_of(overrides)
    for key, value in given.items():
        choices = sorted(p.stem for p in (config_folder() / key).glob("*.yaml")) if key in _groups() else []
        if choices and value not in (*choices, file or None):
            return unknown_choice(key, value, choices)
        if key not in _groups() and (reason := _of_group(key, known)):
            return f"{key}={value}: {reason}"
    for cause in causes:
        full_key = getattr(cause, "full_key", None)
        # A problem of a word of the command line names the word; any other one is in a file.
        where = f"settings file {file}: " if file and full_key not in given else ""
        if isinstance(cause, OverrideParseException):
            return f"{cause.override} cannot be read: quote a value with special characters, as in \"key='a=b'\""
        if isinstance(cause, ConfigKeyError) and full_key:
            if where and len(unknown := _unknown_in(file, known)) > 1:
                return f"{where}{len(unknown)} keys are unknown: {', '.join(unknown)}; correct them"
            return f"{where}{full_key} is an unknown key: {_suggestion(full_key, list(known))}"
        if isinstance(cause, OmegaConfBaseException) and full_key:
            alone = full_key.removesuffix(".name")
            if kind_of(alone) is not None and alone in (*given, *in_file):  # the name of a part alone
                full_key = alone
            there = OmegaConf.select(_settings_file(Path(file)), full_key) if where else "?"
            value = given.get(full_key, written(in_file.get(full_key, there)))
            # Parts that have an option of one name may have other defaults.
            has_default = full_key in known and kind_of(full_key) is None
            default = f"the default is {written(known[full_key])}" if has_default else "set it"
            reason = str(cause.msg or cause).splitlines()[0]
            is_list = isinstance(known.get(full_key), list) or "is not a ListConfig" in reason
            if is_list and value != "null" and not value.startswith(("[", "{")):
                expected = list_expected(full_key, value, known.get(full_key))
                return f"{where}{full_key}={value} has the wrong type: {expected}"
            if any(said in reason for said in ("is not Optional", "Incompatible value 'None'", "issing mandatory")):
                return f"{where}{full_key}={value} needs a value: {default}"
            return f"{where}{full_key}={value} has the wrong type: {type_expected(cause)}; {default}"
    said = str(causes[-1]).splitlines()[0]
    if match := re.search(r"Ambiguous value for argument '(.+?)'", said):
        return f"{match[1]} has several values, and a run has one: give one, or quote a text, as in \"key='a,b'\""
    where = f"settings file {file}: " if file else ""
    if file and (match := re.search(r"Could not load 'experiment/(.+?)'", said)):
        of_group = "a preset stands there with its group, as in `override /algorithm: vtrace`"
        return f"{where}defaults has {match[1]!r}, which is no settings file beside it: {of_group}"
    return f"{where}{said}: correct this setting"
