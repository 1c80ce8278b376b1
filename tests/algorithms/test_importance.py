"""Importance weights, masks, effective sample size and divergences against their formulas."""

import math

import numpy as np
import pytest
import torch

from impala_llm.algorithms.importance import (
    apply_dead_band,
    kl_estimates,
    log_linear_proximal,
    probability_difference_mask,
    ratios,
    rejection_mask,
    segment_mean,
    segment_sum,
)

LOG_RATIO = torch.tensor([0.5, -0.25, 5.0, -5.0, 0.0, 1.0, 0.1], dtype=torch.float64)
SEGMENT_IDS = torch.tensor([0, 0, 1, 1, 1, 3, 3])  # row 2 is empty
ROWS = [[0.5, -0.25], [5.0, -5.0, 0.0], [], [1.0, 0.1]]


@pytest.mark.parametrize(
    ("level", "statistic"),
    [("token", None), ("sequence", sum), ("geometric", lambda row: sum(row) / len(row))],
)
def test_rejection(level: str, statistic: object) -> None:
    low, high = 0.5, 1.5
    expected = []
    for row in ROWS:
        for x in row:
            ratio = math.exp(x if statistic is None else statistic(row))
            expected.append(low <= ratio <= high)
    assert rejection_mask(LOG_RATIO, SEGMENT_IDS, level, low, high).tolist() == expected


@pytest.mark.parametrize(("level", "spoilt"), [("token", [2]), ("sequence", [2, 3, 4]), ("geometric", [2, 3, 4])])
def test_nan_is_rejected_and_stays_in_its_row(level: str, spoilt: list[int]) -> None:
    log_ratio = torch.zeros(7)
    log_ratio[2] = math.nan
    expected = [i not in spoilt for i in range(7)]
    assert rejection_mask(log_ratio, SEGMENT_IDS, level).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rejection_by_the_difference_of_probabilities(dtype: torch.dtype) -> None:
    # π, μ, A, kept?
    cases = [
        (0.9, 0.6, 1.0, False), (0.9, 0.6, -1.0, True), (0.6, 0.9, 1.0, True), (0.6, 0.9, -1.0, False),
        (0.9, 0.6, 0.0, True), (0.5, 0.4, 1.0, True), (0.4, 0.5, -2.0, True), (0.01, 1e-6, 5.0, True),
        (math.nan, 0.5, 1.0, False), (0.5, math.nan, -1.0, False),
    ]  # fmt: skip
    pi, mu, advantages, _ = (torch.tensor(column, dtype=dtype) for column in zip(*cases, strict=True))
    kept = probability_difference_mask(pi.log(), mu.log(), advantages, 0.2)
    assert kept.tolist() == [case[3] for case in cases]
    assert probability_difference_mask(LOG_RATIO[:0], LOG_RATIO[:0], LOG_RATIO[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_linear_proximal(dtype: torch.dtype) -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=dtype, requires_grad=True)
    behaviour = torch.tensor([-1.5, -1.0, -1.0, -4.5], dtype=dtype)
    versions = torch.tensor([7, 6, 5, 3], dtype=torch.int32)
    out = log_linear_proximal(log_probs, behaviour, versions, version=7)
    # no step and one step away: μ itself; two steps: half way; four steps: three quarters
    np.testing.assert_allclose(out, [-1.5, -1.0, -2.0, -1.5], rtol=1e-6)
    assert out.dtype == dtype and not out.requires_grad


def test_bounds_of_rejection_are_included() -> None:
    row = torch.zeros(1, dtype=torch.int64)
    assert rejection_mask(torch.zeros(1), row, "token", 1.0, 1.0).tolist() == [True]


def test_long_rows_fail_by_their_sum_but_not_by_their_mean() -> None:
    log_ratio = torch.full((1000,), 0.01)
    row = torch.zeros(1000, dtype=torch.int64)
    assert not rejection_mask(log_ratio, row, "sequence", 0.5, 2.0).any()
    assert rejection_mask(log_ratio, row, "geometric", 0.5, 2.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(dtype: torch.dtype) -> None:
    log_ratio = torch.tensor([-1e4, -math.inf, math.inf, 1e4], dtype=dtype)
    weights = ratios(log_ratio)
    np.testing.assert_allclose(weights, np.exp([-20.0, -20.0, 20.0, 20.0]), rtol=1e-6)
    assert all(torch.isfinite(x) for x in kl_estimates(log_ratio))
    assert weights.dtype == dtype


def test_masks_are_constants_for_the_gradient() -> None:
    log_ratio = LOG_RATIO.clone().requires_grad_()
    assert not rejection_mask(log_ratio, SEGMENT_IDS, "geometric", 0.5, 2.0).requires_grad


def test_divergences_follow_their_formulas() -> None:
    l = LOG_RATIO.numpy()  # noqa: E741
    out = kl_estimates(LOG_RATIO)
    assert float(out.k1) == pytest.approx(np.mean(-l))
    assert float(out.k3) == pytest.approx(np.mean(np.exp(l) - l - 1))
    assert kl_estimates(torch.zeros(5)) == (0, 0)


def test_divergences_estimate_what_they_claim() -> None:
    mu, pi = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.25, 0.35, 0.4], dtype=torch.float64)
    log_ratio = (pi / mu).log()
    counts = (mu * 10).round().long()  # a sample in exactly the proportions of μ
    out = kl_estimates(log_ratio.repeat_interleave(counts))
    divergence = float((mu * (mu / pi).log()).sum())
    assert float(out.k1) == pytest.approx(divergence)
    assert float(out.k3) == pytest.approx(divergence)


