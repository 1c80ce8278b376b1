"""Runs of each part of the first study; those of the second: _study_plan.py.

Invariant: inside a part, runs of one task and seed differ in the lag and in what their method names, and in nothing
else: the same network, tasks, numbers of episodes and updates, learning-rate schedule and entropy bonus.
"""

from collections.abc import Sequence
from dataclasses import replace

from tools._study_lab import RunSettings

COMMON = (
    "env=corridor", "model=scratch", "algorithm=vtrace", "run.terminal=false",
    "engine.max_length=64", "actor.max_episodes=64",
    "algorithm.max_staleness=null", "algorithm.entropy_coef=0.02",
    "model.value_trunk_gradient=false", "learner.decay=constant", "learner.token_budget=8192",
    "learner.stall_timeout_s=5",
)  # fmt: skip

METHODS: dict[str, tuple[str, ...]] = {
    "no correction": ("algorithm.credit=gae", "algorithm.loss=reinforce"),
    "token-TIS": ("algorithm.credit=gae", "algorithm.loss=truncated_is"),
    "V-trace token": ("algorithm.credit=vtrace", "algorithm.credit.granularity=token", "algorithm.loss=truncated_is"),
    "V-trace turn": ("algorithm.credit=vtrace", "algorithm.credit.granularity=turn", "algorithm.loss=truncated_is"),
    "decoupled PPO": ("algorithm.credit=gae", "algorithm.loss=decoupled_ppo", "algorithm.loss.proximal=recomputed"),
    "PPO clip": ("algorithm.credit=gae", "algorithm.loss=ppo_clip"),
    "V-trace turn, PPO clip": (
        "algorithm.credit=vtrace",
        "algorithm.credit.granularity=turn",
        "algorithm.loss=ppo_clip",
    ),
}
"""Part (a). One step a batch: the ratio to the proximal policy of `decoupled PPO` is then 1, and its weight π_prox/μ,
which is not truncated, is all that is left of it."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "weights not capped": ("algorithm.loss.cap=1000000",),
    "weights capped at 5": ("algorithm.loss.cap=5",),
    "upper clip alone": ("algorithm.loss=ppo_clip", "algorithm.loss.clip_low=1", "algorithm.loss.dual_clip=1000000"),
    "lower clip alone": (
        "algorithm.loss=ppo_clip",
        "algorithm.loss.clip_high=1000000",
        "algorithm.loss.dual_clip=1000000",
    ),
    "slower Adam": ("learner.adam_beta2=0.999",),
}
"""Part (d): one thing about V-trace turn with weights capped at 1 is changed, to see what makes it break."""

CRITICS: dict[str, tuple[str, ...]] = {
    "linear": ("model.value_hidden_size=0",),
    "linear, gradient into the trunk": ("model.value_hidden_size=0", "model.value_trunk_gradient=true"),
    "hidden layer, gradient into the trunk": ("model.value_trunk_gradient=true",),
}
"""Part (e). The last is what ships. In all other parts the head has a hidden layer and its gradient stays out of the
trunk. A head that does not fit the starting policy's begins at zero."""

START = (*COMMON, "learner.batch_size=32", "learner.learning_rate=2e-3")
SHAPE = ("engine.max_new_tokens", "engine.max_length", "model.scratch.hidden_size", "model.scratch.num_layers")
"""Settings that a run shares with the one that made its starting policy."""
WARM_UPDATES = 100

LAGS = (0, 4, 16)
LEARNING_RATE = 1e-3

REPLAYS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "recency": ("replay.recency_tau=8",),
    "PER": ("replay.advantage_exponent=0.6",),
    "freshness-aware PER": ("replay.advantage_exponent=0.6", "replay.recency_tau=8"),
    "all three": ("replay.advantage_exponent=0.6", "replay.recency_tau=8", "replay.rarity_exponent=0.25"),
}
"""Part (c)."""


def part_a(seeds: Sequence[int], num_updates: int = 600) -> list[RunSettings]:
    return [
        corridor("a", "corridor", lag, method, overrides, seed, num_updates)
        for lag in LAGS
        for method, overrides in METHODS.items()
        for seed in seeds
    ]


