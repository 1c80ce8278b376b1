"""Controllers that follow the training: the entropy bonus, the scale of rewards, the alarm of a collapse."""

import logging
import re

import msgpack
import numpy as np
import pytest

from impala_llm.learning.control import CollapseAlarm, EntropyControl, IdleUpdates, RewardScale
from impala_llm.observability.metrics import METRICS
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
        scale.observe(*scale.sums(batch.tolist()))
    assert scale.divisor == pytest.approx(returns.std())
    off = RewardScale(False)
    off.observe(*off.sums(returns[0].tolist()))
    assert off.divisor == 1.0


def test_a_single_return_does_not_make_all_others_vanish() -> None:
    returns = np.random.default_rng(0).normal(5.0, 3.0, (100, 64)).tolist()
    returns[1][0] = 3e38
    scale = RewardScale(True)
    for batch in returns:
        scale.observe(*scale.sums(batch))
    assert 3.0 < scale.divisor < 12.0
    assert scale.sums(batch) == (64, sum(batch), sum(v * v for v in batch)), "what is no outlier counts as it is"


@pytest.mark.parametrize("batch_size", [8, 64, 1])
@pytest.mark.parametrize("sparse", [False, True])
def test_absurd_returns_at_the_start_do_not_make_all_others_vanish(batch_size: int, sparse: bool) -> None:
    generator = np.random.default_rng(0)
    returns = (generator.random(20_000) < 0.05) * 1.0 if sparse else generator.normal(1.0, 0.5, 20_000)
    scale, others = RewardScale(True), returns.std()
    given = returns.copy()
    given[[3, 40]] = 1e6, -3e38
    for begin in range(0, len(given), batch_size):
        scale.observe(*scale.sums(given[begin : begin + batch_size].tolist()))
        if begin + batch_size == 64:
            assert scale.divisor < 40 * others
    assert others <= scale.divisor < 2 * others


def test_no_return_of_a_start_without_outliers_is_clipped() -> None:
    for spread in (0.0, 1e-3, 1.0):
        batch = np.random.default_rng(0).normal(0.0, spread, 64)
        batch[:16] += 1.0  # a quarter of the episodes succeed
        scale = RewardScale(True)
        for part in batch.reshape(8, 8).tolist():
            scale.observe(*scale.sums(part))
        assert scale.divisor == pytest.approx(batch.std())


def test_returns_that_are_not_finite_are_left_out_of_the_scale() -> None:
    scale = RewardScale(True)
    scale.observe(*scale.sums([1.0, float("nan"), 2.0, float("inf"), 3.0]))
    assert scale.divisor == pytest.approx(np.std([1.0, 2.0, 3.0]))


def test_ranks_that_share_a_scale_have_the_scale_of_one_with_all_returns() -> None:
    returns = np.random.default_rng(0).normal(5.0, 3.0, (10, 2, 16))
    ranks = [RewardScale(True, num_ranks=2), RewardScale(True, num_ranks=2)]
    for batch in returns.tolist():
        sums = [scale.sums(mine) for scale, mine in zip(ranks, batch, strict=True)]
        for scale in ranks:
            scale.observe(*np.sum(sums, axis=0).tolist())
    assert ranks[0].divisor == ranks[1].divisor == pytest.approx(returns.std())


def test_more_ranks_go_on_with_the_scale_that_fewer_have_found() -> None:
    """150 returns are enough for two ranks, and would not be for four that begin."""
    returns = np.random.default_rng(0).normal(0.0, 3.0, 160)
    two = RewardScale(True, num_ranks=2)
    two.observe(*two.sums(returns[:150].tolist()))
    four = RewardScale(True, num_ranks=4)
    four.load_state_dict(msgpack.unpackb(msgpack.packb(two.state_dict())))
    assert four.divisor == pytest.approx(returns[:150].std())
    four.observe(*four.sums(returns[150:].tolist()))
    assert four.divisor == pytest.approx(returns.std())


def test_equal_rewards_are_left_as_they_are() -> None:
    scale = RewardScale(True)
    scale.observe(*scale.sums([1.0] * 3))
    assert scale.divisor == 1.0
    large = [1234.56] * 16
    scale = RewardScale(True)
    for _ in range(100):
        scale.observe(*scale.sums(large))
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


