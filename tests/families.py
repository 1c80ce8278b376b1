"""Tiny random models of many kinds, from their configuration classes alone; the weights large enough to show errors."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 97
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SHAPE: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 24}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


def _gpt2_shape() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SHAPE),
    "Llama, linear rope": ("LlamaConfig", SHAPE | _rope("linear", factor=4.0)),
    "Llama, llama3 rope": (
        "LlamaConfig",
        SHAPE
        | _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "Llama, yarn rope": ("LlamaConfig", SHAPE | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "Llama, dynamic rope, within its positions": ("LlamaConfig", SHAPE | _rope("dynamic", factor=4.0)),
    "Llama 4 (text)": (
        "Llama4TextConfig",
        SHAPE | {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48},
    ),
    "Qwen2": ("Qwen2Config", SHAPE),
    "Qwen2 with a window": ("Qwen2Config", SHAPE | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen2-MoE": ("Qwen2MoeConfig", SHAPE | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3": ("Qwen3Config", SHAPE | {"head_dim": 8}),
    "Qwen3-MoE": ("Qwen3MoeConfig", SHAPE | EXPERTS | {"head_dim": 8}),
    "Mistral": ("MistralConfig", SHAPE | {"sliding_window": None, "head_dim": 8}),
    "Mistral with a window": ("MistralConfig", SHAPE | WINDOW | {"head_dim": 8}),
    "Mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4, "sliding_window": None}),
    "Gemma": ("GemmaConfig", SHAPE | {"head_dim": 8}),
    "Gemma 3 (text)": ("Gemma3TextConfig", SHAPE | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "OLMo": ("OlmoConfig", SHAPE),
    "OLMo 2": ("Olmo2Config", SHAPE),
    "OLMoE": ("OlmoeConfig", SHAPE | EXPERTS),
    "GLM-4": ("Glm4Config", SHAPE | {"head_dim": 8}),
    "SmolLM3": ("SmolLM3Config", SHAPE),
    "Seed-OSS": ("SeedOssConfig", SHAPE | {"head_dim": 8}),
    "EXAONE 4": ("Exaone4Config", SHAPE | MIXED),
    "Phi": ("PhiConfig", SHAPE),
    "Phi-3": ("Phi3Config", SHAPE | {"sliding_window": None}),
    "Starcoder 2": ("Starcoder2Config", SHAPE | {"sliding_window": None}),
    "Ernie 4.5": ("Ernie4_5Config", SHAPE | {"head_dim": 8}),
    "Granite": (
        "GraniteConfig",
        SHAPE | {"logits_scaling": 8.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.3},
    ),
    "Granite-MoE": ("GraniteMoeConfig", SHAPE | LOCAL_EXPERTS | {"logits_scaling": 8.0}),
    "Cohere": ("CohereConfig", SHAPE | {"logit_scale": 0.25}),
    "Cohere 2": ("Cohere2Config", SHAPE | MIXED | {"logit_scale": 0.25}),
    "GPT-2": ("GPT2Config", _gpt2_shape()),
    "GPT-NeoX": ("GPTNeoXConfig", {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "OPT": (
        "OPTConfig",
        {k: SHAPE[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
        | {"ffn_dim": 48, "max_position_embeddings": 256, "word_embed_proj_dim": 32},
    ),
}
"""Kinds that learner and embedded engine compute as transformers does: configuration class and its arguments."""

_HEADS = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 2": ("Gemma2Config", SHAPE | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "Phi-3 with LongRoPE, beyond its original length": (
        "Phi3Config",
        SHAPE | {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        SHAPE
        | EXPERTS
        | {
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "LFM2": ("Lfm2Config", SHAPE | {"layer_types": ["conv", "full_attention"]}),
    "Granite-MoE-Hybrid": (
        "GraniteMoeHybridConfig",
        SHAPE
        | LOCAL_EXPERTS
        | {
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    "MiniMax": (
        "MiniMaxConfig",
        SHAPE
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Mamba": ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "StableLM": ("StableLmConfig", SHAPE),
    "Falcon-H1": (
        "FalconH1Config",
        SHAPE
        | {
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        SHAPE
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "GPT-OSS": ("GptOssConfig", SHAPE | MIXED | LOCAL_EXPERTS | {"head_dim": 8}),
    "BLOOM": ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "Falcon": ("FalconConfig", _HEADS),
    "Nemotron": ("NemotronConfig", SHAPE),
    "MPT": ("MptConfig", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4}),
}
"""Kinds that neither packed rows nor the engine compute as transformers does."""


def family_config(name: str) -> PreTrainedConfig:
    """The configuration of a name in `RIGHT` or `REFUSED`."""
    kind, arguments = (RIGHT | REFUSED)[name]
    make: Callable[..., PreTrainedConfig] = getattr(transformers, kind)
    return make(**arguments)


def build_family(name: str) -> PreTrainedModel:
    """The model of a name in `RIGHT` or `REFUSED`, always with the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.25)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()
