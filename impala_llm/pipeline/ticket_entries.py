"""What is known of each ticket: plain records, shared by the ledger, its journal and its saved state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to play one episode. Written by the learner rank, read by the actor.

    ticket_id: the same in every run with the same task order; unique over all ranks.
    task_id: what to play. group_id: tickets with the same one play the same task for a group-relative baseline.
    seed: of the episode, in [0, 2^63).
    min_version: the actor plays with at least this version of the weights, else the trajectory is refused.
    """

    ticket_id: int
    task_id: int
    group_id: int
    seed: int
    min_version: int


class State(Enum):
    """Of a ticket; see tickets.py for what leads from one to the other."""

    READY = "ready"
    OPEN = "open"
    RECEIVED = "received"
    TRAINED = "trained"
    EVICTED = "evicted"
    REFUSED = "refused"


ENDED = (State.TRAINED, State.EVICTED, State.REFUSED)


@dataclass(slots=True)
class Parts:
    """Of a ticket whose episode comes in several unrolls. settled: by unroll, the version that is made of it, 0 where
    it was evicted. num_unrolls: of the whole episode, once its last one is there."""

    settled: dict[int, int] = field(default_factory=dict)
    num_unrolls: int | None = None


NO_UNROLLS: frozenset[int] = frozenset()
FIRST_UNROLL = frozenset((0,))


@dataclass(slots=True)
class Entry:
    """All that is known of a ticket."""

    ticket: Ticket
    born_version: int
    state: State = State.READY
    actor_id: str | None = None
    attempts: int = 0
    episode_id: str | None = None
    unrolls: frozenset[int] = NO_UNROLLS
    """Those that were received. Immutable, so that most entries share theirs: many small sets make the ledger slow."""
    step: int = 0
    """Version that is made of it, once it is trained on: it counts when that version is published."""
    parts: Parts | None = None
    """None as long as all there is is one unroll, the first and last."""
    losses: int = 0
    """Actors that were lost while they had it."""
    lost_by: str | None = None
    """The last of them, until the ticket is granted again: one that comes back with it was not lost."""
    crashes: dict[int, int] | None = None
    """Steps that trained on it in which the learner died, by unroll."""


@dataclass(slots=True)
class Group:
    """A group of which some ticket has not ended."""

    under_way: int
    """Tickets that have not ended."""
    num_lost: int = 0
    """Refused tickets. Their slots stay charged until the whole group has ended, so that a batch keeps its number of
    groups: a group that is short of members is no room for part of another."""


def waiting(entry: Entry) -> frozenset[int]:
    """Unrolls that are to be trained on or evicted."""
    return entry.unrolls if entry.parts is None else entry.unrolls - entry.parts.settled.keys()


def entry_state(entry: Entry) -> list[Any]:
    """As plain lists, strings and numbers."""
    t = entry.ticket
    return [
        *(t.ticket_id, t.task_id, t.group_id, t.seed, t.min_version, entry.born_version, entry.state.value),
        *(entry.attempts, entry.episode_id, sorted(entry.unrolls), entry.step),
        None if entry.parts is None else [entry.parts.num_unrolls, *map(list, entry.parts.settled.items())],
        *(entry.losses, [list(item) for item in (entry.crashes or {}).items()]),
    ]


def entry_from_state(values: list[Any]) -> Entry:
    """What `entry_state` was made of; where it was open, at no actor."""
    *ticket, born_version, state, attempts, episode_id, unrolls, step, saved, losses, crashes = values
    entry = Entry(Ticket(*ticket), born_version, State(state), None, attempts, episode_id, frozenset(unrolls), step)
    if saved is not None:
        entry.parts = Parts(dict(saved[1:]), saved[0])
    entry.losses, entry.crashes = losses, dict(crashes) or None
    return entry
