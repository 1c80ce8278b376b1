"""Every metric of the system, once: its name, how values of it combine, and what it means.

Names are `<part>/<what>[_unit]`; a fraction ends in `_share`. They are stable, since dashboards and scripts of users
read them: a part of the code that gets another name leaves its metrics as they are.

Invariant: a number reaches TensorBoard, the JSONL file or the terminal only under a name that `METRICS` declares (or
under `env/`, whose second half the environment chooses): one name, one meaning.

    log = MetricLog()
    log.add("rollout/score", trajectory.score)
    log.add("loss/policy", loss, weight=num_action_tokens)
    writer.write(step, log.flush())
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from impala_llm.algorithms.registry import CREDITS, LOSSES

ENV_PREFIX = "env/"
"""`env/<key>`: mean over finished episodes of the number that the environment reports as info["stats"][key]."""


class Aggregation(Enum):
    """Way in which the values between two flushes are combined to one number."""

    MEAN = "weighted mean"
    MAX = "maximum"
    MIN = "minimum"
    SUM = "sum"
    LAST = "last value"
    # Formed once of the weighted means of several numbers.
    DEVIATION = "standard deviation, of the mean and the mean of the squares"
    SAMPLE_SIZE = "effective sample size (sum w)^2 / (n sum w^2), of the same"
    EXPLAINED = "1 - Var(errors) / Var(targets), of both of the targets and both of the errors"


@dataclass(frozen=True)
class Metric:
    """One declared metric: `meaning` names the denominator or unit where there is one."""

    name: str
    kind: Aggregation
    meaning: str


class MetricError(ValueError):
    """A metric that is not declared, or a value that cannot be combined."""


STAGES = ("idle", "receive", "pack", "forward", "backward", "optimize", "publish", "log")
"""Stages of the learner's step, in order. `idle` is waiting for a batch, `receive` is taking in trajectories and
drawing a batch without waiting; gradient reduction belongs to `backward`, a step's metrics to the `log` of the next."""
OVERHEAD = ("receive", "pack", "publish", "log")
"""Stages in which nothing is learned."""

_FORMULAS: dict[Aggregation, tuple[int, Callable[..., float]]] = {
    Aggregation.MEAN: (1, lambda mean: mean),
    Aggregation.DEVIATION: (2, lambda mean, square: math.sqrt(_variance(mean, square))),
    Aggregation.SAMPLE_SIZE: (2, lambda mean, square: mean * mean / square if square else 0.0),
    Aggregation.EXPLAINED: (4, lambda *moments: _explained(_variance(*moments[:2]), _variance(*moments[2:]))),
}
"""Number of means, and what is formed of them, of each kind that is weighted."""


def _variance(mean: float, square: float) -> float:
    variance = square - mean * mean
    return variance if variance > 1e-12 * square else 0.0  # what rounding leaves of a constant


def _explained(of_targets: float, of_errors: float) -> float:
    # Equal targets leave nothing to explain.
    return 1.0 - of_errors / of_targets if of_targets > 0.0 else 0.0


_MEAN, _MAX, _MIN, _SUM, _LAST = Aggregation.MEAN, Aggregation.MAX, Aggregation.MIN, Aggregation.SUM, Aggregation.LAST

_LENGTHS = (
    ("below_256", "fewer than 256"),
    ("below_1k", "256 to 1,023"),
    ("below_4k", "1,024 to 4,095"),
    ("below_16k", "4,096 to 16,383"),
    ("from_16k", "16,384 or more"),
)
_AGES = (("0", "0"), ("1", "1"), ("2", "2"), ("3_4", "3 to 4"), ("5_8", "5 to 8"), ("9_up", "9 and more"))

