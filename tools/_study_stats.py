"""Statistics of the study: interquartile means, bootstrap intervals, paired tests, correction for several of them.

As Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (2021), recommend, and as the
package rliable computes them for one task. A row is a run; where runs are paired, the same row is the same seed.

Invariant: the same data give the same numbers: every draw has a fixed seed, and tests draw nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

Statistic = Callable[[np.ndarray], np.ndarray]
"""A function that reduces the last axis."""
RESAMPLES = 10_000
"""Bootstrap samples."""
TIE = 1e-6
"""Means of differences that are as near as this are equal: data are kept with six digits."""


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half along the last axis; of n values floor(n / 4) are left out at each end.

    Args:
        values: float[..., n], n >= 1.
    """
    ordered = np.sort(np.asarray(values, float), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def bootstrap_interval(
    runs: np.ndarray,
    statistic: Statistic = interquartile_mean,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval of a statistic over runs; NaN of a single run.

    Args:
        runs: float[n], or float[n, k]: k numbers of a run, which are drawn together, such as scores of two methods.
        statistic: of float[b, n], or float[b, k, n], gives float[b].
    """
    runs = np.asarray(runs, float)
    n = runs.shape[0]
    if n < 2:
        return float("nan"), float("nan")
    indices = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    drawn = runs[indices]  # [b, n] or [b, n, k]
    values = statistic(drawn if runs.ndim == 1 else drawn.transpose(0, 2, 1))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean(values: np.ndarray) -> np.ndarray:
    """Mean along the last axis."""
    return np.asarray(values, float).mean(axis=-1)


def kept_share(pairs: np.ndarray) -> np.ndarray:
    """Ratio of the interquartile means of two columns: the score with a lag over that without.

    Args:
        pairs: float[..., 2, n].
    """
    means = interquartile_mean(pairs)
    return means[..., 0] / means[..., 1]


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p of the hypothesis that paired differences are symmetric about 0: the share of all 2^n patterns of
    their signs whose mean is as far from 0 as the one found.

    The statistic is their mean (Fisher's test for pairs): an interquartile mean would leave out the very signs that
    speak against the hypothesis. Exact for any number of pairs that a study has: each sum of signed differences is one
    of the first half plus one of the second, so that 2^(n/2) sums are looked up among as many others.
    """
    values = np.asarray(differences, float)
    n = len(values)
    first, second = _signed_sums(values[: n // 2]), np.sort(_signed_sums(values[n // 2 :]))
    limit = abs(values.sum()) - TIE * n  # ties are counted in
    below = np.searchsorted(second, -limit - first, side="right")
    above = len(second) - np.searchsorted(second, limit - first, side="left")
    return 1.0 if limit <= 0 else int((below + above).sum()) / 2**n


def _signed_sums(values: np.ndarray) -> np.ndarray:
    """The 2^n sums of n values with each pattern of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number by Holm's method (1979), in the order in which they came."""
    order = np.argsort(np.asarray(p_values), kind="stable")
    corrected = [0.0] * len(order)
    largest = 0.0
    for rank, index in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
