"""Decoders: one forward of a causal LM over a packed batch of new tokens, with earlier tokens in the KV cache.

Invariant: all decoders compute the same as the Hugging Face model, on the Hugging Face model's own parameters. After
writing new values into those parameters in place, `refresh` must be called before the next batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from impala_llm.engines.base import EngineError
from impala_llm.engines.embedded import cpu_kernels
from impala_llm.engines.embedded.attention import (
    LOG2_E,
    QueryRows,
    Segment,
    attend_rows,
    attend_segment,
    query_rows,
    segment,
)
from impala_llm.engines.embedded.fused_layers import CompactWeights
from impala_llm.engines.embedded.kv_cache import KVCache
from impala_llm.engines.embedded.scheduler import Plan

_ATTENTION_NAME = "impala_llm_cached"
_COMPACT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_POSITION_ONLY_ROPE = ("default", "linear", "llama3", "yarn")
_MAX_CPU_THREADS = 2  # the loops of CpuDecoder run on one thread; torch's operators use all


@dataclass(frozen=True)
class DecoderBatch:
    """N new tokens end to end: decoding rows (one token of a session each), then segments, then padding."""

    tokens: torch.Tensor
    """int64[N]."""
    positions: torch.Tensor
    """int64[N]: index of each token in its own history."""
    cache_rows: torch.Tensor
    """int64[N * 2 * kv_heads]: rows of the cache for keys and values, see `KVCache.rows`."""
    rows: QueryRows | None
    """The first `rows.num_rows` tokens of the batch."""
    segments: Sequence[Segment]
    sample_index: torch.Tensor | None
    """int64[R]: indices of tokens whose successors are sampled, padded at the end; None where all are."""
    sample_rows: QueryRows | None
    """These tokens as queries: the last layer computes only them. None where there are none."""


def pack(plan: Plan, cache: KVCache, device: torch.device, has_windows: bool = False) -> DecoderBatch:
    """Make the batch of a plan, with the indices that torch's operators need; `has_windows` as in `query_rows`."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    num_rows, num_tokens = plan.num_rows, len(plan.token_slots)
    rows = None
    if num_rows:
        rows = query_rows(cache, plan.slots[:num_rows], plan.lengths[:num_rows], device, has_windows)
    sample_rows = rows
    if plan.sample_index is not None:
        num_sampled = len(plan.sampled)
        sample_rows = None
        if num_sampled:
            sample_rows = query_rows(cache, plan.sampled, plan.sampled_lengths, device, has_windows)
    cache_rows = cache.rows(plan.token_slots, plan.positions[:num_tokens], len(plan.tokens) - num_tokens)
    return DecoderBatch(
        tokens=tensor(plan.tokens),
        positions=tensor(plan.positions),
        cache_rows=tensor(cache_rows),
        rows=rows,
        segments=[segment(cache, *part, device) for part in plan.segments()],
        sample_index=None if plan.sample_index is None else tensor(plan.sample_index),
        sample_rows=sample_rows,
    )


class Decoder(Protocol):
    """Computes a step."""

    def __call__(self, plan: Plan, cache: KVCache) -> torch.Tensor:
        """Write the new tokens into the cache; return the logits float32[>= R, vocab] of the sampled ones."""
        ...

    def refresh(self) -> None:
        """Take over new values of the model's parameters."""
        ...


def _attend(
    queries: torch.Tensor,
    rows: QueryRows | None,
    segments: Sequence[Segment],
    cache: KVCache,
    layer: int,
    window: int | None = None,
) -> torch.Tensor:
    """Attend with queries [N, heads, head_dim], scaled, rows before segments. Returns [N, heads * head_dim]."""
    if rows is not None and rows.num_rows == queries.shape[0]:
        return attend_rows(queries, cache, layer, rows, window)
    mixed = queries.new_zeros(queries.shape[0], queries.shape[1] * queries.shape[2])
    if rows is not None:
        mixed[: rows.num_rows] = attend_rows(queries[: rows.num_rows], cache, layer, rows, window)
    for part in segments:
        mixed[part.start : part.end] = attend_segment(queries[part.start : part.end], cache, layer, part, window)
    return mixed


