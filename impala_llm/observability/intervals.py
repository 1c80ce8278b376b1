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


def change_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean change of paired scores; of scores that are all 0 or 1 that of Bonett and Price (2012),
    the normal one with a task more that has risen and one that has fallen: without them it is [0, 0] where none has."""
    change = [b - a for a, b in zip(before, after, strict=True)]
    if not {*before, *after} <= {0.0, 1.0}:
        return mean_interval(change)
    trials = len(change) + 2
    rose, fell = (change.count(1.0) + 1) / trials, (change.count(-1.0) + 1) / trials
    centre = rose - fell
    half = Z95 * math.sqrt((rose + fell - centre**2) / trials)
    return max(-1.0, centre - half), min(1.0, centre + half)
