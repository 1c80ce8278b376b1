"""Entry: a learner rank. By hand: `python impala_llm/learner.py key=value ...`, several on one host by `torchrun`.

    receive → buffer → draw by priority → pack → forward → V-trace → loss → backward → reduce → step → publish → repeat

Actors play on all the while: the receiver takes their trajectories and deals tickets during every step. Each
rank has its own receiver, tickets and replay shard; ranks meet only to add up counts, gradients and metrics. Policy
version v is the policy after v optimizer steps; version 0 is published before the first ticket is dealt.

A learner that was killed and started again on its host goes on from the last version that it published or kept, with
every trajectory that it had acknowledged and not yet trained on; its optimizer begins anew (checkpoints are a later
stage), and its warm-ups with it. What a step trained on counts once the step's version, or one after it, is on a board:
that rename is the commit. Where versions are published rarely or never, one is kept, for the next learner alone, before
the trajectories that wait for it fill the trajectory store.

Left out on purpose: checkpoints (a later stage), sharded weights (every rank holds all), evaluation (evaluate.py).
"""

import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.engines.base import ModelRefused
from impala_llm.engines.sglang.weight_push import WeightSender
from impala_llm.envs import contract, make_suite
from impala_llm.hosts import rank_endpoint
from impala_llm.learning.cautions import cautions
from impala_llm.learning.feed import Feed, Stalled
from impala_llm.learning.model import PolicyModel, policy_files
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.policy_files import resolve_policy
from impala_llm.learning.products import prepare_cpu, prepare_cuda
from impala_llm.learning.publishing import VersionPublisher, send_to_servers
from impala_llm.observability.meters import Meters
from impala_llm.observability.tensorboard import MetricWriter
from impala_llm.observability.terminal import SupervisorView, TerminalView, View
from impala_llm.pipeline.network.keys import KeyFileError, LearnerKeys, load_learner_keys
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.run_directory import RunDirectory, RunDirectoryError, find_run
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.remote import serve_weights
from impala_llm.settings import Config, LearnerConfig, holds_run
from impala_llm.supervised import SUPERVISED, end_with_supervisor, say
from impala_llm.trainer import Trainer


