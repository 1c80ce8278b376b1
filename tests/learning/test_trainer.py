"""The step of one rank: draws, returns, shaped rewards, and the loss by its definition."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from impala_llm.algorithms.advantages import GroupRelative, episode_return
from impala_llm.algorithms.interface import Credit, Episodes, LossOutput, PackedBatch, Prepared, Scored, Worth
from impala_llm.algorithms.losses import Reinforce
from impala_llm.algorithms.registry import LOSSES
from impala_llm.algorithms.stale_losses import M2PO, departures, second_moment_limit
from impala_llm.algorithms.vtrace import GAE, VTrace
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.objective import whitened
from impala_llm.learning.own_parts import PartFault
from impala_llm.learning.packing import OutOfMemory, pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import action_log_probs
from impala_llm.observability.metrics import METRICS, MetricError, declare
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.learning.builders import (
    batch_of,
    group_advantages,
    make_config,
    make_trajectory,
    save_lm,
    trainer_with,
    varied,
)


def make_trainer(directory: Path) -> Trainer:
    config = make_config(entropy_coef=0.01)
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model)


@pytest.mark.parametrize(
    ("where", "tensor_parallel", "fix"),
    [
        ("moments", 1, "learner.sharding=fsdp2 with more ranks .* or model.lora.rank=16;"),
        ("sum of gradients", 1, "learner.sharding=fsdp2 with more ranks .* or model.lora.rank=16;"),
        (
            "moments",
            2,
            "learner.sharding=fsdp2 and learner.tensor_parallel=1 with .* model.lora.rank=16 and "
            "learner.tensor_parallel=1;",
        ),
    ],
)
def test_memory_that_runs_out_in_the_step_is_said_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, tensor_parallel: int, fix: str
) -> None:
    """A smaller budget does not: the micro-batches are gone by then."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer = make_trainer(tmp_path)
    trainer.config.learner.tensor_parallel = tensor_parallel
    monkeypatch.setattr(*((torch.optim.AdamW, "step") if where == "moments" else (Ranks, "sum_gradients")), full)
    with pytest.raises(OutOfMemory, match=f"optimizer's step.*: set {fix}"):
        trainer.update(batch_of((1.0,) * 6), version=3, progress=0.0)


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


