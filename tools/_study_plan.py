"""Runs of the second study, phase by phase: docs/results/study_plan.md says why, and was written before them.

    rates    every method at three learning rates, lag 0 and 16          validation tasks, seeds of their own
    screen   every method at the rate chosen at lag 16: lags 64, 256     the same tasks and seeds
    main     the fixed methods and the best rivals, all lags             test tasks, reported seeds
    long     the same on a corridor of twice as many turns
    shop-rates, shop    the same two steps on WebShop, by the policy that --policy names

A later phase rests on what an earlier one has found: `chosen_rates` and `rivals` are the rules.

Invariant: nothing that is reported from `main`, `long` and `shop` was looked at when methods and rates were chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tools import _study_grid as grid
from tools._study_lab import RunSettings
from tools._study_stats import interquartile_mean

GAE = ("algorithm.credit=gae",)
GROUP = ("algorithm.credit=group_relative", "algorithm.group_size=8")

METHODS: dict[str, tuple[str, ...]] = {
    **{name: grid.METHODS[name] for name in ("no correction", "token-TIS", "V-trace token", "V-trace turn")},
    "V-trace turn, PPO clip": grid.METHODS["V-trace turn, PPO clip"],
    "PPO clip": grid.METHODS["PPO clip"],
    "decoupled PPO": (*GAE, "algorithm.loss=decoupled_ppo"),
    "CISPO": (*GAE, "algorithm.loss=cispo"),
    "M2PO": (*GAE, "algorithm.loss=m2po"),
    "TOPR": (*GAE, "algorithm.loss=topr"),
    "IcePop": (
        *GAE, "algorithm.loss=decoupled_ppo", "algorithm.loss.proximal=recomputed",
        "algorithm.reject=token", "algorithm.reject_low=0.5", "algorithm.reject_high=5",
    ),
    "PPO clip, group": (*GROUP, "algorithm.loss=ppo_clip"),
    "GSPO, group": (*GROUP, "algorithm.loss=gspo"),
    "TOPR, group": (*GROUP, "algorithm.loss=topr"),
}  # fmt: skip
"""Corrections that are compared. GSPO's ratio is one for an episode, and so must its advantage be: those on
group-relative advantages have a control of their own, PPO's clip on the same."""

FIXED = ("PPO clip", "V-trace turn, PPO clip", "no correction")
"""Methods that go into the later phases whatever is found: what ships, V-trace, and none."""
NUM_RIVALS = 2

RATES = (5e-4, 1e-3, 2e-3)
SHOP_RATES = (1e-4, 3e-4, 1e-3)
RATE_LAGS = (0, 16)
"""Lags at which learning rates are chosen."""
LAGS = (0, 16, 64, 256)
VALIDATION_SEEDS_FROM = 1000
SEEDS = {"rates": 3, "screen": 3, "main": 30, "long": 5, "shop-rates": 1, "shop": 3}
"""Number of seeds of each phase."""
SHOP = (
    "model=tiny_shopper", "run.terminal=false", "actor.max_episodes=64", "algorithm.max_staleness=null",
    "learner.batch_size=32", "learner.adam_beta2=0.99", "learner.decay=constant", "learner.token_budget=4096",
    "learner.stall_timeout_s=5", "algorithm.aggregate=sequence_mean_token_mean",
)  # fmt: skip

Result = dict[str, Any]
Finished = Callable[[Sequence[RunSettings]], list[Result]]
"""Results of the given runs; raises `Missing` where one has not finished."""


class Missing(Exception):
    """A phase rests on runs that have not finished."""


def rates(seeds: Sequence[int]) -> list[RunSettings]:
    return [
        _corridor("rates", lag, method, rate, VALIDATION_SEEDS_FROM + seed)
        for lag in RATE_LAGS
        for method in METHODS
        for rate in RATES
        for seed in seeds
    ]


