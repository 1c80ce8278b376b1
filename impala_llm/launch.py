"""Processes of one host under a supervisor: a whole run, or actors alone for a learner that somebody else started.

    python -m impala_llm.launch actor.num_actors=2 key=value ...     actors alone; see tools/launch_actors.sh

Invariant: whatever ends the run, its end, an error, Ctrl-C or a signal, ends every process of it within ten seconds. A
process that dies is reported with its signal and the last line of its log, and restarted with back-off. The run's
folder in shared memory belongs to the supervisor: a learner that was killed goes on from its content. It is removed at
the end, unless it holds what no disk has, which is said. A learner that dies again and again without publishing a
version ends the run.
"""

import contextlib
import itertools
import os
import shlex
import signal
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.engines.sglang.external_server import reserved_servers
from impala_llm.gpus import GpuShares, deal_gpus, visible_gpus, with_num_actors
from impala_llm.hosts import TcpEndpoint, rank_endpoint
from impala_llm.learning.checkpoints.files import newest_whole
from impala_llm.learning.checkpoints.kept_settings import for_other_runs
from impala_llm.learning.checkpoints.resume import begin, can_go_on
from impala_llm.observability.terminal import TerminalView
from impala_llm.pipeline.network.keys import load_actor_keys
from impala_llm.pipeline.shm.actor_claims import claimed_indices
from impala_llm.pipeline.shm.run_directory import RunDirectory, RunDirectoryError, find_run, run_path
from impala_llm.pipeline.weights.relay_client import relay_weights
from impala_llm.processes.child_processes import FAMILY, Child, end, exit_reason, keep_alive, say
from impala_llm.processes.fork_server import ForkServer, can_fork
from impala_llm.processes.module_process import python_path
from impala_llm.processes.supervised import ALLOCATOR, HUGE_PAGES, LOST_OWNER, NOT_SAVED, SUPERVISED, signal_name
from impala_llm.settings import PACKAGE, Config

POLL_S = 0.1
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The interface over which the ranks of a learner talk."""
MAX_LEARNER_RESTARTS = 3
"""Restarts of a learner without a version published in between, however long it ran."""
STOPPED, BAD_SETTINGS, LEARNER_GONE = 0, 2, 3
"""Exit codes: the run is over; the settings are wrong; (of an actor) the learner is gone, or refuses it."""
_FINAL = (STOPPED, BAD_SETTINGS, NOT_SAVED)
"""Exit codes in a run after which a process is not started again."""


def plan(config: Config, overrides: Sequence[str], indices: Iterable[int] | None = None) -> list[Child]:
    """The processes of a run: the learner first, then the actors. ConfigError where GPUs are too few.

    Args:
        indices: of the actors; None: from 0 on.
    """
    gpus = deal_gpus(config, visible_gpus())
    forks = make_fork_server(config)
    environment = {**child_environment(config, gpus.learner), SUPERVISED: "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if config.engine.transfer != "distributed" or config.engine.urls is None:  # else NCCL reaches servers elsewhere too
        environment.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    command = [sys.executable, str(PACKAGE / "learner.py"), *overrides]
    log = Path(config.run.dir) / "logs" / "learner.log"
    learner = Child("learner", command, log, environment, config.learner.num_processes, forks=forks)
    return [learner, *plan_actors(config, overrides, gpus, indices, forks)]


def make_fork_server(config: Config) -> ForkServer | None:
    """Make the fork server of this host's processes; None where they are started one by one.

    Its own value of `FAMILY` keeps the room in which each of them shows its own.
    """
    if visible_gpus() or not can_fork():
        return None
    return ForkServer(child_environment(config, ()))


def plan_actors(
    config: Config,
    overrides: Sequence[str],
    gpus: GpuShares,
    indices: Iterable[int] | None = None,
    forks: ForkServer | None = None,
) -> list[Child]:
    """The actors of this host, with their share of its cores and GPUs.

    Args:
        indices: as for `plan`.
        forks: starts them; None: the supervisor does.
    """
    logs = Path(config.run.dir) / "logs"
    return [
        Child(
            f"actor {index}",
            [sys.executable, str(PACKAGE / "actor.py"), "--index", str(index), *overrides],
            logs / f"actor-{index}.log",
            child_environment(config, own),
            forks=forks,
        )
        for index, own in zip(itertools.count() if indices is None else indices, gpus.actors, strict=False)
    ]


def child_environment(config: Config, gpus: Sequence[str]) -> dict[str, str]:
    """Environment of a process with its share of this host's cores, these GPUs and a `FAMILY` of its own."""
    threads = str(threads_per_process(config))
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # An environment that makes text from sets shows the same in every process.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        "TQDM_DISABLE": "1",  # logs are read line by line
        **ALLOCATOR,
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        **python_path(),
        FAMILY: uuid.uuid4().hex,
        # Activation checkpointing gives memory back every few layers: then it is taken anew in pages of 2 MB.
        **({HUGE_PAGES: "1"} if config.learner.activation_checkpointing else {}),
        **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
    }