_DECLARED = (
    # What the agents achieve. Denominator: episodes that ended since the last flush.
    ("rollout/reward", _MEAN, "sum of an episode's rewards, per finished episode"),
    ("rollout/score", _MEAN, "final score in [0, 1], per finished episode"),
    ("rollout/success_rate", _MEAN, "share of finished episodes that succeeded"),
    ("rollout/length_tokens", _MEAN, "tokens of an episode (prompt, observations, actions), per finished episode"),
    ("rollout/action_tokens", _MEAN, "sampled tokens of an episode, per finished episode"),
    ("rollout/turns", _MEAN, "actions of an episode, per finished episode"),
    ("rollout/episodes", _SUM, "finished episodes that the learner received since the last step"),
    # The same over a window: what a single step received is few episodes, and short ones come first.
    ("rollout/window_score", _LAST, "final score in [0, 1], mean of the last 500 finished episodes or somewhat more"),
    ("rollout/window_success_rate", _LAST, "share of the episodes in this window that succeeded"),
    ("rollout/window_episodes", _LAST, "number of episodes in this window: fewer at the start of a run"),
    # Evaluations inside of the run, written with the step after which they ended.
    ("evaluation/score", _LAST, "mean final score in [0, 1] of the validation tasks that were played"),
    ("evaluation/score_low", _LAST, "lower end of its 95 % interval"),
    ("evaluation/score_high", _LAST, "upper end of its 95 % interval"),
    ("evaluation/success_rate", _LAST, "share of these episodes that succeeded"),
    ("evaluation/success_low", _LAST, "lower end of its 95 % interval (Wilson's)"),
    ("evaluation/success_high", _LAST, "upper end of its 95 % interval (Wilson's)"),
    ("evaluation/episodes", _LAST, "number of these episodes: below evaluation.run_tasks if results are missing"),
    ("evaluation/turns", _LAST, "actions of an episode, mean"),
    ("evaluation/length_tokens", _LAST, "tokens of an episode, mean"),
    ("evaluation/update", _LAST, "update of the run after which the evaluation was begun"),
    ("evaluation/version", _LAST, "policy version that it was begun with"),
    ("evaluation/last_version", _LAST, "newest version that played: weights change while episodes go on"),
    ("evaluation/seconds", _LAST, "seconds from the first task at an actor to the step that found all results"),
    ("evaluation/best_score", _LAST, "score of the best evaluation so far"),
    ("evaluation/best_update", _LAST, "update of the run after which it was begun"),
    ("evaluation/best_version", _LAST, "policy version that it was begun with"),
    ("evaluation/without_gain", _LAST, "evaluations in a row that were no better, as evaluation.patience counts them"),
    ("evaluation/unwanted", _SUM, "answers of actors to evaluation tasks that were not awaited, since the last step"),
    # The comparison at the end of a run, evaluation.before_and_after, written with its last step.
    ("evaluation/before_score", _LAST, "mean final score of the starting policy on the tasks of evaluation.split"),
    ("evaluation/before_success_rate", _LAST, "share of these episodes that succeeded"),
    ("evaluation/after_score", _LAST, "the same of the trained policy"),
    ("evaluation/after_success_rate", _LAST, "share of its episodes that succeeded"),
    # Further x-axes.
    ("progress/tokens", _LAST, "tokens of the trajectories trained on since the run began, as often as they were used"),
    ("progress/episodes", _LAST, "finished episodes that the learner has received since the run began"),
    ("progress/seconds", _LAST, "seconds since the run first began to train, restarts included"),
    # The update.
    (
        "loss/policy",
        _MEAN,
        "policy part of the loss, with the penalty of algorithm.kl_coef, averaged as algorithm.aggregate says",
    ),
    ("loss/value", _MEAN, "value part before its coefficient, per predicted value"),
    ("value/explained_variance", Aggregation.EXPLAINED, "1 - Var(target - value) / Var(target); 0 is a constant guess"),
    ("loss/entropy", _MEAN, "entropy of the target policy in nats, per action token"),
    (
        "loss/total",
        _MEAN,
        "loss whose gradient is taken: loss/policy, the entropy bonus and the value part together",
    ),
    ("optimizer/gradient_norm", _MEAN, "L2 norm of the policy's gradient, without the value head's, before clipping"),
    ("optimizer/clipped_share", _MEAN, "share of optimizer steps in which the policy's gradient was clipped"),
    ("optimizer/skipped", _MEAN, "share of optimizer steps left out since something was not finite"),
    ("optimizer/not_finite", _SUM, "trajectories that caused skipped steps (all ranks), since the last step"),
    ("optimizer/learning_rate", _LAST, "learning rate of the step just made"),
    ("optimizer/entropy_coef", _LAST, "coefficient of the entropy bonus in the step just made"),
    ("optimizer/reward_divisor", _LAST, "what rewards and scores were divided by in the step just made"),
    (
        "alarm/entropy_collapse",
        _MAX,
        "1 where the entropy is below algorithm.entropy_alarm of its first value and the score below 0.9, else 0",
    ),
    (
        "alarm/length_collapse",
        _MAX,
        "1 where completions are below algorithm.length_alarm of their first length and the score is below 0.9, else 0",
    ),
    (
        "alarm/noise_collapse",
        _MAX,
        "1 where scores have halved since a best above 0.1 while the entropy rose by half, else 0",
    ),
    ("loss/reference_kl", _MEAN, "k3 estimate of KL(pi || reference), ratio-weighted, per action token"),
    (
        "reward/shaping",
        _MEAN,
        "sum of what overlong_penalty and reward_kl_coef add to an episode's rewards, undiscounted, per trajectory",
    ),
    ("advantage/mean", _MEAN, "advantage as it enters the loss, per action token"),
    ("advantage/zero_share", _MEAN, "share of a batch's trajectories whose whole group has the same return"),
    ("advantage/std", Aggregation.DEVIATION, "its standard deviation over the action tokens of a batch"),
    # The warm start on demonstrations, `impala-llm sft`, which also writes optimizer/* and progress/seconds.
    ("sft/loss", _MEAN, "negative log-likelihood of the demonstrated completions in nats, per action token"),
    ("sft/value_loss", _MEAN, "squared error of the values against the demonstrations' returns, per turn"),
    ("sft/held_out_loss", _LAST, "sft/loss of the demonstrations of the tasks that are held out"),
    ("sft/held_out_value_loss", _LAST, "sft/value_loss of these"),
    ("sft/epoch", _LAST, "passes over the demonstrations so far"),
    ("sft/tokens_per_s", _LAST, "tokens of the demonstrations learned from since the last line, per second"),
    # How far the behaviour policy is from the target policy. Denominator: action tokens (turns for turn ratios).
    ("ratio/mean", _MEAN, "importance ratio pi/mu, per action token"),
    ("ratio/max", _MAX, "largest importance ratio pi/mu"),
    (
        "ratio/rejected_share",
        _MEAN,
        "share of action tokens left out by max_staleness, reject and probability_limit; where an episode has no"
        " gradient and is not computed, by max_staleness alone",
    ),
    (
        "ratio/ess",
        Aggregation.SAMPLE_SIZE,
        "effective sample size (sum w)^2 / (n sum w^2) in (0, 1], over the batch's untruncated ratios",
    ),
    ("ratio/k1", _MEAN, "estimate of KL(mu, pi) by -log(pi/mu), nats per action token; may be negative"),
    ("ratio/k3", _MEAN, "estimate of KL(mu, pi) by pi/mu - 1 - log(pi/mu), nats per action token; never negative"),
    # Engine against learner: l = log pi - log mu of a token, log mu as the engine reported it, replaced or not.
    ("mismatch/logprob_mean", _MEAN, "mean |l| in nats over tokens of rows that the learner's version alone sampled"),
    ("mismatch/logprob_max", _MAX, "largest |l| of these tokens"),
    ("mismatch/logprob_k3", _MEAN, "mean of e^l - 1 - l over these tokens; never negative"),
    ("mismatch/tokens", _SUM, "how many these tokens are, all ranks; 0: nothing was seen, and the alarm is as it was"),
    ("mismatch/alarm", _MAX, "1 where the comparison made last exceeded algorithm.mismatch_alarm, else 0"),
    ("mismatch/recomputed_share", _MEAN, "share of a batch's trajectories whose log mu the learner recomputed"),
    # The same by staleness, over all tokens compared: at 0 with those over an engine's cache of older weights, above 0
    # with what the policy has learned since.
    *(
        (f"mismatch/age_{name}_{what}", kind, f"{meaning} over compared tokens of staleness {age}")
        for name, age in _AGES
        for what, kind, meaning in (
            ("mean", _MEAN, "mean |l| in nats"),
            ("max", _MAX, "largest |l|"),
            ("k3", _MEAN, "mean of e^l - 1 - l"),
        )
    ),
    # Staleness: learner version minus the version that sampled the token, in versions.
    ("staleness/oldest", _MAX, "of the oldest action token that the policy loss uses"),
    ("staleness/newest", _MIN, "of the newest action token that the policy loss uses"),
    ("staleness/mean", _MEAN, "mean over the action tokens that the policy loss uses"),
    ("staleness/span", _MEAN, "newest minus oldest version inside a trajectory, per trajectory of the batch"),
    ("staleness/in_buffer", _MEAN, "of the oldest trajectory in the buffer, by the median of its tokens"),
    ("staleness/in_flight", _MEAN, "learner version minus the version at the grant, per outstanding ticket"),
    # Speed of both sides, per wall-clock second. Levels of kind `sum` are over ranks: each adds its own once a step.
    ("actor/generated_tokens_per_s", _SUM, "sampled tokens per second of the step, all actors together"),
    ("actor/prefill_tokens_per_s", _SUM, "prompt and observation tokens computed per second of the step, all actors"),
    (
        "actor/idle_share",
        _MEAN,
        "share of the step's wall-clock time in which the engine had nothing to compute, per actor",
    ),
    ("actor/connected", _MAX, "actors that are connected to a rank, this host's and others'"),
    ("actor/engine_up", _MEAN, "share of the actors and of the step's time in which an engine could answer"),
    (
        "actor/engine_restarts",
        _SUM,
        "how often engines went away and came back, all actors together, since their start",
    ),
    ("actor/running_episodes", _SUM, "episodes under way, mean over the step, all actors together"),
    ("actor/failed_episodes", _SUM, "episodes that ended without a trajectory (error or deadline) since the last step"),
    ("actor/gateway_requests", _SUM, "requests of agents with a valid key since the start, all actors together"),
    ("actor/gateway_refused", _SUM, "requests of agents refused since the start, those without a key included"),
    ("actor/agent_processes_replaced", _SUM, "processes of agents that crashed, blocked or grew and were replaced"),
    ("actor/resident_memory_gb", _MAX, "resident memory of the largest actor process, 10^9 bytes"),
    (
        "learner/trained_tokens_per_s",
        _SUM,
        "tokens of the batch's trajectories per second, padding excluded, also of those without a gradient"
        " (advantage/zero_share); all ranks",
    ),
    ("learner/trained_tokens", _SUM, "tokens of the batch's trajectories, padding excluded, all ranks"),
    ("learner/imbalance_drawn", _MEAN, "work of the most loaded rank over the mean rank's, as drawn; several ranks"),
    ("learner/imbalance", _MEAN, "the same after items were exchanged: all ranks wait for the most loaded one"),
    ("learner/version", _LAST, "policy version, by which engines know the weights; after a lost host ahead of updates"),
    ("learner/resident_memory_gb", _MAX, "resident memory of the largest learner rank, 10^9 bytes"),
    # Between the two sides.
    ("pipeline/outstanding_tickets", _SUM, "episodes granted and not yet received, all ranks"),
    ("pipeline/queue_fill", _MEAN, "share of the actors' rings that holds trajectories not yet received"),
    ("pipeline/received", _SUM, "trajectories received since the last step"),
    ("pipeline/refused", _SUM, "malformed trajectories, or again of too old weights, refused since the last step"),
    ("pipeline/duplicates", _SUM, "trajectories received a second time and dropped since the last step"),
    ("pipeline/regranted", _SUM, "tickets granted again since the last step: actor failed, or weights too old"),
    ("pipeline/expired", _SUM, "tickets taken from actors that brought nothing in time, since the last step"),
    ("pipeline/recovered", _SUM, "acknowledged trajectories that a restarted learner found, at its first step"),
    ("pipeline/quarantined", _SUM, "trajectories set aside after the learner died twice over them, at its first step"),
    ("pipeline/given_up", _SUM, "tickets set aside: their episodes failed, or their actors died, too often"),
    ("pipeline/malformed", _SUM, "messages that could not be decoded, dropped since the last step"),
    ("pipeline/sessions_broken", _SUM, "sessions of actors that an error of the learner's ended, since the last step"),
    ("pipeline/peers_refused", _SUM, "connections without an authorised key, since the last step"),
    ("pipeline/replay_arena_fill", _MEAN, "share of the trajectory stores in use, what is being trained on included"),
    ("buffer/fill", _MEAN, "share of the replay buffer's slots in use"),
    ("buffer/trajectories", _SUM, "trajectories in the replay buffer, all ranks"),
    ("buffer/size_gb", _SUM, "bytes of the trajectories in the replay buffer, 10^9 bytes, all ranks"),
    ("buffer/evicted", _SUM, "trajectories that taught nothing, dropped as stale or for space since the last step"),
    ("buffer/evicted_length_tokens", _MEAN, "tokens of a dropped trajectory, per dropped trajectory"),
    *(
        (f"buffer/evicted_{name}", _SUM, f"dropped trajectories of {tokens} tokens, since the last step")
        for name, tokens in _LENGTHS
    ),
    (
        "buffer/lost_tokens_share",
        _MEAN,
        "share of action tokens, of all trained on or dropped, that taught nothing: above max_staleness, or dropped",
    ),
    *(
        (f"buffer/lost_tokens_{name}", _MEAN, f"the same over trajectories of {tokens} tokens")
        for name, tokens in _LENGTHS
    ),
    ("buffer/evicted_reward", _MEAN, "reward of a dropped trajectory, per dropped trajectory"),
    (
        "buffer/ess",
        _LAST,
        "effective sample size of the weights that the loss gave a batch, 0 to what is too old, as a fraction of its"
        " tokens; without episodes of advantage 0 that are not computed",
    ),
    ("buffer/refilled_groups", _SUM, "groups whose returns were all equal, dropped for others, since the last step"),
    ("buffer/yielded_groups", _SUM, "groups used or dropped incomplete, as the trajectory store was full"),
    ("buffer/replayed_share", _LAST, "share of the next batch that may have been used before"),
    ("buffer/reuse", _MEAN, "times that a trajectory of the batch has been sampled, this time included"),
    ("weights/publish_s", _MEAN, "seconds from the end of the step until the new version is announced"),
    ("weights/skipped", _SUM, "versions that were not published since readers held all slots of the weight board"),
    ("weights/pause_s", _MEAN, "seconds that completions stood still for the latest change of an engine's weights"),
    ("weights/transfer_s", _MEAN, "the part of weights/pause_s in which the engine read them"),
    ("weights/servers_sent", _LAST, "servers that got the latest version by their process groups with the learner"),
    ("weights/servers_dropped", _SUM, "servers whose transfer failed since the last step; they load from disk"),
    ("weights/load_s", _MEAN, "seconds that an engine takes to load a version, per load"),
    # The learner's step. The shares of the stages and the unaccounted one sum to 1.
    ("time/step_s", _MEAN, "seconds of one learner step, waiting included"),
    *((f"time/{stage}_share", _MEAN, f"share of the learner's step spent in stage `{stage}`") for stage in STAGES),
    ("time/unaccounted_share", _MEAN, "share of the learner's step spent in no declared stage"),
    (
        "time/overhead_share",
        _MEAN,
        "share of the learner's working time (the step without idle) spent in receive, pack, publish and log",
    ),
)

