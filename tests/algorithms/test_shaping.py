"""Rewards of the trainer's own against their definitions."""

import pytest
import torch

from impala_llm.algorithms.shaping import overlong_share, turn_divergences


@pytest.mark.parametrize(
    ("length", "share"), [(0, 0.0), (60, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (140, 1.0)]
)
def test_an_episode_is_overlong_within_the_margin(length: int, share: float) -> None:
    assert overlong_share(length, limit=100, margin=20) == pytest.approx(share)


@pytest.mark.parametrize("margin", [0, 101, -1])
def test_a_margin_lies_within_the_limit(margin: int) -> None:
    with pytest.raises(ValueError, match=f"margin is {margin}"):
        overlong_share(5, 100, margin)


def test_the_divergence_of_a_turn_is_the_sum_over_its_tokens() -> None:
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5, -100.0])
    found = turn_divergences(behaviour, reference, torch.tensor([0, 0, 2, 2]), 3)
    assert found.tolist() == [0.5 - 1.0, 0.0, 20.0] and not found.requires_grad
