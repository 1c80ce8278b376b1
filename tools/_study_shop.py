"""Runs of the second study on WebShop: docs/results/study_plan.md says why, and was written before them.

    shop-rates     what `main` compares and what part (b) has built, at three rates, lag 16     validation tasks
    shop           each at the rate chosen there, lags 0, 16, 64                                test tasks
    shop-256       methods of which one becomes the default, four times as many updates        test tasks
    shop-confirm   the default, PPO's clip and no correction on goals that no other part has    test tasks
    shop-replay    what is drawn how often, where half of the kinds of goals are rare           test tasks

A seed of `shop-confirm` has a catalogue of its own; all others have that of the quickstart. All start from the policy
that --policy names, or the one that the quickstart starts from.
"""

from collections.abc import Sequence
from dataclasses import replace

from tools import _study_grid as grid
from tools import _study_plan as plan
from tools._study_lab import RunSettings
from tools._study_plan import Finished

RATES = (3e-5, 1e-4, 3e-4)
BUILT = "floored IS"
METHODS = plan.METHODS | {BUILT: plan.FLOORED_IS}
CONTENDERS = (BUILT, "TOPR", "PPO clip")
"""Methods of which one becomes the default; they have two more seeds than the others."""
NUM_SEEDS_OF_ALL = 3
COMMON = (
    "model=tiny_shopper", "run.terminal=false", "actor.max_episodes=64", "algorithm.max_staleness=null",
    "learner.batch_size=16", "learner.adam_beta2=0.99", "learner.decay=constant", "learner.token_budget=4096",
    "learner.stall_timeout_s=5", "algorithm.aggregate=sequence_mean_token_mean",
)  # fmt: skip
REUSES = (2, 4, 8)
"""Samples per insert of `shop-replay`, beside 1."""
FRESH_FROM = 50
"""First seed and first catalogue of `shop-confirm`."""
UPDATES_ONCE = 120
"""Updates of `shop-replay` where each episode is used once."""
CONTRASTS = (
    (BUILT, "TOPR"), (BUILT, "PPO clip"), ("TOPR", "PPO clip"), ("PPO clip", "V-trace turn, PPO clip"),
    ("PPO clip", "no correction"), ("PPO clip", "no correction, 1e-4"),
    ("TOPR, 1e-4", "TOPR"), ("TOPR, 1e-4", "PPO clip"), ("TOPR", "PPO clip, 3e-4"), ("PPO clip, 3e-4", "PPO clip"),
    (f"{BUILT}, 1e-4", "TOPR, 1e-4"), (f"{BUILT}, 1e-4", "PPO clip"), (f"{BUILT}, 1e-4", BUILT),
)  # fmt: skip
"""Pairs of methods whose differences are shown."""
AT_THE_OTHERS_RATE = (("TOPR", 1e-4, "TOPR, 1e-4"), ("PPO clip", 3e-4, "PPO clip, 3e-4"))
"""Methods of `shop` at each other's rate too, with the rate and their name there."""


