"""The metrics as a text for people: each name, how its values combine, and its meaning, by part.

All of that stands where a metric is declared, in observability/metrics.py or in a credit or loss. Here stand a line on
each part, and which metrics to watch first.

    python -m impala_llm.commands.metrics_reference > docs/metrics.md
"""

import textwrap
from collections.abc import Mapping

from impala_llm.algorithms.registry import CREDITS, LOSSES
from impala_llm.observability.metrics import METRICS, Aggregation, Metric, declarations

INTRODUCTION = """\
# Metrics

Written by `python -m impala_llm.commands.metrics_reference > docs/metrics.md` from the declarations in
`impala_llm/observability/metrics.py` and in the credits and losses. `tensorboard/metrics.jsonl` in a run's folder has a
line for each update, with every metric that has a value then; `run.metric_writers` names further writers,
also one of your own: [Metrics elsewhere](launching.md#metrics-elsewhere). TensorBoard draws over updates (STEP) or
seconds (RELATIVE); for a curve over tokens or episodes take `progress/tokens` or `progress/episodes` of the same lines
as its axis.

## Which to watch first

| metric | healthy | if not |
|---|---|---|
"""

WATCH = (
    (
        ("rollout/window_score",),
        "rises. It is sampled at `engine.temperature`, and so as a rule below the greedy `evaluation/score`",
        "[troubleshooting.md](troubleshooting.md)",
    ),
    (
        ("advantage/zero_share",),
        "near 0, where groups are compared. With success as the only reward, in groups of 8: 0.06 at a success rate of "
        "30 %, 0.43 at 10 %, 0.85 at 2 %",
        "[larger groups, graded scores, a warm start](algorithms.md#credit-algorithmcredit)",
    ),
    (
        ("staleness/mean", "buffer/lost_tokens_share"),
        "below `algorithm.max_staleness`; below 0.05",
        "[fewer episodes at once, larger batches](launching.md#how-many-gpus-for-each-side)",
    ),
    (
        ("ratio/ess",),
        "near 1. Far below 1 the data are old for the correction",
        "lower `algorithm.max_staleness`, or [another loss](algorithms.md#policy-loss-algorithmloss)",
    ),
    (
        ("loss/entropy", "alarm/entropy_collapse", "alarm/noise_collapse"),
        "falls while the score rises; both alarms are 0",
        "lower `learner.learning_rate`, or set `algorithm.entropy_target`",
    ),
    (
        ("value/explained_variance",),
        "rises from 0, a constant guess, towards 1; with `gae`, `vtrace` and every other credit that fits values",
        "[the value head](algorithms.md#credit-algorithmcredit)",
    ),
    (
        ("mismatch/logprob_mean",),
        "below 1e-5 with `engine.dtype=float32`, 0.002 to 0.01 with bfloat16; above `algorithm.mismatch_alarm` engine "
        "and learner disagree",
        "`algorithm.recompute_behaviour`; another `engine.dtype` or `learner.precision`",
    ),
    (
        ("time/idle_share", "actor/idle_share"),
        "below 0.1; below 0.3. With `algorithm.max_staleness=0` both sides are idle in turn",
        "[GPUs for each side](launching.md#how-many-gpus-for-each-side)",
    ),
)
"""Metrics, their values in a healthy run, and what to do about others."""

COMBINING = """
## All of them

In brackets: how the values of an update, of all ranks and actors, become one number. A mean weighs each value by the
number of tokens or episodes that it is a mean of. Names after a dash are the credits or losses that measure it.
"""

COMBINED = {
    Aggregation.MEAN: "mean",
    Aggregation.MAX: "maximum",
    Aggregation.MIN: "minimum",
    Aggregation.SUM: "sum",
    Aggregation.LAST: "last value",
    Aggregation.DEVIATION: "standard deviation",
    Aggregation.SAMPLE_SIZE: "effective sample size",
    Aggregation.EXPLAINED: "explained variance",
}
"""Rule by which values combine, in a word."""

PARTS = {
    "rollout": "What the agents achieve: training episodes that ended since the last update.",
    "evaluation": "Validation tasks inside of the run, and the comparison at its end.",
    "progress": "Further x-axes.",
    "loss": "The loss of an update.",
    "optimizer": "The optimizer's steps, and the coefficients in force.",
    "alarm": "A policy that collapses: `algorithm.entropy_alarm`, `algorithm.length_alarm`.",
    "reward": "What is added to the environment's rewards.",
    "advantage": "The advantages that the credit computes.",
    "sft": "The warm start, `impala-llm sft`.",
    "ratio": "Importance ratios π/μ.",
    "mismatch": "Log-probabilities of the learner against the engine's: l = log π - log μ of a token.",
    "staleness": "Age of the data, in versions.",
    "actor": "The actors. What they measure themselves comes once per `pipeline.heartbeat_s`: a shorter step repeats "
    "the last values.",
    "learner": "The learner.",
    "pipeline": "Tickets, and trajectories on their way to the learner.",
    "buffer": "The replay buffer, and what is lost there.",
    "weights": "New versions on their way to the engines.",
    "time": "The learner's step: `idle` waits for a batch, `receive` takes trajectories in and draws a batch, `log` is "
    "the rest of the bookkeeping.",
    "value": "The value head.",
    "preference": "The pairs of DPO.",
}
"""First half of a name -> what metrics with it are about."""

OWN = """\
## `env/*`

What the environment reports: `env/NAME` (mean) is `info["stats"]["NAME"]` at the end of an episode.

## Those of your own

A credit or loss of your own declares its metrics: [algorithms.md](algorithms.md#one-of-your-own)."""


def markdown(width: int = 120) -> str:
    """Return the page docs/metrics.md."""
    owners = _owners()
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {good} | {remedy} |" for names, good, remedy in WATCH]
    lines = [INTRODUCTION + "\n".join(rows), COMBINING]
    for part, metrics in _by_part().items():
        lines += [f"## `{part}/*`\n", *textwrap.wrap(PARTS[part], width), ""]
        for metric in metrics:
            measured_by = f" – {', '.join(owners[metric.name])}" if metric.name in owners else ""
            text = f"- `{metric.name}` ({COMBINED[metric.kind]}): {metric.meaning}{measured_by}"
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        lines.append("")
    return "\n".join([*lines, OWN]) + "\n"


def _by_part() -> Mapping[str, list[Metric]]:
    """The declared metrics by the first half of their names, in the order of the declarations."""
    parts: dict[str, list[Metric]] = {}
    for metric in METRICS.values():
        parts.setdefault(metric.name.partition("/")[0], []).append(metric)
    return parts


def _owners() -> Mapping[str, list[str]]:
    """Metric -> the credits or losses that measure it."""
    measured = [(name, declarations("credit", credit.metrics)) for name, credit in sorted(CREDITS.items())]
    measured += [(name, declarations("loss", loss.metrics)) for name, loss in sorted(LOSSES.items())]
    owners: dict[str, list[str]] = {}
    for owner, metrics in measured:
        for metric in metrics:
            owners.setdefault(metric, []).append(owner)
    return owners


if __name__ == "__main__":
    print(markdown(), end="")
