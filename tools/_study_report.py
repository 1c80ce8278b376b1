"""From finished runs to data, tables and plots under docs/results/off_policy/.

Invariant: nothing is chosen here after the fact: the score of a run is the mean of its last `LAST` evaluations, of
every run, and intervals are Student's over seeds.
"""

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

LAST = 5
"""Evaluations at the end of a run whose mean is its score."""
BREAKS_BELOW = 0.5
"""Share of the on-policy score of the same method and learning rate below which a run has broken."""
COLLAPSED_ENTROPY = 0.05
"""Share of its first entropy below which a policy whose score is below 0.9 has collapsed."""
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantiles of Student's t, by number of seeds."""

Result = dict[str, Any]
"""Result of `_study_lab.run`."""


@cache
def pyplot() -> Any:
    """matplotlib.pyplot, set up for the figures. It takes a second to import, and tables do without."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "study"  # the same data gives the same bytes
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    return plt


def style(number: int) -> dict[str, Any]:
    """Colour and kind of line of the so-manieth method: seven colours, solid, then dashed, then dotted."""
    return {"color": f"C{number % 7}", "linestyle": ("-", "--", ":")[number // 7 % 3], "linewidth": 1.4}


def marker(number: int) -> str:
    return "osD^vPX"[number % 7]


def power(rate: float) -> str:
    """0.0003 as 3e-4."""
    return f"{rate:.0e}".replace("e-0", "e-")


def final_score(result: Result, which: str = "sampled") -> float:
    return float(np.mean([point[which] for point in result["curve"][-LAST:]]))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of Student's 95 % interval (NaN of one value)."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), T95.get(n, 1.96) * float(np.std(values, ddof=1)) / math.sqrt(n)


def with_interval(values: Sequence[float], digits: int = 3) -> str:
    mean, half = mean_and_half_width(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def has_collapsed(result: Result) -> bool:
    """By entropy: nearly none left, though there was something to learn still."""
    entropies = [point["loss/entropy"] for point in result["curve"] if "loss/entropy" in point]
    return entropies[-1] < COLLAPSED_ENTROPY * entropies[0] and final_score(result) < 0.9


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write_lines(path: Path, results: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(_rounded(result), separators=(",", ":")) for result in results)
    path.write_text("".join(line + "\n" for line in lines))


def _rounded(data: Any) -> Any:
    """Its numbers to six digits."""
    return json.loads(json.dumps(data), parse_float=lambda digits: float(f"{float(digits):.6g}"))


def group_by(results: Iterable[Result], *keys: str) -> dict[tuple[Any, ...], list[Result]]:
    """By these settings, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result["settings"][key] for key in keys), []).append(result)
    return groups