def rates(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    """Runs of the methods of `main`, with the loss that part (b) has built in the place of the second rival."""
    _, methods = plan.rates_and_methods(finished)
    return [
        _run("shop-rates", 16, method, rate, plan.VALIDATION_SEEDS_FROM + seed, policy)
        for method in [*methods[:-1], BUILT]
        for rate in RATES
        for seed in seeds
    ]


def shop(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    """No correction also at the rate of PPO's clip, with which it has the same gradient where there is no lag.

    TOPR and PPO's clip, whose rates differ, also at each other's.
    """
    chosen = plan.chosen_rates(finished(rates(range(plan.SEEDS["shop-rates"]), finished, policy)))
    runs = [
        _run("shop", lag, method, rates_of[16], seed, policy)
        for lag in (0, 16, 64)
        for method, rates_of in chosen.items()
        for seed in seeds
        if seed < NUM_SEEDS_OF_ALL or method in CONTENDERS
    ]
    runs += [
        replace(_run("shop", lag, "no correction", 1e-4, seed, policy), method="no correction, 1e-4")
        for lag in (0, 16)
        for seed in seeds
        if seed < NUM_SEEDS_OF_ALL
    ]
    runs += [
        replace(_run("shop", lag, method, rate, seed, policy), method=name)
        for seed in seeds
        for lag in (64, 16)
        for method, rate, name in AT_THE_OTHERS_RATE
    ]
    return [replace(run, evaluate_on="test") for run in runs]


def at_256(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    """Four times as many updates as in `shop`: in 160 a lag of 256 would be learning from a fixed set.

    TOPR also at the rate of PPO's clip: its own was too high for so many updates without a lag. With a lag so does what
    was built, since it was not behind on fresh goals at that rate.
    """
    chosen = plan.chosen_rates(finished(rates(range(plan.SEEDS["shop-rates"]), finished, policy)))
    runs = [
        _run("shop-256", lag, method, chosen[method][16], seed, policy)
        for lag in (256, 0)
        for seed in seeds
        for method in CONTENDERS
    ]
    runs += [
        replace(_run("shop-256", lag, method, 1e-4, seed, policy), method=f"{method}, 1e-4")
        for seed in seeds
        for lag, method in ((0, "TOPR"), (256, "TOPR"), (256, BUILT))
    ]
    return [replace(run, evaluate_on="test", num_updates=640, evaluate_every=40) for run in runs]


def confirm(seeds: Sequence[int], policy: str | None = None) -> list[RunSettings]:
    """The default and its rival with and without a lag, and no correction where it should break: at one rate, on fresh
    seeds, each with a catalogue of its own, so that what goals vary is in the intervals too. The last arm was added
    when the others, and `long-one-rate`, had been looked at."""
    arms = ((64, "TOPR"), (64, "PPO clip"), (0, "TOPR"), (0, "PPO clip"), (16, "no correction"), (64, BUILT))
    runs = []
    for number in (FRESH_FROM + seed for seed in seeds):
        for lag, method in arms:
            run = _run("shop-confirm", lag, method, 1e-4, number, policy)
            words = (*run.overrides, f"env.webshop.catalogue_seed={number}")
            runs.append(replace(run, overrides=words, evaluate_on="test", evaluation_tasks=64))
    return runs


def replay(seeds: Sequence[int], finished: Finished, policy: str | None = None) -> list[RunSettings]:
    """Every sampler at 2, 4 and 8 samples per insert, beside each episode once: equally many episodes.

    At 8, half of the time of a seed, the first seed alone. By the method, at its rate, that was the best one in
    `shop-rates` at a lag of 16. When all but three of these had been looked at, two samplers at a rate that more
    updates than in `shop` bear were added.
    """
    results, own = plan.at_own_rates(finished(rates(range(plan.SEEDS["shop-rates"]), finished, policy)))
    method = plan.ranked(results, lag=16)[0]
    arms = [(1, "each once", ()), *((reuse, *words) for reuse in REUSES for words in grid.REPLAYS.items())]
    runs = [
        _replayed(own[method], f"{reuse} samples per insert", reuse, label, words, method, seed, policy)
        for reuse, label, words in arms
        for seed in seeds
        if reuse < REUSES[-1] or seed == 0
    ]
    slower = [arms[0], *((2, label, grid.REPLAYS[label]) for label in ("uniform", "all three"))]
    runs += [
        _replayed(1e-4, f"{reuse} samples per insert, rate 0.0001", reuse, label, words, method, seed, policy)
        for reuse, label, words in slower
        for seed in seeds
    ]
    return runs


def _replayed(
    rate: float, task: str, reuse: int, label: str, words: Sequence[str], method: str, seed: int, policy: str | None
) -> RunSettings:
    of_buffer = (
        f"replay.samples_per_insert={reuse}", f"replay.max_replays={4 * reuse}", "replay.capacity=512",
        "replay.uniform_floor=0.1", *words,
    )  # fmt: skip
    run = _run("shop-replay", 4, method, rate, plan.CONFIRM_SEEDS_FROM + seed, policy)
    return replace(
        run, task=f"WebShop, {task}", method=label, overrides=(*run.overrides, *(of_buffer if reuse > 1 else ())),
        num_updates=UPDATES_ONCE * reuse, evaluate_every=10 * reuse, evaluation_tasks=64, rare_share=0.1,
        evaluate_on="test",
    )  # fmt: skip


def _run(part: str, lag: int, method: str, rate: float, seed: int, policy: str | None) -> RunSettings:
    path = () if policy is None else (f"model.path={policy}",)
    return RunSettings(
        part=part, task=f"WebShop, rate {rate:g}", method=method, lag=lag, seed=seed,
        overrides=(*COMMON, *path, *METHODS[method], f"learner.learning_rate={rate:g}"),
        num_updates=160, evaluate_every=16, evaluation_tasks=48, evaluate_on="validation",
    )  # fmt: skip