def make_decoder(model: PreTrainedModel, max_length: int) -> Decoder:
    """Make the fastest decoder for a model: CpuDecoder, CompactDecoder or HuggingFaceDecoder."""
    config = model.config
    plain_layers = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if config.model_type not in _COMPACT_MODEL_TYPES or not plain_layers or rope not in _POSITION_ONLY_ROPE:
        return HuggingFaceDecoder(model)
    is_plain = model.device.type == "cpu" and model.dtype == torch.float32 and config.hidden_act == "silu"
    if is_plain and torch.get_num_threads() <= _MAX_CPU_THREADS:
        return CpuDecoder(model, max_length)
    return CompactDecoder(model, max_length)


class HuggingFaceDecoder:
    """Decoder for any causal LM whose attention goes through transformers' AttentionInterface, by its own modules.

    Each forward raises EngineError where the attention is neither plain causal nor with a sliding window. Other
    unsupported models are found by `TorchEngine.start`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(_ATTENTION_NAME, _cached_attention)
        model.set_attn_implementation(_ATTENTION_NAME)
        self._model = model
        self._has_windows = getattr(model.config.get_text_config(), "sliding_window", None) is not None

    def __call__(self, plan: Plan, cache: KVCache) -> torch.Tensor:
        batch = pack(plan, cache, self._model.device, self._has_windows)
        output = self._model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=0 if batch.sample_index is None else batch.sample_index,
            cached_batch=(batch, cache),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def refresh(self) -> None:
        """Do nothing: the modules read the parameters."""


def _cached_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cached_batch: tuple[DecoderBatch, KVCache],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend with transformers' signature: query [1, heads, N, head_dim] -> [1, N, heads, head_dim]."""
    batch, cache = cached_batch
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise EngineError("this model's attention has a soft cap or sinks")
    window = sliding_window if sliding_window and sliding_window < cache.max_length else None
    cache.write(module.layer_idx, batch.cache_rows, torch.cat([key[0], value[0]]).transpose(0, 1).contiguous())
    queries = query[0].transpose(0, 1) * (LOG2_E * (query.shape[-1] ** -0.5 if scaling is None else scaling))
    mixed = _attend(queries, batch.rows, batch.segments, cache, module.layer_idx, window)
    return mixed.view(1, *queries.shape), None


