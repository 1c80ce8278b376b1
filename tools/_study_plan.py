"""Runs of the second study, phase by phase: docs/results/study_plan.md says why, and was written before them.

    rates    every method at three learning rates, lag 0 and 16          validation tasks, seeds of their own
    screen   every method at the rate chosen at lag 16: lags 64, 256     the same tasks and seeds
    main     the fixed methods and the best rivals, all lags             test tasks, reported seeds
    long     the same on a corridor of twice as many turns
    long-one-rate    losses on that corridor, all at one rate             test tasks, seeds of their own
    quarters    81 losses, by what each quarter of the tokens weighs      validation tasks, seeds of their own
    built       the best of them at three rates                           validation tasks and seeds
    built-again three more of them, one for each way in which good outweighs bad      the same tasks and seeds
    confirm     it beside what ships and the best rival, all lags         test tasks, seeds of their own
    after-main  what a reader of main missed, all lags                    the same tasks and seeds
    lag-4       losses on data about as old as the defaults allow         test tasks, seeds of their own
    dpo-rates, dpo      DPO by how often weights are published            as rates, and then as confirm
    precision           engine in bfloat16 under a learner in float32     test tasks, seeds of their own

Those on WebShop: tools/_study_shop.py. A later phase rests on what an earlier one has found: `chosen_rates` and
`rivals` are the rules.

Invariant: methods and rates of `main`, `long` and `shop` were chosen on other seeds and on validation tasks. Exceptions
are dated in study_plan.md: when 30 of the first 45 runs of `shop` had been looked at, it got its seeds 3 and 4, "no
correction, 1e-4" and the margin of 0.03, and `shop-256` was added, which got "TOPR, 1e-4" after 18 runs of its own.
When all of these had been looked at, `shop` got TOPR and PPO's clip at each other's rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tools import _study_grid as grid
from tools import _study_quarters as quarter
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

FLOORED_IS = (
    *GAE, "algorithm.loss=topr", "algorithm.loss.level=token",
    "algorithm.loss.positive_high=3", "algorithm.loss.negative_high=3",
)  # fmt: skip
"""The best of part (b) by `confirm`, ρ1ρρ, without its band: ρ at most 3, at least 1 where A > 0."""

SHIPPED_CRITIC = ("model.value_trunk_gradient=true",)

FIXED = ("PPO clip", "V-trace turn, PPO clip", "no correction")
"""Methods that go into the later phases whatever is found: what ships, V-trace, and none."""
NUM_RIVALS = 2

RATES = (5e-4, 1e-3, 2e-3)
RATE_LAGS = (0, 16)
"""Lags at which learning rates are chosen."""
LAGS = (0, 16, 64, 256)
VALIDATION_SEEDS_FROM = 1000
QUARTER_SEEDS_FROM = 2000
CONFIRM_SEEDS_FROM = 30
ONE_RATE_SEEDS_FROM = 40
LAG_4_SEEDS_FROM = 60
SEEDS = {
    "rates": 3, "screen": 3, "main": 30, "long": 5, "quarters": 2, "built": 3, "built-again": 3, "confirm": 10,
    "after-main": 10, "long-one-rate": 6, "lag-4": 10, "dpo-rates": 3, "dpo": 10, "precision": 10, "shop-rates": 1,
    "shop": 5, "shop-256": 3, "shop-confirm": 6, "shop-replay": 3,
}  # fmt: skip
"""Number of seeds of each phase."""
SYNC_INTERVALS = {"every update": "1", "every 5": "5", "every 25": "25", "never": "null"}
DPO = ("algorithm.credit=preference", "algorithm.loss=reinforce", "algorithm.group_size=8",
       "algorithm.aggregate=sequence_mean_token_sum")  # fmt: skip

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
    chosen, methods = rates_and_methods(finished)
    runs = [
        _corridor("main", lag, method, rate, seed)
        for lag in LAGS
        for method in methods
        for rate in dict.fromkeys([chosen[method][16], *([chosen[method][0]] if lag == 0 else [])])
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def long(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    chosen, methods = rates_and_methods(finished)
    runs = [
        _corridor("long", lag, method, chosen[method][16], seed, num_turns=6)
        for lag in (0, 16, 64)
        for method in methods
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def long_one_rate(seeds: Sequence[int]) -> list[RunSettings]:
    """In `long` TOPR has twice the rate of two losses that keep more, and PPO's clip four times that rate."""
    methods = {name: (METHODS[name], 5e-4) for name in ("TOPR", "PPO clip", "M2PO", "no correction")}
    methods["floored IS"] = (FLOORED_IS, 5e-4)
    return _on_fresh_seeds("long-one-rate", (0, 64), methods, seeds, ONE_RATE_SEEDS_FROM, num_turns=6)


