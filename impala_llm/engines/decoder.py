"""One forward of a causal LM over a packed batch of new tokens, the rest of every history being in the KV cache.

Invariant: both decoders compute what the Hugging Face model computes, on the Hugging Face model's own parameters.
Whoever writes new values into those parameters in place calls `refresh` before the next batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from impala_llm.engines.attention import LOG2_E, QueryRows, Segment, attend_rows, attend_segment
from impala_llm.engines.base import EngineError
from impala_llm.engines.kv_cache import KVCache

_ATTENTION_NAME = "impala_llm_cached"
_COMPACT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_POSITION_ONLY_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class PackedBatch:
    """N new tokens laid end to end: decoding rows (one token of a session each), then segments, then padding."""

    tokens: torch.Tensor
    """int64[N]."""
    positions: torch.Tensor
    """int64[N]: index of each token in its own history."""
    cache_rows: torch.Tensor
    """int64[N * 2 * kv_heads]: where the keys and values go, see `KVCache.rows`."""
    rows: QueryRows | None
    """The first `rows.num_rows` tokens of the batch."""
    segments: Sequence[Segment]
    sample_index: torch.Tensor | None
    """int64[R]: tokens whose next token is wanted, padded at the end; None where all are."""
    sample_rows: QueryRows | None
    """The wanted tokens once more, as queries: the last layer computes nothing but these. None where none is wanted."""


class Decoder(Protocol):
    """What computes a batch."""

    def __call__(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """Write the new tokens into the cache; return the logits float32[R, vocab] of the wanted ones."""
        ...

    def refresh(self) -> None:
        """The model's parameters have new values."""
        ...


def _attend(
    queries: torch.Tensor, rows: QueryRows | None, segments: Sequence[Segment], cache: KVCache, layer: int
) -> torch.Tensor:
    """queries [N, heads, head_dim], scaled: the rows' first, then the segments' -> [N, heads * head_dim]."""
    if rows is not None and rows.num_rows == queries.shape[0]:
        return attend_rows(queries, cache, layer, rows)
    mixed = queries.new_zeros(queries.shape[0], queries.shape[1] * queries.shape[2])
    if rows is not None:
        mixed[: rows.num_rows] = attend_rows(queries[: rows.num_rows], cache, layer, rows)
    for part in segments:
        mixed[part.start : part.end] = attend_segment(queries[part.start : part.end], cache, layer, part)
    return mixed


def make_decoder(model: PreTrainedModel, max_length: int) -> Decoder:
    """The compact decoder where the model is of a known kind, its own modules otherwise."""
    config = model.config
    plain_layers = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if config.model_type in _COMPACT_MODEL_TYPES and plain_layers and rope in _POSITION_ONLY_ROPE:
        return CompactDecoder(model, max_length)
    return HuggingFaceDecoder(model)


class HuggingFaceDecoder:
    """Any causal LM whose attention goes through transformers' AttentionInterface, run by its own modules.

    Raises EngineError from the first forward on where its attention is not a plain causal one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(_ATTENTION_NAME, _cached_attention)
        model.set_attn_implementation(_ATTENTION_NAME)
        self._model = model

    def __call__(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        output = self._model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=0 if batch.sample_index is None else batch.sample_index,
            cached_batch=(batch, cache),
        )
        return output.logits[0].float()

    def refresh(self) -> None:
        """Nothing to do: the modules read the parameters."""


def _cached_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cached_batch: tuple[PackedBatch, KVCache],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [1, heads, N, head_dim] -> [1, N, heads, head_dim]."""
    batch, cache = cached_batch
    if softcap is not None or s_aux is not None or (sliding_window or cache.max_length) < cache.max_length:
        raise EngineError(
            "this model's attention has a soft cap, sinks or a sliding window below max_length:"
            " lower max_length to the window, or use another engine"
        )
    cache.write(module.layer_idx, batch.cache_rows, torch.cat([key[0], value[0]]).transpose(0, 1).contiguous())
    queries = query[0].transpose(0, 1) * (LOG2_E * (query.shape[-1] ** -0.5 if scaling is None else scaling))
    mixed = _attend(queries, batch.rows, batch.segments, cache, module.layer_idx)
    return mixed.view(1, *queries.shape), None


