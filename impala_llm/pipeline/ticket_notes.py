"""What a ledger notes in its journal, and what the ledger of a later process reads out of it.

Invariant: of a ticket's rows the last one counts. What has arrived is not noted: it is known from the replay arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from impala_llm.pipeline.task_order import TaskOrder
from impala_llm.pipeline.ticket_entries import Entry, State
from impala_llm.trajectory import MAX_TICKETS

Row = tuple[int, ...]
_ORDER, _TAKEN, _LIVE, _TRAINED, _EVICTED, _REFUSED, _SETTLED = range(7)
_KINDS = {State.TRAINED: _TRAINED, State.EVICTED: _EVICTED, State.REFUSED: _REFUSED}
_ENDS = {kind: state for state, kind in _KINDS.items()}


def note(entry: Entry) -> Row:
    """Of a ticket that has ended, or (any other state) that lives."""
    ticket = entry.ticket
    kind = _KINDS.get(entry.state, _LIVE)
    return kind, ticket.ticket_id, entry.born_version, ticket.min_version, entry.attempts, entry.step


def note_settled(ticket_id: int, unroll_index: int, step: int) -> Row:
    """One of several unrolls was trained on, by the step that makes this version, or (0) evicted."""
    return _SETTLED, ticket_id, unroll_index, step, 0, 0


def account(order: TaskOrder, entries: Iterable[Entry]) -> list[Row]:
    """All that a later process must know of these tickets, in as few rows as it takes."""
    entries = list(entries)
    return [
        (_ORDER, *order.identity().values()),
        (_TAKEN, order.num_taken, 0, 0, 0, 0),
        *map(note, entries),
        *(
            note_settled(entry.ticket.ticket_id, unroll_index, step)
            for entry in entries
            if entry.parts is not None
            for unroll_index, step in entry.parts.settled.items()
        ),
    ]


@dataclass
class Past:
    """What rows say of each ticket."""

    last: dict[int, Sequence[int]] = field(default_factory=dict)
    """Its last row."""
    settled: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of its unrolls that a step has settled which counts: that step's version, 0 where it was evicted."""

    def end_of(self, ticket_id: int) -> State | None:
        """None where it lives."""
        return _ENDS.get(self.last[ticket_id][0])


def read(rows: Sequence[Sequence[int]], order: TaskOrder, version: int) -> Past:
    """Take the task order to where it was.

    version: the newest that was published: steps that made a later one do not count.

    Raises:
        ValueError: the rows are of another task order, or damaged.
    """
    past = Past()
    identity = order.identity()
    for row in rows:
        if row[0] != _ORDER and not 0 <= row[1] < MAX_TICKETS:
            raise ValueError(f"the journal is damaged: it has the row {row}. Start under another run.name")
        if row[0] == _ORDER:
            if list(row[1:]) != list(identity.values()):
                raise ValueError(
                    f"the journal is of the task order {row[1:]}, this run has {identity}: start under another run.name"
                )
        elif row[0] == _TAKEN:
            order.skip_to(row[1])
        elif row[0] == _SETTLED:
            if row[3] <= version:
                past.settled.setdefault(row[1], {})[row[2]] = row[3]
        else:
            past.last[row[1]] = row
    if past.last:
        group = max(past.last) // order.group_size
        order.skip_to(max(order.num_taken, group // identity["world_size"] + 1))
    return past