METRICS: dict[str, Metric] = {name: Metric(name, kind, meaning) for name, kind, meaning in _DECLARED}


def declare(part: str, meanings: Mapping[str, str]) -> None:
    """Declare the metrics of a credit or loss. For arguments and errors see `declarations`."""
    METRICS.update(declarations(part, meanings))


def declarations(part: str, meanings: Mapping[str, str], declared: Mapping[str, Metric] = METRICS) -> dict[str, Metric]:
    """Return the metrics of a credit or loss by their whole names.

    Args:
        part: what a name without `/` is logged under.
        meanings: by name; one in `_max`, `_min` or `explained_variance` is combined by that, others are means.
        declared: metrics that have a meaning already, by their whole names.

    Raises:
        MetricError: no names with their meanings; one that has another meaning already, or that no loss can return.
    """
    if not isinstance(meanings, Mapping) or not all(isinstance(word, str) for word in (*meanings, *meanings.values())):
        raise MetricError(f"metrics = {meanings!r:.100}: write a dict of names and their meanings")
    found = {}
    for short, meaning in meanings.items():
        name = short if "/" in short else f"{part}/{short}"
        kinds = {"_max": Aggregation.MAX, "_min": Aggregation.MIN, "explained_variance": Aggregation.EXPLAINED}
        kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), Aggregation.MEAN)
        if part == "loss" and kind is Aggregation.EXPLAINED:
            raise MetricError(f"metric {short!r} is formed of four numbers, and a loss returns scalars: rename it")
        found[name] = metric = Metric(name, kind, meaning)
        if declared.get(name, metric) != metric:
            raise MetricError(f"metric {name!r} means {declared[name].meaning!r} already: give yours another name")
    return found


