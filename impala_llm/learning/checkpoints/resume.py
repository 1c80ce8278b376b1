"""Decision whether a run begins, goes on or is refused, by `run.resume` and what its folders hold. No torch here.

Invariant: the decision changes nothing; whoever asks acts on it before anybody else can.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from impala_llm.checks.idle_settings import in_force
from impala_llm.config import ConfigError
from impala_llm.learning.checkpoints.files import FOLDER, NEW, RESERVED, CheckpointManifest, VersionMark, newest_whole
from impala_llm.learning.checkpoints.folder_owner import RUN_FIX, has_same_launcher, wait_for_owner
from impala_llm.learning.checkpoints.kept_settings import keep_settings
from impala_llm.learning.checkpoints.policy_folders import learned_policies
from impala_llm.learning.policy.model_files import model_checksum
from impala_llm.part_settings import algorithm_parts
from impala_llm.part_signatures import plain
from impala_llm.pipeline.shm.run_directory import (
    Left,
    RunDirectoryError,
    find_run,
    run_path,
    shared_memory,
)
from impala_llm.pipeline.shm.store_header import settings_of
from impala_llm.plugs import short_name
from impala_llm.processes.programs import how_to_evaluate
from impala_llm.processes.supervised import LOST_OWNER, SUPERVISED
from impala_llm.settings import Config, holds_run, leaves, model_directory, written
from impala_llm.writable_folders import try_to_write, writing_to

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
_DIRECTORIES = ("model.path", "algorithm.reference", "algorithm.credit.teacher")
"""Settings that name the directory of a model, which each spelling of its path means."""
_NUM_SHOWN = 4
"""Settings that a refusal names."""
_OF_THE_COMMAND = ("run.resume", "run.dir", "run.name")
"""Settings that say where and how a run goes on, and not how it trains."""


@dataclass(frozen=True)
class Start:
    """Start of a run."""

    take_over: bool = False
    """From what a dead learner has left in shared memory, where that is newer than a checkpoint."""
    run_id: int | None = None
    """Number of the run whose checkpoint it goes on from; None: it is a new run."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    lost_owner: str | None = None
    """For `FolderOwner`."""

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on; else it begins."""
        return self.take_over or self.run_id is not None


def how_to_start(config: Config) -> Start:
    """Look at the folders of a run.

    Raises:
        ConfigError: it can neither begin nor go on; the message says why, and what would.
        RunDirectoryError: a living process has a run of this name.
    """
    folder, name, resume = Path(config.run.dir), config.run.name, config.run.resume
    found = find_run(name)
    found = found if found is not None and found.is_of_learner else None
    if found is not None:
        _keep_work_of_another(config, found)
    if not _holds_run(folder):
        return _without_folder(config, found)
    left = found if found is not None and found.output == str(folder.resolve()) else None
    where, anew = f"run.dir={folder} holds a run already", _anew(folder)
    if resume is False:
        raise ConfigError(f"{where}, and two would be mixed: {anew}, or leave run.resume=false out to go on with it")
    notes = []
    if found is not None and left is None:
        notes.append(_removed_of_another(name, found))
    stale = "" if left is None else _stale(config, folder, left)
    # Before shared memory is discarded the checkpoint must be whole; else the learner looks at its files.
    checkpoint, passed_over = newest_whole(folder, verifies=bool(stale))
    if stale:
        if checkpoint is None and (passed_over or _lost_at_start(folder) is None):
            raise ConfigError(f"{where}, and nothing to go on from: {stale}, and no checkpoint is whole; {anew}")
        left = None
        onward = "" if checkpoint is None else f", and the run goes on from checkpoint {checkpoint.path.name}"
        notes.append(f"{stale}: that is discarded{onward}")
    run_id = None if checkpoint is None else checkpoint.run_id
    if left is None and checkpoint is None:
        if resume is True and not passed_over:
            raise ConfigError(_nothing_left(config))
        if passed_over or (run_id := _lost_at_start(folder)) is None:
            damaged = f" ({'; '.join(passed_over)})" if passed_over else ""
            raise ConfigError(f"{where}, without a checkpoint to go on from{damaged}: {anew}, or remove the folder")
        notes.append(f"the run in {folder} was lost before its first checkpoint, and begins again")
    changed = _changed(config, folder, checkpoint, where, anew)
    if left is not None:
        _check_sizes(config, left, checkpoint)
    if left is None and checkpoint is not None and (limit := _finished(config, checkpoint)):
        evaluated = how_to_evaluate(folder)
        raise ConfigError(
            f"{where}, which has finished at update {checkpoint.update}: raise {limit}, {evaluated}, or {anew}"
        )
    return Start(take_over=left is not None, run_id=run_id, notes=(*notes, *changed))


def can_go_on(config: Config) -> bool:
    """Return whether the same command would go on with a run that has been stopped."""
    try:
        return _has_past(config, how_to_start(config))
    except (ConfigError, RunDirectoryError):
        return False


def foresee(config: Config, say: Callable[[str], object]) -> bool:
    """Say what `begin` would, and write nothing. Returns whether the run would go on with what was learned.

    Raises as `begin` does.
    """
    wait_for_owner(Path(config.run.dir), say, RUN_FIX)
    start = how_to_start(config)
    for note in start.notes:
        say(note)
    return _has_past(config, start)


def _has_past(config: Config, start: Start) -> bool:
    """Whether there are weights to go on from: a run that was lost before its first checkpoint has none."""
    return start.take_over or (start.goes_on and newest_whole(Path(config.run.dir), verifies=False)[0] is not None)


def begin(config: Config, say: Callable[[str], object]) -> Start:
    """Decide on the start of a run, and write the settings of one that begins.

    Args:
        say: takes sentences for the user.

    Raises:
        ConfigError: two runs would be mixed, a learner has the folder, or it cannot be written to.
        RunDirectoryError: another learner of this run is alive.
    """
    lost = wait_for_owner(Path(config.run.dir), say, RUN_FIX)
    start = how_to_start(config)
    for note in start.notes:
        say(note)
    if start.goes_on:  # its learner writes its settings, once it has accepted them
        with writing_to(f"run.dir={config.run.dir}"):
            try_to_write(Path(config.run.dir))
    else:
        keep_settings(config)
    return replace(start, lost_owner=lost)


def check_folder(config: Config) -> Start:
    """Return the start of a learner, see `begin`. A supervisor, or rank 0, has decided on it for others.

    A learner that torchrun has started again goes on with the run that it has begun before, also with run.resume=false.
    """
    if SUPERVISED in os.environ or (os.environ.get("RANK") or "0") != "0":
        return Start(lost_owner=os.environ.get(LOST_OWNER))
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0") > 0
    if config.run.resume is False and is_restart and has_same_launcher(Path(config.run.dir)):
        config = replace(config, run=replace(config.run, resume="auto"))
    return begin(config, lambda text: print(f"learner: {text}", flush=True))


def _holds_run(folder: Path) -> bool:
    """Return whether a run has written into the folder. Raises ConfigError where this user may not look."""
    try:
        return holds_run(folder)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder} cannot be read ({error.strerror}): name another folder, or let this user enter it"
        ) from None


def _without_folder(config: Config, left: Left | None) -> Start:
    """Decide on the start of a run whose folder on the disk holds none. left: what shared memory has of its name."""
    run, folder = config.run, run_path(config.run.name)
    is_own = left is not None and left.output in (None, str(Path(run.dir).resolve()))
    if run.resume is not True:
        if left is None:
            return Start(run_id=None if run.resume is False else _lost_before_first_update(config))
        own = f"{_removed(run.name)}: run.resume=true would have gone on with it"
        return Start(notes=(own if is_own else _removed_of_another(run.name, left),))
    if left is None:
        raise ConfigError(_nothing_left(config))
    if not is_own:
        raise ConfigError(
            f"run.resume=true: what lies in {folder} is of run.dir={left.output}, and not {run.dir}: set run.dir to "
            "the former to go on with it, or another run.name"
        )
    if reason := _of_other_ranks(config, left):
        raise ConfigError(f"run.resume=true: {reason}, and {run.dir} has no checkpoint: put learner.num_ranks back")
    _check_sizes(config, left, None)
    return Start(take_over=True)


def _lost_at_start(folder: Path) -> int | None:
    """Return the number of a run that may begin again, since its host was lost before the first checkpoint; None where
    something would be lost: what may be a checkpoint or a policy of later updates, or the work of many of them, which
    another host may still have in memory."""
    mark = VersionMark(folder / FOLDER)
    others = [path for path in (folder / FOLDER).glob("update-*") if path.suffix != NEW]
    is_early = not mark.has_ended and 0 < mark.reserved - mark.ahead <= RESERVED
    return mark.run_id if is_early and not others and not learned_policies(folder) else None


def _lost_before_first_update(config: Config) -> int | None:
    """Return the number of a run that has begun in a folder, with these settings, and has made no update; None where
    there is none. Actors on other hosts know it."""
    differing, run_id = _differing(config, Path(config.run.dir)), _lost_at_start(Path(config.run.dir))
    is_same = differing is not None and not any(key.startswith(_SAME_RUN) for key, *_ in differing)
    return run_id if is_same else None


def _anew(folder: Path) -> str:
    """Return what begins another run than the one in a folder."""
    trained = folder / "policy"
    path = shlex.quote(f"model.path={trained}")
    onward = f" ({path} goes on from its policy)" if model_directory(str(trained)) else ""
    return f"set another run.name, and another run.dir if you set one{onward}"


def _removed(name: str) -> str:
    return f"what an earlier learner of run {name!r} left in shared memory is removed, and its actors are told to end"


def _removed_of_another(name: str, left: Left) -> str:
    output = left.output or "unknown"
    return f"{_removed(name)}: it is of run.dir={output}, and another run.name would have kept it"


def _keep_work_of_another(config: Config, left: Left) -> None:
    """Raise ConfigError where shared memory holds work of a run with another folder, which that run has not saved, and
    which the start would remove. Where that folder is gone, or has gone on elsewhere, nobody needs the work."""
    folder, output = run_path(config.run.name), left.output
    if output is None or output == str(Path(config.run.dir).resolve()) or not Path(output).is_dir():
        return
    if left.run.is_kept and not _left_behind(Path(output), left):
        raise ConfigError(
            f"run.name={config.run.name}: {folder} holds what the run in run.dir={output} has learned and not saved, "
            f"and this start would remove it: set another run.name, go on with that run first, or remove {folder}"
        )


def _check_sizes(config: Config, left: Left, checkpoint: CheckpointManifest | None) -> None:
    """Raise ConfigError where what is left of the run in shared memory has other sizes than these settings."""
    settings = dict(leaves(config))
    for key, before in settings_of(left.run.replay_path()).items():
        if settings[key] != before:
            way = "" if checkpoint is None else f", or remove that folder to go on from {checkpoint.path.name}"
            raise ConfigError(
                f"{key}={settings[key]}: the run in run.dir={config.run.dir} goes on from {run_path(config.run.name)}, "
                f"which was left with {key}={before}: put this value back{way}"
            )


def _stale(config: Config, folder: Path, left: Left) -> str:
    """Return the reason why a run cannot go on from what is left of it in shared memory; empty where it can."""
    return _left_behind(folder, left) or _of_other_ranks(config, left)


def _left_behind(folder: Path, left: Left) -> str:
    """Return the reason why a run's folder on disk knows more than what is left in shared memory; empty without one."""
    newest, _ = newest_whole(folder, verifies=False)
    if newest is not None and newest.run_id != left.run.run_id:
        return f"what lies in {shared_memory()} is of another run"
    life = VersionMark(folder / FOLDER).life
    if left.life is not None and life is not None and left.life != life:
        return f"the run has gone on elsewhere since it left what lies in {shared_memory()}"
    return ""


