#!/usr/bin/env python
"""Cost of off-policy data and gain of each correction, measured at exact lags in one process a run.

    python tools/study.py --jobs 2                 # everything, into docs/results/off_policy/
    python tools/study.py --part a --seeds 9       # only what is missing runs
    python tools/study.py --part rates --minutes 90    # begins no run after 90 minutes; the same command goes on
    python tools/study.py --report                 # data, tables and plots of what has finished

First study: a, corrections by lag; b, how fast V-trace forgets under engine noise; c, replay priorities; d, what about
truncated weights it is that breaks at a large lag; e, what the critic has to do with it. Second study, each phase after
the ones that it rests on: rates, screen, main, long, quarters, built, built-again, confirm, after-main, long-one-rate,
lag-4, dpo-rates, dpo, precision (tools/_study_plan.py), shop-rates, shop, shop-256, shop-confirm, shop-replay
(tools/_study_shop.py).

A finished run is one file under --runs, named by its settings: a second call runs only what is missing, and changed
settings run anew. Runs whose data stand under docs/results/off_policy are finished too, so that a clone of this
repository goes on where the study stopped; to run a part anew, move its file away and name an empty --runs.
Needs the extra `plots`. Text: docs/results/off_policy.md, of the first study off_policy_first.md;
hypotheses and plan of the second: docs/results/study_plan.md.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Before PyTorch is imported, here and in the processes that inherit it: one thread a run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tools import _study_grid as grid  # noqa: E402
from tools import _study_lab as lab  # noqa: E402
from tools import _study_plan as plan  # noqa: E402
from tools import _study_shop as shop  # noqa: E402
from tools import _study_trace as trace  # noqa: E402

SEEDS = {"a": 5, "b": 3, "c": 5, "d": 3, "e": 5, **plan.SEEDS}
"""Number of seeds of each part."""
DATA = {"a": "lag", "b": "trace", "c": "replay", "d": "variants", "e": "critic", **{part: part for part in plan.SEEDS}}
"""Name of the data and plots of each part."""
SHOP_SCORES = (0.45, 0.87)
"""Range of the pictures of scores on WebShop, in which differences of 0.03 are seen; runs that broke lie below."""
SHOP_CURVES, REPLAY_CURVES = (0.4, 0.9), (0.3, 0.9)
"""The same for curves."""


class FewerRuns(Exception):
    """A report would put a file of data in the place of one that holds more runs."""


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
    keep(result, path)
    return float(result["seconds"])


def keep(result: dict[str, Any], path: Path) -> None:
    """Write a result; it is renamed into place, so that a file that is there is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(result))
    aside.rename(path)


def run_missing(
    wanted: Sequence[lab.RunSettings], folder: Path, num_jobs: int, deadline: float = math.inf
) -> list[str]:
    """Returns what failed, in words.

    Args:
        deadline: on time.monotonic; no run begins after it.
    """
    # Seed by seed: whatever is finished is then a whole comparison.
    ordered = sorted(wanted, key=lambda s: s.seed)
    missing = [(s, path) for s in ordered if not (path := run_path(folder, s)).exists()]
    print(f"study: {len(missing)} of {len(wanted)} runs to do, {num_jobs} at a time", flush=True)
    if not missing:
        return []
    failures: list[str] = []
    started = time.monotonic()
    with ExitStack() as pools:

        def new_pool() -> ProcessPoolExecutor:
            """One process: where it is killed, no other run ends with it."""
            # A process for each run would import PyTorch each time; a fork would inherit its threads.
            return pools.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))

        left = iter(missing)
        idle = [new_pool() for _ in range(num_jobs)]
        running: dict[Future[float], tuple[lab.RunSettings, ProcessPoolExecutor]] = {}
        number = 0
        while True:
            while idle and time.monotonic() < deadline and (job := next(left, None)):
                pool = idle.pop()
                running[pool.submit(run_one, *job)] = (job[0], pool)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number += 1
                s, pool = running.pop(future)
                idle.append(new_pool() if isinstance(future.exception(), BrokenProcessPool) else pool)
                label = f"{s.part} · {s.task} · {s.method} · lag {s.lag} · seed {s.seed}"
                if error := future.exception():
                    failures.append(f"{label}: {error!r}")
                    outcome = f"FAILED: {error!r}"
                else:
                    outcome = f"{future.result():.0f} s"
                minutes = (time.monotonic() - started) / 60
                print(f"study: {number}/{len(missing)} after {minutes:.1f} min: {label}: {outcome}", flush=True)
    if number < len(missing):
        print(f"study: time is up, {len(missing) - number} runs are left: the same command goes on", flush=True)
    return failures