for _credit in CREDITS.values():
    declare("credit", _credit.metrics)
for _loss in LOSSES.values():
    declare("loss", _loss.metrics)


def describe(name: str) -> Metric:
    """The declaration of `name`. Raises MetricError, with the nearest declared names, where there is none."""
    if name.startswith(ENV_PREFIX) and len(name) > len(ENV_PREFIX):
        return Metric(
            name, Aggregation.MEAN, f"the environment's own {name.removeprefix(ENV_PREFIX)!r}, per finished episode"
        )
    if name not in METRICS:
        near = difflib.get_close_matches(name, METRICS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "names are <part>/<what>[_unit]"
        raise MetricError(
            f"unknown metric {name!r}: {hint} New ones are declared: those of a credit or loss in its `metrics`, "
            "others in observability/metrics.py"
        )
    return METRICS[name]


@dataclass
class _Cell:
    """Running values of one metric; `weight` is the denominator of means."""

    values: list[float]
    weight: float


class MetricLog:
    """Collects values by name and combines them by the declared kind. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def add(self, name: str, value: float | tuple[float, ...], weight: float = 1.0) -> None:
        """Adds one value, or the means that a metric is formed of.

        `weight` is what the value is a mean of (tokens, episodes) and counts for means only; a value of weight 0 leaves
        no trace. Raises MetricError for an undeclared name, a negative weight, or more or fewer means than the kind of
        the metric has.
        """
        kind, weight = describe(name).kind, float(weight)
        if not weight >= 0.0:
            raise MetricError(f"metric {name!r}: weight must not be negative, got {weight}; pass the denominator")
        values = [float(number) for number in (value if isinstance(value, tuple) else (value,))]
        size, _ = _FORMULAS.get(kind, (1, None))
        if len(values) != size:
            raise MetricError(f"metric {name!r} is a {kind.value}: pass {size} number{'s' * (size > 1)}, not {value}")
        if weight > 0.0:
            self._combine(name, kind, _Cell([v * weight for v in values] if kind in _FORMULAS else values, weight))

    def update(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """`add` for each item, all with the same weight."""
        for name, value in values.items():
            self.add(name, value, weight)

    def add_all(self, values: Iterable[tuple[str, float | tuple[float, ...], float]]) -> None:
        """`add` for each (name, value, weight)."""
        for name, value, weight in values:
            self.add(name, value, weight)

    def state(self) -> dict[str, list[float]]:
        """The unflushed content as {name: [value, ..., weight]}, plain numbers that any wire can carry."""
        return {name: [*cell.values, cell.weight] for name, cell in self._cells.items()}

    def merge(self, state: Mapping[str, list[float]]) -> None:
        """Adds the `state()` of another log (another rank, an actor) as if its values had been added here."""
        for name, (*values, weight) in state.items():
            self._combine(name, describe(name).kind, _Cell(values, weight))

    def summary(self) -> dict[str, float]:
        """One number for each metric that got a value since the last flush."""
        return {name: _figure(describe(name).kind, cell) for name, cell in self._cells.items()}

    def flush(self) -> dict[str, float]:
        """`summary()`, and starts over."""
        summary = self.summary()
        self._cells.clear()
        return summary

    def _combine(self, name: str, kind: Aggregation, new: _Cell) -> None:
        old = self._cells.get(name)
        if old is None or kind is Aggregation.LAST:
            self._cells[name] = new
        elif kind is Aggregation.MAX:
            old.values = [max(old.values[0], new.values[0])]
        elif kind is Aggregation.MIN:
            old.values = [min(old.values[0], new.values[0])]
        else:
            old.values = [a + b for a, b in zip(old.values, new.values, strict=True)]
            old.weight += new.weight


def _figure(kind: Aggregation, cell: _Cell) -> float:
    if kind not in _FORMULAS:
        return cell.values[0]
    return _FORMULAS[kind][1](*(value / cell.weight for value in cell.values))
