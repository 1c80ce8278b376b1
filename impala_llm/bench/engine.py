"""How fast engines generate: the embedded one beside its peers, and the actor's episodes beside a bare client.

The embedded part: a random Qwen3 of 4 layers, hidden size 256 and vocabulary 4,096 answers 48 requests of uneven length
(mean 105, at most 384 tokens; no stop tokens, so that all contenders give the same number), sampled at temperature 1,
with log-probabilities returned, in float32. Every contender has a process with one thread, is warmed by one round, and
all take turns in every round of one run, in an order that rotates.

    embedded            `impala_llm.engines.torch_engine`, continuous batching over --slots slots
    generate            transformers' generate, static batches of --slots requests
    vllm                vLLM for CPUs with --slots sequences, from the Python that --vllm-python names

The actor's part (`--only sglang`): --slots streams of the actor's episodes, on the toy corridor with answers of up to
96 tokens, through the SGLang engine, beside a bare HTTP client that sends the same server the same requests, without
streaming. The server is in float32 with one thread on the CPU.

    actor               `impala_llm.rollout.play_episode` over `impala_llm.engines.sglang_engine`
    bare                aiohttp: POST /generate

Figures: `actor_overhead`, the actor's tokens a second over the bare client's; `embedded_vs_generate` and
`embedded_vs_vllm`, the embedded engine's over theirs. They are medians of the rounds' ratios. Rows: tokens a second of
each contender, median, least and most, and per second of processor time of its own process (without the server's).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from impala_llm.bench.frame import BenchError
from impala_llm.engines.sglang_settings import find_python

OPTIONS = {
    "rounds": "measured rounds; default 5",
    "slots": "sequences at a time; default 16",
    "only": "embedded or sglang; default both",
    "vllm_python": "Python that has vLLM; default $IMPALA_LLM_VLLM_PYTHON, or this one",
    "sglang_python": "Python that has SGLang; default $IMPALA_LLM_SGLANG_PYTHON, this one, or that of .venv-sglang",
}
_PARTS = ("embedded", "sglang")


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures; see the module for figures and rows. BenchError where an option is malformed or a contender fails."""
    try:
        num_rounds, slots = int(options.get("rounds", 5)), int(options.get("slots", 16))
    except ValueError as error:
        raise BenchError(f"--rounds and --slots take whole numbers: {error}") from error
    if num_rounds < 1 or slots < 1:
        raise BenchError(f"--rounds is {num_rounds} and --slots {slots}: both must be >= 1")
    if options.get("only", "embedded") not in _PARTS:
        raise BenchError(f"--only is {options['only']!r}: it takes embedded or sglang")
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    only = options.get("only")
    if only != "sglang":
        python = python_with("vllm", options.get("vllm_python"))
        rounds, versions = measure_embedded(num_rounds, slots, python)
        figures.update(
            {f"embedded_vs_{name}": ratio(rounds, "embedded", name) for name in rounds if name != "embedded"}
        )
        rows.extend(table(rounds, versions))
    if only != "embedded" and (python := python_with("sglang", options.get("sglang_python"))) is not None:
        from impala_llm.bench._engine_actor import measure_actor

        rounds = asyncio.run(measure_actor(python, num_rounds, slots))
        figures["actor_overhead"] = ratio(rounds, "actor", "bare")
        rows.extend(table(rounds, {}))
    return figures, rows


def left_out(options: dict[str, str]) -> list[str]:
    """Of vllm and sglang those that were asked for and have no Python here."""
    wanted = {"vllm": options.get("only") != "sglang", "sglang": options.get("only") != "embedded"}
    return [name for name in wanted if wanted[name] and python_with(name, options.get(f"{name}_python")) is None]


def measure_embedded(
    num_rounds: int, slots: int, vllm_python: str | None
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """All contenders of the embedded part: `Round`s of each, and their versions."""
    from impala_llm.bench._engine_work import MAX_LENGTH, Worker, save_model, uneven_requests

    requests = uneven_requests()
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-engine-") as folder, contextlib.ExitStack() as stack:
        save_model(Path(folder))
        arguments = [folder, str(slots), str(MAX_LENGTH)]
        ours = [sys.executable, "-m", "impala_llm.bench._engine_contenders"]
        commands = {name: [*ours, name, *arguments] for name in ("embedded", "generate")}
        if vllm_python is not None:
            program = Path(__file__).with_name("_engine_vllm.py")
            commands["vllm"] = [vllm_python, str(program), "vllm", *arguments]
        workers = {name: stack.enter_context(Worker(name, command)) for name, command in commands.items()}
        rounds: dict[str, list[Any]] = {name: [] for name in workers}
        for worker in workers.values():
            worker.play(requests)
        names = list(workers)
        for index in range(num_rounds):
            start = index % len(names)
            for name in names[start:] + names[:start]:
                rounds[name].append(workers[name].play(requests))
        return rounds, {name: worker.version for name, worker in workers.items()}


def python_with(module: str, named: str | None) -> str | None:
    """The interpreter that has a module: the one named by the option or the environment, or this one; None, and a
    sentence on stderr, where this one lacks it. BenchError where one was named and lacks it."""
    option, variable = f"--{module}-python", f"IMPALA_LLM_{module.upper()}_PYTHON"
    named = named or os.environ.get(variable)
    python = named or (find_python() if module == "sglang" else sys.executable)
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise BenchError(f"{option} is {python}, which does not start: {error}") from error
    if found:
        return python
    if named:
        raise BenchError(f"{python} has no module {module}: install it there, or name another with {option}")
    print(f"{module} is left out: name a Python that has it with {option} or ${variable}", file=sys.stderr)
    return None


def ratio(rounds: dict[str, list[Any]], ours: str, theirs: str) -> float:
    """Tokens a second of one contender over another's, median over the rounds, from their `Round`s."""
    return statistics.median(
        (our.tokens / our.seconds) / (their.tokens / their.seconds)
        for our, their in zip(rounds[ours], rounds[theirs], strict=True)
    )


def table(rounds: dict[str, list[Any]], versions: dict[str, str]) -> list[dict[str, Any]]:
    """The rows, from the `Round`s of each contender."""
    rows = []
    for name, played in rounds.items():
        rates = [round_.tokens / round_.seconds for round_ in played]
        rows.append(
            {
                "contender": name,
                "version": versions.get(name),
                "tokens_per_s": statistics.median(rates),
                "min": min(rates),
                "max": max(rates),
                "tokens_per_cpu_s": statistics.median(round_.tokens / round_.cpu_seconds for round_ in played),
            }
        )
    return rows
