"""Backward recursions in torch operations, for tensors on any device: `kernels` has the same two for the CPU.

Time is dimension 0. Invariant, of both: what the definition multiplies by 0 is ignored, which is all that follows a
discount of 0, and the errors v - V that follow a step where λ or c̄ is 0. So NaN or infinities behind the end of an
episode do not reach the steps before it, as 0 · NaN would; any other NaN is passed on.
"""

import torch
from torch import Tensor

from impala_llm.algorithms.importance import Caps

_CHUNK = 32
"""Length of the pieces of the scan: long enough that few levels remain, short enough that each operation is wide."""


def padded_targets(
    ratio: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    caps: Caps,
) -> tuple[Tensor, Tensor]:
    """Return v_t and r_t + γ_t v_{t+1} - V_t of rows of one length, both [T, B], T >= 1.

    Args:
        ratio, discounts, rewards, values: float[T, B].
        bootstrap_value: float[B], V past the end of each row.
        caps: ρ̄, c̄ and λ.
    """
    is_end = discounts == 0

    def next_of(x: Tensor) -> Tensor:
        return torch.cat([x[1:], bootstrap_value[None]]).masked_fill_(is_end, 0.0)

    deltas = next_of(values).mul_(discounts).add_(rewards).sub_(values).mul_(ratio.clamp(max=caps.rho_bar))
    vs = _scan_backwards(deltas, ratio.clamp(max=caps.c_bar).mul_(caps.lam).mul_(discounts)).add_(values)
    return vs, next_of(vs).mul_(discounts).add_(rewards).sub_(values)


def packed_targets(
    ratio: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    caps: Caps,
) -> tuple[Tensor, Tensor]:
    """Return v_t and r_t + γ_t v_{t+1} - V_t, both [N], of rows laid end to end, N >= 1.

    Args:
        ratio, discounts, rewards, values: float[N].
        bootstrap_value: float[num_segments], V past the end of each row.
        segment_ids: int64[N], the row of each step, ascending.
        caps: ρ̄, c̄ and λ.
    """
    is_last = torch.ones_like(segment_ids, dtype=torch.bool)
    torch.ne(segment_ids[1:], segment_ids[:-1], out=is_last[:-1])
    ends = is_last.nonzero().squeeze(1)
    bootstrap_at_ends = bootstrap_value[segment_ids[ends]]
    is_end = discounts == 0

    def next_of(x: Tensor) -> Tensor:
        return x.roll(-1).index_copy_(0, ends, bootstrap_at_ends).masked_fill_(is_end, 0.0)

    deltas = next_of(values).mul_(discounts).add_(rewards).sub_(values).mul_(ratio.clamp(max=caps.rho_bar))
    decays = ratio.clamp(max=caps.c_bar).mul_(caps.lam).mul_(discounts).masked_fill_(is_last, 0.0)
    vs = _scan_backwards(deltas, decays).add_(values)
    return vs, next_of(vs).mul_(discounts).add_(rewards).sub_(values)


def _scan_backwards(terms: Tensor, decays: Tensor, is_cut: Tensor | None = None) -> Tensor:
    """x_t = terms_t + decays_t x_{t+1} along dimension 0, with x = 0 past the end. [T, ...], any T.

    Args:
        is_cut: where x_{t+1} is ignored, NaN too; None: where decays are 0. A product of decays may be 0 only since it
            is too small for the dtype, and cuts nothing.

    Cuts time into chunks and walks back through all chunks at once, each as if nothing followed it. What does follow
    enters a chunk only through its first element, so the heads of the chunks are again such a recursion, `_CHUNK`
    times shorter.
    """
    length, tail = terms.shape[0], terms.shape[1:]
    is_cut = decays == 0 if is_cut is None else is_cut
    if length <= _CHUNK:
        x = terms.clone()
        _walk_back(x, decays, is_cut)
        return x

    num_chunks = -(-length // _CHUNK)

    def cut(y: Tensor) -> Tensor:
        missing = num_chunks * _CHUNK - length
        padded = torch.cat([y, y.new_zeros((missing, *tail))]) if missing else y
        by_chunk = padded.reshape(num_chunks, _CHUNK, *tail)
        return by_chunk.movedim(1, 0).clone(memory_format=torch.contiguous_format)

    x, products, is_cut = cut(terms), cut(decays), cut(is_cut)
    _walk_back(x, products, is_cut)
    largest = torch.finfo(terms.dtype).max
    factors, cuts = products.unbind(0), is_cut.unbind(0)
    for j in range(_CHUNK - 2, -1, -1):
        # infinite, a product would be NaN at the next factor 0
        factors[j].mul_(factors[j + 1].masked_fill(cuts[j], 0.0)).clamp_(max=largest)
        cuts[j].logical_or_(cuts[j + 1])
    heads = _scan_backwards(x[0], products[0], is_cut[0])
    following = torch.zeros_like(heads)
    following[:-1] = heads[1:]
    x.add_(torch.where(is_cut, 0.0, products * following))
    return x.movedim(0, 1).reshape(num_chunks * _CHUNK, *tail)[:length]


def _walk_back(x: Tensor, decays: Tensor, is_cut: Tensor) -> None:
    """The recursion along dimension 0 step by step, in place."""
    rows, factors, cuts = x.unbind(0), decays.unbind(0), is_cut.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].addcmul_(factors[t], rows[t + 1].masked_fill(cuts[t], 0.0))
