"""Which settings there are, and the files that set them. What is wrong with a file is a `ConfigError`."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from impala_llm.part_settings import algorithm_parts, flat, kind_of
from impala_llm.plugs import option_fields
from impala_llm.settings import PACKAGE, Config, leaves

NO_REFERENCE = "it is no reference"


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


def config_folder() -> Path:
    """configs/: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def groups() -> list[str]:
    """Names of the groups of choices in configs/."""
    return [path.name for path in config_folder().iterdir() if path.is_dir()]


@cache
def known_keys() -> Mapping[str, object]:
    """All settings with their defaults, those of every built-in credit and loss included."""
    keys = {key: default for key, default in leaves(Config()) if kind_of(key) not in algorithm_parts().values()}
    for kind in algorithm_parts().values():
        keys[kind.key] = None
        for part in kind.packaged.values():
            keys |= {f"{kind.options_key}.{f.name}": f.default for f in option_fields(part)}
    return keys


def settings_file(path: Path) -> DictConfig:
    """Contents of a YAML file with settings. Raises ConfigError if the file is not one."""
    try:
        text = path.expanduser().read_text()
        settings = OmegaConf.create(text) if isinstance(yaml.safe_load(text), dict | list | None) else None
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read ({error.strerror}): correct the path") from None
    except GrammarParseError as error:
        raise ConfigError(unresolved(f"settings file {path}: {error.full_key}", NO_REFERENCE)) from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:  # not of UTF-8 included
        line = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"settings file {path}{line}: this is not YAML ({reason}): correct it") from None
    if not isinstance(settings, DictConfig) or not settings:
        raise ConfigError(f"settings file {path} holds no settings: write lines such as `learner: {{batch_size: 32}}`")
    return settings


def file_of(overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The file of settings that words name, and what it sets by full key; "" and nothing where they name none."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides).get("experiment", "")
    file = given if given.endswith((".yaml", ".yml")) else ""
    return file, dict(flat(OmegaConf.to_container(settings_file(Path(file))))) if file else {}


def unresolved(setting: str, reason: str) -> str:
    """Sentence on a setting with a reference that cannot be followed."""
    fix = "write the value itself, with \\${ for ${, or correct the reference"
    return f"{setting} cannot be resolved ({reason}): {fix}"