def screen(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    chosen = chosen_rates(finished(rates(range(SEEDS["rates"]))))
    return [
        _corridor("screen", lag, method, chosen[method][16], VALIDATION_SEEDS_FROM + seed)
        for lag in LAGS
        if lag not in RATE_LAGS
        for method in METHODS
        for seed in seeds
    ]


def main(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    """At lag 0 also with the rate that was chosen there."""
    chosen, methods = _found(finished)
    runs = [
        _corridor("main", lag, method, rate, seed)
        for lag in LAGS
        for method in methods
        for rate in dict.fromkeys([chosen[method][16], *([chosen[method][0]] if lag == 0 else [])])
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def long(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    chosen, methods = _found(finished)
    runs = [
        _corridor("long", lag, method, chosen[method][16], seed, num_turns=6)
        for lag in (0, 16, 64)
        for method in methods
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def shop_rates(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    _, methods = _found(finished)
    return [
        _shop("shop-rates", lag, method, rate, VALIDATION_SEEDS_FROM + seed, policy)
        for lag in RATE_LAGS
        for method in methods
        for rate in SHOP_RATES
        for seed in seeds
    ]


def shop(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    chosen = chosen_rates(finished(shop_rates(range(SEEDS["shop-rates"]), finished, policy)))
    runs = [
        _shop("shop", lag, method, rates_of[16], seed, policy)
        for lag in (0, 16, 64)
        for method, rates_of in chosen.items()
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def final_score(result: Result) -> float:
    """Mean of the last five evaluations, sampled."""
    return float(np.mean([point["sampled"] for point in result["curve"][-5:]]))


def rate_of(settings: Any) -> float:
    """Learning rate of a run, from its settings as data."""
    [word] = [word for word in settings["overrides"] if word.startswith("learner.learning_rate=")]
    return float(word.split("=")[1])


def chosen_rates(results: Sequence[Result]) -> dict[str, dict[int, float]]:
    """Method -> lag -> the rate with the highest interquartile mean of the final score; of equal ones the lowest."""
    scores: dict[tuple[str, int, float], list[float]] = {}
    for result in results:
        s = result["settings"]
        scores.setdefault((s["method"], s["lag"], rate_of(s)), []).append(final_score(result))
    best: dict[str, dict[int, tuple[float, float]]] = {}
    for (method, lag, rate), found in scores.items():
        candidate = (float(interquartile_mean(np.array(found))), -rate)
        of_lag = best.setdefault(method, {})
        of_lag[lag] = max(of_lag.get(lag, candidate), candidate)
    return {method: {lag: -negative for lag, (_, negative) in of_lag.items()} for method, of_lag in best.items()}


def rivals(results: Sequence[Result], number: int = NUM_RIVALS) -> list[str]:
    """The methods beside the fixed ones with the highest interquartile mean of the final score at lag 64.

    Not those on group-relative advantages, which the plan compares with a control of their own.
    """
    scores: dict[str, list[float]] = {}
    for result in results:
        if result["settings"]["lag"] == 64:
            scores.setdefault(result["settings"]["method"], []).append(final_score(result))
    candidates = [m for m in scores if m not in FIXED and not set(GROUP) <= set(METHODS[m])]
    means = {m: float(interquartile_mean(np.array(scores[m]))) for m in candidates}
    return sorted(means, key=lambda method: -means[method])[:number]


def _found(finished: Finished) -> tuple[dict[str, dict[int, float]], list[str]]:
    """What `rates` and `screen` have found: rates, and the methods that go on."""
    chosen = chosen_rates(finished(rates(range(SEEDS["rates"]))))
    return chosen, [*FIXED, *rivals(finished(screen(range(SEEDS["screen"]), finished)))]


def _corridor(part: str, lag: int, method: str, rate: float, seed: int, num_turns: int = 3) -> RunSettings:
    task = f"corridor, {num_turns} turns, rate {rate:g}"
    run = grid.corridor(part, task, lag, method, METHODS[method], seed, num_updates=600)
    own = {"learner.learning_rate": f"{rate:g}"} | ({} if num_turns == 3 else {"engine.max_length": "128"})
    words = tuple(word for word in run.overrides if word.split("=")[0] not in own)
    overrides = (*words, *(f"{key}={value}" for key, value in own.items()))
    return replace(run, overrides=overrides, num_turns=num_turns, evaluate_on="validation")


def _shop(part: str, lag: int, method: str, rate: float, seed: int, policy: str | None) -> RunSettings:
    path = () if policy is None else (f"model.path={policy}",)
    return RunSettings(
        part=part, task=f"WebShop, rate {rate:g}", method=method, lag=lag, seed=seed,
        overrides=(*SHOP, *path, *METHODS[method], f"learner.learning_rate={rate:g}"),
        num_updates=120, evaluate_every=10, evaluation_tasks=48, evaluate_on="validation",
    )  # fmt: skip
