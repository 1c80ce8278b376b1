from collections.abc import Callable

import numpy as np
import pytest
import torch

from impala_llm.engines.embedded.sampling import draw, greedy, sample, stream_key, uniforms

Sampler = Callable[[torch.Tensor, float, np.ndarray], tuple[np.ndarray, np.ndarray]]


def by_operators(logits: torch.Tensor, temperature: float, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = None if temperature == 1 else torch.full((len(draws), 1), 1 / temperature)
    tokens, log_probs = sample(logits, scales, torch.from_numpy(draws))
    return tokens.numpy(), log_probs.numpy()


def by_loops(logits: torch.Tensor, temperature: float, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = len(draws)
    return draw(logits.contiguous(), np.full(rows, 1 / temperature, np.float32), np.zeros(rows, np.bool_), draws)


samplers = pytest.mark.parametrize("sampler", [by_operators, by_loops])


# Vocabularies that divide into blocks, that do not (a prime), and that fit into one.
@samplers
@pytest.mark.parametrize("vocab_size", [130, 60, 53, 3, 1])
def test_frequencies_match_the_softmax(vocab_size: int, sampler: Sampler) -> None:
    rows = 40_000
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.0, vocab_size)).float()
    tokens, log_probs = sampler(logits.expand(rows, -1), 0.7, np.random.default_rng(1).random(rows))
    probs = torch.softmax(logits.double() / 0.7, -1).numpy()
    expected = rows * probs
    counts = np.bincount(tokens, minlength=vocab_size)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = vocab_size - 1
    # A chi-square variable has mean k and variance 2k.
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(log_probs, np.log(probs)[tokens], atol=1e-5)


@samplers
@pytest.mark.parametrize("vocab_size", [200, 60, 53])
def test_a_draw_picks_the_token_whose_share_of_the_unit_interval_holds_it(vocab_size: int, sampler: Sampler) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3.0, (200, vocab_size))).float()
    draws = np.random.default_rng(3).random(200)
    tokens, _ = sampler(logits, 1.0, draws)
    ends = torch.softmax(logits.double(), -1).cumsum(-1).numpy()
    for row, token in enumerate(tokens.tolist()):
        before = ends[row, token - 1] if token else 0.0
        assert before - 1e-6 <= draws[row] <= ends[row, token] + 1e-6


@samplers
def test_a_token_without_probability_is_never_drawn(sampler: Sampler) -> None:
    logits = torch.full((3, 160), -float("inf"))
    logits[:, 5] = 0.0
    logits[:, 99] = 0.0
    tokens, log_probs = sampler(logits, 1.0, np.array([0.0, 0.5, 1.0 - 2**-53]))
    assert tokens.tolist() == [5, 99, 99]
    np.testing.assert_allclose(log_probs, np.log(0.5), atol=1e-6)


@samplers
@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3, [-np.nan, 0.0, 0.0]])
def test_logits_that_are_not_finite_give_nan(bad: list[float], sampler: Sampler) -> None:
    logits = torch.tensor([bad, [0.0, 1.0, 2.0]])
    _, log_probs = sampler(logits, 1.0, np.array([0.5, 0.5]))
    assert np.isnan(log_probs).tolist() == [True, False]
    ones, both = np.ones(2, np.float32), np.ones(2, np.bool_)
    assert np.isnan(draw(logits, ones, both, np.zeros(2))[1]).tolist() == [True, False]
    assert np.isnan(greedy(logits)[1].numpy()).tolist() == [True, False]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(2, 1)
    tokens, log_probs = draw(logits, np.ones(2, np.float32), np.array([True, False]), np.array([0.0, 0.0]))
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(
        log_probs, [-np.log(1 + np.e**-2 + np.e**-1), -2 - np.log(1 + np.e**-2 + np.e**-1)], atol=1e-6
    )


def test_greedy_is_the_argmax_with_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, -1.0]])
    tokens, log_probs = greedy(logits)
    by_draw = draw(logits, np.ones(2, np.float32), np.ones(2, np.bool_), np.zeros(2))
    np.testing.assert_array_equal(tokens, by_draw[0])
    np.testing.assert_allclose(log_probs, by_draw[1], atol=1e-6)
    assert tokens.tolist() == [1, 0]
    expected = [2 - np.log(1 + np.e**2 + np.e), 3 - np.log(np.e**3 + np.e + np.e**-1)]
    np.testing.assert_allclose(log_probs, expected, atol=1e-6)


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
