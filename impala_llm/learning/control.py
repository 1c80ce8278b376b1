"""Controllers of the training: the coefficient of the entropy bonus, the scale of rewards, the alarms.

Invariant: all observe sums over all ranks and have the same state on every rank.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.settings import AlgorithmConfig

_FIRST_UPDATES = 5
"""Number of first updates whose mean later ones are compared with."""
_GOOD_SCORE = 0.9
_WORTH_LOSING = 0.1
_ALARM_INTERVAL_S = 60.0
_IDLE_UPDATES = 5
"""Updates in a row whose tokens all had no gradient, after which that is said."""
_EQUAL_UPDATES = 20
"""The same of updates without an advantage, which come by chance where rewards are rare."""
_FAILED_SHARE, _FAILED_EPISODES, _FAILED_UPDATES = 0.02, 8, 20
"""Share and number of the episodes of so many last updates from which on failures are told: a few come from a slow
host."""
_ENOUGH_RETURNS = 64
_FARTHEST_RETURN = 100.0
_MOST_OUTLIERS = 1 / 8
"""Share of the first returns; of fewer than 8 none is one."""
_LEAST_VARIANCE = 1e-12
_ROUNDING = 1e-10
"""Share of the mean square below which a variance is what rounding has left of the difference of two sums."""


class EntropyControl:
    """The coefficient of the entropy bonus; with a target it is an integral controller."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._target, self._rate = config.entropy_target, config.entropy_rate
        self.coef = config.entropy_coef

    def observe(self, entropy: float) -> None:
        """entropy: mean of the update's action tokens, in nats."""
        if self._target is not None and math.isfinite(entropy):
            self.coef = max(0.0, self.coef + self._rate * (self._target - entropy))

    def state_dict(self) -> dict[str, float]:
        """The coefficient; nothing without a target, since it is then a setting."""
        return {} if self._target is None else {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`; of a run without a target nothing is taken."""
        if self._target is not None:
            self.coef = state.get("coef", self.coef)


class RewardScale:
    """Standard deviation of all returns so far, to divide rewards and scores by; 1 before there is any spread.

    A few returns cannot dominate the scale: those farther than 100 deviations from the others are clipped to that
    distance. The first returns are kept and compared again with each batch, until they tell the deviation.

    Args:
        num_ranks: that share the scale.
    """

    def __init__(self, enabled: bool, num_ranks: int = 1) -> None:
        self._enabled, self._enough = enabled, _ENOUGH_RETURNS * num_ranks
        self._first: list[float] = []
        """Returns of this rank, until all ranks have enough."""
        self._is_known = False
        """Whether they have had enough; it stays so for more ranks, which continue from a checkpoint."""
        self._count = self._sum = self._squares = 0.0

    def sums(self, episode_returns: Sequence[float]) -> tuple[float, float, float]:
        """Return what this rank has for `observe`: number, sum, and sum of squares of a batch's returns, clipped.

        Those that are not finite are left out. While there are few, the first returns are in the sums as well.
        """
        returns = [value for value in episode_returns if math.isfinite(value)]
        if not self._is_known:
            self._first += returns
            returns, (centre, farthest) = self._first, _range_of_most(self._first)
        else:
            centre, farthest = self._sum / self._count, _FARTHEST_RETURN * self._deviation or math.inf
        clipped = [min(max(value, centre - farthest), centre + farthest) for value in returns]
        return len(clipped), sum(clipped), sum(value * value for value in clipped)

    def observe(self, count: float, total: float, squares: float) -> None:
        """Take in a batch. The arguments are the `sums` of all ranks together; ignored if one is not finite."""
        if not math.isfinite(total + squares):
            return
        if not self._is_known:  # the sums have all returns so far
            self._count = self._sum = self._squares = 0.0
        self._count += count
        self._sum += total
        self._squares += squares
        if self._count >= self._enough:
            self._is_known = True
            self._first.clear()

    def state_dict(self) -> dict[str, Any]:
        """Sums over all returns, and this rank's first ones."""
        sums = [self._count, self._sum, self._squares]
        return {"first": list(self._first), "sums": sums, "is_known": self._is_known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._first = list(state["first"])
        self._count, self._sum, self._squares = state["sums"]
        self._is_known = state["is_known"]

    @property
    def divisor(self) -> float:
        if not self._enabled or self._count < 2:
            return 1.0
        return self._deviation or 1.0

    @property
    def _deviation(self) -> float:
        """0 where the returns are all equal, but for rounding."""
        mean, mean_square = self._sum / self._count, self._squares / self._count
        variance = mean_square - mean * mean
        return math.sqrt(variance) if variance > max(_LEAST_VARIANCE, _ROUNDING * mean_square) else 0.0


def _range_of_most(returns: Sequence[float]) -> tuple[float, float]:
    """Median, and 100 root mean square distances from it of the returns that are nearer than the first outlier.

    An eighth of the returns at most are outliers. The distance is infinite where there is none.
    """
    if not returns:
        return 0.0, math.inf
    centre = statistics.median(returns)
    distances = sorted(abs(value - centre) for value in returns)
    squares = 0.0
    for number, distance in enumerate(distances):
        farthest = _FARTHEST_RETURN * math.sqrt(squares / max(1, number))
        if number >= (1 - _MOST_OUTLIERS) * len(distances) and distance > farthest > 0:
            return centre, farthest
        squares += distance * distance
    return centre, math.inf


class IdleUpdates:
    """Warns, once, where updates in a row have taught the policy nothing: every token was rejected or clipped, or no
    episode had an advantage."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._num_in_a_row = self._num_equal = 0
        self._warnings = RateLimitedWarnings(math.inf, on_terminal=True)

    def observe_batch(self, num_unequal: float, score: float) -> None:
        """Take in a batch of all ranks.

        Args:
            num_unequal: episodes whose advantage is not 0.
            score: mean of its episodes, in [0, 1]. Where it is good, groups are equal since they have learned.
        """
        self._num_equal = self._num_equal + 1 if num_unequal == 0 and score < _GOOD_SCORE else 0
        if self._num_equal == _EQUAL_UPDATES:
            self._warnings.log(
                "NOTHING IS LEARNED",
                f"in {_EQUAL_UPDATES} updates no episode had an advantage: those of each group had the same return "
                f"(advantage/zero_share), and the mean score is {score:.2f}; docs/troubleshooting.md says what to try",
            )

    def observe(self, num_tokens: float, squares: float) -> None:
        """Take in an update of all ranks.

        Args:
            num_tokens: action tokens, without those of episodes of advantage 0 that were not computed.
            squares: sum of the squares of the weights that the loss gave them; what was rejected has weight 0.
        """
        if num_tokens == 0:  # groups of equals: advantage/zero_share
            return
        self._num_in_a_row = self._num_in_a_row + 1 if squares == 0 else 0
        if self._num_in_a_row == _IDLE_UPDATES:
            self._warnings.log(
                "NOTHING IS LEARNED",
                f"in {_IDLE_UPDATES} updates every action token was rejected, too old or clipped, and had no gradient "
                f"(ratio/rejected_share, loss/clip_share): {' or '.join(self._remedies())}",
            )

    def _remedies(self) -> list[str]:
        config, found = self._config, []
        if config.reject != "none":
            found.append(
                f"widen the range of ratios that algorithm.reject={config.reject} keeps, "
                f"algorithm.reject_low={config.reject_low:g} to algorithm.reject_high={config.reject_high:g},"
            )
        if config.probability_limit is not None:
            found.append(f"raise algorithm.probability_limit={config.probability_limit:g},")
        if config.max_staleness is not None:
            found.append(f"raise algorithm.max_staleness={config.max_staleness},")
        return [*found, f"check the bounds, and the returned weights, of algorithm.loss={config.loss.name}"]


class FailureAlarm:
    """Warns where many episodes fail. The policy learns from the others alone: from none that succeeds where an
    environment returns what it must not at a success."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_FAILED_UPDATES)
        self._warnings = RateLimitedWarnings(_ALARM_INTERVAL_S, on_terminal=True)

    def observe(self, num_failed: float, num_finished: float) -> None:
        """Take in the episodes of an update, of all ranks."""
        self._recent.append((num_failed, num_finished))
        failed, finished = map(sum, zip(*self._recent, strict=True))
        share = failed / max(1.0, failed + finished)
        if failed >= _FAILED_EPISODES and share > _FAILED_SHARE:
            self._warnings.log(
                "MANY EPISODES FAIL",
                f"{failed:.0f} of {failed + finished:.0f} in the last {len(self._recent)} updates ({share:.0%}), from "
                'which nothing is learned; logs/learner.log has reasons, behind "an episode failed"',
            )


class CollapseAlarm:
    """Detects two kinds of failure from the entropy, the length of completions and the scores.

    Collapse: the entropy or the length has fallen to a small share of its first value while scores are not good. A
    policy that has solved its tasks is also certain and brief, which is not a collapse. Noise: scores have fallen to
    half of the best, and the entropy has risen since then, as stale data with capped weights can cause
    (docs/results/off_policy_first.md).
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._shares = {"entropy": config.entropy_alarm, "length": config.length_alarm}
        self._first: dict[str, list[float]] = {"entropy": [], "length": []}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_FIRST_UPDATES)
        self._best_score, self._entropy_at_best = 0.0, math.inf
        self._warnings = RateLimitedWarnings(_ALARM_INTERVAL_S, on_terminal=True)
        self.collapsed: dict[str, bool] = {"entropy": False, "length": False, "noise": False}

    def observe(self, entropy: float | None, length: float, score: float) -> None:
        """Means of an update: nats a token, action tokens an episode, and the episodes' score in [0, 1].

        The entropy is None where it was not computed, as of a batch in which no episode has a gradient.
        """
        for name, value in (("entropy", entropy), ("length", length)):
            if value is None:
                continue
            first = self._first[name]
            if len(first) < _FIRST_UPDATES:
                first.append(value)
                continue
            limit = self._shares[name] * sum(first) / len(first)
            self.collapsed[name] = value < limit and score < _GOOD_SCORE
            if self.collapsed[name]:
                self._warnings.log(
                    f"{name.upper()} COLLAPSE",
                    f"mean {name} is {value:.3g}, below algorithm.{name}_alarm={self._shares[name]:g} of what it was "
                    f"at first, and the mean score is {score:.2f}: lower learner.learning_rate or "
                    "algorithm.max_staleness, or set algorithm.entropy_target",
                )
        if entropy is None:
            return
        self._recent.append((score, entropy))
        if len(self._recent) == _FIRST_UPDATES:
            self._look_for_noise()

    def state_dict(self) -> dict[str, Any]:
        """Values with which later updates are compared."""
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "recent": [list(values) for values in self._recent],
            "best": [self._best_score, self._entropy_at_best],
            "collapsed": dict(self.collapsed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._recent = deque(((score, entropy) for score, entropy in state["recent"]), maxlen=_FIRST_UPDATES)
        self._best_score, self._entropy_at_best = state["best"]
        self.collapsed = dict(state["collapsed"])

    def _look_for_noise(self) -> None:
        score, entropy = (sum(values) / len(self._recent) for values in zip(*self._recent, strict=True))
        if score > self._best_score:
            self._best_score, self._entropy_at_best = score, entropy
        has_fallen = self._best_score > _WORTH_LOSING and score < 0.5 * self._best_score
        self.collapsed["noise"] = has_fallen and entropy > 1.5 * self._entropy_at_best
        if self.collapsed["noise"]:
            self._warnings.log(
                "COLLAPSE TO NOISE",
                f"the mean score has fallen from {self._best_score:.2f} to {score:.2f} while the entropy rose from "
                f"{self._entropy_at_best:.3g} to {entropy:.3g} nats: learner.learning_rate is too high, or, where "
                "ratio/ess is far below 1, the data are too old for the correction: lower the rate; or lower "
                "algorithm.max_staleness, or, with another loss than topr, take algorithm=topr_gae or algorithm=topr",
            )
