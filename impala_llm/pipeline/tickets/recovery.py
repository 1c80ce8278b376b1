"""Recovery: puts a table of tickets back, from the journal of a process that has died or from a saved state.

Invariant: a step counts only if its version was kept. Trajectories of a lost step count as received, and not yet
trained on. Tickets that were open are ready again; episodes of which an unroll was received are cut.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from impala_llm.pipeline.tickets import journal_rows
from impala_llm.pipeline.tickets.staleness import beyond_slot
from impala_llm.pipeline.tickets.table import TicketTable
from impala_llm.pipeline.tickets.ticket import (
    Entry,
    Group,
    Parts,
    State,
    Ticket,
    entry_from_state,
    entry_state,
    waiting,
)
from impala_llm.trajectory import unroll_id

_STATE_FORMAT = 3


def restore(table: TicketTable, received: Sequence[tuple[int, str, int]]) -> None:
    """Restore a table from its journal.

    Args:
        table: without tickets.
        received: (ticket_id, episode_id, unroll_index) of the trajectories in the trajectory store.

    Raises:
        ValueError: the journal is of another task order, or damaged.
    """
    rows = [] if table.journal is None else table.journal.rows().tolist()
    past = journal_rows.read(rows, table.order, table.slots.version)
    _restore_entries(table, past)
    _restore_states(table, past, received)


def rewrite_journal(table: TicketTable) -> None:
    """Begin the journal anew, with the rows from which the next process restores the table."""
    table.slots.drop_zeros()
    table.notes.clear()
    if table.journal is not None:
        table.journal.rewrite(table.account())


def still_wanted(table: TicketTable, received: Sequence[tuple[int, str, int]]) -> list[bool]:
    """Return whether each of these trajectories, see `restore`, is still to be trained on or evicted."""
    return [
        entry is not None and entry.episode_id == episode_id and unroll_index in waiting(entry)
        for ticket_id, episode_id, unroll_index in received
        for entry in [table.entries.get(ticket_id)]
    ]


def _restore_entries(table: TicketTable, past: journal_rows.Past) -> None:
    """Enter all tickets of the journal, with what their rows say, and charge their slots."""
    for ticket_id, row in sorted(past.last.items()):
        group_id = ticket_id // table.order.group_size
        _, _, born_version, min_version, tries, step = row
        attempts, losses = journal_rows.read_tries(tries)
        ticket = Ticket(
            *(ticket_id, table.order.task_of(group_id), group_id, table.order.ticket_seed(ticket_id)),
            min_version,
        )
        table.entries[ticket_id] = entry = Entry(ticket, born_version, attempts=attempts, step=step)
        entry.losses, entry.crashes = losses, past.crashes.get(ticket_id)
        table.slots.charged[born_version] += 1
        table.groups.setdefault(group_id, Group(under_way=0)).under_way += 1


def _restore_states(table: TicketTable, past: journal_rows.Past, received: Sequence[tuple[int, str, int]]) -> None:
    """Bring each ticket into the state that follows from its rows and the trajectories that were stored."""
    arrived: dict[int, tuple[str, set[int]]] = {}
    for ticket_id, episode_id, unroll_index in received:
        arrived.setdefault(ticket_id, (episode_id, set()))[1].add(unroll_index)
    for ticket_id, entry in list(table.entries.items()):
        end = past.end_of(ticket_id)
        if end is not None and entry.step <= table.slots.version:
            table.end([entry], end)
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
            table.slots.num_beyond += beyond_slot(entry)
        elif before:
            table.end([entry], State.TRAINED if entry.step else State.EVICTED)
        else:
            table.ready.append(ticket_id)


def state_dict(table: TicketTable) -> dict[str, Any]:
    """State of a table as plain lists, strings and numbers."""
    return {
        "format": _STATE_FORMAT,
        **table.slots.state_dict(),
        "task_order": table.order.state_dict(),
        "tickets": [entry_state(entry) for entry in table.entries.values()],
        "ended": [entry_state(entry) for entry in table.ended.values()],
        "ready": list(table.ready),
        "groups": [[group_id, g.under_way, g.num_lost] for group_id, g in table.groups.items()],
        "totals": dict(table.totals),
    }


def load_state_dict(table: TicketTable, state: dict[str, Any]) -> list[int]:
    """Restore a table from a `state_dict`, see `TicketLedger.load_state_dict`.

    Returns:
        `unroll_id` of all trajectories that were received and are not settled.

    Raises:
        ValueError: the state is of another format or task order.
    """
    if state["format"] != _STATE_FORMAT:
        raise ValueError(f"the saved ledger has format {state['format']}, this program reads {_STATE_FORMAT}")
    table.order.load_state_dict(state["task_order"])
    table.entries = {entry.ticket.ticket_id: entry for entry in map(entry_from_state, state["tickets"])}
    table.ended = OrderedDict((e.ticket.ticket_id, e) for e in map(entry_from_state, state["ended"]))
    table.groups = {group_id: Group(*values) for group_id, *values in state["groups"]}
    table.slots.load_state_dict(state, table.entries.values())
    table.totals = Counter(state["totals"])
    table.open_at, table.num_open = {}, 0
    interrupted = []
    for ticket_id, entry in sorted(table.entries.items()):
        if entry.state is State.OPEN and entry.episode_id is not None:
            table.cut(entry)
        elif entry.state is State.OPEN:
            entry.state = State.READY
            interrupted.append(ticket_id)
    table.ready = deque([*interrupted, *state["ready"]])
    return [unroll_id(i, unroll) for i, entry in table.entries.items() for unroll in waiting(entry)]
