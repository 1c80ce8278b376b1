"""Weights from the board in shared memory into an engine's model."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from impala_llm.engines.base import EngineError, ModelRefused, SamplingParams
from impala_llm.engines.embedded.engine import TorchEngine
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader, WeightsError

MakeModel = Callable[..., PreTrainedModel]


def publish(model: PreTrainedModel, board: Path, version: int) -> None:
    tensors = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensors[name] = ("F32", tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy())
    WeightPublisher(board).publish(tensors, version)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_weights_from_shared_memory(
    make_model: MakeModel, tmp_path: Path, plain_log_probs: Callable, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    new = make_model(kind, seed=1)
    publish(new, tmp_path, 3)
    engine = TorchEngine(make_model(kind, seed=0).to(dtype), max_sessions=1, max_length=128)
    with WeightReader(tmp_path).lease() as lease:
        asyncio.run(engine.load_shared(lease))
    assert engine.version == 3
    prompt = np.random.default_rng(2).integers(0, 211, 20).tolist()
    completion = asyncio.run(engine.generate("a", prompt, SamplingParams(max_new_tokens=5)))
    expected = plain_log_probs(new, prompt + completion.tokens.tolist(), len(prompt))
    assert np.abs(completion.log_probs - expected).mean() < tolerance
    assert completion.versions.tolist() == [3] * 5


def test_weights_of_another_model_and_damaged_ones_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    engine = TorchEngine(make_model("qwen3"), max_sessions=1, max_length=128, version=2)
    publish(make_model("qwen3", vocab_size=300), tmp_path / "shape", 3)
    with WeightReader(tmp_path / "shape").lease() as lease, pytest.raises(ModelRefused, match="another shape"):
        asyncio.run(engine.load_shared(lease))
    publish(make_model("qwen3"), tmp_path / "old", 1)
    with WeightReader(tmp_path / "old").lease() as lease, pytest.raises(EngineError, match="older"):
        asyncio.run(engine.load_shared(lease))
    publish(make_model("qwen3", seed=1), tmp_path / "damaged", 3)
    path = next((tmp_path / "damaged").glob("slot-*/model.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with WeightReader(tmp_path / "damaged").lease() as lease, pytest.raises(WeightsError, match="checksum"):
        asyncio.run(engine.load_shared(lease))
    assert engine.version == 2
