"""The step of one rank, as its buffer and its log see it."""

import dataclasses
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from impala_llm.algorithms.advantages import GAE, GroupRelative, episode_return
from impala_llm.algorithms.interface import Credit, Loss, LossOutput, Scored
from impala_llm.algorithms.losses import PPOClip, Reinforce
from impala_llm.algorithms.registry import LOSSES
from impala_llm.algorithms.stale_losses import M2PO, departures, second_moment_limit
from impala_llm.algorithms.vtrace import VTrace
from impala_llm.config import load
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import pack
from impala_llm.learning.parallel import Ranks
from impala_llm.learning.scoring import action_log_probs
from impala_llm.observability.metrics import METRICS, MetricError, MetricLog, declare
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.learning.builders import NoPriorities, make_batch, make_config, make_trajectory, save_lm


def make_trainer(directory: Path) -> Trainer:
    config = make_config(entropy_coef=0.01)
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog())  # type: ignore[arg-type]


def batch_of(weights: tuple[float, ...]) -> Batch:
    return Batch(tuple(make_batch()), weights, tuple(range(6)), 1.0)


def test_weights_of_the_draw_have_mean_1(tmp_path: Path) -> None:
    found = make_trainer(tmp_path).draw_weights(batch_of((1.0, 0.1, 0.1, 0.2, 0.1, 0.0)))
    assert found.tolist() == pytest.approx([4.0, 0.4, 0.4, 0.8, 0.4, 0.0])


def test_one_old_item_in_the_draw_does_not_shrink_the_policy_gradient(tmp_path: Path) -> None:
    norms = []
    for weight in (1.0, 0.02):
        trainer = make_trainer(tmp_path)
        trainer.update(batch_of((weight,) * 6), version=3, progress=0.0)
        norms.append(trainer.log.flush()["optimizer/gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


# --- one notion of return


def with_returns(*rewards: tuple[float, float]) -> list[Trajectory]:
    """A group whose scores are all 0.5, of two turns with these rewards."""
    group = []
    for number, pair in enumerate(rewards):
        t = make_trajectory(10, [(2, 4), (6, 10)], seed=number)
        values = np.zeros(10, np.float32)
        values[[3, 9]] = pair
        group.append(dataclasses.replace(t, rewards=values))
    return group


def trainer_with(directory: Path, *overrides: str) -> Trainer:
    config = load(["model=scratch", "algorithm.group_size=2", *overrides])
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog())  # type: ignore[arg-type]


def prepared(trainer: Trainer, group: list[Trajectory]) -> list[float]:
    returns = [episode_return(t, trainer.credit.discount) for t in group]
    trainer.count(group, returns)
    found = trainer.credit.prepare(trainer.episodes(group, returns))
    assert found is not None
    return found.advantages.tolist()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm=group_relative"], [-5.0, 5.0]),
        (["algorithm=group_relative", "algorithm.credit=rloo"], [-10.0, 10.0]),
        (["algorithm=group_relative", "algorithm.normalize_reward=true"], [-1.0, 1.0]),
    ],
)
def test_an_episode_is_compared_by_its_return(tmp_path: Path, overrides: list[str], expected: list[float]) -> None:
    """As with a sparse reward: 0 and 10, where the scores are equal."""
    trainer = trainer_with(tmp_path, *overrides)
    group = with_returns((0.0, 0.0), (0.0, 10.0))
    assert prepared(trainer, group) == pytest.approx(expected)


def test_a_return_is_discounted_as_that_of_the_value_head_is(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, "algorithm=group_relative", "algorithm.credit.discount=0.5")
    assert prepared(trainer, with_returns((1.0, 2.0), (0.0, 2.0))) == pytest.approx([0.5, -0.5]), "1 + 2/2 against 2/2"


