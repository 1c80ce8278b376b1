"""Several optimizer steps an update: what each sees, and what the buffer and the optimizer are told."""

import copy
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.interface import Credit, Episodes, LossOutput, PackedBatch, Prepared, Scored, Worth
from impala_llm.algorithms.losses import PPOClip
from impala_llm.algorithms.vtrace import GAE
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.control import EntropyControl
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.own_parts import PartFault
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from tests.learning.builders import (
    batch_of,
    group_advantages,
    make_config,
    make_trajectory,
    save_lm,
    varied,
    with_infinite_return,
)
from tests.learning.test_mismatch import sampled_by


@dataclass
class Recording(PPOClip):
    """Remembers what it is given."""

    def __post_init__(self) -> None:
        self.seen: list[Scored] = []
        self.advantages: list[torch.Tensor] = []

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        self.seen.append(scored)
        self.advantages.append(advantages)
        return super().__call__(scored, advantages)


def recording_trainer(directory: Path, recompute: str = "never", **learner: object) -> tuple[Trainer, Recording]:
    loss = Recording()
    config = make_config(GroupRelative(), loss, entropy_coef=0.01, max_staleness=None, recompute_behaviour=recompute)
    config.learner = LearnerConfig(warmup_updates=0, decay="constant", learning_rate=1e-2, **learner)  # type: ignore[arg-type]
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model), loss


