"""Memory and precision of learner and embedded engine with a 135 M model, each measured in a process of its own.

    python -m impala_llm.bench._learner_memory learner FOLDER PRECISION CHECKPOINTING COMPILED     or     engine FOLDER

prints one JSON object. Times are of the processor. Peak memory is the system's own figure for the process (ru_maxrss),
files that it maps included.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from impala_llm.bench._engine_work import save_model
from impala_llm.bench.frame import BenchError
from impala_llm.processes.supervised import ALLOCATOR, HUGE_PAGES

LEARNERS = (
    ("float32", "0", "false"),
    ("bfloat16", "0", "false"),
    ("bfloat16", "1", "false"),
    ("bfloat16", "0", "true"),
    ("bfloat16", "1", "true"),
)
"""learner.precision, learner.activation_checkpointing and learner.compile_layers of each."""
_ROW, _BUDGET = 512, 8192
_ACTIONS = 0.2
_UPDATES = 3
_EPISODES = 32


def measure_memory() -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures and rows of `--memory`, see `bench.learner`."""
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-learner-") as folder:
        save_model(Path(folder), "135m")
        learners = [_in_process("learner", folder, *settings) for settings in LEARNERS]
        engine = _in_process("engine", folder)
    exact, plain, checkpointed, compiled, both = learners
    scores = [np.array(found.pop("log_probs")) for found in learners]
    figures = {
        "learner_gb": checkpointed["peak_gb"],
        "learner_gb_float32": exact["peak_gb"],
        "checkpointing_time": checkpointed["seconds"] / plain["seconds"],
        "bfloat16_speed": exact["seconds"] / plain["seconds"],
        "bfloat16_nats": float(np.abs(scores[1] - scores[0]).mean()),
        "compiled_speed": plain["seconds"] / compiled["seconds"],
        "compiled_checkpointing_time": both["seconds"] / plain["seconds"],
        "compiled_nats": float(np.abs(scores[3] - scores[1]).mean()),
        "actor_gb": engine["peak_gb"],
    }
    rows = [
        {
            "process": "learner",
            "precision": precision,
            "activation_checkpointing": every,
            "compiled": is_compiled,
            **found,
        }
        for (precision, every, is_compiled), found in zip(LEARNERS, learners, strict=True)
    ]
    return figures, [*rows, {"process": "actor", "precision": "bfloat16", **engine}]


def _in_process(*arguments: str) -> dict[str, Any]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, **ALLOCATOR, "HF_HUB_OFFLINE": "1"}  # as the supervisor does
    if arguments[0] == "learner" and arguments[3] != "0":
        environment[HUGE_PAGES] = "1"
    command = [sys.executable, "-m", "impala_llm.bench._learner_memory", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _learner(folder: Path, precision: str, every: str, is_compiled: str) -> dict[str, Any]:
    """Updates in one micro-batch, after one that does not count."""
    from impala_llm.bench._learner_loops import rows_of_actions, trainer
    from impala_llm.learning.packing import pack
    from impala_llm.learning.policy.products import prepare_cpu
    from impala_llm.learning.scoring import action_log_probs

    prepare_cpu(1)
    rows = rows_of_actions(folder, [_ROW] * (_BUDGET // _ROW), _ACTIONS, scored=False)
    words = [f"learner.token_budget={_BUDGET}", f"learner.precision={precision}"]
    words += [f"learner.activation_checkpointing={every}", f"learner.compile_layers={is_compiled}"]
    update, _, model = trainer(folder, rows, *words)
    seconds = []
    for _ in range(_UPDATES):
        begin = time.process_time()
        update()
        seconds.append(time.process_time() - begin)
    peak = _peak_gb()
    log_probs = action_log_probs(model, pack(rows[:2], _BUDGET)[0], 1.0)
    return {
        "peak_gb": peak,
        "seconds": statistics.median(seconds),
        "tokens_per_s": _BUDGET / statistics.median(seconds),
        "log_probs": log_probs.tolist(),
    }


def _engine(folder: Path) -> dict[str, Any]:
    """Episodes of some 512 tokens in turns, as many at once as there are."""
    import torch

    from impala_llm.engines.base import SamplingParams
    from impala_llm.engines.embedded.engine import TorchEngine

    torch.set_num_threads(1)
    engine = TorchEngine.from_pretrained(folder, dtype=torch.bfloat16, max_sessions=_EPISODES, max_length=2048)

    async def play(number: int) -> None:
        history = np.random.default_rng(number).integers(0, engine.vocab_size, _ROW - 80).tolist()
        for _ in range(2):
            completion = await engine.generate(str(number), history, SamplingParams(max_new_tokens=20))
            history += [*completion.tokens.tolist(), *range(20)]

    async def all_of_them() -> None:
        await engine.start()
        await asyncio.gather(*(play(number) for number in range(_EPISODES)))

    begin = time.process_time()
    asyncio.run(all_of_them())
    return {"peak_gb": _peak_gb(), "seconds": time.process_time() - begin}


if __name__ == "__main__":
    parts: dict[str, Callable[..., dict[str, Any]]] = {"learner": _learner, "engine": _engine}
    print(json.dumps(parts[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
