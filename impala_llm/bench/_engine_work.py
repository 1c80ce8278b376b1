"""Requests for the contenders of the engine benchmark, and the connections to their processes.

Invariant: a contender answers every request with exactly the number of tokens that was asked for, or the run fails.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from impala_llm.bench.frame import BenchError

NUM_REQUESTS = 48
MAX_LENGTH = 448
"""Tokens of a prompt and its completion at most."""
NUM_EQUAL = 16
MEAN_LENGTH = 105
MODELS = ("5m", "135m")
_VOCABULARY = 4096
"""Vocabulary of the smaller model; the larger one has more, and gets prompts of these ids too."""
_START_S = 300.0
_ROUND_S = 1800.0
_END_S = 10.0
_TAIL_BYTES = 2000

Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens each is to be answered with."""


def uneven_requests() -> Requests:
    """48 prompts of 16 to 63 tokens; completions: mean 105, 9 to 384."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.3, 0.9, NUM_REQUESTS), 8, 384).astype(int)
    prompts = [rng.integers(0, _VOCABULARY, int(rng.integers(16, 64))).tolist() for _ in range(NUM_REQUESTS)]
    return list(zip(prompts, lengths.tolist(), strict=True))


def workloads() -> dict[str, Requests]:
    """By name. A static batch lasts as long as its longest completion: `uneven` is its worst case, `sorted` its better
    one (sorting requires the lengths in advance), and `equal` its best: 16 prompts, completions of 105 tokens each."""
    uneven = uneven_requests()
    return {
        "uneven": uneven,
        "sorted": sorted(uneven, key=lambda request: request[1]),
        "equal": [(prompt, MEAN_LENGTH) for prompt, _ in uneven[:NUM_EQUAL]],
    }


def save_model(folder: Path, name: str) -> None:
    """Random weights in float32, without a token that would end a completion. 5m: a Qwen3 of 5.25 M parameters.
    135m: of the shape of SmolLM2-135M, whose time does not depend on what its weights are."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if name == "5m":
        qwen = Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            **ends,
        )
        Qwen3ForCausalLM(qwen).save_pretrained(folder)
        return
    llama = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **ends,
    )
    LlamaForCausalLM(llama).save_pretrained(folder)


@dataclass(frozen=True)
class Round:
    """A contender's time for all requests of a round."""

    seconds: float
    cpu_seconds: float
    tokens: int


class Worker:
    """A contender's process: one thread, started once, asked once a round. Ends with the `with` block."""

    def __init__(self, name: str, command: list[str]) -> None:
        """Starts it; BenchError where it does not come up within five minutes."""
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the worker
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment
        )
        try:
            self.version = str(self._read(_START_S)["version"])
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def play(self, requests: Requests) -> Round:
        """One round. BenchError where the process dies, hangs, or does not give the tokens asked for."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"requests": requests}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(self._death()) from None
        answer = self._read(_ROUND_S)
        wanted = [length for _, length in requests]
        if answer["tokens"] != wanted:
            raise BenchError(f"{self._name} gave {answer['tokens']} tokens and not {wanted}")
        return Round(answer["seconds"], answer["cpu_seconds"], sum(wanted))

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            ready = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise BenchError(f"{self._name} gave no answer within {timeout_s:.0f} s; it said: {self._tail()}")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise BenchError(self._death())
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> str:
        status = self._process.wait(_END_S)
        return f"{self._name} ended with status {status}; its output ends with: {self._tail()}"

    def _tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()
