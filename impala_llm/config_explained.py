"""Says what is wrong with settings that Hydra cannot compose, or would take as something else: a sentence with the
key, its value and the fix, from the words of the command line, the file that they name, or what Hydra raised."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

from impala_llm.checks.familiar_names import FAMILIAR_CHOICES, meant_by, unknown_choice
from impala_llm.config_files import (
    NO_REFERENCE,
    ConfigError,
    config_folder,
    file_of,
    groups,
    known_keys,
    settings_file,
    unresolved,
)
from impala_llm.part_settings import culprit, flat, kind_of, without_value
from impala_llm.part_signatures import list_expected, type_expected
from impala_llm.plugs import installed_parts, parts_with, read_word
from impala_llm.settings import written


def refuse_words(overrides: Sequence[str]) -> None:
    """Refuse words of the command line that Hydra would take as something else. Raises ConfigError."""
    refuse_unknown_keys(overrides)
    _refuse_bad_values(overrides)
    _refuse_whole_methods(overrides)


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
        elif name not in known and name not in parts and name not in groups():
            found.append(f"{name}={value} is an unknown key: {_suggestion(name, [*known, *groups()])}")
    if found:
        raise ConfigError("\n".join(found))


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
            raise ConfigError(unresolved(word, NO_REFERENCE)) from None
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


def of_group(key: str, known: Mapping[str, object]) -> str:
    """Reason why a key takes no value: it is a group of settings. Empty for any other key."""
    inside = [f"{name}={default}" for name, default in known.items() if name.startswith(f"{key}.")]
    if not inside or key in known or kind_of(key) is not None:
        return ""
    return f"{key} is a group of settings: set them one by one, such as {inside[0]}"


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
    keys = [key for key, _ in flat(OmegaConf.to_container(settings_file(Path(file))))]
    unknown = [key for key in keys if key not in known and key != "defaults" and kind_of(key) is None]
    meant = {key: meant_by(key, list(known)) for key in unknown}
    return [f"{key} (did you mean {name}?)" if name else key for key, name in meant.items()]


def explain_reference(error: InterpolationResolutionError, overrides: Sequence[str], raw: DictConfig) -> str:
    """Sentence on the reference in the composed settings that leads nowhere."""
    reason = str(error).splitlines()[0].rpartition(": ")[2].strip('"')
    if "ecursive" not in reason:
        reason = f"what it refers to does not exist, or is not set: {reason}"
    (key, value), (file, in_file) = culprit(raw, error), file_of(overrides)
    where = f"settings file {file}: " if key in in_file and in_file[key] == value else ""
    return unresolved(f"{where}{key}={value}", reason)


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence with key, value and fix from what Hydra or OmegaConf raised."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    known = known_keys()
    file, in_file = file_of(overrides)
    for key, value in given.items():
        choices = sorted(p.stem for p in (config_folder() / key).glob("*.yaml")) if key in groups() else []
        if choices and value not in (*choices, file or None):
            return unknown_choice(key, value, choices)
        if key not in groups() and (reason := of_group(key, known)):
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
            there = OmegaConf.select(settings_file(Path(file)), full_key) if where else "?"
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
        fix = "a preset stands there with its group, as in `override /algorithm: vtrace`"
        return f"{where}defaults has {match[1]!r}, which is no settings file beside it: {fix}"
    return f"{where}{said}: correct this setting"
