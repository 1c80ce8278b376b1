"""Mismatch monitor: compares the log-probabilities of engine and learner for the same tokens in every update, and can
replace the engine's by the learner's.

l = log π - log μ of a token, π by the learner at its version v, μ as the engine reported it at version u <= v. Only
where u = v is l a mismatch: of kernels, precision, temperature or weights. Where u < v it is mixed with what the policy
has learned since, so the metrics per staleness show how |l| grows with it, and the alarm ignores them. Nor is every
token of staleness 0 a comparison: one that follows older tokens of its row may rest on keys and values that older
weights left in the engine's cache. `mismatch/logprob_*` and the alarm therefore take rows that version v alone sampled.
(What remains: weights that changed between the prompt and the first token leave no trace in the versions.)

An asynchronous batch may hold no such row: what version v sampled arrives while the learner makes v + 1. Then a few
rows that have just arrived are scored before the weights change, while the learner still has the version that sampled
them. `mismatch/tokens` says how many tokens were compared, and 0 that the monitor saw nothing.

Replacing μ (`algorithm.recompute_behaviour`): a trajectory gets log π_w of the version w that the learner has when it
reaches it (where no alarm was on then, or after a restart: when it is next used), once, and keeps it through all its
replays. If it arrives before the step of its own version is over, w = u and only the mismatch is removed. If it arrives
later, the ratio becomes π_v/π_w: the "old log-probabilities" of PPO, the proximal policy of decoupled PPO (Hilton et
al., arXiv 2110.00641; AReaL, arXiv 2505.24298) without the weight π_w/μ that those keep. The correction is then blind
to the mismatch AND to the staleness from u to w, and a trajectory used as it arrives has ratio 1. An engine that truly
reports what it sampled from, be it with other kernels, in bfloat16 or over a cache of older weights, IS the behaviour
policy: `never` with truncated ratios corrects for it, as truncated importance sampling does (Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025). Recompute where what it reports is wrong.

Invariant: nothing here changes a number of the update unless a log-probability is replaced, and only action tokens are
ever compared. Each rank decides by itself about the engines that play for it.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from impala_llm.algorithms.importance import kl_estimates
from impala_llm.algorithms.interface import MetricValue, PackedBatch
from impala_llm.learning.packing import TokenBudget
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.scoring import action_log_probs
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory

AGES: dict[str, tuple[float, float]] = {
    "0": (0, 0),
    "1": (1, 1),
    "2": (2, 2),
    "3_4": (3, 4),
    "5_8": (5, 8),
    "9_up": (9, math.inf),
}
"""Ages in versions whose tokens share the metrics `mismatch/age_<name>_*`: name -> youngest and oldest."""

ENOUGH_TOKENS = 64
"""Least number of compared tokens for the alarm: single ones of bfloat16 differ by more than 0.1."""
_ALARM_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Comparison:
    """Comparison of one forward."""

    metrics: list[MetricValue]
    num_tokens: int
    """Tokens of rows that the learner's version alone sampled."""
    total: float
    """Sum of |l| over them, in nats."""


@dataclass(frozen=True)
class Recomputed:
    """Substitute for the engine's log-probabilities in the ratios of a micro-batch."""

    log_probs: Tensor
    """float32[N]: the learner's where it has scored the row before, elsewhere the engine's."""
    is_new: Tensor
    """bool[N]: take those of the forward at hand instead, in which the row is scored for the first time."""
    share: float
    """Fraction of the micro-batch's rows that have another than the engine's."""

    def fill(self, log_probs: Tensor) -> Tensor:
        """float32[N] for the ratios, without gradient. log_probs: float32[N] of the forward at hand."""
        return torch.where(self.is_new, log_probs.detach(), self.log_probs)


def compare(log_probs: Tensor, batch: PackedBatch, version: int, is_own: Tensor | None = None) -> Comparison:
    """The learner's log-probabilities against the engine's.

    Args:
        log_probs: float32[N] of the action tokens, by the learner at `version`.
        version: >= that of every token.
        is_own: bool[S], rows to compare: not those that another rank's engines have played. None: all.
    """
    log_ratio = (log_probs - batch.behaviour_log_probs).detach()
    age = version - batch.versions
    oldest_age = age.new_zeros(len(batch.lengths)).scatter_reduce(0, batch.segment_ids, age, "amax")
    own = torch.ones_like(age, dtype=torch.bool) if is_own is None else is_own[batch.segment_ids]
    exact = own & (oldest_age[batch.segment_ids] == 0)
    ages = {f"age_{name}": own & (age >= low) & (age <= high) for name, (low, high) in AGES.items()}
    groups = {"logprob": exact} | ages
    metrics: list[MetricValue] = []
    for name, mask in groups.items():
        chosen = log_ratio[mask]
        if num_tokens := len(chosen):
            mean, largest, k3 = torch.stack([chosen.abs().mean(), chosen.abs().max(), kl_estimates(chosen).k3]).tolist()
            metrics.append((f"mismatch/{name}_mean", mean, float(num_tokens)))
            metrics.append((f"mismatch/{name}_max", largest, float(num_tokens)))
            metrics.append((f"mismatch/{name}_k3", k3, float(num_tokens)))
    return Comparison(metrics, int(exact.sum()), float(log_ratio[exact].abs().double().sum()))


