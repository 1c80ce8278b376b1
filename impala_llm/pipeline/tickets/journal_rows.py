"""Rows of a ledger's journal: how a ledger writes them, and how that of a later process reads them.

Invariant: the last of a ticket's rows counts. Arrivals are not noted: the trajectory store holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.pipeline.tickets.quarantine import count_crashes
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.tickets.ticket import LedgerEntry, TicketState
from impala_llm.trajectory import MAX_TICKETS

Row = tuple[int, ...]
_ORDER, TAKEN, LIVE, _TRAINED, _EVICTED, _REFUSED, _SETTLED, _MADE, _CRASHED = range(9)
_LOSSES_AT = 32
"""First bit of the number of losses in a row's fifth field; the bits below hold the number of attempts."""
_KINDS = {TicketState.TRAINED: _TRAINED, TicketState.EVICTED: _EVICTED, TicketState.REFUSED: _REFUSED}
_ENDS = {kind: state for state, kind in _KINDS.items()}
NO_FORECAST = (0, 0)
"""`Admission.forecast` where no episode had several unrolls."""


def note(entry: LedgerEntry) -> Row:
    """Row of a ticket: its end, or that it has not ended."""
    ticket = entry.ticket
    kind = _KINDS.get(entry.state, LIVE)
    tries = entry.attempts | entry.losses << _LOSSES_AT
    return kind, ticket.ticket_id, entry.born_version, ticket.min_version, tries, entry.step


def read_tries(tries: int) -> tuple[int, int]:
    """Split a row's field into attempts and losses."""
    return tries & (1 << _LOSSES_AT) - 1, tries >> _LOSSES_AT


def note_made(version: int, forecast: tuple[int, int] = NO_FORECAST) -> Row:
    """Row for a completed step, whether or not it counts.

    Args:
        version: that it has made.
        forecast: `Admission.forecast` at that time.
    """
    return _MADE, version, *forecast, 0, 0


def note_settled(ticket_id: int, unroll_index: int, step: int) -> Row:
    """Row for one of several unrolls that was trained on or evicted.

    Args:
        ticket_id, unroll_index: of the unroll.
        step: version of the step that trained on it; 0: it was evicted.
    """
    return _SETTLED, ticket_id, unroll_index, step, 0, 0


def account(
    order: TaskOrder, entries: Iterable[LedgerEntry], version: int, forecast: tuple[int, int] = NO_FORECAST
) -> list[Row]:
    """Rows from which a later process restores tickets, as few as possible.

    Args:
        order: its identity and its position are noted.
        entries: of the tickets.
        version, forecast: of the newest completed step, see `note_made`.
    """
    entries = list(entries)
    return [
        (_ORDER, *order.identity().values()),
        (TAKEN, order.num_taken, 0, 0, 0, 0),
        note_made(version, forecast),
        *map(note, entries),
        *(
            note_settled(entry.ticket.ticket_id, unroll_index, step)
            for entry in entries
            if entry.several_unrolls is not None
            for unroll_index, step in entry.several_unrolls.settled.items()
        ),
        *(
            (_CRASHED, entry.ticket.ticket_id, unroll_index, count, 0, 0)
            for entry in entries
            if entry.crashes is not None
            for unroll_index, count in entry.crashes.items()
        ),
    ]


def as_of(rows: Iterable[Row], version: int) -> list[Row]:
    """Rows from which a process restores tickets as they were at a version: later steps have not been.

    Args:
        rows: see `account`.
        version: of the weights from which the process continues.
    """
    found: list[Row] = []
    for row in rows:
        if row[0] == _MADE:
            found.append((_MADE, min(row[1], version), *row[2:]))
        elif row[0] == _TRAINED and row[5] > version:
            found.append((LIVE, *row[1:5], 0))
        elif row[0] != _SETTLED or row[3] <= version:
            found.append(row)
    return found


def group_size_of(rows: Iterable[Sequence[int]]) -> int:
    """Tickets of a group, by rows that were noted with `account`."""
    return next(row[2] for row in rows if row[0] == _ORDER)


