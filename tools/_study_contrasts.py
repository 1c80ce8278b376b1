"""From the runs of the second study to its tables and plots: scores by lag, shares kept, and contrasts paired by seed.

Invariant: as in _study_report.py nothing is chosen here after the fact: which methods are contrasted, where, and how
the family of tests is corrected stands in docs/results/study_plan.md.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools import _study_plan as plan
from tools import _study_quarters as quarter
from tools import _study_report as reporting
from tools import _study_stats as stats
from tools._study_report import Result

Pair = tuple[int, float]
"""Seed of a run, and greedy score of the policy that it began with: runs are paired where both are the same, since a
starting policy that was made on another machine is another one. The greedy score stands for the policy, which is not
kept; the sampled one differs by the engine's rounding too."""


def pair_of(run: Result) -> Pair:
    return run["settings"]["seed"], run["curve"][0]["greedy"]


def scores_by_pair(runs: Sequence[Result], which: str = "sampled") -> dict[Pair, float]:
    return {pair_of(run): reporting.final_score(run, which) for run in runs}


def gains_by_pair(runs: Sequence[Result]) -> dict[Pair, float]:
    """Final score less that of the policy which the run began with."""
    return {pair_of(run): reporting.final_score(run) - run["curve"][0]["sampled"] for run in runs}


def with_interval(values: np.ndarray, statistic: stats.Statistic = stats.interquartile_mean) -> str:
    """The statistic with its 95 % bootstrap interval; one value has none."""
    low, high = stats.bootstrap_interval(values, statistic)
    return f"{float(statistic(values)):.3f}" + (f" [{low:.3f}, {high:.3f}]" if len(values) > 1 else "")


def kept(at_lag: dict[Pair, float], at_zero: dict[Pair, float]) -> str:
    """Share of the score (or gain) at lag 0 that is left, over the pairs that both have."""
    common = sorted(set(at_lag) & set(at_zero))
    if not common:
        return ""
    pairs = np.array([[at_lag[pair], at_zero[pair]] for pair in common])
    low, high = stats.bootstrap_interval(pairs, stats.kept_share)
    return f"{100 * float(stats.kept_share(pairs.T)):.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def score_table(results: Sequence[Result]) -> str:
    """A row for each task (with its rate), lag and method; scores are interquartile means with 95 % intervals."""
    groups = reporting.group_by(results, "task", "lag", "method")
    rows = []
    for (task, lag, method), runs in groups.items():
        at_zero = groups.get((task, 0, method), [])
        scores, own = scores_by_pair(runs), scores_by_pair(at_zero)
        zero = float(np.mean(list(own.values()))) if own else float("nan")
        broken = sum(
            reporting.final_score(run) < reporting.BREAKS_BELOW * zero or reporting.has_collapsed(run) for run in runs
        )
        greedy = np.array([reporting.final_score(run, "greedy") for run in runs])
        rows.append(
            [
                task, str(lag), method, str(len(runs)), with_interval(np.array(list(scores.values()))),
                with_interval(greedy), with_interval(np.array([reporting.area(run) for run in runs])),
                kept(scores, own) if lag else "", kept(gains_by_pair(runs), gains_by_pair(at_zero)) if lag else "",
                f"{broken} of {len(runs)}",
                f"{reporting.figure_of(runs, 'ratio/ess'):.2f}", f"{reporting.figure_of(runs, 'ratio/k3'):.3f}",
                f"{np.mean([run['action_tokens'] for run in runs]):.0f}",
                f"{np.mean([run['seconds'] for run in runs]):.0f}",
            ]
        )  # fmt: skip
    header = [
        "task", "lag", "method", "seeds", "score, sampled", "score, greedy", "mean over the run",
        "kept of its own at lag 0", "of its gain there", "broken", "ESS", "k3", "action tokens", "seconds",
    ]  # fmt: skip
    return reporting.table(header, rows)


