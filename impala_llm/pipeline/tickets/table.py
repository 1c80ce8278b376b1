"""Table of tickets: the state of each, its transitions, and the notes from which a later process restores them.

Invariant: a ticket ends in exactly one of trained, evicted and refused; until then each attempt at it either brings a
trajectory or makes it ready again. Each transition that a later process must know of is noted, and `write_notes` puts
the notes of a call into the journal in one piece.

    ready ──open──► open ──receive──► received ──► trained | evicted
      ▲               │ │
      └─grant_again───┘ └─refuse─► refused

An episode may come in several unrolls. Its ticket is open until all of them were received, and ends with the last of
them: trained if any was trained on, else evicted. Once one was received the ticket is not granted again: where the
remaining ones cannot come (the attempt failed or broke a rule, the actor was lost, the learner was restarted) the
episode is cut there, and the ticket ends with the unrolls received. Further ones are accepted until then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.record_layout import CONTINUES
from impala_llm.pipeline.tickets import journal_rows
from impala_llm.pipeline.tickets.staleness import Admission
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.tickets.ticket import (
    ENDED,
    FIRST_UNROLL,
    LedgerEntry,
    OpenGroup,
    Ticket,
    TicketState,
    Unrolls,
    waiting,
)
from impala_llm.trajectory import MAX_TICKETS


class Verdict(Enum):
    """Answer of the ledger to a trajectory that arrived."""

    ACCEPTED = auto()
    DUPLICATE = auto()
    """This unroll of this episode was received before: acknowledge and drop."""
    SUPERSEDED = auto()
    """Another attempt at the ticket was faster, or the ticket has ended: final, the ticket is unchanged."""
    UNKNOWN_TICKET = auto()
    NOT_AS_GRANTED = auto()
    """The trajectory is of another task or group than its ticket, or it is an unroll and its ticket one of a group,
    which is for a whole episode."""
    OUTDATED = auto()
    """The trajectory is of older weights than its ticket demands."""


Claim = tuple[str, int, int, int, int, int, int]
"""Facts of a trajectory: episode_id, flags (record.py), ticket_id, unroll_index, task_id, group_id, and the oldest
version of the weights that made it."""


class TicketTable:
    """Tickets of one rank. For callers that hold the ledger's lock.

    Args:
        order: source of tasks.
        slots: that the tickets are charged to.
        journal: takes the notes; None: they are dropped.
    """

    def __init__(self, order: TaskOrder, slots: Admission, journal: Journal | None) -> None:
        self.order = order
        self.slots = slots
        self.journal = journal
        self.entries: dict[int, LedgerEntry] = {}
        """Tickets that have not ended, by id."""
        self.ended: OrderedDict[int, LedgerEntry] = OrderedDict()
        """Tickets that have ended and are remembered, oldest first."""
        self.groups: dict[int, OpenGroup] = {}
        self.ready: deque[int] = deque()
        self.open_at: dict[str, set[int]] = {}
        """Open tickets, by the actor that has them."""
        self.changed: set[str] = set()
        """Actors whose tickets have become fewer since this was cleared."""
        self.num_open = 0
        self.totals: Counter[str] = Counter()
        self.kept = slots.version
        """Newest version from which a later process would continue."""
        self.over = slots.version
        """Version up to which no step counts as one in which the process died: steps that were completed, and the one
        in which the process was told to end. See quarantine.py."""
        self.notes: list[journal_rows.Row] = []
        # Resends arrive within seconds; tickets that ended many batches ago need not be remembered.
        self._num_remembered = max(4096, 16 * slots.batch_size * (1 + (slots.max_staleness or 0)))

    @property
    def num_playing(self) -> int:
        """Number of tickets that may still bring a trajectory: ready or open ones."""
        return self.num_open + len(self.ready)

    # --- transitions

    def start_group(self) -> None:
        """Take a group from the task order and make its tickets ready. Their slots are charged from now on."""
        task_id, group_id = self.order.next()
        size = self.order.group_size
        min_version = self.slots.min_version(self.num_playing)
        self.groups[group_id] = OpenGroup(under_way=size)
        for ticket_id in range(group_id * size, (group_id + 1) * size):
            ticket = Ticket(ticket_id, task_id, group_id, self.order.ticket_seed(ticket_id), min_version)
            entry = self.entries[ticket_id] = LedgerEntry(ticket, self.slots.version)
            self.ready.append(ticket_id)
            self.note(entry)
        self.slots.charge_group()

    def open(self, ticket_id: int, actor_id: str) -> Ticket:
        """Open and return a ticket, which the caller has taken out of `ready`.

        Args:
            ticket_id: of the ticket.
            actor_id: of the actor that gets it.
        """
        entry = self.entries[ticket_id]
        entry.state, entry.actor_id, entry.lost_by = TicketState.OPEN, actor_id, None
        self.open_at[actor_id].add(ticket_id)
        self.num_open += 1
        self.totals["granted"] += 1
        return entry.ticket

    def leave_queue_or_actor(self, entry: LedgerEntry) -> None:
        """Take a ticket out of `ready`, or away from its actor."""
        ticket_id = entry.ticket.ticket_id
        if entry.state is TicketState.READY:
            self.ready.remove(ticket_id)
        elif entry.state is TicketState.OPEN:
            assert entry.actor_id is not None
            self.open_at[entry.actor_id].discard(ticket_id)
            self.changed.add(entry.actor_id)
            self.num_open -= 1

    def grant_again(self, entry: LedgerEntry) -> None:
        """Make an open ticket ready again."""
        assert entry.actor_id is not None
        self.open_at.get(entry.actor_id, set()).discard(entry.ticket.ticket_id)
        self.changed.add(entry.actor_id)
        self.num_open -= 1
        entry.state, entry.actor_id = TicketState.READY, None
        # In front of new ones: it is the oldest work.
        self.ready.appendleft(entry.ticket.ticket_id)
        self.totals["regranted"] += 1

    def refuse(self, entry: LedgerEntry) -> None:
        """Refuse a ticket, or cut its episode where an unroll of it was received."""
        self.leave_queue_or_actor(entry)
        if entry.episode_id is None:
            self.end([entry], TicketState.REFUSED)
        else:
            self.cut(entry)

    def cut(self, entry: LedgerEntry) -> None:
        """Cut an episode whose remaining unrolls will not come: its ticket is no longer open."""
        self.totals["cut"] += 1
        self.slots.num_begun -= len(entry.unrolls)
        entry.state, entry.actor_id = TicketState.RECEIVED, None
        if waiting(entry):
            self.slots.num_beyond -= 1
        else:
            self.end([entry], TicketState.TRAINED if entry.step else TicketState.EVICTED)

    def check(self, ticket_id: int, episode_id: str, unroll_index: int = 0) -> Verdict:
        """Return the verdict of `receive_all` on an unroll, without effect.

        Args:
            ticket_id: that the episode was played for.
            episode_id: of the episode.
            unroll_index: index among the unrolls of the episode, from 0.
        """
        entry = self.entries.get(ticket_id) or self.ended.get(ticket_id)
        if entry is None:
            return Verdict.UNKNOWN_TICKET
        same_episode = entry.episode_id == episode_id
        if same_episode and unroll_index in entry.unrolls:
            return Verdict.DUPLICATE
        if entry.state in ENDED or not (same_episode or entry.episode_id is None):
            return Verdict.SUPERSEDED
        return Verdict.ACCEPTED

    def receive_all(self, claims: Iterable[Claim]) -> list[Verdict]:
        """Note trajectories, in order; return a verdict on each, see `TicketLedger.received_all`."""
        verdicts = []
        entries, open_at, changed = self.entries, self.open_at, self.changed
        num_received = 0
        is_grouped = self.order.group_size > 1
        for episode_id, flags, ticket_id, unroll_index, task_id, group_id, oldest_version in claims:
            entry = entries.get(ticket_id)
            if entry is None:
                verdict = self.check(ticket_id, episode_id, unroll_index)
                self.totals["duplicates"] += verdict is Verdict.DUPLICATE
                verdicts.append(verdict)
                continue
            ticket = entry.ticket
            is_other = ticket.task_id != task_id or ticket.group_id != group_id
            if is_other or (is_grouped and (unroll_index or flags & CONTINUES)):
                verdicts.append(Verdict.NOT_AS_GRANTED)
                continue
            if ticket.min_version > oldest_version:
                verdicts.append(Verdict.OUTDATED)
                continue
            is_new = entry.episode_id is None
            if is_new and entry.state is TicketState.OPEN:
                verdict = Verdict.ACCEPTED  # the common case, on the shortest path
            else:
                verdict = self.check(ticket_id, episode_id, unroll_index)
            verdicts.append(verdict)
            if verdict is Verdict.DUPLICATE:
                self.totals["duplicates"] += 1
            elif verdict is Verdict.ACCEPTED:
                num_received += 1
                entry.episode_id = episode_id
                continues = bool(flags & CONTINUES)
                if is_new and not (continues or unroll_index):
                    if entry.state is TicketState.OPEN:
                        open_at[entry.actor_id].discard(ticket_id)  # type: ignore[index]  # open, so at an actor
                        changed.add(entry.actor_id)  # type: ignore[arg-type]
                        self.num_open -= 1
                    else:
                        self.leave_queue_or_actor(entry)
                    entry.state, entry.actor_id = TicketState.RECEIVED, None
                    entry.unrolls = FIRST_UNROLL
                    if self.slots.counts_unrolls:
                        self.slots.count_unrolls(1)
                else:
                    self._receive_unroll(entry, unroll_index, continues)
        self.totals["received"] += num_received
        return verdicts

    def _receive_unroll(self, entry: LedgerEntry, unroll_index: int, continues: bool) -> None:
        """Note an unroll that is not its whole episode."""
        entry.unrolls |= {unroll_index}
        several = entry.several_unrolls = entry.several_unrolls or Unrolls()
        if not continues:
            several.num_unrolls = max(several.num_unrolls or 0, unroll_index + 1)
        is_whole = several.num_unrolls == len(entry.unrolls)
        if entry.state is TicketState.OPEN and is_whole:
            self.slots.num_begun -= len(entry.unrolls) - 1
            self.slots.count_unrolls(len(entry.unrolls))
        elif entry.state is not TicketState.READY:
            self.slots.num_beyond += 1
            self.slots.num_begun += entry.state is TicketState.OPEN
            return
        # No further unroll is expected of an attempt that was given up.
        self.leave_queue_or_actor(entry)
        entry.state, entry.actor_id = TicketState.RECEIVED, None

    def train(self, unroll_ids: Iterable[int]) -> None:
        """Note the trajectories of the step under way, see `TicketLedger.trained`."""
        step = self.slots.version + 1
        whole, of_several = self._settle(unroll_ids, "trained on", step)
        entries = [*whole, *of_several]
        for entry in entries:
            entry.step = step
        self.end(entries, TicketState.TRAINED, charged=True)
        self.slots.free_with_step([entry.born_version for entry in entries])
        self.write_notes()

    def evict(self, unroll_ids: Iterable[int]) -> None:
        """Note dropped trajectories, see `TicketLedger.evicted`."""
        whole, of_several = self._settle(unroll_ids, "evicted", 0)
        self.end([*whole, *(entry for entry in of_several if not entry.step)], TicketState.EVICTED)
        self.end([entry for entry in of_several if entry.step], TicketState.TRAINED)
        self.write_notes()

    def _settle(self, unroll_ids: Iterable[int], what: str, step: int) -> tuple[list[LedgerEntry], list[LedgerEntry]]:
        """Note trajectories that were trained on or evicted.

        Returns:
            Entries of tickets that end with it: those of whole episodes, and those of several unrolls.
        """
        whole, of_several = [], []
        get = self.entries.get
        for number in dict.fromkeys(unroll_ids):
            entry = get(number)
            if entry is not None and entry.several_unrolls is None:
                if entry.state is not TicketState.RECEIVED:
                    raise KeyError(f"ticket {number} is {entry.state.value}: only a received one can be {what}")
                whole.append(entry)
            elif entry is not None or number >= MAX_TICKETS:  # otherwise it has ended
                of_several += self._settle_unroll(number, what, step)
        return whole, of_several

    def _settle_unroll(self, number: int, what: str, step: int) -> list[LedgerEntry]:
        """Note one of several unrolls that was trained on or evicted; see `_settle`."""
        unroll_index, ticket_id = divmod(number, MAX_TICKETS)
        entry = self.entries.get(ticket_id)
        if entry is None:
            return []
        several = entry.several_unrolls
        if several is None or unroll_index not in entry.unrolls:
            raise KeyError(
                f"unroll {unroll_index} of ticket {ticket_id} has not come: only a received one can be {what}"
            )
        if unroll_index in several.settled:
            return []
        several.settled[unroll_index] = step
        entry.step = max(entry.step, step)
        self.slots.trains_unrolls |= step > 0
        if self.journal is not None:
            self.notes.append(journal_rows.note_settled(ticket_id, unroll_index, step))
        if entry.state is TicketState.RECEIVED and not waiting(entry):
            return [entry]
        self.slots.num_beyond -= 1
        return []

    def end(self, ended: Sequence[LedgerEntry], end: TicketState, charged: bool = False) -> None:
        """End tickets.

        Args:
            ended: to end.
            end: trained, evicted or refused.
            charged: the slots stay charged, since the caller has noted when they become free.
        """
        live, groups, remembered = self.entries, self.groups, self.ended
        is_refused = end is TicketState.REFUSED
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
                    self.slots.free([entry.born_version] * group.num_lost)
                del groups[group_id]
        if not charged:
            self.slots.free(freed)
        self.totals[end.value] += len(ended)
        if self.journal is not None:
            self.notes += map(journal_rows.note, ended)
        while len(remembered) > self._num_remembered and next(iter(remembered.values())).step <= self.kept:
            remembered.popitem(last=False)

    # --- notes

    def note_made(self, version: int) -> None:
        """Note, at once, that a step was completed, whether or not it counts."""
        if self.journal is not None:
            self.notes.append(journal_rows.note_made(version, self.slots.forecast))
            self.write_notes()

    def note(self, entry: LedgerEntry) -> None:
        """Note the state of a ticket."""
        if self.journal is not None:
            self.notes.append(journal_rows.note(entry))

    def write_notes(self) -> None:
        """Append the changes of a call to the journal, in one piece.

        Raises:
            ArenaError: see `Journal.rewrite`.
        """
        if self.notes:
            assert self.journal is not None
            if not self.journal.append(self.notes):
                self.journal.rewrite(self.account())
            self.notes.clear()

    def account(self) -> list[journal_rows.Row]:
        """Rows that restore the ledger in a later process."""
        ended = self.ended.values()
        wanted = self.groups.keys() | {e.ticket.group_id for e in ended if e.step > self.kept}
        kept = [entry for entry in ended if entry.ticket.group_id in wanted]
        made = max(self.over, self.slots.version)
        return journal_rows.account(self.order, [*self.entries.values(), *kept], made, self.slots.forecast)
