"""Ticket ledger: which episodes may be played, by which actor, and how many at once. Pure logic: no I/O, no clock.

Invariant: a ticket ends in exactly one of trained, evicted and refused; until then each attempt at it either brings a
trajectory or is granted again. No ticket is lost and none is counted twice, whichever process dies at any time.

    ready ──grant──► open ──trajectory──► received ──► trained | evicted
      ▲                │ │
      └──failed, lost──┘ └─malformed, or failed or lost too often─► refused

Quarantine: a task that kills its actors would be granted to all of them, and data that kills the learner would be
trained on after each restart. A ticket that several actors had when they were lost is refused; from the second actor on
it is granted to an actor that has no other such ticket, so that other tickets do not share its losses. Trajectories of
two steps in which the learner died are evicted by the next process.

An episode may come in several unrolls. Its ticket is open until all of them were received, and ends with the last of
them: trained if any was trained on, else evicted. Once one was received the ticket is not granted again: where the
remaining ones cannot come (the attempt failed or broke a rule, the actor was lost, the learner was restarted) the
episode is cut there, and the ticket ends with the unrolls received. Further ones are accepted until then.

staleness.py decides how many tickets may be under way.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Any

import numpy as np

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.record import CONTINUES
from impala_llm.pipeline.tickets import journal_rows
from impala_llm.pipeline.tickets.staleness import Admission, beyond_slot
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.tickets.ticket import (
    ENDED,
    FIRST_UNROLL,
    Entry,
    Group,
    Parts,
    State,
    Ticket,
    entry_from_state,
    entry_state,
    waiting,
)
from impala_llm.trajectory import MAX_TICKETS, unroll_id

__all__ = ["Ticket", "TicketLedger", "Verdict"]

_STATE_FORMAT = 3
_SUSPECT_LOSSES = 2
_MAX_LOSSES = 5
"""Lost actors after which a ticket is refused. More than the failures, since most tickets of a lost actor are valid."""
_MAX_CRASHES = 2


class Verdict(Enum):
    """Answer of the ledger to a trajectory that arrived."""

    ACCEPTED = auto()
    DUPLICATE = auto()
    """This unroll of this episode was received before: acknowledge and drop."""
    SUPERSEDED = auto()
    """Another attempt at the ticket was faster, or the ticket has ended: final, the ticket is unchanged."""
    UNKNOWN_TICKET = auto()
    NOT_AS_GRANTED = auto()
    """The trajectory is of another task or group than its ticket, or of older weights than the ticket demands."""


Claim = tuple[str, int, int, int, int, int, int]
"""Facts of a trajectory: episode_id, flags (record.py), ticket_id, unroll_index, task_id, group_id, and the oldest
version of the weights that made it."""


class TicketLedger:
    """Grants tickets and follows each to its end. Thread-safe: it holds a lock during each call.

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
        group_size = task_order.group_size
        if batch_size < 1 or batch_size % group_size:
            raise ValueError(f"batch_size is {batch_size}: it must be a positive multiple of group_size {group_size}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}: use 0 or more, or None to run free")
        if max_staleness is None and max_open is None:
            raise ValueError("max_open is None: free running (max_staleness None) needs a bound on open tickets")
        if max_open is not None and max_open < (batch_size if max_staleness == 0 else group_size):
            raise ValueError(
                f"max_open is {max_open}: at least a group of {group_size} must fit, and with max_staleness 0 "
                f"a batch of {batch_size}"
            )
        if max_attempts < 1:
            raise ValueError(f"max_attempts is {max_attempts}: at least 1 is needed")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self._order = task_order
        self._max_open = max_open
        self._max_attempts = max_attempts
        self._slots = Admission(batch_size, group_size, max_staleness, version)
        self._kept = version
        self._over = version
        """Version up to which steps are known not to have ended the process."""
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._ended: OrderedDict[int, Entry] = OrderedDict()
        self._groups: dict[int, Group] = {}
        self._ready: deque[int] = deque()
        # Tickets open at an actor, and how many it wants.
        self._open_at: dict[str, set[int]] = {}
        self._wants: dict[str, int] = {}
        # A heap of all actors below their levels: (tickets open, number in the order of arrival, actor). Outdated
        # entries stay inside and are skipped; actors that have changed since are still to be added.
        self._below: list[tuple[int, int, str]] = []
        self._changed: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._num_arrived = 0
        self._num_open = 0
        self._totals: Counter[str] = Counter()
        self.quarantined: list[int] = []
        """`unroll_id` of trajectories that `recover` has evicted: the learner died in steps that trained on them."""
        self._journal = journal
        self._notes: list[journal_rows.Row] = []
        # Resends arrive within seconds; tickets that ended many batches ago need not be remembered.
        self._num_remembered = max(4096, 16 * batch_size * (1 + (max_staleness or 0)))

    @property
    def version(self) -> int:
        """The learner's current version."""
        return self._slots.version

    # --- the actors' side

    def request(self, actor_id: str, want: int) -> None:
        """Set how many tickets an actor wants to have under way: a level, not an increment, harmless to repeat.

        Tickets under way are those granted to it and neither received nor failed.

        Args:
            want: tickets; 0 asks for no more.
        """
        if want < 0:
            raise ValueError(f"want is {want}: it must be 0 or more")
        with self._lock:
            if actor_id not in self._wants:
                self._open_at[actor_id] = set()
                self._numbers[actor_id] = self._num_arrived
                self._num_arrived += 1
            if self._wants.get(actor_id) != want:
                self._wants[actor_id] = want
                self._changed.add(actor_id)

    def grantable(self) -> list[tuple[str, list[Ticket]]]:
        """Grant all tickets that may be granted now; they are open from now on.

        With max_staleness 0 a whole batch is granted at once, in equal shares to all actors that want any (groups
        undivided where there are enough of them), whatever their levels; otherwise actors are filled up to their levels
        in turn, as many tickets as a group has at a time.

        Returns:
            (actor_id, tickets) to be sent, at most one entry for each actor.
        """
        with self._lock:
            grants = self._deal_batch() if self.max_staleness == 0 else self._fill_levels()
            self._write_notes()
            return grants

    def open_tickets(self, actor_id: str) -> list[Ticket]:
        """Tickets that are open at an actor, oldest first: it must be playing them or have given them back."""
        with self._lock:
            return [self._entries[ticket_id].ticket for ticket_id in sorted(self._open_at.get(actor_id, ()))]

    def resumed(self, actor_id: str, held: Iterable[int]) -> None:
        """Return tickets to an actor that came back and still plays them, where they wait to be granted again."""
        with self._lock:
            self.request(actor_id, self._wants.get(actor_id, 0))
            for ticket_id in held:
                entry = self._entries.get(ticket_id)
                if entry is not None and entry.state is State.READY:
                    self._ready.remove(ticket_id)
                    if entry.lost_by == actor_id:  # it was not: the network was at fault
                        entry.losses -= 1
                        self._note(entry)
                    self._open(ticket_id, actor_id)
            self._write_notes()

    def lookup(self, ticket_id: int) -> Ticket | None:
        """Find a ticket; None where it is unknown or has ended."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            return None if entry is None else entry.ticket

    def lost_by(self, actor_id: str, ticket_ids: Iterable[int]) -> list[Ticket]:
        """Handle tickets that are open at an actor and that it does not list as held.

        Episodes of which an unroll was received are cut.

        Returns:
            The other tickets, which it should be granted once more.
        """
        again = []
        with self._lock:
            for ticket_id in ticket_ids:
                entry = self._entries.get(ticket_id)
                if entry is None or entry.state is not State.OPEN or entry.actor_id != actor_id:
                    continue
                if entry.episode_id is None:
                    again.append(entry.ticket)
                else:
                    self._leave_queue_or_actor(entry)
                    self._cut(entry)
            self._write_notes()
        return again

    def check(self, ticket_id: int, episode_id: str, unroll_index: int = 0) -> Verdict:
        """Return the verdict of `received`, without effect."""
        with self._lock:
            entry = self._entries.get(ticket_id) or self._ended.get(ticket_id)
            if entry is None:
                return Verdict.UNKNOWN_TICKET
            same_episode = entry.episode_id == episode_id
            if same_episode and unroll_index in entry.unrolls:
                return Verdict.DUPLICATE
            if entry.state in ENDED or not (same_episode or entry.episode_id is None):
                return Verdict.SUPERSEDED
            return Verdict.ACCEPTED

    def received(self, ticket_id: int, episode_id: str, unroll_index: int = 0, continues: bool = False) -> Verdict:
        """Note a valid trajectory, of any attempt; the first episode to arrive is the ticket's.

        Unrolls may arrive in any order, and those of an episode that was cut are accepted until its ticket ends.

        Args:
            continues: another unroll of the episode will follow.
        """
        with self._lock:
            ticket = self.lookup(ticket_id)
            granted = (0, 0, 0) if ticket is None else (ticket.task_id, ticket.group_id, ticket.min_version)
            flags = CONTINUES if continues else 0
            return self.received_all([(episode_id, flags, ticket_id, unroll_index, *granted)])[0]

    def received_all(self, claims: Iterable[Claim]) -> list[Verdict]:
        """Call `received` for several trajectories, in order; each must also match its ticket."""
        verdicts = []
        with self._lock:
            entries, open_at, changed = self._entries, self._open_at, self._changed
            num_received = 0
            for episode_id, flags, ticket_id, unroll_index, task_id, group_id, oldest_version in claims:
                entry = entries.get(ticket_id)
                if entry is None:
                    verdict = self.check(ticket_id, episode_id, unroll_index)
                    self._totals["duplicates"] += verdict is Verdict.DUPLICATE
                    verdicts.append(verdict)
                    continue
                ticket = entry.ticket
                if ticket.task_id != task_id or ticket.group_id != group_id or ticket.min_version > oldest_version:
                    verdicts.append(Verdict.NOT_AS_GRANTED)
                    continue
                is_new = entry.episode_id is None
                if is_new and entry.state is State.OPEN:
                    verdict = Verdict.ACCEPTED  # the common case, on the shortest path
                else:
                    verdict = self.check(ticket_id, episode_id, unroll_index)
                verdicts.append(verdict)
                if verdict is Verdict.DUPLICATE:
                    self._totals["duplicates"] += 1
                elif verdict is Verdict.ACCEPTED:
                    num_received += 1
                    entry.episode_id = episode_id
                    continues = bool(flags & CONTINUES)
                    if is_new and not (continues or unroll_index):
                        if entry.state is State.OPEN:
                            open_at[entry.actor_id].discard(ticket_id)  # type: ignore[index]  # open, so at an actor
                            changed.add(entry.actor_id)  # type: ignore[arg-type]
                            self._num_open -= 1
                        else:
                            self._leave_queue_or_actor(entry)
                        entry.state, entry.actor_id = State.RECEIVED, None
                        entry.unrolls = FIRST_UNROLL
                        if self._slots.counts_unrolls:
                            self._slots.count_unrolls(1)
                    else:
                        self._receive_part(entry, unroll_index, continues)
            self._totals["received"] += num_received
        return verdicts

    def failed(self, ticket_id: int, actor_id: str) -> None:
        """Note that an actor's attempt failed. The ticket is granted again, or refused after max_attempts failures;
        an episode of which an unroll was received is cut instead.

        It has no effect where the ticket is not open at this actor: a late report of an attempt that was given up.
        """
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None or entry.state is not State.OPEN or entry.actor_id != actor_id:
                return
            self._totals["failed"] += 1
            entry.attempts += entry.episode_id is None
            if entry.episode_id is not None:
                self._leave_queue_or_actor(entry)
                self._cut(entry)
            elif entry.attempts >= self._max_attempts:
                self._totals["given_up"] += 1
                self._refuse(entry)
            else:
                self._grant_again(entry)
                self._note(entry)
            self._write_notes()

    def refused(self, ticket_id: int, actor_id: str) -> None:
        """Refuse a ticket whose trajectory was malformed. An episode of which an unroll was received is cut instead.

        It has no effect where the ticket is not open at this actor.
        """
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is not None and entry.state is State.OPEN and entry.actor_id == actor_id:
                self._refuse(entry)
                self._write_notes()

    def actor_lost(self, actor_id: str, left: bool = False) -> list[Ticket]:
        """Grant the open tickets of a lost actor again, oldest first, or cut episodes of which an unroll was received.

        Args:
            left: it left by itself; otherwise one of its tickets may be the cause.

        Returns:
            Tickets that are refused, since too many actors were lost with them.
        """
        refused = []
        with self._lock:
            self._wants.pop(actor_id, None)
            self._numbers.pop(actor_id, None)
            for ticket_id in sorted(self._open_at.pop(actor_id, ()), reverse=True):
                entry = self._entries[ticket_id]
                if not left:
                    entry.losses += 1
                    entry.lost_by = actor_id
                if entry.episode_id is not None:
                    self._num_open -= 1
                    self._cut(entry)
                elif entry.losses >= _MAX_LOSSES:
                    self._num_open -= 1
                    self._totals["given_up"] += 1
                    refused.append(entry.ticket)
                    self._end([entry], State.REFUSED)
                else:
                    self._grant_again(entry)
                    self._note(entry)
            self._write_notes()
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
            step = self._slots.version + 1
            whole, in_parts = self._settle(unroll_ids, "trained on", step)
            entries = [*whole, *in_parts]
            for entry in entries:
                entry.step = step
            self._end(entries, State.TRAINED, charged=True)
            self._slots.free_with_step([entry.born_version for entry in entries])
            self._write_notes()

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        """Note dropped trajectories: the slots of tickets that end with it are free now. Otherwise as `trained`."""
        with self._lock:
            whole, in_parts = self._settle(unroll_ids, "evicted", 0)
            self._end([*whole, *(entry for entry in in_parts if not entry.step)], State.EVICTED)
            self._end([entry for entry in in_parts if entry.step], State.TRAINED)
            self._write_notes()

    def advance(self, version: int, kept: bool = True) -> None:
        """Note that the learner has made a version.

        Args:
            kept: a later process would go on from it. Otherwise its step, and those since the last one that was kept,
                may still be lost, and their trajectories are remembered.

        Raises:
            ValueError: it is not above the current version.
        """
        with self._lock:
            if version <= self._slots.version:
                raise ValueError(f"version {version} does not follow {self._slots.version}: versions only grow")
            self._slots.advance(version)
            if kept:
                self._kept = version
            self._note_made(version)

    def interrupted(self) -> None:
        """Note that the process is told to end: the trajectories of the step under way are not the cause."""
        with self._lock:
            self._over = self._slots.version + 1
            self._note_made(self._over)

    def lost_members(self, group_id: int) -> int:
        """Count the tickets of a group that can never bring a trajectory: the group is complete without them.

        0 for a group of which every ticket has ended.
        """
        with self._lock:
            group = self._groups.get(group_id)
            return 0 if group is None else group.num_lost

    def needs_newer_than(self, version: int) -> bool:
        """Return whether all tickets that may still bring a trajectory demand later weights than this version."""
        with self._lock:
            playing = [e for e in self._entries.values() if e.state in (State.READY, State.OPEN)]
            return bool(playing) and all(entry.ticket.min_version > version for entry in playing)

    def num_expected(self) -> int:
        """Number of tickets that may still bring a trajectory: ready or open ones."""
        with self._lock:
            return len(self._ready) + self._num_open

    def counters(self) -> dict[str, float]:
        """Counters by name.

        Totals since the start: granted, regranted, received, duplicates, failed, given_up (failed or lost too often),
        cut, trained, evicted, refused, quarantined. Current levels: ready, open, in_buffer (received and not ended),
        charged (slots), version, staleness_in_flight (mean of the versions made since the first grant of an open
        ticket).
        """
        with self._lock:
            names = (
                "granted",
                "regranted",
                "received",
                "duplicates",
                "failed",
                "given_up",
                "cut",
                "trained",
                "evicted",
                "refused",
                "quarantined",
            )
            ages = [self._slots.version - e.born_version for e in self._entries.values() if e.state is State.OPEN]
            return {
                **{name: float(self._totals[name]) for name in names},
                "ready": float(len(self._ready)),
                "open": float(self._num_open),
                "in_buffer": float(len(self._entries) - len(self._ready) - self._num_open),
                "charged": float(self._slots.charged.total()),
                "version": float(self._slots.version),
                "staleness_in_flight": float(np.mean(ages)) if ages else 0.0,
            }

    def state_dict(self) -> dict[str, Any]:
        """State as plain lists, strings and numbers (JSON or msgpack)."""
        with self._lock:
            return {
                "format": _STATE_FORMAT,
                **self._slots.state_dict(),
                "task_order": self._order.state_dict(),
                "tickets": [entry_state(entry) for entry in self._entries.values()],
                "ended": [entry_state(entry) for entry in self._ended.values()],
                "ready": list(self._ready),
                "groups": [[group_id, g.under_way, g.num_lost] for group_id, g in self._groups.items()],
                "totals": dict(self._totals),
            }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        """Continue from a saved state. Tickets that were open are ready to be granted again, or their episodes are cut.

        Returns:
            `unroll_id` of all trajectories that were received and are not settled: those that the restored buffer lacks
            must be evicted.

        Raises:
            ValueError: the state is of another format or task order.
        """
        with self._lock:
            if state["format"] != _STATE_FORMAT:
                raise ValueError(f"the saved ledger has format {state['format']}, this program reads {_STATE_FORMAT}")
            self._order.load_state_dict(state["task_order"])
            self._entries = {entry.ticket.ticket_id: entry for entry in map(entry_from_state, state["tickets"])}
            self._ended = OrderedDict((e.ticket.ticket_id, e) for e in map(entry_from_state, state["ended"]))
            self._groups = {group_id: Group(*values) for group_id, *values in state["groups"]}
            self._slots.load_state_dict(state, self._entries.values())
            self._totals = Counter(state["totals"])
            self._open_at, self._wants, self._numbers, self._num_open = {}, {}, {}, 0
            interrupted = []
            for ticket_id, entry in sorted(self._entries.items()):
                if entry.state is State.OPEN and entry.episode_id is not None:
                    self._cut(entry)
                elif entry.state is State.OPEN:
                    entry.state = State.READY
                    interrupted.append(ticket_id)
            self._ready = deque([*interrupted, *state["ready"]])
            return [unroll_id(i, unroll) for i, entry in self._entries.items() for unroll in waiting(entry)]

    # --- after a death

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
            ValueError: the journal is of another task order.
        """
        with self._lock:
            rows = [] if self._journal is None else self._journal.rows().tolist()
            past = journal_rows.read(rows, self._order, self._slots.version)
            arrived: dict[int, tuple[str, set[int]]] = {}
            for ticket_id, episode_id, unroll_index in received:
                arrived.setdefault(ticket_id, (episode_id, set()))[1].add(unroll_index)
            for ticket_id, row in sorted(past.last.items()):
                group_id = ticket_id // self._order.group_size
                _, _, born_version, min_version, tries, step = row
                attempts, losses = journal_rows.read_tries(tries)
                ticket = Ticket(
                    *(ticket_id, self._order.task_of(group_id), group_id, self._order.ticket_seed(ticket_id)),
                    min_version,
                )
                self._entries[ticket_id] = entry = Entry(ticket, born_version, attempts=attempts, step=step)
                entry.losses, entry.crashes = losses, past.crashes.get(ticket_id)
                self._slots.charged[born_version] += 1
                self._groups.setdefault(group_id, Group(under_way=0)).under_way += 1
            for ticket_id, entry in list(self._entries.items()):
                end = past.end_of(ticket_id)
                if end is not None and entry.step <= self._slots.version:
                    self._end([entry], end)
                    continue
                # Not those of a lost step: another end must not be taken for a part of it.
                before = past.settled.get(ticket_id, {})
                entry.step = max(before.values(), default=0)
                entry.episode_id, found = arrived.get(ticket_id, (None, set()))
                entry.unrolls = frozenset(found | before.keys())
                if entry.unrolls - {0} or before:
                    entry.parts = Parts(before)
                if found - before.keys():
                    entry.state = State.RECEIVED
                    self._slots.num_beyond += beyond_slot(entry)
                elif before:
                    self._end([entry], State.TRAINED if entry.step else State.EVICTED)
                else:
                    self._ready.append(ticket_id)
            self.quarantined = [
                unroll_id(ticket_id, unroll_index)
                for ticket_id, entry in self._entries.items()
                for unroll_index, count in (entry.crashes or {}).items()
                if count >= _MAX_CRASHES and unroll_index in waiting(entry) and entry.state is State.RECEIVED
            ]
            self.evicted(self.quarantined)
            self._slots.drop_zeros()
            self._totals.clear()
            self._totals["quarantined"] = len(self.quarantined)
            self._notes.clear()
            if self._journal is not None:
                self._journal.rewrite(self._account())
            return [
                entry is not None and entry.episode_id == episode_id and unroll_index in waiting(entry)
                for ticket_id, episode_id, unroll_index in received
                for entry in [self._entries.get(ticket_id)]
            ]

    def _note_made(self, version: int) -> None:
        if self._journal is not None:
            self._notes.append(journal_rows.note_made(version))
            self._write_notes()

    def _note(self, entry: Entry) -> None:
        if self._journal is not None:
            self._notes.append(journal_rows.note(entry))

    def _write_notes(self) -> None:
        """Append the changes of a call to the journal, in one piece."""
        if self._notes:
            assert self._journal is not None
            if not self._journal.append(self._notes):
                self._journal.rewrite(self._account())
            self._notes.clear()

    def _account(self) -> list[journal_rows.Row]:
        """Rows that restore the ledger in a later process."""
        ended = self._ended.values()
        wanted = self._groups.keys() | {e.ticket.group_id for e in ended if e.step > self._kept}
        kept = [entry for entry in ended if entry.ticket.group_id in wanted]
        return journal_rows.account(self._order, [*self._entries.values(), *kept], max(self._over, self._slots.version))

    # --- granting

    def _num_playing(self) -> int:
        return self._num_open + len(self._ready)

    def _may_start_group(self) -> bool:
        num_playing = self._num_playing()
        if self._max_open is not None and num_playing + self._order.group_size > self._max_open:
            return False
        return self._slots.may_start_group(num_playing)

    def _start_group(self) -> None:
        """Take a group from the task order and make its tickets ready. Their slots are charged from now on."""
        task_id, group_id = self._order.next()
        size = self._order.group_size
        min_version = self._slots.min_version(self._num_playing())
        self._groups[group_id] = Group(under_way=size)
        for ticket_id in range(group_id * size, (group_id + 1) * size):
            ticket = Ticket(ticket_id, task_id, group_id, self._order.ticket_seed(ticket_id), min_version)
            entry = self._entries[ticket_id] = Entry(ticket, self._slots.version)
            self._ready.append(ticket_id)
            self._note(entry)
        self._slots.charge_group()

    def _may_grant(self) -> bool:
        return bool(self._ready) or self._may_start_group()

    def _deal_batch(self) -> list[tuple[str, list[Ticket]]]:
        self._changed.clear()
        if not self._may_grant():
            return []
        actors = [actor for actor, want in self._wants.items() if want > 0]
        if not actors:
            return []
        actors.sort(key=lambda actor: len(self._open_at[actor]))
        while self._may_start_group():
            self._start_group()
        suspects = deque(ticket_id for ticket_id in self._ready if self._is_suspect(ticket_id))
        ticket_ids = [ticket_id for ticket_id in self._ready if not self._is_suspect(ticket_id)]
        self._ready.clear()
        units: list[list[int]] = []
        for ticket_id in ticket_ids:
            group_id = self._entries[ticket_id].ticket.group_id
            if units and self._entries[units[-1][0]].ticket.group_id == group_id:
                units[-1].append(ticket_id)
            else:
                units.append([ticket_id])
        if len(units) < len(actors):
            units = [[ticket_id] for ticket_id in ticket_ids]
        grants = []
        for index, actor in enumerate(actors):
            # Rounded up: the remainder goes to the actors with the least work, which come first.
            first, last = (-(-len(units) * i // len(actors)) for i in (index, index + 1))
            share = [self._open(ticket_id, actor) for unit in units[first:last] for ticket_id in unit]
            if suspects and not any(map(self._is_suspect, self._open_at[actor])):
                share.append(self._open(suspects.popleft(), actor))
            if share:
                grants.append((actor, share))
        self._ready += suspects
        return grants

    def _fill_levels(self) -> list[tuple[str, list[Ticket]]]:
        for changed in self._changed:
            self._note_if_below(changed)
        self._changed.clear()
        shares: dict[str, list[Ticket]] = {}
        again: deque[str] = deque()
        blocked: list[str] = []
        while self._may_grant() and (actor := self._next_below() or (again.popleft() if again else None)):
            num_missing = self._wants[actor] - len(self._open_at[actor])
            is_last = not (again or self._below)  # no other actor has a turn
            for _ in range(num_missing if is_last else min(num_missing, self._order.group_size)):
                ticket_id = self._take_ready(actor)
                if ticket_id is None and self._may_start_group():
                    self._start_group()
                    ticket_id = self._take_ready(actor)
                if ticket_id is None:
                    blocked.append(actor)  # ready tickets wait for an actor without a suspect
                    break
                shares.setdefault(actor, []).append(self._open(ticket_id, actor))
            else:
                if len(self._open_at[actor]) < self._wants[actor]:
                    again.append(actor)
        for served in (*again, *blocked):
            self._note_if_below(served)
        return list(shares.items())

    def _note_if_below(self, actor: str) -> None:
        """Add an actor to the heap, where it is below its level."""
        num_open = len(self._open_at.get(actor, ()))
        if self._wants.get(actor, 0) > num_open:
            heappush(self._below, (num_open, self._numbers[actor], actor))
        if len(self._below) > 4 * len(self._wants) + 64:  # most entries are outdated
            self._below = sorted({entry for entry in self._below if self._is_below(*entry)})

    def _next_below(self) -> str | None:
        """Take the actor below its level that has the fewest tickets out of the heap."""
        while self._below:
            entry = heappop(self._below)
            if self._is_below(*entry):
                return entry[2]
        return None

    def _is_below(self, num_open: int, number: int, actor: str) -> bool:
        """Return whether an entry of the heap is not outdated."""
        is_same = self._numbers.get(actor) == number and len(self._open_at[actor]) == num_open
        return is_same and self._wants[actor] > num_open

    def _take_ready(self, actor: str) -> int | None:
        """Take the first of the ready tickets that this actor may have."""
        for place, ticket_id in enumerate(self._ready):
            if not self._is_suspect(ticket_id) or not any(map(self._is_suspect, self._open_at[actor])):
                del self._ready[place]
                return ticket_id
        return None

    def _is_suspect(self, ticket_id: int) -> bool:
        """Return whether this ticket may be the cause of lost actors."""
        return self._entries[ticket_id].losses >= _SUSPECT_LOSSES

    # --- transitions

    def _open(self, ticket_id: int, actor_id: str) -> Ticket:
        entry = self._entries[ticket_id]
        entry.state, entry.actor_id, entry.lost_by = State.OPEN, actor_id, None
        self._open_at[actor_id].add(ticket_id)
        self._num_open += 1
        self._totals["granted"] += 1
        return entry.ticket

    def _leave_queue_or_actor(self, entry: Entry) -> None:
        ticket_id = entry.ticket.ticket_id
        if entry.state is State.READY:
            self._ready.remove(ticket_id)
        elif entry.state is State.OPEN:
            assert entry.actor_id is not None
            self._open_at[entry.actor_id].discard(ticket_id)
            self._changed.add(entry.actor_id)
            self._num_open -= 1

    def _grant_again(self, entry: Entry) -> None:
        assert entry.actor_id is not None
        self._open_at.get(entry.actor_id, set()).discard(entry.ticket.ticket_id)
        self._changed.add(entry.actor_id)
        self._num_open -= 1
        entry.state, entry.actor_id = State.READY, None
        # In front of new ones: it is the oldest work.
        self._ready.appendleft(entry.ticket.ticket_id)
        self._totals["regranted"] += 1

    def _refuse(self, entry: Entry) -> None:
        self._leave_queue_or_actor(entry)
        if entry.episode_id is None:
            self._end([entry], State.REFUSED)
        else:
            self._cut(entry)

    def _cut(self, entry: Entry) -> None:
        """Cut an episode whose remaining unrolls will not come: its ticket is no longer open."""
        self._totals["cut"] += 1
        self._slots.num_begun -= len(entry.unrolls)
        entry.state, entry.actor_id = State.RECEIVED, None
        if waiting(entry):
            self._slots.num_beyond -= 1
        else:
            self._end([entry], State.TRAINED if entry.step else State.EVICTED)

    def _receive_part(self, entry: Entry, unroll_index: int, continues: bool) -> None:
        """Note an unroll that is not its whole episode."""
        entry.unrolls |= {unroll_index}
        parts = entry.parts = entry.parts or Parts()
        if not continues:
            parts.num_unrolls = max(parts.num_unrolls or 0, unroll_index + 1)
        is_whole = parts.num_unrolls == len(entry.unrolls)
        if entry.state is State.OPEN and is_whole:
            self._slots.num_begun -= len(entry.unrolls) - 1
            self._slots.count_unrolls(len(entry.unrolls))
        elif entry.state is not State.READY:
            self._slots.num_beyond += 1
            self._slots.num_begun += entry.state is State.OPEN
            return
        # No further unroll is expected of an attempt that was given up.
        self._leave_queue_or_actor(entry)
        entry.state, entry.actor_id = State.RECEIVED, None

    def _settle(self, unroll_ids: Iterable[int], what: str, step: int) -> tuple[list[Entry], list[Entry]]:
        """Note trajectories that were trained on or evicted.

        Returns:
            Entries of tickets that end with it: those of whole episodes, and those of several unrolls.
        """
        whole, in_parts = [], []
        get = self._entries.get
        for number in dict.fromkeys(unroll_ids):
            entry = get(number)
            if entry is not None and entry.parts is None:
                if entry.state is not State.RECEIVED:
                    raise KeyError(f"ticket {number} is {entry.state.value}: only a received one can be {what}")
                whole.append(entry)
            elif entry is not None or number >= MAX_TICKETS:  # otherwise it has ended
                in_parts += self._settle_part(number, what, step)
        return whole, in_parts

    def _settle_part(self, number: int, what: str, step: int) -> list[Entry]:
        """Note one of several unrolls that was trained on or evicted; see `_settle`."""
        unroll_index, ticket_id = divmod(number, MAX_TICKETS)
        entry = self._entries.get(ticket_id)
        if entry is None:
            return []
        parts = entry.parts
        if parts is None or unroll_index not in entry.unrolls:
            raise KeyError(
                f"unroll {unroll_index} of ticket {ticket_id} has not come: only a received one can be {what}"
            )
        if unroll_index in parts.settled:
            return []
        parts.settled[unroll_index] = step
        entry.step = max(entry.step, step)
        self._slots.trains_parts |= step > 0
        if self._journal is not None:
            self._notes.append(journal_rows.note_settled(ticket_id, unroll_index, step))
        if entry.state is State.RECEIVED and not waiting(entry):
            return [entry]
        self._slots.num_beyond -= 1
        return []

    def _end(self, ended: Sequence[Entry], end: State, charged: bool = False) -> None:
        """End tickets.

        Args:
            charged: the slots stay charged, since the caller has noted when they become free.
        """
        live, groups, remembered = self._entries, self._groups, self._ended
        is_refused = end is State.REFUSED
        freed: list[int] = []
        for entry in ended:
            ticket = entry.ticket
            ticket_id, group_id = ticket.ticket_id, ticket.group_id
            entry.state, entry.actor_id = end, None
            del live[ticket_id]
            remembered[ticket_id] = entry
            group = groups[group_id]
            group.under_way -= 1
            if is_refused:
                group.num_lost += 1
            else:
                freed.append(entry.born_version)
            if not group.under_way:
                if group.num_lost:
                    self._slots.free([entry.born_version] * group.num_lost)
                del groups[group_id]
        if not charged:
            self._slots.free(freed)
        self._totals[end.value] += len(ended)
        if self._journal is not None:
            self._notes += map(journal_rows.note, ended)
        while len(remembered) > self._num_remembered and next(iter(remembered.values())).step <= self._kept:
            remembered.popitem(last=False)