def _of_other_ranks(config: Config, left: Left) -> str:
    """Return a sentence where tickets in shared memory are of another number of ranks; empty where they are not."""
    num_ranks = config.learner.num_ranks
    if left.num_ranks in (None, num_ranks):
        return ""
    return f"what lies in {shared_memory()} is of learner.num_ranks={left.num_ranks}, and not {num_ranks}"


def _nothing_left(config: Config) -> str:
    """Return the reason why a run cannot be resumed."""
    folder = Path(config.run.dir)
    trained = folder / "policy"
    path = shlex.quote(f"model.path={trained}")
    onward = f", or train its policy further with {path} and another run.name" if trained.is_dir() else ""
    return (
        f"run.resume=true: nothing of run {config.run.name!r} is left in {shared_memory()}, nor a checkpoint in "
        f"{folder}, to go on from; leave run.resume out{onward}"
    )


def _changed(config: Config, folder: Path, checkpoint: CheckpointManifest | None, where: str, anew: str) -> list[str]:
    """Return a sentence on settings that the run in a folder had otherwise, and that may change; none where none has.

    Args:
        checkpoint: that the run goes on from; None: there is none.
        where, anew: parts of a refusal: what the folder holds, and what begins another run.

    Raises:
        ConfigError: others have changed, or what they were is not known.
    """
    differing, resume = _differing(config, folder), config.run.resume
    if differing is None and resume is not True:
        raise ConfigError(
            f"{where}, and {folder / 'config.yaml'} cannot be read, with which the settings are compared: restore it, "
            f"{anew}, or set run.resume=true to go on without"
        )
    differing = differing or []
    fixed = _MUST_AGREE if resume is True else _SAME_RUN
    refused = [found for found in differing if found[0].startswith(fixed)]
    model = _other_model(config, checkpoint) if any(key == "model.path" for key, *_ in refused) else ""
    if refused := [found for found in refused if found[0] != "model.path" or model is not None]:
        shown = ", ".join(
            f"{key}={written(before)} and not {written(now)}{(model or '') if key == 'model.path' else ''}"
            for key, before, now in refused[:_NUM_SHOWN]
        )
        others = f" and {len(refused) - _NUM_SHOWN} more settings" if len(refused) > _NUM_SHOWN else ""
        is_fatal = any(key.startswith(_MUST_AGREE) for key, *_ in refused)
        way = "" if is_fatal else ", or set run.resume=true to go on so"
        put_back = "it" if len(refused) == 1 else "them"
        raise ConfigError(f"{where}, with {shown}{others}: {anew}, or put {put_back} back{way}")
    changed = [found for found in differing if found[0] not in _OF_THE_COMMAND]
    settings = "; ".join(f"{key}={written(now)}, before {written(before)}" for key, before, now in changed)
    return [f"going on with {settings}"] if changed else []