class CompactDecoder:
    """Llama, Qwen2 and Qwen3 in few, fused operators: on small models the modules' overhead is a third of the time.

    Projections that read the same input are stored end to end, and the model's own parameters become views of them.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        trunk: Any = model.model
        config = model.config
        self._layers = [_CompactLayer(layer) for layer in trunk.layers]
        self._embedding = trunk.embed_tokens.weight.data
        self._norm = trunk.norm.weight.data
        self._head = _Linear([model.lm_head])
        self._head.refresh()
        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._activation = trunk.layers[0].mlp.act_fn
        places = torch.arange(max_length, device=self._embedding.device)[None]
        with torch.no_grad():
            cos, sin = trunk.rotary_emb(self._embedding[:1].float(), places)
        half = cos.shape[-1] // 2
        self._half = half
        self._cos = cos[0, :, None].clone()
        self._sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], dim=-1)

    def __call__(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        eps, heads, half = self._eps, self._heads, self._half
        turned = heads + self._kv_heads
        hidden = F.embedding(batch.tokens, self._embedding)
        cos, sin = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, eps)
            projected = layer.qkv(normed).view(hidden.shape[0], -1, 2 * half)
            to_turn = projected[:, :turned]
            if layer.normalises_heads:
                to_turn = F.rms_norm(to_turn, (2 * half,), None, eps)
            to_turn = to_turn * layer.head_weights
            swapped = torch.cat([to_turn[..., half:], to_turn[..., :half]], dim=-1)
            rotated = torch.addcmul(to_turn * cos, swapped, sin)
            cache.write(index, batch.cache_rows, torch.cat([rotated[:, heads:], projected[:, turned:]], dim=1))
            queries = rotated[:, :heads]
            if index == last:
                if batch.sample_rows is None:
                    return hidden.new_empty(0, self._head.outputs, dtype=torch.float32)
                if batch.sample_index is not None:
                    hidden = hidden.index_select(0, batch.sample_index)
                    queries = queries.index_select(0, batch.sample_index)
                mixed = _attend(queries, batch.sample_rows, (), cache, index)
            else:
                mixed = _attend(queries, batch.rows, batch.segments, cache, index)
            hidden = hidden + layer.output(mixed.to(hidden.dtype))
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            hidden = hidden + layer.down(self._activation(gate) * up)
        normed = F.rms_norm(hidden, hidden.shape[-1:], self._norm, eps)
        return self._head(normed).float()

    def refresh(self) -> None:
        """Pack the new values."""
        for layer in self._layers:
            layer.refresh()
        self._head.refresh()


class _CompactLayer:
    """The weights of one layer, by the name of what they compute."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = _Linear([attention.o_proj])
        self.gate_up = _Linear([mlp.gate_proj, mlp.up_proj])
        self.down = _Linear([mlp.down_proj])
        self.input_norm = layer.input_layernorm.weight.data
        self.mlp_norm = layer.post_attention_layernorm.weight.data
        self.normalises_heads = hasattr(attention, "q_norm")
        self._attention = attention
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The parameters have changed: derive again what is derived from them."""
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.refresh()
        attention = self._attention
        heads = attention.config.num_attention_heads
        kv_heads = attention.config.num_key_value_heads
        query = key = torch.ones(attention.head_dim, device=self.input_norm.device)
        if self.normalises_heads:
            query, key = attention.q_norm.weight.float(), attention.k_norm.weight.float()
        # Weights of the head norms, with the scale of the scores in those of the queries: [heads + kv_heads, head_dim].
        # They and all up to the scores are float32: rounded to bfloat16, the scale would be a wrong temperature.
        scaled = query * (attention.scaling * LOG2_E)
        self.head_weights = torch.cat([scaled.expand(heads, -1), key.expand(kv_heads, -1)])


class _Linear:
    """Projections of the same input as one product; their parameters become views of one weight.

    In float32 on a CPU this is oneDNN's product on a copy of the weight in its own layout, and not MKL's as in
    F.linear: about even on some processors, twice as fast on those where MKL leaves AVX-512 unused.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._weight = _joined([module.weight for module in modules])
        biases = [module.bias for module in modules if module.bias is not None]
        if len(biases) not in (0, len(modules)):
            raise EngineError(
                f"{len(biases)} of {len(modules)} projections of one input have a bias: expected all or none"
            )
        self._bias = _joined(biases) if biases else None
        self._packs = (
            self._weight.device.type == "cpu"
            and self._weight.dtype == torch.float32
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )
        self._packed: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        return self._weight.shape[0]

    @torch.no_grad()
    def refresh(self) -> None:
        """The weight has changed: pack it again."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None) if self._packs else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None or x.shape[0] == 1:
            return F.linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joined


def pad_rows(rows: int) -> int:
    """Number of rows that a batch of `rows` is padded to: oneDNN compiles a kernel for every new number (2 ms)."""
    if rows <= 1:
        return rows
    step = 4 if rows <= 8 else 8 if rows <= 16 else 16 if rows <= 256 else 64
    return -(-rows // step) * step
