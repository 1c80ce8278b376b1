"""Policy losses against their formulas token by token, and their gradients."""

import math

import numpy as np
import pytest
import torch

from impala_llm.algorithms.losses import aggregate, ppo_clip, truncated_is

GENERATOR = torch.Generator().manual_seed(0)
BEHAVIOUR = -torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 3
LOG_RATIO = torch.rand(200, generator=GENERATOR, dtype=torch.float64) * 10 - 5
LOG_PROBS = BEHAVIOUR + LOG_RATIO
ADVANTAGES = torch.randn(200, generator=GENERATOR, dtype=torch.float64)
ADVANTAGES[::17] = 0.0


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
    cut = np.any(list(shares.values()), axis=0) | (ADVANTAGES == 0).numpy()
    assert ((log_probs.grad == 0).numpy() == cut).all()
    assert float(out.metrics["ratio_mean"]) == pytest.approx(np.mean([r for r, _ in pairs]))
    assert float(out.metrics["ratio_max"]) == pytest.approx(max(r for r, _ in pairs))
    assert not any(metric.requires_grad for metric in out.metrics.values())


def test_truncated_is_is_its_formula() -> None:
    out = truncated_is(LOG_PROBS, BEHAVIOUR, ADVANTAGES, cap=2.0)
    triples = zip(LOG_PROBS.tolist(), LOG_RATIO.tolist(), ADVANTAGES.tolist(), strict=True)
    expected = [-min(math.exp(x), 2.0) * a * log_prob for log_prob, x, a in triples]
    np.testing.assert_allclose(out.per_token, expected, rtol=1e-12)
    truncated = np.mean([math.exp(x) > 2.0 for x in LOG_RATIO.tolist()])
    assert float(out.metrics["truncated_share"]) == pytest.approx(truncated)


def test_truncated_is_takes_its_weights_as_constants() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    truncated_is(log_probs, BEHAVIOUR, ADVANTAGES, cap=2.0).per_token.sum().backward()
    np.testing.assert_allclose(log_probs.grad, -LOG_RATIO.exp().clamp(max=2.0) * ADVANTAGES, rtol=1e-12)


def test_gradients() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, BEHAVIOUR, ADVANTAGES, 0.2, 0.28, 3.0).per_token, log_probs)
    segment_ids = torch.arange(200) // 13
    for mode in ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"):
        assert torch.autograd.gradcheck(lambda x, m=mode: aggregate(x, segment_ids, m, 7.0), log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_nothing_is_clipped_and_the_gradients_agree(dtype: torch.dtype) -> None:
    behaviour, advantages = BEHAVIOUR.to(dtype), ADVANTAGES.to(dtype)
    gradients = []
    for loss in (ppo_clip, truncated_is):
        log_probs = behaviour.clone().requires_grad_()
        out = loss(log_probs, behaviour, advantages)
        out.per_token.sum().backward()
        gradients.append(log_probs.grad)
        assert all(float(value) == 0 for name, value in out.metrics.items() if name.endswith("_share"))
        assert float(out.metrics["ratio_mean"]) == float(out.metrics["ratio_max"]) == 1
        assert out.per_token.dtype == dtype and all(value.dtype == dtype for value in out.metrics.values())
    torch.testing.assert_close(gradients[0], -advantages)
    torch.testing.assert_close(gradients[1], -advantages)


def test_advantages_and_behaviour_get_no_gradient() -> None:
    for loss in (ppo_clip, truncated_is):
        inputs = [x.clone().requires_grad_() for x in (LOG_PROBS, BEHAVIOUR, ADVANTAGES)]
        loss(*inputs).per_token.sum().backward()
        assert inputs[0].grad is not None and inputs[1].grad is None and inputs[2].grad is None


def test_extreme_ratios_stay_finite() -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    behaviour = torch.tensor([-500.0, 0.0])
    for loss in (lambda *x: ppo_clip(*x, dual_clip=None), lambda *x: truncated_is(*x, cap=math.inf)):
        for sign in (1.0, -1.0):
            (gradient,) = torch.autograd.grad(
                loss(log_probs, behaviour, torch.full((2,), sign)).per_token.sum(), log_probs
            )
            assert torch.isfinite(gradient).all()


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
    for loss in (ppo_clip, truncated_is):
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
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS, "mean", 1), ValueError, "mode is 'mean'"),
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS, "token_mean", 0), ValueError, "denominator is 0"),
        (lambda: aggregate(PER_TOKEN, SEGMENT_IDS[1:], "token_mean", 1), ValueError, "segment_ids has shape"),
    ],
)
def test_mistakes_are_named(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