def _other_model(config: Config, checkpoint: CheckpointManifest | None) -> str | None:
    """Return a clause for a refusal on a model at another path than the one that a run began with; None where it is the
    same model."""
    directory = model_directory(config.model.path)
    if directory is None:
        return ""
    if checkpoint is None or checkpoint.start is None:
        return ", which nothing says to be the same model (if it is, make a link to it at the former path)"
    return None if checkpoint.start == model_checksum(directory) else ", which has other weights or another tokenizer"


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
    compared, kinds = in_force(before, config), {f"{kind.key}.name": kind for kind in algorithm_parts().values()}
    for key, now in leaves(config):
        value: Any = compared
        is_there = True
        for part in key.split("."):
            is_there = isinstance(value, dict) and part in value
            if not is_there:
                break
            value = value[part]
        now = plain(now)  # as the file has it
        if is_there and key in kinds:
            value = short_name(kinds[key], str(value))  # runs of an earlier release may have a longer one
        # A setting that had no effect is not there.
        if is_there and value != now and not (key in _DIRECTORIES and _is_same_directory(value, now)):
            found.append((key, value, now))
    return found


def _is_same_directory(one: object, other: object) -> bool:
    """Return whether two values of a setting name the same directory of a model."""
    found = [model_directory(path) if isinstance(path, str) else None for path in (one, other)]
    return found[0] is not None and found[0] == found[1]


def _finished(config: Config, checkpoint: CheckpointManifest) -> str:
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
