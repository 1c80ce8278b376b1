"""Granting: decides which actor gets which ticket next. For callers that hold the ledger's lock.

Invariants: a suspect (see quarantine.py) is granted only to an actor that has no other suspect, and a ticket whose
attempt failed not to the same actor again while there is another: an actor whose attempts fail at once has the fewest
tickets, so it would be granted all of them until their attempts are used up. The time of a call of
`fill_levels` depends on the number of actors whose tickets or levels have changed, not on the number of actors.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from impala_llm.pipeline.tickets.quarantine import is_suspect
from impala_llm.pipeline.tickets.table import TicketTable
from impala_llm.pipeline.tickets.ticket import Ticket

Grants = list[tuple[str, list[Ticket]]]
"""(actor_id, tickets), at most one entry for each actor."""


class Granting:
    """Deals the tickets of a table to actors.

    Args:
        table: of the tickets. This class also starts groups there.
        max_open: limit of tickets granted and not yet received; None: as many as the staleness allows.

    Raises:
        ValueError: max_open is out of range.
    """

    def __init__(self, table: TicketTable, max_open: int | None) -> None:
        slots = table.slots
        if slots.max_staleness is None and max_open is None:
            raise ValueError("max_open is None: free running (max_staleness None) needs a bound on open tickets")
        if max_open is not None and max_open < (slots.batch_size if slots.max_staleness == 0 else slots.group_size):
            raise ValueError(
                f"max_open is {max_open}: at least a group of {slots.group_size} must fit, and with max_staleness 0 "
                f"a batch of {slots.batch_size}"
            )
        self._table = table
        self._max_open = max_open
        self._group_size = slots.group_size
        self._wants: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._num_arrived = 0
        # A heap of all actors below their levels: (tickets open, number in the order of arrival, actor). Outdated
        # entries stay inside and are skipped; actors that have changed since are still to be added.
        self._below: list[tuple[int, int, str]] = []

    def request(self, actor_id: str, want: int) -> None:
        """Set the level of an actor, a new one included.

        Args:
            actor_id: of the actor.
            want: tickets that it wants to have under way.
        """
        if actor_id not in self._wants:
            self._table.open_at[actor_id] = set()
            self._numbers[actor_id] = self._num_arrived
            self._num_arrived += 1
        if self._wants.get(actor_id) != want:
            self._wants[actor_id] = want
            self._table.changed.add(actor_id)

    def know(self, actor_id: str) -> None:
        """Add an actor if it is new, with level 0; a known actor keeps its level."""
        self.request(actor_id, self._wants.get(actor_id, 0))

    def forget(self, actor_id: str) -> None:
        """Remove an actor."""
        self._wants.pop(actor_id, None)
        self._numbers.pop(actor_id, None)

    def deal_batch(self) -> Grants:
        """Grant a whole batch in equal shares, groups undivided where there are enough, to all that want any."""
        table, open_at = self._table, self._table.open_at
        table.changed.clear()
        if not self._may_grant():
            return []
        actors = [actor for actor, want in self._wants.items() if want > 0]
        if not actors:
            return []
        actors.sort(key=lambda actor: len(open_at[actor]))
        while self._may_start_group():
            table.start_group()
        suspects = deque(ticket_id for ticket_id in table.ready if self._is_suspect(ticket_id))
        ticket_ids = [ticket_id for ticket_id in table.ready if not self._is_suspect(ticket_id)]
        retried: list[int] = []
        if len(actors) > 1:
            retried = [ticket_id for ticket_id in ticket_ids if table.entries[ticket_id].failed_by in self._wants]
            ticket_ids = [
                ticket_id for ticket_id in ticket_ids if table.entries[ticket_id].failed_by not in self._wants
            ]
        table.ready.clear()
        units: list[list[int]] = []
        for ticket_id in ticket_ids:
            group_id = table.entries[ticket_id].ticket.group_id
            if units and table.entries[units[-1][0]].ticket.group_id == group_id:
                units[-1].append(ticket_id)
            else:
                units.append([ticket_id])
        if len(units) < len(actors):
            units = [[ticket_id] for ticket_id in ticket_ids]
        shares: dict[str, list[Ticket]] = {}
        for index, actor in enumerate(actors):
            # Rounded up: the remainder goes to the actors with the least work, which come first.
            first, last = (-(-len(units) * i // len(actors)) for i in (index, index + 1))
            share = [table.open(ticket_id, actor) for unit in units[first:last] for ticket_id in unit]
            if suspects and not any(map(self._is_suspect, open_at[actor])):
                share.append(table.open(suspects.popleft(), actor))
            if share:
                shares[actor] = share
        for ticket_id in retried:
            others = [actor for actor in actors if actor != table.entries[ticket_id].failed_by]
            actor = min(others, key=lambda actor: len(open_at[actor]))
            shares.setdefault(actor, []).append(table.open(ticket_id, actor))
        table.ready += suspects
        return list(shares.items())

    def fill_levels(self) -> Grants:
        """Grant tickets up to the actors' levels, in turn, as many as a group has at a time."""
        table, open_at = self._table, self._table.open_at
        for changed in table.changed:
            self._note_if_below(changed)
        table.changed.clear()
        shares: dict[str, list[Ticket]] = {}
        again: deque[str] = deque()
        blocked: list[str] = []
        while self._may_grant() and (actor := self._next_below() or (again.popleft() if again else None)):
            num_missing = self._wants[actor] - len(open_at[actor])
            is_last = not (again or self._below)  # no other actor has a turn
            for _ in range(num_missing if is_last else min(num_missing, self._group_size)):
                ticket_id = self._take_ready(actor)
                if ticket_id is None and self._may_start_group():
                    table.start_group()
                    ticket_id = self._take_ready(actor)
                if ticket_id is None:
                    blocked.append(actor)  # ready tickets wait for an actor without a suspect, or another one
                    break
                shares.setdefault(actor, []).append(table.open(ticket_id, actor))
            else:
                if len(open_at[actor]) < self._wants[actor]:
                    again.append(actor)
        for served in (*again, *blocked):
            self._note_if_below(served)
        return list(shares.items())

    def _may_start_group(self) -> bool:
        num_playing = self._table.num_playing
        if self._max_open is not None and num_playing + self._group_size > self._max_open:
            return False
        return self._table.slots.may_start_group(num_playing)

    def _may_grant(self) -> bool:
        return bool(self._table.ready) or self._may_start_group()

    def _note_if_below(self, actor: str) -> None:
        """Add an actor to the heap, where it is below its level."""
        num_open = len(self._table.open_at.get(actor, ()))
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
        is_same = self._numbers.get(actor) == number and len(self._table.open_at[actor]) == num_open
        return is_same and self._wants[actor] > num_open

    def _take_ready(self, actor: str) -> int | None:
        """Take the first of the ready tickets that this actor may have."""
        ready = self._table.ready
        for index, ticket_id in enumerate(ready):
            if self._may_have(actor, ticket_id):
                del ready[index]
                return ticket_id
        return None

    def _may_have(self, actor: str, ticket_id: int) -> bool:
        has_failed = self._table.entries[ticket_id].failed_by == actor
        if has_failed and any(want for other, want in self._wants.items() if other != actor):
            return False
        return not self._is_suspect(ticket_id) or not any(map(self._is_suspect, self._table.open_at[actor]))

    def _is_suspect(self, ticket_id: int) -> bool:
        return is_suspect(self._table.entries[ticket_id])
