"""Attention over the cache against its definition in double precision."""

import numpy as np
import psutil
import pytest
import torch

from impala_llm.engines.embedded.attention import LOG2_E, attend_rows, query_rows
from impala_llm.engines.embedded.kv_cache import KVCache

HEADS, KV_HEADS, DIM = 4, 2, 64


def filled_cache(dtype: torch.dtype, lengths: list[int]) -> tuple[KVCache, list[torch.Tensor]]:
    """A cache of one layer with random sessions, and float64[2, length, KV_HEADS, DIM] of each."""
    cpu = torch.device("cpu")
    cache = KVCache(
        layers=1, slots=len(lengths), kv_heads=KV_HEADS, max_length=max(lengths), head_dim=DIM, dtype=dtype, device=cpu
    )
    sessions = []
    for slot, length in enumerate(lengths):
        cache.reserve(slot, length)
        own = torch.randn(length, 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(slot)).to(dtype)
        cache_rows = cache.rows(np.full(length, slot), np.arange(length), 0)
        cache.write(0, torch.from_numpy(cache_rows), own)
        sessions.append(own.double().view(length, 2, KV_HEADS, DIM).transpose(0, 1))
    return cache, sessions


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_decoding_rows_are_as_exact_as_their_inputs(dtype: torch.dtype, tolerance: float) -> None:
    lengths = [200, 64, 1, 131]
    cache, sessions = filled_cache(dtype, lengths)
    # Peaked, as those of trained models are: scores of some tens, where bfloat16 keeps a quarter of a nat.
    queries = torch.randn(len(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(9)).to(dtype)
    scaling = 0.5
    rows = query_rows(cache, np.arange(len(lengths)), np.array(lengths), torch.device("cpu"))
    mixed = attend_rows(queries.float() * (scaling * LOG2_E), cache, 0, rows).double().view(-1, HEADS, DIM)
    # The scaled queries are rounded as well: so are those of the reference.
    rounded = (queries.float() * (scaling * LOG2_E)).to(dtype).double() / LOG2_E
    for row, (keys, values) in enumerate(sessions):
        of_head = torch.arange(HEADS) // (HEADS // KV_HEADS)
        weights = torch.einsum("hd,lhd->hl", rounded[row], keys[:, of_head]).softmax(-1)
        expected = torch.einsum("hl,lhd->hd", weights, values[:, of_head])
        error = (mixed[row] - expected).norm() / expected.norm()
        assert error < tolerance


def test_the_cache_of_a_cpu_takes_memory_as_sessions_grow() -> None:
    before = psutil.Process().memory_info().rss
    cache = KVCache(
        layers=2,
        slots=256,
        kv_heads=KV_HEADS,
        max_length=1024,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert psutil.Process().memory_info().rss - before < cache.nbytes / 10
    assert cache.nbytes > 500e6
    assert not cache.gather_blocks(1, torch.tensor([cache.num_blocks])).any()
