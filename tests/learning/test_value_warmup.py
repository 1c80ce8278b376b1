"""Updates in which the value head alone learns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from impala_llm.algorithms.interface import BatchLoss, Loss, LossOutput, Scored
from impala_llm.algorithms.losses import PPOClip
from impala_llm.algorithms.vtrace import GAE
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.settings import LearnerConfig
from impala_llm.trainer import Trainer
from tests.learning.builders import make_config, save_lm, varied


def make_trainer(directory: Path, loss: Loss, num_updates: int, **algorithm: object) -> Trainer:
    """A trainer that begins with so many updates of the value head alone."""
    config = make_config(GAE(), loss, max_staleness=None, **algorithm)
    config.learner = LearnerConfig(warmup_updates=0, value_warmup_updates=num_updates)
    model = PolicyModel.from_pretrained(save_lm(directory))
    return Trainer(config, Ranks("cpu"), model)


def test_the_entropy_bonus_waits_for_the_policy_to_learn(tmp_path: Path) -> None:
    """The entropy cannot follow it before, and a bonus that had risen all the while would be far too large."""
    trainer = make_trainer(tmp_path, PPOClip(), num_updates=2, entropy_target=10.0, entropy_rate=0.01)
    found = []
    for _ in range(3):
        trainer.update(varied(), version=3, progress=0.0)
        found.append(trainer.entropy.coef > 0)
    assert found == [False, False, True]


@dataclass
class Limited(BatchLoss):
    """A user's loss that needs a limit of the whole batch."""

    def measure(self, scored: Scored, advantages: torch.Tensor) -> torch.Tensor:
        return scored.log_ratio.square()

    def batch_limit(self, measured: torch.Tensor, sum_over_ranks: Callable[[Sequence[float]], list[float]]) -> float:
        return 1.0

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        assert scored.batch_limit == 1.0
        weights = torch.ones_like(advantages)
        return LossOutput(-weights * advantages * scored.log_probs, {}, weights)


def test_a_loss_of_the_whole_batch_has_its_limit(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Limited(name="mine:Limited"), num_updates=1)
    trainer.update(varied(), version=3, progress=0.0)