def figure_of(results: Sequence[Result], name: str) -> float:
    """Mean over runs and over the second half of each of a metric of the updates; NaN where no run has it."""
    values = []
    for result in results:
        points = result["curve"][len(result["curve"]) // 2 :]
        values += [point[name] for point in points if name in point]
    return float(np.mean(values)) if values else math.nan


def lag_table(results: Sequence[Result]) -> str:
    """Part (a): a row for each rate, lag and method.

    On-policy, with one step a batch, all ratios are 1 and the methods all but the same one: what differs between them
    at lag 0 is chance, so a score is compared with that of all runs at lag 0 as well as with that of its own method.
    """
    rows = []
    groups = group_by(results, "task", "lag", "method")
    for (task, lag, method), runs in groups.items():
        own = mean_score(groups.get((task, 0, method), []))
        pooled = mean_score([run for key, others in groups.items() if key[:2] == (task, 0) for run in others])
        scores = [final_score(run) for run in runs]
        broken = sum(score < BREAKS_BELOW * own or has_collapsed(run) for score, run in zip(scores, runs, strict=True))
        rows.append(
            [
                task, str(lag), method, with_interval(scores), with_interval([final_score(r, "greedy") for r in runs]),
                with_interval([area(r) for r in runs]), " ".join(f"{score:.2f}" for score in scores),
                percent(mean_score(runs), own), percent(mean_score(runs), pooled),
                f"{broken} of {len(runs)}", f"{figure_of(runs, 'ratio/ess'):.2f}", f"{figure_of(runs, 'ratio/k3'):.3f}",
            ]
        )  # fmt: skip
    header = [
        "task", "lag", "method", "score, sampled", "score, greedy", "mean over the run", "by seed",
        "of its own at lag 0", "of all at lag 0", "broken", "ESS", "k3",
    ]  # fmt: skip
    return table(header, rows)


def mean_score(runs: Sequence[Result]) -> float:
    return float(np.mean([final_score(run) for run in runs])) if runs else math.nan


def percent(part: float, whole: float) -> str:
    return "" if math.isnan(part / whole) else f"{100 * part / whole:.0f} %"


def replay_table(results: Sequence[Result]) -> str:
    """Part (c): a row for each task distribution, reuse and sampler."""
    rows = []
    for (task, lag, method), runs in group_by(results, "task", "lag", "method").items():
        rows.append(
            [
                task, str(lag), method, str(runs[0]["episodes"]), str(runs[0]["settings"]["num_updates"]),
                with_interval([final_score(run) for run in runs]),
                with_interval([final_score(run, "greedy") for run in runs]),
                with_interval([area(run) for run in runs]),
                f"{figure_of(runs, 'staleness/mean'):.1f}", f"{figure_of(runs, 'buffer/reuse'):.2f}",
            ]
        )  # fmt: skip
    header = [
        "task", "lag", "replay", "episodes", "updates", "score, sampled", "score, greedy", "mean over the run",
        "staleness", "times drawn",
    ]  # fmt: skip
    return table(header, rows)


def area(result: Result) -> float:
    """Mean of the sampled score over the episodes of the run, by trapezoids."""
    episodes = np.array([point["episodes"] for point in result["curve"]], float)
    scores = np.array([point["sampled"] for point in result["curve"]])
    return float(np.sum((scores[1:] + scores[:-1]) * np.diff(episodes)) / 2 / episodes[-1])


def plot_curves(
    results: Sequence[Result],
    panel_keys: Sequence[str],
    x: str,
    path: Path,
    limits: tuple[float, float] = (0.0, 1.0),
    labels: dict[str, str] | None = None,
) -> None:
    """Sampled score over `x` of each method: the mean of its seeds (and of their `x`), the range of them as a band.

    Args:
        limits: of the score; what lies outside is cut off.
        labels: of methods; None: their names.
    """
    panels = group_by(results, *panel_keys)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(4.4 * columns, 3.3 * rows), sharey=True, squeeze=False, constrained_layout=True
    )
    styles = {method: style(number) for number, (method,) in enumerate(group_by(results, "method"))}
    handles = {}
    for axis, (key, chosen) in zip(axes.flat, panels.items(), strict=False):
        for (method,), runs in group_by(chosen, "method").items():
            xs = np.mean([[point[x] for point in run["curve"]] for run in runs], axis=0)
            ys = np.array([[point["sampled"] for point in run["curve"]] for run in runs])
            [handles[method]] = axis.plot(xs, ys.mean(axis=0), **styles[method])
            colour = styles[method]["color"]
            axis.fill_between(xs, ys.min(axis=0), ys.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        axis.set_title("\n".join(f"{name} {value}" for name, value in zip(panel_keys, key, strict=True)), fontsize=9)
        axis.set_xlabel(x)
        axis.set_ylim(*limits)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0][0].set_ylabel("score on held-out tasks, sampled")
    cut = f"; below {limits[0]:g} cut off" if limits[0] else ""
    figure.suptitle(f"line: mean of the seeds; band: their range{cut}", fontsize=9)
    names = [(labels or {}).get(method, method) for method in styles]
    figure.legend([handles[method] for method in styles], names, loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def trace_table(results: Sequence[dict[str, Any]]) -> str:
    """Part (b)."""
    rows = []
    for result in results:
        s, measured = result["settings"], result["half_lives"]
        rows.append(
            [
                f"{s['mean_abs']:g}", s["noise"], s["granularity"], f"{s['dead_band']:g}", with_interval(measured, 1),
                f"{result['predicted']:.1f}", f"{float(np.mean(measured)) / result['predicted']:.3f}",
            ]
        )  # fmt: skip
    header = ["mean abs. l", "noise", "step", "dead band", "half-life, tokens", "formula", "measured / formula"]
    return table(header, rows)


def plot_trace(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Credit that is left over the distance to the reward; dashed: the formula."""
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.6), sharey=True, constrained_layout=True)
    for axis, mean_abs in zip(axes, (0.01, 0.04), strict=True):
        chosen = [r for r in results if r["settings"]["mean_abs"] == mean_abs and r["settings"]["noise"] == "normal"]
        for number, result in enumerate(chosen):
            s = result["settings"]
            label = s["granularity"] + (f", dead band {s['dead_band']:g}" if s["dead_band"] else "")
            axis.plot(result["distance"], result["credit"], color=f"C{number}", label=label, linewidth=1.4)
            formula = 0.5 ** (np.array(result["distance"]) / result["predicted"])
            axis.plot(result["distance"], formula, color=f"C{number}", linestyle="--", linewidth=0.9)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(1e-4, 1.5)
        axis.set_title(f"noise of mean |l| = {mean_abs:g} a token", fontsize=10)
        axis.set_xlabel("action tokens to the reward")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("credit that is left")
    axes[0].legend(fontsize=7)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
