"""Cache of Hydra's compositions: thousands of tests load settings, and each composition takes Hydra 0.1 s.

The files that a choice of presets asks for are read and merged once, without those of Hydra's own settings, which no
test reads. The values of the words change a copy. The settings of a user's file count with what they are: the same word
stands for another file in the next test. Where something cannot be composed, Hydra does it anew, and says why.
"""

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

are_kept = True
"""False: Hydra does everything anew."""

_OF_FILES = ("experiment/file", "experiment/presets")
"""Names under which `config.load` stores a user's file."""

_LOADERS = ("SafeLoader", "get_yaml_loader.<locals>.OmegaConfLoader")
"""Those of YAML with which settings are read."""

_compose, _read, _load_yaml = hydra.compose, ConfigRepository.load_config, yaml.load
_files_read: dict[Any, bytes] = {}
_texts_read: dict[tuple[str, str], bytes] = {}
_merged: dict[Any, bytes] = {}
"""Pickled, as those of the files: what is unpickled is a copy, and is made six times as fast as by `deepcopy`."""


def install() -> None:
    """Have them used. Before impala_llm.config is imported, which takes `hydra.compose` from there."""
    hydra.compose = compose
    ConfigRepository.load_config = read
    yaml.load = load_yaml


def compose(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """`hydra.compose`."""
    if are_kept:
        try:
            return _composed(name, overrides)
        except Exception:  # whatever it is: Hydra raises its own below
            pass
    return _compose(name, overrides=list(overrides))


def read(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """`ConfigRepository.load_config`, which parses YAML. A copy: what is merged becomes a part of the whole."""
    if not are_kept or _is_of_file(config_path):
        return _read(repository, config_path)
    key = (config_path, _sources(repository))
    if key not in _files_read:
        if (found := _read(repository, config_path)) is None:
            return None
        _files_read[key] = pickle.dumps(found)
    result = pickle.loads(_files_read[key])
    assert isinstance(result, ConfigResult)
    return result


def load_yaml(stream: Any, Loader: Any) -> Any:  # noqa: N803
    """`yaml.load`, which takes 0.04 s for the file of a run, and is called twice whenever that is read."""
    if not are_kept or not isinstance(stream, str) or Loader.__qualname__ not in _LOADERS:
        return _load_yaml(stream, Loader)
    key = (stream, Loader.__qualname__)  # OmegaConf makes its loader anew for each file
    if key not in _texts_read:
        _texts_read[key] = pickle.dumps(_load_yaml(stream, Loader))
    return pickle.loads(_texts_read[key])


def _composed(name: str, words: Sequence[str]) -> DictConfig:
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    overrides = [_parsed(word) for word in words]
    loader.validate_sweep_overrides_legal(overrides, run_mode=hydra.types.RunMode.RUN, from_shell=False)
    presets = [override for override in overrides if _is_choice(override, loader)]
    config = _of_presets(name, presets, loader)
    loader._apply_overrides_to_config([override for override in overrides if override not in presets], config)
    return config


@functools.cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


def _is_choice(override: Override, loader: ConfigLoaderImpl) -> bool:
    return not isinstance(override.value(), dict) and loader.repository.group_exists(override.key_or_group)


def _of_presets(name: str, presets: list[Override], loader: ConfigLoaderImpl) -> DictConfig:
    words = tuple(str(override.input_line) for override in presets)
    key = (name, words, _sources(loader.repository), _user_file() if any(map(_is_of_file, words)) else b"")
    if key not in _merged:
        repository = _repository(loader)
        defaults = create_defaults_list(repository, name, presets, prepend_hydra=False, skip_missing=False).defaults
        config = loader._compose_config_from_defaults_list(defaults, repository)
        OmegaConf.set_struct(config, True)
        _merged[key] = pickle.dumps(config)
    found = pickle.loads(_merged[key])
    assert isinstance(found, DictConfig)
    return found


def _repository(loader: ConfigLoaderImpl) -> CachingConfigRepository:
    """The loader's own repository: Hydra makes a copy, which is needed only if the search path is changed."""
    repository = CachingConfigRepository.__new__(CachingConfigRepository)
    repository.delegate, repository.cache = loader.repository, {}
    return repository


def _user_file() -> bytes:
    return pickle.dumps(ConfigStore.instance().repo["experiment"])


def _sources(repository: ConfigRepository) -> tuple[tuple[str, str], ...]:
    return tuple((source.provider, source.path) for source in repository.get_sources())


def _is_of_file(config_path: str) -> bool:
    """Whether a path, or a word that chooses it, belongs to the user's file."""
    return config_path.strip("/").removesuffix(".yaml").replace("=", "/") in _OF_FILES
