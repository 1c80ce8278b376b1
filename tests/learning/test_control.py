"""What follows the training: the entropy bonus, the scale of rewards, the alarm of a collapse."""

import logging

import numpy as np
import pytest

from impala_llm.learning.control import CollapseAlarm, EntropyControl, RewardScale
from impala_llm.settings import AlgorithmConfig


def test_the_entropy_bonus_rises_below_its_target_and_falls_above() -> None:
    control = EntropyControl(AlgorithmConfig(entropy_coef=0.1, entropy_target=1.0, entropy_rate=0.05))
    control.observe(0.4)
    assert control.coef == pytest.approx(0.1 + 0.05 * 0.6)
    control.observe(3.0)
    assert control.coef == pytest.approx(0.13 - 0.05 * 2.0)
    control.observe(9.0)
    assert control.coef == 0.0, "never a penalty"
    control.observe(float("nan"))
    assert control.coef == 0.0


def test_without_a_target_the_bonus_stays() -> None:
    control = EntropyControl(AlgorithmConfig(entropy_coef=0.1))
    control.observe(0.0)
    assert control.coef == 0.1


def test_rewards_are_divided_by_the_standard_deviation_of_all_so_far() -> None:
    returns = np.random.default_rng(0).normal(5.0, 3.0, (4, 50))
    scale = RewardScale(True)
    assert scale.divisor == 1.0
    for batch in returns:
        scale.observe(len(batch), batch.sum(), (batch**2).sum())
    assert scale.divisor == pytest.approx(returns.std())
    off = RewardScale(False)
    off.observe(50, returns[0].sum(), (returns[0] ** 2).sum())
    assert off.divisor == 1.0


def test_a_single_return_does_not_make_all_others_vanish() -> None:
    returns = np.random.default_rng(0).normal(5.0, 3.0, (100, 64)).tolist()
    returns[1][0] = 3e38
    scale = RewardScale(True)
    for batch in returns:
        limited = [scale.limited(value) for value in batch]
        scale.observe(len(limited), sum(limited), sum(value**2 for value in limited))
    assert 3.0 < scale.divisor < 12.0
    assert limited == batch, "what is no outlier counts as it is"


def test_equal_rewards_are_left_as_they_are() -> None:
    scale = RewardScale(True)
    scale.observe(3, 3.0, 3.0)
    assert scale.divisor == 1.0
    large = [1234.56] * 16
    scale = RewardScale(True)
    for _ in range(100):
        scale.observe(len(large), sum(large), sum(value**2 for value in large))
    assert scale.divisor == 1.0, "what rounding leaves is no spread"


def test_a_collapse_is_said_and_a_solved_task_is_not_one(caplog: pytest.LogCaptureFixture) -> None:
    alarm = CollapseAlarm(AlgorithmConfig())
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            alarm.observe(2.0, 100.0, 0.1)
        alarm.observe(0.5, 60.0, 0.1)
        assert not any(alarm.collapsed.values()) and not caplog.records
        alarm.observe(0.05, 60.0, 0.95)
        assert not any(alarm.collapsed.values()), "certain, and right"
        alarm.observe(0.05, 10.0, 0.3)
    assert alarm.collapsed == {"entropy": True, "length": True, "noise": False}
    for word in ("ENTROPY COLLAPSE", "LENGTH COLLAPSE", "algorithm.entropy_alarm=0.05", "algorithm.entropy_target"):
        assert word in caplog.text
    alarm.observe(1.0, 60.0, 0.3)
    assert not any(alarm.collapsed.values())


def test_scores_that_fall_while_the_entropy_rises_are_a_collapse_to_noise(caplog: pytest.LogCaptureFixture) -> None:
    alarm = CollapseAlarm(AlgorithmConfig())
    with caplog.at_level(logging.WARNING):
        for entropy, score in [(4.6, 0.0)] * 5 + [(2.0, 0.5)] * 5 + [(1.0, 0.8)] * 5:
            alarm.observe(entropy, 6.0, score)
        assert not any(alarm.collapsed.values()), "it learned"
        for _ in range(5):
            alarm.observe(1.0, 6.0, 0.3)
        assert not alarm.collapsed["noise"], "worse, and as certain as before"
        for _ in range(5):
            alarm.observe(4.5, 6.0, 0.02)
    assert alarm.collapsed["noise"]
    for word in ("COLLAPSE TO NOISE", "from 0.80 to", "algorithm.loss=ppo_clip"):
        assert word in caplog.text
