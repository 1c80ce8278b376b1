"""Speed of the learner's step, beside the best loop without a learner around it and what other trainers do.

One thread, one process, float32, the same random rows and weights: tokens of uneven length, all but the first of which
are actions. Contenders take turns in every round, in an order that rotates. Each makes a whole update (gradient, clip,
AdamW with a learning rate of 0, so that the weights stay), and all must find the same loss, to six digits. What is
measured is the processor time of the process: other work on the machine lengthens the long contenders more.

    trainer     `Trainer.update` with learner.token_budget=auto: it packs, counts, scores, computes advantages and
                losses, looks for numbers that are not finite, and measures
    bare        the same forward, attention and log-probabilities on rows that were packed beforehand, and backward:
                nothing else, and no entropy; at the micro-batch that is fastest here
    hf_packed   transformers' own model on packed rows with position_ids (SDPA, as FlashAttention needs a GPU), logits
                of all tokens; at the micro-batch that is fastest here
    hf_packed_2048
                the same in micro-batches of 2,048 tokens, which a learner with longer rows would need: its attention
                computes the whole micro-batch, and masks what is not of the row
    padded      transformers' own model on all rows, padded to the longest, logits of all positions: what TRL's trainers
                do where nothing else is set

Figures: `bound_fraction`, the bare loop's time over the trainer's; `ratio_hf_packed`, `ratio_hf_packed_2048` and
`ratio_padded`, theirs over the trainer's; for the 135 M model `bound_fraction_135m` alone. Medians over the rounds;
ratios are of times in the same round. Rows: tokens a second, and the micro-batch, of each contender.

With `--memory yes`: the peak resident memory of a process that makes updates of a 135 M model, 16 rows of 512 tokens in
one micro-batch of 8,192 tokens, a fifth of them actions: float32, and bfloat16 with and without activation
checkpointing and compiled layers; and of a process whose embedded engine (bfloat16) plays 32 episodes of it. Figures:
`learner_gb` (checkpointing, not compiled), `learner_gb_float32`, `checkpointing_time` (the time with over that without,
in bfloat16), `bfloat16_speed` (tokens a second over float32's), `bfloat16_nats` (mean difference of the
log-probabilities), `compiled_speed` (tokens a second over those of layers that are not), `compiled_checkpointing_time`
(the time with both over that with neither), `compiled_nats`, `actor_gb`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from impala_llm.bench._engine_work import MODELS, save_model
from impala_llm.bench.frame import BenchError, whole_number

OPTIONS = {
    "models": "5m, 135m (a quarter of an hour) or both, with commas; default 5m",
    "rounds": "measured rounds; default 5, of 135m 3",
    "padded_rounds": "rounds in which the padded contender takes part, 40 s each; default 2",
    "memory": "yes: measure memory and precision of the 135 M model instead, 10 GB and some minutes; default no",
}
NUM_ROWS = {"5m": 32, "135m": 16}
SIZES = {"5m": (1024, 2048, 4096, 1 << 20), "135m": (1024, 2048, 4096)}
"""Micro-batches that the peers may choose among, in tokens."""
_MOST = 1024
_DIGITS = 2e-6

Times = dict[str, list[float]]
"""contender -> seconds of each round that it took part in, None where it did not."""


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measure; see the module for figures and rows. BenchError where an option is malformed or a loss differs."""
    models = options.get("models", "5m").split(",")
    if unknown := [name for name in models if name not in MODELS]:
        raise BenchError(f"--models has {unknown[0]!r}: it takes {', '.join(MODELS)}, with commas between")
    rounds = whole_number("rounds", options["rounds"]) if "rounds" in options else None
    padded = whole_number("padded_rounds", options.get("padded_rounds", 2), least=0)
    if options.get("memory", "no") not in ("yes", "no"):
        raise BenchError(f"--memory is {options['memory']!r}: it takes yes or no")
    if options.get("memory") == "yes":
        from impala_llm.bench._learner_memory import measure_memory

        return measure_memory()
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for model in models:
        times, sizes, num_tokens = measure(model, rounds or (5 if model == "5m" else 3), padded)
        suffix = "" if model == "5m" else f"_{model}"
        figures |= {f"{name}{suffix}": value for name, value in figures_of(times).items()}
        rows += [{"model": model, **row} for row in rows_of(times, sizes, num_tokens)]
    return figures, rows


