"""Publishing of a 135 M model in bfloat16: the processes of a learner's ranks, and one that reads.

Invariant: the ranks begin the next version only when the reader holds the last one, so nothing else is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from impala_llm.bench._engine_work import save_model
from impala_llm.bench.frame import BenchError
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.publishing import write_to_board
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WEIGHTS_FILE, WeightPublisher, WeightReader
from impala_llm.processes.supervised import RENDEZVOUS

_SHARED_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 2_000_000_000  # the model, two slots, what the bound is copied into
_SLOTS = 2
_TIMEOUT_S = 300.0
_POLL_S = 0.0005

Rounds = list[dict[str, float]]
"""Seconds of each round, by part: copy, copy_together, publish, held."""


def measure_export(num_rounds: int, model: str = "135m") -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures and rows of one rank with one thread and with one on each core, and of two ranks that share the policy.

    Args:
        model: one of `_engine_work.MODELS`.

    Raises:
        BenchError: shared memory is short, a process dies, or what is published is not the policy.
    """
    if (free := shutil.disk_usage(_SHARED_MEMORY).free) < _NEEDED_BYTES:
        raise BenchError(
            f"{_SHARED_MEMORY} has {free / 1e9:.1f} GB free, {_NEEDED_BYTES / 1e9:.1f} GB are needed: free some"
        )
    figures: dict[str, float] = {}
    rows = []
    cores = len(os.sched_getaffinity(0))
    for name, num_ranks, num_threads in (("", 1, 1), ("_threads", 1, cores), ("_fsdp2", 2, 1)):
        with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY, prefix="impala_llm-bench-weights-") as folder:
            save_model(Path(folder) / "model", model)
            rounds = _measure(Path(folder), num_ranks, num_threads, num_rounds)
        figures |= figures_of(rounds, name)
        medians = {f"{part}_ms": 1000 * statistics.median(r[part] for r in rounds) for part in rounds[0]}
        rows.append({"contender": f"bfloat16{name}", "ranks": num_ranks, "threads": num_threads, **medians})
    return figures, rows


def figures_of(rounds: Rounds, name: str) -> dict[str, float]:
    """Figures of ranks whose name goes behind those of the figures."""
    return {
        f"bound_fraction_bfloat16{name}": statistics.median(r["copy"] / r["publish"] for r in rounds),
        f"publish_ms_bfloat16{name}": 1000 * statistics.median(r["publish"] for r in rounds),
        f"held_ms_bfloat16{name}": 1000 * statistics.median(r["held"] for r in rounds),
    }


def _measure(folder: Path, num_ranks: int, num_threads: int, num_rounds: int) -> Rounds:
    context = multiprocessing.get_context("spawn")
    results, far_results = context.Pipe(duplex=False)
    link, far_link = context.Pipe(duplex=False)
    total = _SLOTS + num_rounds
    reader = context.Process(target=_read, args=(folder / "board", total, far_link))
    ranks = [
        context.Process(
            target=_run_rank,
            args=(rank, num_ranks, num_threads, folder, total, *((link, far_results) if rank == 0 else (None, None))),
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in (reader, *ranks):
            process.start()
        # Only the children hold these ends now: when one dies, the others and this process see the pipe close.
        for end in (link, far_link, far_results):
            end.close()
        if not results.poll(_TIMEOUT_S):
            raise BenchError(f"no result after {_TIMEOUT_S:.0f} s: a rank hangs")
        found = results.recv()
    except EOFError as error:
        raise BenchError("a process of the benchmark died: the end of its output is above") from error
    finally:
        for process in (reader, *ranks):
            if process.pid is not None:
                process.terminate()
                process.join()
        results.close()
    if isinstance(found, str):
        raise BenchError(found)
    rounds: Rounds = found[_SLOTS:]  # before that, memory of the slots is mapped by each rank
    return rounds


def _read(board: Path, num_versions: int, link: Connection) -> None:
    """The reader: copies each version into tensors of its own, and says when it holds it."""
    reader = WeightReader(board)
    targets: dict[str, np.ndarray] = {}
    for version in range(num_versions):
        while reader.latest() != version:
            time.sleep(_POLL_S)
        with reader.lease(version) as lease:
            if not targets:
                targets = {name: np.zeros(data.size, np.uint8) for name, (_, _, data) in lease.tensors().items()}
            lease.copy_into(targets)
        link.send(time.monotonic())


def _run_rank(
    rank: int,
    num_ranks: int,
    num_threads: int,
    folder: Path,
    num_versions: int,
    link: Connection | None,
    results: Connection | None,
) -> None:
    """A rank: changes its weights, as a step does, and publishes them. link: from the reader, for rank 0."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), RENDEZVOUS: f"file://{folder / 'ranks'}"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(num_threads)
    model = PolicyModel.from_pretrained(folder / "model")
    ranks = Ranks("cpu", _TIMEOUT_S, "fsdp2" if num_ranks > 1 else "replicated")
    ranks.place(model)
    export, board = PolicyExport(model, ranks), WeightPublisher(folder / "board", _SLOTS)
    publish = partial(write_to_board, board, 60.0, export, torch.bfloat16, ranks.is_main, model)
    if ranks.is_main:
        board.reserve(export.tensors(torch.bfloat16))
        (folder / "bound").write_bytes(bytes((folder / "board" / "slot-0" / WEIGHTS_FILE).stat().st_size))
    ranks.barrier()
    shared = np.memmap(folder / "bound", np.uint8, "r+")
    memory = np.ones(shared.size, np.uint8)
    parts = [(i * memory.size) // (num_ranks * num_threads) for i in range(num_ranks * num_threads + 1)]

    def copy(part: int) -> None:
        np.copyto(shared[parts[part] : parts[part + 1]], memory[parts[part] : parts[part + 1]])

    rounds: Rounds = []
    with ThreadPoolExecutor(num_threads) as pool, torch.no_grad():
        for version in range(num_versions):
            if ranks.is_main:
                begin = time.monotonic()
                np.copyto(shared, memory)
                copied = time.monotonic()
            ranks.barrier()
            together = time.monotonic()
            list(pool.map(copy, range(rank * num_threads, (rank + 1) * num_threads)))
            ranks.barrier()
            copied_together = time.monotonic()
            _ = [p.mul_(1.0 + 2.0**-9) for p in model.parameters()]
            ranks.barrier()
            stepped = time.monotonic()
            publish(version)
            ranks.barrier()
            published = time.monotonic()
            if link is not None:
                rounds.append(
                    {
                        "copy": copied - begin,
                        "copy_together": copied_together - together,
                        "publish": published - stepped,
                        "held": link.recv() - stepped,
                    }
                )
    wrong = _differing(model, folder / "board", num_versions - 1)
    if results is not None:
        results.send(f"{wrong} was published wrongly" if wrong else rounds)
    ranks.close()


def _differing(model: PolicyModel, board: Path, version: int) -> str | None:
    """Name of a tensor whose published bytes are not those that torch makes of it. All ranks call it."""
    with WeightReader(board).lease(version) as lease:
        found = load_file(lease.path / WEIGHTS_FILE)
    for name, p in model.lm.named_parameters():
        whole: Any = p.full_tensor() if hasattr(p, "full_tensor") else p
        if not torch.equal(whole.detach().to(torch.bfloat16), found[name]):
            return name
    return None
