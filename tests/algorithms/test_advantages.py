"""Group baselines against loops over the groups."""

import statistics

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import group_relative, rloo

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
