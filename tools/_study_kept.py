"""Shares of a score that are kept under a lag, by other measures than the planned one, and Student's intervals of few
pairs.

Looked at after the runs, and said to be so where it is reported; the planned measures stand in _study_contrasts.py.
"""

from collections.abc import Sequence

import numpy as np

from tools import _study_contrasts as contrasts
from tools import _study_plan as plan
from tools import _study_report as reporting
from tools import _study_stats as stats
from tools._study_report import Result

COMMON = "PPO clip"
"""Method whose score without a lag is the common denominator."""


def of_best_table(results: Sequence[Result]) -> str:
    """Score and gain against the method's best rate at lag 0, and against delay alone.

    Delay alone: the runs of that method and rate without a lag, as many updates earlier as the lag is long; last the
    score less theirs, by pairs, with Student's 95 % interval.
    """
    groups = reporting.group_by(results, "method", "lag", "task")
    rows = []
    for (method, lag, task), runs in groups.items():
        if not lag or (method, 0, task) not in groups:
            continue
        at_zero = [found for (other, at, _), found in groups.items() if (other, at) == (method, 0)]
        best = max(at_zero, key=lambda found: _middle(contrasts.scores_by_pair(found)))
        scores = contrasts.scores_by_pair(runs)
        earlier = {contrasts.pair_of(run): _score_before(run, lag) for run in groups[method, 0, task]}
        score, delayed = _middle(scores), _middle(earlier)
        rows.append(
            [
                method, str(lag), f"{score:.3f}", f"{plan.rate_of(best[0]['settings']):g}",
                f"{100 * score / _middle(contrasts.scores_by_pair(best)):.0f} %",
                _share(_middle(contrasts.gains_by_pair(runs)), _middle(contrasts.gains_by_pair(best))),
                f"{delayed:.3f}", _share(score, delayed), _student(_less(scores, earlier)),
            ]
        )  # fmt: skip
    header = [
        "method", "lag", "score", "best rate at lag 0", "kept of it", "of its gain", "delay alone", "of that",
        "less that",
    ]  # fmt: skip
    return reporting.table(header, rows)


def student_table(results: Sequence[Result], pairs: Sequence[tuple[str, str]]) -> str:
    """The first method of each pair less the second, paired by seed, with Student's 95 % intervals; last the difference
    of the shares of their own scores at lag 0 that they keep, in points."""
    groups = reporting.group_by(results, "method", "lag")
    rows = []
    for lag in sorted({result["settings"]["lag"] for result in results} - {0}):
        for method, other in pairs:
            cells = [
                _student(_differences(groups.get((method, lag), []), groups.get((other, lag), []), which))
                for which in ("sampled", "greedy")
            ]
            if any(cells):
                ours, theirs = (_ratios(groups, name, lag) for name in (method, other))
                shares = _less(ours, theirs)
                rows.append([f"{method} less {other}", str(lag), *cells, _student(shares, 1)])
    return reporting.table(["contrast, Student", "lag", "sampled", "greedy", "kept, points"], rows)


def kept_table(results: Sequence[Result]) -> str:
    """A row for each method and lag: what is kept as the ratio of interquartile means (planned, with its bootstrap
    interval), as the mean of the seeds' ratios, and of the score of `COMMON` without a lag; ±: Student's 95 %. Last,
    what the starting policy would keep."""
    groups = reporting.group_by(results, "method", "lag")
    common = contrasts.scores_by_pair(groups.get((COMMON, 0), []))
    rows = []
    for (method, lag), runs in groups.items():
        if not lag or (method, 0) not in groups:
            continue
        scores, own = contrasts.scores_by_pair(runs), contrasts.scores_by_pair(groups[method, 0])
        starts = {pair: scores[pair] - gain for pair, gain in contrasts.gains_by_pair(runs).items()}
        rows.append(
            [
                method, str(lag), str(len(runs)), contrasts.kept(scores, own), _percent(scores, own),
                _percent(scores, common), _percent(starts, own),
            ]
        )  # fmt: skip
    header = [
        "method", "lag", "seeds", "kept: interquartile means", "mean of ratios", f"of {COMMON} at lag 0", "the start's",
    ]  # fmt: skip
    return reporting.table(header, rows)