def dry_run(config: Config, overrides: Sequence[str]) -> str:
    """Plan of `train` as text: the settings that have an effect, and the command line of every process."""
    shown = for_other_runs(config)
    lines = [to_yaml(shown, only_in_force=True), f"# threads a process: {threads_per_process(config)}"]
    for child in plan(config, overrides):
        ranks = f", {child.num_ranks} ranks" if (child.num_ranks or 1) > 1 else ""
        lines.append(f"# {child.name}{ranks}: {shlex.join(child.command)}")
    return "\n".join(lines)


@contextlib.contextmanager
def _claims(config: Config) -> Iterator[list[int]]:
    """Claim the servers and indices of this host's actors. Yields the indices.

    Raises ConfigError where another command on this host uses one of the servers.
    """
    num_actors = config.num_actors
    servers = reserved_servers(config) if num_actors else contextlib.nullcontext()
    with servers, claimed_indices(config.run.name, num_actors) as indices:
        yield indices


def supervise(config: Config, overrides: Sequence[str]) -> int:
    """Run to the end of training. Returns the learner's exit code, 130 after Ctrl-C, 129 or 143 after another signal.

    Raises RunDirectoryError where a living process has a run of this name, and ConfigError where it cannot begin.
    """
    with _claims(config) as indices:
        return _supervise(config, overrides, indices)


def _supervise(config: Config, overrides: Sequence[str], indices: Sequence[int]) -> int:
    """See `supervise`. indices: of the actors."""
    start = begin(config, say)
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    if start.run_id is not None and not start.take_over:
        newest, _ = newest_whole(Path(config.run.dir), verifies=False)
        if newest is not None:  # else it begins again
            say(f"the run in {config.run.dir} goes on; its newest checkpoint is {newest.path.name} (not checked yet)")
    children = plan(config, overrides, indices)
    learner, actors = children[0], children[1:]
    if start.lost_owner is not None:
        learner.environment[LOST_OWNER] = start.lost_owner
    say(f"starting {_processes_said(learner, actors)}; logs are in {config.run.dir}/logs")
    if not actors:
        once = "once the learner has begun, " if start.goes_on else ""  # config.yaml is that of before until then
        say(f"{once}start actors with {how_to_join(config)}")
    with (
        _stop_signal() as stop_signal,
        RunDirectory.create(
            config.run.name, take_over=start.take_over, run_id=start.run_id, output=Path(config.run.dir).resolve()
        ) as run_dir,
        _terminal_view(config) as view,
    ):
        learner.rendezvous_dir, waits_for_others = run_dir.path, False
        try:
            view.status("the learner and its actors are starting")
            for child in children:
                child.start()
            while not stop_signal() and keep_alive(learner, _FINAL, most=MAX_LEARNER_RESTARTS):
                for child in children:
                    _show(child, view)  # what actors play the learner reports
                if learner.restart_at:
                    view.status("the learner is started again")
                if any([not _keep_actor(actor, actors, _FINAL) and _has_bad_settings(actor) for actor in actors]):
                    break
                if not waits_for_others and actors and all(actor.is_given_up for actor in actors):
                    waits_for_others = True
                    say(f"no actor of this command is left: the learner needs others, {how_to_join(config)}")
                time.sleep(POLL_S)
        finally:
            _show(learner, view)
            view.status("the processes are ending")
            end(children, polite=not stop_signal() and learner.poll() in (STOPPED, NOT_SAVED))
            _show(learner, view)  # where the policy is
            position = view.position
    if stop_signal():
        onward = "; the same command goes on with it" if can_go_on(config) else ""
        say(f"the run was interrupted by {signal_name(stop_signal())}{_position_said(position, config)}{onward}")
        return 128 + stop_signal()
    # An actor has found settings that will fail again: all actors have the same ones.
    unfit = [child for child in children if _has_bad_settings(child)]
    if unfit:
        say(f"the run has ended{unfit[0].last_log_line()}")
        return BAD_SETTINGS
    code = learner.poll()
    assert code is not None
    if code not in (STOPPED, NOT_SAVED) and not learner.is_given_up:  # which was said
        say(f"the learner has ended ({exit_reason(code)}){learner.last_log_line()}")
    return code if code >= 0 else 128 - code