def lengths(num_rows: int) -> list[int]:
    """Tokens of each row: mean 300, at most 1,024, one of which has that many."""
    drawn = np.random.default_rng(0).exponential(1.0, num_rows)
    drawn = np.minimum(24 + drawn * 276 / drawn.mean(), _MOST)
    drawn[drawn.argmax()] = _MOST
    rest = np.arange(num_rows) != drawn.argmax()
    drawn[rest] *= (300 * num_rows - _MOST) / drawn[rest].sum()
    return [int(n) for n in drawn]


def measure(model: str, rounds: int, padded_rounds: int) -> tuple[Times, dict[str, int], int]:
    """Seconds of every contender in every round, the micro-batch of each in tokens, and the tokens of an update."""
    import torch

    from impala_llm.learning.policy.products import prepare_cpu

    prepare_cpu(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-learner-") as folder:
        save_model(Path(folder), model)
        contenders, sizes, num_tokens = _contenders(Path(folder), model, padded_rounds > 0)
    times: Times = {name: [] for name in contenders}
    for number in range(rounds):
        names = [name for name in contenders if name != "padded" or number < padded_rounds]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.process_time()
            contenders[name]()
            times[name].append(time.process_time() - begin)
    return times, sizes, num_tokens


def figures_of(times: Times) -> dict[str, float]:
    """The figures that the measured contenders allow."""
    names = {"bare": "bound_fraction"} | {name: f"ratio_{name}" for name in times if name not in ("trainer", "bare")}
    return {
        figure: statistics.median(theirs / ours for theirs, ours in zip(times[name], times["trainer"], strict=False))
        for name, figure in names.items()
        if times.get(name)
    }


def rows_of(times: Times, sizes: dict[str, int], num_tokens: int) -> list[dict[str, Any]]:
    """Tokens a second of each contender."""
    return [
        {
            "contender": name,
            "micro_batch": sizes[name],
            "tokens_per_s": num_tokens / statistics.median(seconds),
            "min": num_tokens / max(seconds),
            "max": num_tokens / min(seconds),
        }
        for name, seconds in times.items()
        if seconds
    ]


def _contenders(
    folder: Path, model: str, with_padded: bool
) -> tuple[dict[str, Callable[[], float]], dict[str, int], int]:
    """Contenders that all found the same loss, each at its own micro-batch; and the tokens of an update."""
    from impala_llm.bench._learner_loops import bare_loop, hf_packed, padded, rows_of_actions, trainer

    rows = rows_of_actions(folder, lengths(NUM_ROWS[model]))
    sizes: dict[str, int] = {}
    contenders: dict[str, Callable[[], float]] = {}
    contenders["trainer"], sizes["trainer"], policy = trainer(folder, rows)
    makers: dict[str, Callable[[int], Callable[[], float]]] = {"bare": lambda size: bare_loop(policy, rows, size)}
    if model == "5m":
        makers["hf_packed"] = lambda size: hf_packed(folder, rows, size)
    for name, maker in makers.items():
        seconds = {}
        for size in SIZES[model]:
            contender = maker(size)
            begin = time.process_time()
            contender()
            seconds[size] = time.process_time() - begin
        sizes[name] = min(seconds, key=lambda size: seconds[size])
        contenders[name] = maker(sizes[name])
    if model == "5m":
        contenders["hf_packed_2048"], sizes["hf_packed_2048"] = hf_packed(folder, rows, 2048), 2048
    if model == "5m" and with_padded:
        contenders["padded"], sizes["padded"] = padded(folder, rows), len(rows) * max(t.num_tokens for t in rows)
    losses = {name: contender() for name, contender in contenders.items()}
    for name, loss in losses.items():
        if abs(loss / losses["trainer"] - 1) > _DIGITS:
            raise BenchError(f"{name} has a loss of {loss:.8g}, the trainer one of {losses['trainer']:.8g}")
    return contenders, sizes, sum(t.num_tokens for t in rows)
