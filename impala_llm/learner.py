"""Entry: a learner rank. By hand: `python impala_llm/learner.py key=value ...`, several on one host by `torchrun`.

    receive → buffer → draw by priority → pack → forward → credit → loss → backward → reduce → step → publish → repeat

Actors play on all the while: the receiver takes their trajectories and deals tickets during every step. Each
rank has its own receiver, tickets and replay shard; ranks meet only to add up counts, gradients and metrics. Policy
version v is the policy after v optimizer steps; version 0 is published before the first ticket is dealt.

A learner that was killed and started again on its host goes on from the last version that it published or kept, with
every trajectory that it had acknowledged and not yet trained on, and the optimizer of its last checkpoint; without one
optimizer and warm-ups begin anew. What a step trained on counts once the step's version, or one after it, is on a
board: that rename is the commit. Where versions are published rarely or never, one is kept, for the next learner alone,
before the trajectories that wait for it fill the trajectory store.

Where shared memory is gone as well, after a lost host or at the end of a run, all of it comes from the newest whole
checkpoint (learning/checkpoint.py): the updates from there on are made again, under versions that were never published.
So versions may be ahead of updates; metrics and schedules count updates.

Actors also play validation tasks now and then, while training goes on (in_run_evaluation.py).
"""

import logging
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from impala_llm.learning.checkpoint import (
    Checkpointer,
    CheckpointReader,
    State,
    Stateful,
    load_random_state,
    random_state,
    tensors_of,
)
from impala_llm.learning.checkpoint_files import (
    FOLDER,
    CheckpointError,
    VersionMark,
    name_of,
    newest_whole,
    read_manifest,
)
from impala_llm.learning.lora import add_adapters, is_adapted, load_adapters, without_prefix
from impala_llm.learning.model import PolicyModel, policy_files
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.past import Past
from impala_llm.learning.policy_files import resolve_policy
from impala_llm.learning.products import prepare_cpu, prepare_cuda, prepare_memory
from impala_llm.learning.publishing import VersionPublisher, send_to_servers
from impala_llm.learning.resume import Start, how_to_start
from impala_llm.observability.meters import Meters
from impala_llm.observability.metrics import MetricError
from impala_llm.observability.terminal import SupervisorView, TerminalView, View
from impala_llm.observability.writers import MetricWriter, last_metrics
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.network.keys import KeyFileError
from impala_llm.pipeline.shm.record import record_bytes
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.run_directory import RunDirectoryError, find_run
from impala_llm.pipeline.tickets.journal_rows import Row
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.programs import how_to_evaluate
from impala_llm.settings import Config, LearnerConfig
from impala_llm.supervised import SUPERVISED, end_with_supervisor, say, tell
from impala_llm.trainer import Trainer

_log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.1
DEAL_GRACE_S = 10.0
"""Seconds in which an actor is expected to have the first task of an evaluation that is awaited."""
STOP_PATIENCE_S = 4.0
"""Seconds for which a signal waits for the end of an update. The supervisor waits for five."""
Tickets = tuple[Sequence[Row], Mapping[int, Callable[[], memoryview]]]
"""Rows of the tickets of a rank, and the records that they have brought: see `Receiver.rows` and `held`."""
NOT_SAVED = 4
"""Exit code: training is over, and its policy could not be saved."""


