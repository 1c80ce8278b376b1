"""Backward recursions as compiled loops over tensors in main memory: `scan` has the same two for other devices.

They run on one thread and release the GIL. Invariant, of both: what the definition multiplies by 0 is ignored, which is
all that follows a discount of 0, and the errors v - V that follow a step where λ or c̄ is 0. So NaN or infinities behind
the end of an episode do not reach the steps before it, as 0 · NaN would; any other NaN is passed on.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.checks import require_discounts
from impala_llm.algorithms.importance import Caps
from impala_llm.compiled import compiled


def padded_targets(
    ratio: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    caps: Caps,
) -> tuple[Tensor, Tensor]:
    """Return v_t and r_t + γ_t v_{t+1} - V_t of rows of one length, both [T, B].

    Args:
        ratio, discounts, rewards, values: float[T, B].
        bootstrap_value: float[B], V past the end of each row.
        caps: ρ̄, c̄ and λ.

    Raises:
        ValueError: a discount outside of [0, 1], see `require_discounts`. The loops find it in passing.
    """
    vs, advantages = _empty_pair(values)
    targets = vs.numpy()
    are_discounts = _padded(
        _array(ratio), _array(discounts), _array(rewards), _array(values), _array(bootstrap_value),
        _constants(targets, caps), targets, advantages.numpy(),
    )  # fmt: skip
    if not are_discounts:
        require_discounts(discounts)
    return vs, advantages


def packed_targets(
    ratio: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    caps: Caps,
) -> tuple[Tensor, Tensor]:
    """Return v_t and r_t + γ_t v_{t+1} - V_t, both [N], of rows laid end to end.

    Args:
        ratio, discounts, rewards, values: float[N].
        bootstrap_value: float[num_segments], V past the end of each row.
        segment_ids: int64[N], the row of each step, ascending; not checked here.
        caps: ρ̄, c̄ and λ.

    Raises:
        ValueError: a discount outside of [0, 1], see `require_discounts`. The loops find it in passing.
    """
    vs, advantages = _empty_pair(values)
    targets = vs.numpy()
    are_discounts = _packed(
        _array(ratio), _array(discounts), _array(rewards), _array(values), _array(bootstrap_value), _array(segment_ids),
        _constants(targets, caps), targets, advantages.numpy(),
    )  # fmt: skip
    if not are_discounts:
        require_discounts(discounts)
    return vs, advantages


def _empty_pair(like: Tensor) -> tuple[Tensor, Tensor]:
    # not empty_like: it keeps strides, and one layout means one compilation
    return torch.empty(like.shape, dtype=like.dtype), torch.empty(like.shape, dtype=like.dtype)


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().contiguous().numpy()


def _constants(like: np.ndarray[Any, Any], caps: Caps) -> np.ndarray[Any, Any]:
    """The caps, λ, 0 and 1 in the dtype of the data: a Python float would draw all arithmetic to float64."""
    return np.array([*caps, 0.0, 1.0], like.dtype)


# contract: a product and a sum may be one instruction, which shortens the chain from step to step
_compiled = compiled(fastmath={"contract"})


@_compiled
def _padded(
    ratio: np.ndarray[Any, Any],
    discounts: np.ndarray[Any, Any],
    rewards: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    bootstrap_value: np.ndarray[Any, Any],
    constants: np.ndarray[Any, Any],
    vs: np.ndarray[Any, Any],
    advantages: np.ndarray[Any, Any],
) -> bool:
    """Return whether all discounts lie in [0, 1]."""
    rho_bar, c_bar, lam, zero, one = constants[0], constants[1], constants[2], constants[3], constants[4]
    are_discounts = True
    is_cut = lam == zero or c_bar == zero  # of all steps: a choice at each would lengthen the chain
    next_value = bootstrap_value.copy()
    next_error = np.zeros_like(bootstrap_value)  # v_{t+1} - V_{t+1}
    for t in range(values.shape[0] - 1, -1, -1):
        for b in range(values.shape[1]):
            rho, gamma, value = ratio[t, b], discounts[t, b], values[t, b]
            are_discounts &= zero <= gamma <= one
            ends = gamma == zero
            following = zero if ends else next_value[b]
            error = zero if ends else next_error[b]
            gain = rewards[t, b] - value
            advantages[t, b] = gain + gamma * (following + error)
            # `x > cap` in place of min(), so that NaN is passed on
            delta = (rho_bar if rho > rho_bar else rho) * (gain + gamma * following)
            error = delta if is_cut else delta + gamma * lam * (c_bar if rho > c_bar else rho) * error
            vs[t, b] = value + error
            next_value[b] = value
            next_error[b] = error
    return are_discounts


@_compiled
def _packed(
    ratio: np.ndarray[Any, Any],
    discounts: np.ndarray[Any, Any],
    rewards: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    bootstrap_value: np.ndarray[Any, Any],
    segment_ids: np.ndarray[Any, Any],
    constants: np.ndarray[Any, Any],
    vs: np.ndarray[Any, Any],
    advantages: np.ndarray[Any, Any],
) -> bool:
    """Return whether all discounts lie in [0, 1]."""
    rho_bar, c_bar, lam, zero, one = constants[0], constants[1], constants[2], constants[3], constants[4]
    are_discounts = True
    is_cut = lam == zero or c_bar == zero  # of all steps: a choice at each would lengthen the chain
    segment = np.int64(-1)
    next_value = error = zero
    for t in range(values.size - 1, -1, -1):
        if segment_ids[t] != segment:
            segment = segment_ids[t]
            next_value, error = bootstrap_value[segment], zero
        rho, gamma, value = ratio[t], discounts[t], values[t]
        are_discounts &= zero <= gamma <= one
        if gamma == zero:
            next_value, error = zero, zero
        gain = rewards[t] - value
        advantages[t] = gain + gamma * (next_value + error)
        delta = (rho_bar if rho > rho_bar else rho) * (gain + gamma * next_value)
        error = delta if is_cut else delta + gamma * lam * (c_bar if rho > c_bar else rho) * error
        vs[t] = value + error
        next_value = value
    return are_discounts
