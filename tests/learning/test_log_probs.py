"""Chunked log-probabilities against log_softmax and gather over the full logits."""

import pytest
import torch
from torch import Tensor

from impala_llm.learning.policy import log_probs as module
from impala_llm.learning.policy.log_probs import chunk_tokens, token_log_probs


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax((hidden @ weight.T + (0 if bias is None else bias)) / temperature, dim=-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(30, 8, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(30, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, 30, (rows,), generator=generator)


@pytest.mark.parametrize("rows", [1, 7, 23])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_agree_with_the_full_table(
    monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float, with_bias: bool
) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 7 * 30)
    hidden, weight, bias, targets = inputs(rows, torch.float32)
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    up = torch.linspace(-1.0, 1.0, rows)

    def run(function) -> tuple[Tensor, Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
        log_probs, entropy = function(hidden, weight, bias if with_bias else None, targets, temperature)
        # each output has a gradient of its own at every index
        return log_probs, entropy, list(torch.autograd.grad((log_probs * up + entropy * up.flip(0)).sum(), leaves))

    log_probs, entropy, gradients = run(token_log_probs)
    expected_log_probs, expected_entropy, expected_gradients = run(plain)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected_log_probs, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, atol=2e-6, rtol=1e-6)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=5e-6, rtol=1e-5)


def test_double_precision_agrees_to_rounding_and_passes_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 3 * 30)
    hidden, weight, bias, targets = inputs(8, torch.float64)
    for ours, expected in zip(
        token_log_probs(hidden, weight, bias, targets, 0.7), plain(hidden, weight, bias, targets, 0.7), strict=True
    ):
        torch.testing.assert_close(ours, expected, atol=1e-13, rtol=0)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_log_probs(h, w, b, targets, 0.7), (hidden, weight, bias), fast_mode=False
    )


def test_bfloat16_hidden_states_give_float32_results() -> None:
    hidden, weight, _, targets = inputs(5, torch.bfloat16)
    log_probs, entropy = token_log_probs(hidden, weight, None, targets, 1.0)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_no_targets_still_run_backward() -> None:
    hidden, weight, _, targets = inputs(4, torch.float32)
    log_probs, entropy = token_log_probs(hidden[:0], weight, None, targets[:0], 1.0)
    assert len(log_probs) == len(entropy) == 0
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize(
    ("vocabulary", "device_type", "tokens"),
    [(97, "cpu", 86_480), (150_000, "cpu", 55), (10**8, "cpu", 1), (97, "cuda", 86_480), (150_000, "cuda", 1024)],
)
def test_a_gpu_gets_at_least_1024_tokens_at_once(vocabulary: int, device_type: str, tokens: int) -> None:
    assert chunk_tokens(vocabulary, device_type) == tokens
