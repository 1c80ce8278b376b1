"""The learner's end of the pipeline in one object, one for each rank: weights out, tickets out, trajectories in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from impala_llm.hosts import rank_endpoint
from impala_llm.pipeline.network.keys import LearnerKeys, load_learner_keys
from impala_llm.pipeline.shared_settings import shared_settings
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.store_header import sizes
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.curriculum import Curriculum
from impala_llm.pipeline.tickets.journal_rows import Row
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.no_receiver import NoReceiver
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.relay_server import serve_weights
from impala_llm.settings import Config, longest_record
from impala_llm.trajectory import Trajectory

_log = logging.getLogger(__name__)
_KEPT_SLOTS = 2
_SENDING_S = 30.0
"""Seconds in which an episode whose time is over ends, and its trajectory or its failure arrives."""


@dataclass(frozen=True)
class PastTickets:
    """The tickets of a rank in a checkpoint."""

    rows: Sequence[Row]
    """See `TicketLedger.rows`."""
    trajectories: Sequence[Trajectory]
    """Trajectories that were received and not trained on."""


def newest_board(run_dir: RunDirectory) -> WeightReader | None:
    """Find the board with the newest version, published or kept.

    Args:
        run_dir: of the run.

    Returns:
        Its reader; None where no board holds a version.
    """
    readers = [WeightReader(run_dir.weights_path), WeightReader(run_dir.kept_path)]
    versions = [-1 if (version := reader.latest()) is None else version for reader in readers]
    newest = max(versions)
    return None if newest < 0 else readers[versions.index(newest)]


def ticket_timeout_s(config: Config) -> float:
    """Seconds after which a ticket that has brought nothing is taken from its actor. One of a whole episode brings
    nothing before it ends, so it has that episode's time at least."""
    actor, timeout_s = config.actor, config.pipeline.ticket_timeout_s
    if actor.unroll_turns is not None or actor.unroll_tokens is not None:
        return timeout_s
    return max(timeout_s, actor.episode_timeout_s + _SENDING_S)


