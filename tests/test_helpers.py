"""The tiny policy is what the tests that use it take it for."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_tiny_tokenizer_round_trips_text_and_special_tokens(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "search[red shoes]\nPrice: $12.50 <a  b>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer) == 100
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer.encode("\u00e9", add_special_tokens=False)) == "<|unknown|>"


def test_the_tiny_chat_template_ends_with_the_assistants_opening(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "system", "content": "Shop."}, {"role": "user", "content": "Go"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nShop.<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"


def test_the_tiny_model_loads_and_prefers_some_tokens(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 20, 30, 40]])).logits
    assert logits.shape == (1, 4, 100)
    assert logits.dtype == torch.float32
    assert logits.std().item() > 0.5
