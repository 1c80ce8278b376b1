"""A random policy whose vocabulary is so small that it learns to call tools from nothing."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

ACT, END, PAD, UNKNOWN, CALL, CALLED = "<|act|>", "<|end|>", "<|pad|>", "<|unknown|>", "<tool_call>", "</tool_call>"
CALLS = [f'{{"name": "look_up", "arguments": {{"key": "{key}"}}}}' for key in "ab"]
TEMPLATE = (
    "{% if tools %}tools {% endif %}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|end|>' if message.role == 'assistant' else '<|act|>' }}{% endfor %}"
)


def make_tool_policy(directory: Path) -> Path:
    """Write a tokenizer, in which a whole call is one token between two others, and a random Qwen3."""
    words = ["tools", "a", "b", "7", "3", "?", "rules", "-"]
    special = [PAD, UNKNOWN, ACT, END]
    vocabulary = {token: number for number, token in enumerate([*special, CALL, CALLED, *CALLS, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_tokens([CALL, CALLED, *CALLS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[ACT],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=vocabulary[END],
        bos_token_id=None,
        pad_token_id=vocabulary[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
