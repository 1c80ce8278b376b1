"""Policy losses against their formulas token by token, and their gradients."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from impala_llm.algorithms.importance import log_linear_proximal, rejection_mask
from impala_llm.algorithms.interface import Scored
from impala_llm.algorithms.losses import (
    DecoupledPPO,
    LossOutput,
    aggregate,
    cispo,
    decoupled_ppo,
    gspo,
    ppo_clip,
    reference_penalty,
    truncated_is,
)
from impala_llm.algorithms.registry import LOSSES

GENERATOR = torch.Generator().manual_seed(0)
BEHAVIOUR = -torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 3
LOG_RATIO = torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 10 - 5
LOG_PROBS = BEHAVIOUR + LOG_RATIO
ADVANTAGES = torch.randn(200, generator=GENERATOR, dtype=torch.float64)
ADVANTAGES[::17] = 0.0
PROXIMAL = BEHAVIOUR + LOG_RATIO * torch.rand(200, generator=GENERATOR, dtype=torch.float64)
ROW_IDS = torch.arange(200) // 13  # the last row is shorter
ONE_EACH = torch.arange(200)


def decoupled(log_probs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> LossOutput:
    """With π_prox half way from μ to π."""
    versions = torch.zeros(len(log_probs), dtype=torch.int64)
    proximal = log_linear_proximal(log_probs, behaviour, versions, version=2)
    return decoupled_ppo(log_probs, behaviour, advantages, proximal)


def gspo_by_13(log_probs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> LossOutput:
    return gspo(log_probs, behaviour, advantages, torch.arange(len(log_probs)) // 13)


ALL = (ppo_clip, truncated_is, decoupled, gspo_by_13, cispo)


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


@pytest.mark.parametrize("dual_clip", [None, 3.0, 1.0])
def test_ppo_is_its_formula(dual_clip: float | None) -> None:
    low, high = 0.2, 0.28
    out = ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, low, high, dual_clip)
    expected = []
    for log_ratio, advantage in zip(LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True):
        ratio = math.exp(log_ratio)
        objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        expected.append(-objective)
    np.testing.assert_allclose(out.per_token, expected, rtol=1e-12, atol=1e-15)


def test_ppo_metrics_count_the_tokens_whose_gradient_is_cut() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    out = ppo_clip(log_probs, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, 3.0)
    out.per_token.sum().backward()
    pairs = [(math.exp(x), a) for x, a in zip(LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True)]
    shares = {
        "clip_high_share": [a > 0 and r > 1.28 for r, a in pairs],
        "clip_low_share": [a < 0 and r < 0.8 for r, a in pairs],
        "dual_clip_share": [a < 0 and r > 3.0 for r, a in pairs],
    }
    for name, cut in shares.items():
        assert float(out.metrics[name]) == pytest.approx(np.mean(cut)) and any(cut)
    assert float(out.metrics["clip_share"]) == pytest.approx(sum(np.mean(cut) for cut in shares.values()))
    cut = np.any(list(shares.values()), axis=0) | (ADVANTAGES == 0).numpy()
    assert ((log_probs.grad == 0).numpy() == cut).all()
    assert float(out.metrics["ratio_mean"]) == pytest.approx(np.mean([r for r, _ in pairs]))
    assert float(out.metrics["ratio_max"]) == pytest.approx(max(r for r, _ in pairs))
    assert not any(metric.requires_grad for metric in out.metrics.values())


@pytest.mark.parametrize("cap", [math.inf, 1.5])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_decoupled_ppo_is_its_formula(dual_clip: float | None, cap: float) -> None:
    low, high = 0.2, 0.28
    out = decoupled_ppo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, PROXIMAL, low, high, dual_clip, cap)
    expected, weights, cuts = [], [], []
    for pi, mu, prox, a in torch.stack([LOG_PROBS, BEHAVIOUR, PROXIMAL, ADVANTAGES], 1).tolist():
        r, w = math.exp(pi - prox), math.exp(prox - mu)
        objective = min(r * a, clip(r, 1 - low, 1 + high) * a)
        if dual_clip is not None and a < 0:
            objective = max(objective, dual_clip * a)
        expected.append(-min(w, cap) * objective)
        weights.append(w)
        dual = math.inf if dual_clip is None else dual_clip
        cuts.append((a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > dual)) or w > 1.01 * cap)
    np.testing.assert_allclose(out.per_token, expected, rtol=1e-10, atol=1e-15)
    assert float(out.metrics["clip_share"]) == pytest.approx(np.mean(cuts))
    assert float(out.metrics["weight_mean"]) == pytest.approx(np.mean(weights))
    assert float(out.metrics["weight_max"]) == pytest.approx(max(weights))
    assert float(out.metrics["weight_truncated_share"]) == pytest.approx(np.mean([w > cap for w in weights]))


def test_a_cap_of_1_bounds_nothing_on_policy_but_for_rounding() -> None:
    """Half of the ratios lie above 1, by less than a hundredth."""
    log_probs = BEHAVIOUR + torch.linspace(-1e-6, 1e-6, 200, dtype=torch.float64)
    capped = decoupled_ppo(log_probs, BEHAVIOUR, ADVANTAGES, log_probs, cap=1.0)
    assert float(capped.metrics["clip_share"]) == 0.0
    assert float(capped.metrics["weight_truncated_share"]) == 0.5


def test_decoupled_ppo_takes_the_proximal_policy_and_the_weight_as_constants() -> None:
    inputs = [x.clone().requires_grad_() for x in (LOG_PROBS, BEHAVIOUR, ADVANTAGES, PROXIMAL)]
    decoupled_ppo(*inputs, clip_low=1.0, clip_high=math.inf).per_token.sum().backward()
    assert all(x.grad is None for x in inputs[1:])
    np.testing.assert_allclose(inputs[0].grad, -LOG_RATIO.exp() * ADVANTAGES, rtol=1e-10)  # w r = π/μ


def test_decoupled_ppo_holds_the_policy_near_that_of_the_updates_beginning_where_it_has_several_steps() -> None:
    versions = torch.arange(len(LOG_PROBS)) % 3
    values: Any = None
    one_step = Scored(LOG_PROBS, LOG_PROBS, BEHAVIOUR, versions * 0, versions, 3, values)
    several = replace(one_step, proximal_log_probs=PROXIMAL)
    by = {name: DecoupledPPO(proximal=name) for name in ("auto", "log_linear", "recomputed")}
    assert DecoupledPPO() == by["auto"]

    def losses(name: str, scored: Scored) -> list[float]:
        return by[name](scored, ADVANTAGES).per_token.tolist()

    assert losses("auto", one_step) == losses("log_linear", one_step) != losses("recomputed", one_step)
    assert losses("auto", several) == losses("recomputed", several) != losses("log_linear", several)
    assert losses("log_linear", several) == losses("log_linear", one_step)


def test_decoupled_ppo_from_the_behaviour_policy_is_ppo() -> None:
    plain = ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, 3.0)
    other = decoupled_ppo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, BEHAVIOUR, 0.2, 0.28, 3.0)
    torch.testing.assert_close(other.per_token, plain.per_token)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gspo_is_its_formula(dual_clip: float | None) -> None:
    low, high = 0.3, 0.4
    out = gspo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ROW_IDS, low, high, dual_clip)
    expected, ratios = [], []
    for start in range(0, 200, 13):
        log_ratios, advantages = LOG_RATIO[start : start + 13].tolist(), ADVANTAGES[start : start + 13].tolist()
        s = math.exp(sum(log_ratios) / len(log_ratios))
        for a in advantages:
            objective = min(s * a, clip(s, 1 - low, 1 + high) * a)
            expected.append(-max(objective, dual_clip * a) if dual_clip is not None and a < 0 else -objective)
            ratios.append(s)
    np.testing.assert_allclose(out.per_token, expected, rtol=1e-12, atol=1e-15)
    assert float(out.metrics["ratio_mean"]) == pytest.approx(np.mean(ratios))
    pairs = list(zip(ratios, ADVANTAGES.tolist(), strict=True))
    dual = math.inf if dual_clip is None else dual_clip
    cuts = [(a > 0 and s > 1 + high) or (a < 0 and (s < 1 - low or s > dual)) for s, a in pairs]
    assert float(out.metrics["clip_share"]) == pytest.approx(np.mean(cuts)) and any(cuts)


def test_gspo_over_rows_of_one_token_is_ppo() -> None:
    plain = ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, None)
    torch.testing.assert_close(gspo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ONE_EACH, 0.2, 0.28).per_token, plain.per_token)


def test_cispo_is_its_formula() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    out = cispo(log_probs, BEHAVIOUR, ADVANTAGES, clip_high=4.0)
    out.per_token.sum().backward()
    triples = list(zip(LOG_PROBS.tolist(), LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True))
    np.testing.assert_allclose(
        out.per_token.detach(), [-min(math.exp(x), 5.0) * a * p for p, x, a in triples], rtol=1e-12
    )
    np.testing.assert_allclose(log_probs.grad, [-min(math.exp(x), 5.0) * a for _, x, a in triples], rtol=1e-12)
    assert float(out.metrics["clip_share"]) == pytest.approx(np.mean([math.exp(x) > 5.05 for _, x, _ in triples]))


def test_truncated_is_is_its_formula() -> None:
    out = truncated_is(LOG_PROBS, BEHAVIOUR, ADVANTAGES, cap=2.0)
    triples = zip(LOG_PROBS.tolist(), LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True)
    expected = [-min(math.exp(x), 2.0) * a * log_prob for log_prob, x, a in triples]
    np.testing.assert_allclose(out.per_token, expected, rtol=1e-12)
    truncated = np.mean([math.exp(x) > 2.0 for x in LOG_RATIO.tolist()])
    assert float(out.metrics["truncated_share"]) == pytest.approx(truncated)
    bounded = np.mean([math.exp(x) > 1.01 * 2.0 for x in LOG_RATIO.tolist()])
    assert float(out.metrics["clip_share"]) == pytest.approx(bounded)


def test_ratios_that_lie_above_a_cap_of_1_by_rounding_alone_are_not_bounded() -> None:
    noise = torch.tensor([1e-6, 2e-3, -1e-6, 0.02])
    out = truncated_is(noise - 1.0, torch.full((4,), -1.0), torch.ones(4))
    assert float(out.metrics["truncated_share"]) == 0.75
    assert float(out.metrics["clip_share"]) == 0.25


def test_truncated_is_takes_its_weights_as_constants() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    truncated_is(log_probs, BEHAVIOUR, ADVANTAGES, cap=2.0).per_token.sum().backward()
    np.testing.assert_allclose(log_probs.grad, -LOG_RATIO.exp().clamp(max=2.0) * ADVANTAGES, rtol=1e-12)


def test_gradients() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, 3.0).per_token, log_probs)
    assert torch.autograd.gradcheck(
        lambda x: decoupled_ppo(x, BEHAVIOUR, ADVANTAGES, PROXIMAL, 0.2, 0.28, 3.0).per_token, log_probs
    )
    assert torch.autograd.gradcheck(lambda x: gspo(x, BEHAVIOUR, ADVANTAGES, ROW_IDS, 0.3, 0.4).per_token, log_probs)
    segment_ids = ROW_IDS
    for mode in ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"):
        assert torch.autograd.gradcheck(lambda x, m=mode: aggregate(x, segment_ids, m, 7.0), log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_nothing_is_clipped_and_the_gradients_agree(dtype: torch.dtype) -> None:
    behaviour, advantages = BEHAVIOUR.to(dtype), ADVANTAGES.to(dtype)
    gradients = []
    for loss in ALL:
        log_probs = behaviour.clone().requires_grad_()
        out = loss(log_probs, behaviour, advantages)
        out.per_token.sum().backward()
        if loss is not gspo_by_13:
            gradients.append(log_probs.grad)
        assert all(float(value) == 0 for name, value in out.metrics.items() if name.endswith("_share"))
        assert float(out.metrics["ratio_mean"]) == float(out.metrics["ratio_max"]) == 1
        assert out.per_token.dtype == dtype and all(value.dtype == dtype for value in out.metrics.values())
    for gradient in gradients:
        torch.testing.assert_close(gradient, -advantages)


def test_advantages_and_behaviour_get_no_gradient() -> None:
    for loss in ALL:
        inputs = [x.clone().requires_grad_() for x in (LOG_PROBS, BEHAVIOUR, ADVANTAGES)]
        loss(*inputs).per_token.sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_extreme_ratios_stay_finite() -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    behaviour = torch.tensor([-500.0, 0.0])
    unbounded = (lambda *x: ppo_clip(*x, dual_clip=None), lambda *x: truncated_is(*x, cap=math.inf))
    for loss in (*ALL, *unbounded):
        for sign in (1.0, -1.0):
            (gradient,) = torch.autograd.grad(
                loss(log_probs, behaviour, torch.full((2,), sign)).per_token.sum(), log_probs
            )
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("spoil", [math.nan, -math.inf, math.inf])
def test_what_a_mask_rejects_reaches_neither_loss_nor_gradient(loss: object, spoil: float) -> None:
    good = torch.arange(200) % 13 != 5
    hidden = LOG_PROBS.clone()
    behaviour = BEHAVIOUR.clone()
    behaviour[~good] = spoil  # as an engine may report for a token that it could not have sampled
    log_probs = hidden.requires_grad_() * 1.0
    keep = rejection_mask(log_probs - behaviour, ROW_IDS, "token", 1e-3, 1e3)
    assert torch.equal(keep, good)
    out = loss(log_probs[keep], behaviour[keep], ADVANTAGES[keep])
    total = aggregate(out.per_token, ROW_IDS[keep], "sequence_mean_token_mean", 16)
    total.backward()
    assert torch.isfinite(total) and all(torch.isfinite(x) for x in out.metrics.values())
    assert torch.isfinite(hidden.grad).all() and not hidden.grad[~good].any() and hidden.grad[good].any()


ROWS = [[1.0, 2.0, 6.0], [], [4.0], [0.5, 1.5]]
PER_TOKEN = torch.tensor([x for row in ROWS for x in row], dtype=torch.float64)
SEGMENT_IDS = torch.tensor([i for i, row in enumerate(ROWS) for _ in row])


@pytest.mark.parametrize(
    ("mode", "total", "local_count"),
    [("token_mean", 15.0, 6), ("sequence_mean_token_sum", 15.0, 3), ("sequence_mean_token_mean", 3.0 + 4.0 + 1.0, 3)],
)
def test_aggregate(mode: str, total: float, local_count: int) -> None:
    assert float(aggregate(PER_TOKEN, SEGMENT_IDS, mode, 10)) == pytest.approx(total / 10)
    assert float(aggregate(PER_TOKEN, SEGMENT_IDS, mode, torch.tensor(10.0))) == pytest.approx(total / 10)
    assert float(aggregate(PER_TOKEN, SEGMENT_IDS, mode, None)) == pytest.approx(total / local_count)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"])
def test_micro_batches_add_up_to_the_whole(mode: str) -> None:
    denominator = 6 if mode == "token_mean" else 3
    whole = aggregate(PER_TOKEN, SEGMENT_IDS, mode, denominator)
    parts = aggregate(PER_TOKEN[:3], SEGMENT_IDS[:3], mode, denominator) + aggregate(
        PER_TOKEN[3:], SEGMENT_IDS[3:], mode, denominator
    )
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"])
def test_an_empty_micro_batch_can_run_backward(mode: str) -> None:
    parameter = torch.ones(3, requires_grad=True)
    none, no_ids = parameter[:0], torch.zeros(0, dtype=torch.int64)
    for loss in ALL:
        out = loss(none, none.detach(), none.detach())
        assert all(float(value) == 0 for value in out.metrics.values())
        for denominator in (None, 12):
            total = aggregate(out.per_token, no_ids, mode, denominator)
            assert float(total.detach()) == 0
            (gradient,) = torch.autograd.grad(total, parameter, retain_graph=True)
            assert gradient.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ppo_clip(LOG_PROBS, BEHAVIOUR[1:], ADVANTAGES), ValueError, "behaviour_log_probs has shape"),
        (lambda: ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES.float()), TypeError, "advantages has dtype"),
        (lambda: ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, clip_low=1.2), ValueError, "clip_low is 1.2"),
        (lambda: ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, clip_high=-0.1), ValueError, "clip_high is -0.1"),
        (lambda: ppo_clip(LOG_PROBS, BEHAVIOUR, ADVANTAGES, dual_clip=0.9), ValueError, "dual_clip is 0.9"),
        (lambda: truncated_is(LOG_PROBS, BEHAVIOUR, ADVANTAGES, cap=-1.0), ValueError, "cap is -1.0"),
        (lambda: truncated_is(LOG_PROBS[None], BEHAVIOUR[None], ADVANTAGES[None]), ValueError, "log_probs has shape"),
        (
            lambda: decoupled_ppo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, PROXIMAL[1:]),
            ValueError,
            "proximal_log_probs has sh",
        ),
        (lambda: decoupled_ppo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, PROXIMAL, cap=0.0), ValueError, "cap is 0.0"),
        (lambda: gspo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ROW_IDS.flip(0)), ValueError, "segment_ids decreases"),
        (lambda: gspo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, ROW_IDS, -0.1), ValueError, "clip_low is -0.1"),
        (lambda: cispo(LOG_PROBS, BEHAVIOUR, ADVANTAGES, -0.5), ValueError, "clip_high is -0.5"),
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS, "mean", 1), ValueError, "mode is 'mean'"),
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS, "token_mean", 0), ValueError, "denominator is 0"),
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS[1:], "token_mean", 1), ValueError, "segment_ids has shape"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_the_penalty_under_the_policy_has_the_gradient_of_its_divergence_from_the_reference() -> None:
    """Over all actions of a softmax policy, each as often as the policy takes it."""
    logits = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    reference = torch.tensor([0.4, -1.0, 1.3, 0.0, 2.0, -0.7], dtype=torch.float64).log_softmax(-1)
    divergence = (log_probs.exp() * (log_probs - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (found,) = torch.autograd.grad((log_probs.exp().detach() * reference_penalty(log_probs, reference)).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name, kind in LOSSES.items() if kind.__module__.startswith("impala_llm.")])
def test_a_loss_has_no_gradient_where_the_advantage_is_0_if_it_says_so(name: str) -> None:
    """All tokens of every third row have none."""
    is_zero = ROW_IDS % 3 == 0
    log_probs = LOG_PROBS.clone().requires_grad_()
    versions = torch.zeros(200, dtype=torch.int64)
    scored = Scored(log_probs, -LOG_PROBS, BEHAVIOUR, ROW_IDS, versions, 2, lambda indices: indices.double())
    output = LOSSES[name]()(scored, torch.where(is_zero, 0.0, ADVANTAGES))
    output.per_token.sum().backward()
    assert log_probs.grad is not None and bool(log_probs.grad[~is_zero].any())
    vanishes = not bool(log_probs.grad[is_zero].any())
    assert LOSSES[name].vanishes_with_advantage == vanishes


def test_a_loss_that_derives_from_another_says_for_itself_whether_it_vanishes_with_the_advantage() -> None:
    class Own(DecoupledPPO):
        pass

    assert DecoupledPPO.vanishes_with_advantage and not Own.vanishes_with_advantage
