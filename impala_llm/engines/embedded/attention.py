"""Attention of new tokens over the KV cache, for histories of uneven length and grouped heads.

Invariant: a token sees the cached positions of its own session up to its own, and nothing else.

There are two kinds of work. A decoding row is one query. All rows go through one batched product over the *blocks* of
the cache in their order there, followed by a softmax over the blocks of each row; no key or value is copied or padded.
A segment is a run of new tokens of one session, and gets a causal attention of its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from impala_llm.engines.embedded.kv_cache import BLOCK, KVCache

LOG2_E = 1.4426950408889634
_MIN_SHARE_IN_PLACE = 0.6


@dataclass(frozen=True)
class QueryRows:
    """R queries of one token each, all of different sessions, and the C cache blocks to attend to."""

    num_rows: int
    owner: torch.Tensor
    """int64[C]: row that a block belongs to; R where it belongs to none."""
    source: torch.Tensor
    """int64[C]: the same, with an existing row instead of R."""
    block_indices: torch.Tensor
    """int64[R * M]: indices of the blocks of a row, M the largest number of a row; its last one is repeated."""
    mask: torch.Tensor
    """float[C, 1, BLOCK]: 0 where the block's row sees the position, -inf elsewhere."""
    distance: torch.Tensor | None
    """int64[C, 1, BLOCK]: tokens from a position to the query of the block's row; None: no windows."""
    gathered: torch.Tensor | None
    """int64[C]: indices of the blocks; None where they are blocks 0 .. C - 1 of the pool."""


@dataclass(frozen=True)
class Segment:
    """New tokens of one session: rows [start, end) of the batch, the last ones of a history of `length` tokens."""

    blocks: torch.Tensor
    """int64[...]: the session's cache blocks."""
    start: int
    end: int
    length: int
    mask: torch.Tensor | None
    """bool[end - start, length], True where visible; None at the start of a session: a causal mask."""


def query_rows(
    cache: KVCache, slots: np.ndarray, lengths: np.ndarray, device: torch.device, has_windows: bool = False
) -> QueryRows:
    """Make the rows of a batch.

    Args:
        slots: int64[R], R >= 1, of the sessions.
        lengths: int64[R], tokens of their histories, the new one included.
        has_windows: a layer of the model has a sliding window.
    """
    num_rows = len(slots)
    counts = -(-lengths // BLOCK)
    columns = np.arange(counts.max())
    present = columns < counts[:, None]
    blocks = cache.table[slots, : len(columns)]
    used = blocks[present]
    of_row = np.repeat(np.arange(num_rows), counts)
    span = int(used.max()) + 1
    # Blocks of idle sessions in between cost time, and so does a copy: beyond this share the copy is cheaper.
    in_place = len(used) >= _MIN_SHARE_IN_PLACE * span
    if in_place:
        index, size = blocks, span
    else:
        index, size = np.zeros_like(blocks), len(used)
        index[present] = np.arange(len(used))
    last = index[np.arange(num_rows), counts - 1]
    owner = np.full(size, num_rows)
    owner[index[present]] = of_row
    # -inf and not just no owner: where no maximum is subtracted, an exponential may overflow.
    mask = np.full((size, 1, BLOCK), -np.inf, dtype=np.float32)
    mask[index[present]] = 0.0
    mask[last, 0] = np.where(np.arange(BLOCK) < (lengths - (counts - 1) * BLOCK)[:, None], 0.0, -np.inf)
    distance = None
    if has_windows:
        before = (lengths - 1)[:, None] - columns * BLOCK
        distance = np.zeros((size, 1, BLOCK), dtype=np.int64)
        distance[index[present], 0] = before[present][:, None] - np.arange(BLOCK)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return QueryRows(
        num_rows=num_rows,
        owner=tensor(owner),
        source=tensor(np.minimum(owner, num_rows - 1)),
        block_indices=tensor(np.where(present, index, last[:, None]).reshape(-1)),
        mask=tensor(mask),
        distance=None if distance is None else tensor(distance),
        gathered=None if in_place else tensor(used),
    )


def segment(cache: KVCache, slot: int, start: int, end: int, length: int, device: torch.device) -> Segment:
    """Make a segment of the session in a slot; other arguments as the fields of `Segment`."""
    mask = None
    if length > end - start:
        last_seen = torch.arange(length - (end - start), length, device=device)
        mask = torch.arange(length, device=device) <= last_seen[:, None]
    blocks = torch.from_numpy(cache.table[slot, : -(-length // BLOCK)]).to(device)
    return Segment(blocks=blocks, start=start, end=end, length=length, mask=mask)


def attend_rows(
    queries: torch.Tensor, cache: KVCache, layer: int, rows: QueryRows, window: int | None = None
) -> torch.Tensor:
    """Attend with one query for each row.

    Args:
        queries: [R, heads, head_dim], scaled by `scaling` * LOG2_E: torch's exp2 is four times as fast as its exp.
        window: tokens that a query sees, its own included; None: all.

    Returns:
        [R, heads * head_dim] in the dtype of the queries.
    """
    num_rows, heads, head_dim = queries.shape
    size = rows.owner.shape[0]
    if rows.gathered is None:
        keys, values = cache.first_blocks(layer, size)
    else:
        keys, values = (part.flatten(0, 1) for part in cache.gather_blocks(layer, rows.gathered))
    batch = size * cache.kv_heads
    mask = rows.mask
    if window is not None:
        assert rows.distance is not None
        mask = mask.masked_fill(rows.distance >= window, -torch.inf)
    by_block = queries.to(cache.dtype).index_select(0, rows.source).view(batch, -1, head_dim)
    scores = _product(by_block, keys.transpose(1, 2)).view(size, heads, BLOCK).add_(mask)
    highest = scores.amax(-1).index_select(0, rows.block_indices).view(num_rows, -1, heads).amax(1)
    weights = scores.sub_(highest.index_select(0, rows.source).unsqueeze(-1)).exp2_()
    parts = _product(weights.to(cache.dtype).view(batch, -1, BLOCK), values).view(size, heads * head_dim)
    # One row more than there are queries: it collects blocks that belong to none.
    total = weights.new_zeros(num_rows + 1, heads, 1).index_add_(0, rows.owner, weights.sum(-1, keepdim=True))
    mixed = parts.new_zeros(num_rows + 1, heads * head_dim).index_add_(0, rows.owner, parts)
    mixed = mixed.view(-1, heads, head_dim).div_(total)[:num_rows]
    return mixed.view(num_rows, heads * head_dim).to(queries.dtype)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 product of batches of matrices in the cache's dtype: a score rounded to bfloat16 is an error of 2 %."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def attend_segment(
    queries: torch.Tensor, cache: KVCache, layer: int, part: Segment, window: int | None = None
) -> torch.Tensor:
    """Causal attention of one session's new tokens.

    Args:
        queries: [n, heads, head_dim], scaled as for `attend_rows`.
        window: as for `attend_rows`.

    Returns:
        [n, heads * head_dim] in the dtype of the queries.
    """
    mask = part.mask
    if window is not None and window < part.length:
        positions = torch.arange(part.length, device=queries.device)
        distance = positions[part.length - len(queries) :, None] - positions
        mask = (distance >= 0) & (distance < window)
    own = cache.gather_blocks(layer, part.blocks).transpose(1, 2).flatten(2, 3)[:, None, :, : part.length]
    mixed = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None].to(cache.dtype),
        own[0],
        own[1],
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0 / LOG2_E,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).reshape(queries.shape[0], -1).to(queries.dtype)