def lag_4(seeds: Sequence[int]) -> list[RunSettings]:
    """`main` and `shop` leave out what lies between 0 and 16, and the defaults bound the age of data at 2."""
    words_of = {name: METHODS[name] for name in ("TOPR", "PPO clip", "no correction")} | {"floored IS": FLOORED_IS}
    methods = {name: ((*words, *SHIPPED_CRITIC), 1e-3) for name, words in words_of.items()}
    return _on_fresh_seeds("lag-4", (0, 4), methods, seeds, LAG_4_SEEDS_FROM)


def quarters(seeds: Sequence[int]) -> list[RunSettings]:
    """At the lag and the rate at which the methods of `screen` differ most."""
    return [
        _corridor_with("quarters", 64, quarter.label(cell), quarter.overrides(cell), 1e-3, QUARTER_SEEDS_FROM + seed)
        for cell in quarter.CELLS
        for seed in seeds
    ]


def built(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    return [
        _corridor_with("built", lag, method, words, rate, VALIDATION_SEEDS_FROM + seed)
        for lag in (16, 64)
        for method, words in _built_methods(finished).items()
        for rate in RATES
        for seed in seeds
    ]


def built_again(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    """At one rate, that of `quarters`."""
    return [
        _corridor_with("built-again", lag, method, words, 1e-3, VALIDATION_SEEDS_FROM + seed)
        for lag in (16, 64)
        for method, words in _built_methods(finished, again=True).items()
        for seed in seeds
    ]


def confirm(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    """Runs of the loss that was built, of what ships and of the best rival, each at the rate chosen at lag 16.

    Of all that were built the one with the highest interquartile mean at lag 64.
    """
    chosen, methods = rates_and_methods(finished)
    own_runs = [*built(range(SEEDS["built"]), finished), *built_again(range(SEEDS["built-again"]), finished)]
    results, own = at_own_rates(finished(own_runs))
    best = ranked(results)[0]
    compared = {method: (METHODS[method], chosen[method][16]) for method in (methods[0], methods[len(FIXED)])}
    words_of = _built_methods(finished) | _built_methods(finished, again=True)
    compared[best] = (words_of[best], own[best])
    return _on_fresh_seeds("confirm", LAGS, compared, seeds)


AFTER_MAIN = (
    ("floored IS", "TOPR"), ("floored IS", "decoupled PPO"), ("decoupled PPO", "TOPR"), ("IcePop", "TOPR"),
    ("PPO clip, 1e-3", "PPO clip"), ("floored IS, critic that ships", "TOPR, critic that ships"),
    ("TOPR, critic that ships", "PPO clip, critic that ships"), ("TOPR, critic that ships", "TOPR"),
    ("floored IS", "ρ1ρρ, token"), ("decoupled PPO", "PPO clip, 1e-3"),
    ("floored IS, critic that ships", "floored IS"), ("PPO clip, critic that ships", "PPO clip, 1e-3"),
)  # fmt: skip
"""Pairs of methods, of this phase and of `confirm`, whose differences are shown; the last four since they were seen."""


def after_main(seeds: Sequence[int]) -> list[RunSettings]:
    methods = {
        "floored IS": (FLOORED_IS, 1e-3),
        "decoupled PPO": (METHODS["decoupled PPO"], 1e-3),
        "IcePop": (METHODS["IcePop"], 5e-4),
        "PPO clip, 1e-3": (METHODS["PPO clip"], 1e-3),
        "PPO clip, critic that ships": ((*METHODS["PPO clip"], *SHIPPED_CRITIC), 1e-3),
        "TOPR, critic that ships": ((*METHODS["TOPR"], *SHIPPED_CRITIC), 1e-3),
        "floored IS, critic that ships": ((*FLOORED_IS, *SHIPPED_CRITIC), 1e-3),
    }
    return _on_fresh_seeds("after-main", LAGS, methods, seeds)


def dpo_rates(seeds: Sequence[int]) -> list[RunSettings]:
    return [
        _corridor_with("dpo-rates", 0, method, words, rate, VALIDATION_SEEDS_FROM + seed)
        for method, words in _by_interval().items()
        for rate in RATES
        for seed in seeds
    ]


def dpo(seeds: Sequence[int], finished: Finished) -> list[RunSettings]:
    """Each interval at its own best rate."""
    chosen = chosen_rates(finished(dpo_rates(range(SEEDS["dpo-rates"]))))
    methods = {method: (words, chosen[method][0]) for method, words in _by_interval().items()}
    return _on_fresh_seeds("dpo", [0], methods, seeds)


def precision(seeds: Sequence[int]) -> list[RunSettings]:
    """At lag 0, where the engine's rounding is all that makes ratios differ from 1, and one rate for all."""
    methods = {
        f"{method}, {dtype}": ((*METHODS[method], f"engine.dtype={dtype}"), 1e-3)
        for method in ("no correction", "token-TIS", "PPO clip", "TOPR")
        for dtype in ("float32", "bfloat16")
    }
    return _on_fresh_seeds("precision", [0], methods, seeds)


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
    return [m for m in ranked(results) if m not in FIXED and not set(GROUP) <= set(METHODS[m])][:number]


def ranked(results: Sequence[Result], lag: int = 64) -> list[str]:
    """Methods by their interquartile mean of the final score at a lag, the best first."""
    scores: dict[str, list[float]] = {}
    for result in results:
        if result["settings"]["lag"] == lag:
            scores.setdefault(result["settings"]["method"], []).append(final_score(result))
    return sorted(scores, key=lambda method: -float(interquartile_mean(np.array(scores[method]))))


def at_own_rates(results: Sequence[Result]) -> tuple[list[Result], dict[str, float]]:
    """Runs of each method at the rate that was chosen for it at lag 16, and these rates."""
    own = {method: of_lag[16] for method, of_lag in chosen_rates(results).items()}
    return [r for r in results if rate_of(r["settings"]) == own[r["settings"]["method"]]], own


def _by_interval() -> dict[str, tuple[str, ...]]:
    return {
        f"DPO, weights {label}": (*DPO, f"learner.sync_interval={words}") for label, words in SYNC_INTERVALS.items()
    }


def _built_methods(finished: Finished, again: bool = False) -> dict[str, tuple[str, ...]]:
    """The best cell of `quarters`, or `again` those of `quarter.best_of_pairs`, by ratios of tokens and of episodes."""
    scores: dict[str, dict[int, float]] = {}
    for result in finished(quarters(range(SEEDS["quarters"]))):
        of_cell = scores.setdefault(result["settings"]["method"], {})
        of_cell[result["settings"]["seed"]] = final_score(result)
    of_cells = quarter.scores_of(scores)
    return {
        f"{quarter.label(cell)}, {level}": (*quarter.overrides(cell), f"algorithm.loss.level={level}")
        for cell in (quarter.best_of_pairs(of_cells) if again else [quarter.best_cell(of_cells)])
        for level in ("token", "sequence")
    }


def rates_and_methods(finished: Finished) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Learning rates by method and lag, which `rates` has found, and the methods that go on from `screen`."""
    chosen = chosen_rates(finished(rates(range(SEEDS["rates"]))))
    return chosen, [*FIXED, *rivals(finished(screen(range(SEEDS["screen"]), finished)))]


def _corridor(part: str, lag: int, method: str, rate: float, seed: int, num_turns: int = 3) -> RunSettings:
    return _corridor_with(part, lag, method, METHODS[method], rate, seed, num_turns)


def _on_fresh_seeds(
    part: str,
    lags: Sequence[int],
    methods: dict[str, tuple[tuple[str, ...], float]],
    seeds: Sequence[int],
    seeds_from: int = CONFIRM_SEEDS_FROM,
    num_turns: int = 3,
) -> list[RunSettings]:
    """Runs on test tasks and on seeds that nothing was chosen by. methods: label -> words, learning rate."""
    runs = [
        _corridor_with(part, lag, method, words, rate, seeds_from + seed, num_turns)
        for lag in lags
        for method, (words, rate) in methods.items()
        for seed in seeds
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def _corridor_with(
    part: str, lag: int, method: str, words_of_method: tuple[str, ...], rate: float, seed: int, num_turns: int = 3
) -> RunSettings:
    task = f"corridor, {num_turns} turns, rate {rate:g}"
    run = grid.corridor(part, task, lag, method, words_of_method, seed, num_updates=600)
    own = {"learner.learning_rate": f"{rate:g}"} | ({} if num_turns == 3 else {"engine.max_length": "128"})
    words = tuple(word for word in run.overrides if word.split("=")[0] not in own)
    overrides = (*words, *(f"{key}={value}" for key, value in own.items()))
    return replace(run, overrides=overrides, num_turns=num_turns, evaluate_on="validation")
