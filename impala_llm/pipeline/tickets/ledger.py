"""Ticket ledger: which episodes may be played, by which actor, and how many at once. Pure logic: no I/O, no clock.

Invariant: no ticket is lost and none is counted twice, whichever process dies at any time. Each method takes the lock
and leaves the journal in step with the tickets.

Number of tickets that may be under way: staleness.py. Their states: table.py. Choice of the actor that gets a ticket:
granting.py. Tasks and trajectories that kill actors or the learner: quarantine.py. Restart: recovery.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.record_layout import CONTINUES
from impala_llm.pipeline.tickets import journal_rows, quarantine, recovery
from impala_llm.pipeline.tickets.granting import Granting
from impala_llm.pipeline.tickets.staleness import Admission
from impala_llm.pipeline.tickets.table import Claim, TicketTable, Verdict
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.tickets.ticket import Ticket, TicketState

__all__ = ["Claim", "Ticket", "TicketLedger", "Verdict"]

_TOTALS = (
    *("granted", "regranted", "received", "duplicates", "failed", "given_up", "cut"),
    *("trained", "evicted", "refused", "quarantined"),
)


class TicketLedger:
    """Grants tickets and follows each to its end. Thread-safe: it holds a lock during each call.

    A method that changes tickets raises ArenaError if the journal needs more room and there is no memory.

    One round, with max_staleness = 0, a batch of 2 and one actor:

    >>> ledger = TicketLedger(TaskOrder([7, 8, 9], seed=1), batch_size=2, max_staleness=0)
    >>> ledger.request("actor-0", want=1)
    >>> [(actor, tickets)] = ledger.grantable()
    >>> [ledger.received(t.ticket_id, f"episode-{t.ticket_id}") for t in tickets]
    [<Verdict.ACCEPTED: 1>, <Verdict.ACCEPTED: 1>]
    >>> ledger.trained([t.ticket_id for t in tickets])
    >>> ledger.grantable()
    []
    >>> ledger.advance(1)
    >>> [ticket.min_version for _, tickets in ledger.grantable() for ticket in tickets]
    [1, 1]
    """

    def __init__(
        self,
        task_order: TaskOrder,
        batch_size: int,
        max_staleness: int | None,
        max_open: int | None = None,
        max_attempts: int = 3,
        version: int = 0,
        journal: Journal | None = None,
    ) -> None:
        """All numbers are per rank and in trajectories.

        Args:
            task_order: source of tasks.
            batch_size: trajectories of a learner step.
            max_staleness: in versions; None: no limit.
            max_open: limit of tickets granted and not yet received; needed without max_staleness, else optional.
            max_attempts: failures after which a ticket is refused.
            version: the learner's at the start.
            journal: notes the state for a later process; for one that holds rows see `recover`.

        Raises:
            ValueError: an argument is out of range; the message names it.
        """
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}: at least 1 is needed")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self._max_attempts = max_attempts
        self._slots = Admission(batch_size, task_order.group_size, max_staleness, version)
        self._table = TicketTable(task_order, self._slots, journal)
        self._granting = Granting(self._table, max_open)
        self._lock = threading.RLock()
        self.quarantined: list[int] = []
        """`unroll_id` of trajectories that `recover` has evicted: the learner died in steps that trained on them."""

    @property
    def version(self) -> int:
        """The learner's current version."""
        return self._slots.version

    # --- the actors' side

    def request(self, actor_id: str, want: int) -> None:
        """Set how many tickets an actor wants to have under way: a level, not an increment, harmless to repeat.

        Tickets under way are those granted to it and neither received nor failed.

        Args:
            actor_id: of the actor; one that is new here is added.
            want: tickets; 0 asks for no more.

        Raises:
            ValueError: want is negative.
        """
        if want < 0:
            raise ValueError(f"want is {want}: it must be 0 or more")
        with self._lock:
            self._granting.request(actor_id, want)

    def grantable(self) -> list[tuple[str, list[Ticket]]]:
        """Grant all tickets that may be granted now; they are open from now on.

        With max_staleness 0 a whole batch is granted at once, in equal shares to all actors that want any (groups
        undivided where there are enough of them), whatever their levels; otherwise actors are filled up to their levels
        in turn, as many tickets as a group has at a time.

        Returns:
            (actor_id, tickets) to be sent, at most one entry for each actor.
        """
        with self._lock:
            grants = self._granting.deal_batch() if self.max_staleness == 0 else self._granting.fill_levels()
            self._table.write_notes()
            return grants

    def open_tickets(self, actor_id: str) -> list[Ticket]:
        """Tickets that are open at an actor, oldest first: it must be playing them or have given them back."""
        with self._lock:
            return [
                self._table.entries[ticket_id].ticket for ticket_id in sorted(self._table.open_at.get(actor_id, ()))
            ]

    def resumed(self, actor_id: str, held: Iterable[int]) -> None:
        """Return tickets to an actor that has come back and still plays them, unless they have been granted to others.

        Args:
            actor_id: of the actor; one that is new here is added.
            held: ids of the tickets that it still plays.
        """
        with self._lock:
            self._granting.know(actor_id)
            for ticket_id in held:
                entry = self._table.entries.get(ticket_id)
                if entry is not None and entry.state is TicketState.READY:
                    self._table.ready.remove(ticket_id)
                    if quarantine.take_back_loss(entry, actor_id):
                        self._table.note(entry)
                    self._table.open(ticket_id, actor_id)
            self._table.write_notes()

    def lookup(self, ticket_id: int) -> Ticket | None:
        """Find a ticket; None where it is unknown or has ended."""
        with self._lock:
            entry = self._table.entries.get(ticket_id)
            return None if entry is None else entry.ticket

    def lost_by(self, actor_id: str, ticket_ids: Iterable[int]) -> list[Ticket]:
        """Handle tickets that are open at an actor and that it does not list as held.

        Episodes of which an unroll was received are cut.

        Args:
            actor_id: of the actor.
            ticket_ids: of these tickets; those that are not open at this actor are ignored.

        Returns:
            Tickets without a received unroll, which are to be granted to it once more.
        """
        again = []
        with self._lock:
            for ticket_id in ticket_ids:
                entry = self._table.entries.get(ticket_id)
                if entry is None or entry.state is not TicketState.OPEN or entry.actor_id != actor_id:
                    continue
                if entry.episode_id is None:
                    again.append(entry.ticket)
                else:
                    self._table.leave_queue_or_actor(entry)
                    self._table.cut(entry)
            self._table.write_notes()
        return again

    def check(self, ticket_id: int, episode_id: str, unroll_index: int = 0) -> Verdict:
        """Return the verdict of `received`, without effect.

        Args:
            ticket_id, episode_id, unroll_index: as for `received`.
        """
        with self._lock:
            return self._table.check(ticket_id, episode_id, unroll_index)

    def received(self, ticket_id: int, episode_id: str, unroll_index: int = 0, continues: bool = False) -> Verdict:
        """Note a valid trajectory, of any attempt; the first episode to arrive is the ticket's.

        Unrolls may arrive in any order, and those of an episode that was cut are accepted until its ticket ends.

        Args:
            ticket_id: its ticket, which may be unknown.
            episode_id: tells the attempts at a ticket apart.
            unroll_index: index among the unrolls of the episode, from 0.
            continues: another unroll of the episode will follow.

        Returns:
            Whether it counts, and why not, see `Verdict`.
        """
        with self._lock:
            ticket = self.lookup(ticket_id)
            granted = (0, 0, 0) if ticket is None else (ticket.task_id, ticket.group_id, ticket.min_version)
            flags = CONTINUES if continues else 0
            return self.received_all([(episode_id, flags, ticket_id, unroll_index, *granted)])[0]

    def received_all(self, claims: Iterable[Claim]) -> list[Verdict]:
        """Call `received` for several trajectories, in order; each must also match its ticket.

        Args:
            claims: what the trajectories say of themselves.

        Returns:
            A verdict on each.
        """
        with self._lock:
            return self._table.receive_all(claims)

    def failed(self, ticket_id: int, actor_id: str) -> None:
        """Note that an attempt at a ticket failed.

        The ticket is granted again, or refused after max_attempts failures; an episode of which an unroll was received
        is cut instead. No effect if the ticket is not open at this actor: a late report of an attempt that was given
        up.

        Args:
            ticket_id: of the ticket.
            actor_id: of the actor whose attempt failed.
        """
        with self._lock:
            entry = self._table.entries.get(ticket_id)
            if entry is None or entry.state is not TicketState.OPEN or entry.actor_id != actor_id:
                return
            self._table.totals["failed"] += 1
            entry.attempts += entry.episode_id is None
            entry.failed_by = actor_id
            if entry.episode_id is not None:
                self._table.leave_queue_or_actor(entry)
                self._table.cut(entry)
            elif entry.attempts >= self._max_attempts:
                self._table.totals["given_up"] += 1
                self._table.refuse(entry)
            else:
                self._table.grant_again(entry)
                self._table.note(entry)
            self._table.write_notes()

    def outdated(self, ticket_id: int, actor_id: str, episode_id: str) -> bool:
        """Grant a ticket again whose trajectory is of older weights than it demands.

        An actor that outlives the learner's host brings them: after the checkpoint its tickets demand later versions.
        So the first such episode of a ticket does not count as an attempt. The next ones do, see `failed`, so that no
        actor has a ticket granted again without end.

        Args:
            ticket_id: of the ticket; no effect if it is not open at this actor.
            actor_id, episode_id: of the trajectory.

        Returns:
            Whether the attempt has failed.
        """
        with self._lock:
            entry = self._table.entries.get(ticket_id)
            if entry is None or entry.state is not TicketState.OPEN or entry.actor_id != actor_id:
                return False
            if entry.outdated_episode not in (None, episode_id) or entry.episode_id is not None:
                self.failed(ticket_id, actor_id)
                return True
            entry.outdated_episode = episode_id
            self._table.grant_again(entry)  # for each unroll: with each the actor gives the ticket up
            return False

    def refused(self, ticket_id: int, actor_id: str) -> None:
        """Refuse a ticket whose trajectory was malformed. An episode of which an unroll was received is cut instead.

        No effect if the ticket is not open at this actor.

        Args:
            ticket_id: of the ticket.
            actor_id: of the actor that sent the trajectory.
        """
        with self._lock:
            entry = self._table.entries.get(ticket_id)
            if entry is not None and entry.state is TicketState.OPEN and entry.actor_id == actor_id:
                self._table.refuse(entry)
                self._table.write_notes()

    def actor_lost(self, actor_id: str, left: bool = False) -> list[Ticket]:
        """Grant the open tickets of a lost actor again, oldest first, or cut episodes of which an unroll was received.

        Args:
            actor_id: of the actor, which is forgotten.
            left: it left by itself; otherwise one of its tickets may be the cause.

        Returns:
            Tickets that are refused, since too many actors were lost with them.
        """
        refused = []
        with self._lock:
            self._granting.forget(actor_id)
            for ticket_id in sorted(self._table.open_at.pop(actor_id, ()), reverse=True):
                entry = self._table.entries[ticket_id]
                if not left:
                    quarantine.note_loss(entry, actor_id)
                if entry.episode_id is not None:
                    self._table.num_open -= 1
                    self._table.cut(entry)
                elif quarantine.is_given_up(entry):
                    self._table.num_open -= 1
                    self._table.totals["given_up"] += 1
                    refused.append(entry.ticket)
                    self._table.end([entry], TicketState.REFUSED)
                else:
                    self._table.grant_again(entry)
                    self._table.note(entry)
            self._table.write_notes()
        return refused

    # --- the learner's side

    def trained(self, unroll_ids: Iterable[int]) -> None:
        """Note the trajectories of the step under way. Call it before the `advance` that ends the step.

        The slots of tickets that end with it are free at the next `advance`. Trajectories that were trained on or
        evicted before are ignored: replayed ones are trained on again.

        Args:
            unroll_ids: `Trajectory.unroll_id`, of a whole episode its ticket's id.

        Raises:
            KeyError: one was not received.
        """
        with self._lock:
            self._table.train(unroll_ids)

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        """Note dropped trajectories: the slots of tickets that end with it are free now. Otherwise as `trained`."""
        with self._lock:
            self._table.evict(unroll_ids)

    def advance(self, version: int, kept: bool = True) -> None:
        """Note that the learner has made a version.

        Args:
            version: above the current one.
            kept: a restarted learner would continue from it. Otherwise its step, and those since the last version that
                was kept, may still be lost, and their trajectories are remembered.

        Raises:
            ValueError: it is not above the current version.
        """
        with self._lock:
            if version <= self._slots.version:
                raise ValueError(f"version {version} does not follow {self._slots.version}: versions only grow")
            self._slots.advance(version)
            if kept:
                self._table.kept = version
            self._table.note_made(version)

    def interrupted(self) -> None:
        """Note that the process is told to end: the trajectories of the step under way are not the cause."""
        with self._lock:
            self._table.over = self._slots.version + 1
            self._table.note_made(self._table.over)

    def lost_members(self, group_id: int) -> int:
        """Count the tickets of a group that have ended: its received trajectories are complete without them.

        0 for a group of which every ticket has ended.
        """
        with self._lock:
            group = self._table.groups.get(group_id)
            return 0 if group is None else self._table.order.group_size - group.under_way

    def needs_newer_than(self, version: int) -> bool:
        """Return whether all tickets that may still bring a trajectory demand later weights than this version."""
        with self._lock:
            playing = [e for e in self._table.entries.values() if e.state in (TicketState.READY, TicketState.OPEN)]
            return bool(playing) and all(entry.ticket.min_version > version for entry in playing)

    def counters(self) -> dict[str, float]:
        """Counters by name.

        Totals since the start: granted, regranted, received, duplicates, failed, given_up (failed or lost too often),
        cut, trained, evicted, refused, quarantined. Current levels: ready, open, in_buffer (received and not ended),
        charged (slots), waiting (unrolls to train on, with those that are expected), version, staleness_in_flight (mean
        of the versions made since the first grant of an open ticket).
        """
        with self._lock:
            ages = [
                self._slots.version - e.born_version
                for e in self._table.entries.values()
                if e.state is TicketState.OPEN
            ]
            return {
                **{name: float(self._table.totals[name]) for name in _TOTALS},
                "ready": float(len(self._table.ready)),
                "open": float(self._table.num_open),
                "in_buffer": float(len(self._table.entries) - len(self._table.ready) - self._table.num_open),
                "charged": float(self._slots.charged.total()),
                "waiting": float(self._slots.num_waiting(self._table.num_playing)),
                "version": float(self._slots.version),
                "staleness_in_flight": float(np.mean(ages)) if ages else 0.0,
            }

    # --- after a death

    def rows(self, version: int) -> list[journal_rows.Row]:
        """Rows of a journal from which the ledger of another process, at this version, continues; see `recover`.

        Args:
            version: the current one, or that of the step under way, whose trajectories then count as trained on.
        """
        with self._lock:
            return journal_rows.as_of(self._table.account(), version)

    def recover(self, received: Sequence[tuple[int, str, int]]) -> list[bool]:
        """Continue from the journal of a process that has ended. Once, before any other call.

        A step counts if its version was kept, that is, if it is not above the `version` that this ledger began with:
        the trajectories of a lost step count as received, and not yet trained on. Tickets that were open wait to be
        `resumed` or granted again; episodes of which an unroll was received are cut. Trajectories of a second step in
        which the learner died are evicted, and `quarantined`.

        Args:
            received: (ticket_id, episode_id, unroll_index) of the trajectories in its trajectory store.

        Returns:
            Whether each of `received` is still wanted.

        Raises:
            RunDirectoryError: the journal is of another task order, or damaged.
            ArenaError: the journal cannot be written, see `Journal.rewrite`.
        """
        with self._lock:
            recovery.restore(self._table, received)
            self.quarantined = quarantine.set_aside(self._table.entries.values())
            self.evicted(self.quarantined)
            self._table.totals.clear()
            self._table.totals["quarantined"] = len(self.quarantined)
            recovery.rewrite_journal(self._table)
            return recovery.still_wanted(self._table, received)