class CompactDecoder:
    """Decoder for Llama, Qwen2 and Qwen3 in few, fused operators of torch, on any device and in any dtype."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._weights = CompactWeights(model, max_length)

    def __call__(self, plan: Plan, cache: KVCache) -> torch.Tensor:
        weights = self._weights
        eps, heads, head_dim = weights.eps, weights.heads, weights.head_dim
        turned, half = heads + weights.kv_heads, head_dim // 2
        batch = pack(plan, cache, weights.embedding.device)
        # The sum over the layers is float32 whatever the products are in, as in the learner's autocast.
        hidden = F.embedding(batch.tokens, weights.embedding).float()
        cos = weights.cos.index_select(0, batch.positions)[:, None]
        sin = weights.sin.index_select(0, batch.positions)[:, None]
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, eps)
            projected = layer.qkv(normed).view(hidden.shape[0], -1, head_dim)
            to_turn = projected[:, :turned]
            if layer.normalises_heads:
                to_turn = F.rms_norm(to_turn, (head_dim,), None, eps)
            to_turn = to_turn * layer.head_weights
            swapped = torch.cat([to_turn[..., half:], to_turn[..., :half]], dim=-1)
            rotated = torch.addcmul(to_turn * cos, swapped, sin)
            cache.write(index, batch.cache_rows, torch.cat([rotated[:, heads:], projected[:, turned:]], dim=1))
            queries = rotated[:, :heads]
            if index == last:
                if batch.sample_rows is None:
                    return hidden.new_empty(0, weights.head.outputs, dtype=torch.float32)
                if batch.sample_index is not None:
                    hidden = hidden.index_select(0, batch.sample_index)
                    queries = queries.index_select(0, batch.sample_index)
                mixed = _attend(queries, batch.sample_rows, (), cache, index)
            else:
                mixed = _attend(queries, batch.rows, batch.segments, cache, index)
            hidden = hidden + layer.output(mixed)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(weights.activation(gate) * up)
        normed = F.rms_norm(hidden, hidden.shape[-1:], weights.norm, eps)
        return weights.head(normed).float()

    def refresh(self) -> None:
        """Pack the new values of the parameters."""
        self._weights.refresh()


class CpuDecoder:
    """Decoder for Llama, Qwen2 and Qwen3 with a SiLU gate, in float32 on a CPU: torch's matrix products, and compiled
    loops for everything between them.

    A step of decoding rows costs little more than its products, which are bound by reading the weights once.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._weights = CompactWeights(model, max_length)
        self._embedding = self._weights.embedding.numpy()
        self._norm = self._weights.norm.numpy()
        self._cos, self._sin = self._weights.cos.numpy(), self._weights.sin.numpy()
        self._norms = [(layer.input_norm.numpy(), layer.mlp_norm.numpy()) for layer in self._weights.layers]
        self._scores = np.empty(max_length, dtype=np.float32)

    def __call__(self, plan: Plan, cache: KVCache) -> torch.Tensor:
        weights, norms, eps = self._weights, self._norms, self._weights.eps
        hidden = np.empty((len(plan.tokens), self._embedding.shape[1]), dtype=np.float32)
        normed = np.empty_like(hidden)
        cpu_kernels.embed(plan.tokens, self._embedding, norms[0][0], eps, hidden, normed)
        every = np.arange(len(hidden))
        rows = plan.slots[: plan.num_rows]
        segments = [segment(cache, *part, weights.embedding.device) for part in plan.segments()]
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            projected = layer.qkv(torch.from_numpy(normed)).numpy()
            pool = cache.layer_array(index)
            cpu_kernels.write_heads(
                projected,
                layer.head_weights.numpy(),
                layer.normalises_heads,
                eps,
                self._cos,
                self._sin,
                plan.positions,
                plan.token_slots,
                cache.table,
                pool,
            )
            if index < last:
                mixed = self._attend(projected, every, rows, plan.lengths, cache.table, pool)
                for part in segments:
                    self._attend_segment(projected, part, cache, index, mixed)
            else:
                # The last layer computes only tokens whose successors are sampled.
                if len(plan.sampled) == 0:
                    return torch.empty(0, weights.head.outputs)
                wanted = every if plan.sample_index is None else plan.sample_index
                hidden = hidden[wanted]
                normed = np.empty_like(hidden)
                mixed = self._attend(projected, wanted, plan.sampled, plan.sampled_lengths, cache.table, pool)
            update = layer.output(torch.from_numpy(mixed)).numpy()
            cpu_kernels.add_norm(hidden, update, norms[index][1], eps, normed)
            gate_up = layer.gate_up(torch.from_numpy(normed)).numpy()
            gated = np.empty((len(gate_up), gate_up.shape[1] // 2), dtype=np.float32)
            cpu_kernels.gate(gate_up, gated)
            update = layer.down(torch.from_numpy(gated)).numpy()
            cpu_kernels.add_norm(hidden, update, self._norm if index == last else norms[index + 1][0], eps, normed)
        return weights.head(torch.from_numpy(normed))

    def _attend(
        self,
        projected: np.ndarray,
        indices: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        table: np.ndarray,
        pool: np.ndarray,
    ) -> np.ndarray:
        """Attend with one query for each of `slots`, at `indices` of the batch.

        Returns:
            float32[len(indices), heads * head_dim], zeros beyond the slots.
        """
        mixed = np.zeros((len(indices), self._weights.heads * self._weights.head_dim), dtype=np.float32)
        cpu_kernels.attend(projected, indices, slots, lengths, table, pool, self._scores, mixed)
        return mixed

    def _attend_segment(
        self, projected: np.ndarray, part: Segment, cache: KVCache, layer: int, mixed: np.ndarray
    ) -> None:
        batch = torch.from_numpy(projected[part.start : part.end, : mixed.shape[1]])
        queries = batch.view(len(batch), self._weights.heads, self._weights.head_dim)
        mixed[part.start : part.end] = attend_segment(queries, cache, layer, part).numpy()

    def refresh(self) -> None:
        """Pack the new values of the parameters."""
        self._weights.refresh()
