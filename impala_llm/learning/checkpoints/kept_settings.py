"""config.yaml in the folder of a run: all its settings, with which it is continued and from which others begin."""

import errno
from dataclasses import replace
from pathlib import Path

from impala_llm.config import ConfigError, to_yaml
from impala_llm.learning.checkpoints.files import write_file
from impala_llm.settings import Config

WITH_FOLDER = ("run", "demonstrations", "sft")
"""Sections whose `dir` follows run.name by default."""


def keep_settings(config: Config) -> None:
    """Write config.yaml into the run's folder: settings for another run, too, by another `run.name`.

    Raises:
        ConfigError: it cannot be written.
    """
    kept = for_other_runs(config)
    file = Path(config.run.dir) / "config.yaml"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, [to_yaml(kept).encode()])  # so a kill, or a full disk, leaves the old one whole
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "make room there, then the same command again" if is_full else "name another folder"
        raise ConfigError(f"run.dir={config.run.dir} cannot be written to ({error.strerror}): {fix}") from None


def for_other_runs(config: Config) -> Config:
    """Return the settings for a file from which another run, with another `run.name`, may begin."""
    settings = {name: replace(getattr(config, name), dir=_by_name(config, name)) for name in WITH_FOLDER}
    # run.resume was given for this run alone: another one begins with the default.
    return replace(config, **settings | {"run": replace(settings["run"], resume=Config().run.resume)})


def _by_name(config: Config, section: str) -> str:
    """Return the folder of a section; if it is the default for this run.name, return the default with ${run.name}."""
    folder: str = getattr(config, section).dir
    by_default: str = getattr(Config(), section).dir
    return by_default if by_default.replace("${run.name}", config.run.name) == folder else folder
