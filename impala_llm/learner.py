"""Entry: a learner rank. By hand: `python impala_llm/learner.py key=value ...`, several on one host by `torchrun`.

    receive → buffer → draw by priority → pack → forward → credit → loss → backward → reduce → step → publish → repeat

Actors play on all the while: the receiver takes their trajectories and deals tickets during every step. Each
rank has its own receiver, tickets and replay shard; ranks meet only to add up counts, gradients and metrics. Policy
version v is the policy after v optimizer steps; version 0 is published before the first ticket is dealt.

A learner that was killed and started again on its host goes on from the last version that it published or kept, with
every trajectory that it had acknowledged and not yet trained on; its optimizer begins anew (checkpoints are a later
stage), and its warm-ups with it. What a step trained on counts once the step's version, or one after it, is on a board:
that rename is the commit. Where versions are published rarely or never, one is kept, for the next learner alone, before
the trajectories that wait for it fill the trajectory store.

Actors also play validation tasks now and then, while training goes on (in_run_evaluation.py).

Left out on purpose: checkpoints (a later stage).
"""

import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.engines.base import ModelRefused
from impala_llm.engines.sglang.weight_push import WeightSender
from impala_llm.envs import contract, make_suite
from impala_llm.in_run_evaluation import InRunEvaluation
from impala_llm.learning.batch_source import BatchSource, Stalled
from impala_llm.learning.budget import OutOfMemory
from impala_llm.learning.cautions import cautions
from impala_llm.learning.lora import add_adapters, is_adapted, load_adapters, without_prefix
from impala_llm.learning.model import PolicyModel, policy_files
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.policy_files import resolve_policy
from impala_llm.learning.products import prepare_cpu, prepare_cuda
from impala_llm.learning.publishing import VersionPublisher, send_to_servers
from impala_llm.observability.meters import Meters
from impala_llm.observability.metrics import MetricError
from impala_llm.observability.terminal import SupervisorView, TerminalView, View
from impala_llm.observability.writers import MetricWriter, last_metrics
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.network.keys import KeyFileError
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.run_directory import RunDirectoryError, find_run
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.programs import how_to_evaluate
from impala_llm.settings import Config, LearnerConfig, holds_run
from impala_llm.supervised import SUPERVISED, end_with_supervisor, say
from impala_llm.trainer import Trainer

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
DEAL_GRACE_S = 10.0
"""Seconds in which an actor is expected to have the first task of an evaluation that is awaited."""
NOT_SAVED = 4
"""Exit code: training is over, and its policy could not be saved."""


def learn(config: Config, ranks: Ranks) -> bool:
    """Train until `learner.total_updates` or `learner.max_minutes`, whichever comes first; then save the policy.

    Returns:
        Whether it could be saved.
    """
    torch.manual_seed(config.run.seed)
    with ExitStack() as stack:
        learner = Learner(config, ranks, stack)
        while learner.progress < 1.0 and learner.step():
            pass
        learner.finish_evaluation()
    return learner.is_saved


