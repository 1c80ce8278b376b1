"""Fused weights of Llama, Qwen2 and Qwen3 for the decoders of this package.

Invariant: the model's own parameters are views of these weights; a write to them in place needs a `refresh`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from impala_llm.engines.base import EngineError
from impala_llm.engines.embedded.attention import LOG2_E


class CompactWeights:
    """Weights of a model, and the cosines and sines of its positions 0 .. max_length - 1.

    Attributes:
        cos, sin: float32[max_length, head_dim], the first half of sin negated.
    """

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        trunk: Any = model.model
        config = model.config
        self.layers = [CompactLayer(layer) for layer in trunk.layers]
        self.embedding: torch.Tensor = trunk.embed_tokens.weight.data
        self._norm: torch.Tensor = trunk.norm.weight.data
        is_half = self.embedding.dtype in (torch.bfloat16, torch.float16)
        self.head = (
            Float32Head(model.lm_head) if is_half and model.device.type == "cpu" else PackedLinear([model.lm_head])
        )
        self.head.refresh()
        self.eps: float = config.rms_norm_eps
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.activation = trunk.layers[0].mlp.act_fn
        positions = torch.arange(max_length, device=self.embedding.device)[None]
        with torch.no_grad():
            cos, sin = trunk.rotary_emb(self.embedding[:1].float(), positions)
        half = cos.shape[-1] // 2
        self.cos: torch.Tensor = cos[0].clone()
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    @property
    def norm(self) -> torch.Tensor:
        """Weight of the last norm, in float32."""
        return self._norm.float()

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.cos.shape[-1]

    def refresh(self) -> None:
        """Derive all derived values again, after a change of the parameters."""
        for layer in self.layers:
            layer.refresh()
        self.head.refresh()


class CompactLayer:
    """Weights of one layer. Those of the norms are float32."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = PackedLinear([attention.o_proj])
        self.gate_up = PackedLinear([mlp.gate_proj, mlp.up_proj])
        self.down = PackedLinear([mlp.down_proj])
        self._norms = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data
        self.normalises_heads = hasattr(attention, "q_norm")
        self._attention = attention
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive all derived values again, after a change of the parameters."""
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.refresh()
        self.input_norm, self.mlp_norm = (weight.float() for weight in self._norms)
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


class PackedLinear:
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
        """Number of outputs."""
        return self._weight.shape[0]

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack the weight again, after a change."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None) if self._packs else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[N, inputs], in whatever precision, to [N, outputs] in the weight's."""
        x = x.to(self._weight.dtype)
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product


class Float32Head:
    """Language model head in half precision on a CPU, with products and logits in float32.

    Logits of 20 have an error of 0.06 in bfloat16, more than all layers before them make. The weight is converted a
    piece at a time, which stays in the processor's cache, so that there is no copy of it.
    """

    PIECE = 1024
    """Rows of the weight that are converted at once."""

    def __init__(self, head: nn.Linear) -> None:
        self._weight = head.weight.data
        self._bias = None if head.bias is None else head.bias.data

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self._weight.shape[0]

    def refresh(self) -> None:
        """Do nothing: the weight is read as it is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[N, width] to float32[N, outputs]."""
        columns = x.float().T.contiguous()
        logits = torch.empty(self.outputs, x.shape[0])
        for weight, out in zip(self._weight.split(self.PIECE), logits.split(self.PIECE), strict=True):
            torch.mm(weight.float(), columns, out=out)
        return logits.T.contiguous() if self._bias is None else logits.T + self._bias.float()


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0].data
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joined