def learn(config: Config, ranks: Ranks) -> None:
    """Train until `learner.total_updates` or `learner.max_minutes`, whichever comes first; then save the policy."""
    torch.manual_seed(config.run.seed)
    batch_size = config.learner.batch_size // ranks.world_size

    with ExitStack() as stack:
        # Rank 0 owns the run's folder in shared memory, unless a supervisor does: it goes when the stack is undone.
        run_dir = None
        if ranks.is_main:
            run_dir = stack.enter_context(RunDirectory.for_learner(config.run.name, config.run.resume))
        ranks.barrier()
        if run_dir is None:
            run_dir = RunDirectory.attach(config.run.name)
        model, version = start_model(config, run_dir)
        model.to(ranks.device)
        ranks.broadcast(model.parameters())
        ranks.barrier()  # all have looked at the board
        model.check(config.engine.max_length)
        if ranks.is_main:
            for caution in cautions(config, model):
                say(f"learner: {caution}")
            size = sum(p.numel() for p in model.lm.parameters())
            print(
                f"learner: {config.model.path}, {size:,} parameters on {ranks.device}, at version {version}", flush=True
            )
        files = policy_files(resolve_policy(config))
        publisher = make_publisher(config, ranks, run_dir, model, files)
        publisher.begin(version)
        if ranks.is_main and config.pipeline.bind is not None:
            served_at = rank_endpoint(config.pipeline.bind, ranks.world_size)
            stack.enter_context(serve_weights(run_dir.weights_path, served_at, learner_keys(config)))
        receiver = start_receiver(config, ranks, run_dir, model.vocab_size, batch_size, version)
        stack.callback(receiver.close)
        stack.push(partial(dismiss_actors, receiver))
        if ranks.is_main and config.engine.transfer == "distributed":
            urls = config.engine.urls
            key = run_dir.server_key if urls is None else None
            in_flight: Any = config.engine.in_flight  # one that config.py has checked
            sender = stack.enter_context(WeightSender(in_flight, urls=urls, key=key))
            publisher.transports.append(partial(send_to_servers, sender, receiver.engines))
        feed = Feed(config, receiver, batch_size, config.run.seed + ranks.rank)
        writer = view = None
        if ranks.is_main:
            writer = stack.enter_context(MetricWriter(Path(config.run.dir) / "tensorboard"))
            if config.run.terminal and SUPERVISED in os.environ:
                view = SupervisorView()
            elif config.run.terminal:
                view = stack.enter_context(TerminalView(config.learner.total_updates))

        meters = Meters(receiver, ranks, config.algorithm.max_staleness)
        connected: set[str] = set()
        wait = partial(wait_for_batch, receiver, publisher, meters, view, connected)
        trainer = Trainer(config, ranks, model, feed.buffer, meters.log, feed.share)
        if ranks.is_main:
            stack.push(partial(save_what_was_learned, trainer, Path(config.run.dir) / "policy", files))
        timer = trainer.timer
        # The time of the run counts from its first batch: how long engines take to come up is not the learner's.
        began_at = math.inf
        progress = version / config.learner.total_updates
        while progress < 1.0:
            with timer.stage("idle"):
                batch = feed.next_batch(version, end_of_time(config.learner, began_at), partial(wait, version))
            # Ranks end together: where one has waited in vain for the rest of the time, all do.
            if config.learner.max_minutes is not None and ranks.sum([float(batch is None)])[0] > 0:
                break
            assert batch is not None
            if math.isinf(began_at):
                began_at = ranks.sum([run_dir.began_at() if ranks.is_main else 0.0])[0]
            # Noted on every rank before the gradients are summed, and so before anybody can publish the step.
            receiver.trained([t.unroll_id for t in batch.trajectories])
            trainer.update(batch, version, progress, partial(feed.arrivals, version))
            with timer.stage("publish"):
                version += 1
                meters.log.update(publisher.publish(version, receiver))
            with timer.stage("log"):
                share = share_done(config.learner, version, time.monotonic() - began_at) if ranks.is_main else 0.0
                progress = ranks.sum([share])[0]  # by rank 0's clock
                meters.observe(feed, batch, version)
                if config.learner.save_every and version % config.learner.save_every == 0 and ranks.is_main:
                    model.save(Path(config.run.dir) / f"policy-{version}", files)
            meters.finish_step(timer.end_step(), batch.num_tokens)
            del batch  # its space is wanted while the next one is waited for
            summary = meters.gather()
            if writer is not None:
                writer.write(version, summary)
            if ranks.is_main:
                tell_of_actors(receiver, connected)
            if view is not None:
                view.update(version, summary, progress)


def make_publisher(
    config: Config, ranks: Ranks, run_dir: RunDirectory, model: PolicyModel, files: Mapping[str, bytes]
) -> VersionPublisher:
    """This rank's publisher. Rank 0 puts the files that belong to the policy beside the weights."""
    beside = files if ranks.is_main else None
    board = WeightPublisher(run_dir.weights_path, config.pipeline.weight_slots, beside)
    kept = WeightPublisher(run_dir.kept_path, 2, beside)
    return VersionPublisher(ranks, model, board, kept, config.learner.sync_interval, config.algorithm.max_staleness)


def wait_for_batch(
    receiver: Receiver,
    publisher: VersionPublisher,
    meters: Meters,
    view: View | None,
    connected: set[str],
    version: int,
    what: str,
) -> None:
    """Called while there is no batch. connected: see `tell_of_actors`; what: is missing."""
    meters.log.update(publisher.publish_early(version, receiver))
    if view is not None:
        tell_of_actors(receiver, connected)
        view.wait(what)


