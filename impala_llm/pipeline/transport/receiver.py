"""Learner rank's end of the channel: receives trajectories, grants tickets, announces weights.

Invariant: a trajectory is acknowledged once it lies, valid, in the trajectory store, which outlives this process, and
each is stored once. Those of a trained step stay stored until weights of that step, or of a later one, are on a board.

One thread at a time serves the sockets and the sessions of actors: the receiver's own, or the learner's while it waits
for trajectories (leader_follower.py); its work is in message_loop.py. Both threads may use at any time the ledger
and the inbox, each of which has a lock, and `TrajectoryStore.end`. Messages: see messages.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from impala_llm.pipeline.shm import record_kernels
from impala_llm.pipeline.shm.record import MAX_TOKENS
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.journal_rows import Row
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.transport.actor_sockets import ActorSockets, Address, Endpoints
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation, EvaluationTasks
from impala_llm.pipeline.transport.ingest import Inbox, Ingest, ReceiverError, too_long
from impala_llm.pipeline.transport.leader_follower import LeaderFollower
from impala_llm.pipeline.transport.message_loop import MessageLoop
from impala_llm.pipeline.transport.messages import RUN_OVER
from impala_llm.pipeline.transport.sessions import SessionLimits, SessionRegistry
from impala_llm.processes.open_files import raise_limit
from impala_llm.trajectory import Trajectory

__all__ = ["Endpoints", "Receiver", "ReceiverError", "RecordLimits", "SessionLimits"]

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_MAX_STEPS_SHARE = 0.1
"""Share of the trajectory store for trained trajectories of versions on no board; see `must_keep`. The store has a
fifth more than the buffer needs."""


@dataclass(frozen=True)
class RecordLimits:
    """Limits that a record must keep to.

    Attributes:
        vocab_size: bound that token ids must lie below.
        max_tokens: of a trajectory.
    """

    vocab_size: int
    max_tokens: int = MAX_TOKENS


class Receiver:
    """Receives trajectories for one learner rank. Call `start`, then `drain` in the training loop.

    A step of the learner: `drain` until there is a batch, `trained`, train, publish the weights, `announce`.

    Args:
        endpoints: where to listen.
        ledger: only this receiver changes it from now on.
        records: limits of a trajectory.
        run_dir: of the run, with the arenas of actors on this host.
        store: keeps the trajectories. `start` takes over those that an earlier process left there, with the ledger's
            journal.
        sessions: limits of an actor's session.
        published: version that actors find on the board, where that is not the ledger's.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        ledger: TicketLedger,
        records: RecordLimits,
        run_dir: RunDirectory,
        store: TrajectoryStore,
        sessions: SessionLimits = SessionLimits(),  # noqa: B008  # immutable
        published: int | None = None,
    ) -> None:
        self._max_tokens = records.max_tokens
        self._ledger = ledger
        self._store = store
        self._inbox = Inbox()
        self._num_recovered = 0
        self.counters_at_start: dict[str, float] = {}
        """Counters when it began to serve; `recovered` and `quarantined` are 0 here: those of the start count."""
        self._steps: dict[int, None] = {}
        """Trajectories of trained steps whose versions are on no board yet, by `unroll_id`. Used as an ordered set."""
        self._leadership = LeaderFollower(_POLL_S)
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        # For the thread that serves.
        self._actors = ActorSockets(endpoints, run_dir.run_id, self._leadership.wakeup)
        self._registry = SessionRegistry(ledger, run_dir, sessions)
        self._ingest = Ingest(store, ledger, self._inbox, records.vocab_size, records.max_tokens)
        self._evaluation: EvaluationTasks[Address] = EvaluationTasks()
        self._loop = MessageLoop(
            self._actors,
            self._registry,
            ledger,
            self._ingest,
            store,
            self._evaluation,
            ledger.version if published is None else published,
            sessions.max_remembered,
        )

    # --- the learner's thread

    def start(self) -> None:
        """Bind the sockets, take over the trajectories that an earlier process left, and begin.

        Increases this process's limit of file descriptors as far as allowed: each connection takes one, and libzmq
        ends a process that has none left.

        Raises:
            zmq.ZMQError: an endpoint is in use.
            ValueError: an endpoint needs keys.
            RunDirectoryError, ArenaError: see `TicketLedger.recover`.
        """
        raise_limit()
        try:
            self._actors.bind()
            self._recover()
        except BaseException:
            self._actors.abort()
            self._leadership.close()
            raise
        self.counters_at_start = {**self.counters(), "recovered": 0.0, "quarantined": 0.0}
        self._thread.start()
        # Beside the start of the actors: without a cache it takes seconds. `close` does not wait for its end.
        threading.Thread(target=record_kernels.compile_ingest, name="compiling", daemon=True).start()

    @property
    def endpoints(self) -> list[str]:
        """First that for actors of this host, then that for those of others; once started, with the real ports."""
        return self._actors.endpoints

    @property
    def endpoint(self) -> str:
        """Endpoint for actors of this host; once started, with the real port."""
        return self.endpoints[0]

    def drain(self, timeout_s: float) -> list[Trajectory]:
        """Take all trajectories that have arrived. For one thread.

        After `close` it returns those that were acknowledged last.

        Args:
            timeout_s: seconds to wait for the first.

        Returns:
            Trajectories, oldest first. Their arrays are writable and belong to the caller; their memory is used again
            once they were trained on or evicted and nothing refers to them.

        Raises:
            ReceiverError: the receiver has died.
        """
        if timeout_s > 0 and not self._inbox.is_ready() and self._thread.is_alive():
            with contextlib.suppress(Exception):  # the queue raises it
                self._leadership.lead(self._serve, self._inbox.is_ready, timeout_s)
        return self._inbox.drain()

    def trained(self, unroll_ids: Iterable[int]) -> None:
        """Note the trajectories of the step that makes the next version, before the first weight changes.

        They stay stored until that version, or a later one, is announced as kept or published: a learner that is
        restarted before finds them again. See `TicketLedger.trained`.

        Args:
            unroll_ids: see `Trajectory.unroll_id`; of a whole episode it is the ticket's id.
        """
        step = list(unroll_ids)
        self._ledger.trained(step)
        self._steps |= dict.fromkeys(step)
        self._leadership.wake()

    @property
    def counted(self) -> Collection[int]:
        """Trajectories, by `unroll_id`, that an earlier process had received and noted with `note_counted`."""
        return self._store.counted

    def note_counted(self, unroll_ids: Iterable[int]) -> None:
        """Note the trajectories whose episodes are in the metrics: a learner that is restarted counts them no more."""
        self._store.note_counted(unroll_ids)

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        """Note trajectories that were dropped, see `TicketLedger.evicted`.

        Those of a trained step whose version is on no board yet stay stored for a restarted learner.
        """
        dropped = list(unroll_ids)
        self._ledger.evicted(dropped)
        self._store.end(number for number in dropped if number not in self._steps)
        self._leadership.wake()

    def announce(self, version: int, published: bool = True, kept: bool = False) -> None:
        """Note that the learner has made a version, and announce it to all actors where its weights are published.

        Args:
            version: above the current one.
            published: it is on the board of engines.
            kept: it is on the board of kept versions. A restarted learner continues from the newest version on either
                board; until a version is on one, the trajectories of its step stay stored, see `must_keep`.

        Raises:
            ValueError: the version is not a new one.
        """
        self._ledger.advance(version, kept=published or kept)
        if published:
            self._loop.announce(version)
        if published or kept:
            self._store.end(self._steps)
            self._steps.clear()
        self._leadership.wake(urgent=True)

    def needs_weights(self) -> bool:
        """Return whether no trajectory can arrive until a later version is published.

        Tickets that ended without a trajectory leave a batch short, and later ones demand the version of the step that
        the batch was for.
        """
        return not self._inbox.is_ready() and self._ledger.needs_newer_than(self._loop.published)

    def announce_late(self, version: int) -> None:
        """Announce the learner's version, which was published some time after it was made."""
        self._loop.announce(version)
        self._leadership.wake(urgent=True)

    @property
    def published(self) -> int:
        """Newest version that is announced to actors."""
        return self._loop.published

    def begin_evaluation(self, task_ids: Sequence[int], temperature: float, timeout_s: float) -> int:
        """Have actors play tasks with the published version, or later ones, beside their tickets.

        Args:
            task_ids: at least one.
            temperature: of sampling; 0: greedy.
            timeout_s: seconds from the first task at an actor after which results are not waited for.

        Returns:
            The published version.

        Raises:
            ValueError: another evaluation is under way.
        """
        version = self.published
        self._evaluation.begin(secrets.randbits(63), version, task_ids, temperature, timeout_s)
        self._leadership.wake(urgent=True)
        return version

    @property
    def num_actors(self) -> int:
        """Number of connected actors."""
        return self._registry.num_actors

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation was begun, and its results were not taken."""
        return self._evaluation.is_under_way

    def evaluation(self) -> Evaluation | None:
        """Take the results of the evaluation, once it has ended."""
        ended = self._evaluation.ended(self._registry.clock.now)
        if ended is not None:
            self._leadership.wake()
        return ended

    def must_keep(self) -> bool:
        """Return whether the trajectories of steps since the last version on a board fill so much of the trajectory
        store that the next version should be kept."""
        return self._store.share_of(self._steps) > _MAX_STEPS_SHARE

    @property
    def is_full(self) -> bool:
        """Whether records that actors offer wait for room in the trajectory store."""
        return self._loop.is_full

    def rows(self, version: int) -> list[Row]:
        """Rows of the tickets, see `TicketLedger.rows`. Call it before `held`: trajectories that arrive in between are
        then among those that a later process finds. In the other order they would be missing."""
        return self._ledger.rows(version)

    def held(self) -> dict[int, Callable[[], memoryview]]:
        """Records of all trajectories that were acknowledged and whose end does not count yet, see
        `TrajectoryStore.held`."""
        return self._store.held()

    def interrupted(self) -> None:
        """Note that this process was told to end, see `TicketLedger.interrupted`."""
        self._ledger.interrupted()

    def lost_members(self, group_id: int) -> int:
        """Number of a group's tickets that bring nothing more, see `TicketLedger.lost_members`."""
        return self._ledger.lost_members(group_id)

    def actor_stats(self) -> dict[str, dict[str, float]]:
        """Latest metrics of each connected actor, by actor id."""
        return self._registry.actor_stats()

    def mean_actor_stats(self) -> dict[str, dict[str, float]]:
        """Mean metrics of each connected actor that has reported any since the last call, by actor id."""
        return self._registry.mean_actor_stats()

    def engines(self) -> dict[int, str]:
        """Servers that the connected actors offer for weights: opening -> URL; see `messages.Engines`."""
        return self._registry.engines()

    def counters(self) -> dict[str, float]:
        """Counters by name: those of the ledger and those of the receiver.

        Totals since the start: received_bytes, trajectories_refused (malformed), trajectories_unwanted (of superseded
        or unknown tickets, or of older weights, see `TicketLedger.outdated`), recovered (found after a restart),
        messages_malformed, actors_lost, sessions_broken (ended by an error of our own), evaluation_unwanted (answers to
        evaluation tasks that were not awaited), tickets_expired, peers_refused (connections without an authorised key).
        Current levels: actors, queue_trajectories, arena_fill (share of the trajectory store in use).
        """
        totals = (
            (self._ingest.totals, ("received_bytes", "trajectories_refused", "trajectories_unwanted")),
            (self._loop.totals, ("messages_malformed", "sessions_broken", "evaluation_unwanted")),
            (self._registry.totals, ("actors_lost", "tickets_expired")),
        )
        return {
            **self._ledger.counters(),
            **{name: float(counted[name]) for counted, names in totals for name in names},
            "recovered": float(self._num_recovered),
            "peers_refused": float(self._actors.num_refused),
            "actors": float(self.num_actors),
            "queue_trajectories": float(len(self._inbox)),
            "arena_fill": self._store.used / self._store.capacity,
        }

    def shutdown(self, reason: str = RUN_OVER) -> None:
        """Tell all actors to end, later ones too. No ticket is granted from now on."""
        self._loop.shutdown_reason = reason
        self._leadership.wake(urgent=True)

    def close(self) -> None:
        """End the thread and close the sockets; messages that were sent are delivered within a second or dropped."""
        self._leadership.stop()
        self._thread.join()
        self._actors.join()
        self._leadership.close()
        for endpoint in self.endpoints:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # --- the thread that serves

    def _recover(self) -> None:
        kept = self._store.recovered()
        wanted = self._ledger.recover([(t.ticket_id, t.episode_id, t.unroll_index) for t in kept])
        self._store.end([t.unroll_id for t, is_wanted in zip(kept, wanted, strict=True) if not is_wanted])
        found = [t for t, is_wanted in zip(kept, wanted, strict=True) if is_wanted]
        quarantined = set(self._ledger.quarantined)
        if names := [f"{t.episode_id} (task {t.task_id})" for t in kept if t.unroll_id in quarantined]:
            _log.error(
                "%d trajectories are set aside, as the learner has died twice in a step that trained on them: %s",
                len(names),
                ", ".join(names),
            )
        # Taken by a process with another budget: a step would fail on it, now and after each restart.
        long = [t for t in found if t.num_tokens > self._max_tokens]
        for t in long:
            reason = too_long(t.num_tokens, self._max_tokens).removeprefix("it ")
            _log.warning("dropped what an earlier process had acknowledged: ticket %d %s", t.ticket_id, reason)
        if long:
            self.evicted([t.unroll_id for t in long])
            found = [t for t in found if t.num_tokens <= self._max_tokens]
        if found:
            _log.warning("took over %d trajectories that an earlier process had acknowledged", len(found))
        self._num_recovered = len(found)
        self._inbox.put(found)

    def _run(self) -> None:
        try:
            self._leadership.run(self._serve)
            self._loop.send_shutdown()
        except Exception as error:
            _log.exception("the receiver has died")
            self._inbox.fail(error)
        finally:
            self._actors.close()

    def _serve(self, timeout_s: float) -> None:
        ready = self._actors.wait(timeout_s)
        try:
            if self._leadership.wakeup in ready:
                self._leadership.clear_wakeup()
            self._loop.turn(ready)
        except BaseException as error:
            # Ctrl-C and signals too: the state after an interrupted turn is unknown, so it is the last one. The error
            # is noted before the stop, so that `drain` raises it.
            self._inbox.fail(error)
            self._leadership.stop()
            raise
