"""vLLM's side of the engine benchmark: a program of its own, because vLLM may live in another Python installation.

    python _engine_vllm.py vllm MODEL SLOTS MAX_LENGTH

It imports nothing of this package; the protocol is that of `_engine_contenders`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process: one thread works
    "VLLM_NO_USAGE_STATS": "1",
}


def main(model: str, slots: int, max_length: int) -> None:
    """Serves rounds until standard input ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        os.environ.update(_SETTINGS)
        from vllm import LLM, SamplingParams, __version__

        engine = LLM(
            model=model,
            dtype="float32",
            max_num_seqs=slots,
            max_model_len=max_length,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        print(json.dumps({"version": __version__}), file=answers, flush=True)
        for line in sys.stdin:
            requests = json.loads(line)["requests"]
            prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
            params = [
                SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
                for _, length in requests
            ]
            begin, begin_cpu = time.perf_counter(), time.process_time()
            outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
            log_probs = [
                [of[token].logprob for token, of in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs
            ]
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
            result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": [len(row) for row in log_probs]}
            print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
