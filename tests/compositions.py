"""What Hydra composes for the tests, each part of it once: thousands of them load settings, which takes it 0.1 s.

Files are read and merged once for each choice of presets; the values of the words change a copy. The settings of a
user's file are read anew: the same word stands for another file in the next test.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

are_kept = True
"""False: Hydra does everything anew."""

_OF_FILES = ("experiment/file", "experiment/presets")
"""Names under which `config.load` stores a user's file."""

_compose, _read = hydra.compose, ConfigRepository.load_config
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_files_read: dict[Any, ConfigResult] = {}
_merged: dict[Any, DictConfig] = {}


def install() -> None:
    """Have them used. Before impala_llm.config is imported, which takes `hydra.compose` from there."""
    hydra.compose = compose
    ConfigRepository.load_config = read
    ConfigLoaderImpl._compose_config_from_defaults_list = merge


def compose(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """`hydra.compose`. What the same words have given before is given again, the same object."""
    is_of_file = any(word in ("experiment=file", "experiment=presets") for word in overrides)
    if is_of_file or not are_kept:
        return _compose(name, overrides=list(overrides))
    return _composed(name, tuple(overrides))


@functools.cache
def _composed(name: str, words: tuple[str, ...]) -> DictConfig:
    return _compose(name, overrides=list(words))


def read(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """`ConfigRepository.load_config`, which parses YAML. The content is not copied: whoever changes it does that."""
    if not are_kept or _is_of_file(config_path):
        return _read(repository, config_path)
    key = (config_path, _sources(repository))
    if key not in _files_read and (found := _read(repository, config_path)) is not None:
        _files_read[key] = found
    return copy.copy(_files_read.get(key))


def merge(loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: CachingConfigRepository) -> DictConfig:
    """`ConfigLoaderImpl._compose_config_from_defaults_list`: all files that a choice of presets asks for, as one."""
    if not are_kept:
        return _merge(loader, defaults=defaults, repo=repo)
    key = (tuple((default.config_path, default.package, default.primary) for default in defaults), _sources(repo))
    if key in _merged:
        return copy.deepcopy(_merged[key])
    paths = [default.config_path or "" for default in defaults]
    for path in paths:
        repo.load_config(path)
    repo.cache = copy.deepcopy(repo.cache)  # what is merged becomes a part of the whole, and is changed with it
    found = _merge(loader, defaults=defaults, repo=repo)
    if not any(map(_is_of_file, paths)):
        _merged[key] = copy.deepcopy(found)
    return found


def _sources(repository: ConfigRepository | CachingConfigRepository) -> tuple[tuple[str, str], ...]:
    return tuple((source.provider, source.path) for source in repository.get_sources())


def _is_of_file(config_path: str) -> bool:
    return config_path.strip("/").removesuffix(".yaml") in _OF_FILES