def test_two_passes_are_two_steps_on_the_same_batch(tmp_path: Path) -> None:
    once, _ = recording_trainer(tmp_path)
    twice, _ = recording_trainer(tmp_path, epochs=2)
    for _ in range(2):
        once.update(varied(), version=3, progress=0.0)
    twice.update(varied(), version=3, progress=0.0)
    for p, q in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_an_episode_without_a_gradient_counts_in_the_mean_of_each_step(tmp_path: Path) -> None:
    """Four of the six are as good as their groups of two; with an entropy bonus they are computed all the same."""
    norms, seen = [], []
    for epochs, bonus in ((1, 0.0), (2, 0.0), (1, 1e-12)):
        trainer, _ = recording_trainer(tmp_path, epochs=epochs)
        trainer.config.algorithm.entropy_coef = trainer.entropy.coef = bonus
        trainer.optimizer = Optimizer(trainer.model, LearnerConfig(learning_rate=0.0, value_learning_rate=0.0))
        rows = [make_trajectory(12, [(4, 8), (9, 12)], seed, group_id=seed // 2) for seed in range(6)]
        rows[0] = dataclasses.replace(rows[0], rewards=2 * rows[0].rewards)
        trainer.update(dataclasses.replace(batch_of((1.0,) * 6), trajectories=tuple(rows)), version=3, progress=0.0)
        summary = trainer.log.flush()
        if bonus == 0:
            assert summary["advantage/zero_share"] == pytest.approx(4 / 6)
        norms.append(summary["optimizer/gradient_norm"])
        seen.append([summary[f"loss/{part}"] for part in ("policy", "total")])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert seen[0] == pytest.approx(seen[2], rel=1e-5) and seen[1] == pytest.approx(seen[2], rel=1e-5)


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


@pytest.mark.parametrize("whitens", [False, True])
def test_advantages_are_those_of_the_beginning_of_the_update(tmp_path: Path, whitens: bool) -> None:
    """As in PPO (arXiv 1707.06347, algorithm 1): a critic that is fitted to the batch does not change them."""
    config = make_config(GAE(lam=0.5), loss := Recording(), max_staleness=None, whiten_advantages=whitens)
    config.learner = LearnerConfig(
        warmup_updates=0, value_learning_rate=0.1, epochs=3, minibatches=2, token_budget=60, decay="constant"
    )
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    Trainer(config, Ranks("cpu"), model).update(varied(), version=3, progress=0.0)
    # Passes cut the batch in other ways: a token is known by what the engine said of it.
    passes: list[dict[float, float]] = [{}]
    for scored, advantages in zip(loss.seen, loss.advantages, strict=True):
        found = dict(zip(scored.behaviour_log_probs.tolist(), advantages.tolist(), strict=True))
        if found.keys() & passes[-1].keys():
            passes.append({})
        passes[-1] |= found
    assert len(passes) == 3 and len(passes[0]) == sum(t.num_action_tokens for t in varied().trajectories)
    assert passes[1] == passes[0] and passes[2] == passes[0]
    values = torch.tensor(list(passes[0].values()))
    assert len(values.unique()) == 5
    if whitens:
        assert float(values.mean()) == pytest.approx(0.0, abs=1e-5)
        assert float(values.std(unbiased=False)) == pytest.approx(1.0, rel=1e-4)


def test_what_is_said_of_the_critic_is_of_the_beginning_of_the_update_too(tmp_path: Path) -> None:
    said = []
    for epochs in (1, 4):
        config = make_config(GAE(lam=0.5), PPOClip(), max_staleness=None)
        config.learner = LearnerConfig(warmup_updates=0, value_learning_rate=0.1, epochs=epochs)
        trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
        torch.nn.init.normal_(next(trainer.model.value_head.parameters()), generator=torch.Generator().manual_seed(0))
        trainer.update(varied(), version=3, progress=0.0)
        said.append(trainer.log.flush()["value/explained_variance"])
    assert said[1] == pytest.approx(said[0], rel=1e-4) and abs(said[0]) > 1e-3


@dataclass
class OwnCritic(Credit):
    """Fits the value of each turn to its reward, which is its number in the episode."""

    uses_values: ClassVar[bool] = True

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: torch.Tensor | None) -> Worth:
        values = scored.values(batch.turn_value_positions)
        targets = batch.turn_rewards
        advantages = (targets - values.detach())[batch.turn_ids]
        return Worth(advantages, values, targets, batch.turn_segment_ids, value_coef=0.5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_critic_of_a_credit_of_one_s_own_is_measured_too(tmp_path: Path, epochs: int) -> None:
    config = make_config(OwnCritic(name="mine:OwnCritic"), PPOClip(), max_staleness=None)
    config.learner = LearnerConfig(warmup_updates=0, value_learning_rate=0.1, epochs=epochs)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    found = []
    for version in range(3, 9):
        trainer.update(varied(), version, progress=0.0)
        found.append(trainer.log.flush()["value/explained_variance"])
    assert found[0] == pytest.approx(0.0, abs=0.05) and found[-1] > 0.1, "a new head is a constant guess"


@dataclass
class FewerEachTime(Credit):
    """Fits the values of fewer turns each time that it is called."""

    uses_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.num_calls = 0

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: torch.Tensor | None) -> Worth:
        self.num_calls += 1
        kept = slice(self.num_calls, None)
        values = scored.values(batch.turn_value_positions[kept])
        advantages = torch.ones_like(scored.log_probs).detach()
        return Worth(advantages, values, torch.ones_like(values).detach(), batch.turn_segment_ids[kept], value_coef=0.5)


def test_a_credit_whose_values_depend_on_the_weights_is_named_in_several_steps(tmp_path: Path) -> None:
    config = make_config(FewerEachTime(name="mine:Fewer"), PPOClip(), max_staleness=None)
    config.learner = LearnerConfig(warmup_updates=0, epochs=2)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    with pytest.raises(PartFault, match=r"mine:Fewer returned .* values .*: which values it returns may not depend on"):
        trainer.update(varied(), version=3, progress=0.0)


def test_the_critic_is_fitted_to_the_targets_of_the_beginning_of_the_update(tmp_path: Path) -> None:
    """Against a value head that is fitted by hand, on a trunk that does not move."""
    config = make_config(GAE(lam=0.0), PPOClip(), max_staleness=None)
    rate = {"learning_rate": 0.0, "value_learning_rate": 0.1}
    config.learner = LearnerConfig(warmup_updates=0, decay="constant", max_grad_norm=1e9, epochs=3, **rate)  # type: ignore[arg-type]
    trainer = Trainer(config, Ranks("cpu"), model := PolicyModel.from_pretrained(save_lm(tmp_path)))
    batch = varied()
    micro = PackedBatch.of(batch.trajectories, range(6))
    with torch.no_grad():
        hidden = model.hidden(micro.tokens, micro.position_ids, micro.context_lengths)
        values = model.values(hidden[micro.turn_value_positions])
        after = torch.zeros_like(values)  # V of the next turn; 0 where the episode has ended
        is_inner = micro.turn_segment_ids[1:] == micro.turn_segment_ids[:-1]
        after[:-1][is_inner] = values[1:][is_inner]
        last = torch.cat([~is_inner, torch.tensor([True])])
        bootstrap = model.values(hidden[micro.last_positions])
        after[last] = torch.where(micro.bootstrap, bootstrap, 0.0)
        targets = micro.turn_rewards + config.algorithm.credit.discount * after
    states = hidden[micro.turn_value_positions].detach()
    by_hand = copy.deepcopy(model)
    adam = Optimizer(by_hand, config.learner)
    for _ in range(3):
        (0.5 * config.algorithm.credit.value_coef * (by_hand.values(states) - targets).square().mean()).backward()  # type: ignore[attr-defined]
        adam.step(0, 0.0)
    trainer.update(batch, version=3, progress=0.0)
    for expected, found in zip(by_hand.value_head.parameters(), model.value_head.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_engine_is_compared_with_the_weights_that_it_had(tmp_path: Path) -> None:
    """Later steps of the update say nothing of the engine: the policy has moved."""
    seen = []
    for epochs in (1, 4):
        trainer, _ = recording_trainer(tmp_path, epochs=epochs)
        trainer.update(varied(), version=3, progress=0.0)
        summary = trainer.log.flush()
        seen.append((summary["mismatch/logprob_mean"], summary["mismatch/tokens"]))
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


@pytest.mark.parametrize("alarm_first", [False, True], ids=["alarm rises", "alarm ends"])
def test_the_behaviour_policy_is_the_same_in_all_steps_of_an_update(tmp_path: Path, alarm_first: bool) -> None:
    """The alarm of `on_mismatch` changes after the first step, and counts from the next update on."""
    trainer, loss = recording_trainer(tmp_path, "on_mismatch", epochs=2)
    trainer.monitor.load_state_dict({"alarm": alarm_first, "total": 0.0, "num_tokens": 0})
    rows = sampled_by(trainer.model, noise=0.0 if alarm_first else 0.7)
    trainer.update(Batch(tuple(rows), (1.0,) * 12, (0,) * 12, 1.0), version=3, progress=0.0)
    assert trainer.monitor.alarm is not alarm_first
    first, second = loss.seen
    assert torch.equal(first.behaviour_log_probs, second.behaviour_log_probs)


def test_several_steps_on_a_batch_of_many_micro_batches_begin_with_its_log_probabilities(tmp_path: Path) -> None:
    """However the batch is cut, ratios of a later step are against the weights that the update began with."""
    seen = []
    for token_budget in (44, 1000):
        trainer, loss = recording_trainer(tmp_path, epochs=2, token_budget=token_budget)
        trainer.update(varied(), version=3, progress=0.0)
        proximal = [s.proximal_log_probs for s in loss.seen if s.proximal_log_probs is not None]
        seen.append(torch.cat(proximal).sort().values)
    torch.testing.assert_close(seen[0], seen[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("cut", [{}, {"minibatches": 3}, {"epochs": 2, "minibatches": 2}], ids=str)
def test_the_result_has_for_each_item_the_largest_advantage_of_its_trajectories(
    tmp_path: Path, cut: dict[str, int]
) -> None:
    trainer, _ = recording_trainer(tmp_path, **cut)
    batch = dataclasses.replace(varied(), item_ids=(7, 7, 8, 9, 9, 9))
    result = trainer.update(batch, version=3, progress=0.0)
    sizes = np.abs(group_advantages(batch))
    expected = {7: sizes[:2].max(), 8: sizes[2], 9: sizes[3:].max()}
    assert result.abs_advantages == pytest.approx(expected, rel=1e-5)


def test_a_step_that_is_left_out_leaves_no_trace_in_the_optimizer(tmp_path: Path) -> None:
    """Weights after it are those of a trainer that has never seen it; so are the moments, which the next steps show."""
    good = varied()
    bad = dataclasses.replace(good, trajectories=(with_infinite_return(good.trajectories[0]), *good.trajectories[1:]))
    ends = []
    for batches in ([bad, good, bad, good], [good, good]):
        trainer, _ = recording_trainer(tmp_path)
        for batch in batches:
            trainer.update(batch, version=3, progress=0.0)
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
    for with_bad, without in zip(*ends, strict=True):
        torch.testing.assert_close(with_bad, without, rtol=0, atol=0)


@dataclass
class NotANumber(Credit):
    """Gives the tokens of the fifth row an advantage that is not finite."""

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: torch.Tensor | None) -> Worth:
        members = torch.tensor(batch.members)[scored.segment_ids]
        return Worth(torch.where(members == 4, torch.nan, 1.0))


@dataclass
class NotANumberOfTeacher(NotANumber):
    needs_teacher: ClassVar[bool] = True
    teacher: str | None = None
    teacher_context: str = ""


@dataclass
class NotANumberOfValues(NotANumber):
    uses_values: ClassVar[bool] = True


@dataclass
class OfNoRewards(GAE):
    learns_from_rewards: ClassVar[bool] = False


@dataclass
class NotANumberLoss(PPOClip):
    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        found = super().__call__(scored, advantages)
        return found._replace(per_token=found.per_token * torch.nan)


@pytest.mark.parametrize(
    ("credit", "loss", "said"),
    [
        (NotANumber(name="mine:Credit"), PPOClip(), "episode-4 .*3: check algorithm.credit=mine:Credit, whose adv"),
        (
            NotANumber(name="mine:Credit"),
            NotANumberLoss(),
            "episode-4 .* 5 more .*: check algorithm.credit=mine:Credit,",
        ),
        (
            NotANumberOfTeacher(name="mine:Credit"),
            PPOClip(),
            "mine:Credit, whose adv.* lower learner.learning_rate: a policy that diverges has such log-probabilities",
        ),
        (
            NotANumberOfValues(name="mine:Credit"),
            PPOClip(),
            "mine:Credit, whose adv.* lower learner.learning_rate: a policy that diverges has such values",
        ),
        (
            GAE(),
            NotANumberLoss(name="mine:Loss"),
            "episode-0 .* 5 more .*: check algorithm.loss=mine:Loss, since .*or set algorithm.normalize_reward=true or",
        ),
        (OfNoRewards(), NotANumberLoss(name="mine:Loss"), "algorithm.loss=mine:Loss, since .*or set a lower"),
    ],
)
def test_a_step_that_is_left_out_names_the_part_that_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, credit: Credit, loss: PPOClip, said: str
) -> None:
    config = make_config(credit, loss, max_staleness=None)
    config.learner.token_budget = 1000
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    trainer.update(varied(), version=3, progress=0.0)
    assert re.search(f"A STEP IS LEFT OUT.*{said}", caplog.text), caplog.text


@dataclass
class PreparesNotANumber(GroupRelative):
    """Prepares an advantage that is not finite for the fifth episode."""

    def prepare(self, episodes: Episodes) -> Prepared:
        prepared = super().prepare(episodes)
        prepared.advantages[4] = torch.nan
        return prepared


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("credit", [NotANumber(name="mine:Credit"), PreparesNotANumber(name="mine:Credit")])
def test_whitening_spreads_no_advantage_that_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, credit: Credit, minibatches: int
) -> None:
    """The episode that has it is named alone, and steps without it are made."""
    config = make_config(credit, PPOClip(), max_staleness=None, whiten_advantages=True)
    config.learner = LearnerConfig(token_budget=1000, warmup_updates=0, minibatches=minibatches)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    trainer.update(varied(), version=3, progress=0.0)
    said = caplog.text
    assert re.search(r"A STEP IS LEFT OUT.*episode-4 \([^)]*\), at version 3: check algorithm.credit=mine:Credit", said)
    assert "learning_rate" not in said and "normalize_reward" not in said, "neither is the cause"
    assert trainer.log.flush()["optimizer/skipped"] == pytest.approx(1 / minibatches)


def without_bonus(directory: Path, **algorithm: Any) -> Trainer:
    """A trainer without a bonus for entropy."""
    trainer, _ = recording_trainer(directory)
    algorithm_config = dataclasses.replace(trainer.config.algorithm, entropy_coef=0.0, **algorithm)
    trainer.config.algorithm = algorithm_config
    trainer.entropy = EntropyControl(algorithm_config)
    return trainer


def groups_of_two(num_action_tokens: int, first_reward: float = 1.0) -> Batch:
    """Two groups of two, whose episodes have rewards of 1 but for the very first."""
    length = 4 + num_action_tokens
    rows = [make_trajectory(length, [(4, length)], seed, group_id=seed // 2) for seed in range(4)]
    rows[0] = dataclasses.replace(rows[0], rewards=first_reward * rows[0].rewards)
    return Batch(tuple(rows), (1.0,) * 4, tuple(range(4)), 1.0)


def test_the_entropy_bonus_rises_from_0_where_all_episodes_of_each_group_are_alike(tmp_path: Path) -> None:
    """As those of a policy without entropy are."""
    trainer = without_bonus(tmp_path, entropy_target=10.0, entropy_rate=0.01)
    trainer.update(groups_of_two(6), version=3, progress=0.0)
    entropy = trainer.log.flush()["loss/entropy"]
    assert trainer.entropy.coef == pytest.approx(0.01 * (10.0 - entropy))


def test_the_entropy_that_is_held_at_a_target_is_that_of_all_action_tokens(tmp_path: Path) -> None:
    found = []
    for coef in (0.0, 1e-9):
        trainer = without_bonus(tmp_path, entropy_target=10.0, entropy_rate=0.01)
        trainer.entropy.coef = coef
        trainer.update(groups_of_two(6, first_reward=2.0), version=3, progress=0.0)
        found.append(trainer.entropy.coef)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_episodes_that_shrink_are_said_also_where_all_of_each_group_are_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = without_bonus(tmp_path)
    for _ in range(5):
        trainer.update(groups_of_two(40, first_reward=2.0), version=3, progress=0.0)
    assert trainer.log.flush()["alarm/length_collapse"] == 0.0
    trainer.update(groups_of_two(2), version=3, progress=0.0)
    assert trainer.log.flush()["alarm/length_collapse"] == 1.0
    assert "LENGTH COLLAPSE" in caplog.text