def test_pairs_are_ordered_by_their_returns(tmp_path: Path) -> None:
    policy = save_lm(tmp_path / "policy")
    overrides = ["algorithm=dpo", f"algorithm.reference={policy}", "engine.max_length=256"]
    trainer = trainer_with(tmp_path / "lm", *overrides)
    better, worse = prepared(trainer, with_returns((10.0, 0.0), (0.0, 0.0)))
    assert better > 0 > worse


def test_who_is_too_old_is_compared_with_and_does_not_teach(tmp_path: Path) -> None:
    norms = []
    for with_entropy in (False, True):  # with a term of its own every episode is computed
        trainer = trainer_with(tmp_path, "algorithm=group_relative", "algorithm.max_staleness=2")
        trainer.entropy.coef = 1e-12 * with_entropy
        old, fresh = (
            dataclasses.replace(t, versions=np.where(t.action_mask, version, -1).astype(np.int32))
            for version, t in zip((0, 5), with_returns((0.0, 0.0), (0.0, 10.0)), strict=True)
        )
        trainer.update(Batch((old, fresh), (1.0, 1.0), (0, 0), 1.0), version=5, progress=0.0)
        found = trainer.log.flush()
        assert found["ratio/rejected_share"] == (0.5 if with_entropy else 0.0)
        norms.append(found["optimizer/gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


# --- what is not finite


class Finite(NoPriorities):
    """As the buffer does, refuses what is no number."""

    def update_advantages(self, ids: Sequence[int], values: Sequence[float]) -> None:
        assert all(map(math.isfinite, values)), values


class ThreadRanks(Ranks):
    """Two ranks in one process, a thread each."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, object]) -> None:
        super().__init__("cpu")
        self.rank = self.process = rank
        self.world_size = self.num_processes = 2
        self._meeting, self._table = meeting, table

    def _exchange(self, mine: object) -> list:
        self._table[self.rank] = mine
        self._meeting.wait(30)
        both = [self._table[0], self._table[1]]
        self._meeting.wait(30)
        return both

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return [sum(pair) for pair in zip(*self._exchange(list(numbers)), strict=True)]

    def sum_gradients(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for p, *both in zip(parameters, *self._exchange(mine), strict=True):
            p.grad = both[0] + both[1]


def endless(t: Trajectory) -> Trajectory:
    """With rewards whose sum is infinite in float32."""
    return dataclasses.replace(t, rewards=np.where(t.action_mask, np.float32(3e38), np.float32(0)))


@pytest.mark.parametrize("algorithm", ["ppo", "group_relative"])
def test_all_ranks_leave_a_step_out_together_when_one_has_a_number_that_is_not_finite(
    tmp_path: Path, algorithm: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = save_lm(tmp_path)
    meeting, table = threading.Barrier(2), {}
    good = make_batch()
    bad = [*good[:3], endless(good[3]), *good[4:]]
    summaries: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    moved: dict[int, list[bool]] = {0: [], 1: []}

    config = load(["model=scratch", f"algorithm={algorithm}", "algorithm.group_size=6", "learner.batch_size=12"])
    models = [PolicyModel.from_pretrained(policy) for _ in range(2)]

    def work(rank: int) -> None:
        model = models[rank]
        trainer = Trainer(config, ThreadRanks(rank, meeting, table), model, Finite(), MetricLog())  # type: ignore[arg-type]
        for version, episodes in enumerate([bad if rank else good, good], start=3):
            before = [p.detach().clone() for p in model.parameters()]
            varied = [dataclasses.replace(t, ticket_id=i) for i, t in enumerate(episodes)]
            trainer.update(Batch(tuple(varied), (1.0,) * 6, tuple(range(6)), 1.0), version, 0.0)
            moved[rank].append(any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)))
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            summaries[rank].append(trainer.log.flush())

    with caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert moved == {0: [False, True], 1: [False, True]}
    for rank in (0, 1):
        assert [summary["optimizer/skipped"] for summary in summaries[rank]] == [1.0, 0.0]
    assert [summaries[rank][0]["optimizer/not_finite"] for rank in (0, 1)] == [0.0, 1.0]
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text and "episode-4" not in text


def test_only_the_steps_that_have_a_bad_row_are_left_out_of_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two epochs of three minibatches each one has the row, and two have not."""
    steps = ("learner.epochs=2", "learner.minibatches=3", "learner.warmup_updates=0")
    trainer = trainer_with(tmp_path, "algorithm=ppo", *steps)
    good = make_batch()
    bad = (*good[:3], endless(good[3]), *good[4:])
    with caplog.at_level(logging.WARNING):
        trainer.update(Batch(bad, (1.0,) * 6, tuple(range(6)), 1.0), 3, 0.0)
    state = trainer.optimizer.state_dict()
    assert {tensor.item() for name, tensor in state.items() if name.endswith(".step")} == {4.0}
    assert trainer.log.flush()["optimizer/not_finite"] == 1.0
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text and "more of the batch" not in text
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


class SteepAt(PolicyModel):
    """Has an infinite gradient in micro-batches with a token."""

    token = 49

    def hidden(self, tokens: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        hidden = super().hidden(tokens, position_ids, lengths)
        if hidden.requires_grad and bool((tokens == self.token).any()):
            hidden.register_hook(lambda gradient: gradient + math.inf)
        return hidden


def test_the_episode_whose_gradient_alone_is_not_finite_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its losses are finite, and it shares a micro-batch with others that are as they should be."""
    model = SteepAt.from_pretrained(save_lm(tmp_path))
    episodes = [dataclasses.replace(t, tokens=t.tokens % model.token) for t in make_batch()]
    episodes[3].tokens[0] = model.token
    trainer = Trainer(load(["model=scratch", "algorithm=ppo"]), Ranks("cpu"), model, NoPriorities(), MetricLog())  # type: ignore[arg-type]
    before = [p.detach().clone() for p in model.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.update(Batch(tuple(episodes), (1.0,) * 6, tuple(range(6)), 1.0), 3, 0.0)
    summary = trainer.log.flush()
    assert (summary["optimizer/skipped"], summary["optimizer/not_finite"]) == (1.0, 1.0)
    [text] = [record.getMessage() for record in caplog.records if "NOT FINITE" in record.getMessage()]
    assert "episode-3" in text
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


# --- what a credit and a loss measure


@pytest.mark.parametrize("loss", LOSSES)
def test_every_metric_that_a_loss_names_is_logged_with_its_meaning(tmp_path: Path, loss: str) -> None:
    trainer = trainer_with(
        tmp_path, "algorithm=group_relative", f"algorithm.loss={loss}", "algorithm.entropy_coef=0.01"
    )
    trainer.update(batch_of((1.0,) * 6), version=3, progress=0.0)
    logged = {name for name in trainer.log.flush() if name.startswith("loss/")}
    general = {"loss/policy", "loss/value", "loss/entropy", "loss/total"}
    assert logged == general | {f"loss/{name}" for name in LOSSES[loss].metrics}
    assert all(METRICS[name].meaning for name in logged)


def test_a_metric_without_a_meaning_is_refused(tmp_path: Path) -> None:
    class Silent(Reinforce):
        def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
            return super().__call__(scored, advantages)._replace(metrics={"unheard_of": torch.zeros(())})

    trainer = Trainer(
        make_config(GroupRelative(), Silent(), entropy_coef=0.01),
        *(Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)), NoPriorities(), MetricLog()),  # type: ignore[arg-type]
    )
    with pytest.raises(MetricError, match="loss/unheard_of.*`metrics`"):
        trainer.update(batch_of((1.0,) * 6), version=3, progress=0.0)


def test_a_metric_has_one_meaning() -> None:
    declare("loss", {"clip_share": METRICS["loss/clip_share"].meaning})
    with pytest.raises(MetricError, match="loss/clip_share.*another name"):
        declare("loss", {"clip_share": "something else"})


# --- several optimizer steps an update


@dataclass
class Recording(PPOClip):
    """Remembers what it is given."""

    def __post_init__(self) -> None:
        self.seen: list[Scored] = []

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        self.seen.append(scored)
        return super().__call__(scored, advantages)


def recording_trainer(directory: Path, **learner: object) -> tuple[Trainer, Recording]:
    loss = Recording()
    config = make_config(GroupRelative(), loss, entropy_coef=0.01, max_staleness=None)
    config.learner = LearnerConfig(warmup_updates=0, decay="constant", learning_rate=1e-2, **learner)  # type: ignore[arg-type]
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog()), loss  # type: ignore[arg-type]


def varied() -> Batch:
    rows = [dataclasses.replace(t, ticket_id=i, group_id=0) for i, t in enumerate(make_batch())]
    return dataclasses.replace(batch_of((1.0,) * 6), trajectories=tuple(rows))


def test_two_passes_are_two_steps_on_the_same_batch(tmp_path: Path) -> None:
    once, _ = recording_trainer(tmp_path)
    twice, _ = recording_trainer(tmp_path, epochs=2)
    for _ in range(2):
        once.update(varied(), version=3, progress=0.0)
    twice.update(varied(), version=3, progress=0.0)
    for p, q in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_episode_without_a_gradient_counts_in_the_mean_of_each_step(tmp_path: Path) -> None:
    """Four of the six are as good as their groups of two."""
    norms = []
    for epochs in (1, 2):
        trainer, _ = recording_trainer(tmp_path, epochs=epochs)
        trainer.config.algorithm.entropy_coef = trainer.entropy.coef = 0.0
        trainer.optimizer = Optimizer(trainer.model, LearnerConfig(learning_rate=0.0, value_learning_rate=0.0))
        rows = [make_trajectory(12, [(4, 8), (9, 12)], seed, group_id=seed // 2) for seed in range(6)]
        rows[0] = dataclasses.replace(rows[0], rewards=2 * rows[0].rewards)
        trainer.update(dataclasses.replace(batch_of((1.0,) * 6), trajectories=tuple(rows)), version=3, progress=0.0)
        summary = trainer.log.flush()
        assert summary["advantage/zero_share"] == pytest.approx(4 / 6)
        norms.append(summary["optimizer/gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_each_pass_sees_every_episode_once_in_parts_of_another_order(tmp_path: Path) -> None:
    trainer, loss = recording_trainer(tmp_path, epochs=3, minibatches=2)
    batch = varied()
    trainer.update(batch, version=3, progress=0.0)
    sizes = [len(scored.log_probs) for scored in loss.seen]
    total = sum(t.num_action_tokens for t in batch.trajectories)
    assert [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)] == [total] * 3
    assert len(set(sizes)) > 2
    assert trainer.num_updates == 1


def test_the_proximal_policy_is_that_of_the_beginning_of_the_update(tmp_path: Path) -> None:
    trainer, loss = recording_trainer(tmp_path, epochs=2)
    trainer.update(varied(), version=3, progress=0.0)
    first, second = loss.seen
    assert first.proximal_log_probs is not None and second.proximal_log_probs is not None
    torch.testing.assert_close(first.proximal_log_probs, first.log_probs.detach())
    assert torch.equal(second.proximal_log_probs, first.proximal_log_probs)
    assert (second.log_probs - second.proximal_log_probs).abs().max() > 1e-3
    single, plain = recording_trainer(tmp_path)
    single.update(varied(), version=3, progress=0.0)
    assert plain.seen[0].proximal_log_probs is None


def test_the_engine_is_compared_with_the_weights_that_it_had(tmp_path: Path) -> None:
    """Later steps of the update say nothing of the engine: the policy has moved."""
    seen = []
    for epochs in (1, 4):
        trainer, _ = recording_trainer(tmp_path, epochs=epochs)
        trainer.update(varied(), version=3, progress=0.0)
        summary = trainer.log.flush()
        seen.append((summary["mismatch/logprob_mean"], summary["mismatch/tokens"]))
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


# --- shaped rewards and whitened advantages


@dataclass
class Watching(Reinforce):
    """Remembers the advantages that it is given, and their rows."""

    def __post_init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        self.seen.append(advantages)
        self.rows.append(scored.segment_ids)
        return super().__call__(scored, advantages)


def watching_trainer(directory: Path, credit: Credit, **algorithm: object) -> tuple[Trainer, Watching]:
    """One optimizer step at a rate of 0, from a critic that says 0 everywhere."""
    loss = Watching()
    config = make_config(credit, loss, entropy_coef=0.01, max_staleness=None, **algorithm)
    config.model.path = str(save_lm(directory))
    config.engine.max_length, config.learner.learning_rate = 40, 0.0
    model = PolicyModel.from_pretrained(Path(config.model.path))
    return Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog()), loss  # type: ignore[arg-type]


def advantages_of_turns(trainer: Trainer, loss: Watching, batch: Batch) -> list[list[float]]:
    """For each trajectory, those of its turns' last tokens."""
    trainer.update(batch, version=3, progress=0.0)
    [advantages], [rows] = loss.seen, loss.rows
    [micro] = pack(batch.trajectories, 1000)
    found: list[list[float]] = [[] for _ in batch.trajectories]
    for place, member in enumerate(micro.members):
        mine = advantages[rows == place]
        ends = np.cumsum([end - start for start, end in batch.trajectories[member].turns.tolist()]) - 1
        found[member] = mine[ends].tolist()
    return found


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_an_overlong_episode_loses_reward_at_its_end(tmp_path: Path, granularity: str) -> None:
    """Of the six, episodes 1 and 3 have 33 and 40 of at most 40 tokens: 0.3 and 1 of a margin of 10."""
    batch = varied()
    trainer, loss = watching_trainer(tmp_path, GAE(granularity=granularity), overlong_tokens=10, overlong_penalty=2.0)
    found = advantages_of_turns(trainer, loss, batch)
    for number, t in enumerate(batch.trajectories):
        rewards = [float(t.rewards[start:end].sum()) for start, end in t.turns.tolist()]
        rewards[-1] -= {1: 0.6, 3: 2.0}.get(number, 0.0)
        expected = [sum(rewards[k:]) for k in range(len(rewards))]
        assert found[number] == pytest.approx(expected, abs=1e-5), number
    assert trainer.log.flush()["reward/shaping"] == pytest.approx(-2.6 / 6)


def test_returns_of_a_group_are_shaped_alike(tmp_path: Path) -> None:
    trainer, loss = watching_trainer(tmp_path, GroupRelative(discount=0.5), overlong_tokens=10)
    batch = varied()
    found = advantages_of_turns(trainer, loss, batch)
    returns = []
    for number, t in enumerate(batch.trajectories):
        rewards = [float(t.rewards[start:end].sum()) for start, end in t.turns.tolist()]
        rewards[-1] -= {1: 0.3, 3: 1.0}.get(number, 0.0)
        returns.append(sum(0.5**k * reward for k, reward in enumerate(rewards)))
    assert [turns[0] for turns in found] == pytest.approx((np.array(returns) - np.mean(returns)).tolist(), abs=1e-5)


def test_what_leaves_the_reference_loses_reward_by_turns(tmp_path: Path) -> None:
    reference = PolicyModel.from_pretrained(save_lm(tmp_path / "reference", seed=1))
    trainer, loss = watching_trainer(tmp_path / "lm", GAE(), reward_kl_coef=0.1, reference=str(tmp_path / "reference"))
    batch = varied()
    found = advantages_of_turns(trainer, loss, batch)
    for number, t in enumerate(batch.trajectories):
        [micro] = pack([t], 1000)
        apart = (micro.behaviour_log_probs - action_log_probs(reference, micro, 1.0)).clamp(-20, 20)
        rewards = micro.turn_rewards.clone()
        for k in range(len(rewards)):
            rewards[k] -= 0.1 * apart[micro.turn_ids == k].sum()
        assert found[number] == pytest.approx(rewards.flip(0).cumsum(0).flip(0).tolist(), abs=1e-3), number


@pytest.mark.parametrize("credit", [GroupRelative(), GAE(), VTrace(granularity="token")], ids=["group", "gae", "token"])
def test_whitened_advantages_have_mean_0_and_deviation_1_however_the_batch_is_cut(
    tmp_path: Path, credit: Credit
) -> None:
    trainer, loss = watching_trainer(tmp_path, credit, whiten_advantages=True)
    trainer.budget.tokens = 41
    trainer.update(varied(), version=3, progress=0.0)
    assert len(loss.seen) > 2
    advantages = torch.cat(loss.seen).double()
    assert float(advantages.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(advantages.std(unbiased=False)) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(("credit", "loss"), [(GAE(), PPOClip()), (GroupRelative(), M2PO(threshold=0.5))], ids=str)
def test_two_ranks_train_as_one_does_on_the_whole_batch(tmp_path: Path, credit: Credit, loss: Loss) -> None:
    """With whitened advantages and two passes: what is summed over ranks, before the first step and in each."""
    save_lm(tmp_path)
    whole = [dataclasses.replace(t, ticket_id=i, group_id=i % 2) for i, t in enumerate(make_batch())]

    def trained(ranks: Ranks, rows: list[Trajectory]) -> list[torch.Tensor]:
        config = make_config(credit, loss, whiten_advantages=True, max_staleness=None)
        config.learner = LearnerConfig(warmup_updates=0, decay="constant", epochs=2)
        with lock:
            model = PolicyModel.from_pretrained(tmp_path)
            trainer = Trainer(config, ranks, model, NoPriorities(), MetricLog())  # type: ignore[arg-type]
        batch = Batch(tuple(rows), (1.0,) * len(rows), tuple(range(len(rows))), 1.0)
        trainer.update(batch, version=3, progress=0.0)
        return [p.detach() for p in trainer.model.parameters()]

    lock = threading.Lock()
    meeting, table = threading.Barrier(2), {}
    results: dict[int, list[torch.Tensor]] = {}

    def work(rank: int) -> None:
        results[rank] = trained(ThreadRanks(rank, meeting, table), whole[rank::2])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = trained(Ranks("cpu"), whole)
    for mine, other, together in zip(alone, results[0], results[1], strict=True):
        assert torch.equal(other, together)
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-3)


# --- an update by its definition


def group_advantages(batch: Batch) -> np.ndarray:
    """Of each trajectory: its return less the mean return of all, which are one group."""
    returns = np.array([float(t.rewards.sum()) for t in batch.trajectories])
    return returns - returns.mean()


def defined_loss(lm: PreTrainedModel, batch: Batch, aggregate: str, temperature: float) -> torch.Tensor:
    """REINFORCE of the batch, a trajectory at a time; weights of the draw have mean 1."""
    weights = np.array(batch.weights) / np.mean(batch.weights)
    total, num_tokens = torch.zeros(()), sum(int(t.action_mask.sum()) for t in batch.trajectories)
    for t, advantage, weight in zip(batch.trajectories, group_advantages(batch), weights, strict=True):
        tokens = torch.from_numpy(np.asarray(t.tokens)).long()
        log_probs = (lm(tokens[None]).logits[0] / temperature).log_softmax(-1)
        actions = np.flatnonzero(t.action_mask)
        of_tokens = -weight * advantage * log_probs[actions - 1, tokens[actions]]
        total = (
            total
            + {
                "token_mean": of_tokens.sum() / num_tokens,
                "sequence_mean_token_sum": of_tokens.sum() / len(batch.trajectories),
                "sequence_mean_token_mean": of_tokens.mean() / len(batch.trajectories),
            }[aggregate]
        )
    return total


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"])
@pytest.mark.parametrize("token_budget", [41, 1000], ids=["cut", "whole"])
def test_loss_and_gradient_are_those_of_the_whole_batch_however_it_is_cut(
    tmp_path: Path, aggregate: str, token_budget: int
) -> None:
    trainer, loss = watching_trainer(tmp_path, GroupRelative(), aggregate=aggregate)
    trainer.entropy.coef = 0.0
    trainer.budget.tokens = token_budget
    batch = dataclasses.replace(varied(), weights=(1.0, 0.5, 0.25, 1.0, 0.1, 0.7))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = defined_loss(lm, batch, aggregate, trainer.config.engine.temperature)
    gradients = torch.autograd.grad(expected, list(lm.parameters()))
    trainer.update(batch, version=3, progress=0.0)
    found = trainer.log.flush()
    assert (len(loss.seen) > 1) == (token_budget == 41)
    assert found["loss/policy"] == found["loss/total"] == pytest.approx(float(expected.detach()), rel=1e-4)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert found["optimizer/gradient_norm"] == pytest.approx(norm, rel=1e-4)
    advantages = np.repeat(group_advantages(batch), [t.num_action_tokens for t in batch.trajectories])
    assert found["advantage/mean"] == pytest.approx(advantages.mean(), abs=1e-5), "a mean over tokens"


@dataclass
class WatchingM2PO(M2PO):
    """Remembers what it is given, and which tokens it leaves out."""

    def __post_init__(self) -> None:
        self.seen: list[tuple[Scored, torch.Tensor, torch.Tensor]] = []

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        output = super().__call__(scored, advantages)
        self.seen.append((scored, advantages, output.weights == 0))
        return output


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("token_budget", [41, 1000], ids=["cut", "whole"])
def test_the_second_moment_is_that_of_all_tokens_of_an_optimizer_step_however_it_is_cut(
    tmp_path: Path, token_budget: int, minibatches: int
) -> None:
    loss = WatchingM2PO(threshold=0.5)
    config = make_config(GroupRelative(), loss, whiten_advantages=True, max_staleness=None)
    config.learner = LearnerConfig(
        learning_rate=0.0, warmup_updates=0, decay="constant", token_budget=token_budget, minibatches=minibatches
    )
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    trainer = Trainer(config, Ranks("cpu"), model, NoPriorities(), MetricLog())  # type: ignore[arg-type]
    trainer.update(varied(), version=3, progress=0.0)
    limits = list(dict.fromkeys(scored.batch_limit for scored, _, _ in loss.seen))
    assert len(limits) == minibatches
    for limit in limits:
        seen = [each for each in loss.seen if each[0].batch_limit == limit]
        assert len(seen) > 1 or token_budget == 1000
        squares = torch.cat([departures(s.log_probs, s.behaviour_log_probs, a) for s, a, _ in seen])
        assert limit == pytest.approx(second_moment_limit(squares[squares > 0], 0.5), rel=1e-4)
        is_masked = torch.cat([masked for _, _, masked in seen])
        kept = squares[~is_masked & (squares > 0)]
        assert is_masked.any() and float(kept.mean()) <= 0.5
        largest_kept, smallest_masked = float(kept.max()), float(squares[is_masked].min())
        assert largest_kept < smallest_masked
        assert (float(kept.sum()) + smallest_masked) / (len(kept) + 1) > 0.5, "no more is left out than must be"


class Priorities(NoPriorities):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[int, float]] = []

    def update_advantages(self, ids: Sequence[int], values: Sequence[float]) -> None:
        self.told.append(dict(zip(ids, values, strict=True)))


@pytest.mark.parametrize("cut", [{}, {"minibatches": 3}, {"epochs": 2, "minibatches": 2}], ids=str)
def test_the_buffer_is_told_once_of_each_item_the_largest_advantage_of_its_trajectories(
    tmp_path: Path, cut: dict[str, int]
) -> None:
    trainer, _ = recording_trainer(tmp_path, **cut)
    trainer.buffer = buffer = Priorities()  # type: ignore[assignment]
    batch = dataclasses.replace(varied(), item_ids=(7, 7, 8, 9, 9, 9))
    trainer.update(batch, version=3, progress=0.0)
    sizes = np.abs(group_advantages(batch))
    expected = {7: sizes[:2].max(), 8: sizes[2], 9: sizes[3:].max()}
    [told] = buffer.told
    assert told == pytest.approx(expected, rel=1e-5)


def test_a_step_that_is_left_out_leaves_no_trace_in_the_optimizer(tmp_path: Path) -> None:
    """Weights after it are those of a trainer that has never seen it; so are the moments, which the next steps show."""
    good = varied()
    bad = dataclasses.replace(good, trajectories=(endless(good.trajectories[0]), *good.trajectories[1:]))
    ends = []
    for batches in ([bad, good, bad, good], [good, good]):
        trainer, _ = recording_trainer(tmp_path)
        for batch in batches:
            trainer.update(batch, version=3, progress=0.0)
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    for with_bad, without in zip(*ends, strict=True):
        torch.testing.assert_close(with_bad, without, rtol=0, atol=0)


def test_several_steps_on_a_batch_of_many_micro_batches_begin_with_its_log_probabilities(tmp_path: Path) -> None:
    """However the batch is cut, ratios of a later step are against the weights that the update began with."""
    seen = []
    for token_budget in (44, 1000):
        trainer, loss = recording_trainer(tmp_path, epochs=2, token_budget=token_budget)
        trainer.update(varied(), version=3, progress=0.0)
        proximal = [s.proximal_log_probs for s in loss.seen if s.proximal_log_probs is not None]
        seen.append(torch.cat(proximal).sort().values)
    torch.testing.assert_close(seen[0], seen[1], atol=1e-5, rtol=0)


class RecordedRanks(ThreadRanks):
    """Remembers the sums that it was asked for, by their lengths."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, object]) -> None:
        super().__init__(rank, meeting, table)
        self.asked: list[int] = []

    def sum(self, numbers: Sequence[float]) -> list[float]:
        self.asked.append(len(numbers))
        return super().sum(numbers)

    def sum_gradients(self, model: torch.nn.Module) -> None:
        self.asked.append(-1)
        super().sum_gradients(model)


@pytest.mark.parametrize("whitens", ["true", "false"])
@pytest.mark.parametrize("algorithm", ["ppo", "group_relative"])
def test_ranks_are_asked_for_the_same_sums_in_the_same_order_whatever_their_batches_are(
    tmp_path: Path, algorithm: str, whitens: str
) -> None:
    """Rank 0 has six episodes that differ; rank 1 six that are equal, then six of which one is not finite."""
    policy = save_lm(tmp_path)
    words = [f"algorithm={algorithm}", "algorithm.group_size=6", f"algorithm.whiten_advantages={whitens}"]
    config = load(["model=scratch", *words, "learner.batch_size=12", "learner.epochs=2", "learner.minibatches=2"])
    models = [PolicyModel.from_pretrained(policy) for _ in range(2)]
    meeting, table = threading.Barrier(2), {}
    ranks = [RecordedRanks(rank, meeting, table) for rank in (0, 1)]
    differing = varied().trajectories
    equal = (differing[0],) * 6
    batches = [[differing, differing], [equal, (endless(differing[0]), *differing[1:])]]

    def work(rank: int) -> None:
        trainer = Trainer(config, ranks[rank], models[rank], Finite(), MetricLog())  # type: ignore[arg-type]
        for version, trajectories in enumerate(batches[rank], start=3):
            trainer.update(dataclasses.replace(varied(), trajectories=trajectories), version, 0.0)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ranks[0].asked == ranks[1].asked
    assert ranks[0].asked.count(-1) == 2 * 4, "a gradient for each minibatch of each pass"
