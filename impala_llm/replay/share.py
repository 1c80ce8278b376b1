"""How much of a batch may be replayed data, steered by the effective sample size of the weights it was trained with.

Old data that the policy has left behind gets small importance weights, and a batch in which few of them carry the sum
is a small batch. After a batch with effective sample size x, a fraction in (0, 1], and target t:

    x < t:   share ← max(min_share, share · max(1/2, x/t))
    x >= t:  share ← min(max_share, share + recovery)

It falls by a factor and rises by a step, like the windows of a network that avoids congestion: it gives way within a
few batches, and comes back slowly enough to see what each step did. Which items are replayed is the buffer's matter.

Invariant: min_share <= share <= max_share, and over any number of batches the items that `num_replayed` allowed are the
sum of share · size to less than one item, however small the batches are.
"""

import math

_LARGEST_CUT = 0.5


class ReplayShare:
    """The share of replayed items in the next batches.

    Args:
        target: t in [0, 1]; 0 leaves the share where it starts, at `max_share`.
        max_share, min_share: its bounds, in [0, 1].
        recovery: > 0, what it rises by after a batch that reached the target.

    Raises:
        ValueError: a setting that is out of range.
    """

    def __init__(self, target: float, max_share: float, min_share: float = 0.0, recovery: float = 0.02) -> None:
        for name, value in (("target", target), ("max_share", max_share), ("min_share", min_share)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}: it must lie in [0, 1]")
        if min_share > max_share:
            raise ValueError(f"min_share is {min_share}: it must not exceed max_share, {max_share}")
        if not 0.0 < recovery < math.inf:
            raise ValueError(f"recovery is {recovery}: it must be positive, such as 0.02")
        self._target = target
        self._max_share = max_share
        self._min_share = min_share
        self._recovery = recovery
        self._share = max_share
        self._owed = 0.0

    @property
    def share(self) -> float:
        return self._share

    def update(self, effective_sample_size: float) -> None:
        """After a batch. effective_sample_size: of its final weights, as a fraction of their number, in (0, 1].

        Raises:
            ValueError: another number.
        """
        if not 0.0 < effective_sample_size <= 1.0 + 1e-6:
            raise ValueError(f"effective_sample_size is {effective_sample_size}: a fraction lies in (0, 1]")
        if effective_sample_size < self._target:
            self._share *= max(_LARGEST_CUT, effective_sample_size / self._target)
            self._share = max(self._share, self._min_share)
        else:
            self._share = min(self._share + self._recovery, self._max_share)

    def num_replayed(self, num_items: int) -> int:
        """How many items of the next batch of `num_items` may be replayed ones: `max_replayed` of the buffer's sample.

        Call it once for each batch: what rounding leaves over is added to the next.
        """
        wanted = self._share * num_items + self._owed
        allowed = min(num_items, math.floor(wanted + 1e-9))
        self._owed = wanted - allowed
        return allowed

    def state_dict(self) -> dict[str, float]:
        return {"share": self._share, "owed": self._owed}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Bounds that have changed since are kept to."""
        self._share = min(max(state["share"], self._min_share), self._max_share)
        self._owed = state["owed"]
