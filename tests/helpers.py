"""For several test modules: the tiny policy, programs that run Python code, events of TensorBoard, a full disk, the end
of a process."""

import contextlib
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

needs_a_path_without_spaces = pytest.mark.skipif(
    " " in torch.__file__, reason="torch.compile links on a CPU only where torch's own path has no space"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character (newline, printable ASCII) after four special ones: 100. `<|im_end|>` ends a turn."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<|unknown|>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Saves tokenizer and a random float32 Qwen3 with tied embeddings; returns `directory`.

    The initial weights are large for a language model (0.2), so that log-probabilities differ visibly between tokens
    and a test that mixes up two indices fails.
    """
    tokenizer = make_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def events_of(folder: Path) -> Any:
    """TensorBoard's EventAccumulator of a folder, with what lies in it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # here: it takes a second

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def write_program(path: Path, code: str) -> Path:
    """A program that runs Python code, with this interpreter: a shebang of its own could hold no path with spaces."""
    script = path.with_name(f"{path.name}.py")
    script.write_text(code)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)
    return path


@contextmanager
def files_of_at_most(num_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Let this process write no file beyond so many bytes, as on a disk that is full; None: only once what this yields
    is called with a number. Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))

    if num_bytes is not None:
        limit(num_bytes)
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def has_ended(process: psutil.Process, within_s: float = 120.0) -> bool:
    """Whether a process ends within these seconds. Whoever takes its exit code may take longer."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def write_namesakes(folder: Path) -> None:
    """Write files with the names of modules of Python's, which end a process that imports them in their place."""
    for name in ("resource", "numbers", "queue", "calendar"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is not the one of Python')")
