"""Errors of a GPU in the embedded engine, raised here as torch would: a lasting one, and a lack of memory."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from impala_llm.engines.base import EngineError, ModelRefused, SamplingParams
from impala_llm.engines.embedded.decoder import CpuDecoder
from impala_llm.engines.embedded.engine import TorchEngine
from impala_llm.engines.embedded.kv_cache import KVCache

MakeModel = Callable[..., PreTrainedModel]
PARAMS = SamplingParams(max_new_tokens=5)


def raising(error: Exception) -> Callable[..., None]:
    def method(*_: object) -> None:
        raise error

    return method


def test_where_not_even_the_cache_can_be_cleared_all_requests_fail_at_once(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an illegal access to memory: each operation of the process on its GPU fails from then on."""
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    lasting = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(CpuDecoder, "__call__", raising(lasting))
    monkeypatch.setattr(KVCache, "clear", raising(lasting))

    async def run() -> None:
        requests = [engine.generate(f"session-{number}", [1, 2, 3], PARAMS) for number in range(6)]
        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)
        assert all(isinstance(result, EngineError) and "illegal memory" in str(result) for result in results)
        assert "cannot be cleared" in str(engine.failure)
        for number in range(6):
            engine.release(f"session-{number}")
        await engine.close()

    asyncio.run(run())


def test_a_lack_of_memory_in_the_check_at_the_start_refuses_no_model(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    monkeypatch.setattr(CpuDecoder, "__call__", raising(torch.OutOfMemoryError("CUDA out of memory. Tried to ...")))
    with pytest.raises(EngineError, match="CUDA out of memory") as caught:
        asyncio.run(engine.start())
    assert not isinstance(caught.value, ModelRefused)


def test_the_error_of_a_failed_step_keeps_no_tensor_of_it(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers keep the error for some seconds, in which the memory of the step would be missing."""
    caplog.set_level(logging.CRITICAL, "impala_llm")
    engine = TorchEngine(make_model("qwen3"), max_sessions=2, max_length=64)
    activations: list[weakref.ref] = []

    def fail(*_: object) -> None:
        tensor = torch.zeros(8)
        activations.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuDecoder, "__call__", fail)

    async def run() -> None:
        with pytest.raises(EngineError) as caught:
            await engine.generate("a", [1, 2, 3], PARAMS)
        gc.collect()
        assert [tensor() for tensor in activations] == [None] and "out of memory" in str(caught.value.__cause__)

    asyncio.run(run())


def test_a_closed_engine_holds_neither_model_nor_cache(make_model: MakeModel) -> None:
    """A running episode may still hold the engine while its successor is made, on the same GPU."""
    model = make_model("qwen3")
    parameters = [weakref.ref(p) for p in model.parameters()]
    engine = TorchEngine(model, max_sessions=2, max_length=64)
    del model

    async def run() -> None:
        await engine.generate("a", [1, 2, 3], PARAMS)
        await engine.close()
        engine.release("a")
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate("b", [1, 2, 3], PARAMS)

    asyncio.run(run())
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)
