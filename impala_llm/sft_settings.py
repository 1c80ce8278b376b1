"""Settings of a warm start, and those of the one that its folder holds already.

Invariant: config.yaml in the folder has settings that an update was made with, or before the first update those of the
command that began it.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from impala_llm.checks.idle_settings import given_keys
from impala_llm.config import ConfigError, to_yaml
from impala_llm.learning.checkpoints.files import FOLDER, write_file
from impala_llm.observability.writers import last_metrics
from impala_llm.settings import Config, LearnerConfig, SftConfig, leaves, model_directory, written

_FILE = "config.yaml"
_TEACH = (
    *("sft.epochs", "sft.learning_rate", "sft.max_minutes", "sft.max_updates", "sft.observation_weight"),
    *("sft.value_coef", "sft.value_learning_rate", "sft.warmup_updates"),
    *("learner.adam_beta1", "learner.adam_beta2", "learner.decay", "learner.final_learning_rate_fraction"),
    *("learner.max_grad_norm", "learner.precision", "learner.weight_decay"),
)
"""Settings, beside `facts`, that change what is learned by more than rounding."""


_OF_TRAIN = {"learner.total_updates": "sft.max_updates"} | {
    f"learner.{of.name}": f"sft.{of.name}" for of in fields(SftConfig) if of.name in vars(LearnerConfig())
}
"""Settings that a warm start does not read, and its own in their place."""
_NOT_READ = ("learner.value_warmup_updates", "learner.minibatches", "learner.save_every")


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError for words of the command line that a warm start does not read, but its own settings instead."""
    given = given_keys(words)
    problems = [
        f"{key} has no effect on `impala-llm sft`: set {own}, or leave it out"
        for key, own in _OF_TRAIN.items()
        if key in given
    ]
    problems += [f"{key} has no effect on `impala-llm sft`: leave it out" for key in _NOT_READ if key in given]
    if problems:
        raise ConfigError.of(problems)


def check_folder(folder: Path) -> None:
    """Raise ConfigError where a run lies in the folder: its policy and metrics would be replaced."""
    if (folder / FOLDER).is_dir() or "learner/version" in last_metrics(folder / "tensorboard"):
        raise ConfigError(f"sft.dir={folder} holds a run, whose policy would be replaced: set another sft.dir")


def facts(config: Config, data: str, weights: int | None) -> dict[str, Any]:
    """Return settings without which a saved state means nothing, or which determine the loss.

    Args:
        data: checksum of the demonstrations.
        weights: checksum of the weights that adapters are learned on; None: there are no adapters.
    """
    sft, model, credit = config.sft, config.model, config.algorithm.credit
    value_coef = sft.value_coef if credit.uses_values else 0.0
    return {
        "model.path": model.path,
        **{f"model.lora.{name}": value for name, value in vars(model.lora).items()},
        "model.value_hidden_size": model.value_hidden_size,
        "model.value_trunk_gradient": model.value_trunk_gradient,
        "run.seed": config.run.seed,
        "sft.batch_size": sft.batch_size,
        "sft.held_out_tasks": sft.held_out_tasks,
        "sft.min_score": sft.min_score,
        "sft.observation_weight": sft.observation_weight,
        "sft.value_coef": value_coef,
        "algorithm.credit.discount": credit.discount if value_coef else None,
        "sft.data": data,
        "weights": weights,
    }


def check_facts(config: Config, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the facts of the warm start in the folder with those of this one.

    Args:
        before: one of an earlier release may lack some.

    Raises:
        ConfigError: they differ.
    """
    for key, value in now.items():
        was = before.get(key, value)
        is_other_spelling = key == "model.path" and model_directory(was) == (model_directory(value) or "")
        if was != value and not is_other_spelling:
            differs = {
                "sft.data": "other demonstrations",
                "weights": f"adapters of other weights than model.path={config.model.path} has now",
            }.get(key, f"{key}={written(was)}, and not {written(value)}")
            if key == "sft.value_coef" and value != config.sft.value_coef:
                differs += f" (with algorithm.credit={config.algorithm.credit.name})"
            raise ConfigError(
                f"sft.dir={config.sft.dir} holds a warm start with {differs}: name another folder, or put that back"
            )


def changed(config: Config) -> list[str]:
    """Return `key=value, before value` of each setting by which this warm start would learn otherwise than the one in
    the folder.

    Raises:
        ConfigError: it is not known what that one's settings were.
    """
    file, now = Path(config.sft.dir) / _FILE, dict(leaves(config))
    try:
        before = yaml.safe_load(file.read_text())
        sections = {name: dict(before[name]) for name in ("sft", "learner")}
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError):
        raise ConfigError(
            f"sft.dir={config.sft.dir} holds a warm start, and {file} cannot be read, with which the settings are "
            "compared: restore it, or set another sft.dir"
        ) from None
    found = []
    for key in _TEACH:
        section, _, name = key.partition(".")
        was = sections[section].get(name, now[key])  # that of an earlier release may lack some
        if was != now[key]:
            found.append(f"{key}={written(now[key])}, before {written(was)}")
    return found


def keep(config: Config) -> None:
    """Write the settings into the folder. Raises OSError where the disk refuses them; the old ones then stay."""
    write_file(Path(config.sft.dir) / _FILE, [to_yaml(config).encode()])
