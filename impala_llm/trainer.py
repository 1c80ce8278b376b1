"""One rank's part of an optimizer step: from a batch of trajectories to new weights, and what lives from step to step.

Invariant: ranks meet only in sums (counts, gradients, means of what is watched), in the same order on every rank. A
number that is not finite ends no rank: all leave the step out together, and the one that has it names the episode.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from impala_llm.algorithms.importance import segment_sum
from impala_llm.algorithms.interface import Credit, Episodes, Loss
from impala_llm.learning.control import CollapseAlarm, EntropyControl, RewardScale
from impala_llm.learning.feed import Batch
from impala_llm.learning.mismatch import MismatchMonitor
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.objective import Denominators, Outcome, objective
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import pack
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.scoring import Scorers, action_log_probs
from impala_llm.limited_warnings import RateLimitedWarnings
from impala_llm.observability.metrics import MetricLog, StageTimer, declare
from impala_llm.replay import ReplayBuffer, ReplayShare
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory

_COMPLAINT_INTERVAL_S = 10.0


class Trainer:
    """One rank's part of an optimizer step, and what lives from step to step."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        model: PolicyModel,
        buffer: ReplayBuffer,
        log: MetricLog,
        share: ReplayShare | None = None,
    ) -> None:
        self.config, self.ranks, self.model, self.buffer, self.log = config, ranks, model, buffer, log
        self.share = share
        credit, loss = config.algorithm.credit, config.algorithm.loss
        assert isinstance(credit, Credit) and isinstance(loss, Loss), "config.load makes them"
        self.credit = credit
        declare("credit", credit.metrics)
        declare("loss", loss.metrics)
        self.timer = StageTimer()
        self.optimizer = Optimizer(model, config.learner)
        self.monitor = MismatchMonitor(config, model, ranks.device)
        self.scorers = Scorers(config, model, ranks.device)
        self.entropy = EntropyControl(config.algorithm)
        self.rewards = RewardScale(config.algorithm.normalize_reward)
        self.collapse = CollapseAlarm(config.algorithm)
        self.complaints = RateLimitedWarnings(_COMPLAINT_INTERVAL_S)
        self.num_updates = 0
        """Since this process began: what warms up does so again after a restart."""
        self.is_stepping = False
        """Amid a change of the weights, also where an exception has ended it there."""

    def update(
        self, batch: Batch, version: int, progress: float, arrivals: Callable[[], Sequence[Trajectory]] = tuple
    ) -> None:
        """One optimizer step on one batch: from version v to v + 1.

        Args:
            progress: share of the run that is over.
            arrivals: called before the weights change, if the mismatch monitor has use for it: what has come meanwhile.
        """
        config, ranks, log, timer = self.config, self.ranks, self.log, self.timer
        algorithm = config.algorithm
        train_policy = self.num_updates >= config.learner.value_warmup_updates
        oldest_version = 0 if algorithm.max_staleness is None else version - algorithm.max_staleness
        with timer.stage("pack"):
            trajectories = batch.trajectories
            counts = self.count(trajectories)
            prepared = self.credit.prepare(self.episodes(trajectories))
            finite = torch.tensor([self.episode_return(t) for t in trajectories]).isfinite().tolist()
            culprits = [t for t, is_finite in zip(trajectories, finite, strict=True) if not is_finite]
            # Without a term of its own an episode as good as its group, or too old, has no gradient: it is counted, not
            # computed.
            teaching = list(range(len(trajectories)))
            if prepared is not None and self.entropy.coef == algorithm.kl_coef == 0:
                teaching = prepared.advantages.nonzero().flatten().tolist()
                log.add("advantage/zero_share", 1 - len(teaching) / len(trajectories), len(trajectories))
                teaching = [i for i in teaching if trajectories[i].newest_version >= oldest_version]
            for name, value, weight in () if prepared is None else prepared.figures:
                log.add(name, value, weight)
            weights = self.draw_weights(batch)
            micro_batches = pack([trajectories[i] for i in teaching], config.learner.token_budget)
        with timer.stage("forward"):
            self.monitor.begin(trajectories, version)
        sizes = dict.fromkeys(batch.item_ids, 0.0)
        entropy = 0.0
        weight_sums = [0.0, 0.0, 0.0]
        for micro in micro_batches:
            members = torch.tensor([teaching[i] for i in micro.members])
            rows = [trajectories[i] for i in members.tolist()]
            with timer.stage("forward"):
                micro = micro.to(ranks.device)
                micro.turn_rewards.div_(self.rewards.divisor)
                outcome = objective(
                    config,
                    self.model,
                    micro,
                    None if prepared is None else prepared.advantages[members].to(ranks.device),
                    weights[members].to(ranks.device),
                    counts,
                    version,
                    train_policy,
                    self.monitor.recomputed(micro, rows),
                    self.scorers.scores(micro),
                    self.entropy.coef,
                    oldest_version,
                )
            with timer.stage("backward"):
                outcome.loss.backward()
                if not culprits:
                    culprits = self.not_finite(outcome, rows)
            entropy += outcome.entropy
            weight_sums = [total + part for total, part in zip(weight_sums, outcome.weight_sums, strict=True)]
            self.monitor.record(outcome.comparison)
            self.monitor.keep(rows, outcome.log_probs)
            for name, value, weight in outcome.figures:
                log.add(name, value, weight)
            for member, size in zip(members.tolist(), outcome.advantage_size.tolist(), strict=True):
                if math.isfinite(size):
                    sizes[batch.item_ids[member]] = max(size, sizes[batch.item_ids[member]])
        self.buffer.update_advantages(list(sizes), list(sizes.values()))
        # Before the ranks meet: what nobody can have published yet, nobody can have sampled from.
        if self.monitor.wants_arrivals:
            with timer.stage("idle"):
                arrived = arrivals()
            with timer.stage("forward"):
                self.monitor.look(arrived, version)
        for name, value, weight in self.monitor.end():
            log.add(name, value, weight)
        with timer.stage("backward"):
            ranks.sum_gradients(self.model)
            num_culprits = ranks.sum([len(culprits)])[0]
        with timer.stage("optimize"):
            self.is_stepping = True
            result = self.optimizer.step(self.num_updates, progress, skip=num_culprits > 0)
            self.is_stepping = False
        self.num_updates += 1
        if culprits:
            self.name(culprits, version)
        self.watch(trajectories, [trajectories[i] for i in teaching], entropy)
        self.steer(weight_sums)
        log.add("optimizer/gradient_norm", result.gradient_norm)
        log.add("optimizer/clipped_share", float(result.clipped))
        log.add("optimizer/skipped", float(result.skipped))
        log.add("optimizer/not_finite", len(culprits))
        log.add("optimizer/learning_rate", result.learning_rate)

    def count(self, trajectories: Sequence[Trajectory]) -> Denominators:
        """Of the update over all ranks; and its returns, for the scale of rewards."""
        returns = [self.rewards.limited(self.episode_return(t)) for t in trajectories]
        tokens, turns, sequences, total, squares = self.ranks.sum(
            [
                sum(t.num_action_tokens for t in trajectories),
                sum(len(t.turns) for t in trajectories),
                len(trajectories),
                sum(returns),
                sum(value * value for value in returns),
            ]
        )
        self.rewards.observe(sequences, total, squares)
        self.log.add("optimizer/reward_divisor", self.rewards.divisor)
        return Denominators(tokens, turns, sequences)

    def draw_weights(self, batch: Batch) -> torch.Tensor:
        """float32[M]: the importance weights of the replay draw, with mean 1 over all ranks.

        The buffer's have maximum 1, which often belongs to an old item that the uniform floor has drawn. Beside it all
        others would be small, and with them the policy gradient, while an entropy bonus keeps its size.
        """
        total, count = self.ranks.sum([sum(batch.weights), len(batch.weights)])
        return torch.tensor(batch.weights, dtype=torch.float32) * (count / total)

    def episodes(self, trajectories: Sequence[Trajectory]) -> Episodes:
        """The batch as a credit prepares it."""
        returns = torch.tensor([self.episode_return(t) for t in trajectories]) / self.rewards.divisor
        group_ids = torch.tensor([t.group_id for t in trajectories])
        return Episodes(trajectories, returns, group_ids, partial(self.log_probs, trajectories), self.ranks.sum)

    def episode_return(self, t: Trajectory) -> float:
        """Sum of the rewards, those of the k-th turn times γ^k: what the value of the first turn predicts."""
        discount = self.config.algorithm.credit.discount
        if discount == 1.0:
            return float(t.rewards.sum(dtype=np.float64))
        return sum(discount**k * float(t.rewards[start:end].sum()) for k, (start, end) in enumerate(t.turns.tolist()))

    def log_probs(self, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[M] twice: log π and log π_ref of all action tokens of a trajectory together."""
        policy, reference = torch.zeros(len(trajectories)), torch.zeros(len(trajectories))
        for cpu_micro in pack(trajectories, self.config.learner.token_budget):
            micro = cpu_micro.to(self.ranks.device)
            theirs = self.scorers.reference(micro)
            assert theirs is not None
            ours = action_log_probs(self.model, micro, self.config.engine.temperature)
            for log_probs, totals in ((ours, policy), (theirs, reference)):
                totals[list(micro.members)] = segment_sum(log_probs, micro.segment_ids, len(micro.members)).cpu()
        return policy, reference

    def not_finite(self, outcome: Outcome, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """Trajectories of a micro-batch, whose gradient was just added, that have brought a number that is not finite:
        all of it where only the gradient shows it."""
        bad = [t for t, is_finite in zip(rows, outcome.is_finite.tolist(), strict=True) if not is_finite]
        if bad:
            return bad
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return [] if bool(norm.isfinite()) else list(rows)

    def name(self, culprits: Sequence[Trajectory], version: int) -> None:
        """Say why a step is left out."""
        first = culprits[0]
        others = f" and {len(culprits) - 1} more of the batch" if len(culprits) > 1 else ""
        self.complaints.log(
            "A STEP IS LEFT OUT, ADVANTAGE, LOSS OR GRADIENT IS NOT FINITE",
            f"episode {first.episode_id} (task {first.task_id} of {first.env}, by {first.actor_id}, return "
            f"{self.episode_return(first):g}){others}, at version {version}: check its rewards, or set "
            "algorithm.normalize_reward=true or a lower learner.learning_rate",
        )

    def steer(self, weight_sums: Sequence[float]) -> None:
        """How much of the next batches is replayed follows the effective sample size of this one's weights."""
        count, total, squares = self.ranks.sum(weight_sums)
        if 0 < squares < math.inf:
            size = total * total / (count * squares)
            self.log.add("buffer/ess", size)
            if self.share is not None:
                self.share.update(min(1.0, size))
        if self.share is not None:
            self.log.add("buffer/replayed_share", self.share.share)

    def watch(self, trajectories: Sequence[Trajectory], taught: Sequence[Trajectory], entropy: float) -> None:
        """Entropy and length over all ranks: the bonus follows its target, and a collapse is said aloud."""
        entropy, tokens, length, score, count = self.ranks.sum(
            [
                entropy,
                sum(t.num_action_tokens for t in taught),
                sum(t.num_action_tokens for t in trajectories),
                sum(t.score for t in trajectories),
                sum(not t.continues for t in trajectories),
            ]
        )
        self.log.add("optimizer/entropy_coef", self.entropy.coef)
        if tokens:
            self.entropy.observe(entropy / tokens)
        if tokens and count and math.isfinite(entropy):  # of episodes that ended: the others have no score yet
            self.collapse.observe(entropy / tokens, length / count, score / count)
        for name, collapsed in self.collapse.collapsed.items():
            self.log.add(f"alarm/{name}_collapse", float(collapsed))
