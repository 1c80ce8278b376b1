"""Recovery: puts a table of tickets back, from the journal of a process that has died.

Invariant: a step counts only if its version was kept. Trajectories of a lost step count as received, and not yet
trained on. Tickets that were open are ready again; episodes of which an unroll was received are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from impala_llm.pipeline.tickets import journal_rows
from impala_llm.pipeline.tickets.staleness import beyond_slot
from impala_llm.pipeline.tickets.table import TicketTable
from impala_llm.pipeline.tickets.ticket import LedgerEntry, OpenGroup, Ticket, TicketState, Unrolls, waiting


def restore(table: TicketTable, received: Sequence[tuple[int, str, int]]) -> None:
    """Restore a table from its journal.

    Args:
        table: without tickets.
        received: (ticket_id, episode_id, unroll_index) of the trajectories in the trajectory store.

    Raises:
        RunDirectoryError: the journal is of another task order, or damaged.
    """
    rows = [] if table.journal is None else table.journal.rows().tolist()
    past = journal_rows.read(rows, table.order, table.slots.version)
    table.slots.forecast = past.forecast
    _restore_entries(table, past)
    _restore_states(table, past, received)


def rewrite_journal(table: TicketTable) -> None:
    """Replace the journal by the rows from which the next process restores the table.

    Raises:
        ArenaError: see `Journal.rewrite`.
    """
    table.slots.drop_zeros()
    table.notes.clear()
    if table.journal is not None:
        table.journal.rewrite(table.account())


def still_wanted(table: TicketTable, received: Sequence[tuple[int, str, int]]) -> list[bool]:
    """Return whether each of these trajectories is still to be trained on or evicted.

    Args:
        table: restored.
        received: as for `restore`.
    """
    return [
        entry is not None and entry.episode_id == episode_id and unroll_index in waiting(entry)
        for ticket_id, episode_id, unroll_index in received
        for entry in [table.entries.get(ticket_id)]
    ]


def _restore_entries(table: TicketTable, past: journal_rows.JournalState) -> None:
    """Enter all tickets of the journal with the state in their rows, and charge their slots."""
    for ticket_id, row in sorted(past.last.items()):
        group_id = ticket_id // table.order.group_size
        _, _, born_version, min_version, tries, step = row
        attempts, losses = journal_rows.read_tries(tries)
        ticket = Ticket(
            *(ticket_id, table.order.task_of(group_id), group_id, table.order.ticket_seed(ticket_id)),
            0 if table.slots.max_staleness is None else min_version,
        )
        table.entries[ticket_id] = entry = LedgerEntry(ticket, born_version, attempts=attempts, step=step)
        entry.losses, entry.crashes = losses, past.crashes.get(ticket_id)
        table.slots.charged[born_version] += 1
        table.groups.setdefault(group_id, OpenGroup(under_way=0)).under_way += 1


def _restore_states(
    table: TicketTable, past: journal_rows.JournalState, received: Sequence[tuple[int, str, int]]
) -> None:
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
            entry.several_unrolls = Unrolls(before)
        if found - before.keys():
            entry.state = TicketState.RECEIVED
            table.slots.num_beyond += beyond_slot(entry)
        elif before:
            table.end([entry], TicketState.TRAINED if entry.step else TicketState.EVICTED)
        else:
            table.ready.append(ticket_id)
