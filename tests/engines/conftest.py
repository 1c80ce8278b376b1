"""Tiny random models, their weights large enough for peaked distributions, and what they say by a plain forward."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def build_model(kind: str, vocab_size: int = 211, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    shape = {**SHAPE, "vocab_size": vocab_size}
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True))
    else:
        model = MistralForCausalLM(MistralConfig(**shape, head_dim=8, sliding_window=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    return build_model


@pytest.fixture
def plain_log_probs() -> Callable[..., np.ndarray]:
    """Log-probability of tokens[start:] by one forward over the whole history, without any cache."""

    @torch.no_grad()
    def compute(model: PreTrainedModel, tokens: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double() / temperature
        log_probs = logits.log_softmax(-1)
        return np.array([log_probs[index - 1, tokens[index]].item() for index in range(start, len(tokens))])

    return compute
