import numpy as np
import pytest
import torch

from impala_llm.engines.sampling import greedy, sample, stream_key, uniforms


# Vocabularies that divide into blocks, that do not (a prime), and that fit into one.
@pytest.mark.parametrize("vocab_size", [60, 53, 3, 1])
def test_frequencies_match_the_softmax(vocab_size: int) -> None:
    rows = 40_000
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.0, vocab_size)).float()
    temperatures = torch.full((rows, 1), 1 / 0.7)
    draws = torch.from_numpy(np.random.default_rng(1).random(rows))
    tokens, logprobs = sample(logits.expand(rows, -1), temperatures, draws)
    probs = torch.softmax(logits.double() / 0.7, -1).numpy()
    expected = rows * probs
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = vocab_size - 1
    # A chi-square variable has mean k and variance 2k.
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(logprobs.numpy(), np.log(probs)[tokens.numpy()], atol=1e-5)


@pytest.mark.parametrize("vocab_size", [60, 53])
def test_a_draw_picks_the_token_whose_share_of_the_unit_interval_holds_it(vocab_size: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3.0, (200, vocab_size))).float()
    draws = np.random.default_rng(3).random(200)
    tokens, _ = sample(logits, None, torch.from_numpy(draws))
    ends = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    for row, token in enumerate(tokens.tolist()):
        before = ends[row, token - 1] if token else 0.0
        assert before - 1e-6 <= draws[row] <= ends[row, token] + 1e-6


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((3, 16), -float("inf"))
    logits[:, 5] = 0.0
    logits[:, 9] = 0.0
    tokens, logprobs = sample(logits, None, torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [5, 9, 9]
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_logits_that_are_not_finite_give_nan() -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    _, logprobs = sample(logits, None, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert np.isnan(logprobs.numpy()).tolist() == [True, False]
    assert np.isnan(greedy(logits)[1].numpy()).tolist() == [True, False]


def test_greedy_is_the_argmax_with_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, -1.0]])
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == [1, 0]
    expected = [2 - np.log(1 + np.e**2 + np.e), 3 - np.log(np.e**3 + np.e + np.e**-1)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_uniforms_are_the_published_generator() -> None:
    # First outputs of SplitMix64 for seed 1234567, as published with the generator's reference implementations.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    np.testing.assert_array_equal(drawn, [(value >> 11) * 2.0**-53 for value in expected])


def test_streams_are_uniform_and_do_not_resemble_each_other() -> None:
    keys = np.array([stream_key(0, seed) for seed in range(300)])
    draws = np.stack([uniforms(keys, np.full(300, i)) for i in range(100)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    # 99.99 % quantile of chi-square with 19 degrees of freedom.
    assert ((counts - 1500) ** 2 / 1500).sum() < 50.8
    correlations = np.corrcoef(draws.T)[np.triu_indices(300, 1)]
    assert np.abs(correlations).max() < 0.6
    assert len({stream_key(a, b) for a in range(-3, 30) for b in range(-3, 30)}) == 33 * 33
