"""Records of tickets and groups, shared by the ledger and its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to play one episode. Written by the learner rank, read by the actor.

    Attributes:
        ticket_id: the same in every run with the same task order; unique over all ranks.
        task_id: task to play.
        group_id: tickets with the same one play the same task, for a group-relative baseline.
        seed: of the episode, in [0, 2^63).
        min_version: oldest version of the weights that the actor may play with; else the trajectory is refused.
    """

    ticket_id: int
    task_id: int
    group_id: int
    seed: int
    min_version: int


class TicketState(Enum):
    """State of a ticket; the transitions are in table.py."""

    READY = "ready"
    OPEN = "open"
    RECEIVED = "received"
    TRAINED = "trained"
    EVICTED = "evicted"
    REFUSED = "refused"


ENDED = (TicketState.TRAINED, TicketState.EVICTED, TicketState.REFUSED)


@dataclass(slots=True)
class Unrolls:
    """Unrolls of a ticket whose episode comes in several.

    Attributes:
        settled: by unroll, the version of the step that trained on it; 0: it was evicted.
        num_unrolls: of the whole episode, once its last one has arrived.
    """

    settled: dict[int, int] = field(default_factory=dict)
    num_unrolls: int | None = None


NO_UNROLLS: frozenset[int] = frozenset()
FIRST_UNROLL = frozenset((0,))


@dataclass(slots=True)
class LedgerEntry:
    """Ledger entry of a ticket."""

    ticket: Ticket
    born_version: int
    state: TicketState = TicketState.READY
    actor_id: str | None = None
    attempts: int = 0
    episode_id: str | None = None
    unrolls: frozenset[int] = NO_UNROLLS
    """Unrolls that were received. Immutable, so that most entries share theirs: many small sets are slow."""
    step: int = 0
    """Version of the step that trained on it, 0 before; the step counts when that version is published."""
    several_unrolls: Unrolls | None = None
    """None while there is only one unroll, the first and last."""
    failed_by: str | None = None
    """Last actor whose attempt failed: another one tries next, where there is one."""
    losses: int = 0
    """Number of actors that were lost while they had it."""
    lost_by: str | None = None
    """Last of these actors, until the ticket is granted again: if it comes back with the ticket, it was not lost."""
    outdated_episode: str | None = None
    """First episode that came for it and is of older weights than the ticket demands."""
    crashes: dict[int, int] | None = None
    """By unroll, number of steps that trained on it in which the learner died."""


@dataclass(slots=True)
class OpenGroup:
    """Group with a ticket that has not ended."""

    under_way: int
    """Tickets that have not ended."""
    num_lost: int = 0
    """Refused tickets. Their slots stay charged until the whole group has ended, so that a batch keeps its number of
    groups: a short group leaves no room for a part of another."""


def waiting(entry: LedgerEntry) -> frozenset[int]:
    """Unrolls that still have to be trained on or evicted."""
    return entry.unrolls if entry.several_unrolls is None else entry.unrolls - entry.several_unrolls.settled.keys()
