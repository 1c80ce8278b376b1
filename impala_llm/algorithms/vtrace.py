"""V-trace: value targets and advantages from data of an older policy (IMPALA, arXiv 1802.01561, section 4.1).

With l_t = log π(a_t|x_t) - log μ(a_t|x_t), ρ_t = min(ρ̄, e^l_t) and c_t = λ min(c̄, e^l_t):

    δ_t       = ρ_t (r_t + γ_t V_{t+1} - V_t)
    v_t - V_t = δ_t + γ_t c_t (v_{t+1} - V_{t+1})
    A_t       = min(ρ̄_pg, e^l_t) (r_t + γ_t v_{t+1} - V_t)

ρ̄ decides which policy's value is the fixed point, c̄ only how fast and how noisily it is reached. Past the last
step V is the bootstrap value: the learner's estimate where the episode was cut, 0 where it ended.

Three forms: `vtrace` on rectangles [T, B], `vtrace_packed` on ragged rows laid end to end [N], and `turn_vtrace`, where
a whole turn of an agent is one step of the recursion. Observation tokens are no decisions and must not be in the input.

Invariant: nothing that is returned carries a gradient, and no row sees another one.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms.checks import (
    require_at_least,
    require_dtype_of,
    require_float,
    require_indices,
    require_same_floats,
    require_segment_ids,
)
from impala_llm.algorithms.importance import apply_dead_band, ratios, segment_mean, segment_sum

_CHUNK = 32
"""Length of the pieces of the scan: long enough that few levels remain, short enough that each operation is wide."""


class VTraceOutput(NamedTuple):
    """Of the shape of the rewards, without gradient."""

    vs: Tensor
    """v_t: targets of the values."""
    pg_advantages: Tensor
    """A_t: factor of grad log π in the policy gradient, truncated ratio included."""


class TurnVTraceOutput(NamedTuple):
    """Per turn, [K], without gradient."""

    vs: Tensor
    """v_k: targets of the values at the starts of the turns."""
    advantages: Tensor
    """r_k + γ v_{k+1} - V_k WITHOUT a ratio: the loss weights each token of the turn by its own truncated ratio."""
    log_ratios: Tensor
    """log-ratio that the recursion used for each turn, before truncation; a metric."""


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
) -> VTraceOutput:
    """V-trace on B rows of the same length T, time first.

    Args:
        log_rhos: float[T, B], l_t; clamped to ±20.
        discounts: float[T, B], γ_t: what discounts the step after t, 0 where the episode ended with t.
        rewards: float[T, B], r_t, received after step t.
        values: float[T, B], V_t.
        bootstrap_value: float[B], V after the last step; 0 where the episode ended.
        rho_bar, pg_rho_bar: caps > 0; infinity does not truncate.
        c_bar: cap >= 0. Above 1 the product of the c_t grows with the length of the row, and may overflow.
        lam: λ in [0, 1].

    Raises:
        TypeError, ValueError: wrong dtype, shape or cap.
    """
    require_same_floats(
        ("log_rhos", log_rhos), ("discounts", discounts), ("rewards", rewards), ("values", values), ndim=2
    )
    require_float("bootstrap_value", bootstrap_value, ndim=1)
    require_dtype_of("bootstrap_value", bootstrap_value, "values", values)
    if bootstrap_value.shape[0] != values.shape[1]:
        raise ValueError(
            f"bootstrap_value has {bootstrap_value.shape[0]} elements, values has {values.shape[1]} columns: one each"
        )
    _require_caps(rho_bar, c_bar, pg_rho_bar, lam)
    if values.numel() == 0:
        return VTraceOutput(values.clone(), values.clone())

    ratio = ratios(log_rhos)
    values_tp1 = torch.cat([values[1:], bootstrap_value[None]])
    deltas = ratio.clamp(max=rho_bar) * (rewards + discounts * values_tp1 - values)
    decays = discounts * ratio.clamp(max=c_bar) * lam
    vs = values + _scan_backwards(deltas, decays)
    vs_tp1 = torch.cat([vs[1:], bootstrap_value[None]])
    pg_advantages = ratio.clamp(max=pg_rho_bar) * (rewards + discounts * vs_tp1 - values)
    return VTraceOutput(vs, pg_advantages)


@torch.no_grad()
def vtrace_packed(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
) -> VTraceOutput:
    """V-trace on rows of any lengths, laid end to end without padding.

    Args:
        log_rhos, discounts, rewards, values: float[N], as in `vtrace`.
        bootstrap_value: float[num_segments], V after the last step of each row.
        segment_ids: int64[N], non-decreasing, the row of each step; a row may be empty.
        rho_bar, c_bar, pg_rho_bar, lam: as in `vtrace`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order or cap.
    """
    require_same_floats(
        ("log_rhos", log_rhos), ("discounts", discounts), ("rewards", rewards), ("values", values), ndim=1
    )
    _require_caps(rho_bar, c_bar, pg_rho_bar, lam)
    vs, advantages = _packed_targets(
        log_rhos, discounts, rewards, values, bootstrap_value, segment_ids, "segment_ids", rho_bar, c_bar, lam
    )
    return VTraceOutput(vs, ratios(log_rhos).clamp(max=pg_rho_bar) * advantages)


@torch.no_grad()
def turn_vtrace(
    token_log_ratios: Tensor,
    turn_ids: Tensor,
    turn_segment_ids: Tensor,
    turn_rewards: Tensor,
    turn_values: Tensor,
    bootstrap_value: Tensor,
    discount: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
    ratio: Literal["geometric", "product"] = "geometric",
    dead_band: float = 0.0,
) -> TurnVTraceOutput:
    """V-trace where one step is a whole turn: all tokens that the agent wrote between two observations.

    Over single tokens the product of the c_t decays by numerical noise alone, and a reward at the end of a long
    episode reaches nothing before it. Over turns the product has as many factors as the episode has decisions.

    The advantage that is returned is r_k + γ v_{k+1} - V_k. Unlike `VTraceOutput.pg_advantages` it has no ratio in
    it: the loss gives every token of the turn this advantage and its own truncated ratio min(C, e^l_t), so that one
    odd token does not weigh on the whole turn. Applying a turn's ratio here as well would correct twice.

    Args:
        token_log_ratios: float[N], l_t of the action tokens.
        turn_ids: int64[N], in [0, K): the turn of each token, counted through all episodes.
        turn_segment_ids: int64[K], non-decreasing, in [0, num_segments): the episode of each turn.
        turn_rewards: float[K], sum of the rewards of each turn.
        turn_values: float[K], V at the start of each turn.
        bootstrap_value: float[num_segments], V after the last turn of each episode; 0 where it ended.
        discount: γ in [0, 1], a turn.
        rho_bar, c_bar, lam: as in `vtrace`, on the ratio of the turn.
        ratio: of a turn. `geometric`: e^(mean of l over its tokens). `product`: e^(sum), the exact one. A turn
            without tokens has ratio 1.
        dead_band: token log-ratios smaller than this in absolute value count as 0, see `apply_dead_band`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order, cap, discount or name of a ratio.
    """
    require_float("token_log_ratios", token_log_ratios, ndim=1)
    require_same_floats(("turn_values", turn_values), ("turn_rewards", turn_rewards), ndim=1)
    require_dtype_of("token_log_ratios", token_log_ratios, "turn_values", turn_values)
    num_turns = turn_values.shape[0]
    require_indices("turn_ids", turn_ids, token_log_ratios.shape[0], num_turns)
    _require_caps(rho_bar, c_bar, 1.0, lam)
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount is {discount}: it must lie in [0, 1]")
    if ratio not in ("geometric", "product"):
        raise ValueError(f"ratio is {ratio!r}: choose geometric or product")

    over_tokens = segment_mean if ratio == "geometric" else segment_sum
    log_ratios = over_tokens(apply_dead_band(token_log_ratios, dead_band), turn_ids, num_turns)
    discounts = torch.full_like(turn_values, discount)
    vs, advantages = _packed_targets(
        log_ratios, discounts, turn_rewards, turn_values, bootstrap_value, turn_segment_ids, "turn_segment_ids",
        rho_bar, c_bar, lam,
    )  # fmt: skip
    return TurnVTraceOutput(vs, advantages, log_ratios)


def _packed_targets(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    segment_ids_name: str,
    rho_bar: float,
    c_bar: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """v_t and r_t + γ_t v_{t+1} - V_t, both [N], of rows laid end to end."""
    require_float("bootstrap_value", bootstrap_value, ndim=1)
    require_dtype_of("bootstrap_value", bootstrap_value, "values", values)
    require_segment_ids(segment_ids_name, segment_ids, values.shape[0], bootstrap_value.shape[0])
    if values.numel() == 0:
        return values.clone(), values.clone()

    is_last = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[1:], segment_ids[:-1], out=is_last[:-1])
    ends = is_last.nonzero().squeeze(1)
    bootstrap_at_ends = bootstrap_value[segment_ids[ends]]

    def next_of(x: Tensor) -> Tensor:
        return x.roll(-1).index_copy_(0, ends, bootstrap_at_ends)

    ratio = ratios(log_rhos)
    # in place wherever a temporary allows it: fresh memory costs more here than arithmetic
    deltas = next_of(values).mul_(discounts).add_(rewards).sub_(values).mul_(ratio.clamp(max=rho_bar))
    decays = ratio.clamp_(max=c_bar).mul_(lam).mul_(discounts).masked_fill_(is_last, 0.0)
    vs = _scan_backwards(deltas, decays).add_(values)
    return vs, next_of(vs).mul_(discounts).add_(rewards).sub_(values)


def _scan_backwards(terms: Tensor, decays: Tensor) -> Tensor:
    """x_t = terms_t + decays_t x_{t+1} along dimension 0, with x = 0 past the end. [T, ...], any T.

    Cuts time into chunks and walks back through all chunks at once, each as if nothing followed it. What does follow
    enters a chunk only through its first element, so the heads of the chunks are again such a recursion, `_CHUNK`
    times shorter.
    """
    length, tail = terms.shape[0], terms.shape[1:]
    if length <= _CHUNK:
        x = terms.clone()
        rows, factors = x.unbind(0), decays.unbind(0)
        for t in range(length - 2, -1, -1):
            rows[t].addcmul_(factors[t], rows[t + 1])
        return x

    num_chunks = -(-length // _CHUNK)

    def cut(y: Tensor) -> Tensor:
        missing = num_chunks * _CHUNK - length
        padded = torch.cat([y, y.new_zeros((missing, *tail))]) if missing else y
        by_chunk = padded.reshape(num_chunks, _CHUNK, *tail)
        return by_chunk.movedim(1, 0).clone(memory_format=torch.contiguous_format)

    x, product = cut(terms), cut(decays)
    largest = torch.finfo(terms.dtype).max
    rows, products = x.unbind(0), product.unbind(0)
    for j in range(_CHUNK - 2, -1, -1):
        rows[j].addcmul_(products[j], rows[j + 1])
        # an infinite product times the 0 at a row's end would be NaN in the row before it
        products[j].mul_(products[j + 1]).clamp_(max=largest)
    heads = _scan_backwards(rows[0], products[0])
    following = torch.zeros_like(heads)
    following[:-1] = heads[1:]
    x.addcmul_(product, following)
    return x.movedim(0, 1).reshape(num_chunks * _CHUNK, *tail)[:length]


def _require_caps(rho_bar: float, c_bar: float, pg_rho_bar: float, lam: float) -> None:
    for name, cap in (("rho_bar", rho_bar), ("pg_rho_bar", pg_rho_bar)):
        if not cap > 0:
            raise ValueError(f"{name} is {cap}: a cap on ratios must be positive, such as 1")
    require_at_least("c_bar", c_bar, 0.0)
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam is {lam}: λ must lie in [0, 1]")