def _processes_said(learner: Child, actors: Sequence[Child]) -> str:
    """Return the processes of a run in words: "a learner of 2 ranks and 1 actor"."""
    ranks = f" of {learner.num_ranks} ranks" if (learner.num_ranks or 1) > 1 else ""
    return f"a learner{ranks} and {len(actors)} actor{'s' * (len(actors) != 1)}"


def _position_said(position: str, config: Config) -> str:
    """Return how far a run has come, to be said behind what interrupted it.

    Args:
        position: as the terminal shows it, "12 (30%)"; empty before the first update.
    """
    if position.partition(" ")[0] == str(config.learner.total_updates):
        return " after its last update"
    return f" at update {position}" if position else ""


def _keep_actor(actor: Child, actors: Sequence[Child], final: Sequence[int]) -> bool:
    """`keep_alive`; while others run, one that has played before may have met an outage: its settings are theirs."""
    others_run = any(other.poll() is None for other in actors if other is not actor)
    return keep_alive(actor, final, unless_worked=(BAD_SETTINGS,) if others_run else ())


def _has_bad_settings(child: Child) -> bool:
    """Whether it has ended since its settings will fail again."""
    return child.poll() == BAD_SETTINGS and not (child.restart_at or child.is_given_up)


def how_to_join(config: Config) -> str:
    """The command that starts actors for a learner that has none of its own."""
    command = f"`impala-llm actors --config {shlex.quote(f'{config.run.dir}/config.yaml')} --num-actors N"
    if config.pipeline.bind is None:
        return f"{command}` on this host; those of other hosts need pipeline.bind and pipeline.keys"
    port = TcpEndpoint.parse(config.pipeline.bind).port
    return (
        f"{command} pipeline.bind=null pipeline.connect=tcp://LEARNER_HOST:{port} pipeline.keys=KEYS` on other hosts, "
        "with a copy of this file"
    )


def supervise_actors(config: Config, overrides: Sequence[str]) -> int:
    """Actors alone, until the learner says stop to all of them.

    On another host than the learner's (`pipeline.connect`) it also brings the weights there, once for all actors.

    Returns 0 then, 1 if one was lost for good or found its learner gone, 2 for settings that will fail again, 130 after
    Ctrl-C, 129 or 143 after another signal.
    """
    with _claims(config) as indices:
        return _supervise_actors(config, overrides, indices)


def _supervise_actors(config: Config, overrides: Sequence[str], indices: Sequence[int]) -> int:
    """See `supervise_actors`. indices: of the actors, after those of other supervisors of this host."""
    gpus = deal_gpus(config, visible_gpus())
    actors = plan_actors(config, overrides, gpus, indices, make_fork_server(config))
    if not actors:
        raise ConfigError("actor.num_actors=0 leaves nothing to start here: set it, or --num-actors, to 1 or more")
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    where = "on this host" if config.pipeline.connect is None else f"at {config.pipeline.connect}"
    names = actors[0].name if len(actors) == 1 else f"{actors[0].name} to {actors[-1].name}"
    say(f"starting {names} for the learner {where}; logs are in {config.run.dir}/logs")
    with _stop_signal() as stop_signal, _away_from_learner(config), _terminal_view(config) as view:
        at_play: dict[str, list[float]] = {}
        waiting = f"waiting for the learner of run {config.run.name!r} {where}"
        try:
            for actor in actors:
                actor.start()
            while not stop_signal():
                final = (STOPPED, LEARNER_GONE, BAD_SETTINGS)
                if not any([_keep_actor(actor, actors, final) for actor in actors]):
                    break
                view.status(_actors_status(actors, at_play) or waiting)
                time.sleep(POLL_S)
        finally:
            end(actors, polite=False)
        if stop_signal():
            return 128 + stop_signal()
    failed = [actor for actor in actors if actor.poll() != STOPPED]
    for actor in failed:
        say(f"{actor.name} failed ({exit_reason(actor.poll() or 0)}){actor.last_log_line()}")
    if any(actor.poll() == BAD_SETTINGS for actor in failed):
        return BAD_SETTINGS
    return 1 if failed else 0


