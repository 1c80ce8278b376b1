"""Entry: a learner rank. `torchrun impala_llm/learner.py key=value ...`

    receive → buffer → draw by priority → pack → forward → V-trace → loss → backward → reduce → step → publish → repeat

Actors play on all the while: the receiver's thread takes their trajectories and deals tickets during every step. Each
rank has its own receiver, tickets and replay shard; ranks meet only to add up counts, gradients and metrics. Policy
version v is the policy after v optimizer steps; version 0 is published before the first ticket is dealt.

A learner that was killed and started again on its host goes on from the last version that it published, with every
trajectory that it had acknowledged and not yet trained on; its optimizer and value head begin anew (checkpoints are a
later stage). What a step trained on counts once the step's version is on the board: that rename is the commit.

Left out on purpose: checkpoints (a later stage), sharded weights (every rank holds all), evaluation (evaluate.py).
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from impala_llm.algorithms.advantages import group_relative, rloo
from impala_llm.algorithms.importance import segment_sum
from impala_llm.config import AGAINST_GROUP, Config, ConfigError, load, threads_per_process
from impala_llm.envs import make_suite
from impala_llm.hosts import rank_endpoint
from impala_llm.learning.control import CollapseAlarm, EntropyControl, RewardScale
from impala_llm.learning.cpu import prepare_cpu
from impala_llm.learning.feed import Batch, Feed
from impala_llm.learning.mismatch import MismatchMonitor
from impala_llm.learning.model import PolicyModel, policy_files
from impala_llm.learning.objective import Denominators, objective
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import pack
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.policy_files import resolve_policy
from impala_llm.learning.preferences import pair_advantages
from impala_llm.learning.scoring import Scorers, action_log_probs
from impala_llm.observability.meters import Meters
from impala_llm.observability.metrics import MetricLog, StageTimer
from impala_llm.observability.tensorboard import MetricWriter
from impala_llm.observability.terminal import TerminalView
from impala_llm.pipeline.journal import Journal
from impala_llm.pipeline.keys import LearnerKeys, load_learner_keys
from impala_llm.pipeline.receiver import Receiver
from impala_llm.pipeline.remote import serve_weights
from impala_llm.pipeline.replay_arena import ReplayArena
from impala_llm.pipeline.rundir import SUPERVISED, RunDirectory
from impala_llm.pipeline.task_order import TaskOrder
from impala_llm.pipeline.tickets import TicketLedger
from impala_llm.pipeline.weights import WeightPublisher, WeightReader
from impala_llm.replay import ReplayBuffer, ReplayShare
from impala_llm.trajectory import Trajectory


def learn(config: Config, ranks: Ranks) -> None:
    """Train until `learner.total_updates` or `learner.max_minutes`, whichever comes first; then save the policy."""
    torch.manual_seed(config.run.seed)
    batch_size = config.learner.batch_size // ranks.world_size

    with ExitStack() as stack:
        # Rank 0 owns the run's folder in shared memory, unless a supervisor does: it goes when the stack is undone.
        run_dir = None
        if ranks.is_main:
            run_dir = stack.enter_context(RunDirectory.for_learner(config.run.name, config.run.resume))
        ranks.barrier()
        if run_dir is None:
            run_dir = RunDirectory.attach(config.run.name)
        model, version = start_model(config, run_dir)
        model.to(ranks.device)
        ranks.broadcast(model.parameters())
        ranks.barrier()  # all have looked at the board
        files = policy_files(resolve_policy(config))
        publisher = None
        if ranks.is_main:
            publisher = WeightPublisher(run_dir.weights_path, config.pipeline.weight_slots, files)
            tensors = dict(model.policy_tensors())
            publisher.reserve(tensors)
            publisher.publish(tensors, version)
        ranks.barrier()
        if ranks.is_main and config.pipeline.bind is not None:
            served_at = rank_endpoint(config.pipeline.bind, ranks.world_size)
            stack.enter_context(serve_weights(run_dir.weights_path, served_at, learner_keys(config)))
        receiver = start_receiver(config, ranks, run_dir, model.vocab_size, batch_size, version)
        stack.callback(receiver.close)
        stack.push(partial(dismiss_actors, receiver))
        feed = Feed(config, receiver, batch_size, config.run.seed + ranks.rank)
        writer = view = None
        if ranks.is_main:
            writer = stack.enter_context(MetricWriter(Path(config.run.dir) / "tensorboard"))
            if config.run.terminal:
                view = stack.enter_context(TerminalView(config.learner.total_updates))

        meters = Meters(receiver, ranks)
        trainer = Trainer(config, ranks, model, feed.buffer, meters.log, feed.share)
        timer = trainer.timer
        started = time.monotonic()
        progress = version / config.learner.total_updates
        while progress < 1.0:
            with timer.stage("idle"):
                batch = feed.next_batch(version)
            # Noted on every rank before the gradients are summed, and so before anybody can publish the step.
            receiver.trained([t.ticket_id for t in batch.trajectories])
            trainer.update(batch, version, progress, partial(feed.arrivals, version))
            with timer.stage("publish"):
                before = time.perf_counter()
                version += 1
                interval = config.learner.sync_interval
                due = interval is not None and version % interval == 0
                if publisher is not None and due:
                    publisher.publish(dict(model.policy_tensors()), version)
                ranks.barrier()  # announced by a rank, it must lie on the board
                receiver.announce(version, published=due)
                meters.log.add("weights/publish_s", time.perf_counter() - before)
            with timer.stage("log"):
                elapsed_minutes = (time.monotonic() - started) / 60
                progress = version / config.learner.total_updates
                if config.learner.max_minutes is not None:
                    progress = max(progress, elapsed_minutes / config.learner.max_minutes)
                progress = min(1.0, ranks.sum([progress])[0] / ranks.world_size)  # ranks must end together
                meters.observe(feed, batch, version)
                if config.learner.save_every and version % config.learner.save_every == 0 and ranks.is_main:
                    model.save(Path(config.run.dir) / f"policy-{version}", files)
            meters.finish_step(timer.end_step(), batch.num_tokens)
            summary = meters.gather()
            if writer is not None:
                writer.write(version, summary)
            if view is not None:
                view.update(version, summary, progress)
        if ranks.is_main:
            model.save(Path(config.run.dir) / "policy", files)


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
        self.timer = StageTimer()
        self.optimizer = Optimizer(model, config.learner)
        self.monitor = MismatchMonitor(config, model, ranks.device)
        self.scorers = Scorers(config, model, ranks.device)
        self.entropy = EntropyControl(config.algorithm)
        self.rewards = RewardScale(config.algorithm.normalize_reward)
        self.collapse = CollapseAlarm(config.algorithm)

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
        train_policy = version >= config.learner.value_warmup_updates
        with timer.stage("pack"):
            trajectories = batch.trajectories
            counts = self.count(trajectories)
            advantages = self.episode_advantages(trajectories)
            # Without a term of its own an episode as good as its group has no gradient: it is counted, not computed.
            teaching = list(range(len(trajectories)))
            if advantages is not None and self.entropy.coef == algorithm.kl_coef == 0:
                teaching = advantages.nonzero().flatten().tolist()
                log.add("advantage/zero_share", 1 - len(teaching) / len(trajectories), len(trajectories))
            weights = torch.tensor(batch.weights, dtype=torch.float32)
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
                    None if advantages is None else advantages[members].to(ranks.device),
                    weights[members].to(ranks.device),
                    counts,
                    version,
                    train_policy,
                    self.monitor.recomputed(micro, rows),
                    self.scorers.scores(micro),
                    self.entropy.coef,
                )
            with timer.stage("backward"):
                outcome.loss.backward()
            entropy += outcome.entropy
            weight_sums = [total + part for total, part in zip(weight_sums, outcome.weight_sums, strict=True)]
            self.monitor.record(outcome.comparison)
            self.monitor.keep(rows, outcome.log_probs)
            for name, value, weight in outcome.figures:
                log.add(name, value, weight)
            for member, size in zip(members.tolist(), outcome.advantage_size.tolist(), strict=True):
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
        with timer.stage("optimize"):
            result = self.optimizer.step(version, progress, train_policy)
        self.watch(trajectories, [trajectories[i] for i in teaching], entropy)
        self.steer(weight_sums)
        log.add("optimizer/gradient_norm", result.gradient_norm)
        log.add("optimizer/clipped_share", float(result.clipped))
        log.add("optimizer/skipped", float(result.skipped))
        log.add("optimizer/learning_rate", result.learning_rate)

    def count(self, trajectories: Sequence[Trajectory]) -> Denominators:
        """Of the update over all ranks; and its returns, for the scale of rewards."""
        returns = [float(t.rewards.sum()) for t in trajectories]
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

    def episode_advantages(self, trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
        """float32[M], one for each trajectory; None where a value head or a teacher says what each action is worth."""
        algorithm = self.config.algorithm
        if algorithm.advantage not in AGAINST_GROUP:
            return None
        scores = torch.tensor([t.score for t in trajectories]) / self.rewards.divisor
        group_ids = torch.tensor([t.group_id for t in trajectories])
        if algorithm.loss == "dpo":
            return self.pair_advantages(trajectories, scores, group_ids)
        if algorithm.advantage == "rloo":
            return rloo(scores, group_ids)
        return group_relative(scores, group_ids, algorithm.normalize_std)

    def pair_advantages(
        self, trajectories: Sequence[Trajectory], scores: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """What DPO asks of each episode. `sequence_mean_token_sum` makes it the mean over the pairs of all ranks."""
        policy, reference = torch.zeros(len(trajectories)), torch.zeros(len(trajectories))
        for cpu_micro in pack(trajectories, self.config.learner.token_budget):
            micro = cpu_micro.to(self.ranks.device)
            theirs = self.scorers.reference(micro)
            assert theirs is not None
            ours = action_log_probs(self.model, micro, self.config.engine.temperature)
            for log_probs, totals in ((ours, policy), (theirs, reference)):
                totals[list(micro.members)] = segment_sum(log_probs, micro.segment_ids, len(micro.members)).cpu()
        found = pair_advantages(policy, reference, scores, group_ids, self.config.algorithm.dpo_beta)
        num_pairs, num_sequences = self.ranks.sum([found.num_pairs, len(trajectories)])
        for name, value in found.metrics.items():
            self.log.add(f"preference/{name}", value, float(found.num_pairs))
        return found.advantages * (num_sequences / max(1.0, num_pairs))

    def steer(self, weight_sums: Sequence[float]) -> None:
        """How much of the next batches is replayed follows the effective sample size of this one's weights."""
        count, total, squares = self.ranks.sum(weight_sums)
        if squares > 0:
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
                len(trajectories),
            ]
        )
        self.log.add("optimizer/entropy_coef", self.entropy.coef)
        if tokens:
            self.entropy.observe(entropy / tokens)
            self.collapse.observe(entropy / tokens, length / count, score / count)
        for name, collapsed in self.collapse.collapsed.items():
            self.log.add(f"alarm/{name}_collapse", float(collapsed))


