"""The commands of the console script `impala-llm`, their options and help. Settings: settings.py."""

import dataclasses
import importlib
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from impala_llm.checks.familiar_names import FAMILIAR_CHOICES, meant_by
from impala_llm.config import ConfigError, load
from impala_llm.config_explained import refuse_unknown_keys
from impala_llm.config_files import config_folder, known_keys
from impala_llm.engines.base import EngineError
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.gpus import visible_gpus, with_num_actors
from impala_llm.learning.checkpoints.files import checkpoints, update_of
from impala_llm.learning.checkpoints.policy_folders import trained_update
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.plugs import closest
from impala_llm.processes.programs import how_to_evaluate, program
from impala_llm.processes.stop_signals import StopSignals
from impala_llm.settings import Config, model_directory

USAGE = """\
impala-llm train [--config FILE] [--dry-run] [key=value ...]
    trains on this host: learner and actors, supervised
impala-llm actors [--config FILE] [--num-actors N] [key=value ...]
    starts actors alone, for a learner started elsewhere
impala-llm evaluate [--config FILE] [--json] [key=value ...]
    plays held-out tasks with a policy
impala-llm new-env NAME
    writes an environment to begin with, and its test, into this directory
impala-llm demonstrate [--config FILE] [key=value ...]
    records episodes of a script, a policy or a person
impala-llm demonstrations FOLDER [--read N] [--min-score X] [--max-score X]
        [--out NEW]
    shows recorded episodes, and filters them
impala-llm sft [--config FILE] [key=value ...]
    warm start: a policy learns from recorded episodes
impala-llm doctor [--config FILE] [--json] [key=value ...]
    looks at this host: what is wrong, and what to do
impala-llm bench NAME [--json] [--option value ...]
    measures a part, beside others' (no NAME: the list)
impala-llm keys --dir DIR [--actors NAME,NAME,...]
    makes keys for actors on other hosts
impala-llm --version

`impala-llm COMMAND --help` says more; `impala-llm --help WORD` shows the
settings that have WORD in their key or meaning, `--help .` all of them, and
with the name of a command what `COMMAND --help` does.
Start with: impala-llm train experiment=quickstart"""

