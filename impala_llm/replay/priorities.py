"""Priorities of items: how likely each one is to be drawn, and which ones a full buffer gives up.

    p_i = e^(-age_i/τ) · (|A_i| + ε)^α · n(signature_i)^-β        P_i = (1 - u) p_i / Σp + u/N

A τ of infinity or an exponent of 0 turns its factor off; all off is uniform. Draws are without replacement, one after
the other: each takes an item with probability P_i over the sum of P of those still there.

All probabilities are computed from the columns at each draw, in O(N): 0.1 ms for the 4,096 items of a default buffer.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from impala_llm.replay.items import Items


class Sampler(Protocol):
    """Decides what a buffer draws, and what it gives up when it is full."""

    def draw(
        self, items: Items, rows: np.ndarray, num_items: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw distinct rows.

        Args:
            items: all that the buffer holds.
            rows: int64[N], those that may be drawn.
            num_items: k, from 1 to N.

        Returns:
            (drawn, log_density): int64[k], in the order of the draw, and float64[k], log(N·P_i), with P_i the
            probability of the first draw; 0 under uniform sampling.
        """
        ...

    def lowest(self, items: Items, num_items: int) -> np.ndarray:
        """Choose what a full buffer gives up: the rows of the lowest priority, int64[num_items], the first to go first,
        and the oldest among equals."""
        ...


@dataclass(frozen=True)
class PrioritySampler:
    """Draws by recency, advantage and rarity.

    Raises:
        ValueError: on construction, a setting that is out of range.
    """

    recency_tau: float = math.inf
    """τ > 0, in policy versions."""
    advantage_exponent: float = 0.0
    """α >= 0."""
    advantage_epsilon: float = 1e-3
    """ε > 0: what is left of the priority of an item with no advantage."""
    rarity_exponent: float = 0.0
    """β >= 0."""
    uniform_floor: float = 0.0
    """u in [0, 1]: share of the probability that is spread evenly."""

    def __post_init__(self) -> None:
        if not self.recency_tau > 0:
            raise ValueError(f"recency_tau is {self.recency_tau}: it must be positive, or infinity to turn recency off")
        if not self.advantage_epsilon > 0:
            raise ValueError(f"advantage_epsilon is {self.advantage_epsilon}: it must be positive, such as 0.001")
        for name in ("advantage_exponent", "rarity_exponent"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be finite and >= 0; 0 turns it off")
        if not 0.0 <= self.uniform_floor <= 1.0:
            raise ValueError(f"uniform_floor is {self.uniform_floor}: a share lies in [0, 1]")

    def draw(
        self, items: Items, rows: np.ndarray, num_items: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw as `Sampler.draw`.

        The smallest E_i/P_i with E_i exponential are a sequential draw without replacement (Efraimidis and Spirakis,
        "Weighted random sampling with a reservoir", 2006). In logarithms, since p may span more than a number does.
        """
        log_p = self._log_bases(items)
        if self.rarity_exponent:
            log_p -= self.rarity_exponent * _log_counts(items)[items.signature]
        log_p = log_p[rows]
        log_p -= log_p.max()
        log_p -= math.log(np.exp(log_p).sum())
        if self.uniform_floor:
            log_p = np.log((1.0 - self.uniform_floor) * np.exp(log_p) + self.uniform_floor / len(rows))
        keys = np.log(rng.standard_exponential(len(rows))) - log_p
        chosen = np.argpartition(keys, num_items - 1)[:num_items]
        chosen = chosen[np.argsort(keys[chosen])]
        return rows[chosen], log_p[chosen] + math.log(len(rows))

    def lowest(self, items: Items, num_items: int) -> np.ndarray:
        """Choose as `Sampler.lowest`. Whenever an item goes, the others of its signature become rarer.

        So the j-th of a signature to go, from 0, has base · (n - j)^-β then, which never falls with j: the items go in
        the order of these values. They are computed for those of the lowest priority now, since no value is below it.
        """
        log_base = self._log_bases(items)
        if not self.rarity_exponent:
            return _smallest(log_base, num_items)
        log_counts = _log_counts(items)
        log_p = log_base - self.rarity_exponent * log_counts[items.signature]
        counts = np.bincount(items.signature)
        num_rows = num_items
        while True:
            num_rows = min(2 * num_rows, len(log_p))
            bound = np.partition(log_p, num_rows - 1)[num_rows - 1]
            rows = np.flatnonzero(log_p <= bound)
            signature = items.signature[rows]
            order = np.lexsort((log_base[rows], signature))
            signature = signature[order]
            gone_before = np.arange(len(rows)) - np.searchsorted(signature, signature)
            values = np.empty(len(rows))
            values[order] = log_base[rows[order]] - self.rarity_exponent * np.log(counts[signature] - gone_before)
            chosen = _smallest(values, num_items)
            if len(rows) == len(log_p) or values[chosen[-1]] <= bound:
                found: np.ndarray = rows[chosen]
                return found

    def _log_bases(self, items: Items) -> np.ndarray:
        """log p up to a constant and without the factor of rarity, float64[N]."""
        log_base: np.ndarray = (items.version - items.version.max()) / self.recency_tau
        if self.advantage_exponent:
            log_base += self.advantage_exponent * np.log(items.abs_advantage + self.advantage_epsilon)
        return log_base


@dataclass(frozen=True)
class OldestFirst:
    """A queue: the oldest version first, in the order of insertion within a version. No chance, and so no bias.

    For data that is used once: what is closest to its staleness bound goes first, so that as little as possible is
    dropped for its staleness.
    """

    def draw(
        self, items: Items, rows: np.ndarray, num_items: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        return rows[_smallest(items.version[rows], num_items)], np.zeros(num_items)

    def lowest(self, items: Items, num_items: int) -> np.ndarray:
        return _smallest(items.version, num_items)


def _log_counts(items: Items) -> np.ndarray:
    """log n by signature; 0 for one that no item has."""
    return np.log(np.maximum(np.bincount(items.signature), 1))


def _smallest(values: np.ndarray, num: int) -> np.ndarray:
    """Indices of the smallest values in ascending order, the first index first among equals: int64[num]."""
    bound = np.partition(values, num - 1)[num - 1]
    indices = np.flatnonzero(values <= bound)
    return indices[np.argsort(values[indices], kind="stable")[:num]]
