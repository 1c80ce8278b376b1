"""95 % intervals of what is estimated from episodes."""

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""
STUDENT95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t, of 1 to 30 degrees of freedom."""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of a mean, of more than 31 values the normal one; of one value that value."""
    mean, degrees = float(np.mean(values)), len(values) - 1
    if degrees == 0:
        return mean, mean
    quantile = STUDENT95[degrees - 1] if degrees <= len(STUDENT95) else Z95
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion (Wilson 1927); sound near 0 and 1, unlike the normal one."""
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))  # rounding leaves p otherwise, near 0 and 1


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean score, within [0, 1] as scores are; of scores that are all 0 or 1, a proportion,
    Wilson's: the normal one of 0, 0, 0 is [0, 0]."""
    if set(scores) <= {0.0, 1.0}:
        return wilson_interval(round(sum(scores)), len(scores))
    return _within_0_and_1(*mean_interval(scores))


def _within_0_and_1(low: float, high: float) -> tuple[float, float]:
    return max(0.0, low), min(1.0, high)


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
