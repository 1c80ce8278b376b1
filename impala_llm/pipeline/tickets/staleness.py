"""Admission: number of tickets that may be under way, so that their trajectories are not too old for training.

Why staleness is bounded. B: batch_size, η: max_staleness, v: the learner's version, all in trajectories of one rank. A
slot is charged when a ticket leaves the task order. It is free again when the step that trained on the ticket has made
its version, or when the ticket ends otherwise (for refused members of a group: when the group has ended). At most
(η + 1)·B slots are charged, and a step under way counts as B of them even if its batch was short.
Let W slots be charged that no step has trained on yet, when a ticket is granted, and s = 1 if a step is under way, else
0. Taken oldest first, B slots a step, the ticket is trained on by the step that starts from u = v + s + floor(W / B). A
token of version w ≥ min_version = max(0, u - η) then has staleness u - w ≤ η. Admission, W < (η + 1 - s)·B, is the
condition for min_version ≤ v, so that no actor waits for weights that do not exist. With η = 0 this is on-policy:
u = v = min_version. Trajectories that become too old because a learner took younger tickets first are not trained on.

With unrolls a batch is B of them, and W counts those that wait to be trained on and those that are still expected: of a
ticket that is ready or open as many as an episode had on average, less those received, one at least. This is a
forecast: where it is too low, the last unrolls become too old and are not trained on. No batch waits for ever: once
no ticket is open W is exact, and W < B is admitted while no step is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from impala_llm.pipeline.tickets.ticket import LedgerEntry, TicketState, waiting

_ONE = 1 << 16
_MAX_COUNTED = 256
"""Episodes over which the forecast of their unrolls averages, roughly."""
_NUM_RESTORED = 8
"""Episodes for which a restored forecast counts: the settings of unrolls may have changed, and new ones show it."""


class Admission:
    """Slots of one rank. Not thread-safe: callers hold the ledger's lock.

    The argument num_playing of its methods is the number of tickets that are ready or open.

    Args:
        batch_size: B.
        group_size: tickets of a group.
        max_staleness: η; None: no limit.
        version: the learner's.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, batch_size: int, group_size: int, max_staleness: int | None, version: int) -> None:
        if batch_size < 1 or batch_size % group_size:
            raise ValueError(f"batch_size is {batch_size}: it must be a positive multiple of group_size {group_size}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is {max_staleness}: use 0 or more, or None to run free")
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.version = version
        """Version of the learner."""
        self.charged: Counter[int] = Counter()
        """Slots, by the version at which they were charged."""
        self.num_beyond = 0
        """Part of W beyond one for each ticket that has a slot, without the forecast."""
        self.num_begun = 0
        """Number of unrolls received of open tickets."""
        self.trains_unrolls = False
        """Whether the step under way has trained on one of several unrolls."""
        self._released: list[int] = []  # trained on by the step under way: free at the next version
        self._mean_unrolls = 1.0  # of an episode, from when the first had several
        self._num_counted = 0

    def charge_group(self) -> None:
        """Charge the slots of a group that leaves the task order."""
        self.charged[self.version] += self.group_size

    def free(self, born_versions: Iterable[int]) -> None:
        """Free slots that were charged at these versions."""
        self.charged.subtract(born_versions)

    def free_with_step(self, born_versions: Iterable[int]) -> None:
        """Free slots with the version that the step under way makes; without max_staleness, at once."""
        self._released += born_versions
        if self.max_staleness is None:
            self._release()

    def advance(self, version: int) -> None:
        """Note that the learner has made a version, and free the slots of its step."""
        self.version = version
        self._release()

    def may_start_group(self, num_playing: int) -> bool:
        """Return whether one more group may leave the task order."""
        if self.max_staleness is None:
            return True
        size = self.group_size
        spoken_for = max(len(self._released), self._step_under_way() * self.batch_size)
        # For episodes of any length: beside a part of a batch there is room for a group.
        room = max(size, min(size * self._mean_unrolls, self.max_staleness * self.batch_size + 1))
        return self.num_waiting(num_playing) + room <= (self.max_staleness + 1) * self.batch_size - spoken_for

    def min_version(self, num_playing: int) -> int:
        """Compute `Ticket.min_version` for a group that leaves the task order now."""
        if self.max_staleness is None:
            return 0
        steps_ahead = self._step_under_way() + (self.num_waiting(num_playing) + self.group_size - 1) // self.batch_size
        return max(0, self.version + steps_ahead - self.max_staleness)

    @property
    def forecast(self) -> tuple[int, int]:
        """Forecast of unrolls, as integers for the journal: episodes that were counted, and 2^16 times their mean."""
        return self._num_counted, round(self._mean_unrolls * _ONE)

    @forecast.setter
    def forecast(self, forecast: tuple[int, int]) -> None:
        """Go on from a forecast that was kept. It counts for few episodes; one that counted none changes nothing."""
        num_counted, mean = forecast
        if num_counted > 0:
            self._num_counted, self._mean_unrolls = min(num_counted, _NUM_RESTORED), max(1.0, mean / _ONE)

    @property
    def counts_unrolls(self) -> bool:
        """Whether any episode had several unrolls."""
        return self._num_counted > 0

    def count_unrolls(self, count: int) -> None:
        """Note the number of unrolls of an episode that is complete."""
        self._num_counted = min(self._num_counted + 1, _MAX_COUNTED)
        self._mean_unrolls += (count - self._mean_unrolls) / self._num_counted

    def drop_zeros(self) -> None:
        """Remove versions whose slots are all free."""
        self.charged += Counter()

    def _step_under_way(self) -> int:
        return 1 if self._released or self.trains_unrolls else 0

    def num_waiting(self, num_playing: int) -> int:
        """W: charged slots that no step has trained on yet, and the unrolls beyond one for each."""
        num_waiting = self.charged.total() - len(self._released) + self.num_beyond
        if self._mean_unrolls > 1:
            num_waiting += max(0, round(num_playing * (self._mean_unrolls - 1)) - self.num_begun)
        return num_waiting

    def _release(self) -> None:
        self.charged.subtract(self._released)
        self.drop_zeros()
        self._released = []
        self.trains_unrolls = False


def beyond_slot(entry: LedgerEntry) -> int:
    """Unrolls by which a ticket adds to W beyond its slot."""
    return 0 if entry.several_unrolls is None else len(waiting(entry)) - (entry.state is not TicketState.OPEN)