class MismatchMonitor:
    """Owned by the learner's thread of one rank; its methods are called in this order in every update:

        monitor.begin(batch.trajectories, version)
        for each micro-batch:
            recomputed = monitor.recomputed(micro, members)
            outcome = objective(..., recomputed)
            monitor.count(recomputed, len(members))
            monitor.record(outcome.comparison)
            monitor.keep(members, outcome.log_probs)
        if monitor.wants_arrivals:
            monitor.look(arrived, version)
        metrics = monitor.end()

    Args:
        model: the learner's, whose weights change between two updates alone.
        budget: of its micro-batches.
    """

    def __init__(self, config: Config, model: PolicyModel, device: torch.device, budget: TokenBudget) -> None:
        self._mode = config.algorithm.recompute_behaviour
        self._threshold = config.algorithm.mismatch_alarm
        self._can_recompute = config.learner.tensor_parallel == 1 and not config.algorithm.has_kl_in_rewards
        """Whether `load` takes another algorithm.recompute_behaviour than never."""
        self._needs_sampling_policy = config.algorithm.loss.needs_sampling_policy(config.learner.steps_per_update)
        self._temperature = config.engine.temperature
        self._budget = budget
        self._dtype = config.engine.dtype
        self._model = model
        self._device = device
        self._warnings = RateLimitedWarnings(_ALARM_INTERVAL_S, on_terminal=True)
        self.alarm = False
        """Whether the latest comparison of enough tokens had a mean |l| above the threshold."""
        self.recomputes = self._mode == "always"
        """Whether the engine's log-probabilities are being replaced: decided as an update begins, for all its steps."""
        self._is_first = True
        # Sum of |l| and number of tokens since the last comparison with the threshold.
        self._total = 0.0
        self._num_tokens = 0
        # Metrics, and number of compared tokens, of this update.
        self._metrics: list[MetricValue] = []
        self._num_compared = 0
        # Recomputed log-probabilities by the id of a trajectory's memory; removed when that memory is freed.
        self._kept: dict[int, Tensor] = {}

    @property
    def wants_arrivals(self) -> bool:
        """Whether `look` needs new trajectories: to replace their log-probabilities, or since too few were compared."""
        return self.recomputes or self._num_compared < ENOUGH_TOKENS

    def begin(self, trajectories: Sequence[Trajectory], version: int) -> None:
        """Begin an update. Some of the first batch is compared before the first step, so that an engine that is wrong
        from the start is detected in time."""
        if self._is_first:
            self._is_first = False
            self._probe(trajectories, version)
            self._update_alarm()
        self.recomputes = self._mode == "always" or (self._mode == "on_mismatch" and self.alarm)

    def replaces(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether any of these has, or gets in this update, other log-probabilities than the engine's."""
        return self.recomputes or any(id(t.block) in self._kept for t in trajectories)

    def recomputed(self, micro: PackedBatch, members: Sequence[Trajectory]) -> Recomputed | None:
        """Substitute for the engine's log-probabilities; None: they stay.

        Args:
            members: the trajectory of each row.
        """
        kept = [self._kept.get(id(t.block)) for t in members]
        num_replaced = sum(self.recomputes or values is not None for values in kept)
        if num_replaced == 0:
            return None
        of_engine = micro.behaviour_log_probs.cpu().split([t.num_action_tokens for t in members])
        log_probs = [mine if mine is not None else theirs for mine, theirs in zip(kept, of_engine, strict=True)]
        is_new = torch.tensor([values is None and self.recomputes for values in kept])
        device = micro.segment_ids.device
        share = num_replaced / len(kept)
        return Recomputed(torch.cat(log_probs).to(device), is_new.to(device)[micro.segment_ids], share)

    def count(self, recomputed: Recomputed | None, num_rows: int) -> None:
        """Count the rows of a micro-batch that has been computed, and those of which the engine's were replaced."""
        share = 0.0 if recomputed is None else recomputed.share
        self._metrics.append(("mismatch/recomputed_share", share, float(num_rows)))

    def record(self, comparison: Comparison) -> None:
        self._metrics += comparison.metrics
        self._num_compared += comparison.num_tokens
        self._num_tokens += comparison.num_tokens
        self._total += comparison.total

    def keep(self, members: Sequence[Trajectory], log_probs: Tensor) -> None:
        """Keep the learner's log-probabilities of a micro-batch, if they are to replace the engine's.

        Args:
            log_probs: float32[N]. A trajectory that has values already keeps those.
        """
        if not self.recomputes:
            return
        rows = log_probs.detach().cpu().split([t.num_action_tokens for t in members])
        for trajectory, row in zip(members, rows, strict=True):
            key = id(trajectory.block)
            if key not in self._kept and bool(row.isfinite().all()):
                # A copy, or one short row would keep the whole micro-batch alive.
                self._kept[key] = row.clone()
                weakref.finalize(trajectory.block, self._kept.pop, key, None).atexit = False

    def look(self, arrived: Sequence[Trajectory], version: int) -> None:
        """Before the weights change: score what has arrived since the last update, in the order in which it came.

        All of it where it is to be replaced, else the newest rows that this version sampled, up to `ENOUGH_TOKENS`.
        """
        if self.recomputes:
            self._score([t for t in arrived if id(t.block) not in self._kept], version)
        else:
            self._probe(arrived, version)

    def end(self) -> list[MetricValue]:
        """Update the alarm; return the update's metrics."""
        self._update_alarm()
        metrics = self._metrics
        metrics.append(("mismatch/tokens", float(self._num_compared), 1.0))
        metrics.append(("mismatch/alarm", float(self.alarm), 1.0))
        self._metrics, self._num_compared = [], 0
        return metrics

    def state_dict(self) -> dict[str, float | bool]:
        """The alarm, and what is not yet compared with its threshold. Log-probabilities that replace the engine's are
        not in here: a trajectory that outlives the learner gets new ones when it is next used."""
        return {"alarm": self.alarm, "total": self._total, "num_tokens": self._num_tokens}

    def load_state_dict(self, state: Mapping[str, float | bool]) -> None:
        """Restore `state_dict`: the first batch is then one of many."""
        self.alarm, self._is_first = bool(state["alarm"]), False
        self._total, self._num_tokens = float(state["total"]), int(state["num_tokens"])

    def _probe(self, candidates: Sequence[Trajectory], version: int) -> None:
        chosen: list[Trajectory] = []
        num_tokens = 0
        for trajectory in reversed(candidates):
            if num_tokens >= ENOUGH_TOKENS:
                break
            if trajectory.oldest_version == version:
                chosen.append(trajectory)
                num_tokens += trajectory.num_action_tokens
        self._score(chosen, version)

    def _score(self, trajectories: Sequence[Trajectory], version: int) -> None:
        def scored(cpu_micro: PackedBatch) -> tuple[Sequence[int], Tensor, Comparison]:
            micro = cpu_micro.to(self._device)
            log_probs = action_log_probs(self._model, micro, self._temperature)
            return micro.members, log_probs, compare(log_probs, micro, version)

        for members, log_probs, comparison in self._budget.in_micro_batches(trajectories, scored):
            self.record(comparison)
            self.keep([trajectories[i] for i in members], log_probs)

    def _update_alarm(self) -> None:
        if self._num_tokens < ENOUGH_TOKENS:
            return
        mean = self._total / self._num_tokens
        self._total, self._num_tokens = 0.0, 0
        # So written, a mean that is not a number raises it too.
        self.alarm = not mean <= self._threshold
        if self.alarm:
            self._warn(mean)

    def _warn(self, mean: float) -> None:
        fixes = ["check the engine's weights and temperature"]
        if self._dtype != "float32":
            fixes.append(f"set engine.dtype=float32 in place of {self._dtype}")
        if self._mode != "never":
            fixes.append(f"algorithm.recompute_behaviour={self._mode} uses the learner's own until then")
        elif self._can_recompute:
            proximal = " and algorithm.loss.proximal=recomputed" if self._needs_sampling_policy else ""
            fixes.append(f"set algorithm.recompute_behaviour=on_mismatch{proximal} to use the learner's own")
        self._warnings.log(
            "ENGINE AND LEARNER DISAGREE",
            f"their log-probabilities of the same tokens and version differ by {mean:.3g} nats on average, above "
            f"algorithm.mismatch_alarm={self._threshold:g}: {'; '.join(fixes)}",
        )
