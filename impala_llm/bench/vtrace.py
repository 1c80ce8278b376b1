"""Speed of V-trace, beside torchrl's estimator and rlax under jit: one thread, all contenders in one run.

A process of its own, held to one core, so that whatever thread pools the contenders have, they share that core. They
take turns in every round, in an order that rotates, and each gets float32, tensors that are already its own, and the
layout of its own library. Before the rounds that count each is run, which compiles it, and compared with ours. What is
compared is the processor time of the process: other work on the machine lengthens the long calls more than the short.

    ours            `vtrace` on [T, 64], time first
    torchrl         `vtrace_advantage_estimate` on [64, T, 1]: a loop over time in Python, so its long rows measure the
                    interpreter
    rlax            `vtrace_td_error_and_advantage` on [64, T], over rows by vmap and compiled by jit, exp included;
                    time first it takes four times as long. The compiled function returns what ours does, the targets
                    and the advantages, so that its third result, the Q-values, is not computed
    ours_packed     `vtrace_packed` on 64 rows of uneven length, T on average, laid end to end

Figures, for each T: `ratio_<peer>_<T>`, a peer's time over ours; `packed_ms_<T>`, of ours_packed; `ratio_worst`, the
smallest of the ratios: the main figure. Medians over the rounds; ratios are of times in the same round. Rows:
milliseconds a call of each contender, of the processor and on the clock.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from impala_llm.bench.frame import BenchError, whole_number

OPTIONS = {
    "steps": "T, steps of a padded row, with commas; default 64,256,4096",
    "rows": "rows; default 64",
    "rounds": "measured rounds; default 30",
}
PEERS = ("torchrl", "rlax")

_AT_LEAST_S = 0.01
_DISCOUNT = 0.99

Times = dict[str, list[tuple[float, float]]]
"""contender -> seconds a call of each round: of the processor, on the clock."""


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures all that is installed; see the module for figures and rows. BenchError where an option is malformed, or
    a contender computes something else than ours."""
    steps = [whole_number("steps", number) for number in options.get("steps", "64,256,4096").split(",")]
    rows = whole_number("rows", options.get("rows", 64))
    rounds = whole_number("rounds", options.get("rounds", 30))
    figures: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for number in steps:
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                times = pool.submit(measure, number, rows, rounds).result()
            except BrokenProcessPool as error:
                raise BenchError("the process of the benchmark died: the end of its output is above") from error
        figures |= figures_of(times, number)
        table += rows_of(times, number)
    if ratios := [value for name, value in figures.items() if name.startswith("ratio_")]:
        figures = {"ratio_worst": min(ratios), **figures}
    return figures, table