def tell_of_actors(receiver: Receiver, connected: set[str]) -> None:
    """Say which actors have come or gone since the last call. connected: those of the last call, brought up to date."""
    now = set(receiver.actor_stats())
    for what, names in (("joined", now - connected), ("left", connected - now)):
        if names:
            who = ", ".join(sorted(names)) if len(names) <= 4 else f"{len(names)} actors"
            say(f"learner: {who} {what}, {len(now)} connected")
    connected.clear()
    connected.update(now)


def save_what_was_learned(
    trainer: Trainer, target: Path, files: Mapping[str, bytes], kind: type[BaseException] | None, *_: object
) -> None:
    """Save the policy at the end of training, or when this process is told to stop. Nobody sees half of it.

    Not after an error, which another learner goes on from, nor where the signal has come amid a change of the weights.
    """
    if kind is not None and (trainer.is_stepping or not issubclass(kind, SystemExit | KeyboardInterrupt)):
        return
    aside = target.with_name(f"{target.name}.new-{os.getpid()}")
    trainer.model.save(aside, files)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    print(f"learner: the policy is saved in {target}", flush=True)


def end_of_time(config: LearnerConfig, began_at: float) -> float:
    """When `max_minutes` are over, in seconds of `time.monotonic`. began_at: infinite before the first batch."""
    return math.inf if config.max_minutes is None else began_at + 60 * config.max_minutes


def share_done(config: LearnerConfig, version: int, elapsed_s: float) -> float:
    """Share of a run that is over, by updates or by time, whichever is further. elapsed_s: since its first batch."""
    share = version / config.total_updates
    if config.max_minutes is not None:
        share = max(share, elapsed_s / 60 / config.max_minutes)
    return min(1.0, share)


def dismiss_actors(receiver: Receiver, kind: type[BaseException] | None, *_: object) -> None:
    """Tell the actors that the run is over, if it is: not where this learner failed and will be started again.

    Of a signal the supervisor decides, where there is one.
    """
    told_to_stop = kind is not None and issubclass(kind, SystemExit | KeyboardInterrupt)
    if told_to_stop:
        receiver.interrupted()
    if kind is None or (told_to_stop and SUPERVISED not in os.environ):
        receiver.shutdown()


def start_model(config: Config, run_dir: RunDirectory) -> tuple[PolicyModel, int]:
    """The policy to go on from, and its version: what a killed learner published or kept last, else the configured
    start."""
    boards = [WeightReader(run_dir.weights_path), WeightReader(run_dir.kept_path)]
    board = max(boards, key=lambda board: -1 if (version := board.latest()) is None else version)
    sizes = (config.model.value_hidden_size, config.model.value_trunk_gradient)
    if board.latest() is None:
        return PolicyModel.from_pretrained(resolve_policy(config), *sizes), 0
    with board.lease() as lease:
        model = PolicyModel.from_pretrained(lease.path, *sizes)
        anew = "the optimizer begins" if model.load_value_head(lease.extra()) else "optimizer and value head begin"
        say(f"learner: going on from version {lease.version}; {anew} anew")
        return model, lease.version


