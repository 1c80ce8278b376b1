"""Losses for stale data against their definitions, token by token, and the limits in which they are other losses."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from impala_llm.algorithms.losses import ppo_clip, truncated_is
from impala_llm.algorithms.stale_losses import departures, m2po, second_moment_limit, topr
from impala_llm.config import ConfigError, load
from tests.two_ranks import Meeting

GENERATOR = torch.Generator().manual_seed(0)
BEHAVIOUR = -torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 3
LOG_RATIO = torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 4 - 2
LOG_PROBS = BEHAVIOUR + LOG_RATIO
ADVANTAGES = torch.randn(200, generator=GENERATOR, dtype=torch.float64)
ADVANTAGES[::17] = 0.0
ROW_IDS = torch.arange(200) // 13


def squares_of(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def kept_one_by_one(squares: list[float], threshold: float) -> list[float]:
    """Algorithm 1 of the paper as it is written: while the mean is too large, the largest goes."""
    left = sorted(squares)
    while left and sum(left) / len(left) > threshold:
        left.pop()
    return left


# --- M2PO


def test_tokens_depart_where_the_update_moves_them_on_from_where_they_were_sampled() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.5, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -2.0, 0.0, 1.0])
    found = departures(torch.full((6,), -1.0) + log_ratio, torch.full((6,), -1.0), advantages)
    assert found.tolist() == [0.25, 0.0, 0.0, 0.25, 0.0, 0.0]


def test_the_largest_squares_go_until_the_mean_of_the_others_is_small_enough() -> None:
    squares = squares_of(0.125, 0.375, 4.0, 0.25, 0.25)
    # by hand: the mean of all is 1, without 4 it is 0.25, without 0.375 as well 0.208
    assert second_moment_limit(squares, 1.0) == math.inf, "a mean of just the threshold is allowed"
    assert 0.375 <= second_moment_limit(squares, 0.9) < 4.0
    assert 0.375 <= second_moment_limit(squares, 0.25) < 4.0
    assert 0.25 <= second_moment_limit(squares, 0.24) < 0.375
    assert 0.0 <= second_moment_limit(squares, 0.1) < 0.125, "all go where even the smallest is too large"
    assert second_moment_limit(squares_of(), 0.04) == math.inf


def test_equal_squares_stay_or_go_together() -> None:
    limit = second_moment_limit(squares_of(0.25, 0.75, 0.75), 0.5)
    assert 0.25 <= limit < 0.75, "the mean of 0.25 and 0.75 is 0.5, but that of all three is above"


@pytest.mark.parametrize("threshold", [1e-4, 0.04, 0.3, 1.2, 10.0])
def test_what_is_kept_is_what_the_algorithm_of_the_paper_keeps(threshold: float) -> None:
    squares = LOG_RATIO.float().square()
    kept = squares[squares <= second_moment_limit(squares, threshold)]
    assert sorted(kept.tolist()) == kept_one_by_one(squares.tolist(), threshold)


def test_infinite_squares_go_and_the_others_are_judged_without_them() -> None:
    squares = torch.cat([LOG_RATIO.float().square(), torch.tensor([math.inf])])
    assert second_moment_limit(squares, 0.04) == second_moment_limit(squares[:-1], 0.04)
    assert 4.0 < second_moment_limit(squares, 10.0) < math.inf


def test_ranks_find_the_limit_of_all_their_tokens_together() -> None:
    squares = LOG_RATIO.float().square()
    parts = (squares[:50], squares[50:])
    meeting = Meeting()

    def work(rank: int) -> float:
        def sum_over_ranks(numbers: Sequence[float]) -> list[float]:
            return [sum(pair) for pair in zip(*meeting.exchange(rank, numbers), strict=True)]

        return second_moment_limit(parts[rank], 0.3, sum_over_ranks)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, (0, 1)))
    assert found[0] == found[1] == second_moment_limit(squares, 0.3)
    assert found[0] not in [second_moment_limit(part, 0.3) for part in parts]


def test_m2po_is_its_formula() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    out = m2po(log_probs, BEHAVIOUR, ADVANTAGES, limit=0.5)
    out.per_token.sum().backward()
    expected, masks = [], []
    for log_ratio, a in zip(LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True):
        departs = (a > 0 and log_ratio > 0) or (a < 0 and log_ratio < 0)
        masks.append(departs and log_ratio**2 > 0.5)
        expected.append(0.0 if masks[-1] else -math.exp(log_ratio) * a)
    assert any(masks) and not all(masks)
    np.testing.assert_allclose(out.per_token.detach(), expected, rtol=1e-12)
    np.testing.assert_allclose(log_probs.grad, expected, rtol=1e-12)  # d ρ / d log π = ρ
    np.testing.assert_allclose(-out.weights * ADVANTAGES, expected, rtol=1e-12)
    assert float(out.metrics["clip_share"]) == pytest.approx(np.mean(masks))
    departing = departures(LOG_PROBS, BEHAVIOUR, ADVANTAGES)
    assert float(out.metrics["departing_share"]) == pytest.approx(float((departing > 0).double().mean()))
    assert float(out.metrics["departure_mean"]) == pytest.approx(float(departing.double().mean()))


def test_m2po_without_a_limit_is_ppo_without_a_clip() -> None:
    out = m2po(LOG_PROBS, BEHAVIOUR, ADVANTAGES)
    free = ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, clip_low=1.0, clip_high=math.inf, dual_clip=None)
    torch.testing.assert_close(out.per_token, free.per_token)
    torch.testing.assert_close(out.weights, free.weights)


# --- TOPR


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_topr_is_its_formula(level: str) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    out = topr(log_probs, BEHAVIOUR, ADVANTAGES, ROW_IDS if level == "sequence" else None)
    out.per_token.sum().backward()
    expected = []
    for i, a in enumerate(ADVANTAGES.tolist()):
        log_ratio = float(LOG_RATIO[i] if level == "token" else LOG_RATIO[ROW_IDS[i] == ROW_IDS].sum())
        expected.append(-a * (1.0 if a >= 0 else min(1.0, math.exp(log_ratio))))
    np.testing.assert_allclose(log_probs.grad, expected, rtol=1e-10)
    np.testing.assert_allclose(out.per_token.detach(), np.array(expected) * LOG_PROBS.numpy(), rtol=1e-10)
    np.testing.assert_allclose(-out.weights * ADVANTAGES, expected, rtol=1e-10)


def test_topr_holds_each_sign_of_the_advantage_within_its_own_bounds() -> None:
    log_ratio = torch.tensor([2.0, 0.5, 3.0, 2.0, 0.5, 0.1, 4.0]).log()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    out = topr(torch.full((7,), -1.0), -1.0 - log_ratio, advantages, None, positive=(0.8, 2.5), negative=(0.2, 1.5))
    assert out.weights.tolist() == pytest.approx([2.0, 0.8, 2.5, 1.5, 0.5, 0.2, 2.5], rel=1e-6)
    assert float(out.metrics["clip_share"]) == pytest.approx(5 / 7)
    assert float(out.metrics["taper_max"]) == pytest.approx(2.5)


def test_topr_cuts_no_weight_of_ratios_that_differ_from_1_by_rounding() -> None:
    log_ratio = torch.tensor([1e-6, -1e-6, 3e-3, -3e-3, 0.5, -0.5, 0.5, -0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    out = topr(torch.full((8,), -1.0), -1.0 - log_ratio, advantages)
    assert float(out.metrics["clip_share"]) == pytest.approx(3 / 8), "e^0.5 twice and e^-0.5 once, where A > 0"


def test_topr_with_equal_bounds_of_both_signs_is_reinforce_or_truncated_importance_weights() -> None:
    of_one = topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ROW_IDS, (1.0, 1.0), (1.0, 1.0))
    torch.testing.assert_close(of_one.per_token, -ADVANTAGES * LOG_PROBS)
    capped = topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES, None, (0.0, 2.0), (0.0, 2.0))
    torch.testing.assert_close(capped.per_token, truncated_is(LOG_PROBS, BEHAVIOUR, ADVANTAGES, 2.0).per_token)


def test_topr_over_rows_of_one_token_is_that_of_tokens() -> None:
    rows = topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES, torch.arange(200))
    torch.testing.assert_close(rows.per_token, topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES).per_token)


# --- both


BOTH = (lambda *x: m2po(*x, limit=0.5), lambda *x: topr(*x, torch.arange(len(x[0])) // 13), topr)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", BOTH)
def test_on_policy_they_are_reinforce(loss: object, dtype: torch.dtype) -> None:
    behaviour, advantages = BEHAVIOUR.to(dtype), ADVANTAGES.to(dtype)
    log_probs = behaviour.clone().requires_grad_()
    out = loss(log_probs, behaviour, advantages)  # type: ignore[operator]
    out.per_token.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert all(float(value) == 0 for name, value in out.metrics.items() if name.endswith("_share"))
    assert out.per_token.dtype == dtype and all(value.dtype == dtype for value in out.metrics.values())


@pytest.mark.parametrize("loss", BOTH)
def test_extreme_ratios_stay_finite_and_nothing_else_gets_a_gradient(loss: object) -> None:
    for sign in (1.0, -1.0):
        inputs = [torch.tensor(x, requires_grad=True) for x in ([0.0, -500.0], [-500.0, 0.0], [sign, sign])]
        out = loss(*inputs)  # type: ignore[operator]
        out.per_token.sum().backward()
        assert inputs[0].grad.isfinite().all() and out.per_token.isfinite().all()
        assert inputs[1].grad is None and inputs[2].grad is None


@pytest.mark.parametrize("loss", BOTH)
def test_an_empty_micro_batch_can_run_backward(loss: object) -> None:
    parameter = torch.ones(3, requires_grad=True)
    none = parameter[:0]
    out = loss(none, none.detach(), none.detach())  # type: ignore[operator]
    out.per_token.sum().backward()
    assert parameter.grad.tolist() == [0, 0, 0] and all(float(value) == 0 for value in out.metrics.values())


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: m2po(LOG_PROBS, BEHAVIOUR[1:], ADVANTAGES), ValueError, "behaviour_log_probs has shape"),
        (lambda: second_moment_limit(LOG_RATIO, 0.0), ValueError, "threshold is 0.0"),
        (lambda: topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES.float()), TypeError, "advantages has dtype"),
        (lambda: topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ROW_IDS.flip(0)), ValueError, "segment_ids decreases"),
        (lambda: topr(LOG_PROBS, BEHAVIOUR, ADVANTAGES, None, (2.0, 1.0)), ValueError, r"positive is \(2.0, 1.0\)"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()  # type: ignore[operator]


def test_bounds_in_the_wrong_order_are_refused_with_key_value_and_fix() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss.negative_low=1.5 is above .*negative_high=1: exchange them"):
        load(["model=scratch", "algorithm=topr", "algorithm.loss.negative_low=1.5"])
