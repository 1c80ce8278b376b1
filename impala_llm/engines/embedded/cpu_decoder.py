"""Fused model in float32 on a CPU: torch's matrix products, and compiled loops for everything between them."""

import numpy as np
import torch
from transformers import PreTrainedModel

from impala_llm.engines.embedded import cpu_kernels
from impala_llm.engines.embedded.attention import Segment, attend_segment, segment
from impala_llm.engines.embedded.fused_layers import CompactWeights
from impala_llm.engines.embedded.kv_cache import KVCache
from impala_llm.engines.embedded.scheduler import Plan


class CpuDecoder:
    """Decoder (see `impala_llm.engines.embedded.decoder.Decoder`) for Llama, Qwen2 and Qwen3 with a SiLU gate.

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
            cpu_kernels.place_heads(
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
        places: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
        table: np.ndarray,
        pool: np.ndarray,
    ) -> np.ndarray:
        """Attend with one query for each of `slots`, at indices `places` of the batch.

        Returns:
            float32[len(places), heads * head_dim], zeros beyond the slots.
        """
        mixed = np.zeros((len(places), self._weights.heads * self._weights.head_dim), dtype=np.float32)
        cpu_kernels.attend(projected, places, slots, lengths, table, pool, self._scores, mixed)
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
