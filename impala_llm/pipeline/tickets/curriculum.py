"""Curriculum: prefers the kinds of tasks that succeed sometimes.

Invariant: whether a group is played depends on the success rates of its kind, the run's seed and the group's number
alone. Tasks that are skipped come again in the next epoch.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_FORGETTING = 0.02
"""Smallest weight of a new episode in its kind's rate: the rate is a mean over about the last fifty episodes."""


class Curriculum:
    """Tracks the success rate of each kind of task, and decides which groups of tasks are played. Thread-safe.

    A kind whose rate is p is played with probability 4p(1 - p): always at one half, seldom where all episodes succeed
    or all fail, which teach little. A kind that has not been played counts as one half.

    Args:
        kinds: the kind of each task.
        least: smallest probability, so that a kind is measured again.
        seed: of the draws.
        known: a state to begin with, see `state_dict`. Kinds that no task has any more do no harm.
    """

    def __init__(
        self, kinds: Mapping[int, str], least: float, seed: int, known: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        self._kinds, self._least, self._seed = kinds, least, seed
        self._lock = threading.Lock()
        rows = [] if known is None else zip(known["kinds"], known["rates"], known["counts"], strict=True)
        self._rates = {kind: (float(rate), int(count)) for kind, rate, count in rows}

    def observe(self, kind: str, success: bool) -> None:
        """Update the success rate of a kind with an episode that has ended.

        Args:
            kind: of the episode's task.
            success: whether the episode succeeded.
        """
        with self._lock:
            rate, count = self._rates.get(kind, (0.5, 0))
            self._rates[kind] = rate + max(1 / (count + 2), _FORGETTING) * (success - rate), count + 1

    def rate(self, kind: str) -> float:
        """Return the success rate of a kind, in [0, 1], as far as it is known; before the first episode 0.5."""
        with self._lock:
            return self._rates.get(kind, (0.5, 0))[0]

    def state_dict(self) -> dict[str, list[Any]]:
        """Kinds that have been played, their rates and numbers of episodes: lists of the same length."""
        with self._lock:
            rows = list(self._rates.items())
        return {
            "kinds": [kind for kind, _ in rows],
            "rates": [rate for _, (rate, _) in rows],
            "counts": [count for _, (_, count) in rows],
        }

    def plays(self, task_id: int, group_id: int) -> bool:
        """Return whether a group that is due is played.

        Args:
            task_id: of the group's task.
            group_id: of the group.
        """
        rate = self.rate(self._kinds[task_id])
        draw = np.random.default_rng([self._seed, 1, group_id]).random()
        return bool(draw < max(4 * rate * (1 - rate), self._least))


def merged(states: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """One state of several ranks' states: rates are weighed by the numbers of their episodes."""
    sums: dict[str, tuple[float, int]] = {}
    for state in states:
        for kind, rate, count in zip(state["kinds"], state["rates"], state["counts"], strict=True):
            successes, total = sums.get(kind, (0.0, 0))
            sums[kind] = successes + rate * count, total + count
    return {
        "kinds": list(sums),
        "rates": [successes / total for successes, total in sums.values()],
        "counts": [total for _, total in sums.values()],
    }
