"""A randomly initialised policy for toy environments and tests: a small Qwen3 and a tokenizer of printable characters.

No model has to be downloaded: the directory that `make_scratch_policy` writes is an ordinary Hugging Face checkpoint.
"""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

ACT, END, PAD, UNKNOWN = "<|act|>", "<|end|>", "<|pad|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<|end|>' if message.role == 'assistant' else '<|act|>' if message.role == 'user' else '' }}{% endfor %}"
)
"""A message costs one extra token: <|act|> after what the policy reads, <|end|> after what it says."""


def make_scratch_policy(directory: Path, hidden_size: int = 64, num_layers: int = 2, seed: int = 0) -> Path:
    """Write a random policy as a Hugging Face directory and return the directory.

    Args:
        hidden_size: width of the model, a multiple of 16; the heads are 16 wide.
        seed: of the weights; the same seed gives the same bytes.
    """
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: i for i, token in enumerate([PAD, UNKNOWN, ACT, END, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return save_random_policy(directory, backend, CHAT_TEMPLATE, hidden_size, num_layers, seed)


def save_random_policy(
    directory: Path, backend: Tokenizer, chat_template: str, hidden_size: int = 64, num_layers: int = 2, seed: int = 0
) -> Path:
    """Write a tokenizer, and a random Qwen3 of its vocabulary; for the rest see `make_scratch_policy`.

    Args:
        backend: it has PAD, UNKNOWN, ACT and END.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[ACT],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 16,
        num_key_value_heads=max(1, hidden_size // 32),
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