def of_versions(t: Trajectory, *versions: int) -> Trajectory:
    """The trajectory, its action tokens sampled by these versions, one after the other, in equal parts."""
    found = np.full(len(t.tokens), -1, np.int32)
    found[t.action_mask] = np.repeat(versions, t.num_action_tokens // len(versions))
    return dataclasses.replace(t, versions=found)


def aged_update(directory: Path, entropy_coef: float, rows: list[Trajectory]) -> dict[str, float]:
    """Metrics of an update at version 5, in which tokens of versions before 3 do not teach and the others weigh 1."""
    words = ["algorithm=group_relative", "algorithm.max_staleness=2", "algorithm.loss=reinforce"]
    words += [f"learner.batch_size={len(rows)}", f"algorithm.entropy_coef={entropy_coef}"]
    trainer = trainer_with(directory, *words)
    group_ids = tuple(t.group_id for t in rows)
    trainer.update(Batch(tuple(rows), (1.0,) * len(rows), group_ids, 1.0), version=5, progress=0.0)
    return trainer.log.flush()


def test_who_is_too_old_is_compared_with_and_does_not_teach(tmp_path: Path) -> None:
    norms = []
    for entropy_coef in (0.0, 1e-12):  # with a term of its own every episode is computed
        rows = [of_versions(t, v) for v, t in zip((0, 5), with_returns((0.0, 0.0), (0.0, 10.0)), strict=True)]
        found = aged_update(tmp_path, entropy_coef, rows)
        assert found["ratio/rejected_share"] == 0.5
        assert (found["advantage/mean"], found["advantage/std"]) == (0.0, 5.0), "-5 and 5"
        assert found["buffer/ess"] == pytest.approx(0.5), "half of the tokens weigh 1, half 0"
        norms.append(found["optimizer/gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


@pytest.mark.parametrize(("entropy_coef", "size"), [(0.0, 1 / 2), (1e-12, 7 / 12)], ids=["left out", "computed"])
def test_groups_of_equals_are_as_old_as_they_are(tmp_path: Path, entropy_coef: float, size: float) -> None:
    """Their ratios are not known where they are not computed: then their weights count neither old nor young."""
    returns = [(0.0, 0.0), (0.0, 10.0), (0.0, 2.0), (0.0, 2.0), (1.0, 0.0), (1.0, 0.0)]
    versions = [(0,), (5,), (4,), (3,), (0, 5), (1,)]
    rows = [
        dataclasses.replace(of_versions(t, *found), group_id=number // 2)
        for number, (t, found) in enumerate(zip(with_returns(*returns), versions, strict=True))
    ]
    found = aged_update(tmp_path, entropy_coef, rows)
    assert found["ratio/rejected_share"] == pytest.approx((1 + 1 / 2 + 1) / 6)
    assert found["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    assert found["advantage/std"] == pytest.approx(math.sqrt(2 * 5**2 / 6))
    assert found["buffer/ess"] == pytest.approx(size)
    assert found["staleness/span"] == pytest.approx(5 / 6), "of one episode of six"


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
        Ranks("cpu"),
        PolicyModel.from_pretrained(save_lm(tmp_path)),
    )
    with pytest.raises(PartFault, match="the metric unheard_of, which .* add `metrics = "):
        trainer.update(batch_of((1.0,) * 6), version=3, progress=0.0)


def test_a_metric_has_one_meaning() -> None:
    declare("loss", {"clip_share": METRICS["loss/clip_share"].meaning})
    with pytest.raises(MetricError, match="loss/clip_share.*another name"):
        declare("loss", {"clip_share": "something else"})


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
    return Trainer(config, Ranks("cpu"), model), loss


def advantages_of_turns(trainer: Trainer, loss: Watching, batch: Batch) -> list[list[float]]:
    """For each trajectory, those of its turns' last tokens."""
    trainer.update(batch, version=3, progress=0.0)
    [advantages], [rows] = loss.seen, loss.rows
    [micro] = pack(batch.trajectories, 1000)
    found: list[list[float]] = [[] for _ in batch.trajectories]
    for index, member in enumerate(micro.members):
        mine = advantages[rows == index]
        ends = np.cumsum([end - start for start, end in batch.trajectories[member].turns.tolist()]) - 1
        found[member] = mine[ends].tolist()
    return found


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_an_overlong_episode_loses_reward_at_its_end(tmp_path: Path, granularity: str) -> None:
    """Two of the six, episodes 1 and 3, have 33 and 40 of at most 40 tokens: 0.3 and 1 of a margin of 10."""
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
    assert trainer.log.flush()["reward/shaping"] == pytest.approx(-1.3 / 6)
    assert "undiscounted" in METRICS["reward/shaping"].meaning


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


@dataclass
class OfRows(Credit):
    """Gives each row its length, without having prepared that."""

    metrics: ClassVar[Mapping[str, str]] = {"length_mean": "mean length of a row"}

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: torch.Tensor | None) -> Worth:
        lengths = batch.lengths.float()
        return Worth(lengths[scored.segment_ids], metrics=[("length_mean", float(lengths.mean()), len(lengths))])


@pytest.mark.parametrize(
    "credit", [GroupRelative(), GAE(), VTrace(granularity="token"), OfRows()], ids=["group", "gae", "token", "own"]
)
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


def test_whitening_does_not_scale_up_the_rounding_of_advantages_that_are_equal() -> None:
    advantages = torch.tensor([0.7, 0.7, 0.7 + 6e-8, 0.7])
    of_rounding = float(advantages.double().mean()), float(advantages.double().std(unbiased=False))
    assert whitened(Worth(advantages), of_rounding).advantages.abs().max() < 1e-6
    assert whitened(Worth(advantages), (0.7, 1e-3)).advantages.max() > 5e-5, "a real deviation is divided by"


@dataclass
class OtherThanPrepared(Credit):
    """Prepares `size` for each episode, and gives each token 1."""

    of_episodes: ClassVar[bool] = True
    size: float = 0.0

    def prepare(self, episodes: Episodes) -> Prepared:
        return Prepared(torch.full_like(episodes.returns, self.size))

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: torch.Tensor | None) -> Worth:
        return Worth(torch.ones_like(scored.log_probs))


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("whitens", [False, True])
def test_a_credit_of_episodes_that_returns_other_than_it_has_prepared_is_named(
    tmp_path: Path, size: float, whitens: bool
) -> None:
    """It would be whitened by the wrong mean and deviation, or, where it prepared 0, never be asked."""
    credit = OtherThanPrepared(name="mine:Other", size=size)
    config = make_config(credit, Reinforce(), whiten_advantages=whitens)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    with pytest.raises(PartFault, match="algorithm.credit=mine:Other returned other advantages than prepared"):
        trainer.update(varied(), version=3, progress=0.0)


def test_a_metric_of_a_credit_is_logged_under_credit(tmp_path: Path) -> None:
    trainer, _ = watching_trainer(tmp_path, OfRows())
    trainer.update(varied(), version=3, progress=0.0)
    assert trainer.log.flush()["credit/length_mean"] == pytest.approx(119 / 6)


# --- an update by its definition


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
    batch = dataclasses.replace(varied(), weights=(1.7, 0.85, 0.45, 1.7, 0.1, 1.2))
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
    trainer = Trainer(config, Ranks("cpu"), model)
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


def test_a_run_whose_settings_reject_every_token_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(GAE(), Reinforce(), reject="token", reject_low=1.0, reject_high=1.0, max_staleness=None)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    for version in range(3, 10):
        trainer.update(varied(), version, progress=0.0)
        assert trainer.log.flush()["ratio/rejected_share"] == 1.0
        assert ("NOTHING IS LEARNED" in caplog.text) == (version >= 7)
    assert caplog.text.count("NOTHING IS LEARNED") == 1 and "algorithm.reject_low=1 to" in caplog.text
