"""Groups in which there is nothing to compare, and their metric."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from impala_llm.algorithms.advantages import episode_return, levelled_returns
from impala_llm.learning.batch_source import Batch
from impala_llm.trajectory import Trajectory
from tests.learning.builders import make_trajectory, save_lm, trainer_with
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
