"""One rank's part of an update: from a batch of trajectories to new weights, and what lives from update to update.

Invariant: ranks meet only in sums (counts, gradients, means of what is watched), in the same order on every rank. A
number that is not finite ends no rank: all leave the step out together, and the one that has it names the episode.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impala_llm.algorithms.advantages import episode_return, equal_share, levelled_returns
from impala_llm.algorithms.importance import segment_sum
from impala_llm.algorithms.interface import BatchLoss, Episodes, PackedBatch, parts_of
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.control import CollapseAlarm, EntropyControl, IdleUpdates, RewardScale
from impala_llm.learning.kept_budget import NOTE, conditions
from impala_llm.learning.mismatch import MismatchMonitor
from impala_llm.learning.objective import (
    AtStart,
    Denominators,
    MicroBatchResult,
    Rows,
    Rules,
    measured,
    named,
    objective,
    score,
)
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.own_parts import call_batch_limit, call_prepare, is_ours
from impala_llm.learning.packing import TokenBudget, memory_of_step, pack, with_ranks
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.ranks.work_balance import WorkBalance
from impala_llm.learning.scoring import Scorers, action_log_probs
from impala_llm.learning.shaped_rewards import Shaping
from impala_llm.learning.survey import Survey
from impala_llm.learning.update import Update, have_gradients, optimizer_steps
from impala_llm.observability.metrics import MetricError, MetricLog, declare
from impala_llm.observability.stages import StageTimer
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory

_STATEFUL = ("entropy", "rewards", "collapse", "monitor", "budget")
"""Parts of the trainer whose state lives from update to update."""


@dataclass(frozen=True)
class UpdateResult:
    """Findings of an update beside the new weights: the batch source and the metrics take them from here."""

    metrics: MetricLog
    """Measured on this rank."""
    abs_advantages: Mapping[int, float]
    """Largest mean |A| of a trajectory, by buffer item of this rank's batch."""
    effective_share: float | None
    """Effective sample size of the weights that the loss gave to the tokens of all ranks, as a fraction of their
    number; None where no token had a finite weight."""