def rate_table(results: Sequence[Result]) -> str:
    """A row for each method and lag: the score at each learning rate; the chosen one is bold."""
    chosen = plan.chosen_rates(results)
    rates = sorted({plan.rate_of(result["settings"]) for result in results})
    rows = []
    for (method, lag), runs in reporting.group_by(results, "method", "lag").items():
        cells = []
        for rate in rates:
            scores = [reporting.final_score(run) for run in runs if plan.rate_of(run["settings"]) == rate]
            cell = with_interval(np.array(scores)) if scores else ""
            cells.append(f"**{cell}**" if rate == chosen[method][lag] else cell)
        rows.append([method, str(lag), *cells])
    return reporting.table(["method", "lag", *(f"rate {rate:g}" for rate in rates)], rows)


def quarter_tables(results: Sequence[Result]) -> str:
    """Four tables: the weights of each quarter, what explains the variance between cells, the two quarters that belong
    together, and the best cells beside those that have a name. Intervals are over the other quarters' settings."""
    by_label = {method: scores_by_pair(runs) for (method,), runs in reporting.group_by(results, "method").items()}
    try:
        scores = quarter.scores_of(by_label)
    except ValueError as error:
        return f"no table yet: {error}"
    means = quarter.main_effects(scores)
    symbols = list(quarter.SYMBOLS.values())
    levels = []
    for number, name in enumerate(quarter.QUARTERS):
        pairs = [quarter.contrast_of_levels(scores, number, *two) for two in ((1, 0), (2, 0), (2, 1))]
        levels.append(
            [
                symbols[number],
                f"{100 * reporting.figure_of(results, f'loss/{name}_share'):.1f} %",
                *(f"{mean:.3f}" for mean in means[number]),
                *(with_interval(differences, stats.mean) for differences in pairs),
            ]
        )
    shares = quarter.variance_shares(scores)
    ranked = sorted(shares, key=lambda quarters: -shares[quarters])
    rest = ["what three and four quarters do together, and chance", f"{100 * (1 - sum(shares.values())):.0f} %"]
    explained = [[" × ".join(symbols[q] for q in quarters), f"{100 * shares[quarters]:.0f} %"] for quarters in ranked]
    first, second = next(quarters for quarters in ranked if len(quarters) == 2)
    words = [f"weight {word}".replace("ratio", "ρ") for word in quarter.LEVELS]
    together = [
        [words[one], *(f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in of_level)]
        for one, of_level in enumerate(quarter.pair_means(scores, first, second).tolist())
    ]
    fitted, measured = quarter.fitted(scores), scores.mean(axis=-1)
    order = np.argsort(-fitted).tolist()
    shown = [n for rank, n in enumerate(order) if rank < 8 or quarter.CELLS[n] in quarter.KNOWN]
    cells = [
        [
            str(order.index(n) + 1), *(word.replace("ratio", "ρ") for word in quarter.CELLS[n]),
            quarter.KNOWN.get(quarter.CELLS[n], ""), f"{fitted[n]:.3f}", f"{measured[n]:.3f}",
        ]
        for n in shown
    ]  # fmt: skip
    return "\n\n".join(
        [
            reporting.table(["quarter", "tokens", "0", "1", "ρ", "1 less 0", "ρ less 0", "ρ less 1"], levels),
            reporting.table(["quarters", "share of the variance between cells"], [*explained, rest]),
            reporting.table([f"{symbols[first]} ↓ and {symbols[second]} →", *words], together),
            reporting.table(["rank", *symbols, "known as", "fitted", "measured"], cells),
        ]
    )


def contrast_table(
    results: Sequence[Result], pairs: Sequence[tuple[str, str]], lags: Sequence[int] | None = None
) -> str:
    """The first method of each pair less the second at each lag (None: all but 0), paired as `Pair` says; p of the mean
    by signs, and corrected by Holm's method over all rows. Beside it the difference of greedy scores, not tested."""
    groups = reporting.group_by(results, "method", "lag")
    of = {key: scores_by_pair(runs) for key, runs in groups.items()}
    rows: list[list[str]] = []
    p_values: list[float] = []
    for lag in sorted({at for _, at in groups} - {0}) if lags is None else lags:
        for method, other in pairs:
            ours, theirs = of.get((method, lag), {}), of.get((other, lag), {})
            common = sorted(set(ours) & set(theirs))
            if not common:
                continue
            differences = np.array([ours[pair] - theirs[pair] for pair in common])
            p_values.append(stats.paired_p_value(differences.tolist()))
            label = [f"{method} less {other}", str(lag), str(len(common))]
            ours, theirs = (scores_by_pair(groups[one, lag], "greedy") for one in (method, other))
            greedy = np.array([ours[pair] - theirs[pair] for pair in common])
            intervals = (with_interval(differences, stats.mean), with_interval(differences))
            rows.append([*label, *intervals, with_interval(greedy, stats.mean)])
    for row, p, corrected in zip(rows, p_values, stats.holm(p_values), strict=True):
        row += [p_word(p), p_word(corrected)]
    return reporting.table(
        ["contrast", "lag", "pairs", "mean", "interquartile mean", "greedy, mean", "p", "p, Holm"], rows
    )


