"""Group baselines against loops over the groups, and GAE against its definition as a sum."""

import math
import statistics

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import gae, group_relative, rloo

SCORES = [0.1, 1.0, 0.5, 0.1, 0.4, 0.1, 0.7, 0.0]
GROUPS = [7, -3, 7, 90, -3, 90, 7, 4]  # unsorted; group 4 has one member, group 90 equal scores


def members(i: int) -> list[float]:
    return [score for score, group in zip(SCORES, GROUPS, strict=True) if group == GROUPS[i]]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(SCORES, dtype=dtype), torch.tensor(GROUPS)


def test_group_relative() -> None:
    expected = [score - statistics.fmean(members(i)) for i, score in enumerate(SCORES)]
    np.testing.assert_allclose(group_relative(*tensors(), normalize_std=False), expected, atol=1e-15)


def test_group_relative_divided_by_the_sample_deviation() -> None:
    expected = []
    for i, score in enumerate(SCORES):
        group = members(i)
        std = statistics.stdev(group) if len(set(group)) > 1 else 1.0
        expected.append((score - statistics.fmean(group)) / std)
    np.testing.assert_allclose(group_relative(*tensors(), normalize_std=True), expected, atol=1e-14)


def test_rloo() -> None:
    expected = []
    for i, score in enumerate(SCORES):
        others = members(i)
        others.remove(score)
        expected.append(score - statistics.fmean(others) if others else 0.0)
    np.testing.assert_allclose(rloo(*tensors()), expected, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_compare_is_exactly_zero(dtype: torch.dtype) -> None:
    scores, groups = tensors(dtype)
    equal = torch.full((30,), 0.1, dtype=dtype)  # whose mean is not 0.1 to the last digit
    for function in (rloo, lambda s, g: group_relative(s, g, True), lambda s, g: group_relative(s, g, False)):
        assert function(scores, groups)[[3, 5, 7]].tolist() == [0, 0, 0]
        assert not function(equal, torch.zeros(30, dtype=torch.int64)).any()
        assert function(scores, groups).dtype == dtype


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_equal_sums_of_float32_rewards_are_exactly_zero(scale: float) -> None:
    """The difference that rounding leaves of 0.7, 0.3 + 0.4 and seven times 0.1 is not one of the episodes."""
    rewards = [[0.7], [0.3, 0.4], [0.1] * 7, [0.01] * 70]
    sums = [float(np.asarray(each, np.float32).astype(np.float64).sum()) for each in rewards]
    scores, groups = scale * torch.tensor(sums), torch.zeros(4, dtype=torch.int64)
    assert len(scores.unique()) > 1
    for function in (rloo, lambda s, g: group_relative(s, g, True), lambda s, g: group_relative(s, g, False)):
        assert function(scores, groups).tolist() == [0.0] * 4


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_small_differences_are_compared(scale: float) -> None:
    scores = scale * torch.tensor([0.7, 0.7001, 0.7])
    advantages = group_relative(scores, torch.zeros(3, dtype=torch.int64), True)
    expected = [-1 / math.sqrt(3), 2 / math.sqrt(3), -1 / math.sqrt(3)]
    np.testing.assert_allclose(advantages, expected, atol=2e-3)


def test_infinite_scores_are_equal_to_no_other() -> None:
    scores, groups = torch.tensor([-math.inf, 1.0]), torch.zeros(2, dtype=torch.int64)
    assert not group_relative(scores, groups).isfinite().all()


def test_no_episodes() -> None:
    none = torch.zeros(0)
    assert group_relative(none, torch.zeros(0, dtype=torch.int64), True).shape == (0,)


def test_nothing_carries_a_gradient() -> None:
    scores, groups = tensors()
    assert not group_relative(scores.requires_grad_(), groups, True).requires_grad


@pytest.mark.parametrize(
    ("scores", "groups", "error", "match"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), ValueError, "group_ids has shape"),
        (torch.zeros(3), torch.zeros(3), TypeError, "group_ids has dtype"),
        (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), TypeError, "scores has dtype"),
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), ValueError, "scores has shape"),
    ],
)
def test_mistakes_are_named(scores: torch.Tensor, groups: torch.Tensor, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        rloo(scores, groups)


def gae_columns(steps: int, rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(steps)
    discounts = rng.choice([0.0, 0.9, 1.0], (steps, rows), p=[0.1, 0.5, 0.4])
    columns = {"rewards": rng.normal(size=(steps, rows)), "values": rng.normal(size=(steps, rows))}
    columns |= {"bootstrap_value": rng.normal(size=rows), "discounts": discounts}
    return {name: torch.tensor(column, dtype=dtype) for name, column in columns.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize(("steps", "rows"), [(1, 1), (1, 3), (50, 2)])
def test_gae_is_its_sum(steps: int, rows: int, lam: float, dtype: torch.dtype) -> None:
    columns = gae_columns(steps, rows, dtype)
    out = gae(**columns, lam=lam)
    rewards, values, bootstrap, discounts = (column.double().numpy() for column in columns.values())
    following = np.concatenate([values[1:], bootstrap[None]])
    for b in range(rows):
        for s in range(steps):
            expected = 0.0
            for t in range(s, steps):
                delta = rewards[t, b] + discounts[t, b] * following[t, b] - values[t, b]
                expected += np.prod(lam * discounts[s:t, b]) * delta
            tolerance = 1e-12 if dtype == torch.float64 else 1e-4
            assert float(out.advantages[s, b]) == pytest.approx(expected, abs=tolerance)
            assert float(out.value_targets[s, b]) == pytest.approx(expected + values[s, b], abs=tolerance)
    assert out.advantages.dtype == out.value_targets.dtype == dtype


def test_gae_does_not_see_what_lies_behind_the_end() -> None:
    columns = gae_columns(40, 2, torch.float64)
    columns["discounts"][:] = 0.9
    columns["discounts"][10, 0] = 0.0
    short = {name: column[..., :1] if column.ndim == 1 else column[:11, :1] for name, column in columns.items()}
    for name in ("rewards", "values", "discounts"):
        columns[name][11:, 0] = math.nan
    out, expected = gae(**columns, lam=0.9), gae(**short, lam=0.9)
    torch.testing.assert_close(out.advantages[:11, :1], expected.advantages)
    assert torch.isfinite(out.advantages[:, 1]).all()


def test_gae_carries_no_gradient_and_takes_no_steps() -> None:
    columns = gae_columns(5, 2, torch.float32)
    columns["values"].requires_grad_()
    assert not any(x.requires_grad for x in gae(**columns))
    assert gae(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(2), torch.zeros(0, 2)).advantages.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"values": torch.zeros(4, 2)}, ValueError, "values has shape"),
        ({"discounts": torch.zeros(5, 2, dtype=torch.float64)}, TypeError, "discounts has dtype"),
        ({"bootstrap_value": torch.zeros(3)}, ValueError, "bootstrap_value has 3 elements"),
        ({"lam": 1.1}, ValueError, "lam is 1.1"),
    ],
)
def test_mistakes_in_gae_are_named(change: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        gae(**{**gae_columns(5, 2, torch.float32), **change})
