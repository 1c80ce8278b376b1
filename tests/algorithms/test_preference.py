"""DPO against its formula and gradient, and pairs against a loop over the groups."""

import math

import numpy as np
import pytest
import torch

from impala_llm.algorithms.preference import best_and_worst, dpo

GENERATOR = torch.Generator().manual_seed(0)
CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED = (
    -torch.rand(4, 50, generator=GENERATOR, dtype=torch.float64) * 40
).unbind(0)


def test_dpo_is_its_formula() -> None:
    out = dpo(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, beta=0.3)
    rows = torch.stack([CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED], 1).tolist()
    margins = [0.3 * ((won - ref_won) - (lost - ref_lost)) for won, lost, ref_won, ref_lost in rows]
    np.testing.assert_allclose(out.per_pair, [math.log(1 + math.exp(-m)) for m in margins], rtol=1e-10)
    assert float(out.metrics["accuracy_share"]) == np.mean([m > 0 for m in margins])
    assert float(out.metrics["margin_mean"]) == pytest.approx(np.mean(margins))
    assert float(out.metrics["chosen_reward_mean"]) == pytest.approx(np.mean([0.3 * (x - r) for x, _, r, _ in rows]))
    assert float(out.metrics["rejected_reward_mean"]) == pytest.approx(np.mean([0.3 * (x - r) for _, x, _, r in rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dpo_at_the_reference_is_log_2_and_pushes_by_half_of_beta(dtype: torch.dtype) -> None:
    chosen, rejected = (x.to(dtype).requires_grad_() for x in (CHOSEN, REJECTED))
    out = dpo(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.1)
    out.per_pair.sum().backward()
    torch.testing.assert_close(out.per_pair, torch.full((50,), math.log(2), dtype=dtype))
    torch.testing.assert_close(chosen.grad, torch.full((50,), -0.05, dtype=dtype))
    torch.testing.assert_close(rejected.grad, torch.full((50,), 0.05, dtype=dtype))
    assert float(out.metrics["accuracy_share"]) == 0
    assert all(x.dtype == dtype and not x.requires_grad for x in out.metrics.values())


def test_gradient() -> None:
    inputs = [x.clone().requires_grad_() for x in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(lambda c, r: dpo(c, r, REFERENCE_CHOSEN, REFERENCE_REJECTED, 0.3).per_pair, inputs)
    references = [x.clone().requires_grad_() for x in (REFERENCE_CHOSEN, REFERENCE_REJECTED)]
    dpo(*inputs, *references).per_pair.sum().backward()
    assert all(x.grad is None for x in references)


def test_extreme_margins_stay_finite() -> None:
    chosen = torch.tensor([-5e3, 0.0], requires_grad=True)
    rejected = torch.tensor([0.0, -5e3], requires_grad=True)
    out = dpo(chosen, rejected, torch.zeros(2), torch.zeros(2), beta=1.0)
    out.per_pair.sum().backward()
    assert out.per_pair.tolist() == [5e3, 0.0]
    assert chosen.grad.tolist() == [-1.0, 0.0]


def test_no_pairs() -> None:
    parameter = torch.ones(3, requires_grad=True)
    none = parameter[:0]
    out = dpo(none, none, none, none)
    out.per_pair.sum().backward()
    assert parameter.grad.tolist() == [0, 0, 0] and all(float(x) == 0 for x in out.metrics.values())


def test_best_and_worst() -> None:
    scores = [0.1, 1.0, 0.5, 0.1, 0.4, 0.1, 0.7, 0.0, -1.0, 1.0, -1.0]
    groups = [7, -3, 7, 90, -3, 90, 7, 4, -3, -3, -3]  # unsorted; 90 has equal scores, 4 one member, -3 ties
    expected = {}
    for group in sorted(set(groups)):
        members = [i for i, g in enumerate(groups) if g == group]
        best, worst = max(members, key=lambda i: scores[i]), min(members, key=lambda i: scores[i])
        if scores[best] > scores[worst]:
            expected[group] = (best, worst)
    pairs = best_and_worst(torch.tensor(scores), torch.tensor(groups))
    assert list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)) == list(expected.values())
    assert pairs.chosen.dtype == torch.int64
    none = best_and_worst(torch.tensor([0.7, 0.7 + 6e-8, 0.7]), torch.zeros(3, dtype=torch.int64))
    assert none.chosen.shape == (0,), "equal but for the rounding of a sum"
    none = best_and_worst(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert none.chosen.shape == none.rejected.shape == (0,)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: dpo(CHOSEN, REJECTED[1:], CHOSEN, REJECTED), ValueError, "rejected has shape"),
        (lambda: dpo(CHOSEN, REJECTED, CHOSEN.float(), REJECTED), TypeError, "reference_chosen has dtype"),
        (lambda: dpo(CHOSEN, REJECTED, CHOSEN, REJECTED, 0.0), ValueError, "beta is 0.0"),
        (lambda: best_and_worst(CHOSEN, CHOSEN), TypeError, "group_ids has dtype"),
        (lambda: best_and_worst(CHOSEN, torch.arange(3)), ValueError, "group_ids has shape"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
