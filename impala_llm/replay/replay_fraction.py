"""Fraction of a batch that may be replayed data, controlled by the effective sample size of the weights in training.

Old data that the policy has moved away from gets small importance weights, and a batch whose sum rests on few weights
is a small batch. After a batch with effective sample size x, a fraction in (0, 1], and target t:

    x < t:   fraction ← max(min_fraction, fraction · max(1/2, x/t))
    x >= t:  fraction ← min(max_fraction, fraction + recovery)

Additive increase, multiplicative decrease, as in congestion control: it falls within a few batches, and rises slowly
enough to see the effect of each step. The buffer chooses which items are replayed.

Invariant: min_fraction <= fraction <= max_fraction, and over any number of batches the items that `num_replayed`
allowed differ from the sum of fraction · size by less than one item, however small the batches are.
"""

import math

_LARGEST_CUT = 0.5


class ReplayFraction:
    """Controller of the fraction of replayed items in the next batches.

    Args:
        target: t in [0, 1]; 0 leaves the fraction where it starts, at `max_fraction`.
        max_fraction, min_fraction: its bounds, in [0, 1].
        recovery: > 0, what it rises by after a batch that reached the target.

    Raises:
        ValueError: a setting that is out of range.
    """

    def __init__(self, target: float, max_fraction: float, min_fraction: float = 0.0, recovery: float = 0.02) -> None:
        for name, value in (("target", target), ("max_fraction", max_fraction), ("min_fraction", min_fraction)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}: it must lie in [0, 1]")
        if min_fraction > max_fraction:
            raise ValueError(f"min_fraction is {min_fraction}: it must not exceed max_fraction, {max_fraction}")
        if not 0.0 < recovery < math.inf:
            raise ValueError(f"recovery is {recovery}: it must be positive, such as 0.02")
        self._target = target
        self._max_fraction = max_fraction
        self._min_fraction = min_fraction
        self._recovery = recovery
        self._fraction = max_fraction
        self._owed = 0.0

    @property
    def fraction(self) -> float:
        return self._fraction

    def update(self, effective_sample_size: float) -> None:
        """Adjust the fraction after a batch.

        Args:
            effective_sample_size: of its final weights, as a fraction of their number, in (0, 1].

        Raises:
            ValueError: another number.
        """
        if not 0.0 < effective_sample_size <= 1.0 + 1e-6:
            raise ValueError(f"effective_sample_size is {effective_sample_size}: a fraction lies in (0, 1]")
        if effective_sample_size < self._target:
            self._fraction *= max(_LARGEST_CUT, effective_sample_size / self._target)
            self._fraction = max(self._fraction, self._min_fraction)
        else:
            self._fraction = min(self._fraction + self._recovery, self._max_fraction)

    def num_replayed(self, num_items: int) -> int:
        """Number of items of the next batch of `num_items` that may be replayed: `max_replayed` of the buffer's sample.

        Call it once for each batch: the remainder of the rounding is added to the next.
        """
        wanted = self._fraction * num_items + self._owed
        allowed = min(num_items, math.floor(wanted + 1e-9))
        self._owed = wanted - allowed
        return allowed

    def state_dict(self) -> dict[str, float]:
        return {"fraction": self._fraction, "owed": self._owed}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore `state_dict`, within bounds that may have changed since."""
        self._fraction = min(max(state["fraction"], self._min_fraction), self._max_fraction)
        self._owed = state["owed"]
