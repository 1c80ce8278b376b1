"""Speed of weights from the learner's tensors to a reader's own, beside other transports and the memory's limit.

Two processes, one thread each; all contenders in turn in every round of one run, in an order that rotates. The time of
a contender is the writer's part plus the reader's, without the time in which the reader learns of a version; where both
sides work at once (gloo, zmq), from the first start to the last end. Each is checked once, before the rounds that
count: all tensors arrived, by the checksums of their bytes.

    bound_whole         memcpy into resident shared memory and out of it, all tensors at once
    bound_tensors       the same, tensor by tensor. The faster of the two is the bound; ours may be faster yet where
                        memcpy does not store past the caches, as ours does
    ours                publish, and a verified copy into the reader's tensors
    ours_mapped         publish, and a verified read in place, without a copy
    safetensors         save_file to /dev/shm, safe_open, copy into the reader's tensors
    torch_mmap          torch.save to /dev/shm, into a file that stays; torch.load(mmap=True), copy
    gloo                torch.distributed broadcast of all tensors in one bucket
    zmq                 all tensors in one frame over ipc, copied once

What a peer makes anew and removes, its file or its mapping, it removes off the clock. Neither gloo nor zmq pays for
bringing the tensors together: they lie so.

Figures, for each size in MB (10^6 bytes): `ratio_<MB>`, the time of the fastest peer over ours, and `ratio_worst`, the
smallest of these: the main figure; `ratio_<peer>_<MB>`, of each; `bound_fraction_<MB>`, the bound's time over ours;
`publish_ms_<MB>`, `read_ms_<MB>` and `mapped_read_ms_<MB>`. All are medians over the rounds; ratios are of times in the
same round. Rows: milliseconds of each contender, median, least and most.

With `--bfloat16 yes`: publishing of a model of the shape of SmolLM2-135M, whose weights are float32, in bfloat16, 269
MB: by one rank with one thread; `_threads`, by one with a thread on each core; `_fsdp2`, by two ranks that share the
policy, one thread each. Figures: `bound_fraction_bfloat16`, the time in which one thread copies as many bytes from
memory into resident shared memory, over that of the publishing; `publish_ms_bfloat16`, which begins with the end of a
step and ends when all ranks continue; `held_ms_bfloat16`, until another process has a verified copy. The bound reads
half as many bytes as the publishing does. Rows: milliseconds; `copy_together_ms` is the bound by as many threads and
ranks.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from impala_llm.bench.frame import BenchError, whole_number

OPTIONS = {
    "megabytes": "sizes in 10^6 bytes, with commas; default 25,500",
    "rounds": "measured rounds; default 5, and 2 above 1000 MB",
    "bfloat16": "yes: measure the publishing of a 135 M model in bfloat16 instead, 4 GB; default no",
}
PEERS = ("torch", "safetensors")

_SHARED_MEMORY = Path("/dev/shm")
_FILES_AT_ONCE = 5  # the bound's, two slots of ours, and those of two peers
_NO_PEERS = ("bound_whole", "bound_tensors", "ours", "ours_mapped")
_SIDE_TIMEOUT_S = 300.0

Times = dict[str, list[tuple[float, float, float]]]
"""contender -> (total, writer's part, reader's part) of each round, seconds."""


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures each size; see the module for figures and rows. BenchError where an option is malformed, shared memory
    is short, or a contender delivers wrong bytes."""
    sizes = [whole_number("megabytes", size) for size in options.get("megabytes", "25,500").split(",")]
    num_rounds = whole_number("rounds", options["rounds"]) if "rounds" in options else None
    if options.get("bfloat16", "no") not in ("yes", "no"):
        raise BenchError(f"--bfloat16 is {options['bfloat16']!r}: it takes yes or no")
    if options.get("bfloat16") == "yes":
        from impala_llm.bench._weight_export import measure_export

        return measure_export(num_rounds or 9)
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for megabytes in sizes:
        times = measure(megabytes, num_rounds or (5 if megabytes <= 1000 else 2))
        figures.update(figures_of(times, megabytes))
        rows.extend(_rows(times, megabytes))
    worst = min(figures[f"ratio_{megabytes}"] for megabytes in sizes)
    return {"ratio_worst": worst, **figures}, rows


def measure(megabytes: int, num_rounds: int) -> Times:
    """Runs all contenders on weights of one size, in two processes that are gone afterwards, as are their files."""
    from impala_llm.bench._weight_peers import run_side

    needed = _FILES_AT_ONCE * megabytes * 1_000_000
    if (free := shutil.disk_usage(_SHARED_MEMORY).free) < needed:
        raise BenchError(f"{_SHARED_MEMORY} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed: free some")
    context = multiprocessing.get_context("spawn")
    link, far_link = context.Pipe()
    results, far_results = context.Pipe(duplex=False)
    processes = []
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY, prefix="impala_llm-bench-weights-") as folder:
        try:
            for role, ends in (("writer", (link, None)), ("reader", (far_link, far_results))):
                process = context.Process(target=run_side, args=(role, *ends, folder, megabytes, num_rounds))
                process.start()
                processes.append(process)
            # Only the children hold these ends now: when one dies, the other and this process see the pipe close.
            for end in (link, far_link, far_results):
                end.close()
            return _receive(results)
        finally:
            for process in processes:
                process.terminate()
                process.join()
            results.close()


def _receive(results: Connection) -> Times:
    try:
        if not results.poll(_SIDE_TIMEOUT_S):
            raise BenchError(f"no result after {_SIDE_TIMEOUT_S:.0f} s: a contender hangs")
        times: Times | str = results.recv()
    except EOFError as error:
        raise BenchError("a process of the benchmark died: the end of its output is above") from error
    if isinstance(times, str):
        raise BenchError(times)
    return times


def figures_of(times: Times, megabytes: int) -> dict[str, float]:
    def median(contender: str, part: int) -> float:
        return statistics.median(parts[part] for parts in times[contender])

    def ratio(contender: str) -> float:
        return statistics.median(
            theirs[0] / ours[0] for theirs, ours in zip(times[contender], times["ours"], strict=True)
        )

    bound = min(("bound_whole", "bound_tensors"), key=lambda name: median(name, 0))
    ratios = {peer: ratio(peer) for peer in times if peer not in _NO_PEERS}
    return {
        f"ratio_{megabytes}": min(ratios.values()),
        **{f"ratio_{peer}_{megabytes}": value for peer, value in ratios.items()},
        f"bound_fraction_{megabytes}": ratio(bound),
        f"publish_ms_{megabytes}": 1000 * median("ours", 1),
        f"read_ms_{megabytes}": 1000 * median("ours", 2),
        f"mapped_read_ms_{megabytes}": 1000 * median("ours_mapped", 2),
    }


def _rows(times: Times, megabytes: int) -> list[dict[str, Any]]:
    rows = []
    for contender, rounds in times.items():
        totals = [1000 * parts[0] for parts in rounds]
        rows.append(
            {
                "megabytes": megabytes,
                "contender": contender,
                "median_ms": statistics.median(totals),
                "min_ms": min(totals),
                "max_ms": max(totals),
                "write_ms": 1000 * statistics.median(parts[1] for parts in rounds),
                "read_ms": 1000 * statistics.median(parts[2] for parts in rounds),
            }
        )
    return rows