HELP = {
    "train": """\
impala-llm train [--config FILE] [--dry-run] [key=value ...]

Starts a learner and its actors on this host, starts again what dies, and ends
when training has ended. With actor.num_actors=0 the learner waits for actors
that `impala-llm actors` starts, here or on other hosts.
  --config FILE   settings from a YAML file, such as the config.yaml in a run's
                  folder; the same as experiment=FILE
  --dry-run       check settings, model, tasks and host, print the settings that
                  have an effect and every process, and start nothing""",
    "actors": """\
impala-llm actors [--config FILE] [--num-actors N] [key=value ...]

Starts actors for a learner that was started by hand on this host, or on the one
that pipeline.connect names. Both sides need the same settings. Ends when the
learner says stop (status 0), or when an actor is lost for good or finds its
learner gone (status 1).
  --config FILE     settings from a YAML file; the same as experiment=FILE
  --num-actors N    the same as actor.num_actors=N; with engine=sglang the
                    default is one for each share of the GPUs""",
    "evaluate": """\
impala-llm evaluate [--config FILE] [--json] [key=value ...]

Plays held-out tasks greedily and prints scores, intervals and some episodes to
read, with the rules and scripts that the environment has for comparison, and
with evaluation.start the difference to the policy it began as. The policy is
that of model.path; with the config.yaml of a run's folder, and no model.path
beside it, the newest that the run has saved, at its end or in a checkpoint.
  --config FILE   settings from a YAML file; the same as experiment=FILE
  --json          print the result as JSON; its keys: docs/evaluation.md""",
    "demonstrate": """\
impala-llm demonstrate [--config FILE] [key=value ...]

Records episodes into demonstrations.dir, as trajectories and as text: of the
environment's script, of model.path (demonstrations.player=policy), or of a
person at this terminal (demonstrations.player=person; Ctrl-D ends). The same
command again adds those that are missing. See docs/demonstrations.md.
  --config FILE   settings from a YAML file; the same as experiment=FILE""",
    "sft": """\
impala-llm sft [--config FILE] [key=value ...]

Warm start: model.path learns from the demonstrations in sft.data, or from those
that `impala-llm demonstrate` records with these settings. The result,
sft.dir/policy, is a Hugging Face directory with tokenizer and value head:
`impala-llm train model.path=DIRECTORY` goes on from it. Ctrl-C saves, and the
same command again goes on. See docs/demonstrations.md.
  --config FILE   settings from a YAML file; the same as experiment=FILE""",
    "doctor": """\
impala-llm doctor [--config FILE] [--json] [key=value ...]

Looks at versions, GPUs, memory, shared memory, disk, ports, keys, model, tasks,
SGLang and a process group of two ranks, with the settings of a run: what is
there, whether it is right, and what to do. Status 1 where something is wrong.
With pipeline.connect it looks at the host of actors, else at the learner's.
  --config FILE   settings from a YAML file; the same as experiment=FILE
  --json          print the result as JSON""",
}
WITHOUT_SETTINGS = {
    "bench": "impala_llm.bench.frame",
    "keys": "impala_llm.pipeline.network.keys",
    "demonstrations": "impala_llm.demonstrations",
    "new-env": "impala_llm.commands.new_environment",
}
"""Commands that take no settings -> the module whose `main` reads their words. It is imported when it is called."""
COMMANDS = (*HELP, *WITHOUT_SETTINGS)
SETTINGS_HELP = (
    "`impala-llm {} --help WORD` shows the settings that have WORD in their key or meaning, with default, range and "
    "meaning; `--help learner.` those of a part, `--help .` all. docs/settings.md is the same list. With a part of "
    "your own beside it, as in `--help WORD env=my_env:MySuite`, its options are searched too. Parts, with how many "
    "settings each has: {}."
)
OF_LEARNERS = ("algorithm.", "learner.", "replay.", "run.metric_writers")
"""Beginnings of the keys that `impala-llm evaluate` does not read."""
FLAGS = {"train": "--dry-run", "evaluate": "--json", "doctor": "--json"}


def run_command(words: Sequence[str]) -> int:
    """Do what the words of the command line say. Returns the exit code."""
    command, rest = (words[0], list(words[1:])) if words else ("", [])
    if command in ("-h", "--help", "help"):
        if sought := [word for word in rest if word and not word.startswith("-")]:
            # `--help sft` as `sft --help`, and `--help lr` as `train --help lr`
            return run_command([*([] if sought[0] in COMMANDS else ["train"]), *sought, "--help"])
        print(USAGE)
        return 0
    if command == "--version":
        print(f"impala-llm {version('impala_llm')}")
        return 0
    if command in WITHOUT_SETTINGS:
        return int(importlib.import_module(WITHOUT_SETTINGS[command]).main(rest))
    if command not in HELP:
        close = closest(command, COMMANDS) or ("train" if "=" in command else "")
        hint = f"did you mean `impala-llm {close}`? " if close else ""
        unknown = f"impala-llm: unknown command {command!r}: {hint}`impala-llm --help` lists them"
        print(unknown if command else USAGE, file=sys.stderr)
        return 2
    if "-h" in rest or "--help" in rest:
        try:
            return show_help(command, options(command, [word for word in rest if word not in ("-h", "--help")])[1])
        except ValueError as error:
            print(f"impala-llm: {error}", file=sys.stderr)
            return 2
    commands: dict[str, Callable[[Config, list[str], bool], int]] = {
        "train": train,
        "actors": actors,
        "evaluate": evaluate,
        "demonstrate": demonstrate,
        "sft": sft,
    }
    try:
        flagged, overrides = options(command, rest)
        if command == "doctor":
            from impala_llm.commands.doctor import main as doctor

            return doctor(overrides, as_json=flagged)
        config = settings_to_evaluate(overrides) if command == "evaluate" else load(overrides)
        if command in ("train", "actors"):
            config, overrides = with_num_actors(config, overrides, visible_gpus())
        return commands[command](config, overrides, flagged)
    except (ConfigError, EngineError, EnvironmentFault, RunDirectoryError) as error:
        print(f"impala-llm: {error}", file=sys.stderr)
        return 2