def measure(steps: int, rows: int, rounds: int) -> Times:
    """Times of all contenders that are installed. Holds this process to one core, for good."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    contenders = _contenders(steps, rows)
    calls = {}
    for name, contender in contenders.items():
        start = time.perf_counter()
        contender()
        calls[name] = max(1, math.ceil(_AT_LEAST_S / (time.perf_counter() - start)))
    times: Times = {name: [] for name in contenders}
    names = list(contenders)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(calls[name]):
                contenders[name]()
            seconds = (time.process_time() - processor, time.perf_counter() - clock)
            times[name].append((seconds[0] / calls[name], seconds[1] / calls[name]))
    return times


def figures_of(times: Times, steps: int) -> dict[str, float]:
    """The figures that the measured contenders allow."""
    figures = {f"packed_ms_{steps}": 1000 * statistics.median(processor for processor, _ in times["ours_packed"])}
    for peer in PEERS:
        if peer in times:
            pairs = zip(times[peer], times["ours"], strict=True)
            figures[f"ratio_{peer}_{steps}"] = statistics.median(theirs[0] / ours[0] for theirs, ours in pairs)
    return figures


def rows_of(times: Times, steps: int) -> list[dict[str, Any]]:
    """Milliseconds a call of each contender."""
    rows = []
    for name, rounds in times.items():
        processor, clock = zip(*rounds, strict=True)
        rows.append(
            {
                "steps": steps,
                "contender": name,
                "ms": 1000 * statistics.median(processor),
                "least_ms": 1000 * min(processor),
                "most_ms": 1000 * max(processor),
                "clock_ms": 1000 * statistics.median(clock),
            }
        )
    return rows


def _contenders(steps: int, rows: int) -> dict[str, Callable[[], object]]:
    """Compiled, and equal to ours."""
    import torch

    from impala_llm.algorithms.vtrace import vtrace, vtrace_packed

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    log_rhos, rewards, values = (torch.randn(rows, steps, generator=generator) for _ in range(3))
    log_rhos *= 0.1
    bootstrap = torch.randn(rows, generator=generator)
    padded_log_rhos, padded_rewards, padded_values = (x.T.contiguous() for x in (log_rhos, rewards, values))
    padded = (padded_log_rhos, torch.full_like(padded_values, _DISCOUNT), padded_rewards, padded_values, bootstrap)

    weights = 0.05 + torch.rand(rows, generator=generator)
    lengths = (weights / weights.sum() * steps * rows).long()
    lengths[-1] += steps * rows - lengths.sum()
    num_packed = int(lengths.sum())
    segment_ids = torch.repeat_interleave(torch.arange(rows), lengths)
    packed_log_rhos, packed_rewards, packed_values = (torch.randn(num_packed, generator=generator) for _ in range(3))
    packed_discounts = torch.full_like(packed_values, _DISCOUNT)
    packed = (0.1 * packed_log_rhos, packed_discounts, packed_rewards, packed_values, bootstrap, segment_ids)

    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: vtrace(*padded),
        "ours_packed": lambda: vtrace_packed(*packed),
    }
    makers = {"torchrl": _torchrl, "rlax": _rlax}
    results = {}
    for peer in PEERS:
        if importlib.util.find_spec(peer) is not None:
            contenders[peer], results[peer] = makers[peer](log_rhos, rewards, values, bootstrap)
    for contender in contenders.values():
        contender()
    ours = [x.T for x in vtrace(*padded)]
    for peer, result in results.items():
        for name, mine, theirs in zip(("vs", "pg_advantages"), ours, result(), strict=True):
            if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3):
                raise BenchError(f"{peer} differs from ours in {name} by {float((mine - theirs).abs().max()):.3g}")
    return contenders


def _torchrl(log_rhos: Any, rewards: Any, values: Any, bootstrap: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import torch
    from torchrl.objectives.value.functional import vtrace_advantage_estimate

    following = torch.cat([values[:, 1:], bootstrap[:, None]], dim=1)
    inputs = [x[..., None].contiguous() for x in (log_rhos, torch.zeros_like(values), values, following, rewards)]
    never = torch.zeros_like(inputs[0], dtype=torch.bool)

    def contender() -> Any:
        return vtrace_advantage_estimate(_DISCOUNT, *inputs, done=never, terminated=never)

    def result() -> Any:
        advantages, vs = contender()
        return vs[..., 0], advantages[..., 0]

    return contender, result


def _rlax(log_rhos: Any, rewards: Any, values: Any, bootstrap: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    import rlax
    import torch

    def estimate(log_rho: Any, discount: Any, reward: Any, value: Any, following: Any) -> Any:
        out = rlax.vtrace_td_error_and_advantage(value, following, reward, discount, jax.numpy.exp(log_rho))
        return out.errors + value, out.pg_advantage

    following = torch.cat([values[:, 1:], bootstrap[:, None]], dim=1)
    tensors = (log_rhos, torch.full_like(values, _DISCOUNT), rewards, values, following)
    inputs = [jax.numpy.asarray(x.numpy()) for x in tensors]
    over_rows = jax.jit(jax.vmap(estimate))

    def contender() -> Any:
        return jax.block_until_ready(over_rows(*inputs))

    def result() -> Any:
        return [torch.from_numpy(np.array(x)) for x in contender()]

    return contender, result
