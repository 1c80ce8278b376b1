#!/usr/bin/env python
"""Feeds every decoder of the pipeline that reads from a socket or from shared memory with bytes that are wrong.

    python tools/fuzz.py --inputs 1000000 --seed 1 [--decoder NAME] [--json]
    python tools/fuzz.py --decoder receiver --inputs 100000     # sequences of valid messages against a live receiver

A decoder must accept an input or refuse it with its own error; anything else is a violation, and so are a crash of the
process, a hang and memory that grows. Each decoder runs in a process of its own. Inputs are random bytes, valid inputs
that were changed (with their checksums made right again, mostly), and structures of the right kind with wrong values;
the same seed gives the same inputs. Exit status 1 where there was any violation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.system.fuzz.decoders import DECODERS  # noqa: E402
from tests.system.fuzz.inputs import Decoder, Source  # noqa: E402

MAX_GROWTH_MB = 32.0
"""Resident memory may grow by as much between the first tenth of the inputs and the last."""
HANG_S = 120.0
"""A decoder that takes as long for one input hangs. Generous: the machine may be busy."""
SHOWN = 3
"""Violations that are shown of each decoder."""
PAGE = mmap.PAGESIZE
ROW = "{:<14}{:>9}{:>10}{:>9}{:>12}{:>10}{:>12}{:>18}"


@dataclass
class Report:
    """Outcome of a decoder. slowest_ms: of one input. memory: resident, in MB, after a tenth of the inputs and at the
    end."""

    decoder: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    violations: int = 0
    slowest_ms: float = 0.0
    seconds: float = 0.0
    memory_before_mb: float = 0.0
    memory_after_mb: float = 0.0
    examples: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        self.violations += 1
        if len(self.examples) < SHOWN:
            self.examples.append(text)


# --- running


def fuzz(name: str, decoder: Decoder, num_inputs: int, note: Callable[[bytes], None]) -> Report:
    """note: is told of each input before it is decoded."""
    report = Report(name)
    begin = time.perf_counter()
    for i in range(num_inputs):
        data = decoder.make()
        note(data)
        start = time.perf_counter()
        try:
            decoder.decode(data)
            report.accepted += 1
        except decoder.errors:
            report.refused += 1
        except Exception as error:
            report.violation(f"{type(error).__name__}: {str(error)[:200]} on {data[:200].hex()}")
        report.slowest_ms = max(report.slowest_ms, 1000 * (time.perf_counter() - start))
        report.inputs += 1
        if i == num_inputs // 10:
            report.memory_before_mb = resident_mb()
    report.seconds = time.perf_counter() - begin
    report.memory_after_mb = resident_mb()
    if report.memory_after_mb - report.memory_before_mb > MAX_GROWTH_MB:
        report.violation(f"memory grew from {report.memory_before_mb:.1f} to {report.memory_after_mb:.1f} MB")
    return report


def resident_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


@contextlib.contextmanager
def noting(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Keeps the latest input where it outlives this process: its length, then as much of it as there is room for."""
    with path.open("r+b") as file:
        notes = mmap.mmap(file.fileno(), PAGE)

        def note(data: bytes) -> None:
            part = data[: PAGE - 16]
            notes[: 8 + len(part)] = struct.pack("<Q", len(part)) + part

        yield note


def run_here(name: str, num_inputs: int, seed: int, notes: Path) -> Report:
    """One decoder, in this process."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder, noting(notes) as note:
        source = Source(random.Random(f"{seed} {name}"))
        return fuzz(name, DECODERS[name][0](source, Path(folder)), num_inputs, note)


def supervise(name: str, command: Sequence[str], notes: Path) -> Report:
    """Start a process that prints a report; its death, or its silence, is a violation."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last, died = b"", ""
    while True:
        try:
            output, _ = process.communicate(timeout=HANG_S)
            break
        except subprocess.TimeoutExpired:
            now = notes.read_bytes()
            if now == last:
                process.kill()
                died = f"it hung for {HANG_S:g} s"
            last = now
    if process.returncode == 0:
        return Report(**json.loads(output))
    (length,) = struct.unpack_from("<Q", notes.read_bytes())
    report = Report(name)
    latest = notes.read_bytes()[8 : 8 + min(length, 200)].hex()
    report.violation(f"{died or f'its process ended with {process.returncode}'} on {latest}")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="over all decoders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder", choices=list(DECODERS), help="this one alone gets all inputs")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)  # of a process that was started from here
    options = parser.parse_args(arguments)
    if options.notes is not None:
        report = run_here(options.decoder, options.inputs, options.seed, options.notes)
        print(json.dumps(dataclasses.asdict(report)))
        return 0
    shares = {name: share for name, (_, share) in DECODERS.items() if options.decoder in (None, name)}
    reports = []
    begin = time.perf_counter()
    if not options.json:
        print(ROW.format("decoder", "inputs", "accepted", "refused", "violations", "inputs/s", "slowest ms", "MB"))
    for name, share in shares.items():
        with tempfile.NamedTemporaryFile() as notes:
            notes.truncate(PAGE)
            num_inputs = max(1, round(options.inputs * share / sum(shares.values())))
            command = [sys.executable, __file__, "--inputs", str(num_inputs), "--seed", str(options.seed)]
            command += ["--decoder", name, "--notes", notes.name]
            r = supervise(name, command, Path(notes.name))
        reports.append(r)
        if not options.json:
            memory = f"{r.memory_before_mb:.1f} -> {r.memory_after_mb:.1f}"
            rate = f"{r.inputs / r.seconds:.0f}" if r.seconds else "-"
            counts = (r.inputs, r.accepted, r.refused, r.violations)
            print(ROW.format(name, *counts, rate, f"{r.slowest_ms:.2f}", memory), flush=True)
            for example in r.examples:
                print(f"    {example}")
    seconds = time.perf_counter() - begin
    total = sum(r.inputs for r in reports)
    violations = sum(r.violations for r in reports)
    if options.json:
        figures = {"inputs": total, "violations": violations, "seconds": seconds, "seed": options.seed}
        print(json.dumps({**figures, "decoders": [dataclasses.asdict(r) for r in reports]}, indent=2))
    else:
        print(f"{total} inputs in {seconds:.1f} s, {total / seconds:.0f} a second: {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
