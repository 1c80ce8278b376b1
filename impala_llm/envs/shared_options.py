"""Settings env.args.* that several adapters have in common: their classes `Options` inherit them."""

import math
from dataclasses import dataclass
from typing import Any

from impala_llm.envs.base import Split
from impala_llm.envs.single_turn import split_sizes
from impala_llm.settings import bounded


@dataclass(kw_only=True)
class ScoreRange:
    """Maps the rewards of an episode to a score between 0 and 1."""

    score_low: float = 0.0
    """Sum of rewards that is the score 0."""
    score_high: float = 1.0
    """Sum of rewards that is the score 1, and a success."""

    def check_range(self) -> None:
        """Raises ValueError unless both are finite, and score_high is above score_low."""
        if not math.isfinite(self.score_high - self.score_low):
            raise ValueError(
                f"env.args.score_low={self.score_low} and score_high={self.score_high}: set both to finite numbers"
            )
        if self.score_high <= self.score_low:
            raise ValueError(f"env.args.score_high={self.score_high}: set it above score_low={self.score_low}")

    def scored(self, rewards: float) -> dict[str, Any]:
        """Return `score` and `success` of an episode with this sum of rewards, for the `info` of its last step."""
        share = (rewards - self.score_low) / (self.score_high - self.score_low)
        return {"score": min(max(share, 0.0), 1.0), "success": share >= 1.0}


@dataclass(kw_only=True)
class SplitSizes:
    """Number of tasks of each split."""

    num_train: int = bounded(10_000, least=1)
    """Tasks for training."""
    num_validation: int = bounded(100, least=1)
    """Tasks for evaluations inside of a run."""
    num_test: int = bounded(500, least=1)
    """Tasks for evaluation."""

    def splits(self) -> dict[Split, range]:
        """Return the task ids of each split; they follow each other."""
        return split_sizes(self.num_train, self.num_validation, self.num_test)
