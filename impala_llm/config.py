"""Composes the settings with Hydra and has them checked. Meaning of each: settings.py; rules: checks/; messages about
what cannot be composed: config_explained.py.

Invariant: every `Config` has been checked. `load` composes it from configs/ and `key=value` overrides, and fails before
any process, socket or file exists, with sentences that name key, value and fix. No module but this one, its
neighbours config_*.py and part_settings.py reads raw Hydra dicts.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, InterpolationValidationError, OmegaConfBaseException

from impala_llm.checks.idle_settings import in_force
from impala_llm.checks.settings_checks import problems
from impala_llm.config_explained import explain, explain_reference, of_group, refuse_words
from impala_llm.config_files import ConfigError as ConfigError
from impala_llm.config_files import config_folder, known_keys, settings_file
from impala_llm.part_settings import (
    algorithm_parts,
    choose_part,
    flat,
    kind_of,
    kinds,
    leave_options_behind,
    part_values,
    without_value,
)
from impala_llm.part_signatures import escaped, plain
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
    short_name,
)
from impala_llm.processes.cgroups import num_cores, thread_limit
from impala_llm.settings import AlgorithmConfig, Config, EngineConfig, EnvConfig, written


@dataclass
class _RawAlgorithm(AlgorithmConfig):
    """As it stands in files, before the names of its parts are looked up."""

    credit: Any = field(default_factory=dict)
    loss: Any = field(default_factory=dict)


@dataclass
class _RawConfig(Config):
    algorithm: _RawAlgorithm = field(default_factory=_RawAlgorithm)


ConfigStore.instance().store(name="schema", node=_RawConfig)


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
    refuse_words(overrides)
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
        raise ConfigError(explain(error, overrides)) from None
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
        raise ConfigError(explain(error, overrides)) from None
    except InterpolationResolutionError as error:
        raise ConfigError(explain_reference(error, overrides, raw)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from None
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
            file = settings_file(Path(value))
            for name, of_name in flat(OmegaConf.to_container(file)):
                if not isinstance(of_name, dict) and (reason := of_group(name, known_keys())):
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