def p_word(p: float) -> str:
    return f"{p:.4f}" if p >= 0.00005 else "< 0.0001"


def replay_table(results: Sequence[Result]) -> str:
    """A row for each sampler and number of samples per insert, at equally many episodes and in equal time.

    Equal time is equally many updates, those of the arm that uses each episode once: learning takes longer than playing
    in all arms, as the share of playing shows, and runs are of machines of different speed.
    """
    once = {run["settings"]["num_updates"] for run in results if run["settings"]["method"] == "each once"}
    rows = []
    for (task, method), runs in reporting.group_by(results, "task", "method").items():
        in_time = [score_by(run, num_updates) for num_updates in once for run in runs]
        rows.append(
            [
                task, method, str(len(runs)), str(runs[0]["episodes"]), str(runs[0]["settings"]["num_updates"]),
                with_interval(np.array([reporting.final_score(run) for run in runs])),
                with_interval(np.array([reporting.final_score(run, "sampled_rare") for run in runs])),
                with_interval(np.array([reporting.area(run) for run in runs])),
                with_interval(np.array(in_time)) if in_time else "",
                f"{np.mean([playing / learning for run in runs for _, playing, learning in run['clock'][-1:]]):.2f}",
                f"{reporting.figure_of(runs, 'staleness/mean'):.1f}",
                f"{reporting.figure_of(runs, 'buffer/reuse'):.2f}",
            ]
        )  # fmt: skip
    header = [
        "task", "replay", "seeds", "episodes", "updates", "score, sampled", "on rare kinds",
        "mean over the run", "score in equal time", "playing / learning", "staleness", "times drawn",
    ]  # fmt: skip
    return reporting.table(header, rows)


def seconds_of(run: Result, index: int) -> float:
    """Seconds until an evaluation, of playing and learning side by side."""
    _, playing, learning = run["clock"][index]
    return max(playing, learning)


def with_seconds(results: Sequence[Result]) -> list[Result]:
    """The results with `seconds` at each point of their curves: see `seconds_of`."""
    return [
        run | {"curve": [point | {"seconds": seconds_of(run, index)} for index, point in enumerate(run["curve"])]}
        for run in results
    ]


def score_by(run: Result, num_updates: int) -> float:
    """Mean sampled score over the last quarter of so many updates, on straight lines between evaluations.

    Over a stretch of the run and not of evaluations, since these are the farther apart the more often an episode is
    used.
    """
    updates, scores = zip(*((point["update"], point["sampled"]) for point in run["curve"]), strict=True)
    return float(np.interp(np.linspace(0.75 * num_updates, num_updates, 101), updates, scores).mean())


def labels_with_rate(results: Sequence[Result]) -> dict[str, str]:
    """Label of each method: its name, with the learning rate where it has one above lag 0 and does not name it."""
    labels = {}
    for (method,), runs in reporting.group_by(results, "method").items():
        rates = {plan.rate_of(run["settings"]) for run in runs if run["settings"]["lag"]}
        has_rate = len(rates) == 1 and not re.search(r"e-\d$", method)
        labels[method] = f"{method}, {reporting.power(rates.pop())}" if has_rate else method
    return labels


