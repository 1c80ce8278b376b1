"""Reuse of data: Reverb's samples-per-insert band (arXiv 2102.04736, section 3.3).

With S samples wanted per insert, m the size below which nothing is sampled, and e the width of the band, let
d = inserts·S - samples. k samples are allowed iff inserts >= m and d - k >= m·S - e, and k inserts iff
d + k·S <= m·S + e.

Invariant: as long as samples are taken `sample_batch` and inserts `insert_batch` at a time at most, one of the two is
always allowed. A band that could leave both waiting is refused at construction.
"""

import math

_ROUNDING = 1e-6
"""In the narrowest band the two sides meet in one point, which rounding must not take from both."""


class SamplesPerInsert:
    """Counts trajectories in and out, and says which side must wait.

    Args:
        ratio: S > 0, samples per insert on average.
        min_size: m >= 1, inserts before the first sample.
        error: e, in samples; see `smallest_error`. Infinity never makes anybody wait, but for `min_size`.
        sample_batch, insert_batch: most that is sampled and inserted at once.

    Raises:
        ValueError: a setting that is out of range, or a band so narrow that both sides could wait for ever.
    """

    def __init__(self, ratio: float, min_size: int, error: float, sample_batch: int = 1, insert_batch: int = 1) -> None:
        if not 0 < ratio < math.inf:
            raise ValueError(f"ratio is {ratio}: samples per insert must be positive and finite, such as 1")
        for name, value in (("min_size", min_size), ("sample_batch", sample_batch), ("insert_batch", insert_batch)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        smallest = smallest_error(ratio, sample_batch, insert_batch)
        if not error >= smallest:
            raise ValueError(
                f"error is {error}: with ratio {ratio}, {sample_batch} sampled and {insert_batch} inserted at a time, "
                f"both sides could wait for ever; set it to at least {smallest:g}"
            )
        self._ratio = ratio
        self._min_size = min_size
        self._error = error
        self._inserts = 0
        self._samples = 0
        self._forfeited = 0.0

    def can_insert(self, num: int = 1) -> bool:
        return self._surplus() + num * self._ratio <= self._min_size * self._ratio + self._error + _ROUNDING

    def can_sample(self, num: int = 1) -> bool:
        enough = self._inserts >= self._min_size
        return enough and self._surplus() - num >= self._min_size * self._ratio - self._error - _ROUNDING

    def record_inserts(self, num: int) -> None:
        """Count `num` trajectories that went into the buffer."""
        self._inserts += num

    def record_samples(self, num: int) -> None:
        """Count `num` trajectories that were drawn from the buffer."""
        self._samples += num

    def forfeit(self, num_samples: float) -> None:
        """Count samples that can never be taken, since their trajectory was evicted before it was drawn S times.

        They count like samples: otherwise the inserts would wait for them for ever.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}: what is forfeited cannot be negative")
        self._forfeited += num_samples

    def state_dict(self) -> dict[str, int | float]:
        return {"inserts": self._inserts, "samples": self._samples, "forfeited": self._forfeited}

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        self._inserts = int(state["inserts"])
        self._samples = int(state["samples"])
        self._forfeited = float(state["forfeited"])

    def _surplus(self) -> float:
        return self._inserts * self._ratio - self._samples - self._forfeited


def smallest_error(ratio: float, sample_batch: int = 1, insert_batch: int = 1) -> float:
    """The narrowest band e that cannot deadlock, in samples.

    Both sides wait when d > m·S + e - k_insert·S and d < m·S - e + k_sample, which 2e >= k_insert·S + k_sample rules
    out; and a last insert before m is reached must fit as well: e >= (k_insert - 1)·S.
    """
    return max((insert_batch * ratio + sample_batch) / 2, (insert_batch - 1) * ratio)