class _Stopped(Exception):
    """A signal has come while the learner waits for a batch."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP of a rank. As an exception one undoes everything on its way out: sockets, shared
    memory, files; while `holds_back` says so it waits for `check`, for a few seconds at most. A second one does not cut
    that short."""

    def __init__(self) -> None:
        self.number = 0
        """Signal that has come."""
        self.holds_back: Callable[[], bool] = lambda: False
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, lambda *_: self.check())

    def check(self) -> None:
        """Raise KeyboardInterrupt or SystemExit where a signal has come."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.number:
            raise KeyboardInterrupt if self.number == signal.SIGINT else SystemExit(128 + self.number)

    def _receive(self, number: int, _frame: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.number = number
        if self.holds_back():
            signal.setitimer(signal.ITIMER_REAL, STOP_PATIENCE_S)
        else:
            self.check()


def learn(config: Config, ranks: Ranks, start: Start, stops: StopSignals) -> bool:
    """Train until `learner.total_updates` or `learner.max_minutes`, whichever comes first; then save the policy.

    Returns:
        Whether it could be saved.
    """
    torch.manual_seed(config.run.seed)
    with ExitStack() as stack:
        learner = Learner(config, ranks, stack, start, stops)
        while learner.progress < 1.0 and learner.step():
            pass
        learner.finish_evaluation()
    return learner.is_saved


class Learner:
    """A rank of the learner: its parts, and its step.

    Args:
        stack: what is to be undone at the end, with the error that ended the run, if one did.
        start: what `how_to_start` has found, where no supervisor has asked it.
    """

    def __init__(self, config: Config, ranks: Ranks, stack: ExitStack, start: Start, stops: StopSignals) -> None:
        self.config, self.ranks, self.stops = config, ranks, stops
        self.run_folder = Path(config.run.dir)
        self.files = policy_files(resolve_policy(config))
        batch_size = config.learner.batch_size // ranks.world_size

        self.endpoint = stack.enter_context(
            LearnerEndpoint(
                config, ranks.rank, ranks.world_size, ranks.barrier, self.files, start.take_over, start.run_id
            )
        )
        self.checkpointer = Checkpointer(self.run_folder, config.learner.checkpoints_kept, ranks.rank, ranks.world_size)
        if ranks.is_main:
            self.checkpointer.begin()
        newest = self.endpoint.newest_weights()
        origin = find_origin(self.run_folder, newest, self.checkpointer.versions, ranks)
        checkpoint, is_on_board = origin.checkpoint, origin.board is not None
        beside = checkpoint.manifest.path.name if checkpoint is not None and is_on_board else None
        self.model, _ = start_model(config, origin.board, ranks.is_main, beside)
        self.version, self.update = origin.version, origin.update
        """Of the weights, for engines; updates of the run."""
        if ranks.is_sharded:  # whole, before it is cut; in the host's memory, as a device may not hold it
            self.model.check(config.engine.max_length)
        ranks.place(self.model, config.learner.precision)
        dtype = board_dtype(config)
        # Of the board's version a checkpoint has what a narrower type on the board has not.
        is_exact = checkpoint is not None and checkpoint.manifest.version == self.version and dtype is not None
        if checkpoint is not None and (is_exact or not is_on_board):
            checkpoint.load_model(self.model)
        if not ranks.is_sharded:
            self.model.check(config.engine.max_length)
        if ranks.is_main:
            describe(config, ranks, self.model, self.version)
        interval, staleness = config.learner.sync_interval, config.algorithm.max_staleness
        boards = self.endpoint.board, self.endpoint.kept
        self.publisher = VersionPublisher(ranks, self.model, *boards, interval, staleness, dtype=dtype)
        past = None if checkpoint is None else Past.of(checkpoint, ranks.rank, ranks.world_size, self.version)
        if past is not None and origin.is_lost:
            self.endpoint.restore(past.tickets)
            ranks.barrier()
        self.reserve_version()
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
            self.writer = stack.enter_context(MetricWriter(folder, names, self.update))
            self.writer.write_text("settings", to_yaml(config))
        self.view = self.make_view(stack)
        self.meters = Meters(self.receiver, ranks, staleness)
        if self.version > 0:
            self.meters.go_on_from(last_metrics(self.run_folder / "tensorboard"))
        self.trainer = Trainer(
            config, ranks, self.model, self.batches.buffer, self.meters.log, self.batches.replay_fraction
        )
        self.evaluation: InRunEvaluation | None = None
        """On rank 0, where evaluations inside of the run are wanted."""
        if config.evaluation.inside_run and ranks.is_main:
            held_out = contract.tasks(suite, "validation")
            self.evaluation = InRunEvaluation(config.evaluation, self.receiver, held_out, self.run_folder, self.version)
            stack.callback(self.evaluation.close)
        self.used_s = 0.0
        """Time that the run had trained for when this host was given it."""
        self.stateful: dict[str, Stateful] = {"trainer": self.trainer, "meters": self.meters}
        """Further parts with a state, which is in each checkpoint."""
        if self.evaluation is not None:
            self.stateful["evaluation"] = self.evaluation
        if checkpoint is not None and past is not None:
            self.restore(checkpoint, past, origin.is_lost)
        self.undone: dict[str, Any] | None = None
        """Amid an update, until the weights change: states of `stateful` as they were before."""
        self.is_changed = False
        """Whether weights have changed since the last update that is over."""
        self.trainer.before_change = self.before_change
        self.ends_together = False
        """Whether all ranks have agreed to end after the same update."""
        self.saved_at = time.monotonic()
        """When the last checkpoint was begun."""
        self.saved = None if checkpoint is None else (checkpoint.manifest.update, checkpoint.manifest.version)
        """Update and version of the last checkpoint."""
        self.saves_next = self.is_update_to_save()
        """Whether the next update ends with a checkpoint."""
        stops.holds_back = self.holds_back
        stack.push(self.save_what_was_learned)
        self.is_saved = True
        """Whether no policy had to be left in shared memory."""
        self.is_refusal_said = False
        """Whether it was said that a connection was refused."""
        self.connected: set[str] = set()
        """Actors that were connected when it was last said which are."""
        self.progress = self.update / config.learner.total_updates
        """Share of the run that is over: 1 at its end."""
        # The time of the run counts from its first batch: how long engines take to come up is not the learner's.
        self.began_at = math.inf
        self.evaluate(0.0)

    def step(self) -> bool:
        """Take a batch, train on it, publish the next version, log. Returns whether there was a batch."""
        timer = self.trainer.timer
        with timer.stage("receive"):
            batch = None if self.stops.number else self.batches.batch_at_hand(self.version)
        with timer.stage("idle"):
            if batch is None and not self.stops.number:
                end = end_of_time(self.config.learner, self.began_at)
                with suppress(_Stopped):
                    batch = self.batches.next_batch(self.version, end, self.while_waiting)
            self.meters.log.update(self.publisher.wait_for_ranks(self.version, self.receiver))
        # Ranks end together: where one is told to stop, or has waited in vain for the rest of the time, all do.
        if self.ranks.sum([float(batch is None)])[0] > 0:
            self.ends_together = True
            self.stops.check()
            return False
        assert batch is not None
        if math.isinf(self.began_at):
            began_at = self.endpoint.run_dir.began_at(self.used_s) if self.ranks.is_main else 0.0
            self.began_at = self.ranks.sum([began_at])[0]
        # Noted on every rank before the gradients are summed, and so before anybody can publish the step.
        self.receiver.trained([t.unroll_id for t in batch.trajectories])
        self.undone = self.states()
        self.trainer.update(batch, self.version, self.progress, partial(self.batches.arrivals, self.version))
        with timer.stage("publish"):
            self.version += 1
            self.update += 1
            self.reserve_version()
            # Before the announcement: a later learner then deals the tickets of the next update anew, all of them.
            noted = self.tickets() if self.saves_next else None
            self.meters.log.update(self.publisher.publish(self.version, self.receiver))
        with timer.stage("log"):
            elapsed_s = time.monotonic() - self.began_at
            share, due = 0.0, 0.0
            if self.ranks.is_main:  # by whose clock all go
                share = share_done(self.config.learner, self.update, elapsed_s)
                # Rank 0 is the last to have written its part.
                is_due = self.is_update_to_save() or self.is_time_to_save()
                due = float(is_due and not self.checkpointer.is_busy)
                self.meters.log.add("progress/seconds", elapsed_s)
            self.progress, due = self.ranks.sum([share, due])
            self.saves_next = due > 0
            if self.evaluate(elapsed_s):
                self.progress = 1.0
            self.meters.observe(self.batches, batch, self.version)
            save_every = self.config.learner.save_every
            if save_every and self.update % save_every == 0 and (self.ranks.is_main or self.ranks.is_sharded):
                self.save(self.run_folder / f"policy-{self.update}")
            self.batches.end_step()
            self.undone, self.is_changed = None, False
            if noted is not None:
                self.save_checkpoint(noted)
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
            self.collect_evaluation(self.evaluation)
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
            self.writer.write(self.update, found)

    def await_evaluation(self) -> None:
        """Wait until no evaluation is under way, or for as long as one may take. All ranks call it."""
        # Its own time begins when an actor has the first task, if any comes for one.
        until = time.monotonic() + self.config.evaluation.run_timeout_s + DEAL_GRACE_S
        is_said = is_awaited = False
        while True:
            if self.evaluation is not None:
                self.collect_evaluation(self.evaluation)
                is_awaited = self.evaluation.is_under_way and time.monotonic() < until
            if self.ranks.sum([float(is_awaited)])[0] == 0:
                return
            if is_awaited and not is_said:
                is_said = True
                say("learner: training is over, and an evaluation is under way: Ctrl-C ends without it")
            self.stops.check()
            time.sleep(POLL_S)

    def collect_evaluation(self, evaluation: InRunEvaluation) -> None:
        """Take in the evaluation that has ended, if one has; of the best one the checkpoint is kept."""
        before = evaluation.schedule.best
        self.meters.log.update(evaluation.collect(self.version))
        if (best := evaluation.schedule.best) is not None and best != before:
            self.checkpointer.mark_best(*best)

    # --- checkpoints

    def is_update_to_save(self) -> bool:
        """Whether the next update is one of those by number that end with a checkpoint."""
        every = self.config.learner.checkpoint_every
        return bool(every) and (self.update + 1) % every == 0

    def is_time_to_save(self) -> bool:
        """Whether a checkpoint is due by time, or for the best policy so far."""
        minutes = self.config.learner.checkpoint_minutes
        is_late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        return is_late or self.checkpointer.is_wanted

    def reserve_version(self) -> None:
        """Note on the disk that the learner's version will be published."""
        if self.ranks.is_main and self.checkpointer.is_on:
            self.checkpointer.versions.reserve(self.version, self.version - self.update)

    def before_change(self) -> None:
        """Called before the weights change."""
        self.is_changed = True
        self.checkpointer.wait_until_copied()

    def holds_back(self) -> bool:
        """Whether a signal waits for the end of the update: not while its gradient is computed on the only rank."""
        return self.undone is None or self.is_changed or self.ranks.world_size > 1

    def states(self) -> dict[str, Any]:
        """States of all that is in `stateful`."""
        return {name: part.state_dict() for name, part in self.stateful.items()}

    def tickets(self) -> Tickets:
        """The tickets of this rank, and the trajectories that they have brought, as of the learner's version."""
        return self.receiver.rows(self.version), self.receiver.held()

    def state(self, tickets: Tickets) -> State:
        """What a checkpoint holds: as of the last update that is over."""
        rows, held = tickets
        moment = self.batches.moment()
        records: dict[int, Callable[[], bytes | memoryview]] = dict(held)
        for t in moment.buffer.trajectories:
            if t.unroll_id not in held:
                records[t.unroll_id] = partial(record_bytes, t)
        plain = {
            "states": self.states() if self.undone is None else self.undone,
            "batches": self.batches.state_dict(moment),
            "rows": np.array(rows, np.int64),
            "held": list(held),
            "random": random_state(),
        }
        exports = self.ranks.is_main and not self.ranks.is_sharded and not is_adapted(self.model.lm)
        used_s = self.used_s if math.isinf(self.began_at) else time.monotonic() - self.began_at
        return State(
            update=self.update,
            version=self.version,
            run_id=self.endpoint.run_dir.run_id,
            minutes_used=used_s / 60,
            plain=plain,
            records=records,
            tensors=tensors_of(self.model, self.trainer.optimizer, self.ranks.is_main),
            policy=dict(self.model.policy_weights()) if exports else {},
            files=self.model.config_files(self.files) if exports else {},
        )

    def save_checkpoint(self, tickets: Tickets) -> None:
        """Begin to write a checkpoint of the last update that is over. All ranks call it."""
        if not self.checkpointer.is_on:
            return
        # Ranks meet in an export that each writes a part of, and adapters are merged into one: that is not put off.
        if self.ranks.is_sharded or (is_adapted(self.model.lm) and self.ranks.is_main):
            try:
                self.publisher.export.save(self.checkpointer.export_folder(self.update), self.files)
            except (OSError, SafetensorError) as error:
                _log.warning("the checkpoint has no plain export: %s", error)
        if self.checkpointer.save(self.state(tickets)):
            self.saved_at, self.saved = time.monotonic(), (self.update, self.version)

    def restore(self, checkpoint: CheckpointReader, past: Past, is_lost: bool) -> None:
        """Take over the state of a checkpoint beside weights and tickets.

        Args:
            is_lost: also what the trajectory store and the buffer held; else they lie in shared memory.
        """
        checkpoint.load_optimizer(self.trainer.optimizer)
        for name, state in past.plain["states"].items():
            if name in self.stateful:
                self.stateful[name].load_state_dict(state)
        self.trainer.num_updates = self.update
        if not is_lost:
            return
        self.used_s = 60 * checkpoint.manifest.minutes_used
        load_random_state(past.plain["random"])
        arrived = {t.unroll_id: t for t in self.receiver.drain(0.0)}
        self.batches.load_state_dict(past.plain["batches"], {**past.settled, **arrived}, self.version)

    def save_last(self) -> None:
        """Write the last checkpoint, of the last update that is over, and return once it is on the disk."""
        if not self.checkpointer.is_on or self.is_changed or self.update == 0:
            return
        is_there = self.checkpointer.wait()
        if self.saved is None or self.saved[0] != self.update:
            self.save_checkpoint(self.tickets())
            is_there = self.checkpointer.wait()
        if is_there and self.ranks.is_main and self.saved == (self.update, self.version):
            self.checkpointer.versions.end(self.version)

    # --- the end

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
        signal.setitimer(signal.ITIMER_REAL, 0)  # nothing interrupts what follows
        if kind is not None and (self.trainer.is_stepping or not issubclass(kind, SystemExit | KeyboardInterrupt)):
            return
        ends_together = kind is None or self.ends_together or self.ranks.world_size == 1
        if self.ranks.is_sharded and not ends_together:
            return
        tell(saving=True)
        if self.ranks.is_main or self.ranks.is_sharded:
            self.save_policy()
        if ends_together:
            self.save_last()

    def save_policy(self) -> None:
        """Save the last policy, on the disk or, where that is full, in shared memory."""
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
        if self.stops.number:
            raise _Stopped
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
            self.writer.write(self.update, summary)
        if self.ranks.is_main:
            self.tell_of_actors()
        if self.view is not None:
            self.view.update(self.update, summary, self.progress)


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


