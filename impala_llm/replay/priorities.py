"""Which items are drawn, and how likely each one was.

    p_i = e^(-age_i/τ) · (|A_i| + ε)^α · n(signature_i)^-β        P_i = (1 - u) p_i / Σp + u/N

A τ of infinity or an exponent of 0 turns its factor off; all off is uniform. Draws are without replacement, one after
the other: each takes an item with probability P_i over the sum of P of those still there.

Invariant: the age enters as e^(version_i/τ), which is the same up to a factor common to all items, so nothing is
rewritten when the learner's version advances. Everything is in logarithms: no priority over- or underflows.

A sampler sees the items as columns and returns rows, so that another one (a sum tree, for millions of items) can take
its place without a change in the buffer.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class ItemColumns:
    """The M items of a buffer, a row each."""

    item_ids: np.ndarray
    """int64[M]: rises with the time of insertion."""
    versions: np.ndarray
    """int64[M]: policy version of the oldest token."""
    abs_advantages: np.ndarray
    """float64[M]: |A|, mean over the item."""
    signature_counts: np.ndarray
    """int64[M]: items in the buffer that share the signature, itself included."""

    def __len__(self) -> int:
        return len(self.item_ids)


@dataclass(frozen=True)
class Draw:
    """k items in the order in which they were drawn."""

    rows: np.ndarray
    """int64[k]."""
    log_density: np.ndarray
    """float64[k]: log(N·P_i), P_i the probability of the first draw; 0 under uniform sampling."""


class Sampler(Protocol):
    def log_priorities(self, items: ItemColumns) -> np.ndarray:
        """float64[M]: log p_i up to a common constant; the lowest are evicted first when the buffer is full."""
        ...

    def draw(self, items: ItemColumns, num_items: int, rng: np.random.Generator) -> Draw:
        """`num_items` distinct rows, 1 <= num_items <= M."""
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

    def log_priorities(self, items: ItemColumns) -> np.ndarray:
        log_p = items.versions / self.recency_tau
        if self.advantage_exponent:
            log_p = log_p + self.advantage_exponent * np.log(items.abs_advantages + self.advantage_epsilon)
        if self.rarity_exponent:
            log_p = log_p - self.rarity_exponent * np.log(items.signature_counts)
        return log_p

    def draw(self, items: ItemColumns, num_items: int, rng: np.random.Generator) -> Draw:
        """The smallest E_i/P_i with E_i exponential are a sequential draw without replacement.

        Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006.
        """
        count = len(items)
        log_p = self.log_priorities(items)
        log_p = log_p - log_p.max()
        log_p -= np.log(np.exp(log_p).sum())
        if self.uniform_floor == 1.0:
            log_p = np.full(count, -math.log(count))
        elif self.uniform_floor > 0.0:
            log_p = np.logaddexp(math.log1p(-self.uniform_floor) + log_p, math.log(self.uniform_floor / count))
        keys = np.log(rng.standard_exponential(count)) - log_p
        rows = np.argpartition(keys, num_items - 1)[:num_items]
        rows = rows[np.argsort(keys[rows])]
        return Draw(rows, log_p[rows] + math.log(count))


@dataclass(frozen=True)
class OldestFirst:
    """A queue: the oldest version first, in the order of insertion within a version. No chance, and so no bias.

    For data that is used once: what is closest to its staleness bound goes first, so that as little as possible is
    dropped for its age.
    """

    def log_priorities(self, items: ItemColumns) -> np.ndarray:
        return items.versions.astype(np.float64)

    def draw(self, items: ItemColumns, num_items: int, rng: np.random.Generator) -> Draw:
        return Draw(np.lexsort((items.item_ids, items.versions))[:num_items], np.zeros(num_items))