def plot_by_lag(results: Sequence[Result], path: Path, limits: tuple[float, float] = (0.0, 1.0)) -> None:
    """Final score over the lag, a line for each method with its interval as a band; of several rates at a lag the one
    that all lags have.

    Args:
        limits: of the score; what lies outside is cut off.
    """
    lags = sorted({result["settings"]["lag"] for result in results})
    labels = labels_with_rate(results)
    figure, axis = reporting.pyplot().subplots(figsize=(8.4, 4.4), constrained_layout=True)
    for number, ((method,), runs) in enumerate(reporting.group_by(results, "method").items()):
        of_task = max(reporting.group_by(runs, "task").values(), key=len)
        by_lag = {lag: found for (lag,), found in reporting.group_by(of_task, "lag").items()}
        indices = [index for index, lag in enumerate(lags) if lag in by_lag]
        means, edges = _middles_and_edges([by_lag[lags[index]] for index in indices])
        style = reporting.style(number)
        axis.plot(indices, means, marker=reporting.marker(number), markersize=4, label=labels[method], **style)
        axis.fill_between(indices, edges[:, 0], edges[:, 1], color=style["color"], alpha=0.12, linewidth=0)
    axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
    axis.set_xlabel("versions between playing and training")
    axis.set_ylim(*limits)
    _finish(figure, axis, path, f"{BAND}; below {limits[0]:g} cut off" if limits[0] else BAND)


def plot_over_ess(results: Sequence[Result], path: Path) -> None:
    """Final score over the effective sample size of the ratios, a point for each run with a lag."""
    figure, axis = reporting.pyplot().subplots(figsize=(8.4, 4.4), constrained_layout=True)
    lagged = [run for run in results if run["settings"]["lag"]]
    for number, ((method,), runs) in enumerate(reporting.group_by(lagged, "method").items()):
        sizes = [reporting.figure_of([run], "ratio/ess") for run in runs]
        scores = [reporting.final_score(run) for run in runs]
        style = {"color": f"C{number % 7}", "marker": reporting.marker(number), "alpha": 0.7}
        axis.scatter(sizes, scores, s=14, label=method, **style)
    axis.set_xlabel("effective sample size, mean of the second half of the run")
    lags = ", ".join(str(lag) for lag in sorted({run["settings"]["lag"] for run in lagged}))
    _finish(figure, axis, path, f"a point a run; lags {lags}")


BAND = "interquartile mean over seeds; band: its 95 % bootstrap interval"


def plot_side_by_side(
    results: Sequence[Result], path: Path, split: Callable[[str], tuple[str, str]], limits: tuple[float, float]
) -> None:
    """Final score of each method, as points with their intervals.

    Args:
        split: of a method's name, the tick of the axis at which it stands, and what has a colour.
        limits: of the score.
    """
    groups = {split(method): runs for (method,), runs in reporting.group_by(results, "method").items()}
    ticks = list(dict.fromkeys(tick for tick, _ in groups))
    kinds = list(dict.fromkeys(kind for _, kind in groups))
    figure, axis = reporting.pyplot().subplots(figsize=(7, 4), constrained_layout=True)
    for number, kind in enumerate(kinds):
        chosen = {tick: runs for (tick, of), runs in groups.items() if of == kind}
        middles, edges = _middles_and_edges(list(chosen.values()))
        errors = np.abs(edges - np.array(middles)[:, None]).T
        places = [ticks.index(tick) + 0.16 * (number - (len(kinds) - 1) / 2) for tick in chosen]
        axis.errorbar(
            places, middles, errors, fmt=reporting.marker(number), capsize=4, color=f"C{number}", label=kind or None
        )
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_xlim(-0.5, len(ticks) - 0.5)
    axis.set_ylim(*limits)
    _finish(figure, axis, path, BAND.replace("band", "bar"))


def _middles_and_edges(groups: Sequence[Sequence[Result]]) -> tuple[list[float], np.ndarray]:
    """Interquartile mean of each group of runs, and its interval."""
    scores = [np.array(list(scores_by_pair(runs).values())) for runs in groups]
    edges = np.array([stats.bootstrap_interval(found) for found in scores])
    return [float(stats.interquartile_mean(found)) for found in scores], edges


def _finish(figure: Any, axis: Any, path: Path, title: str) -> None:
    axis.set_ylabel("score at the end, sampled")
    axis.set_title(title, fontsize=8)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    reporting.save_figure(figure, path)
