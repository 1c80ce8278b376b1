"""Parts among the composed settings: which keys and words are theirs, what words choose; which reference fails."""

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from impala_llm.plugs import ENGINES, ENVIRONMENTS, PartKind, option_values, read_word, short_name
from impala_llm.settings import written


@cache
def algorithm_parts() -> dict[str, PartKind]:
    """Kinds of parts by the setting of `AlgorithmConfig` that names one. They bring torch, which takes seconds to load:
    what needs no settings, such as `impala-llm --help`, does without."""
    was_enabled = gc.isenabled()
    gc.disable()  # there is no garbage among what is imported, and to look for it takes a fifth of the time
    try:
        from impala_llm.algorithms.registry import PARTS
    finally:
        if was_enabled:
            gc.enable()
    return PARTS


def kinds() -> tuple[PartKind, ...]:
    """The kinds of parts whose options are settings."""
    return (*algorithm_parts().values(), ENVIRONMENTS, ENGINES)


def kind_of(word: str) -> PartKind | None:
    """The kind of part that a word names or sets an option of."""
    key = word.lstrip("+").partition("=")[0]
    for kind in kinds():
        if key in (kind.key, kind.options_key) or key.startswith(f"{kind.options_key}."):
            return kind
    return None


def part_values(in_files: Any) -> dict[str, Any]:
    """The settings of a part as files compose them: what is no mapping stands for its name."""
    return in_files if isinstance(in_files, dict) else {"name": in_files}


def choose_part(raw: DictConfig, kind: PartKind, overrides: Sequence[str]) -> None:
    """Write the part that words choose, and its options, into the composed settings, so that references of all settings
    lead to what the words say, and those of the words lead on."""
    words = [read_word(word) for word in overrides if kind_of(word) is kind]
    if not words:
        return
    in_files = as_plain(OmegaConf.select(raw, kind.options_key))
    if kind.base:
        values = part_values(in_files)
        name, options = _choose(raw, kind, values.pop("name", None), values, words)
        OmegaConf.update(raw, kind.key, {**options, "name": name}, merge=False)
    else:
        values = option_values(kind, in_files)
        name, options = _choose(raw, kind, OmegaConf.select(raw, kind.key), values, words)
        OmegaConf.update(raw, kind.key, name)
        OmegaConf.update(raw, kind.options_key, options or None, merge=False)


def _choose(
    raw: DictConfig, kind: PartKind, name: Any, values: Mapping[str, Any], words: Sequence[tuple[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Return the name of a part, a packaged one's short name, and the values of its options, from files and words.

    A word that chooses another part than the files do leaves their options behind: those were for theirs.

    Args:
        raw: composed settings, to which a name may refer.
        name: in the files.
        values: options in the files.
        words: key and value of `key=NAME` and `options_key.option=value`.

    Raises:
        ValueError: options that are none.
    """
    chosen, given = name, dict[Any, Any]()
    for key, value in words:
        if key == kind.options_key and isinstance(value, Mapping):
            given |= value
        elif key == kind.key:
            chosen = value
        elif key == kind.options_key:
            raise ValueError(f"{key}={value} sets no option: write {key}.NAME=value")
        else:
            *outer, last = key.removeprefix(f"{kind.options_key}.").split(".")
            inner = given
            for section in outer:
                if not isinstance(inner.setdefault(section, {}), dict):
                    raise ValueError(f"{key}={value} sets a part of what another word sets whole: leave one out")
                inner = inner[section]
            inner[last] = value
        if kind.base:  # whose parts have their name beside their options
            chosen = given.pop("name", chosen)
    is_same = short_name(kind, _resolved(raw, chosen)) == short_name(kind, _resolved(raw, name))
    return short_name(kind, chosen), _merged(values, given) if is_same else given


def _merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both, where what is given goes over the values, in mappings inside of them too."""
    both = dict(values)
    for key, value in given.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def _resolved(raw: DictConfig, name: Any) -> Any:
    """Return the name of a part with its reference to another setting resolved. One that leads nowhere stays: it is
    refused later on."""
    with contextlib.suppress(OmegaConfBaseException):
        return OmegaConf.create({"name": name}, parent=raw).name
    return name


def leave_options_behind(raw: DictConfig, words: Sequence[str]) -> None:
    """Remove the options of a preset's credit or loss where a file of settings names another one, and keep them where
    it names the same.

    Args:
        raw: composed from presets and file; changed in place.
        words: that it was composed with.
    """
    file = ConfigStore.instance().load("experiment/file.yaml").node
    presets = compose(
        "config", overrides=["experiment=presets" if word == "experiment=file" else word for word in words]
    )
    for kind in algorithm_parts().values():
        found = (OmegaConf.select(each, kind.key) for each in (file, raw, presets))
        own, node, of_preset = (part_values(as_plain(each)) for each in found)
        if own.get("name") is not None:
            is_same = short_name(kind, _resolved(raw, own["name"])) == short_name(kind, of_preset.get("name"))
            kept = of_preset | node if is_same else {option: node[option] for option in own}
            OmegaConf.update(raw, kind.key, kept, merge=False)


def flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full key and value of each setting. Of an option of a part the value is a whole, also where it is a mapping."""
    is_part = prefix in {f"{kind.options_key}." for kind in kinds()}
    for key, value in settings.items():
        if isinstance(value, dict) and value and not is_part:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_value(settings: DictConfig, words: Sequence[str]) -> str:
    """Return a sentence on a setting that is `???`, a value that somebody else is to give, where no word gives it, and
    OmegaConf would take the default; "" where there is none. Options of a part are looked at when it is made."""
    missing = {key: value for key, value in flat(as_plain(settings)) if _is_missing(value)}
    read = map(read_word, words if missing else ())
    given = {key for word in read for key, value in flat(dict([word])) if not _is_missing(value)}
    for key, value in missing.items():
        kind = kind_of(key)
        names = {key} if kind is None else {kind.key, f"{kind.key}.name"}
        if key in names and not names & given:
            return f"{key}={written(value)} needs a value: write it there, or as {key}=VALUE"
    return ""


def _is_missing(value: object) -> bool:
    return value == "???" or (isinstance(value, list) and "???" in value)


def culprit(raw: DictConfig, error: OmegaConfBaseException) -> tuple[str, Any]:
    """Key and value of the setting whose reference leads nowhere, and not of one that refers to that setting."""
    failing = {}
    for key, value in flat(as_plain(raw)):
        try:
            as_plain(OmegaConf.select(raw, key) if "${" in str(value) else None, resolve=True)
        except OmegaConfBaseException:
            failing[key] = value
    for key, value in failing.items():
        others = [other.rpartition(".")[2] for other in failing if other != key]
        if not any(f".{name}" in str(value) for name in others):
            return key, value
    return next(iter(failing.items()), (str(error.full_key), "${...}"))  # they refer to each other


def as_plain(found: Any, resolve: bool = False) -> Any:
    """A value of OmegaConf's as plain Python. resolve: with what its references lead to in place of them."""
    return OmegaConf.to_container(found, resolve=resolve) if OmegaConf.is_config(found) else found