def share_done(config: LearnerConfig, update: int, elapsed_s: float) -> float:
    """Share of a run that is over, by updates or by time, whichever is further. elapsed_s: since its first batch."""
    share = update / config.total_updates
    if config.max_minutes is not None:
        share = max(share, elapsed_s / 60 / config.max_minutes)
    return min(1.0, share)


@dataclass(frozen=True)
class Origin:
    """What a learner goes on from."""

    update: int
    version: int
    """For its first weights: of a lost host's checkpoint one that was never published."""
    board: WeightReader | None
    """Board with these weights; None: they are those of the checkpoint, or the configured start."""
    checkpoint: CheckpointReader | None
    """The newest whole one: of it come at least the optimizer and the state of the trainer."""
    is_lost: bool
    """Whether shared memory is gone, and tickets, trajectories and replay come from the checkpoint."""


def find_origin(run_folder: Path, newest: WeightReader | None, versions: VersionMark, ranks: Ranks) -> Origin:
    """Find what the learner goes on from; rank 0 says so where it is a checkpoint. All ranks call it.

    Args:
        newest: board with what an earlier learner of this run has left in shared memory.
    """
    update = -1
    if ranks.is_main:
        manifest, passed_over = newest_whole(run_folder)
        for reason in passed_over:
            say(f"learner: checkpoint {reason}: it is passed over")
        update = -1 if manifest is None else manifest.update
    update = int(ranks.sum([float(update) if ranks.is_main else 0.0])[0])
    checkpoint = None
    if update >= 0:
        checkpoint = CheckpointReader(read_manifest(run_folder / FOLDER / name_of(update)))
    on_board = None if newest is None else newest.latest()
    if checkpoint is None or (on_board is not None and on_board >= checkpoint.manifest.version):
        version = on_board or 0
        return Origin(max(0, version - versions.ahead), version, newest, checkpoint, is_lost=False)
    saved, is_lost = checkpoint.manifest, on_board is None
    version = versions.unused(saved.version) if is_lost else saved.version
    if ranks.is_main:
        under = "" if version == saved.version else f", as version {version}: the {version - 1} before may be in use"
        say(f"learner: going on from update {update}, checkpoint {saved.path}{under}")
        if saved.num_ranks != ranks.world_size and is_lost:
            say(
                f"learner: it is of learner.num_ranks={saved.num_ranks}: tickets, trajectories and replay are dealt "
                f"among {ranks.world_size} anew, and the order of random draws is another"
            )
    return Origin(update, version, None, checkpoint, is_lost)