def test_small_divergences_keep_their_digits_in_float32() -> None:
    out = kl_estimates(torch.full((10,), 1e-3))
    assert float(out.k3) == pytest.approx(math.exp(1e-3) - 1e-3 - 1, rel=1e-3)


def test_divergences_are_differentiable() -> None:
    log_ratio = LOG_RATIO.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tuple(kl_estimates(x)), log_ratio)


def test_no_tokens() -> None:
    none, no_ids = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert rejection_mask(none, no_ids, "geometric", 0.5, 2.0).shape == (0,)
    assert [float(x) for x in kl_estimates(none)] == [0, 0]


def test_dead_band() -> None:
    log_ratio = torch.tensor([0.0, 0.009, -0.009, 0.01, -0.5])
    assert apply_dead_band(log_ratio, 0.01).tolist() == torch.tensor([0, 0, 0, 0.01, -0.5]).tolist()
    assert torch.equal(apply_dead_band(log_ratio, 0.0), log_ratio)


def test_segment_sums_and_means() -> None:
    values = torch.tensor([1.0, 2.0, 4.0])
    ids = torch.tensor([2, 0, 2])
    assert segment_sum(values, ids).tolist() == [2.0, 0.0, 5.0]
    assert segment_mean(values, ids, 4).tolist() == [2.0, 0.0, 2.5, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: rejection_mask(LOG_RATIO, SEGMENT_IDS[1:]), ValueError, "segment_ids has shape"),
        (lambda: rejection_mask(LOG_RATIO[:, None], SEGMENT_IDS), ValueError, "log_ratio has shape"),
        (lambda: rejection_mask(LOG_RATIO, SEGMENT_IDS, "mean", 0.5, 2.0), ValueError, "level is 'mean'"),
        (lambda: rejection_mask(LOG_RATIO, SEGMENT_IDS, "token", 2.0, 0.5), ValueError, "low is 2.0"),
        (lambda: rejection_mask(LOG_RATIO, SEGMENT_IDS.flip(0)), ValueError, "segment_ids decreases"),
        (lambda: probability_difference_mask(*[LOG_RATIO] * 3, limit=1.5), ValueError, "limit is 1.5"),
        (lambda: probability_difference_mask(LOG_RATIO, LOG_RATIO, LOG_RATIO[1:]), ValueError, "advantages has shape"),
        (lambda: log_linear_proximal(LOG_RATIO, LOG_RATIO, LOG_RATIO, 3), TypeError, "versions has dtype"),
        (lambda: log_linear_proximal(LOG_RATIO, LOG_RATIO, SEGMENT_IDS[1:], 3), ValueError, "versions has shape"),
        (lambda: log_linear_proximal(LOG_RATIO, LOG_RATIO, SEGMENT_IDS, 2), ValueError, "<= version = 2 is needed"),
        (lambda: log_linear_proximal(LOG_RATIO, LOG_RATIO, SEGMENT_IDS - 1, 9), ValueError, "lie in .-1, 2."),
        (lambda: kl_estimates(torch.zeros(3, dtype=torch.int64)), TypeError, "log_ratio has dtype"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
