"""The embedded engine and transformers' two ways to generate, each in a process of its own, for the engine benchmark.

    python -m impala_llm.bench._engine_contenders NAME MODEL SLOTS MAX_LENGTH

A contender reads a line of JSON for each round, {"requests": [[prompt, number of tokens], ...]}. It answers with lines:
{"version": ...} first, when it is ready, and for each round {"seconds", "cpu_seconds", "tokens": [of each request]}.
Invariant: standard output carries these lines and nothing else; what libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import impala_llm
from impala_llm.bench._engine_work import Requests
from impala_llm.engines.base import SamplingParams
from impala_llm.engines.embedded.engine import TorchEngine

Round = Callable[[Requests], list[int]]
"""Answers all requests, log-probabilities included, and returns how many tokens each got."""


def main(name: str, model: str, slots: int, max_length: int) -> None:
    """Serves rounds until standard input ends."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        make, version = CONTENDERS[name]
        play = make(Path(model), slots, max_length)
        print(json.dumps({"version": version}), file=answers, flush=True)
        for line in sys.stdin:
            requests = [(list(prompt), int(length)) for prompt, length in json.loads(line)["requests"]]
            begin, begin_cpu = time.perf_counter(), time.process_time()
            tokens = play(requests)
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
            result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
            print(json.dumps(result), file=answers, flush=True)


def embedded(model: Path, slots: int, max_length: int) -> Round:
    """Our engine, with all requests handed over at once; the slots take them in order."""
    engine = TorchEngine.from_pretrained(model, max_sessions=slots, max_length=max_length)

    async def answer(index: int, prompt: list[int], length: int) -> int:
        name = str(index)
        completion = await engine.generate(name, prompt, SamplingParams(max_new_tokens=length, seed=index))
        engine.release(name)
        return len(completion.log_probs)

    async def answer_all(requests: Requests) -> list[int]:
        return list(await asyncio.gather(*(answer(i, *request) for i, request in enumerate(requests))))

    return lambda requests: asyncio.run(answer_all(requests))


def generate(model: Path, slots: int, max_length: int) -> Round:
    """transformers' generate on batches of `slots` requests, each of which lasts as long as its longest completion."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()

    @torch.inference_mode()
    def play(requests: Requests) -> list[int]:
        counts = []
        for start in range(0, len(requests), slots):
            batch = requests[start : start + slots]
            width = max(len(prompt) for prompt, _ in batch)
            output = lm.generate(
                torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch]),
                attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch]),
                max_new_tokens=max(length for _, length in batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            log_probs = lm.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
            counts += [min(length, log_probs.shape[1]) for _, length in batch]
        return counts

    return play


def continuous(model: Path, slots: int, max_length: int) -> Round:
    """transformers' continuous batching, what `generate_batch` runs on, over `slots` requests at a time.

    Its manager is kept from round to round and asked request by request, since `generate_batch` takes one length for
    all. The kernel and the sizes of blocks and batches are the fastest of those tried; prefixes are not shared, since
    no two prompts begin alike.
    """
    lm = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    ).eval()
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_length, eos_token_id=-1
    )
    batching = ContinuousBatchingConfig(
        block_size=64,
        num_blocks=slots * -(-max_length // 64),
        max_batch_tokens=512,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
        return_logprobs=True,
    )

    def play(requests: Requests) -> list[int]:
        counts: dict[str, int] = {}
        with lm.continuous_batching_context_manager(
            sampling, continuous_batching_config=batching, persistent_manager=True, warmup=False
        ) as manager:
            names = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in requests]
            while len(counts) < len(names):
                result = manager.get_result(timeout=1.0)
                if result is not None and result.is_finished():
                    counts[result.request_id] = len(result.logprobs)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the thread of continuous batching has ended")
        return [counts[name] for name in names]

    return play


CONTENDERS = {
    "embedded": (embedded, impala_llm.__version__),
    "generate": (generate, transformers.__version__),
    "continuous": (continuous, transformers.__version__),
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