class Learner:
    """A rank of the learner: its parts, and its step.

    Args:
        stack: what is to be undone at the end, with the error that ended the run, if one did.
    """

    def __init__(self, config: Config, ranks: Ranks, stack: ExitStack) -> None:
        self.config, self.ranks = config, ranks
        self.run_folder = Path(config.run.dir)
        self.files = policy_files(resolve_policy(config))
        batch_size = config.learner.batch_size // ranks.world_size

        self.endpoint = stack.enter_context(
            LearnerEndpoint(config, ranks.rank, ranks.world_size, ranks.barrier, self.files)
        )
        self.model, self.version = start_model(config, self.endpoint.newest_weights(), ranks.is_main)
        if ranks.is_sharded:  # whole, before it is cut; in the host's memory, as a device may not hold it
            self.model.check(config.engine.max_length)
        ranks.place(self.model, config.learner.precision)
        if not ranks.is_sharded:
            self.model.check(config.engine.max_length)
        if ranks.is_main:
            describe(config, ranks, self.model, self.version)
        interval, staleness = config.learner.sync_interval, config.algorithm.max_staleness
        boards = self.endpoint.board, self.endpoint.kept
        dtype = board_dtype(config)
        self.publisher = VersionPublisher(ranks, self.model, *boards, interval, staleness, dtype=dtype)
        self.publisher.begin(self.version)
        suite = make_suite(config.env)
        tasks = contract.tasks(suite, "train")
        self.endpoint.listen(self.version, tasks, self.model.vocab_size, batch_size)
        self.receiver = self.endpoint.receiver
        if ranks.is_main and config.engine.transfer == "distributed":
            key = self.endpoint.run_dir.server_key if config.engine.urls is None else None
            in_flight: Any = config.engine.in_flight  # one that config.py has checked
            sender = stack.enter_context(WeightSender(in_flight, urls=config.engine.urls, key=key))
            # What no rank has as it is sent, the board has.
            is_made = ranks.is_sharded or dtype is not None or is_adapted(self.model.lm)
            board = WeightReader(self.endpoint.board.directory) if is_made else None
            self.publisher.transports.append(
                partial(send_to_servers, sender, self.receiver.engines, board=board, device=ranks.device)
            )

        self.batches = BatchSource(config, self.receiver, batch_size, config.run.seed + ranks.rank)
        self.writer: MetricWriter | None = None
        if ranks.is_main:
            folder, names = self.run_folder / "tensorboard", config.run.metric_writers
            self.writer = stack.enter_context(MetricWriter(folder, names))
            self.writer.write_text("settings", to_yaml(config))
        self.view = self.make_view(stack)
        self.meters = Meters(self.receiver, ranks, staleness)
        if self.version > 0:
            self.meters.go_on_from(last_metrics(self.run_folder / "tensorboard"))
        self.trainer = Trainer(
            config, ranks, self.model, self.batches.buffer, self.meters.log, self.batches.replay_fraction
        )
        if ranks.is_main or ranks.is_sharded:
            stack.push(self.save_what_was_learned)
        self.is_saved = True
        """Whether no policy had to be left in shared memory."""
        self.is_refusal_said = False
        """Whether it was said that a connection was refused."""
        self.connected: set[str] = set()
        """Actors that were connected when it was last said which are."""
        self.progress = self.version / config.learner.total_updates
        """Share of the run that is over: 1 at its end."""
        # The time of the run counts from its first batch: how long engines take to come up is not the learner's.
        self.began_at = math.inf
        self.evaluation: InRunEvaluation | None = None
        """On rank 0, where evaluations inside of the run are wanted."""
        if config.evaluation.inside_run and ranks.is_main:
            held_out = contract.tasks(suite, "validation")
            self.evaluation = InRunEvaluation(config.evaluation, self.receiver, held_out, self.run_folder, self.version)
            stack.callback(self.evaluation.close)
        self.evaluate(0.0)

    def step(self) -> bool:
        """Take a batch, train on it, publish the next version, log. Returns whether there was a batch."""
        timer = self.trainer.timer
        with timer.stage("receive"):
            batch = self.batches.batch_at_hand(self.version)
        with timer.stage("idle"):
            if batch is None:
                end = end_of_time(self.config.learner, self.began_at)
                batch = self.batches.next_batch(self.version, end, self.while_waiting)
            self.meters.log.update(self.publisher.wait_for_ranks(self.version, self.receiver))
        # Ranks end together: where one has waited in vain for the rest of the time, all do.
        if self.config.learner.max_minutes is not None and self.ranks.sum([float(batch is None)])[0] > 0:
            return False
        assert batch is not None
        if math.isinf(self.began_at):
            self.began_at = self.ranks.sum([self.endpoint.run_dir.began_at() if self.ranks.is_main else 0.0])[0]
        # Noted on every rank before the gradients are summed, and so before anybody can publish the step.
        self.receiver.trained([t.unroll_id for t in batch.trajectories])
        self.trainer.update(batch, self.version, self.progress, partial(self.batches.arrivals, self.version))
        with timer.stage("publish"):
            self.version += 1
            self.meters.log.update(self.publisher.publish(self.version, self.receiver))
        with timer.stage("log"):
            elapsed_s = time.monotonic() - self.began_at
            share = share_done(self.config.learner, self.version, elapsed_s) if self.ranks.is_main else 0.0
            self.progress = self.ranks.sum([share])[0]  # by rank 0's clock
            if self.ranks.is_main:
                self.meters.log.add("progress/seconds", elapsed_s)
            if self.evaluate(elapsed_s):
                self.progress = 1.0
            self.meters.observe(self.batches, batch, self.version)
            save_every = self.config.learner.save_every
            if save_every and self.version % save_every == 0 and (self.ranks.is_main or self.ranks.is_sharded):
                self.save(self.run_folder / f"policy-{self.version}")
        self.meters.finish_step(timer.end_step(), batch.num_tokens)
        del batch  # its space is wanted while the next one is waited for
        with timer.stage("log"):  # of the step that begins
            self.show(self.meters.gather())
        return True

    def evaluate(self, elapsed_s: float, at_the_end: bool = False) -> bool:
        """Take in an evaluation that has ended, and begin one that is due. All ranks call it.

        Args:
            elapsed_s: seconds of training so far.
            at_the_end: one is due unless this version was evaluated.

        Returns:
            Whether the run should end early.
        """
        if not self.config.evaluation.inside_run:
            return False
        begins = is_over = False
        if self.evaluation is not None:
            self.meters.log.update(self.evaluation.collect(self.version))
            begins = self.evaluation.begin(self.version, elapsed_s, at_the_end)
            is_over = self.evaluation.is_over
        begins, is_over = (n > 0 for n in self.ranks.sum([float(begins), float(is_over)]))
        if begins and (self.evaluation is not None or self.ranks.is_sharded):
            self.save(self.run_folder if self.evaluation is None else self.evaluation.candidate)
        return is_over

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that is under way, and then for one of the last version. All ranks call it."""
        if not self.config.evaluation.inside_run:
            return
        self.await_evaluation()
        self.evaluate(0.0 if math.isinf(self.began_at) else time.monotonic() - self.began_at, at_the_end=True)
        self.await_evaluation()
        if self.writer is not None and (found := self.meters.log.flush()):
            self.writer.write(self.version, found)

    def await_evaluation(self) -> None:
        """Wait until no evaluation is under way, or for as long as one may take. All ranks call it."""
        # Its own time begins when an actor has the first task, if any comes for one.
        until = time.monotonic() + self.config.evaluation.run_timeout_s + DEAL_GRACE_S
        is_said = is_awaited = False
        while True:
            if self.evaluation is not None:
                self.meters.log.update(self.evaluation.collect(self.version))
                is_awaited = self.evaluation.is_under_way and time.monotonic() < until
            if self.ranks.sum([float(is_awaited)])[0] == 0:
                return
            if is_awaited and not is_said:
                is_said = True
                say("learner: training is over, and an evaluation is under way: Ctrl-C ends without it")
            time.sleep(POLL_S)

    def save(self, target: Path) -> bool:
        """Save the policy; nobody sees half of it. All ranks that share the policy call it, else rank 0.

        Args:
            target: rank 0's counts.

        Returns:
            Whether the disk has taken it; if not, that is said.
        """
        aside, is_saved = target.with_name(f"{target.name}.new-{os.getpid()}"), True
        try:
            self.publisher.export.save(aside, self.files)
            if self.ranks.is_main:
                shutil.rmtree(target, ignore_errors=True)
                aside.rename(target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            reason = " ".join(str(error).split())
            say(f"learner: the policy of version {self.version} cannot be saved on the disk of {target}: {reason}")
            is_saved = False
        return self.ranks.sum([float(not is_saved)])[0] == 0 if self.ranks.is_sharded else is_saved

    def save_what_was_learned(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the policy at the end of training, or when this process is told to stop.

        Not after an error, which another learner goes on from, nor where the signal has come amid a change of the
        weights, nor where it has come to ranks that share the policy, each at another place. What cannot be saved stays
        in shared memory.
        """
        if kind is not None and (self.trainer.is_stepping or not issubclass(kind, SystemExit | KeyboardInterrupt)):
            return
        if kind is not None and self.ranks.is_sharded:
            return
        target = self.run_folder / "policy"
        if self.save(target):
            if self.ranks.is_main:
                say(f"learner: the policy is saved in {target}, at version {self.version}")
                if SUPERVISED not in os.environ:  # the supervisor says it once all have ended
                    say(how_to_evaluate(self.run_folder))
            return
        self.is_saved = False
        self.publisher.keep(self.version)
        if not self.ranks.is_main:
            return
        self.endpoint.run_dir.keep()
        say(
            f"learner: version {self.version} stays in {self.endpoint.run_dir.path}, in memory until this host is "
            f"restarted: make room on the disk of {self.run_folder}, then the same command with run.resume=true goes "
            "on from there and saves it"
        )

    def while_waiting(self, what: str) -> None:
        """Called while there is no batch. what: is missing."""
        self.meters.log.update(self.publisher.publish_early(self.version, self.receiver))
        if self.view is not None:
            self.tell_of_actors()
            self.view.wait(what)

    def tell_of_actors(self) -> None:
        """Say which actors have come or gone, and the first time that a connection was refused."""
        tell_of_actors(self.receiver, self.connected)
        is_open = self.config.pipeline.bind is not None
        if is_open and not self.is_refusal_said and self.receiver.counters()["peers_refused"]:
            self.is_refusal_said = True
            say(
                f"learner: a connection to pipeline.bind={self.config.pipeline.bind} was refused, the log says why: "
                "the key of an actor must be authorised in pipeline.keys here"
            )

    def make_view(self, stack: ExitStack) -> View | None:
        """View of the run in the terminal: the supervisor's, where there is one."""
        if not self.ranks.is_main or not self.config.run.terminal:
            return None
        if SUPERVISED in os.environ:
            return SupervisorView()
        return stack.enter_context(TerminalView(self.config.learner.total_updates))

    def show(self, summary: dict[str, float]) -> None:
        """A step's metrics, to the writers and the terminal."""
        if self.writer is not None:
            self.writer.write(self.version, summary)
        if self.ranks.is_main:
            self.tell_of_actors()
        if self.view is not None:
            self.view.update(self.version, summary, self.progress)


