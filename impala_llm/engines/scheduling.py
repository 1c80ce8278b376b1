"""Decides what the next forward computes, and packs it.

Invariant: nobody starves: every decoding row is in every step, and prompts follow in order of arrival as far as the
prefill budget reaches; a prompt longer than that is computed over several steps.
"""

from dataclasses import dataclass

import numpy as np
import torch

from impala_llm.engines.attention import query_rows, segment
from impala_llm.engines.decoder import PackedBatch, pad_rows
from impala_llm.engines.kv_cache import KVCache
from impala_llm.engines.sessions import SessionTable


@dataclass(frozen=True)
class Plan:
    """One step: its batch, and what it does to which sessions."""

    batch: PackedBatch
    slots: np.ndarray
    """int64[M]: sessions in the batch."""
    computed: np.ndarray
    """int64[M]: how many tokens of each."""
    sampled: np.ndarray
    """int64[R]: sessions whose next token is drawn; the first R rows of the logits are theirs."""


def plan_step(table: SessionTable, cache: KVCache, prefill_budget: int, device: torch.device) -> Plan | None:
    """The next step, None where no session is running.

    Args:
        prefill_budget: tokens of prompts in one step at most (a prompt with one token left counts as a decoding row).
    """
    running = np.flatnonzero(table.running)
    if len(running) == 0:
        return None
    pending = table.length[running] - table.cached[running]
    decoding, prefilling = running[pending == 1], running[pending > 1]
    prefilling = prefilling[np.argsort(table.order[prefilling])]
    wanted = table.length[prefilling] - table.cached[prefilling]
    taken = np.clip(prefill_budget - (np.cumsum(wanted) - wanted), 0, wanted)
    prefilling, wanted, taken = prefilling[taken > 0], wanted[taken > 0], taken[taken > 0]

    slots = np.concatenate([decoding, prefilling])
    computed = np.concatenate([np.ones_like(decoding), taken])
    ends = np.cumsum(computed)
    lengths = table.cached[slots] + computed
    size = int(ends[-1])
    padded = pad_rows(size)
    token_slots = np.repeat(slots, computed)
    positions = np.zeros(padded, dtype=np.int64)
    positions[:size] = np.arange(size) + np.repeat(lengths - ends, computed)
    tokens = np.zeros(padded, dtype=np.int64)
    tokens[:size] = table.tokens[token_slots, positions[:size]]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    count = len(decoding)
    rows = query_rows(cache, decoding, lengths[:count], device) if count else None
    sampled, sample_rows, sample_index = decoding, rows, None
    if len(prefilling):
        complete = np.flatnonzero(np.concatenate([np.ones(count, dtype=np.bool_), taken == wanted]))
        sampled = slots[complete]
        sample_rows = query_rows(cache, sampled, lengths[complete], device) if len(complete) else None
        sample_index = np.zeros(pad_rows(len(complete)), dtype=np.int64)
        sample_index[: len(complete)] = ends[complete] - 1
    batch = PackedBatch(
        tokens=tensor(tokens),
        positions=tensor(positions),
        cache_rows=tensor(cache.rows(token_slots, positions[:size], padded - size)),
        rows=rows,
        segments=[
            segment(cache, int(slot), int(end - new), int(end), int(length), device)
            for slot, new, end, length in zip(prefilling, taken, ends[count:], lengths[count:], strict=True)
        ],
        sample_index=None if sample_index is None else tensor(sample_index),
        sample_rows=sample_rows,
    )
    return Plan(batch=batch, slots=slots, computed=computed, sampled=sampled)
