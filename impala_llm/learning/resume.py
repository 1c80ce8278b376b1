"""Whether a run begins, goes on or is refused: `run.resume` against what its folders hold. No torch here.

Invariant: nothing is changed; whoever asks acts on the answer before anybody else can.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from impala_llm.config import ConfigError, plain
from impala_llm.idle_settings import in_force
from impala_llm.learning.checkpoint_files import FOLDER, Manifest, VersionMark, newest_whole
from impala_llm.learning.folder_owner import RUN_FIX, wait_for_owner
from impala_llm.pipeline.shm.run_directory import (
    RunDirectoryError,
    find_learner,
    find_output,
    find_run,
    run_path,
    shared_memory,
)
from impala_llm.settings import Config, holds_run, leaves, model_directory, written
from impala_llm.supervised import LOST_OWNER, SUPERVISED

_MUST_AGREE = (
    *("model.path", "model.scratch.", "model.value_hidden_size", "model.lora", "env."),
    *("agent.name", "agent.command", "agent.tasks", "agent.num_tasks"),
    *("algorithm.group_size", "run.seed"),  # tickets are of an order of tasks that both determine
)
"""Settings, and beginnings of settings, without which a saved state means nothing."""
_SAME_RUN = (
    *(*_MUST_AGREE, "algorithm.", "model.value_trunk_gradient"),
    *("engine.temperature", "engine.top_p", "engine.max_length"),  # of the distribution of stored log-probabilities
)
"""Settings by which `auto` tells the same command from another experiment in the same folder."""
_OF_MEMORY = ("replay.capacity", "replay.capacity_mb")
"""Settings that change only where nothing is left of the run in shared memory: its trajectories lie there in place."""
_OF_THE_COMMAND = ("run.resume", "run.dir", "run.name")
"""Settings that say where and how a run goes on, and not how it trains."""


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    take_over: bool = False
    """From what a dead learner has left in shared memory, where that is newer than a checkpoint."""
    run_id: int | None = None
    """Number of the run whose checkpoint it goes on from; None: it is a new run."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, which the caller prints."""
    lost_owner: str | None = None
    """For `FolderOwner`."""


def how_to_start(config: Config) -> Start:
    """Look at the folders of a run.

    Raises:
        ConfigError: it can neither begin nor go on; the message says why, and what would.
        RunDirectoryError: a living process has a run of this name.
    """
    folder, name, resume = Path(config.run.dir), config.run.name, config.run.resume
    # The folder of actors alone, which a relay fills, is nothing to go on from.
    is_left = find_run(name) is not None and (find_learner(name) is not None or find_output(name) is not None)
    left = find_run(name, output=folder.resolve())
    if not holds_run(folder):
        return _without_folder(config, is_left)
    where = f"run.dir={folder} holds a run already"
    trained = folder / "policy"
    onward = f" (model.path={trained} goes on from its policy)" if model_directory(str(trained)) else ""
    anew = f"set another run.name, and run.dir where it is given{onward}"
    if resume is False:
        raise ConfigError(f"{where}, and two would be mixed: {anew}, or leave run.resume=false out to go on with it")
    notes = []
    if is_left and left is None:
        output = find_output(name) or "unknown"
        notes.append(f"{_removed(name)}: it is of run.dir={output}, and another run.name would have kept it")
    stale = "" if left is None else _stale(config, folder, left)
    # Before shared memory is discarded the checkpoint must be whole; else the learner looks at its files.
    checkpoint, passed_over = newest_whole(folder, verifies=bool(stale))
    if stale and checkpoint is None:
        raise ConfigError(f"{where}, and nothing to go on from: {stale}, and no checkpoint is whole; {anew}")
    if stale and checkpoint is not None:
        left = None
        notes.append(f"{stale}: that is discarded, and the run goes on from checkpoint {checkpoint.path.name}")
    if left is None and checkpoint is None:
        if resume is True:
            raise ConfigError(_nothing_left(config))
        damaged = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise ConfigError(f"{where}, without a checkpoint to go on from{damaged}: {anew}, or remove the folder")
    differing = _differing(config, folder)
    if differing is None and resume is not True:
        raise ConfigError(
            f"{where}, and {folder / 'config.yaml'} cannot be read, with which the settings are compared: restore it, "
            f"{anew}, or set run.resume=true to go on without"
        )
    differing = differing or []
    if refused := [found for found in differing if found[0].startswith(_MUST_AGREE if resume is True else _SAME_RUN)]:
        key, before, now = refused[0][0], written(refused[0][1]), written(refused[0][2])
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        is_fatal = any(key.startswith(_MUST_AGREE) for key, *_ in refused)
        way = "" if is_fatal else ", or set run.resume=true to go on so"
        raise ConfigError(f"{where}, with {key}={before} and not {now}{others}: {anew}, or put it back{way}")
    if left is not None:
        _check_sizes(config, differing, checkpoint)
    if left is None and checkpoint is not None and (limit := _finished(config, checkpoint)):
        raise ConfigError(f"{where}, which has finished at update {checkpoint.update}: raise {limit}, or {anew}")
    if changed := [found for found in differing if found[0] not in _OF_THE_COMMAND]:
        settings = "; ".join(f"{key}={written(now)}, before {written(before)}" for key, before, now in changed)
        notes.append(f"going on with {settings}")
    return Start(
        take_over=left is not None, run_id=None if checkpoint is None else checkpoint.run_id, notes=tuple(notes)
    )


