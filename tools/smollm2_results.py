#!/usr/bin/env python
"""Turn runs of experiment=smollm2 and evaluations of their policies into the data and tables under docs/results/.

    python tools/smollm2_results.py --runs outputs/smollm2-0 --evaluations outputs/smollm2-0/evaluation-*.json

Needs the extra `plots`. Each run gives docs/results/smollm2/<run>.csv (a row an update) and <run>.yaml (settings), all
runs together curve.png. Evaluations are what `impala-llm evaluate --json evaluation.start=DIRECTORY` prints: the table
of all policies is printed, and the paired difference of each trained policy to the one that it began as.
"""

import argparse
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import quickstart_results as curves

from impala_llm.evaluate import short_label
from impala_llm.observability.intervals import mean_interval

OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "smollm2"


def interval(result: dict, name: str) -> str:
    low, high = result[f"{name}_interval"]
    return f"{result[name]:.3f} [{low:.3f}, {high:.3f}]"


def tables(results: list[dict], start: str) -> str:
    """Markdown: a table of the policies for each set of tasks, the trained ones with their difference to `start`."""
    lines = []
    for tasks, group in itertools.groupby(results, key=lambda r: r["tasks"]):
        rows = list(group)
        before = next((r for r in rows if r["label"] == start), None)
        lines += [f"**{tasks}**, {rows[0]['num_tasks']} tasks", ""]
        lines += ["| policy | score | success | turns | tokens | score, paired with the warm start |", "|---" * 6 + "|"]
        for r in rows:
            paired = ""
            if before is not None and r is not before and r["tokens"] is not None:
                change = np.subtract(r["scores"], before["scores"])
                low, high = mean_interval(change.tolist())
                paired = f"{change.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
            tokens = "" if r["tokens"] is None else f"{r['tokens']:.0f}"
            cells = (
                short_label(r["label"]),
                interval(r, "score"),
                interval(r, "success"),
                f"{r['turns']:.1f}",
                tokens,
                paired,
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs (run.dir)")
    parser.add_argument("--evaluations", type=Path, nargs="*", default=[], help="JSON of impala-llm evaluate")
    parser.add_argument("--start", default="before", help="label of the warm start in them")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    steps = {}
    for run in args.runs:
        lines = (run / "tensorboard" / "metrics.jsonl").read_text().splitlines()
        steps[run.name] = [json.loads(line) for line in lines]
        curves.write_csv(steps[run.name], OUT / f"{run.name}.csv")
        shutil.copy(run / "config.yaml", OUT / f"{run.name}.yaml")
    curves.plot(steps, OUT / "curve.png")
    results = []
    for path in args.evaluations:
        rows = json.loads(path.read_text())
        (OUT / path.name).write_text(json.dumps(rows) + "\n")
        results += rows
    seen: dict[tuple[str, str], dict] = {(r["tasks"], r["label"]): r for r in results}
    print(tables(sorted(seen.values(), key=lambda r: r["tasks"]), args.start))


if __name__ == "__main__":
    main()
