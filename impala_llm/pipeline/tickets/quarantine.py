"""Quarantine: tasks that kill actors and trajectories that kill the learner are set aside. Pure logic on entries.

A task that kills its actors would be granted to all of them, and data that kills the learner would be trained on after
each restart. A ticket that several actors had when they were lost is refused; from the second actor on it is a suspect,
and granted to an actor that has no other suspect, so that other tickets do not share its losses. Trajectories of two
steps in which the learner died are evicted by the next process.

Invariant: a loss counts against a ticket only while the actor stays away: one that comes back with it was not lost. A
step counts only if its process died before the step was over, and was not told to end.
"""

from __future__ import annotations

from collections.abc import Iterable

from impala_llm.pipeline.tickets.ticket import LedgerEntry, TicketState, waiting
from impala_llm.trajectory import unroll_id

_SUSPECT_LOSSES = 2
_MAX_LOSSES = 5
"""Lost actors after which a ticket is refused. More than the failures, since most tickets of a lost actor are valid."""
_MAX_CRASHES = 2


def is_suspect(entry: LedgerEntry) -> bool:
    """Return whether this ticket may be the cause of lost actors."""
    return entry.losses >= _SUSPECT_LOSSES


def note_loss(entry: LedgerEntry, actor_id: str) -> None:
    """Note that an actor was lost while it had a ticket.

    Args:
        entry: of the ticket, changed here.
        actor_id: of the actor.
    """
    entry.losses += 1
    entry.lost_by = actor_id


def take_back_loss(entry: LedgerEntry, actor_id: str) -> bool:
    """Take back the loss of an actor that has come back with its ticket: the network was at fault.

    Args:
        entry: of the ticket, changed here.
        actor_id: of the actor.

    Returns:
        Whether its loss was counted.
    """
    if entry.lost_by != actor_id:
        return False
    entry.losses -= 1
    return True


def is_given_up(entry: LedgerEntry) -> bool:
    """Return whether too many actors were lost with this ticket."""
    return entry.losses >= _MAX_LOSSES


def count_crashes(crashes: dict[int, dict[int, int]], steps: dict[int, set[tuple[int, int]]], newest_made: int) -> None:
    """Count the step in which an earlier process died, if it died in one, against the unrolls of that step.

    Args:
        crashes: by ticket, by unroll: number of such steps. Changed here.
        steps: by version that a step would have made: (ticket_id, unroll_index) of all that it trained on.
        newest_made: version of the newest step that was over.
    """
    latest = max(steps, default=newest_made)
    for ticket_id, unroll_index in steps[latest] if latest > newest_made else ():
        of_ticket = crashes.setdefault(ticket_id, {})
        of_ticket[unroll_index] = of_ticket.get(unroll_index, 0) + 1


def set_aside(entries: Iterable[LedgerEntry]) -> list[int]:
    """`unroll_id` of received trajectories that are to be evicted: the learner died in steps that trained on them."""
    return [
        unroll_id(entry.ticket.ticket_id, unroll_index)
        for entry in entries
        for unroll_index, count in (entry.crashes or {}).items()
        if count >= _MAX_CRASHES and unroll_index in waiting(entry) and entry.state is TicketState.RECEIVED
    ]