def dismiss_actors(receiver: Receiver, kind: type[BaseException] | None, *_: object) -> None:
    """Tell the actors that the run is over, if it is: not where this learner failed and will be started again.

    Of a signal the supervisor decides, where there is one.
    """
    told_to_stop = kind is not None and issubclass(kind, SystemExit | KeyboardInterrupt)
    if kind is None or (told_to_stop and SUPERVISED not in os.environ):
        receiver.shutdown()


def start_model(config: Config, run_dir: RunDirectory) -> tuple[PolicyModel, int]:
    """The policy to go on from, and its version: what a killed learner published last, else the configured start."""
    board = WeightReader(run_dir.weights_path)
    sizes = (config.model.value_hidden_size, config.model.value_trunk_gradient)
    if (version := board.latest()) is None:
        return PolicyModel.from_pretrained(resolve_policy(config), *sizes), 0
    print(f"learner: going on from version {version}; optimizer and value head begin anew", file=sys.stderr)
    with board.lease() as lease:
        return PolicyModel.from_pretrained(lease.path, *sizes), lease.version


def start_receiver(
    config: Config, ranks: Ranks, run_dir: RunDirectory, vocab_size: int, batch_size: int, version: int
) -> Receiver:
    """This rank's door for actors, with its share of the training tasks behind it."""
    algorithm = config.algorithm
    order = TaskOrder(
        make_suite(config.env).tasks("train"), algorithm.group_size, config.run.seed, ranks.rank, ranks.world_size
    )
    # Free running is bounded by what the buffer can hold.
    max_open = config.replay.capacity if algorithm.max_staleness is None else None
    journal = Journal(run_dir.journal_path(ranks.rank))
    ledger = TicketLedger(order, batch_size, algorithm.max_staleness, max_open, version=version, journal=journal)
    # Beyond the buffer's own capacity: open groups, what is queued for it, headers and gaps.
    arena = ReplayArena(
        run_dir.replay_path(ranks.rank), (config.replay.capacity_mb * 5 // 4 + 64) << 20, 4 * config.replay.capacity
    )
    pipeline = config.pipeline
    receiver = Receiver(
        run_dir.endpoint(ranks.rank),
        ledger,
        vocab_size,
        run_dir,
        arena,
        heartbeat_timeout_s=pipeline.actor_timeout_s,
        ticket_timeout_s=pipeline.ticket_timeout_s,
        bind=None if pipeline.bind is None else rank_endpoint(pipeline.bind, ranks.rank),
        keys=learner_keys(config),
    )
    receiver.start()
    return receiver


def learner_keys(config: Config) -> LearnerKeys | None:
    folder = config.pipeline.keys
    return None if folder is None else load_learner_keys(Path(folder).expanduser())


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 at the end of training, 2 for bad settings, 143 after SIGTERM."""
    try:
        config = load(argv)
    except ConfigError as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    # As an exception it undoes everything on its way out: sockets, shared memory, files.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    prepare_cpu(threads_per_process(config))
    disable_progress_bar()
    ranks = Ranks(config.model.device, config.learner.stall_timeout_s)
    if config.learner.num_ranks != ranks.world_size:
        print(
            f"learner: learner.num_ranks={config.learner.num_ranks}, but torchrun started {ranks.world_size} ranks: "
            f"set learner.num_ranks={ranks.world_size}",
            file=sys.stderr,
        )
        return 2
    try:
        learn(config, ranks)
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