def finished(wanted: Sequence[lab.RunSettings], folder: Path) -> list[dict[str, Any]]:
    paths = [run_path(folder, settings) for settings in wanted]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def restore(data: Path, folder: Path) -> None:
    """Put the runs that a folder of reports holds back to where finished ones are looked for."""
    for part in DATA.keys() - {"b"}:  # b trains nothing and is measured anew for each report
        for result in read_data(part, data):
            settings = lab.RunSettings(**result["settings"] | {"overrides": tuple(result["settings"]["overrides"])})
            if not (path_of_run := run_path(folder, settings)).exists():
                keep(result, path_of_run)


def read_data(part: str, folder: Path) -> list[dict[str, Any]]:
    """Data of a part in a folder of reports; none where it has no file."""
    path = folder / f"{DATA[part]}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_data(part: str, results: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Write the data of a part; returns them as they were written, so that tables and plots are those of the file.

    Raises:
        FewerRuns: the file that is there holds more.
    """
    from tools import _study_report as reporting

    path = folder / f"{DATA[part]}.jsonl"
    num_kept, num_new = num_runs(read_data(part, folder)), num_runs(results)
    if num_new < num_kept:
        raise FewerRuns(
            f"{path} holds {num_kept} runs, and this report has {num_new}, so it was not written: "
            "name another folder with --out, or move that file away"
        )
    reporting.write_lines(path, results)
    return read_data(part, folder)


def num_runs(results: Sequence[dict[str, Any]]) -> int:
    """One a row; in part b a row holds all seeds of a setting."""
    return sum(len(result.get("half_lives", [result])) for result in results)


def all_finished(wanted: Sequence[lab.RunSettings], folder: Path) -> list[dict[str, Any]]:
    """As `finished`, for what rests on every one of them.

    Raises:
        Missing: one has not finished.
    """
    found = finished(wanted, folder)
    if len(found) < len(wanted):
        part = wanted[0].part
        number = len(wanted) - len(found)
        raise plan.Missing(f"{number} of {len(wanted)} runs of --part {part} have not finished: run that part first")
    return found


def planned(part: str, seeds: Sequence[int], folder: Path, policy: str | None = None) -> list[lab.RunSettings]:
    """Runs of a part.

    Args:
        folder: of finished runs, on which later phases of the second study rest.
        policy: for its phases on WebShop, a Hugging Face directory; None: tiny_shopper.

    Raises:
        Missing: what it rests on has not finished.
    """
    on_nothing = {
        "a": grid.part_a, "c": grid.part_c, "d": grid.part_d, "e": grid.part_e,
        "rates": plan.rates, "quarters": plan.quarters, "dpo-rates": plan.dpo_rates, "precision": plan.precision,
        "after-main": plan.after_main, "long-one-rate": plan.long_one_rate, "lag-4": plan.lag_4,
    }  # fmt: skip
    if part in on_nothing:
        return on_nothing[part](seeds)
    done = partial(all_finished, folder=folder)
    on_shop = {"shop-rates": shop.rates, "shop": shop.shop, "shop-256": shop.at_256, "shop-replay": shop.replay}
    if part in on_shop:
        return on_shop[part](seeds, done, policy)
    if part == "shop-confirm":
        return shop.confirm(seeds, policy)
    on_corridor = {
        "screen": plan.screen, "main": plan.main, "long": plan.long,
        "built": plan.built, "built-again": plan.built_again, "confirm": plan.confirm, "dpo": plan.dpo,
    }  # fmt: skip
    return on_corridor[part](seeds, done) if part in on_corridor else []


def report(part: str, wanted: Sequence[lab.RunSettings], seeds: Sequence[int], runs: Path, out: Path) -> str:
    """Write a part's data and plots; returns its table.

    Raises:
        FewerRuns: see `write_data`.
    """
    from tools import _study_report as reporting

    if part == "b":
        results = write_data(part, trace.measure(seeds), out)
        reporting.plot_trace(results, out / "trace.svg")
        return reporting.trace_table(results)
    results = finished(wanted, runs)
    if not results:
        return f"part {part}: no run has finished"
    if part in plan.SEEDS:
        return report_of_second(part, results, out)
    results = write_data(part, results, out)
    if part in ("a", "d", "e"):
        reporting.plot_curves(results, ("task", "lag"), "update", out / f"{DATA[part]}.svg")
        return reporting.lag_table(results)
    reporting.plot_curves(results, ("task", "lag"), "episodes", out / "replay.svg")
    return reporting.replay_table(results)


def report_of_second(part: str, results: list[dict[str, Any]], out: Path) -> str:
    """Write the data and plots of a phase of the second study; returns its tables."""
    from tools import _study_contrasts as contrasts
    from tools import _study_kept as keeping
    from tools import _study_report as reporting

    results = write_data(part, results, out)
    if part == "quarters":
        return contrasts.quarter_tables(results)
    if part in ("rates", "shop-rates", "built", "built-again", "dpo-rates"):
        return contrasts.rate_table(results)
    if part == "shop-replay":
        reporting.plot_curves(results, ("task",), "update", out / f"{part}.svg", REPLAY_CURVES)
        return "\n\n".join([contrasts.replay_table(results), keeping.less_once_table(results)])
    tables = [contrasts.score_table(results)]
    methods = list(dict.fromkeys(result["settings"]["method"] for result in results))
    if part in ("shop", "shop-256", "shop-confirm"):
        labels = contrasts.labels_with_rate(results)
        timed = contrasts.with_seconds(results)
        reporting.plot_curves(timed, ("lag",), "seconds", out / f"{part}-time.svg", SHOP_CURVES, labels)
        contrasts.plot_by_lag(results, out / f"{part}.svg", SHOP_SCORES)
        pairs = [pair for pair in shop.CONTRASTS if {*pair} <= {*methods}]
        tables.append(contrasts.contrast_table(results, pairs))
        tables += [keeping.student_table(results, pairs), keeping.kept_table(results), keeping.of_best_table(results)]
    elif part == "precision":
        contrasts.plot_side_by_side(
            results, out / f"{part}.svg", lambda m: (m.rpartition(", ")[0], m.rpartition(", ")[2]), (0.6, 1.0)
        )
        tables.append(contrasts.contrast_table(results, list(zip(methods[::2], methods[1::2], strict=True)), [0]))
    elif part == "dpo":
        contrasts.plot_side_by_side(results, out / f"{part}.svg", lambda m: (m.removeprefix("DPO, "), ""), (0.3, 0.9))
        tables.append(contrasts.contrast_table(results, [(methods[0], method) for method in methods[1:]], [0]))
    else:
        contrasts.plot_by_lag(results, out / f"{part}.svg")
        if part == "after-main":
            contrasts.plot_over_ess(results, out / f"{part}-ess.svg")
            tables.append(contrasts.contrast_table([*results, *read_data("confirm", out)], plan.AFTER_MAIN))
            tables.append(keeping.of_best_table(results))
        elif part != "screen":  # nothing is concluded from what chooses
            first = methods[-1] if part == "confirm" else methods[0]
            pairs = [(first, m) for m in methods if m != first]
            tables += [contrasts.contrast_table(results, pairs), keeping.of_best_table(results)]
            if part in ("long-one-rate", "lag-4"):  # so few pairs that a bootstrap interval is too short
                tables.append(keeping.student_table(results, pairs))
    return "\n\n".join(tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--part", choices=SEEDS, action="append", help="all, where none is named")
    parser.add_argument("--seeds", type=int, help=f"default: {SEEDS}")
    parser.add_argument("--quick", action="store_true", help="three updates a run, one seed: does it run at all?")
    parser.add_argument("--report", action="store_true", help="run nothing that trains")
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs" / "study", help="folder of finished runs")
    parser.add_argument("--out", type=Path, help="data and plots; default: docs/results/off_policy, not with --quick")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--policy", help="Hugging Face directory that the parts on WebShop start from")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no process is left: runs under way end, none begins
    deadline = time.monotonic() + 60 * arguments.minutes
    # A trial does not take the place of the study's data.
    of_repository = ROOT / "docs" / "results" / "off_policy"
    out = arguments.out or (arguments.runs / "quick" if arguments.quick else of_repository)
    restore(of_repository, arguments.runs)
    failures = []
    for part in arguments.part or list(SEEDS):
        seeds = range(1 if arguments.quick else arguments.seeds or SEEDS[part])
        try:
            wanted = planned(part, seeds, arguments.runs, arguments.policy)
        except plan.Missing as error:
            failures.append(f"part {part} cannot be planned: {error}")
            if arguments.report:
                continue
            break
        if arguments.quick:
            wanted = [grid.quick(settings) for settings in wanted]
        if not arguments.report:
            starts = dict.fromkeys(start for settings in wanted if (start := grid.start_of(settings)))
            failures += run_missing(list(starts), arguments.runs, arguments.jobs, deadline)
            failures += run_missing(wanted, arguments.runs, arguments.jobs, deadline)
        try:
            print(f"\n{report(part, wanted, seeds, arguments.runs, out)}")
        except FewerRuns as error:
            failures.append(f"report of part {part}: {error}")
    for failure in failures:
        print(f"study: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
