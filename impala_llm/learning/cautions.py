"""Warnings about settings that are allowed and likely to fail; logged once, when the learner has its model.

Those that need no model stand in checks/settings_cautions.py, and `--dry-run` says them too.
"""

import torch

from impala_llm.checks.settings_cautions import settings_cautions
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.settings import Config, ModelConfig

LARGE_MODEL = 50_000_000
"""Parameters."""
LARGE_RATE = 5e-5
"""A learning rate that harms a large model whose weights all learn."""
LORA_FACTOR = 10
"""Adapters learn best at about ten times the rate of all weights (Schulman et al., LoRA Without Regret, 2025)."""
BFLOAT16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""Keys of `torch.cpu.get_capabilities`: two of x86, two of ARM. With any of them bfloat16 may gain something."""


def cautions(config: Config, model: PolicyModel) -> list[str]:
    """A sentence with key, value and fix for each."""
    found = []
    size, rate = sum(p.numel() for p in model.lm.parameters()), config.learner.learning_rate
    limit = LARGE_RATE * (LORA_FACTOR if config.model.lora.rank else 1)
    if size > LARGE_MODEL and rate > limit:
        found.append(
            f"learner.learning_rate={rate:g} is likely to ruin {config.model.path}, which has {size / 1e6:.0f} million "
            f"parameters: set model=pretrained or learner.learning_rate=1e-6, or at most {limit:g}"
        )
    found += settings_cautions(config)
    text = model.lm.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if model.lm.device.type == "cuda" and model.lm.dtype == torch.float32 and kv_heads != heads:
        longest = config.engine.max_length
        found.append(
            f"model.device={config.model.device}: float32 with {kv_heads} key-value heads for {heads} heads has no "
            f"fused attention on a GPU, so that each layer keeps {heads} x L x L scores of a row of L tokens: "
            f"{4 * heads * longest**2 / 1e9:.2g} GB at engine.max_length={longest}; lower engine.max_length if memory "
            "runs out"
        )
    return found + slow_precision(config, model.lm.device)


def other_value_head(config: Config, model: PolicyModel) -> list[str]:
    """A sentence where the starting policy has a fitted value head that this one cannot take over."""
    width = config.model.value_hidden_size
    # The defaults do not fit each other: the shipped policy has a linear head, and a hidden layer scored higher.
    is_default = config.model.path == ModelConfig.path and width is None
    if model.other_hidden_size is None or is_default:
        return []
    return [
        f"model.value_hidden_size={'null' if width is None else width}: the fitted value head in {config.model.path} "
        f"has another shape, and a new one begins: set model.value_hidden_size={model.other_hidden_size} to keep it"
    ]


def slow_precision(config: Config, device: torch.device) -> list[str]:
    """A sentence where bfloat16 is asked for on a CPU that has no instructions for it."""
    if config.learner.precision != "bfloat16" or device.type != "cpu":
        return []
    capabilities = torch.cpu.get_capabilities()
    if any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS):
        return []
    return [
        "learner.precision=bfloat16: this CPU has no instructions for it, and multiplies in float32 faster (8 times on "
        "an AMD EPYC with AVX2); set learner.precision=float32, and engine.dtype=float32 where actors run on such a CPU"
    ]
