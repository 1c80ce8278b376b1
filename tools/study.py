#!/usr/bin/env python
"""Cost of off-policy data and gain of each correction, measured at exact lags in one process a run.

    python tools/study.py --jobs 2                 # everything, into docs/results/off_policy/
    python tools/study.py --part a --seeds 9       # only what is missing runs
    python tools/study.py --report                 # data, tables and plots of what has finished

Parts: a, corrections by lag; b, how fast V-trace forgets under engine noise; c, replay priorities; d, what about
truncated weights it is that breaks at a large lag; e, what the critic has to do with it. A finished run is one file
under --runs, named by its settings: a second call runs only what is missing, and changed settings run anew.
Needs the extra `plots`. Text and conclusions: docs/results/off_policy.md.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Before PyTorch is imported, here and in the processes that inherit it: one thread a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tools import _study_grid as grid  # noqa: E402
from tools import _study_lab as lab  # noqa: E402
from tools import _study_trace as trace  # noqa: E402

SEEDS = {"a": 5, "b": 3, "c": 5, "d": 3, "e": 5}
"""Number of seeds of each part."""


def run_path(folder: Path, settings: lab.RunSettings) -> Path:
    """Path of the result of these settings; the name holds their hash, so that other settings have another one."""
    content = json.dumps(settings.as_dict(), sort_keys=True)
    words = f"{settings.part}-{settings.task}-{settings.method}-lag{settings.lag}-seed{settings.seed}"
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in words)
    return folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"


def run_one(settings: lab.RunSettings, path: Path) -> float:
    """Run and keep the result, or for a starting policy the policy as well; returns seconds."""
    start = grid.start_of(settings)
    policy = None if start is None else run_path(path.parent, start).with_suffix("")
    save = path.with_suffix("") if settings.part == "start" else None
    result = lab.run(settings, policy, save)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a file that is there is complete.
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(result))
    aside.rename(path)
    return float(result["seconds"])


def run_missing(wanted: Sequence[lab.RunSettings], folder: Path, num_jobs: int) -> list[str]:
    """Returns what failed, in words."""
    # Seed by seed: whatever is finished is then a whole comparison.
    ordered = sorted(wanted, key=lambda s: s.seed)
    missing = [(s, path) for s in ordered if not (path := run_path(folder, s)).exists()]
    print(f"study: {len(missing)} of {len(wanted)} runs to do, {num_jobs} at a time", flush=True)
    if not missing:
        return []
    failures = []
    started = time.monotonic()
    # A process for each run would import PyTorch each time; a fork would inherit its threads.
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run_one, settings, path): settings for settings, path in missing}
        for number, future in enumerate(as_completed(futures), 1):
            s = futures[future]
            label = f"{s.part} · {s.task} · {s.method} · lag {s.lag} · seed {s.seed}"
            if error := future.exception():
                failures.append(f"{label}: {error!r}")
                outcome = f"FAILED: {error!r}"
            else:
                outcome = f"{future.result():.0f} s"
            minutes = (time.monotonic() - started) / 60
            print(f"study: {number}/{len(missing)} after {minutes:.1f} min: {label}: {outcome}", flush=True)
    return failures


def finished(wanted: Sequence[lab.RunSettings], folder: Path) -> list[dict[str, Any]]:
    paths = [run_path(folder, settings) for settings in wanted]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def report(part: str, wanted: Sequence[lab.RunSettings], seeds: Sequence[int], runs: Path, out: Path) -> str:
    """Write a part's data and plots; returns its table."""
    from tools import _study_report as reporting

    if part == "b":
        results = trace.measure(seeds)
        reporting.write_lines(out / "trace.jsonl", results)
        reporting.plot_trace(results, out / "trace.svg")
        return reporting.trace_table(results)
    results = finished(wanted, runs)
    if not results:
        return f"part {part}: no run has finished"
    if part in ("a", "d", "e"):
        name = {"a": "lag", "d": "variants", "e": "critic"}[part]
        reporting.write_lines(out / f"{name}.jsonl", results)
        reporting.plot_curves(results, ("task", "lag"), "update", out / f"{name}.svg")
        return reporting.lag_table(results)
    reporting.write_lines(out / "replay.jsonl", results)
    reporting.plot_curves(results, ("task", "lag"), "episodes", out / "replay.svg")
    return reporting.replay_table(results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--part", choices=SEEDS, action="append", help="all, where none is named")
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS}")
    parser.add_argument("--quick", action="store_true", help="three updates a run, one seed: does it run at all?")
    parser.add_argument("--report", action="store_true", help="run nothing that trains")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "study", help="folder of finished runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "off_policy", help="data and plots")
    arguments = parser.parse_args()
    seeds = {part: range(1 if arguments.quick else arguments.seeds or default) for part, default in SEEDS.items()}
    planned = {"a": grid.part_a, "c": grid.part_c, "d": grid.part_d, "e": grid.part_e}
    plans = {part: planned[part](seeds[part]) if part in planned else [] for part in SEEDS}
    if arguments.quick:
        plans = {part: [grid.quick(settings) for settings in runs] for part, runs in plans.items()}
    parts = arguments.part or list(SEEDS)
    wanted = [settings for part in parts for settings in plans[part]]
    failures = []
    if not arguments.report:
        starts = dict.fromkeys(start for settings in wanted if (start := grid.start_of(settings)))
        failures = run_missing(list(starts), arguments.runs, arguments.jobs)
        failures += run_missing(wanted, arguments.runs, arguments.jobs)
    for part in parts:
        print(f"\n{report(part, plans[part], seeds[part], arguments.runs, arguments.out)}")
    for failure in failures:
        print(f"study: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
