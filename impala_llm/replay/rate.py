"""Limit of the reuse of data: Reverb's samples per insert (arXiv 2102.04736, section 3.3), for the side that samples.

With S samples wanted per insert, m the size below which nothing is sampled, and e the width of the band: k samples are
allowed iff inserts >= m and inserts·S - samples - k >= m·S - e. Inserts never wait: the tickets pace them.
"""

import math
from collections.abc import Mapping

_ROUNDING = 1e-6


class SamplesPerInsert:
    """Counts trajectories in and out, and says when sampling must wait.

    Args:
        ratio: S > 0, samples per insert on average, at most.
        min_size: m >= 1, inserts before the first sample.
        error: e, in samples: m·S at least, or m inserts would not be enough for any. Infinity never makes anybody
            wait, but for `min_size`.

    Raises:
        ValueError: a setting that is out of range.
    """

    def __init__(self, ratio: float, min_size: int, error: float) -> None:
        if not 0 < ratio < math.inf:
            raise ValueError(f"ratio is {ratio}: samples per insert must be positive and finite, such as 1")
        if min_size < 1:
            raise ValueError(f"min_size is {min_size}: it must be at least 1")
        if not error > 0:
            raise ValueError(f"error is {error}: it must be positive, or sampling could wait for ever")
        self._ratio = ratio
        self._min_size = min_size
        self._least = min_size * ratio - error
        """Smallest surplus, inserts·S - samples, that samples may leave."""
        self._inserts = 0
        self._samples = 0

    def can_sample(self, num: int = 1) -> bool:
        """Return whether `num` trajectories may be drawn now."""
        return self.num_missing(num) == 0

    def num_missing(self, num: int = 1) -> int:
        """Return how many trajectories have yet to go into the buffer before `num` may be drawn."""
        inserts = (self._samples + num + self._least - _ROUNDING) / self._ratio
        return max(0, math.ceil(max(self._min_size, inserts)) - self._inserts)

    def record_inserts(self, num: int) -> None:
        """Count `num` trajectories that went into the buffer."""
        self._inserts += num

    def record_samples(self, num: int) -> None:
        """Count `num` trajectories that were drawn from the buffer."""
        self._samples += num

    def state_dict(self) -> dict[str, float]:
        """Inserts, and the surplus, which holds for another ratio as well. States of ranks may be added up."""
        return {"inserts": self._inserts, "surplus": self._inserts * self._ratio - self._samples}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over a state; where the ratio was another, the surplus stays and gives the count of samples."""
        self._inserts = int(state["inserts"])
        # After a change of the ratio it may be out of reach.
        surplus = max(state["surplus"], self._least)
        self._samples = round(self._inserts * self._ratio - surplus)