@pytest.mark.parametrize("name", ["entropy", "length"])
def test_a_collapse_has_a_score_below_the_one_that_the_meaning_of_its_metric_names(name: str) -> None:
    [limit] = re.findall(r"score (?:is )?below (0\.\d+)", METRICS[f"alarm/{name}_collapse"].meaning)
    for score, is_collapse in ((float(limit), False), (float(limit) - 0.001, True)):
        alarm = CollapseAlarm(AlgorithmConfig())
        for _ in range(5):
            alarm.observe(2.0, 100.0, 0.1)
        alarm.observe(0.01, 1.0, score)
        assert alarm.collapsed[name] is is_collapse


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
    for word in ("COLLAPSE TO NOISE", "from 0.80 to", "learner.learning_rate is too high", "algorithm=topr_gae"):
        assert word in caplog.text


def test_controllers_go_on_from_their_state() -> None:
    """The second half, from the state of the first, is the same as without a break."""
    config = AlgorithmConfig(entropy_coef=0.1, entropy_target=1.0, entropy_rate=0.05)
    rng = np.random.default_rng(2)
    returns, entropies = rng.normal(0.0, 2.0, (12, 40)), [2.0] * 6 + [0.01] * 6

    def go_on(parts: tuple[EntropyControl, RewardScale, CollapseAlarm], indices: range) -> list[object]:
        entropy, scale, alarm = parts
        seen: list[object] = []
        for i in indices:
            entropy.observe(entropies[i])
            scale.observe(*scale.sums(returns[i].tolist()))
            alarm.observe(entropies[i], 5.0, 0.1)
            seen.append((entropy.coef, scale.divisor, dict(alarm.collapsed)))
        return seen

    for half in (1, 6):
        whole, before, after = (
            (EntropyControl(config), RewardScale(True), CollapseAlarm(AlgorithmConfig())) for _ in range(3)
        )
        expected = go_on(whole, range(12))[half:]
        go_on(before, range(half))
        for part, saved in zip(after, before, strict=True):
            part.load_state_dict(msgpack.unpackb(msgpack.packb(saved.state_dict())))
        assert go_on(after, range(half, 12)) == expected


def test_a_bonus_that_is_a_setting_is_not_taken_from_a_state() -> None:
    saved = EntropyControl(AlgorithmConfig(entropy_coef=0.1, entropy_target=1.0))
    control = EntropyControl(AlgorithmConfig(entropy_coef=0.3))
    control.load_state_dict(saved.state_dict())
    assert control.coef == 0.3


def test_updates_without_an_effect_are_named_with_what_rejects_their_tokens(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"reject": "token", "reject_low": 1.0, "reject_high": 1.0, "max_staleness": None}
    idle = IdleUpdates(AlgorithmConfig(**settings))
    for num_tokens, squares in [(9, 0), (9, 0), (9, 0), (9, 0), (9, 4), (0, 0), (9, 0), (9, 0), (9, 0), (9, 0), (0, 0)]:
        idle.observe(num_tokens, squares)
    assert not caplog.records, "five in a row; an update of groups of equals is none of them"
    for _ in range(9):
        idle.observe(9, 0)
    [said] = caplog.records
    for words in ("NOTHING IS LEARNED: in 5 updates", "algorithm.reject=token", "algorithm.reject_high=1,"):
        assert words in said.getMessage()
    assert "max_staleness" not in said.getMessage()


def test_updates_without_an_advantage_are_named_unless_the_tasks_are_solved(caplog: pytest.LogCaptureFixture) -> None:
    idle = IdleUpdates(AlgorithmConfig())
    for num_unequal, score in [*[(0, 0.0)] * 19, (8, 0.0), *[(0, 0.95)] * 30, *[(0, 0.2)] * 19]:
        idle.observe_batch(num_unequal, score)
    assert not caplog.records
    for _ in range(30):
        idle.observe_batch(0, 0.25)
    [said] = caplog.records
    for words in ("NOTHING IS LEARNED: in 20 updates no episode had an advantage", "mean score is 0.25"):
        assert words in said.getMessage()