def board_dtype(config: Config) -> torch.dtype | None:
    """Type of the weights on the board for engines; None: the learner's."""
    is_narrow = config.pipeline.weights_dtype == "engine" and config.engine.dtype == "bfloat16"
    return torch.bfloat16 if is_narrow else None


def describe(config: Config, ranks: Ranks, model: PolicyModel, version: int) -> None:
    """Say what is trained, and what about it may go wrong."""
    for caution in cautions(config, model):
        say(f"learner: {caution}")
    size = sum(p.numel() for p in model.lm.parameters())
    learning = sum(p.numel() for p in model.lm.parameters() if p.requires_grad)
    of_them = f", {learning:,} of them learn" if learning < size else ""
    print(
        f"learner: {config.model.path}, {size:,} parameters{of_them} on {ranks.device}, at version {version}",
        flush=True,
    )


def tell_of_actors(receiver: Receiver, connected: set[str]) -> None:
    """Say which actors have come or gone since the last call. connected: those of the last call, brought up to date."""
    now = set(receiver.actor_stats())
    for what, names in (("joined", now - connected), ("left", connected - now)):
        if names:
            who = ", ".join(sorted(names)) if len(names) <= 4 else f"{len(names)} actors"
            say(f"learner: {who} {what}, {len(now)} connected")
    connected.clear()
    connected.update(now)


