#!/usr/bin/env python
"""Turn runs of experiment=smollm2 and evaluations of their policies into the data and tables under docs/results/.

    python tools/smollm2_results.py --kept fifth-lora --runs outputs/smollm2-1 \
        --evaluations outputs/smollm2-1/evaluation-*.json

Needs the extra `plots`. Each run gives docs/results/smollm2/<run>.csv (a row an update) and <run>.yaml (settings);
these runs, and those whose <run>.csv is kept from before, together give curve.png. Evaluations are what `impala-llm
evaluate --json evaluation.start=DIRECTORY` prints, in the folder of the run that they are of: each is kept as
<run>-<name>.json, the table of all policies is printed, and the paired difference of each trained policy to the one
that it began as.
"""

import argparse
import csv
import json
import shutil
from pathlib import Path

import quickstart_results as curves

from impala_llm.evaluate import short_label

OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "smollm2"


def read_csv(path: Path) -> list[dict]:
    """Read the file of `write_csv` of quickstart_results.py: a dictionary for each update, without the gaps."""
    with path.open(newline="") as lines:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]
    return [{**row, "time_s": row["seconds"]} for row in rows]


def interval(result: dict, name: str) -> str:
    low, high = result[f"{name}_interval"]
    return f"{result[name]:.3f} [{low:.3f}, {high:.3f}]"


def tables(evaluations: dict[str, list[dict]], start: str) -> str:
    """Markdown: a table of the policies for each set of tasks, the trained ones with their difference to `start`. What
    is the same in several runs stands there once.

    Args:
        evaluations: results by the run that they are of.
        start: label of the policy that a run began as.
    """
    lines = []
    for tasks in sorted({r["tasks"] for results in evaluations.values() for r in results}):
        num_tasks = next(r["num_tasks"] for results in evaluations.values() for r in results if r["tasks"] == tasks)
        lines += [f"**{tasks}**, {num_tasks} tasks", ""]
        lines += ["| policy | score | success | turns | tokens | score, paired with the warm start |", "|---" * 6 + "|"]
        rows = []
        for run, results in evaluations.items():
            by_label = {r["label"]: r for r in results if r["tasks"] == tasks}
            rows += [row(r, run, by_label.get(start)) for r in by_label.values()]
        lines += [*dict.fromkeys(rows), ""]
    return "\n".join(lines)


def row(r: dict, run: str, before: dict | None) -> str:
    """A line of the table; of a trained policy with its run, and its difference to the one that it began as."""
    name, paired = short_label(r["label"]), ""
    if before is not None and r is not before and r["tokens"] is not None:
        name, paired = f"{name}, {run}", curves.gain(before["scores"], r["scores"])
    tokens = "" if r["tokens"] is None else f"{r['tokens']:.0f}"
    cells = (name, interval(r, "score"), interval(r, "success"), f"{r['turns']:.1f}", tokens, paired)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of runs (run.dir)")
    parser.add_argument("--kept", nargs="*", default=[], help="runs of before that the picture shows too")
    parser.add_argument("--evaluations", type=Path, nargs="*", default=[], help="JSON of impala-llm evaluate")
    parser.add_argument("--start", default="before", help="label of the warm start in them")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for run in args.runs:
        lines = (run / "tensorboard" / "metrics.jsonl").read_text().splitlines()
        curves.write_csv([json.loads(line) for line in lines], OUT / f"{run.name}.csv")
        shutil.copy(run / "config.yaml", OUT / f"{run.name}.yaml")
    names = [*args.kept, *(run.name for run in args.runs)]
    curves.plot({name: read_csv(OUT / f"{name}.csv") for name in names}, OUT / "curve.png")
    evaluations: dict[str, list[dict]] = {}
    for path in args.evaluations:
        run, rows = path.absolute().parent.name, json.loads(path.read_text())
        (OUT / f"{run}-{path.name}").write_text(json.dumps(rows) + "\n")
        evaluations.setdefault(run, []).extend(rows)
    print(tables(evaluations, args.start))


if __name__ == "__main__":
    main()