def less_once_table(results: Sequence[Result]) -> str:
    """A row for each sampler of `shop-replay`: its greedy score, and its scores less those of using each episode once,
    at the same rate and by pairs, with Student's intervals: at equally many episodes, in equal time, on rare kinds."""
    once = [run for run in results if run["settings"]["method"] == "each once"]
    rows = []
    for (task, method), runs in reporting.group_by(results, "task", "method").items():
        rate = plan.rate_of(runs[0]["settings"])
        base = [run for run in once if plan.rate_of(run["settings"]) == rate]
        num_updates = max((run["settings"]["num_updates"] for run in base), default=0)
        ours, theirs = (
            [
                contrasts.scores_by_pair(arm),
                {contrasts.pair_of(run): contrasts.score_by(run, num_updates) for run in arm},
                contrasts.scores_by_pair(arm, "sampled_rare"),
            ]
            for arm in (runs, base)
        )
        less = ["" if runs == base else _student(_less(*both)) for both in zip(ours, theirs, strict=True)]
        greedy = _middle(contrasts.scores_by_pair(runs, "greedy"))
        ess, k3 = (reporting.figure_of(runs, name) for name in ("ratio/ess", "ratio/k3"))
        rows.append([task, method, f"{greedy:.3f}", *less, f"{ess:.2f}", f"{k3:.3f}"])
    header = ["task", "replay", "greedy", "less once", "in equal time", "on rare kinds", "ESS", "k3"]
    return reporting.table(header, rows)


def _middle(scores: dict[contrasts.Pair, float]) -> float:
    return float(stats.interquartile_mean(np.array(list(scores.values()))))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


def _score_before(run: Result, updates: int) -> float:
    """The measure of the score, so many updates earlier, on straight lines between evaluations."""
    times, scores = zip(*((point["update"], point["sampled"]) for point in run["curve"]), strict=True)
    return float(np.interp(np.array(times[-reporting.LAST :]) - updates, times, scores).mean())


def _differences(runs: Sequence[Result], others: Sequence[Result], which: str) -> list[float]:
    return _less(contrasts.scores_by_pair(runs, which), contrasts.scores_by_pair(others, which))


def _less(ours: dict[contrasts.Pair, float], theirs: dict[contrasts.Pair, float]) -> list[float]:
    return [ours[pair] - theirs[pair] for pair in sorted({*ours} & {*theirs})]


def _student(values: Sequence[float], digits: int = 3) -> str:
    if len(values) < 2:
        return ""
    middle, half = reporting.mean_and_half_width(values)
    return f"{middle:.{digits}f} [{middle - half:.{digits}f}, {middle + half:.{digits}f}]"


def _ratios(groups: dict[tuple[str, int], list[Result]], method: str, lag: int) -> dict[contrasts.Pair, float]:
    """Percentage of its own score at lag 0 that each seed keeps."""
    return _percents(*(contrasts.scores_by_pair(groups.get((method, at), [])) for at in (lag, 0)))


def _percents(scores: dict[contrasts.Pair, float], of: dict[contrasts.Pair, float]) -> dict[contrasts.Pair, float]:
    return {pair: 100 * scores[pair] / of[pair] for pair in sorted({*scores} & {*of}) if of[pair] > 0}


def _percent(scores: dict[contrasts.Pair, float], of: dict[contrasts.Pair, float]) -> str:
    """Mean of the seeds' ratios."""
    ratios = list(_percents(scores, of).values())
    return reporting.with_interval(ratios, 1) + " %" if len(ratios) > 1 else ""
