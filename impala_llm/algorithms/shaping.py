"""Rewards that the trainer adds to the environment's: penalties for long episodes and for leaving a reference policy.

Invariant: they are added to the rewards of the turns, so returns, values and advantages all include them.
"""

import numpy as np
from torch import Tensor

from impala_llm.algorithms.checks import require_same_floats
from impala_llm.algorithms.importance import LOG_RATIO_LIMIT, segment_sum


def overlong_share(length: int, limit: int, margin: int) -> float:
    """Fraction of the last `margin` tokens before its limit that an episode uses (DAPO, arXiv 2503.14476, equation 13).

    Args:
        length: tokens of the episode.
        limit: tokens that it may have at most.
        margin: in [1, limit].

    Returns:
        0 up to limit - margin, then linear, 1 from `limit` on.

    Raises:
        ValueError: margin outside of its range.
    """
    if not 1 <= margin <= limit:
        raise ValueError(f"margin is {margin}: it must lie in [1, {limit}], the limit")
    return float(np.clip((length - (limit - margin)) / margin, 0.0, 1.0))


def turn_divergences(
    behaviour_log_probs: Tensor, reference_log_probs: Tensor, turn_ids: Tensor, num_turns: int
) -> Tensor:
    """Sum of log μ - log π_ref over the tokens of each turn: its mean over samples of μ is KL(μ‖π_ref) of a turn.

    As a penalty on rewards it is that of RLHF (Ziegler et al., arXiv 1909.08593, equation 2).

    Args:
        behaviour_log_probs, reference_log_probs: float[N].
        turn_ids: int64[N], in [0, num_turns).
        num_turns: number of turns.

    Returns:
        float[num_turns] in nats, without gradient; a token counts at most 20 either way.

    Raises:
        TypeError, ValueError: wrong dtype or shape.
    """
    require_same_floats(
        ("behaviour_log_probs", behaviour_log_probs), ("reference_log_probs", reference_log_probs), ndim=1
    )
    apart = (behaviour_log_probs - reference_log_probs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return segment_sum(apart, turn_ids, num_turns)