def show_help(command: str, words: Sequence[str]) -> int:
    """Print what the command does, or the settings that have a word in key or meaning.

    Args:
        words: the word to search for, if any, and `key=value`, of which those that name parts of the user's own have
            the options of these searched too.

    Returns:
        The exit code.

    Raises:
        ValueError: several words to search for, an unknown key, or a part that is not there.
    """
    from impala_llm.commands.settings_reference import familiar, parts, reference

    word, *more = [word for word in words if "=" not in word] or [""]
    if more:
        raise ConfigError(
            f"--help searches for one word, and besides {word!r} there is {' '.join(more)}: leave out all but one, or "
            "quote what belongs together"
        )
    settings_given = [word for word in words if "=" in word]
    refuse_unknown_keys(settings_given)
    width = min(shutil.get_terminal_size((80, 24)).columns, 120)
    if not word:
        counts = ", ".join(f"{part} ({number})" for part, number in parts().items())
        print(f"{HELP[command]}\n\n{textwrap.fill(SETTINGS_HELP.format(command, counts), width)}")
        return 0
    found = [familiar(command, word, width), reference(word, width, settings_given)]
    if any(found):
        print("\n\n".join(filter(None, found)))
        return 0
    close = closest(word, COMMANDS)
    hint = f"did you mean the command {close}? " if close else ""
    unknown = f"impala-llm: no setting has {word!r} in its key or meaning: {hint}see `impala-llm {command} --help`"
    print(unknown, file=sys.stderr)
    return 2


