"""Groups in which there is nothing to compare, and their metric."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative, episode_return, levelled_returns
from impala_llm.algorithms.interface import LossOutput, Scored
from impala_llm.algorithms.losses import Reinforce
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.trainer import Trainer
from impala_llm.trajectory import Trajectory
from tests.learning.builders import make_config, make_trajectory, save_lm, trainer_with
from tests.learning.test_trainer import with_returns


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("algorithm", ["group_relative", "dpo"])
def test_episodes_count_whose_whole_group_has_one_return(tmp_path: Path, algorithm: str, entropy_coef: float) -> None:
    """An episode in no pair, or as good as the mean of 0, 5 and 10, does not."""
    words = [f"algorithm={algorithm}", "algorithm.group_size=3", "learner.batch_size=6", "engine.max_length=256"]
    if algorithm == "dpo":
        words.append(f"algorithm.reference={save_lm(tmp_path / 'reference')}")
    trainer = trainer_with(tmp_path / "lm", *words, f"algorithm.entropy_coef={entropy_coef}")
    rows = with_returns((0.0, 0.0), (0.0, 5.0), (0.0, 10.0), (0.0, 5.0), (5.0, 0.0), (2.0, 3.0))
    rows = [dataclasses.replace(t, group_id=number // 3) for number, t in enumerate(rows)]
    trainer.update(Batch(tuple(rows), (1.0,) * 6, (0, 0, 0, 1, 1, 1), 1.0), version=3, progress=0.0)
    assert trainer.log.flush()["advantage/zero_share"] == 0.5


@pytest.mark.parametrize(
    ("algorithm", "whiten"),
    [("group_relative", False), ("group_relative", True), ("group_relative_by_std", False), ("dpo", False)],
)
def test_returns_that_are_equal_but_for_rounding_teach_nothing(tmp_path: Path, algorithm: str, whiten: bool) -> None:
    """Four episodes earn 0.7, one of them by 0.3 + 0.4, which in float32 is another number."""
    words = [f"algorithm={algorithm}", "algorithm.group_size=4", "learner.batch_size=4", "engine.max_length=256"]
    if algorithm == "dpo":
        words.append(f"algorithm.reference={save_lm(tmp_path / 'reference')}")
    trainer = trainer_with(tmp_path / "lm", *words, f"algorithm.whiten_advantages={str(whiten).lower()}")
    rows = with_returns((0.7, 0.0), (0.7, 0.0), (0.7, 0.0), (0.3, 0.4))
    trainer.update(Batch(tuple(rows), (1.0,) * 4, (0,) * 4, 1.0), version=3, progress=0.0)
    found = trainer.log.flush()
    assert found["advantage/zero_share"] == 1.0
    assert found["advantage/mean"] == found["advantage/std"] == found["optimizer/gradient_norm"] == 0.0


def test_returns_are_equal_where_their_rewards_cancel_but_for_rounding() -> None:
    """Ten steps that cost 0.1 and a goal worth 1 leave -1.5e-8, an episode without rewards 0."""

    def episode(rewards: list[float]) -> Trajectory:
        t = make_trajectory(24, [(2 + 2 * turn, 3 + 2 * turn) for turn in range(11)])
        values = np.zeros(24, np.float32)
        values[2:24:2] = rewards
        return dataclasses.replace(t, rewards=values)

    group = [episode([-0.1] * 10 + [1.0]), episode([0.0] * 11)]
    returns = [episode_return(t) for t in group]
    assert returns[0] != returns[1]
    assert len(levelled_returns(returns, group).unique()) == 1
    goal = [np.zeros(11), np.full(11, 0.1)]
    returns = [episode_return(t, 1.0, extra) for t, extra in zip(group, goal, strict=True)]
    assert levelled_returns(returns, group, goal).tolist() == pytest.approx([0.0, 1.1], abs=1e-6)


def test_advantages_of_the_batch_are_those_of_all_episodes_computed_or_not(tmp_path: Path) -> None:
    """Without a bonus the first group, of equals, is not computed."""
    found = []
    for coef in (0.0, 1e-12):
        words = ["algorithm=group_relative", "algorithm.group_size=3", "learner.batch_size=6", "engine.max_length=256"]
        trainer = trainer_with(tmp_path / f"{coef}", *words, f"algorithm.entropy_coef={coef}")
        rows = with_returns((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.0, 5.0), (3.0, 0.0), (2.0, 3.0))
        rows = [dataclasses.replace(t, group_id=number // 3) for number, t in enumerate(rows)]
        trainer.update(Batch(tuple(rows), (1.0,) * 6, (0, 0, 0, 1, 1, 1), 1.0), version=3, progress=0.0)
        metrics = trainer.log.flush()
        found.append((metrics["advantage/mean"], metrics["advantage/std"]))
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_credit_that_compares_no_group_has_no_such_metric(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, "algorithm=ppo", "learner.batch_size=2")
    rows = with_returns((0.0, 5.0), (0.0, 5.0))
    trainer.update(Batch(tuple(rows), (1.0,) * 2, (0, 0), 1.0), version=3, progress=0.0)
    assert "advantage/zero_share" not in trainer.log.flush()


@dataclass
class HeldNearMu(Reinforce):
    """-A log π + (log π - log μ)²/2: a penalty of its own, with a gradient where A = 0 too."""

    seen: list[int] = field(default_factory=list)
    """Number of tokens of each call."""

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        self.seen.append(len(advantages))
        output = super().__call__(scored, advantages)
        return output._replace(
            per_token=output.per_token + (scored.log_probs - scored.behaviour_log_probs).square() / 2
        )


@dataclass
class SaysThatItVanishes(HeldNearMu):
    vanishes_with_advantage = True


@pytest.mark.parametrize("entropy_coef", [0.0, 0.03])
@pytest.mark.parametrize(("kind", "num_computed"), [(HeldNearMu, 6), (SaysThatItVanishes, 3)])
def test_a_loss_that_does_not_say_that_it_vanishes_with_the_advantage_gets_all_tokens(
    tmp_path: Path, kind: type[HeldNearMu], num_computed: int, entropy_coef: float
) -> None:
    """Whatever the bonus is. The first group is one of equals."""
    loss = kind(name="mine:Loss")
    config = make_config(GroupRelative(), loss, max_staleness=None, entropy_coef=entropy_coef)
    trainer = Trainer(config, Ranks("cpu"), PolicyModel.from_pretrained(save_lm(tmp_path)))
    rows = with_returns((1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (0.0, 5.0), (3.0, 0.0), (2.0, 3.5))
    rows = [dataclasses.replace(t, group_id=number // 3) for number, t in enumerate(rows)]
    trainer.update(Batch(tuple(rows), (1.0,) * 6, (0, 0, 0, 1, 1, 1), 1.0), version=3, progress=0.0)
    num_tokens = (6 if entropy_coef else num_computed) * rows[0].num_action_tokens
    assert sum(loss.seen) == num_tokens