class Trainer:
    """One rank's part of an update, and what lives from update to update."""

    def __init__(self, config: Config, ranks: Ranks, model: PolicyModel) -> None:
        self.config, self.ranks, self.model = config, ranks, model
        self.log = MetricLog()
        """Metrics of the update."""
        self.credit, self.loss = parts_of(config.algorithm)
        for key, part in (("credit", self.credit), ("loss", self.loss)):
            try:
                declare(key, part.metrics)
            except MetricError as error:
                raise MetricError(f"algorithm.{key}={part.name} cannot be used: {error}") from None
        self.timer = StageTimer()
        # After its check, which is exact only in float32.
        model.compute_in(
            config.learner.precision, config.learner.activation_checkpointing, config.learner.compile_layers
        )
        self.optimizer = Optimizer(model, config.learner)
        note = Path(config.run.dir) / NOTE
        self.budget = TokenBudget(config.learner.token_budget, ranks, conditions(config, ranks, model), note)
        self.monitor = MismatchMonitor(config, model, ranks.device, self.budget)
        self.balance = WorkBalance(ranks, model)
        self.scorers = Scorers(config, model, ranks)
        self.entropy = EntropyControl(config.algorithm)
        is_scaled = config.algorithm.normalize_reward and self.credit.learns_from_rewards
        self.rewards = RewardScale(is_scaled, ranks.world_size)
        self.collapse = CollapseAlarm(config.algorithm)
        self.idle_updates = IdleUpdates(config.algorithm)
        self.warnings = RateLimitedWarnings(on_terminal=True)
        self.shaping = Shaping(config, self.scorers, self.budget, ranks.device)
        self.survey = Survey(config, model, ranks, self.budget, self.monitor, self.rows, self.take_part)
        self.num_updates = 0
        """Updates of the run; after a restart without a checkpoint those of this process, and warm-ups begin again."""
        self.before_change: Callable[[], object] = lambda: None
        """Called before each change of the weights."""
        self.on_progress: Callable[[int, int], object] = lambda num_done, num_tokens: None
        """Called after each micro-batch: tokens of the update that this rank has computed, and all that it will."""
        self.num_computed = self.num_to_compute = 0
        self.is_stepping = False
        """Whether the weights are being changed, or were when an exception ended that."""

    def update(
        self, batch: Batch, version: int, progress: float, arrivals: Callable[[], Sequence[Trajectory]] = tuple
    ) -> UpdateResult:
        """Update the policy on a batch, in one optimizer step or several: from version v to v + 1.

        Args:
            progress: share of the run that is over.
            arrivals: called before the weights change, if the mismatch monitor has use for it: what has come meanwhile.
        """
        self.log = MetricLog()
        with self.timer.stage("forward"):
            if self.budget.must_choose(self.ranks):
                to_come = self.optimizer.bytes_to_come(self.ranks.device.type)
                self.budget.choose(batch.trajectories, self.trial, to_come, self.ranks)
            self.monitor.begin(batch.trajectories, version)
        with self.timer.stage("pack"):
            batch = self.exchanged(batch, version)
            update = self.prepare(batch, version)
        with self.timer.stage("forward"):
            learner, seed = self.config.learner, (self.config.run.seed, self.ranks.rank, self.num_updates)
            steps = optimizer_steps(len(batch.trajectories), learner.epochs, learner.minibatches, seed)
            self.log.add_all(self.survey.look(update, len(steps)))
        lengths = {i: batch.trajectories[i].num_tokens for i in update.teaching}
        self.num_computed, self.num_to_compute = 0, sum(lengths.get(i, 0) for part in steps for i in part)
        for number, part in enumerate(steps):
            rules = self.rules(update, update.counts if len(steps) == 1 else self.part_counts(update, part))
            if isinstance(self.loss, BatchLoss):
                rules = replace(rules, batch_limit=self.batch_limit(self.loss, update, part, rules))
            bad = self.accumulate(update, part, rules)
            if number == 0:
                # Before the ranks meet: what nobody can have published yet, nobody can have sampled from.
                self.compare_arrivals(version, arrivals)
            self.step(update, part, bad, rules, progress)
        self.num_updates += 1
        with self.timer.stage("log"):
            sizes = self.balance.send_back(batch, update.sizes)
            if update.culprits:
                reason = update.reason_left_out(self.config.algorithm)
                self.warnings.log("A STEP IS LEFT OUT, ADVANTAGE, LOSS OR GRADIENT IS NOT FINITE", reason)
            taught = [batch.trajectories[i] for i in update.teaching]
            self.watch(update, taught)
            effective_share = self.effective_share(update.weight_sums)
            self.log.add("optimizer/not_finite", len(update.culprits))
        return UpdateResult(self.log, sizes, effective_share)

    def trial(self, cpu_micro: PackedBatch) -> None:
        """Compute a micro-batch forward and backward, for its time and memory alone."""
        micro = cpu_micro.to(self.ranks.device)
        scored = score(self.model, micro, self.config.engine.temperature, Rows(torch.ones(len(micro.lengths))), 0)
        values = scored.values(micro.action_positions - 1)
        try:
            (scored.log_probs.sum() + scored.entropy.sum() + values.sum()).backward()
        finally:  # memory may run out amid it
            self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """State from update to update beside weights, optimizer and buffer, as plain numbers and lists."""
        return {"num_updates": self.num_updates, **{name: getattr(self, name).state_dict() for name in _STATEFUL}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.num_updates = state["num_updates"]
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])

    @property
    def leaves_out(self) -> bool:
        """Whether an episode as good as its group, or too old, has no gradient: it is counted, and not computed."""
        algorithm = self.config.algorithm
        # A credit of the user's may prepare 0 and return something else, which the first update shows.
        is_known = is_ours(self.credit) or self.num_updates > 0
        has_own_term = self.entropy.coef > 0 or algorithm.kl_coef > 0 or algorithm.whiten_advantages
        # A policy without entropy has groups of equals alone: a bonus that is 0 would never rise again.
        is_without = self.loss.vanishes_with_advantage and not has_own_term and algorithm.entropy_target is None
        return self.credit.of_episodes and is_known and is_without

    def oldest_version(self, version: int) -> int:
        """Return the version of the oldest tokens that teach the learner at `version`."""
        staleness = self.config.algorithm.max_staleness
        return 0 if staleness is None or self.credit.teaches_at_any_age else version - staleness

    def exchanged(self, batch: Batch, version: int) -> Batch:
        """Return the batch that this rank computes, see work_balance.py."""
        computed = [True] * len(batch.trajectories)
        if self.leaves_out:
            of_groups = self.credit.compares_group and not self.shaping.is_on
            discount = self.config.algorithm.credit.discount if of_groups else None
            computed = have_gradients(batch.trajectories, self.oldest_version(version), discount)
        batch, metrics = self.balance.exchange(batch, computed, self.monitor.replaces(batch.trajectories))
        self.log.add_all(metrics)
        return batch

    def prepare(self, batch: Batch, version: int) -> Update:
        """Return the state of a new update: returns, prepared advantages, and which trajectories have a gradient."""
        trajectories, algorithm = batch.trajectories, self.config.algorithm
        shaping = self.shaping.rewards(trajectories)
        self.log.add_all(self.shaping.metrics(shaping))
        discount = algorithm.credit.discount
        returns = [episode_return(t, discount, extra) for t, extra in zip(trajectories, shaping, strict=True)]
        counts = self.count(trajectories, returns)
        episodes = self.episodes(trajectories, returns, shaping)
        prepared = call_prepare(self.credit, episodes)
        finite = torch.tensor(returns).isfinite().tolist()
        not_finite = frozenset(i for i, is_finite in enumerate(finite) if not is_finite)
        oldest_version = self.oldest_version(version)
        teaching = list(range(len(trajectories)))
        if prepared is not None and self.leaves_out:
            teaching = prepared.advantages.nonzero().flatten().tolist()
            teaching = [i for i in teaching if trajectories[i].newest_version >= oldest_version]
        if self.credit.compares_group:
            self.log.add("advantage/zero_share", equal_share(episodes), len(trajectories))
        self.log.add_all(() if prepared is None else named("credit", prepared.metrics))
        advantages = None if prepared is None else prepared.advantages
        weights = torch.tensor(batch.weights, dtype=torch.float32)
        return Update(batch, version, oldest_version, counts, shaping, advantages, weights, tuple(teaching), not_finite)

    def part_counts(self, update: Update, part: Sequence[int]) -> Denominators:
        """Return the denominators of one of several optimizer steps, over all ranks.

        Args:
            part: indices of its trajectories in the batch.
        """
        chosen = [update.batch.trajectories[i] for i in part]
        counts = [sum(t.num_action_tokens for t in chosen), sum(len(t.turns) for t in chosen), len(chosen)]
        return Denominators(*(max(1.0, number) for number in self.ranks.sum(counts)))

    def rules(self, update: Update, counts: Denominators) -> Rules:
        """Return what holds for all micro-batches of an optimizer step."""
        train_policy = self.num_updates >= self.config.learner.value_warmup_updates
        return Rules(counts, update.version, update.oldest_version, self.entropy.coef, update.whitening, train_policy)

    def batch_limit(self, loss: BatchLoss, update: Update, part: Sequence[int], rules: Rules) -> float:
        """Return `BatchLoss.batch_limit` of an optimizer step's batch, before its gradient pass; all ranks call it."""
        members = sorted(set(part) & set(update.teaching))

        def measure(cpu_micro: PackedBatch) -> torch.Tensor:
            micro, rows = self.rows(update, cpu_micro, [members[i] for i in cpu_micro.members])
            return measured(loss, self.config, self.model, micro, rows, rules).cpu()

        with self.timer.stage("forward"), torch.no_grad():
            trajectories = [update.batch.trajectories[i] for i in members]
            found = self.budget.in_micro_batches(trajectories, measure, take_part=self.take_part)
        return call_batch_limit(loss, torch.cat([torch.zeros(0), *found]), self.ranks.sum)

    def rows(self, update: Update, cpu_micro: PackedBatch, indices: Sequence[int]) -> tuple[PackedBatch, Rows]:
        """Return a micro-batch on the device, with the rewards that it is trained on, and what else its rows have."""
        micro, device = cpu_micro.to(self.ranks.device), self.ranks.device
        extra = np.concatenate([update.shaping[i] for i in indices])
        micro.turn_rewards.add_(torch.from_numpy(extra).to(micro.turn_rewards))
        micro.turn_rewards.div_(self.rewards.divisor)
        borrowed = [update.batch.item_ids[i] >= 0 for i in indices] if update.batch.borrowed else None
        return micro, Rows(
            update.weights[list(indices)].to(device),
            None if update.prepared is None else update.prepared[list(indices)].to(device),
            self.monitor.recomputed(micro, [update.batch.trajectories[i] for i in indices]),
            self.scorers.scores(micro),
            AtStart.joined([update.at_start[i] for i in indices], device) if update.at_start else None,
            None if borrowed is None else torch.tensor(borrowed).to(device),
        )

    def accumulate(self, update: Update, part: Sequence[int], rules: Rules) -> set[int]:
        """Add up the gradient of an optimizer step on this rank.

        Args:
            part: indices of its trajectories in the batch.

        Returns:
            Indices of those with a return, advantage or loss that is not finite.
        """
        bad = set(part) & update.not_finite
        taught = set(update.teaching)
        members = [i for i in part if i in taught]
        before = self.num_computed

        def learned(cpu_micro: PackedBatch) -> tuple[list[int], Rows, MicroBatchResult]:
            indices = [members[i] for i in cpu_micro.members]
            with self.timer.stage("forward"):
                micro, rows = self.rows(update, cpu_micro, indices)
                outcome = objective(self.config, self.model, micro, rows, rules)
            with self.timer.stage("backward"):
                outcome.loss.backward()
            finite = zip(indices, outcome.is_finite.tolist(), strict=True)
            bad.update(index for index, is_finite in finite if not is_finite)
            self.num_computed += len(micro.tokens)
            self.on_progress(self.num_computed, self.num_to_compute)
            return indices, rows, replace(outcome, loss=outcome.loss.detach())

        def joined(micro: PackedBatch) -> None:
            with self.timer.stage("backward"):
                self.take_part(micro)

        def undo() -> None:
            self.num_computed = before
            self.model.zero_grad()

        # Counted when all are done: where memory runs out they are computed once more.
        trajectories = [update.batch.trajectories[i] for i in members]
        found = self.budget.in_micro_batches(trajectories, learned, undo, joined, partial(self.timer.stage, "pack"))
        with self.timer.stage("log"):
            self.log.add_all(update.leave_out(part))
            for indices, rows, outcome in found:
                update.add(outcome, indices)
                self.log.add_all(outcome.metrics)
                self.monitor.count(rows.recomputed, len(indices))
                if not update.at_start:
                    self.monitor.record(outcome.comparison)
                    self.monitor.keep([update.batch.trajectories[i] for i in indices], outcome.log_probs)
        return bad

    def take_part(self, cpu_micro: PackedBatch) -> None:
        """Run the passes of a micro-batch that other ranks have; its gradient is 0."""
        micro = cpu_micro.to(self.ranks.device)
        self.scorers.scores(micro)
        total = self.model.hidden(micro.tokens, micro.position_ids, micro.context_lengths).sum()
        if torch.is_grad_enabled():
            (0.0 * total).backward()

    def compare_arrivals(self, version: int, arrivals: Callable[[], Sequence[Trajectory]]) -> None:
        """End the monitor's update, with what has arrived meanwhile where it has use for that."""
        if self.monitor.wants_arrivals or self.ranks.is_sharded:
            with self.timer.stage("receive"):
                arrived = arrivals() if self.monitor.wants_arrivals else ()
            with self.timer.stage("forward"):
                self.monitor.look(arrived, version)
        self.log.add_all(self.monitor.end())

    def step(self, update: Update, part: Sequence[int], bad: set[int], rules: Rules, progress: float) -> None:
        """Change the weights by the gradient of all ranks, unless one of them has a number that is not finite.

        Args:
            part: indices of the step's trajectories in the batch.
            bad: of those that are known to have such a number.
        """
        remedy = with_ranks(self.config.learner.tensor_parallel)
        with self.timer.stage("backward"), memory_of_step(remedy):
            self.ranks.sum_gradients(self.model)
            num_culprits = self.ranks.sum([len(bad)])[0]
        with self.timer.stage("optimize"), memory_of_step(remedy):
            self.before_change()
            self.is_stepping = True
            result = self.optimizer.step(self.num_updates, progress, skip=num_culprits > 0)
            self.is_stepping = False
        if result.skipped and num_culprits == 0:
            with self.timer.stage("backward"):
                bad = self.find_culprits(update, part, rules)
        if not update.not_finite:  # which spoil what is computed from the same returns
            update.culprits |= bad
        self.log.add("optimizer/gradient_norm", result.gradient_norm)
        self.log.add("optimizer/clipped_share", float(result.clipped))
        self.log.add("optimizer/skipped", float(result.skipped))
        self.log.add("optimizer/learning_rate", result.learning_rate)

    def count(self, trajectories: Sequence[Trajectory], episode_returns: Sequence[float]) -> Denominators:
        """Return the denominators of the update over all ranks; its returns go to the scale of rewards."""
        tokens, turns, sequences, *of_returns = self.ranks.sum(
            [
                sum(t.num_action_tokens for t in trajectories),
                sum(len(t.turns) for t in trajectories),
                len(trajectories),
                *self.rewards.sums(episode_returns),
            ]
        )
        self.rewards.observe(*of_returns)
        self.log.add("optimizer/reward_divisor", self.rewards.divisor)
        return Denominators(tokens, turns, sequences)

    def episodes(
        self, trajectories: Sequence[Trajectory], returns: Sequence[float], shaping: Sequence[np.ndarray] | None = None
    ) -> Episodes:
        """The batch as a credit prepares it. shaping: as of `Update`; None: there is none."""
        scaled = levelled_returns(returns, trajectories, shaping) / self.rewards.divisor
        group_ids = torch.tensor([t.group_id for t in trajectories])
        return Episodes(trajectories, scaled, group_ids, partial(self.log_probs, trajectories), self.ranks.sum)

    def log_probs(self, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[M] twice: log π and log π_ref of all action tokens of a trajectory together."""
        policy, reference = torch.zeros(len(trajectories)), torch.zeros(len(trajectories))

        def totals_of(cpu_micro: PackedBatch) -> None:
            micro = cpu_micro.to(self.ranks.device)
            theirs = self.scorers.reference(micro)
            assert theirs is not None
            ours = action_log_probs(self.model, micro, self.config.engine.temperature)
            for log_probs, totals in ((ours, policy), (theirs, reference)):
                totals[list(micro.members)] = segment_sum(log_probs, micro.segment_ids, len(micro.members)).cpu()

        self.budget.in_micro_batches(trajectories, totals_of)
        return policy, reference

    def find_culprits(self, update: Update, part: Sequence[int], rules: Rules) -> set[int]:
        """Indices of the trajectories of a step that was left out because its gradient is not finite: those whose own
        gradient, computed again, is not; all of the step's where none is, on any rank, or where ranks share the policy.
        All ranks call it."""
        members = sorted(set(part) & set(update.teaching))
        trajectories = [update.batch.trajectories[i] for i in members]
        found = set()
        for alone in () if self.ranks.is_sharded else pack(trajectories, 1):  # a micro-batch for each row
            index = members[alone.members[0]]
            objective(self.config, self.model, *self.rows(update, alone, [index]), rules).loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            self.model.zero_grad(set_to_none=True)
            if not norm.isfinite():
                found.add(index)
        return found if self.ranks.sum([len(found)])[0] else set(part)

    def effective_share(self, weight_sums: Sequence[float]) -> float | None:
        """Return `UpdateResult.effective_share`, and log it. All ranks call it."""
        count, total, squares = self.ranks.sum(weight_sums)
        self.idle_updates.observe(count, squares)
        if not 0 < squares < math.inf:
            return None
        share = total * total / (count * squares)
        self.log.add("buffer/ess", share)
        return share

    def watch(self, update: Update, taught: Sequence[Trajectory]) -> None:
        """Entropy and length over all ranks: the bonus follows its target, and a collapse raises an alarm."""
        trajectories, prepared = update.batch.trajectories, update.prepared
        entropy, tokens, length, score, count, unequal = self.ranks.sum(
            [
                update.entropy / self.config.learner.epochs,
                sum(t.num_action_tokens for t in taught),
                sum(t.num_action_tokens for t in trajectories),
                sum(t.score for t in trajectories),
                sum(not t.continues for t in trajectories),
                len(trajectories) if prepared is None else int(prepared.count_nonzero()),
            ]
        )
        self.log.add("optimizer/entropy_coef", self.entropy.coef)
        if tokens and self.num_updates > self.config.learner.value_warmup_updates:  # no bonus acts before
            self.entropy.observe(entropy / tokens)
        if count:  # of episodes that ended: the others have no score yet
            is_known = tokens > 0 and math.isfinite(entropy)
            self.collapse.observe(entropy / tokens if is_known else None, length / count, score / count)
            self.idle_updates.observe_batch(unequal, score / count)
        for name, collapsed in self.collapse.collapsed.items():
            self.log.add(f"alarm/{name}_collapse", float(collapsed))
