"""The compiled loops and the torch operations, each against the definitions, and against each other."""

import math
from types import ModuleType

import numpy as np
import pytest
import torch

from impala_llm.algorithms import kernels, scan
from impala_llm.algorithms.importance import Caps

ALL_ONE = Caps(1.0, 1.0, 1.0)
BOTH = pytest.mark.parametrize("loops", [kernels, scan], ids=["kernels", "scan"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
NAN = math.nan


def tensors(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """ratio, discounts, rewards, values."""
    rng = np.random.default_rng(seed)
    ratio = np.exp(rng.uniform(-5, 5, shape))
    discounts = rng.choice([0.0, 0.9, 1.0], shape, p=[0.02, 0.5, 0.48])
    return [torch.tensor(x, dtype=dtype) for x in (ratio, discounts, rng.normal(size=shape), rng.normal(size=shape))]


def double_sum(
    columns: list[torch.Tensor], bootstrap: float, rho_bar: float, c_bar: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """v_s = V_s + sum over t >= s of (prod over s <= i < t of γ_i λ c_i) ρ_t (r_t + γ_t V_{t+1} - V_t), in float64."""
    ratio, discounts, rewards, values = (x.double().numpy() for x in columns)
    steps = len(ratio)
    following = np.append(values[1:], bootstrap)
    deltas = np.minimum(ratio, rho_bar) * (rewards + discounts * following - values)
    decays = discounts * lam * np.minimum(ratio, c_bar)
    vs = np.array([values[s] + sum(np.prod(decays[s:t]) * deltas[t] for t in range(s, steps)) for s in range(steps)])
    return vs, rewards + discounts * np.append(vs[1:], bootstrap) - values


@BOTH
@DTYPES
@pytest.mark.parametrize("caps", [(1.0, 1.0, 1.0), (math.inf, 1.0, 0.9), (2.0, 0.0, 1.0), (1.5, 1.1, 0.5)])
@pytest.mark.parametrize("lengths", [[1], [1, 1], [33, 0, 64, 1, 5], [70]])
def test_packed_equals_the_double_sum(
    loops: ModuleType, dtype: torch.dtype, caps: tuple[float, float, float], lengths: list[int]
) -> None:
    columns = tensors((sum(lengths),), dtype, len(lengths))
    bootstrap = torch.linspace(-1, 2, len(lengths), dtype=dtype)
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    vs, advantages = loops.packed_targets(*columns, bootstrap, segment_ids, Caps(*caps))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-3
    for row in segment_ids.unique().tolist():
        here = segment_ids == row
        expected = double_sum([x[here] for x in columns], float(bootstrap[row]), *caps)
        np.testing.assert_allclose(vs[here], expected[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(advantages[here], expected[1], rtol=tolerance, atol=tolerance)
    assert vs.dtype == advantages.dtype == dtype


@BOTH
@DTYPES
@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (1, 5), (31, 2), (32, 3), (33, 2), (70, 2)])
def test_padded_equals_the_double_sum(loops: ModuleType, dtype: torch.dtype, steps: int, rows: int) -> None:
    columns = tensors((steps, rows), dtype, steps)
    bootstrap = torch.linspace(-1, 2, rows, dtype=dtype)
    vs, advantages = loops.padded_targets(*columns, bootstrap, Caps(1.5, 1.0, 0.95))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for b in range(rows):
        expected = double_sum([x[:, b] for x in columns], float(bootstrap[b]), 1.5, 1.0, 0.95)
        np.testing.assert_allclose(vs[:, b], expected[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(advantages[:, b], expected[1], rtol=tolerance, atol=tolerance)
    assert vs.dtype == advantages.dtype == dtype


def test_both_agree_on_what_does_not_lie_in_order_in_memory() -> None:
    columns = [x.T for x in tensors((40, 70), torch.float64)]
    bootstrap = torch.ones(80, dtype=torch.float64)[::2]
    assert not columns[0].is_contiguous() and not bootstrap.is_contiguous()
    for a, b in zip(
        kernels.padded_targets(*columns, bootstrap, ALL_ONE),
        scan.padded_targets(*columns, bootstrap, ALL_ONE),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("steps", [32 * 32, 32 * 32 + 1, 32 * 32 * 2 + 5])
def test_rows_that_take_the_scan_several_levels_agree_with_the_loop(steps: int) -> None:
    columns, bootstrap = tensors((steps, 3), torch.float64, steps), torch.ones(3, dtype=torch.float64)
    columns[1][:] = 1.0
    found = [loops.padded_targets(*columns, bootstrap, Caps(1.5, 1.0, 0.99)) for loops in (kernels, scan)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@BOTH
@DTYPES
@pytest.mark.parametrize("steps", [8, 40, 100])
def test_nothing_behind_a_discount_of_0_is_seen(loops: ModuleType, dtype: torch.dtype, steps: int) -> None:
    columns = tensors((steps, 2), dtype)
    columns[1][:] = 0.9
    end = steps // 2
    columns[1][end, 0] = 0.0
    bootstrap = torch.tensor([NAN, 0.5], dtype=dtype)
    for x in columns:
        x[end + 1 :, 0] = NAN
    vs, advantages = loops.padded_targets(*columns, bootstrap, ALL_ONE)
    short = [x[: end + 1, :1] for x in columns]
    expected = loops.padded_targets(*short, torch.zeros(1, dtype=dtype), ALL_ONE)
    torch.testing.assert_close(vs[: end + 1, :1], expected[0])
    torch.testing.assert_close(advantages[: end + 1, :1], expected[1])
    assert torch.isfinite(vs[:, 1]).all() and torch.isfinite(advantages[:, 1]).all()


@BOTH
@pytest.mark.parametrize("column", range(4))
def test_nan_reaches_the_steps_before_it_and_no_other_row(loops: ModuleType, column: int) -> None:
    lengths = [40, 50, 40]
    columns = tensors((130,), torch.float64)
    columns[1][:] = 0.9
    segment_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    columns[column][60] = NAN
    bootstrap = torch.ones(3, dtype=torch.float64)
    if loops is kernels and column == 1:
        with pytest.raises(ValueError, match="discounts holds nan: "):
            loops.packed_targets(*columns, bootstrap, segment_ids, ALL_ONE)
        return
    vs, advantages = loops.packed_targets(*columns, bootstrap, segment_ids, ALL_ONE)
    spoilt = torch.zeros(130, dtype=torch.bool)
    spoilt[40:61] = True
    assert torch.equal(vs.isnan(), spoilt)
    assert torch.equal(advantages.isnan() | (column == 0) & spoilt, spoilt)  # a ratio enters its own advantage later


@BOTH
@DTYPES
@pytest.mark.parametrize("steps", [64, 3000])
def test_nan_reaches_the_steps_whose_weight_of_it_is_too_small_for_the_dtype(
    loops: ModuleType, dtype: torch.dtype, steps: int
) -> None:
    ones, zeros = torch.ones(steps, dtype=dtype), torch.zeros(steps, dtype=dtype)
    ratio = 0.01 * ones
    rewards = zeros.clone()
    rewards[-1] = NAN
    segment_ids = torch.zeros(steps, dtype=torch.int64)
    targets = loops.packed_targets(ratio, ones, rewards, zeros, zeros[:1], segment_ids, ALL_ONE)
    in_columns = [x[:, None] for x in (ratio, ones, rewards, zeros)]
    for vs, advantages in (targets, loops.padded_targets(*in_columns, zeros[:1], ALL_ONE)):
        assert vs.isnan().all() and advantages.isnan().all()


@BOTH
@pytest.mark.parametrize("caps", [Caps(1.0, 1.0, 0.0), Caps(1.0, 0.0, 1.0)], ids=["lam", "c_bar"])
@pytest.mark.parametrize("number", [NAN, math.inf])
def test_an_error_with_the_weight_0_is_ignored(loops: ModuleType, caps: Caps, number: float) -> None:
    """A target is V_t + ρ_t (r_t + γ_t V_{t+1} - V_t) then: it sees the values of two steps and no later one."""
    columns = tensors((100,), torch.float64)
    columns[1][:] = 0.9
    columns[3][60] = number
    ratio, _, rewards, values = columns
    expected = values[:59] + ratio[:59].clamp(max=1.0) * (rewards[:59] + 0.9 * values[1:60] - values[:59])
    bootstrap = torch.ones(1, dtype=torch.float64)
    targets = loops.packed_targets(*columns, bootstrap, torch.zeros(100, dtype=torch.int64), caps)
    in_columns = loops.padded_targets(*(x[:, None] for x in columns), bootstrap, caps)
    for vs, advantages in (targets, [x[:, 0] for x in in_columns]):
        assert (~vs.isfinite()).nonzero().flatten().tolist() == [59, 60]
        assert (~advantages.isfinite()).nonzero().flatten().tolist() == [58, 59, 60]
        torch.testing.assert_close(vs[:59], expected)


@BOTH
def test_products_that_overflow_stay_in_their_row(loops: ModuleType) -> None:
    segment_ids = torch.repeat_interleave(torch.arange(2), torch.tensor([3, 200]))
    ratio, ones, zeros = torch.full((203,), math.exp(20.0)), torch.ones(203), torch.zeros(203)
    ratio[:3] = 1.0
    vs, _ = loops.packed_targets(ratio, ones, zeros, zeros, torch.zeros(2), segment_ids, Caps(math.inf, math.inf, 1.0))
    assert torch.equal(vs, zeros)