def part_d(seeds: Sequence[int], num_updates: int = 600) -> list[RunSettings]:
    return [
        corridor("d", "corridor", LAGS[-1], method, (*METHODS["V-trace turn"], *overrides), seed, num_updates)
        for method, overrides in VARIANTS.items()
        for seed in seeds
    ]


def part_e(seeds: Sequence[int], num_updates: int = 600) -> list[RunSettings]:
    return [
        corridor("e", f"critic: {critic}", lag, method, (*METHODS[method], *overrides), seed, num_updates)
        for critic, overrides in CRITICS.items()
        for lag in (LAGS[0], LAGS[-1])
        for method in ("no correction", "PPO clip", "V-trace turn, PPO clip")
        for seed in seeds
    ]


def corridor(
    part: str, task: str, lag: int, method: str, overrides: tuple[str, ...], seed: int, num_updates: int
) -> RunSettings:
    """A run on the corridor from a starting policy that all methods share."""
    return RunSettings(
        part=part,
        task=task,
        method=method,
        lag=lag,
        seed=seed,
        overrides=(
            *COMMON,
            "engine.max_new_tokens=2",
            "learner.batch_size=32",
            f"learner.learning_rate={LEARNING_RATE:g}",
            *overrides,
        ),
        num_updates=num_updates,
        warm_updates=WARM_UPDATES,
        evaluate_every=max(1, num_updates // 16),
        evaluation_tasks=100,
    )


def part_c(seeds: Sequence[int], num_updates: int = 600) -> list[RunSettings]:
    """Four samples an insert, so a quarter of the episodes of part (a), with what part (a) found to bear the lag.

    b is the exponent of the weights that undo the priorities. `rare`: of the training tasks with n doors `-` only the
    share 0.3^n comes up; the held-out ones stay even.
    """
    batch, reuse = 32, 4
    base = (
        *COMMON,
        "engine.max_new_tokens=2",
        f"learner.batch_size={batch}",
        f"learner.learning_rate={LEARNING_RATE:g}",
        *METHODS["PPO clip"],
    )
    runs = []
    for task, rare_share, exponent in (("even, b 0", 1.0, 0), ("rare, b 0", 0.3, 0), ("even, b 0.6", 1.0, 0.6)):
        shared = (
            f"replay.samples_per_insert={reuse}", f"replay.max_replays={4 * reuse}", "replay.capacity=512",
            "replay.uniform_floor=0.1", f"replay.correction_exponent={exponent}",
        )  # fmt: skip
        for seed in seeds:
            common = RunSettings(
                part="c", task=task, method="", lag=4, seed=seed, overrides=(), num_updates=num_updates,
                warm_updates=WARM_UPDATES, rare_share=rare_share, evaluate_every=max(1, num_updates // 16),
                evaluation_tasks=100,
            )  # fmt: skip
            # Without priorities there is nothing to undo.
            chosen = {name: words for name, words in REPLAYS.items() if words or exponent == 0}
            runs += [
                replace(common, method=method, overrides=(*base, *shared, *overrides))
                for method, overrides in chosen.items()
            ]
            if exponent == 0:
                once = num_updates // reuse
                every = max(1, once // 16)
                runs.append(replace(common, method="used once", overrides=base, num_updates=once, evaluate_every=every))
    return runs


def start_of(settings: RunSettings) -> RunSettings | None:
    """The run that makes a run's starting policy: on-policy, where all ratios are 1 and the methods are the same one.

    From random weights the first hundred updates only find out which letters count, whatever the lag.
    """
    if settings.warm_updates == 0:
        return None
    return RunSettings(
        part="start", task="start", method="on-policy", lag=0, seed=settings.seed,
        overrides=(*START, *(word for word in settings.overrides if word.split("=")[0] in SHAPE)),
        num_updates=settings.warm_updates, num_turns=settings.num_turns, evaluate_every=settings.warm_updates,
        evaluation_tasks=settings.evaluation_tasks, evaluate_on="validation",
    )  # fmt: skip


def quick(settings: RunSettings) -> RunSettings:
    """The same run, cut to what shows that it runs at all."""
    warm_updates = min(2, settings.warm_updates)
    return replace(settings, num_updates=3, warm_updates=warm_updates, evaluate_every=2, evaluation_tasks=4, overrides=(
        *settings.overrides, "model.scratch.hidden_size=32", "model.scratch.num_layers=1", "learner.batch_size=8"
    ))  # fmt: skip