def options(command: str, words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the command's flag is among the words, and the settings, as Hydra's words. Raises ConfigError."""
    flagged, overrides = False, []
    given = iter(words)
    for word in given:
        option, equals, value = word.partition("=")
        if word == FLAGS.get(command):
            flagged = True
        elif option == "--config" or (option == "--num-actors" and command == "actors"):
            value = value if equals else next(given, "")
            if not value:
                raise ConfigError(f"{option} needs a value: see `impala-llm {command} --help`")
            if option == "--config" and Path(value).suffix not in (".yaml", ".yml"):
                raise ConfigError(f"--config {value}: give a file with settings whose name ends in .yaml")
            overrides.append(f"actor.num_actors={value}" if option == "--num-actors" else f"experiment={value}")
        elif word.startswith("-"):
            following = next(given, "")
            is_value = following and not following.startswith("-") and "=" not in following
            meant = setting_for(command, option.lstrip("-"), value or (following if is_value else "VALUE"))
            if (flag := FLAGS.get(command)) and option.replace("-", "") == flag.replace("-", ""):
                meant = flag
            hint = f"write {meant}" if meant else f"see `impala-llm {command} --help`"
            if word == "--dry-run" and command == "actors":
                hint = "`impala-llm doctor` with the same settings checks them and this host"
            raise ConfigError(f"{word} is no option of this command: {hint}")
        else:
            overrides.append(word)
    if len(sources := [word for word in overrides if word.startswith("experiment=")]) > 1:
        raise ConfigError(
            f"{' and '.join(sources)} are two sources of settings (--config FILE means experiment=FILE): leave one out"
        )
    keys = [word.lstrip("+").partition("=")[0] for word in overrides]
    if twice := [word for key, word in dict(zip(keys, overrides, strict=True)).items() if keys.count(key) > 1]:
        print(f"impala-llm: given more than once, the last one counts: {' '.join(twice)}", file=sys.stderr)
    return flagged, overrides


def setting_for(command: str, name: str, value: str) -> str:
    """The words that mean what an option of this name would; empty where there is no such setting."""
    if name == "model" and not any(path.stem == value for path in (config_folder() / name).iterdir()):
        name = "model.path"
    if "." not in name and name not in ("experiment", "algorithm", "env", "model", "engine", "replay"):
        name = meant_by(f"{command}.{name.replace('-', '_')}", list(known_keys())) or ""
    return f"{name}={FAMILIAR_CHOICES.get(f'{name}={value}'.lower(), value)}" if name else ""


def train(config: Config, overrides: list[str], is_dry: bool) -> int:
    """Train, then show before and after if `evaluation.before_and_after`; or only say what would be started."""
    from impala_llm.observability.terminal import working

    if is_dry:
        from impala_llm.checks.settings_cautions import settings_cautions
        from impala_llm.launch import dry_run

        print(dry_run(config, overrides), flush=True)  # and, beside it, what refuses the start
        for caution in settings_cautions(config):  # which a run's learner says
            print(f"impala-llm: {caution}", file=sys.stderr)
    with working("checking settings, model and host"):
        from impala_llm.commands.preflight import check_training
        from impala_llm.launch import BAD_SETTINGS, discard_lost_output, supervise

        check_training(config)
        if is_dry:
            from impala_llm.gateway.tasks import tried_suite
            from impala_llm.learning.checkpoints.resume import foresee

            tried_suite(config)  # a run leaves it to its actors: it may take seconds
            goes_on = foresee(config, lambda text: print(f"impala-llm: {text}", file=sys.stderr))
            would = f"the run in {config.run.dir} would go on" if goes_on else "a run would begin"
            print(f"impala-llm: with these settings {would}; nothing was started", file=sys.stderr)
            return 0

    folder = Path(config.run.dir)
    before = written_at(folder / "policy")
    code = supervise(config, overrides)
    if code == 0 and config.evaluation.before_and_after:
        with working("loading what evaluates the policy"):
            from impala_llm.evaluate import compare
            from impala_llm.learning.policy.policy_files import resolve_policy
        try:
            StopSignals()  # SIGTERM and SIGHUP interrupt it as Ctrl-C does
            compare(config)
        except (KeyboardInterrupt, SystemExit):
            print("impala-llm: the evaluation was interrupted; training has finished, and its policy is saved")
            print(how_to_evaluate(folder))
            start = shlex.quote(str(resolve_policy(config)))
            print(f"beside the policy that it began as: the same command and evaluation.start={start}", flush=True)
            raise
    if code != BAD_SETTINGS and written_at(folder / "policy") != before:  # else it is of an earlier start
        print(how_to_evaluate(folder))
    parts = [name for name in ("policy", "policy-best", "logs", "tensorboard") if (folder / name).is_dir()]
    if "tensorboard" in parts and "tensorboard" in config.run.metric_writers:
        print(f"see its curves: {program('tensorboard')} --logdir {shlex.quote(str(folder))}")
    print(f"impala-llm: {', '.join(parts)} are in {folder}")
    discard_lost_output()
    return code


def written_at(folder: Path) -> int | None:
    """Time of the last change of the names in a folder, in nanoseconds since the epoch; None where there is none."""
    return folder.stat().st_mtime_ns if folder.is_dir() else None


def actors(config: Config, overrides: list[str], _flagged: bool) -> int:
    """Actors alone."""
    from impala_llm.commands.preflight import check_actors
    from impala_llm.launch import supervise_actors

    check_actors(config)

    return supervise_actors(config, overrides)


def settings_to_evaluate(overrides: Sequence[str]) -> Config:
    """Load settings, and where that fails, without what only a learner reads of a file: whoever is given a run's policy
    and config.yaml need not have the module of its loss.

    Raises:
        ConfigError: they cannot be used without it either, or words set some of it.
    """
    try:
        return load(overrides)
    except ConfigError as error:
        if any(word.lstrip("+").startswith(OF_LEARNERS) for word in overrides):
            raise
        config = load(overrides, left_out=OF_LEARNERS)
        left_out = ", ".join(key.rstrip(".") for key in OF_LEARNERS)
        print(f"impala-llm: {left_out} of the file are left out, as no evaluation reads them: {error}", file=sys.stderr)
        return config


def evaluate(config: Config, overrides: list[str], as_json: bool) -> int:
    """Play held-out tasks."""
    from impala_llm.observability.terminal import working

    with working("loading what evaluates the policy"):
        from impala_llm.commands.evaluated_policy import left_out_catalogue, unfit_policy
        from impala_llm.commands.preflight import check_evaluation
        from impala_llm.evaluate import main as evaluate_policy

    learned, folder = learned_policy(overrides), Path(config.run.dir)
    if learned is not None:
        policy, of = learned
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(policy)))
        print(f"impala-llm: playing what the run has learned, {policy}{of}; model.path plays another", file=sys.stderr)
    elif model_directory(f"{folder}/policy") and not any(w.startswith(("model=", "model.path=")) for w in overrides):
        print(f"impala-llm: playing the policy that training starts from; {how_to_evaluate(folder)}", file=sys.stderr)
    check_evaluation(config)
    for said in filter(None, (left_out_catalogue(config), unfit_policy(config))):
        print(f"impala-llm: {said}", file=sys.stderr)

    return evaluate_policy(config, as_json=as_json)


def demonstrate(config: Config, overrides: list[str], _flagged: bool) -> int:
    """Record demonstrations."""
    from impala_llm.demonstrations import describe, read

    folder = recorded(config)
    if found := list(read(folder)):
        print(f"{folder}: {describe(found)}")
        print(f"read some: {program('impala-llm')} demonstrations {shlex.quote(str(folder))} --read 3")
    return 0


def sft(config: Config, overrides: list[str], _flagged: bool) -> int:
    """Warm start."""
    from impala_llm.commands.preflight import check_warm_start
    from impala_llm.sft import main as warm_start
    from impala_llm.sft_settings import check_words

    check_words(overrides)
    check_warm_start(config)
    folders = [Path(folder).expanduser() for folder in config.sft.data]
    return warm_start(config, folders or [recorded(config)])


def recorded(config: Config) -> Path:
    """Record what is missing of the configured demonstrations. Returns their folder."""
    from impala_llm.commands.preflight import check_recording
    from impala_llm.demonstrate import record
    from impala_llm.observability.terminal import working

    check_recording(config)
    with nullcontext() if config.demonstrations.player == "person" else working("recording demonstrations"):
        return record(config)


def learned_policy(overrides: Sequence[str]) -> tuple[Path, str] | None:
    """Find the newest policy that a run has on its disk, if the settings are those of its folder and name no other one.

    Returns:
        The policy's folder, and words that say of which update it is. None: the settings are of no run, or name a
        policy.

    Raises:
        ConfigError: the run has saved none, so that its start would be taken for what it has learned.
    """
    from impala_llm.observability.writers import last_metrics

    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    file = Path(given.get("experiment", "")).expanduser()
    if file.name != "config.yaml" or given.keys() & {"model", "model.path"}:
        return None
    last = file.parent / "policy"
    updates = {last: trained_update(last), **{path / "policy": update_of(path) for path in checkpoints(file.parent)}}
    there = [path for path in updates if model_directory(str(path)) is not None]
    if not there:
        if not (file.parent / "logs").is_dir():
            return None  # a file of settings, and no run's folder
        raise ConfigError(
            f"{last} is not there, nor a checkpoint with one: the run in {file.parent} has saved no policy yet; "
            "model.path=DIRECTORY plays another"
        )
    newest = max(there, key=updates.__getitem__)
    update = updates[newest]
    logged = int(last_metrics(file.parent / "tensorboard").get("step", update))
    if update < 0:  # an earlier release wrote it
        return newest, ""
    behind = f" (the metrics of the run go to update {logged})" if logged > update else ""
    return newest, f", of update {update}{behind}"