def start_model(
    config: Config, newest: WeightReader | None, is_main: bool = True, checkpoint: str | None = None
) -> tuple[PolicyModel, int]:
    """The policy to go on from, and its version.

    Args:
        newest: board with what a killed learner published or kept last; None: the configured start.
        is_main: whether this rank says where it goes on from.
        checkpoint: name of the one that the optimizer comes from; None: it begins anew.
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
        is_rounded = not of_adapters and "BF16" in {dtype for dtype, _, _ in lease.tensors(verify=False).values()}
        if is_main:
            if is_rounded:
                say(
                    f"learner: version {lease.version} lies on the board in bfloat16: unless a checkpoint has it, its "
                    "weights are rounded; pipeline.weights_dtype=float32 avoids that"
                )
            rest = f"{anew} anew" if checkpoint is None else f"the optimizer is that of checkpoint {checkpoint}"
            say(f"learner: going on from version {lease.version}; {rest}")
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


def check_folder(config: Config) -> Start:
    """How a learner that was started by hand begins; of what it removes it says so.

    Raises ConfigError where it would mix two runs, and RunDirectoryError where another learner of this run is alive:
    before anything in its folder changes.
    """
    if SUPERVISED in os.environ or os.environ.get("RANK", "0") != "0":
        return Start()
    start = how_to_start(config)
    if not start.take_over and start.run_id is None and find_run(config.run.name) is not None:
        print(
            f"learner: what an earlier learner of run {config.run.name!r} left in shared memory is removed, and its "
            "actors are told to end: run.resume=true would have gone on with it",
            flush=True,
        )
    return start


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
    too long, 4 where the policy could not be saved, 130 after Ctrl-C, 129 after SIGHUP, 143 after SIGTERM."""
    end_with_supervisor()
    try:
        config = load(argv)
        check_ranks(config)
        start = check_folder(config)
        keep_settings(config)
    except (ConfigError, RunDirectoryError) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    stops = StopSignals()
    prepare_cpu(threads_per_process(config))
    prepare_cuda(config.model.cuda_products)
    if config.learner.activation_checkpointing:
        prepare_memory()
    disable_progress_bar()
    learner = config.learner
    ranks = Ranks(config.model.device, learner.stall_timeout_s, learner.sharding, learner.cpu_offload)
    try:
        return 0 if learn(config, ranks, start, stops) else NOT_SAVED
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
    except (
        ArenaError,
        CheckpointError,
        ConfigError,
        KeyFileError,
        MetricError,
        OutOfMemory,
        RunDirectoryError,
    ) as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