def end_of_time(config: LearnerConfig, began_at: float) -> float:
    """When `max_minutes` are over, in seconds of `time.monotonic`. began_at: infinite before the first batch."""
    return math.inf if config.max_minutes is None else began_at + 60 * config.max_minutes


def share_done(config: LearnerConfig, version: int, elapsed_s: float) -> float:
    """Share of a run that is over, by updates or by time, whichever is further. elapsed_s: since its first batch."""
    share = version / config.total_updates
    if config.max_minutes is not None:
        share = max(share, elapsed_s / 60 / config.max_minutes)
    return min(1.0, share)


def start_model(config: Config, newest: WeightReader | None, is_main: bool = True) -> tuple[PolicyModel, int]:
    """The policy to go on from, and its version.

    Args:
        newest: board with what a killed learner published or kept last; None: the configured start.
        is_main: whether this rank says where it goes on from.
    """
    sizes = (config.model.value_hidden_size, config.model.value_trunk_gradient)
    if newest is None:
        model = PolicyModel.from_pretrained(resolve_policy(config), *sizes)
        add_adapters(model.lm, config.model.lora)
        return model, 0
    with newest.lease() as lease:
        _, of_adapters = without_prefix(lease.extra())
        # What lies on the board has its adapters merged.
        model = PolicyModel.from_pretrained(resolve_policy(config) if of_adapters else lease.path, *sizes)
        add_adapters(model.lm, config.model.lora)
        if of_adapters and not load_adapters(model.lm, of_adapters):
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} with these targets does not fit the adapters of version "
                f"{lease.version}, which this run goes on from: leave model.lora as it was, or set another run.name"
            )
        anew = "the optimizer begins" if model.load_value_head(lease.extra()) else "optimizer and value head begin"
        if is_main:
            say(f"learner: going on from version {lease.version}; {anew} anew")
        return model, lease.version


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
    """ConfigError where a learner that was started by hand would mix two runs; of what it removes it says so.

    Raises RunDirectoryError where another learner of this run is alive: before anything in its folder changes.
    """
    if SUPERVISED in os.environ:
        return
    left = find_run(config.run.name) if os.environ.get("RANK", "0") == "0" else None
    if config.run.resume:
        return
    if holds_run(Path(config.run.dir)):
        raise ConfigError(
            f"run.dir={config.run.dir} holds a run already, and two would be mixed: set another run.name, or "
            "run.resume=true to go on with what a killed learner left"
        )
    if left is not None:
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


def end_by(number: int, _frame: object) -> NoReturn:
    """End by a signal: as an exception, which undoes everything on its way out: sockets, shared memory, files.

    A second one does not cut that short.
    """
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 at the end of training, 2 for what will fail again, 1 where actors brought nothing for
    too long, 4 where the policy could not be saved, 130 after Ctrl-C, 129 after SIGHUP, 143 after SIGTERM."""
    end_with_supervisor()
    try:
        config = load(argv)
        check_ranks(config)
        check_folder(config)
        keep_settings(config)
    except (ConfigError, RunDirectoryError) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end_by)
    prepare_cpu(threads_per_process(config))
    prepare_cuda(config.model.cuda_products)
    disable_progress_bar()
    learner = config.learner
    ranks = Ranks(config.model.device, learner.stall_timeout_s, learner.sharding, learner.cpu_offload)
    try:
        return 0 if learn(config, ranks) else NOT_SAVED
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
    except (ArenaError, ConfigError, KeyFileError, MetricError, OutOfMemory, RunDirectoryError) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
