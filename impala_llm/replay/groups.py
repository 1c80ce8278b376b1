"""Puts the episodes of a group together: those of the same task, whose scores are each other's baseline.

Life of a group: open (members arrive in any order) → complete (all `group_size` are there) or closed short (the caller
knows that the others were lost) → handed out once and forgotten.

Invariant: a group is handed out once, and a member is in exactly one of: an open group, a group handed out, the dropped
ones returned by `close_short`.
"""

from impala_llm.trajectory import Trajectory


class GroupAssembler:
    """Collects trajectories until their group is complete, and hands it out in the order of its tickets.

    Args:
        group_size: members of a complete group; 1 hands every trajectory out at once.

    Raises:
        ValueError: group_size < 1.
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}: it must be at least 1")
        self._group_size = group_size
        self._open: dict[int, dict[int, Trajectory]] = {}
        self._closed_short: set[int] = set()

    def __len__(self) -> int:
        """Trajectories that wait in open groups."""
        return sum(len(members) for members in self._open.values())

    def open_groups(self) -> dict[int, int]:
        """Number of members that are there, by group_id."""
        return {group_id: len(members) for group_id, members in self._open.items()}

    def is_closed(self, group_id: int) -> bool:
        """Whether the group was closed short, so that a member that still comes can only be counted as dropped."""
        return group_id in self._closed_short

    def add(self, trajectory: Trajectory) -> tuple[Trajectory, ...] | None:
        """Returns the group if this was its last missing member.

        Raises:
            ValueError: the group was closed short, or a trajectory of this ticket is there already.
        """
        group_id, ticket_id = trajectory.group_id, trajectory.ticket_id
        if group_id in self._closed_short:
            raise ValueError(f"group_id {group_id} was closed short: ask is_closed first, and count the late member")
        members = self._open.setdefault(group_id, {})
        if ticket_id in members:
            raise ValueError(f"ticket_id {ticket_id} is already in group_id {group_id}: a ticket brings one trajectory")
        members[ticket_id] = trajectory
        if len(members) < self._group_size:
            return None
        del self._open[group_id]
        return _in_order(members)

    def close_short(
        self, group_id: int, is_over: bool = False
    ) -> tuple[tuple[Trajectory, ...] | None, tuple[Trajectory, ...]]:
        """End a group that can never be complete, because a member was lost.

        Args:
            is_over: no member can come any more, so that the group need not be remembered.

        Returns:
            (group, ()) with at least two members; else (None, dropped): a single one has no other to be compared with.
        """
        members = self._open.pop(group_id, {})
        if not is_over:
            self._closed_short.add(group_id)
        if len(members) >= 2:
            return _in_order(members), ()
        return None, tuple(members.values())

    def state_dict(self) -> dict[str, list[int]]:
        """Groups that were closed short, and the `unroll_id` of each member of an open group. The members themselves
        are missing: the ledger has them as received, and the caller that restores both adds them again."""
        members = [t.unroll_id for group in self._open.values() for t in group.values()]
        return {"closed_short": sorted(self._closed_short), "open": sorted(members)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Restore `state_dict`; open groups are forgotten."""
        self._open = {}
        self._closed_short = set(state["closed_short"])


def _in_order(members: dict[int, Trajectory]) -> tuple[Trajectory, ...]:
    return tuple(members[ticket_id] for ticket_id in sorted(members))