def _actors_status(actors: Sequence[Child], at_play: dict[str, list[float]]) -> str:
    """Summary of the actors' activity, from the messages that they have sent; empty where none plays.

    Args:
        at_play: name -> numbers of its latest message; it is updated.
    """
    for actor in actors:
        for message in actor.receive():
            match message:
                case {"at_play": [int() | float() as episodes, int() | float() as tokens_per_s]}:
                    at_play[actor.name] = [episodes, tokens_per_s]
                case {"say": text}:
                    _print(text)
        if actor.poll() is not None:
            at_play.pop(actor.name, None)
    if not at_play:
        return ""
    num_episodes, rate = map(sum, zip(*at_play.values(), strict=True))
    return f"{len(at_play)} of {len(actors)} actors play: {num_episodes:.0f} episodes under way, {rate:,.0f} tok/s"


@contextlib.contextmanager
def _away_from_learner(config: Config) -> Iterator[None]:
    """On another host than the learner's, keep a run directory with a board of its own, filled by a relay."""
    pipeline = config.pipeline
    if pipeline.connect is None:
        yield
        return
    keys = load_actor_keys(Path(pipeline.keys).expanduser()) if pipeline.keys else None
    served_at = rank_endpoint(pipeline.connect, config.learner.num_ranks)
    name = config.run.name
    try:
        if (left := find_run(name)) is not None and left.is_of_learner:
            raise ConfigError(
                f"run.name={name}: {run_path(name)} holds what a learner of run.dir={left.output or 'unknown'} has "
                "left, and actors for a learner on another host would remove it: go on with that run on this host "
                "first, or remove that folder"
            )
        own = RunDirectory.create(name)
    except RunDirectoryError as error:
        raise ConfigError(
            f"pipeline.connect={pipeline.connect} is for a host without the learner, and a process of this run lives "
            f"here: leave it out where that is the learner ({error})"
        ) from None
    with own as run_dir, relay_weights(run_dir.weights_path, served_at, keys):
        yield


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], int]]:
    """Only note SIGINT, SIGTERM and SIGHUP while the context is open. Yields a function: the one that came, 0 for none.

    A hang-up that is ignored, as under nohup, stays so.
    """
    received = 0

    def remember(number: int, _frame: object) -> None:
        nonlocal received
        received = number
        if number == signal.SIGHUP:
            _leave_terminal()

    noted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        noted.append(signal.SIGHUP)
    previous = {number: signal.signal(number, remember) for number in noted}
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Discard what is printed from now on to a terminal that is gone: writing there is an error."""
    with open(os.devnull, "w") as nowhere:
        for descriptor in (1, 2):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere.fileno(), descriptor)


@contextlib.contextmanager
def _terminal_view(config: Config) -> Iterator[TerminalView]:
    """View of a run; without `run.terminal` its output is discarded."""
    with open(os.devnull, "w") as nowhere:
        stream = sys.stdout if config.run.terminal else nowhere
        with TerminalView(config.learner.total_updates, stream) as view:
            yield view
    discard_lost_output()


def discard_lost_output() -> None:
    """Discard what could not be printed, as on a full disk, and all that comes: a run keeps its own exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _print(text: object) -> None:
    """Print a line. On a full disk it is lost, and the run continues."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _show(child: Child, view: TerminalView) -> None:
    """Show the messages of a process. Others are passed over: other code in it may write to its pipe."""
    for message in child.receive():
        match message:
            case {"say": text}:
                _print(text)
            case {"wait": str(missing)}:
                view.wait(missing)
            case {"compute": [int(step), int(num_done), int(num_tokens)]}:
                view.compute(step, num_done, num_tokens)
            case {"update": [int(step), dict(metrics), int() | float() | None as progress]}:
                numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
                view.update(step, numbers, progress)


def main(argv: Sequence[str]) -> int:
    """Actors alone; see `supervise_actors` for the exit code, and 2 for bad settings."""
    try:
        return supervise_actors(*with_num_actors(load(argv), argv, visible_gpus()))
    except ConfigError as error:
        say(str(error))
        return BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
