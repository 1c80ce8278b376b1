#!/usr/bin/env python
"""Turn finished quickstart runs into the data and the picture under docs/results/.

    for seed in 0 1 2; do tools/quickstart.sh run.seed=$seed run.name=quickstart-$seed; done
    python tools/quickstart_results.py outputs/quickstart-0 outputs/quickstart-1 outputs/quickstart-2
    python tools/quickstart_results.py outputs/webshop_long-0 --picture long.png

Needs the extra `plots`. Each run gives docs/results/quickstart/<run>.csv (a row an update), <run>.json (evaluation)
and <run>.yaml (settings); all runs together give a picture, and the table of docs/results/quickstart.md is printed.
"""

import argparse
import csv
import json
import shutil
from pathlib import Path

import numpy as np

from impala_llm.observability.intervals import change_interval

COLUMNS = (
    "rollout/score", "rollout/success_rate", "rollout/turns", "rollout/length_tokens", "env/options_matched",
    "env/attributes_matched", "env/bought", "env/invalid_actions", "loss/policy", "loss/value", "loss/entropy",
    "optimizer/gradient_norm", "optimizer/learning_rate",
    "ratio/mean", "ratio/max", "loss/clip_share", "ratio/ess", "ratio/k1", "ratio/k3", "staleness/oldest",
    "staleness/mean", "staleness/newest", "actor/generated_tokens_per_s", "actor/idle_share",
    "learner/trained_tokens_per_s", "time/idle_share", "time/step_s", "weights/publish_s", "mismatch/logprob_mean",
)  # fmt: skip
OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "quickstart"
FILES = ("tensorboard/metrics.jsonl", "evaluation.json", "config.yaml")
"""Files of a finished run that are read."""
SMOOTHING = 20
"""Updates in the running mean of the picture."""


def load_run(run: Path) -> tuple[list[dict], list[dict]]:
    steps = [json.loads(line) for line in (run / "tensorboard" / "metrics.jsonl").read_text().splitlines()]
    return steps, json.loads((run / "evaluation.json").read_text())


def write_evaluation(results: list[dict], path: Path) -> None:
    """Write the results as JSON, one a line, with the scores of single goals: paired gains are computed from these."""
    path.write_text("[\n" + ",\n".join(json.dumps(result) for result in results) + "\n]\n")


def write_csv(steps: list[dict], path: Path) -> None:
    started = steps[0]["time_s"]
    with path.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["update", "seconds", *COLUMNS])
        for step in steps:
            numbers = (step.get(name) for name in COLUMNS)
            row = ["" if n is None else f"{n:.5g}" for n in numbers]
            writer.writerow([step["step"], f"{step['time_s'] - started:.1f}", *row])


def smooth(values: list[float]) -> np.ndarray:
    """Running mean of the values that are there: an update before which no episode arrived has none (NaN)."""
    kernel = np.ones(min(SMOOTHING, len(values)))
    there = np.isfinite(values)
    return np.convolve(np.where(there, values, 0.0), kernel, "same") / np.convolve(there, kernel, "same")


def plot(runs: dict[str, list[dict]], path: Path) -> None:
    import matplotlib  # here: the tables do without, and it takes a second

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    panels = (
        ("rollout/score", "score of the training episodes"),
        ("rollout/success_rate", "success rate of the training episodes"),
        ("staleness/mean", "staleness of what is learned from, in versions"),
    )
    for name, steps in runs.items():
        minutes = [(step["time_s"] - steps[0]["time_s"]) / 60 for step in steps]
        for axis, (metric, _) in zip(axes, panels, strict=True):
            axis.plot(minutes, smooth([step.get(metric, np.nan) for step in steps]), label=name, linewidth=1.5)
    for axis, (_, title) in zip(axes, panels, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("minutes of training")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def interval(low: float, high: float) -> str:
    return f"[{low:.3f}, {high:.3f}]"


def gain(before: list[float], after: list[float]) -> str:
    """The mean difference of two policies on the same tasks, with its interval."""
    low, high = change_interval(before, after)
    return f"{np.subtract(after, before).mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def table(evaluations: dict[str, list[dict]]) -> str:
    """A row for each policy and baseline; what is the same in several runs stands there once."""
    lines = ["| tasks | who | score | gain, paired | success | gain, paired | turns |", "|---|---|---|---|---|---|---|"]
    for tasks in dict.fromkeys(r["tasks"] for results in evaluations.values() for r in results):
        shown = set()
        for run, results in evaluations.items():
            rows = {r["label"]: r for r in results if r["tasks"] == tasks}
            for label, r in rows.items():
                gains = ["", ""]
                if label == "after":
                    scores = [rows[label]["scores"] for label in ("before", "after")]
                    gains = [gain(*scores), gain(*([float(score == 1.0) for score in each] for each in scores))]
                cells = [f"{r['score']:.3f} {interval(*r['score_interval'])}", gains[0]]
                cells += [f"{r['success']:.3f} {interval(*r['success_interval'])}", gains[1], f"{r['turns']:.1f}"]
                row = " | ".join([tasks, f"after, {run}" if label == "after" else label, *cells])
                if row not in shown:
                    lines.append(f"| {row} |")
                shown.add(row)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs (run.dir)")
    parser.add_argument("--picture", default="curve.png", help="name of the file with the curves, beside the data")
    args = parser.parse_args()
    for file in (run / name for run in args.runs for name in FILES):
        if not file.is_file():
            parser.error(f"{file} is missing: name folders of finished runs")
    OUT.mkdir(parents=True, exist_ok=True)
    curves, evaluations = {}, {}
    for run in args.runs:
        steps, results = load_run(run)
        curves[run.name], evaluations[run.name] = steps, results
        write_csv(steps, OUT / f"{run.name}.csv")
        write_evaluation(results, OUT / f"{run.name}.json")
        shutil.copy(run / "config.yaml", OUT / f"{run.name}.yaml")
    plot(curves, OUT / args.picture)
    print(table(evaluations))


if __name__ == "__main__":
    main()
