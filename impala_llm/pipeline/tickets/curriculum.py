"""Which kinds of tasks are worth playing now: those that succeed sometimes.

Invariant: whether a group is played depends on the success rates of its kind, the run's seed and the group's number
alone. Tasks that are passed over come again in the next epoch. Rates are not kept: a run that goes on measures anew.
"""

import threading
from collections.abc import Mapping

import numpy as np

_FORGETTING = 0.02
"""Smallest weight of a new episode in its kind's rate: about fifty episodes are remembered."""


class Curriculum:
    """Success rates by kind, from the episodes that arrive. Thread-safe.

    A kind whose rate is p is played with probability 4p(1 - p): always at one half, seldom where all episodes succeed
    or all fail, which teach little. A kind that has not been played counts as one half.

    Args:
        kinds: the kind of each task.
        least: smallest probability, so that a kind is measured again.
        seed: of the draws.
    """

    def __init__(self, kinds: Mapping[int, str], least: float, seed: int) -> None:
        self._kinds, self._least, self._seed = kinds, least, seed
        self._lock = threading.Lock()
        self._rates: dict[str, tuple[float, int]] = {}

    def observe(self, kind: str, success: bool) -> None:
        """Take note of an episode that has ended."""
        with self._lock:
            rate, count = self._rates.get(kind, (0.5, 0))
            self._rates[kind] = rate + max(1 / (count + 2), _FORGETTING) * (success - rate), count + 1

    def rate(self, kind: str) -> float:
        """Success rate of a kind, as far as it is known; before the first episode 0.5."""
        with self._lock:
            return self._rates.get(kind, (0.5, 0))[0]

    def plays(self, task_id: int, group_id: int) -> bool:
        """Whether a group that is due is played."""
        rate = self.rate(self._kinds[task_id])
        draw = np.random.default_rng([self._seed, 1, group_id]).random()
        return bool(draw < max(4 * rate * (1 - rate), self._least))