def start_receiver(
    config: Config, ranks: Ranks, run_dir: RunDirectory, vocab_size: int, batch_size: int, version: int
) -> Receiver:
    """This rank's door for actors, with its share of the training tasks behind it."""
    algorithm = config.algorithm
    order = TaskOrder(
        contract.tasks(make_suite(config.env), "train"),
        algorithm.group_size,
        config.run.seed,
        ranks.rank,
        ranks.world_size,
    )
    # Free running is bounded by what the buffer can hold.
    max_open = config.replay.capacity if algorithm.max_staleness is None else None
    journal = Journal(run_dir.journal_path(ranks.rank))
    ledger = TicketLedger(order, batch_size, algorithm.max_staleness, max_open, version=version, journal=journal)
    # Beyond the buffer's own capacity: open groups, what is queued for it, headers and gaps.
    arena = TrajectoryStore(
        run_dir.replay_path(ranks.rank), (config.replay.capacity_mb * 5 // 4 + 64) << 20, 4 * config.replay.capacity
    )
    pipeline = config.pipeline
    receiver = Receiver(
        run_dir.endpoint(ranks.rank),
        ledger,
        vocab_size,
        run_dir,
        arena,
        heartbeat_timeout_s=pipeline.actor_timeout_s,
        ticket_timeout_s=pipeline.ticket_timeout_s,
        bind=None if pipeline.bind is None else rank_endpoint(pipeline.bind, ranks.rank),
        keys=learner_keys(config),
        max_tokens=config.learner.token_budget,
        published=WeightReader(run_dir.weights_path).latest(),
    )
    receiver.start()
    return receiver


def learner_keys(config: Config) -> LearnerKeys | None:
    folder = config.pipeline.keys
    return None if folder is None else load_learner_keys(Path(folder).expanduser())


def check_ranks(config: Config) -> None:
    """ConfigError where the ranks that were started, by torchrun as a rule, are not those that can work together."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)))
    if num_here != num_ranks:
        raise ConfigError(
            f"torchrun started {num_ranks} ranks, {num_here} of them on this host: the ranks of a learner share the "
            "memory of one host; start them with --nnodes 1"
        )
    if config.learner.num_ranks != num_ranks:
        raise ConfigError(
            f"learner.num_ranks={config.learner.num_ranks}, but {num_ranks} ranks were started: set learner.num_ranks="
            f"{num_ranks}, or start {config.learner.num_ranks} with torchrun"
        )


def check_folder(config: Config) -> None:
    """ConfigError where a learner that was started by hand would mix two runs; of what it removes it says so."""
    if SUPERVISED in os.environ or config.run.resume:
        return
    if holds_run(Path(config.run.dir)):
        raise ConfigError(
            f"run.dir={config.run.dir} holds a run already, and two would be mixed: set another run.name, or "
            "run.resume=true to go on with what a killed learner left"
        )
    if os.environ.get("RANK", "0") == "0" and find_run(config.run.name) is not None:
        print(
            f"learner: what an earlier learner of run {config.run.name!r} left in shared memory is removed, and its "
            "actors are told to end: run.resume=true would have gone on with it",
            flush=True,
        )


def keep_settings(config: Config) -> None:
    """Write config.yaml into the run's folder, as a supervisor does. ConfigError where that cannot be."""
    if SUPERVISED in os.environ or os.environ.get("RANK", "0") != "0":
        return
    try:
        Path(config.run.dir).mkdir(parents=True, exist_ok=True)
        (Path(config.run.dir) / "config.yaml").write_text(to_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir} cannot be written to ({error.strerror}): name another folder"
        ) from None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 at the end of training, 2 for what will fail again, 1 where actors brought nothing for
    too long, 130 after Ctrl-C, 143 after SIGTERM."""
    end_with_supervisor()
    try:
        config = load(argv)
        check_ranks(config)
        check_folder(config)
        keep_settings(config)
    except (ConfigError, RunDirectoryError) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    # As an exception it undoes everything on its way out: sockets, shared memory, files.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    prepare_cpu(threads_per_process(config))
    prepare_cuda(config.model.cuda_products)
    disable_progress_bar()
    ranks = Ranks(config.model.device, config.learner.stall_timeout_s)
    try:
        learn(config, ranks)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Stalled as error:
        print(f"learner: {error}", file=sys.stderr)
        return 1
    except (ModelRefused, contract.EnvironmentFault) as error:
        if ranks.is_main:
            traceback.print_exception(error)
            print(f"learner: {error}", file=sys.stderr)
        return 2
    except (ArenaError, KeyFileError, RunDirectoryError) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
