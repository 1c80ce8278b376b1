"""Entry: a learner rank: TOPR on GAE, or what `algorithm` says, such as V-trace. By hand: docs/launching.md.

    receive → buffer → draw by priority → pack → forward → credit → loss → backward → reduce → step → publish → repeat

docs/pipeline.md, "Code path of a trajectory and of the weights", names the files on this way. Actors play all the while
(validation tasks too: evaluation/in_run.py): the receiver takes their trajectories and deals tickets during each step.
Each rank has a receiver, tickets and a replay shard; ranks meet only to add up. Version 0 precedes the first ticket.

A learner that was killed and started again on its host goes on from the last version that it published or kept, with
every trajectory that it had acknowledged and not yet trained on, and the optimizer of its last checkpoint; without one
optimizer and warm-ups begin anew. What a step trained on counts once the step's version, or one after it, is on a
board: that rename is the commit. Where few are published, one is kept for the next learner before the store is full.

Where shared memory is gone as well, all of it comes from the newest whole checkpoint (learning/checkpoints/): the
updates from there on are made again, under versions that were never published. Metrics and schedules count updates.
"""

import gc
import sys
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # there is no garbage among what is imported, and to look for it took a fifth of a start
    sys.path[:1] = {*sys.path[:1]} - {str(Path(__file__).resolve().parent)}  # whose modules would hide a user's

import signal
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.engines.base import ModelRefused
from impala_llm.envs import contract
from impala_llm.envs.base import Suite
from impala_llm.envs.webshop.learned_catalogues import learned_in_training, with_learned
from impala_llm.evaluation.in_run import EvaluationRounds, InRunEvaluation
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.batch_source import Batch, BatchSource, Stalled, share_arrivals, share_batch
from impala_llm.learning.checkpoints.files import CheckpointError
from impala_llm.learning.checkpoints.folder_owner import FolderOwner
from impala_llm.learning.checkpoints.kept_settings import keep_settings
from impala_llm.learning.checkpoints.past import Past, rates_of
from impala_llm.learning.checkpoints.resume import Start, check_folder
from impala_llm.learning.checkpoints.writer import Checkpointer, Stateful
from impala_llm.learning.origin import Origin, find_origin, make_model
from impala_llm.learning.packing import OutOfMemory, RestartNeeded
from impala_llm.learning.policy.model import policy_files
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.products import prepare_cpu, prepare_cuda
from impala_llm.learning.publishing import make_publisher, server_transport
from impala_llm.learning.ranks.parallel import Ranks, check_ranks, exit_process
from impala_llm.learning.saving import RankParts, Saving, UpdateEnd
from impala_llm.learning.training_time import TrainingTime, share_done
from impala_llm.observability.actor_news import ActorNews
from impala_llm.observability.meters import Meters
from impala_llm.observability.metrics import MetricError
from impala_llm.observability.terminal import make_view
from impala_llm.observability.writers import MetricWriter, last_metrics
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.network.keys import KeyFileError
from impala_llm.pipeline.shm.ring import ArenaError
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.pipeline.tickets.curriculum import Curriculum
from impala_llm.processes.compiled_code import keep_compiled_code
from impala_llm.processes.stop_signals import Stopped, StopSignals
from impala_llm.processes.supervised import NOT_SAVED, end_with_supervisor, keep_exit_codes, say, say_last, tell
from impala_llm.settings import Config
from impala_llm.trainer import Trainer

SAYS_WHAT_TO_DO = (ArenaError, CheckpointError, ConfigError, KeyFileError, MetricError, RunDirectoryError)
"""Errors that will come again, and whose message is all that the user needs."""


def learn(config: Config, ranks: Ranks, start: Start, stops: StopSignals) -> bool:
    """Train until `learner.total_updates` or `learner.max_minutes`; then save the policy. Returns whether it was."""
    torch.manual_seed(config.run.seed)
    with ExitStack() as stack:
        learner = Learner(config, ranks, stack, start, stops)
        if ranks.is_main:  # only now: those of a run that goes on are compared with the ones that it has trained with
            try:
                keep_settings(config)
            except ConfigError as error:  # as on a full disk: the ones before stay
                say(f"learner: {error}")
        while learner.progress < 1.0 and learner.step():
            pass
        if not learner.is_told_to_stop:
            learner.finish_evaluation()
    return learner.is_saved


