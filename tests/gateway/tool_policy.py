"""A random policy whose vocabulary is so small that it learns to call tools from nothing."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from impala_llm.learning.policy.scratch import ACT, END, PAD, UNKNOWN, save_random_policy

CALL, CALLED = "<tool_call>", "</tool_call>"
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
    return save_random_policy(directory, backend, TEMPLATE)