def can_go_on(config: Config) -> bool:
    """Return whether the same command would go on with a run that has been stopped."""
    try:
        start = how_to_start(config)
    except (ConfigError, RunDirectoryError):
        return False
    return start.take_over or start.run_id is not None


def check_folder(config: Config) -> Start:
    """Decide on the start of a learner, before anything in its folder changes; a supervisor has decided already.

    Raises:
        ConfigError: two runs would be mixed, or a learner has the folder.
        RunDirectoryError: another learner of this run is alive.
    """
    if SUPERVISED in os.environ or os.environ.get("RANK", "0") != "0":
        return Start(lost_owner=os.environ.get(LOST_OWNER))
    lost = wait_for_owner(Path(config.run.dir), lambda text: print(f"learner: {text}", flush=True), RUN_FIX)
    start = how_to_start(config)
    for note in start.notes:
        print(f"learner: {note}", flush=True)
    return replace(start, lost_owner=lost)


def _without_folder(config: Config, is_left: bool) -> Start:
    """How a run starts whose folder on the disk holds none. is_left: whether there is one in shared memory."""
    if config.run.resume is not True:
        removed = f"{_removed(config.run.name)}: run.resume=true would have gone on with it"
        return Start(notes=(removed,) if is_left else ())
    if not is_left:
        raise ConfigError(_nothing_left(config))
    if reason := _of_other_ranks(config):
        raise ConfigError(
            f"run.resume=true: {reason}, and {config.run.dir} has no checkpoint: put learner.num_ranks back"
        )
    return Start(take_over=True)


def _removed(name: str) -> str:
    return f"what an earlier learner of run {name!r} left in shared memory is removed, and its actors are told to end"


def _check_sizes(config: Config, differing: Sequence[tuple[str, object, object]], checkpoint: Manifest | None) -> None:
    """Raise ConfigError where what is left of the run in shared memory has other sizes than these settings."""
    for key, before, now in differing:
        if key in _OF_MEMORY:
            way = "" if checkpoint is None else f", or remove that folder to go on from {checkpoint.path.name}"
            raise ConfigError(
                f"{key}={written(now)}: the run in run.dir={config.run.dir} goes on from {run_path(config.run.name)}, "
                f"which was left with {key}={written(before)}: put this value back{way}"
            )


def _stale(config: Config, folder: Path, left: int) -> str:
    """Why a run cannot go on from what is left of it in shared memory; empty where it can. left: run id there."""
    newest, _ = newest_whole(folder, verifies=False)
    if newest is not None and newest.run_id != left:
        return f"what lies in {shared_memory()} is of another run"
    learner, life = find_learner(config.run.name), VersionMark(folder / FOLDER).life
    if learner is not None and life is not None and learner[0] != life:
        return f"the run has gone on elsewhere since it left what lies in {shared_memory()}"
    return _of_other_ranks(config)


def _of_other_ranks(config: Config) -> str:
    """Whether tickets in shared memory are of another number of ranks, as a sentence; empty where they are not."""
    learner, num_ranks = find_learner(config.run.name), config.learner.num_ranks
    if learner is None or learner[1] == num_ranks:
        return ""
    return f"what lies in {shared_memory()} is of learner.num_ranks={learner[1]}, and not {num_ranks}"


def _nothing_left(config: Config) -> str:
    """Why a run cannot be resumed."""
    folder = Path(config.run.dir)
    trained = folder / "policy"
    onward = f", or train its policy further with model.path={trained} and another run.name" if trained.is_dir() else ""
    return (
        f"run.resume=true: nothing of run {config.run.name!r} is left in {shared_memory()}, nor a checkpoint in "
        f"{folder}, to go on from; leave run.resume out{onward}"
    )


def _differing(config: Config, folder: Path) -> list[tuple[str, object, object]] | None:
    """Settings in force that the run in the folder had otherwise: (key, its value, ours). None: they cannot be read."""
    try:
        text = (folder / "config.yaml").read_text()
        before: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=True) if yaml.safe_load(text) else None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return None
    if not isinstance(before, dict):
        return None
    found: list[tuple[str, object, object]] = []
    compared = in_force(before, config)
    for key, now in leaves(config):
        value, is_there = compared, True
        for part in key.split("."):
            is_there = isinstance(value, dict) and part in value
            if not is_there:
                break
            value = value[part]
        now = plain(now)  # as the file has it
        # What an earlier release did not know had no other value.
        if is_there and value != now:
            found.append((key, value, now))
    return found


def _finished(config: Config, checkpoint: Manifest) -> str:
    """The setting that keeps a run from going on; empty where none does."""
    learner = config.learner
    if checkpoint.update >= learner.total_updates:
        return f"learner.total_updates={learner.total_updates}"
    if learner.max_minutes is not None and checkpoint.minutes_used >= learner.max_minutes:
        return f"learner.max_minutes={learner.max_minutes:g}"
    patience = config.evaluation.patience
    if patience is not None and patience <= checkpoint.patience:
        return f"evaluation.patience={patience}"
    return ""
