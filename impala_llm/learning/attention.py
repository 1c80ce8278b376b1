"""Attention on packed rows: by our own segments, or by what transformers has for packed rows on a GPU.

- segments: rows of about the same length share a call of torch's attention. On any device.
- flex: torch's flex attention, under the block mask that transformers makes of the rows' positions. It is compiled at
  its first call, and has no backward pass on a CPU.
- flash: flash attention for rows of varying lengths, in bfloat16 or float16. The package `flash_attn` or
  `flash_attn_interface`, or a kernel that `kernels` fetches.

Invariant: a row sees itself alone, up to each token, and as far back as the layer's window reaches.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flex_attention_mask

SEGMENTS = "impala_segments"
FLEX = "impala_flex"
_BUCKET = 32
"""Rows whose lengths round up to the same multiple of this many tokens share one attention call."""
_SHORT = 128
"""Tokens of rows that a CPU attends to by plain products. With the products that `prepare_cpu` chooses, the CPU's flash
attention, forward and backward, takes 6 to 10 times as long on rows of 32 to 128 tokens; from 512 on it is faster."""


def attention_arguments(implementation: str, lengths: Tensor, device: torch.device) -> Mapping[str, Any]:
    """What a model's layers are to be called with, beside tokens and positions, so that packed rows stay apart.

    Args:
        implementation: transformers' name of the attention: SEGMENTS, FLEX or that of a flash attention.
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
    """Which rows share an attention call, and where their tokens lie. Made once a batch, used by every layer.

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
        """For each call: int64[rows, width], places in the flat sequence; padding points at the place past its end."""
        for width in sorted(buckets):
            index = torch.full((len(buckets[width]), width), total, dtype=torch.int64)
            for place, row in enumerate(buckets[width]):
                length = int(lengths[row])
                index[place, :length] = torch.arange(starts[row], starts[row] + length)
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
    # one zero place at the end for padding to point at
    padded = [nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for x in (query, key, value)]
    outputs = []
    for index in segments.gathers:
        q, k, v = (
            x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:]).transpose(1, 2) for x in padded
        )
        mask = None
        if sliding_window and sliding_window < q.shape[2]:
            places = torch.arange(q.shape[2], device=q.device)
            distance = places[:, None] - places
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


def _flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' flex attention, which wants one type: under autocast, norms of queries and keys leave float32."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    return flex_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(SEGMENTS, _segment_attention)
AttentionInterface.register(FLEX, _flex_attention)
AttentionMaskInterface.register(FLEX, flex_attention_mask)