class Learner:
    """A rank of the learner: its parts, and its step.

    Args:
        ranks: all ranks of the learner.
        stack: closes the parts at the end, and saves the policy, unless an error has ended the run.
        start: of the run, by `check_folder`.
        stops: signals of this process.
    """

    ends_together = False
    """Whether all ranks have agreed to end after the same update."""
    is_told_to_stop = False
    """Whether they have because one of them was told to."""
    is_writing = False
    """Whether a policy is being written."""
    is_saved = True
    """Whether no policy had to be left in shared memory."""

    def __init__(self, config: Config, ranks: Ranks, stack: ExitStack, start: Start, stops: StopSignals) -> None:
        self.config, self.ranks, self.stops = config, ranks, stops
        self.run_folder = Path(config.run.dir)
        self.owner = FolderOwner(self.run_folder, ranks.is_main, start.lost_owner)
        self.files = with_learned(policy_files(resolve_policy(config)), learned_in_training(config))
        rank = ranks.process, ranks.world_size, ranks.barrier
        self.endpoint = stack.enter_context(LearnerEndpoint(config, *rank, self.files, start.take_over, start.run_id))
        self.owner.on_taken = self.endpoint.run_dir.release  # where another has gone on, what lies here is stale
        stack.enter_context(self.owner)
        writers = ranks.process, ranks.world_size, ranks.num_processes
        kept = config.learner.checkpoints_kept
        self.checkpointer = Checkpointer(self.run_folder, kept, *writers, self.owner.is_taken)
        if ranks.is_main:
            self.checkpointer.begin()
        origin = find_origin(self.run_folder, self.endpoint.newest_weights(), self.checkpointer.versions, ranks)
        self.version, self.update = origin.version, origin.update
        """Version of the weights, by which engines know them; updates that the run has made."""
        # Also where checkpoints are switched off: another learner can still go on from the one that is there.
        self.notes_versions = ranks.is_main and (self.checkpointer.is_on or bool(origin.checkpoint) or origin.is_lost)
        self.model = make_model(config, origin, ranks)
        past = self.restore_tickets(origin)
        self.publisher = make_publisher(config, ranks, self.model, self.endpoint)
        self.publisher.begin(self.version)
        suite = suite_of(config)
        batch_size = config.learner.batch_size // ranks.world_size
        tasks, curriculum, least = contract.tasks(suite, "train"), None, config.algorithm.curriculum
        if config.evaluation.before_and_after:  # which would find a faulty split after the run
            contract.warn_of_shared_tasks(suite, config.evaluation.split)  # type: ignore[arg-type]  # by config.load
        if least is not None:
            curriculum = Curriculum(contract.kinds(suite, tasks), least, config.run.seed, rates_of(past))
        self.endpoint.listen(self.version, tasks, self.model.vocab_size, batch_size, curriculum)
        self.receiver = self.endpoint.receiver
        if (transport := server_transport(config, ranks, self.model, self.endpoint, stack)) is not None:
            self.publisher.transports.append(transport)

        self.batches = BatchSource(config, self.receiver, batch_size, config.run.seed + ranks.rank, curriculum)
        self.writer = self.make_writer(stack, origin)
        self.view = make_view(config.learner.total_updates, ranks.is_main and config.run.terminal, stack)
        self.actors = ActorNews(self.receiver, config.pipeline.bind)
        staleness = None if config.algorithm.credit.teaches_at_any_age else config.algorithm.max_staleness
        self.meters = Meters(self.receiver, ranks, staleness)
        if self.update > 0:
            self.meters.go_on_from(last_metrics(self.run_folder / "tensorboard"), self.update)
        self.trainer = Trainer(config, ranks, self.model)
        self.trainer.on_progress = lambda done, total: self.view.compute(self.update + 1, done, total)
        evaluation = self.make_evaluation(suite, origin, stack)
        self.saving = self.make_saving(evaluation, origin, past)
        self.evaluations = EvaluationRounds(
            config.evaluation, ranks, evaluation, self.meters.log, self.save, self.checkpointer.mark_best
        )
        before_s = 60 * origin.checkpoint.manifest.minutes_used if origin.checkpoint and origin.is_lost else 0.0
        self.time = TrainingTime(config.learner, ranks, self.endpoint.run_dir, before_s)
        self.progress = ranks.sum([ranks.is_main * share_done(config.learner, self.update, self.time.elapsed_s)])[0]
        """Share of the run that is over, by rank 0's clock: 1 at its end."""
        self.saves_next = self.saving.is_due_at_start(self.update + 1)
        """Whether the next update ends with a checkpoint."""
        stack.push(self.save_what_was_learned)
        if self.evaluations.turn(self.version, self.update, self.time.elapsed_s):  # they have ended the run before
            self.progress = 1.0

    def step(self) -> bool:
        """Take a batch, train on it, publish the next version, log. Returns whether there was a batch."""
        timer = self.trainer.timer
        self.owner.check()
        batch = self.take_batch()
        if batch is None:
            return False
        self.time.begin()
        # Noted on every rank before the gradients are summed, and so before anybody can publish the step.
        self.receiver.trained([t.unroll_id for t in batch.trajectories])
        self.saving.begin_update()
        arrivals = partial(share_arrivals, self.ranks, self.batches, self.version)
        result = self.trainer.update(batch, self.version, self.progress, arrivals)
        with timer.stage("log"):
            self.batches.learned(result.abs_advantages, result.effective_share)
            self.meters.log.merge(result.metrics.state())
        with timer.stage("publish"):
            self.version += 1
            self.update += 1
            self.reserve_version()
            # Before the announcement: a later learner then deals the tickets of the next update anew, all of them.
            noted = self.saving.tickets(self.version) if self.saves_next else None
            self.meters.log.update(self.publisher.publish(self.version, self.receiver))
        with timer.stage("log"):
            elapsed_s = self.time.elapsed_s
            share, due = 0.0, 0.0
            if self.ranks.is_main:  # by whose clock all go
                share = share_done(self.config.learner, self.update, elapsed_s)
                # Rank 0 is the last to have written its part.
                due = float(self.saving.is_due(self.update + 1, saves_now=noted is not None))
                self.meters.log.add("progress/seconds", elapsed_s)
                self.time.note(elapsed_s)
            self.progress, due = self.ranks.sum([share, due])
            self.saves_next = due > 0
            if self.evaluations.turn(self.version, self.update, elapsed_s):
                self.progress = 1.0
            intake = self.batches.end_step()
            if self.ranks.leads:
                self.meters.observe(intake, batch, self.version)
            save_every = self.config.learner.save_every
            if save_every and self.update % save_every == 0:
                self.save(self.run_folder / f"policy-{self.update}")
            self.saving.end_update()
        self.meters.finish_step(timer.end_step(), batch.num_tokens)
        del batch  # its space is wanted while the next one is waited for
        with timer.stage("log"):  # of the step that begins
            self.show(self.meters.gather())
            if noted is not None:  # with the counts of this update in it
                self.saving.save(noted, self.update_end())
        return True

    def take_batch(self) -> Batch | None:
        """Wait for a batch of this rank. None on all ranks if one of them was told to stop, or has no batch in time."""
        timer = self.trainer.timer
        with timer.stage("receive"):
            batch = None if self.stops.number else self.batches.batch_at_hand(self.version)
        with timer.stage("idle"):
            if batch is None and not self.stops.number and self.ranks.leads:
                with suppress(Stopped):
                    batch = self.batches.next_batch(self.version, self.time.ends_at, self.while_waiting)
            self.meters.log.update(self.publisher.wait_for_ranks(self.version, self.receiver, self.is_signalled))
        is_missing = batch is None if self.ranks.leads else self.stops.number > 0
        is_over, is_told = self.ranks.sum([float(is_missing), float(self.stops.number)], of_processes=True)
        if is_over:
            self.stop_together(is_told > 0)
            return None
        with timer.stage("receive"):
            return share_batch(self.ranks, batch)

    def reserve_version(self) -> None:
        """Note on the disk that the learner's version will be published."""
        if self.notes_versions:
            self.checkpointer.versions.reserve(self.version, self.version - self.update)

    def update_end(self) -> UpdateEnd:
        """The last update that is over."""
        patience = self.config.evaluation.patience if self.evaluations.is_over else None
        return UpdateEnd(self.update, self.version, self.time.elapsed_s, patience or 0)

    # --- the start

    def restore_tickets(self, origin: Origin) -> Past | None:
        """Put back what a checkpoint knows of tickets, where nothing else does, and note whose versions will follow.

        Returns:
            The state of this rank in the checkpoint; None where there is none.
        """
        past = origin.past(self.ranks)
        if past is not None and origin.is_lost:
            self.endpoint.restore(past.tickets)
            self.ranks.barrier()
        if self.ranks.is_main:
            self.owner.look()  # before anything is written: another one may have begun at the same time
            versions = self.checkpointer.versions
            versions.run_id = self.endpoint.run_dir.run_id
            if origin.is_lost:  # on the disk first: what lies in another host's shared memory is stale from now on
                versions.begin_life()
            self.endpoint.run_dir.note_learner(versions.life or 0, self.ranks.world_size)
        self.reserve_version()
        return past

    def make_writer(self, stack: ExitStack, origin: Origin) -> MetricWriter | None:
        """Writer of the metrics, on rank 0. Those of a run that begins again are replaced from its start on."""
        if not self.ranks.is_main:
            return None
        self.owner.look()
        folder, names = self.run_folder / "tensorboard", self.config.run.metric_writers
        writer = stack.enter_context(MetricWriter(folder, names, -1 if origin.begins else self.update))
        writer.write_text("settings", to_yaml(self.config))
        return writer

    def make_evaluation(self, suite: Suite, origin: Origin, stack: ExitStack) -> InRunEvaluation | None:
        """Evaluations inside of the run, on rank 0."""
        config, begun = self.config.evaluation, 0 if origin.checkpoint else self.update
        if not config.inside_run or not self.ranks.is_main:
            return None
        tasks = contract.tasks(suite, "validation")
        warmup = begun + self.config.learner.value_warmup_updates  # which begins again without a checkpoint
        evaluation = InRunEvaluation(config, self.receiver, tasks, self.run_folder, self.update, warmup)
        # Where another learner has gone on with the run the candidate is that one's.
        stack.callback(lambda: None if self.owner.is_taken() else evaluation.close())
        return evaluation

    def make_saving(self, evaluation: InRunEvaluation | None, origin: Origin, past: Past | None) -> Saving:
        """Checkpoints of this rank, whose state is that of the one that it goes on from."""
        others: dict[str, Stateful] = {"trainer": self.trainer, "meters": self.meters}
        if evaluation is not None:
            others["evaluation"] = evaluation
        learned = self.model, self.trainer.optimizer
        parts = RankParts(self.ranks, self.endpoint, *learned, self.batches, self.publisher, self.files, others)
        saving = Saving(self.config.learner, self.checkpointer, parts, origin.checkpoint)
        if origin.checkpoint is not None and past is not None:
            saving.restore(origin.checkpoint, past, self.version, origin.is_lost)
            self.trainer.num_updates = self.update
        self.trainer.before_change = saving.before_change
        self.stops.holds_back = lambda: saving.holds_signals_back
        self.stops.waits_on = lambda: self.is_writing or saving.outlasts_signals
        self.stops.on_wait = lambda: tell(saving=True)  # the supervisor then waits longer
        return saving

    # --- while it trains

    def is_signalled(self) -> bool:
        """Return whether this process is told to stop. Raises FolderTaken where another learner has gone on."""
        self.owner.check()
        return self.stops.number > 0

    def while_waiting(self, what: str) -> None:
        """Publish what tickets wait for, and show what is missing. Called again and again while there is no batch.

        Args:
            what: is missing, in words.

        Raises:
            Stopped: a signal has come, to this process or another one of the learner.
            FolderTaken: another learner has gone on with the run.
        """
        self.meters.log.update(self.publisher.publish_early(self.version, self.receiver, self.is_signalled))
        if self.ranks.is_main:
            self.actors.tell()
        self.view.wait(what)

    def show(self, summary: dict[str, float]) -> None:
        """Pass a step's metrics to the writers and the terminal."""
        if self.writer is not None:
            self.writer.write(self.update, summary)
        if self.ranks.is_main:
            self.actors.tell()
        self.view.update(self.update, summary, self.progress)

    def save(self, target: Path) -> None:
        """Save the policy amid the run, see `Saving.save_policy`. All ranks call it.

        However long that takes, a signal waits for it on all of them, and so does the supervisor that has sent it: the
        ranks can only end together at the end of an update.
        """
        self.is_writing = True
        if self.ranks.is_main:
            tell(saving=True)
        if self.ranks.is_main or self.ranks.is_sharded:
            self.saving.save_policy(target, self.update)
        self.ranks.barrier()
        if self.ranks.is_main and not self.stops.number:  # else the supervisor waits already, for the end as well
            tell(saving=False)
        self.is_writing = False

    # --- the end

    def finish_evaluation(self) -> None:
        """Wait for the evaluation that is under way, and then for one of the last version. All ranks call it."""
        publish = partial(self.publisher.publish_last, self.version, self.receiver)
        is_told = self.evaluations.finish(
            self.version, self.update, self.time.elapsed_s, self.is_signalled, publish, self.write_rest
        )
        self.stop_together(is_told)

    def stop_together(self, is_told: bool) -> None:
        """End training on all ranks. is_told: a rank was told to stop; it raises what its signal asks for."""
        self.ends_together, self.is_told_to_stop = True, is_told
        # A signal that has come to this rank since the ranks have agreed waits: the others do not know of it.
        if is_told:
            self.stops.check()

    def write_rest(self) -> None:
        """Write the metrics that have come since the last step."""
        if self.writer is not None and (found := self.meters.log.flush()):
            self.writer.write(self.update, found)

    def save_what_was_learned(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the policy at the end of training, or when this process is told to stop.

        Not after an error, which another learner goes on from, nor where the signal has come amid a change of the
        weights, nor where it has come to ranks that share the policy, each at another place. What is not saved stays in
        shared memory. Raises FolderTaken where another learner has gone on with the run: it would lose its own.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)  # of a signal that waits already
        if kind is not None and (self.trainer.is_stepping or not issubclass(kind, SystemExit | KeyboardInterrupt)):
            return
        ends_together = kind is None or self.ends_together or self.ranks.num_processes == 1
        if self.ranks.is_sharded and not ends_together:
            return
        self.is_writing = True  # to the end of this process: nothing interrupts what follows
        self.owner.look()
        tell(saving=True)
        self.is_saved = self.saving.save_at_end(self.run_folder, self.update_end(), ends_together)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 at the end of training, 2 for what will fail again, 1 where actors brought nothing for
    too long, or where another start is needed, 4 where the policy could not be saved, 130 after Ctrl-C, 129 after
    SIGHUP, 143 after SIGTERM."""
    end_with_supervisor()
    keep_exit_codes()
    try:
        config = load(argv)
        check_ranks(config)
        start = check_folder(config)
    except (ConfigError, RunDirectoryError) as error:
        say_last(f"learner: {error}")
        return 2
    stops = StopSignals()
    prepare_cpu(threads_per_process(config))
    prepare_cuda(config.model.cuda_products)
    keep_compiled_code(Path(config.run.dir) / "compiled")
    disable_progress_bar()
    ranks = Ranks.of(config)
    try:
        return 0 if learn(config, ranks, start, stops) else NOT_SAVED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (OutOfMemory, RestartNeeded, Stalled) as error:
        say_last(f"learner: {error}", ranks.num_processes == 1)
        return 2 if isinstance(error, OutOfMemory) else 1
    except (ModelRefused, contract.EnvironmentFault) as error:
        if ranks.is_main:
            traceback.print_exception(error)
            say_last(f"learner: {error}")
        return 2
    except SAYS_WHAT_TO_DO as error:
        say_last(f"learner: {error}")
        return 2
    finally:
        ranks.close()


def run(argv: Sequence[str]) -> NoReturn:
    """The whole life of a rank's process."""
    gc.freeze()  # what is imported stays to the end: later collections, which stop all threads, need not look at it
    gc.enable()
    exit_process(main(argv))


if __name__ == "__main__":
    run(sys.argv[1:])
