"""Attention on packed rows: by our own segments, or by what torch and transformers have for packed rows on a GPU.

- segments: rows of about the same length share a call of torch's attention. On any device.
- flex: torch's flex attention, under the block mask that transformers makes of the rows' positions. It is compiled at
  its first call, and has no backward pass on a CPU.
- flash: flash attention for rows of varying lengths, in bfloat16 or float16: version 2, which is part of torch, or
  version 3 by the package `flash_attn_interface`.

Invariant: a row sees itself alone, up to each token, and as far back as the layer's window reaches.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask

SEGMENTS = "impala_segments"
FLEX = "impala_flex"
FLASH_2 = "impala_varlen"  # transformers looks for a package where a name has "flash" in it
_BUCKET = 32
"""Rows whose lengths round up to the same multiple of this many tokens share one attention call."""
_SHORT = 128
"""Tokens of rows that a CPU attends to by plain products. With the products that `prepare_cpu` chooses, the CPU's flash
attention, forward and backward, takes 6 to 10 times as long on rows of 32 to 128 tokens; from 512 on it is faster."""


def attention_arguments(implementation: str, lengths: Tensor, device: torch.device) -> Mapping[str, Any]:
    """Arguments of a model's layers, beside tokens and positions, that keep packed rows apart.

    Args:
        implementation: transformers' name of the attention: SEGMENTS, FLEX, FLASH_2 or that of a package.
        lengths: int64[num_segments], tokens of each row, in packed order.
        device: of the model.
    """
    if implementation == FLEX:
        return {}  # its mask is made of the positions
    if implementation == SEGMENTS:
        return {"segments": SegmentPlan(lengths.cpu()).to(device)}
    longest = int(lengths.max())
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


class SegmentPlan:
    """Rows that share an attention call, and the indices of their tokens. Made once a batch, used by every layer.

    Args:
        lengths: int64[num_segments], tokens of each row, in packed order.
    """

    def __init__(self, lengths: Tensor) -> None:
        starts = (lengths.cumsum(0) - lengths).tolist()
        buckets: dict[int, list[int]] = {}
        for row, length in enumerate(lengths.tolist()):
            buckets.setdefault(-(-length // _BUCKET) * _BUCKET, []).append(row)
        total = int(lengths.sum())
        self.gathers: list[Tensor] = []
        """For each call: int64[rows, width], indices in the flat sequence; padding points at the index past its end."""
        for width in sorted(buckets):
            index = torch.full((len(buckets[width]), width), total, dtype=torch.int64)
            for i, row in enumerate(buckets[width]):
                length = int(lengths[row])
                index[i, :length] = torch.arange(starts[row], starts[row] + length)
            self.gathers.append(index)
        order = torch.cat([index.reshape(-1) for index in self.gathers])
        kept = (order < total).nonzero().squeeze(1)
        self.restore = torch.empty(total, dtype=torch.int64)
        """int64[M]: where each token of the flat sequence lies among all padded outputs laid end to end."""
        self.restore[order[kept]] = kept

    def to(self, device: torch.device) -> "SegmentPlan":
        self.gathers = [index.to(device) for index in self.gathers]
        self.restore = self.restore.to(device)
        return self


def _segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: SegmentPlan | None = None,
    sliding_window: int | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each row. query [1, heads, M, d]; key, value [1, kv_heads, M, d] → [1, M, heads, d].

    Of `sliding_window` tokens, the query's own included, where the layer has a window.

    The padding of a shared call follows its row, so a causal mask hides it, and its outputs are dropped.
    """
    if segments is None:
        raise ValueError("segments is None: this attention works on packed rows, call PolicyModel.hidden")
    # one zero row at the end for padding to point at
    padded = [nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for x in (query, key, value)]
    outputs = []
    for index in segments.gathers:
        q, k, v = (
            x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2) for x in padded
        )
        mask = None
        if sliding_window and sliding_window < q.shape[2]:
            positions = torch.arange(q.shape[2], device=q.device)
            distance = positions[:, None] - positions
            mask = (distance >= 0) & (distance < sliding_window)
        is_short = q.device.type == "cpu" and q.shape[2] <= _SHORT
        with sdpa_kernel(SDPBackend.MATH) if is_short else nullcontext():
            out = nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3]))
    return torch.cat(outputs).index_select(0, segments.restore)[None], None


def _flash_attention_2(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **packed: Any,
) -> tuple[Tensor, None]:
    """torch's flash attention on rows of varying lengths; shapes as in `_segment_attention`.

    Args:
        packed: transformers' names for packed input: cu_seq_lens_q, int32[num_segments + 1], where each row begins, and
            where the last one ends; max_length_q, tokens of the longest row; sliding_window, or None.
    """
    q, k, v = (x[0].transpose(0, 1) for x in _in_one_type(query, key, value))
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if _TAKES_FEWER_KEYS:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    window = ((packed.get("sliding_window") or 0) - 1, 0)  # tokens before and after the query's; -1: all
    bounds = (packed["cu_seq_lens_q"],) * 2 + (packed["max_length_q"],) * 2
    out = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=window, **options)
    assert isinstance(out, Tensor)
    return out[None], None


_TAKES_FEWER_KEYS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether several heads of queries may share one of keys: from torch 2.12 on."""


def _flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' flex attention."""
    query, key, value = _in_one_type(query, key, value)
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


def _in_one_type(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, norms of queries and keys leave float32."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), key.to(dtype), value.to(dtype)


# Not compiled with the layers: that would compile them anew for each number of lengths that a micro-batch has.
AttentionInterface.register(SEGMENTS, torch.compiler.disable(_segment_attention))
AttentionInterface.register(FLASH_2, _flash_attention_2)
AttentionInterface.register(FLEX, _flex_attention)
AttentionMaskInterface.register(FLEX, flex_attention_mask)
