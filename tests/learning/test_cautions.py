"""Cautions, given once, about settings that are likely to be regretted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from impala_llm.config import load
from impala_llm.learning.cautions import cautions, slow_precision
from impala_llm.learning.policy.model import PolicyModel
from tests.learning.builders import save_lm


class Large(nn.Module):
    """60 million parameters that take no memory."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(60_000_000, device="meta"))
        self.config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2)
        self.dtype, self.device = torch.float32, torch.device(device)


def large(device: str = "cpu") -> PolicyModel:
    return SimpleNamespace(lm=Large(device))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rank", "rate", "is_said"),
    [
        (0, "3e-4", True),
        (0, "6e-5", True),
        (0, "5e-5", False),
        (0, "1e-6", False),
        (8, "6e-4", True),
        (8, "5e-4", False),
    ],
)
def test_a_large_rate_for_a_large_model_is_named(rank: int, rate: str, is_said: bool) -> None:
    config = load(["model=tiny_shopper", f"model.lora.rank={rank}", f"learner.learning_rate={rate}"])
    said = cautions(config, large())
    assert [("learner.learning_rate" in s, "60 million" in s, "model=pretrained" in s) for s in said] == (
        [(True, True, True)] if is_said else []
    )


def test_a_small_model_may_have_any_rate(tmp_path: Path) -> None:
    config = load(["model=tiny_shopper", "learner.learning_rate=1e-2"])
    assert cautions(config, PolicyModel.from_pretrained(save_lm(tmp_path))) == []


def test_several_passes_with_a_loss_that_bounds_no_step_are_named(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    words = ["model=tiny_shopper", "learner.epochs=4"]
    (said,) = cautions(load(words), model)
    assert "learner.epochs=4" in said and "algorithm=ppo" in said
    assert cautions(load([*words, "algorithm=ppo"]), model) == []
    for loss in ("reinforce", "truncated_is", "cispo"):
        assert f"algorithm.loss={loss}" in cautions(load([*words, f"algorithm.loss={loss}"]), model)[0]
    assert cautions(load(["model=tiny_shopper", "learner.minibatches=4"]), model) == [], "each token is learned once"


def test_float32_with_grouped_heads_on_a_gpu_is_named_with_its_memory() -> None:
    config = load(["model=tiny_shopper", "learner.learning_rate=1e-6", "engine.max_length=2048"])
    (said,) = cautions(config, large("cuda"))
    assert "2 key-value heads for 8 heads" in said and "0.13 GB at engine.max_length=2048" in said


@pytest.mark.parametrize(
    ("settings", "device", "capabilities", "is_said"),
    [
        (["learner.precision=bfloat16"], "cpu", {"avx2": True, "avx512_bf16": False, "amx_bf16": False}, True),
        (["learner.precision=bfloat16"], "cpu", {"avx2": True, "avx512_bf16": True, "amx_bf16": False}, False),
        (["learner.precision=bfloat16"], "cpu", {"neon": True, "bf16": True}, False),
        (["learner.precision=bfloat16"], "cpu", {"neon": True, "bf16": False}, True),
        (["learner.precision=bfloat16"], "cuda", {"avx2": True}, False),
        ([], "cpu", {"avx2": True}, False),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_named(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], device: str, capabilities: dict[str, bool], is_said: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    said = slow_precision(load(["model=tiny_shopper", *settings]), torch.device(device))
    assert ["set learner.precision=float32" in sentence for sentence in said] == [True] * is_said


def test_what_this_cpu_has_is_what_the_system_says_of_it() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "flags\t" not in flags:
        pytest.skip("only x86 on Linux says which instructions it has")
    said = slow_precision(load(["model=tiny_shopper", "learner.precision=bfloat16"]), torch.device("cpu"))
    assert bool(said) == ("amx_bf16" not in flags and "avx512_bf16" not in flags)