class LearnerEndpoint:
    """Connects a learner rank to its actors. A context manager, used in this order:

        with LearnerEndpoint(config, rank, num_ranks, barrier, files) as endpoint:
            newest = endpoint.newest_weights()      board of an earlier learner of this run, if there is one
            ...                                     publish a version on endpoint.board
            endpoint.listen(version, tasks, vocab_size, batch_size)
            endpoint.receiver.drain(...)            trajectories; announce(...) versions

    On exit without an error the actors are told that the run is over. They are not told after an error, since the
    learner will be started again, see `RunDirectory.keep`. After a signal they are told only if there is no supervisor,
    which otherwise decides.

    Where a rank has several processes, those numbered `num_ranks` and above receive nothing: `restore` and `listen` do
    nothing there, and `receiver` returns a `NoReceiver`.

    Args:
        config: of the run.
        rank: of this process; from `num_ranks` on it shares a rank with another process.
        num_ranks: ranks that receive trajectories.
        barrier: returns once all ranks have called it. Called here, and in `newest_weights`.
        files: of the policy besides its weights, by name, which rank 0 puts on the boards: config.json, tokenizer.
        take_over, run_id: see `RunDirectory.create`; without effect under a supervisor, which has decided that.

    Raises:
        RunDirectoryError: another learner of this run is alive, or there is no shared memory.
        WeightsError: there is no memory for the boards' files.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        num_ranks: int,
        barrier: Callable[[], None],
        files: Mapping[str, bytes],
        take_over: bool = False,
        run_id: int | None = None,
    ) -> None:
        self._config = config
        self._rank, self._num_ranks, self._leads = rank, num_ranks, rank < num_ranks
        self._barrier = barrier
        self._receiver: Receiver | None = None
        self._stack = ExitStack()
        try:
            # Rank 0 owns the run's folder in shared memory, unless a supervisor does.
            if rank == 0:
                output = Path(config.run.dir).resolve()
                run_dir = RunDirectory.for_learner(config.run.name, take_over, run_id, output)
                self.run_dir = self._stack.enter_context(run_dir)
            barrier()
            if rank != 0:
                self.run_dir = RunDirectory.attach(config.run.name)
            beside = files if rank == 0 else None
            self.board = WeightPublisher(self.run_dir.weights_path, config.pipeline.weight_slots, beside)
            """Versions for engines."""
            self.kept = WeightPublisher(self.run_dir.kept_path, _KEPT_SLOTS, beside)
            """Versions that only a learner that is started again reads."""
        except BaseException:
            self._stack.close()
            raise

    def newest_weights(self) -> WeightReader | None:
        """Reader of the board with the newest version that an earlier learner of this run left; None: there is none."""
        newest = newest_board(self.run_dir)
        self._barrier()  # no rank may publish before all have looked
        return newest

    def restore(self, past: PastTickets) -> None:
        """Put the tickets and trajectories of a checkpoint where `listen` finds those of a learner that was killed.

        Call it before the first version is published, and only if no earlier learner has left a board. If an earlier
        learner died between this call and its first version, it has left the same trajectories: they are replaced.

        Raises:
            ArenaError: there is no memory for the tickets or the trajectories.
        """
        if not self._leads:
            return
        self.run_dir.replay_path(self._rank).unlink(missing_ok=True)
        Journal(self.run_dir.journal_path(self._rank)).rewrite(past.rows)
        if num_lost := self._store().adopt(past.trajectories):
            _log.warning(
                "%d trajectories of the checkpoint find no room in replay.capacity_mb=%d, and are played again",
                *(num_lost, self._config.replay.capacity_mb),
            )

    def listen(
        self,
        version: int,
        tasks: Sequence[int],
        vocab_size: int,
        batch_size: int,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Accept actors from this host, and from other hosts if `pipeline.bind` is set.

        Args:
            version: that the learner is at; it, or an older one, lies on the board.
            tasks: ids of the training tasks, of all ranks.
            vocab_size: token ids of trajectories must lie below.
            batch_size: trajectories of one update, of this rank.
            curriculum: decides which groups are skipped; None: none is.

        Raises:
            KeyFileError: `pipeline.keys` names a folder that cannot be used.
            RunDirectoryError, ArenaError: see `TicketLedger.recover` and `TrajectoryStore`.
            ValueError, zmq.ZMQError: see `Receiver.start` and `serve_weights`.
        """
        if not self._leads:
            return
        config, pipeline, run_dir = self._config, self._config.pipeline, self.run_dir
        keys = self._keys()
        bind = None
        if pipeline.bind is not None:
            bind = rank_endpoint(pipeline.bind, self._rank)
            if self._rank == 0:
                # The port after those of the ranks.
                served_at = rank_endpoint(pipeline.bind, self._num_ranks)
                self._stack.enter_context(serve_weights(run_dir.weights_path, served_at, keys))
        algorithm = config.algorithm
        order = TaskOrder(tasks, algorithm.group_size, config.run.seed, self._rank, self._num_ranks, curriculum)
        # Without a bound on staleness, open tickets are limited by the capacity of the buffer.
        max_open = config.replay.capacity if algorithm.max_staleness is None else None
        journal = Journal(run_dir.journal_path(self._rank))
        ledger = TicketLedger(order, batch_size, algorithm.max_staleness, max_open, version=version, journal=journal)
        receiver = Receiver(
            Endpoints(run_dir.endpoint(self._rank), bind, keys),
            ledger,
            RecordLimits(vocab_size, longest_record(config)),
            run_dir,
            self._store(),
            SessionLimits(
                heartbeat_timeout_s=pipeline.actor_timeout_s,
                ticket_timeout_s=ticket_timeout_s(config),
                settings=shared_settings(config),
            ),
            published=WeightReader(run_dir.weights_path).latest(),
        )
        receiver.start()
        self._receiver = receiver

    @property
    def receiver(self) -> Receiver:
        """Receiver of this rank, once `listen` has been called; a `NoReceiver` in processes that receive nothing."""
        if not self._leads:
            return cast(Receiver, NoReceiver())
        assert self._receiver is not None, "call listen first"
        return self._receiver

    def __enter__(self) -> LearnerEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if self._receiver is None:
                return
            self._stack.callback(self._receiver.close)
            if kind is None:  # else the run may go on, as after the time limit of a Slurm job: actors wait for that
                self._receiver.shutdown()
            elif issubclass(kind, SystemExit | KeyboardInterrupt):
                self._receiver.interrupted()

    def _store(self) -> TrajectoryStore:
        return TrajectoryStore(self.run_dir.replay_path(self._rank), *sizes(self._config.replay))

    def _keys(self) -> LearnerKeys | None:
        folder = self._config.pipeline.keys
        return None if folder is None else load_learner_keys(Path(folder).expanduser())
