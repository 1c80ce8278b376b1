"""Which items are drawn, and how likely each one is: the settings.

    p_i = e^(-age_i/τ) · (|A_i| + ε)^α · n(signature_i)^-β        P_i = (1 - u) p_i / Σp + u/N

A τ of infinity or an exponent of 0 turns its factor off; all off is uniform. Draws are without replacement, one after
the other: each takes an item with probability P_i over the sum of P of those still there.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from impala_llm.replay.forest import PriorityForest
from impala_llm.replay.order import Order, QueueOrder


class Sampler(Protocol):
    def order(self, separate: bool) -> Order:
        """A new, empty order by these settings. separate: fresh and replayed items are drawn from one by one.

        Raises:
            ValueError: there is no such order.
        """
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

    def order(self, separate: bool) -> PriorityForest:
        return PriorityForest(
            self.recency_tau,
            self.advantage_exponent,
            self.advantage_epsilon,
            self.rarity_exponent,
            self.uniform_floor,
            separate,
        )


@dataclass(frozen=True)
class OldestFirst:
    """A queue: the oldest version first, in the order of insertion within a version. No chance, and so no bias.

    For data that is used once: what is closest to its staleness bound goes first, so that as little as possible is
    dropped for its age.
    """

    def order(self, separate: bool) -> QueueOrder:
        if separate:
            raise ValueError("separate_replayed is True: a queue uses its items once, give it a PrioritySampler")
        return QueueOrder()
