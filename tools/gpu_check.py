"""The table of tools/gpu_check.sh. Each part of _gpu_check_parts.py has a process of its own and a time limit: one that
crashes, hangs or runs out of memory fails alone.

    PART           WHAT IS COMPARED                                     RESULT     FIGURE
    engine         embedded engine = plain forward                      pass       2.1e-07 nats apart on average
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from impala_llm.engines.sglang.launch_args import find_python
from impala_llm.gpus import visible_gpus


@dataclass(frozen=True)
class Part:
    """A row of the table."""

    what: str
    num_gpus: int = 1
    """GPUs that it needs with `--device cuda`; on the CPU all parts run."""
    needs_sglang: bool = False
    limit_s: float = 600.0


PARTS = {
    "engine": Part("embedded engine = plain forward"),
    "packed": Part("packed attention = padded, with gradients"),
    "bfloat16": Part("bfloat16 log-probabilities = float32"),
    "ranks": Part("2 ranks = 1 rank, after 5 updates", 2),
    "fsdp2": Part("FSDP2, and with CPU offload = replicated"),
    "sglang-disk": Part("SGLang, weights by the board", 2, needs_sglang=True, limit_s=1200),
    "sglang-group": Part("SGLang, weights by process group", 2, needs_sglang=True, limit_s=1200),
    "checkpoint": Part("updates made again = before the kill"),
    "speed": Part("learner: tokens a second, MFU"),
    "idle": Part("a short run: idle shares"),
}


def main(argv: Sequence[str]) -> int:
    """Print the table. Returns 1 where a part has failed."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.sh", description="Compares and measures on this host's GPUs."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", type=Path, help="Hugging Face directory for `speed`; default: random weights")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16, dense; default: what is known of the GPU")
    parser.add_argument("--sglang-python", help="interpreter that has SGLang; default: the one that a run would take")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    num_gpus = 0 if options.device == "cpu" else len(visible_gpus())
    sglang = find_sglang(options.sglang_python)
    if not options.json:
        where = "CPU" if options.device == "cpu" else f"{num_gpus} GPUs"
        print(f"{'PART':13} {'WHAT IS COMPARED':42} {'RESULT':8} FIGURE ({where})", flush=True)
    has_failed = False
    for name in options.parts or PARTS:
        part = PARTS[name]
        if options.device == "cuda" and num_gpus < part.num_gpus:
            gpus = "a GPU" if part.num_gpus == 1 else f"{part.num_gpus} GPUs"
            result, figure = "skipped", f"needs {gpus}, and there are {num_gpus}: --device cpu tries it without"
        elif part.needs_sglang and sglang is None:
            result, figure = "skipped", "needs SGLang: pip install -e '.[sglang]', or tools/install_sglang_cpu.sh"
        else:
            settings = {
                "device": options.device,
                "num_ranks": 1 if options.device == "cuda" and num_gpus == 1 else 2,
                "model": options.model and str(options.model),
                "peak_tflops": options.peak_tflops,
                "sglang_python": sglang,
            }
            result, figure = run_part(name, settings, part.limit_s)
        has_failed |= result == "FAIL"
        if options.json:
            print(json.dumps({"part": name, "what": part.what, "result": result, "figure": figure}), flush=True)
        else:
            print(f"{name:13} {part.what:42} {result:8} {figure}", flush=True)
    return int(has_failed)


def find_sglang(named: str | None) -> str | None:
    """An interpreter that has SGLang. named: by the user, who then learns from the part what is wrong with it."""
    if named is not None:
        return named
    python = find_python()
    probe = "import importlib.metadata as m; m.version('sglang')"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return python if subprocess.run([python, "-c", probe], env=clean, capture_output=True).returncode == 0 else None


def run_part(name: str, settings: dict[str, object], limit_s: float) -> tuple[str, str]:
    """Run a part in a process of its own. Returns its result (pass | FAIL) and its figure, or the reason."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))  # before torch is imported
    from _gpu_check_parts import run

    # Forks have all modules imported, and cannot use CUDA.
    context = multiprocessing.get_context("fork" if settings["device"] == "cpu" else "spawn")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        process = context.Process(target=run, args=(name, settings, sending, log))
        process.start()
        try:
            is_late = not wait([receiving, process.sentinel], limit_s)
            result = receiving.recv_bytes() if receiving.poll() else None
        finally:
            end_group(process)
        said = log.read_text(errors="replace").splitlines() if log.exists() else []
    if result is not None:
        found = json.loads(result)
        return ("pass" if found["passed"] else "FAIL"), found["figure"]
    if is_late:
        return "FAIL", f"no result in {limit_s:.0f} s"
    last = next((line for line in reversed(said) if line.strip()), "it said nothing")
    return "FAIL", f"exit code {process.exitcode}: {last}"


def end_group(process: BaseProcess) -> None:
    """End a part and what it has started, in sessions of their own too."""
    assert process.pid is not None
    try:
        relatives = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        relatives = []
    for relative in relatives:
        relative.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
