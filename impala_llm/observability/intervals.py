"""95 % intervals of what is estimated from episodes."""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Normal 95 % interval of a mean."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean
    half = Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion (Wilson 1927); sound near 0 and 1, unlike the normal one."""
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return centre - half, centre + half


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean score; of scores that are all 0 or 1, a proportion, Wilson's: the normal one of 0, 0, 0
    is [0, 0]."""
    if set(scores) <= {0.0, 1.0}:
        return wilson_interval(round(sum(scores)), len(scores))
    return mean_interval(scores)
