"""Generation speed of engines: the embedded one beside its peers, and the actor's episodes beside a bare client.

The embedded part: random models (5m: a Qwen3 of 4 layers, hidden size 256 and vocabulary 4,096; 135m: the shape of
SmolLM2-135M) answer requests without stop tokens, so that all contenders give the same number of tokens, sampled at
temperature 1, with log-probabilities returned, in float32. Every contender has a process with one thread, is warmed by
short completions, and all take turns in every round of one run, in an order that rotates. Three workloads:

    uneven              48 requests as they come: completions of 9 to 384 tokens, mean 105
    sorted              the same by length of their completions, which is unknown before they are generated
    equal               16 requests, completions of 105 tokens each: no padding at all

    embedded            `impala_llm.engines.embedded.engine`, continuous batching over --slots slots
    generate            transformers' generate, static batches of --slots requests
    continuous          transformers' continuous batching (`generate_batch`), --slots requests at a time
    vllm                vLLM for CPUs with --slots sequences, from the Python that --vllm-python names

The actor's part (`--only sglang`): --slots streams of the actor's episodes, on the toy corridor with completions of up
to 96 tokens, through the SGLang engine, beside a bare HTTP client that sends the same server the same requests, without
streaming. The server is in float32 with one thread on the CPU.

    actor               `impala_llm.rollout.play_episode` over `impala_llm.engines.sglang.engine`
    bare                aiohttp: POST /generate

Figures: `embedded_vs_<peer>`, the embedded engine's tokens a second over a peer's, of the uneven requests and the 5m
model; `embedded_vs_<peer>_<workload>_<model>` of the others; `embedded_worst`, the smallest of them: the main figure.
`actor_overhead`, the actor's tokens a second over the bare client's. They are medians of the rounds' ratios. Rows:
tokens a second of each contender, median, least and most, and per second of processor time of its own process (without
the server's).
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

from impala_llm.bench.frame import BenchError, whole_number
from impala_llm.engines.sglang.launch_args import find_python

OPTIONS = {
    "rounds": "measured rounds; default 5, and 2 of the larger model",
    "models": "5m, 135m; default both, with a comma between",
    "workloads": "uneven, sorted, equal; default all",
    "slots": "sequences at a time; default 16",
    "only": "embedded or sglang; default both",
    "vllm_python": "Python that has vLLM; default $IMPALA_LLM_VLLM_PYTHON, or this one",
    "sglang_python": "Python that has SGLang; default $IMPALA_LLM_SGLANG_PYTHON, this one, or that of .venv-sglang",
}
_PARTS = ("embedded", "sglang")
_ROUNDS = {"5m": 5, "135m": 2}
_WARM_TOKENS = 32


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures; see the module for figures and rows. BenchError where an option is malformed or a contender fails."""
    from impala_llm.bench import _engine_work as work

    num_rounds = whole_number("rounds", options["rounds"]) if "rounds" in options else None
    slots = whole_number("slots", options.get("slots", 16))
    if options.get("only", "embedded") not in _PARTS:
        raise BenchError(f"--only is {options['only']!r}: it takes embedded or sglang")
    models = _choose("models", options, work.MODELS)
    requests = {name: work.workloads()[name] for name in _choose("workloads", options, tuple(work.workloads()))}
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    only = options.get("only")
    if only != "sglang":
        python = python_with("vllm", options.get("vllm_python"))
        for model in models:
            measured, versions = measure_embedded(model, requests, num_rounds or _ROUNDS[model], slots, python)
            for workload, rounds in measured.items():
                figures.update(embedded_figures(rounds, workload, model))
                rows.extend({"model": model, "workload": workload, **row} for row in table(rounds, versions))
        figures = {"embedded_worst": min(figures.values()), **figures}
    if only != "embedded" and (python := python_with("sglang", options.get("sglang_python"))) is not None:
        from impala_llm.bench._engine_actor import measure_actor

        rounds = asyncio.run(measure_actor(python, num_rounds or _ROUNDS["5m"], slots))
        figures["actor_overhead"] = ratio(rounds, "actor", "bare")
        rows.extend(table(rounds, {}))
    return figures, rows


def left_out(options: dict[str, str]) -> list[str]:
    """List which of vllm and sglang were asked for and have no Python here."""
    wanted = {"vllm": options.get("only") != "sglang", "sglang": options.get("only") != "embedded"}
    return [name for name in wanted if wanted[name] and python_with(name, options.get(f"{name}_python")) is None]


def measure_embedded(
    model: str, workloads: dict[str, Any], num_rounds: int, slots: int, vllm_python: str | None
) -> tuple[dict[str, dict[str, list[Any]]], dict[str, str]]:
    """All contenders of the embedded part on one model: by workload, `Round`s of each; and their versions."""
    from impala_llm.bench._engine_work import MAX_LENGTH, Worker, save_model

    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-engine-") as folder, contextlib.ExitStack() as stack:
        save_model(Path(folder), model)
        arguments = [folder, str(slots), str(MAX_LENGTH)]
        ours = [sys.executable, "-m", "impala_llm.bench._engine_contenders"]
        commands = {name: [*ours, name, *arguments] for name in ("embedded", "generate", "continuous")}
        if vllm_python is not None:
            program = Path(__file__).with_name("_engine_vllm.py")
            commands["vllm"] = [vllm_python, str(program), "vllm", *arguments]
        workers = {name: stack.enter_context(Worker(name, command)) for name, command in commands.items()}
        rounds: dict[str, dict[str, list[Any]]] = {w: {name: [] for name in workers} for w in workloads}
        names = list(workers)
        for workload, requests in workloads.items():
            for name in names:
                workers[name].play([(prompt, min(length, _WARM_TOKENS)) for prompt, length in requests[:slots]])
            for index in range(num_rounds):
                start = index % len(names)
                for name in names[start:] + names[:start]:
                    rounds[workload][name].append(workers[name].play(requests))
        return rounds, {name: worker.version for name, worker in workers.items()}


def embedded_figures(rounds: dict[str, list[Any]], workload: str, model: str) -> dict[str, float]:
    """The embedded engine's tokens a second over each peer's."""
    suffix = "" if (workload, model) == ("uneven", "5m") else f"_{workload}_{model}"
    return {f"embedded_vs_{name}{suffix}": ratio(rounds, "embedded", name) for name in rounds if name != "embedded"}


def _choose(key: str, options: dict[str, str], known: tuple[str, ...]) -> list[str]:
    chosen = options[key].split(",") if key in options else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise BenchError(f"--{key} has {unknown[0]!r}: it takes {', '.join(known)}, with commas between")
    return chosen


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
    ratios: list[float] = [
        (our.tokens / our.seconds) / (their.tokens / their.seconds)
        for our, their in zip(rounds[ours], rounds[theirs], strict=True)
    ]
    return statistics.median(ratios)


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