def dealt(by_rank: Sequence[Sequence[Sequence[int]]], rank: int, num_ranks: int) -> list[Row]:
    """Rows of one of several ranks, from those of another number of ranks: a group belongs to the rank of its number.

    Groups that some ranks had reached in the order, and that their own rank had not, become tickets that no actor has.

    Args:
        by_rank: see `account`.
        rank, num_ranks: that the rows are for.
    """
    num_before = len(by_rank)
    group_size = group_size_of(by_rank[0])
    taken = [next(row[1] for row in rows if row[0] == TAKEN) for rows in by_rank]
    made_rows = [row for rows in by_rank for row in rows if row[0] == _MADE]
    made = max(row[1] for row in made_rows)
    num_counted = sum(row[2] for row in made_rows)
    mean = sum(row[2] * row[3] for row in made_rows) // max(1, num_counted)
    order = next(row for row in by_rank[0] if row[0] == _ORDER)
    end = max((count - 1) * num_before + before + 1 if count else 0 for before, count in enumerate(taken))
    mine = range(rank, end, num_ranks)
    skipped = [group for group in mine if group // num_before >= taken[group % num_before]]
    return [
        (*order[:4], rank, num_ranks),
        (TAKEN, len(mine), 0, 0, 0, 0),
        note_made(made, (num_counted, mean)),
        *(
            (LIVE, ticket, made, 0, 0, 0)
            for group in skipped
            for ticket in range(group * group_size, (group + 1) * group_size)
        ),
        *(
            (kind, ticket, *rest)
            for rows in by_rank
            for kind, ticket, *rest in rows
            if kind not in (_ORDER, TAKEN, _MADE) and ticket // group_size % num_ranks == rank
        ),
    ]


def renumbered(rows: Iterable[Sequence[int]], shift: int) -> list[Row]:
    """Copy rows, with all versions increased.

    Args:
        rows: see `account`.
        shift: that is added to each version but 0, which means none in most places. Not where a ticket demands it:
            trajectories from before the change are older than all that are made after it.
    """
    found: list[Row] = []
    for kind, *fields in rows:
        at = {_SETTLED: (2,), _MADE: (0,), _ORDER: (), TAKEN: (), _CRASHED: ()}.get(kind, (1, 4))
        moved = [value + shift if i in at and value else value for i, value in enumerate(fields)]
        if 4 in at:
            moved[2] += shift
        found.append((kind, *moved))
    return found


@dataclass
class JournalState:
    """State of tickets, as read from rows. By ticket id."""

    last: dict[int, Sequence[int]] = field(default_factory=dict)
    """Last row."""
    settled: dict[int, dict[int, int]] = field(default_factory=dict)
    """By unroll that a step which counts has settled: that step's version; 0: it was evicted."""
    crashes: dict[int, dict[int, int]] = field(default_factory=dict)
    """By unroll: number of steps that trained on it in which the learner died."""
    forecast: tuple[int, int] = NO_FORECAST
    """`Admission.forecast` of the newest row."""

    def end_of(self, ticket_id: int) -> TicketState | None:
        """Final state of a ticket; None where it has not ended."""
        return _ENDS.get(self.last[ticket_id][0])


def read(rows: Sequence[Sequence[int]], order: TaskOrder, version: int) -> JournalState:
    """Read rows, and move the task order to its position.

    Args:
        rows: see `account`.
        order: of this run; its position is set here.
        version: newest one on a board: steps that made a later one do not count.

    Raises:
        RunDirectoryError: the rows are of another task order, or damaged.
    """
    past = JournalState()
    made = version
    steps: dict[int, set[tuple[int, int]]] = {}  # those that do not count: (ticket_id, unroll_index)
    identity = order.identity()
    for row in rows:
        if row[0] != _ORDER and not 0 <= row[1] < MAX_TICKETS:
            raise RunDirectoryError(f"the journal is damaged: it has the row {row}. Start under another run.name")
        if row[0] == _ORDER:
            if list(row[1:]) != list(identity.values()):
                if row[1] != identity["num_tasks"]:
                    raise RunDirectoryError(
                        f"the run has {identity['num_tasks']} training tasks, and {row[1]} before: give it those that "
                        "it had (the same file or arguments of the environment), or set another run.name and run.dir"
                    )
                raise RunDirectoryError(
                    f"the journal is of the task order {row[1:]}, this run has {identity}: start under another run.name"
                )
        elif row[0] == TAKEN:
            order.skip_to(row[1])
        elif row[0] == _SETTLED:
            if row[3] <= version:
                past.settled.setdefault(row[1], {})[row[2]] = row[3]
            else:
                steps.setdefault(row[3], set()).add((row[1], row[2]))
        elif row[0] == _MADE:
            made = max(made, row[1])
            past.forecast = row[2], row[3]
        elif row[0] == _CRASHED:
            past.crashes.setdefault(row[1], {})[row[2]] = row[3]
        else:
            past.last[row[1]] = row
    for ticket_id, (kind, *_, step) in past.last.items():
        unrolls = steps.get(step, ())
        if kind == _TRAINED and step > version and all(ticket_id != other for other, _ in unrolls):
            steps.setdefault(step, set()).add((ticket_id, 0))
    count_crashes(past.crashes, steps, made)
    if past.last:
        group = max(past.last) // order.group_size
        order.skip_to(max(order.num_taken, group // identity["world_size"] + 1))
    return past
