"""Frequencies of draws against the probabilities of the definition, computed in plain Python."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from impala_llm.replay.priorities import ItemColumns, OldestFirst, PrioritySampler

VERSIONS = [3, 0, 7, 7, 5, 1]
ADVANTAGES = [0.0, 0.3, 0.05, 1.2, 0.7, 0.3]
COUNTS = [1, 4, 4, 2, 1, 9]
NUM_DRAWS = 20_000


def columns(versions: list[int] = VERSIONS) -> ItemColumns:
    return ItemColumns(
        item_ids=np.arange(len(versions)),
        versions=np.array(versions),
        abs_advantages=np.array(ADVANTAGES),
        signature_counts=np.array(COUNTS),
    )


def probabilities(sampler: PrioritySampler, version: int) -> list[float]:
    """P_i as defined, with the age in full."""
    p = []
    for v, advantage, count in zip(VERSIONS, ADVANTAGES, COUNTS, strict=True):
        recency = math.exp(-(version - v) / sampler.recency_tau)
        size = (advantage + sampler.advantage_epsilon) ** sampler.advantage_exponent
        p.append(recency * size * count**-sampler.rarity_exponent)
    floor = sampler.uniform_floor
    return [(1 - floor) * x / sum(p) + floor / len(p) for x in p]


SAMPLERS = [
    PrioritySampler(),
    PrioritySampler(recency_tau=2.0),
    PrioritySampler(advantage_exponent=0.6, advantage_epsilon=0.01),
    PrioritySampler(rarity_exponent=0.5),
    PrioritySampler(recency_tau=4.0, advantage_exponent=0.6, advantage_epsilon=0.05, rarity_exponent=0.25),
    PrioritySampler(1.0, 2.0, 0.05, 1.0, uniform_floor=0.2),
    PrioritySampler(1.0, 2.0, 0.05, 1.0, uniform_floor=1.0),
]


def assert_frequencies(counts: Counter, expected: dict[object, float], draws: int) -> None:
    """Each within 4.5 standard errors."""
    assert set(counts) <= set(expected)
    for outcome, p in expected.items():
        error = math.sqrt(p * (1 - p) / draws)
        assert abs(counts[outcome] / draws - p) <= 4.5 * error, (outcome, counts[outcome] / draws, p)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_first_draws_follow_the_definition(sampler: PrioritySampler) -> None:
    rng = np.random.default_rng(0)
    counts = Counter(int(sampler.draw(columns(), 1, rng).rows[0]) for _ in range(NUM_DRAWS))
    assert_frequencies(counts, dict(enumerate(probabilities(sampler, version=9))), NUM_DRAWS)


@pytest.mark.parametrize("sampler", SAMPLERS[4:6])
def test_later_draws_follow_the_definition_without_replacement(sampler: PrioritySampler) -> None:
    rng = np.random.default_rng(1)
    counts = Counter(tuple(sampler.draw(columns(), 2, rng).rows.tolist()) for _ in range(NUM_DRAWS))
    p = probabilities(sampler, version=9)
    expected = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in itertools.permutations(range(len(p)), 2)}
    assert_frequencies(counts, expected, NUM_DRAWS)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_densities_are_n_times_the_probability(sampler: PrioritySampler) -> None:
    draw = sampler.draw(columns(), 6, np.random.default_rng(2))
    p = probabilities(sampler, version=9)
    np.testing.assert_allclose(np.exp(draw.log_density), [6 * p[row] for row in draw.rows], rtol=1e-9)
    assert sorted(draw.rows) == list(range(6))


def test_recency_depends_on_differences_of_versions_only() -> None:
    sampler = SAMPLERS[4]
    later = [v + 10**6 for v in VERSIONS]
    draws = [sampler.draw(columns(versions), 6, np.random.default_rng(3)) for versions in (VERSIONS, later)]
    assert draws[0].rows.tolist() == draws[1].rows.tolist()
    np.testing.assert_allclose(draws[0].log_density, draws[1].log_density, atol=1e-6)


def test_extreme_ages_neither_overflow_nor_vanish() -> None:
    versions = [0, 100_000, 200_000, 200_000, 0, 5]
    draw = PrioritySampler(recency_tau=1.0).draw(columns(versions), 6, np.random.default_rng(4))
    assert np.isfinite(draw.log_density).all()
    assert sorted(draw.rows[:2].tolist()) == [2, 3] and draw.rows[2] == 1


def test_the_queue_takes_the_oldest_version_then_the_first_come() -> None:
    draw = OldestFirst().draw(columns(), 5, np.random.default_rng(5))
    assert draw.rows.tolist() == [1, 5, 0, 4, 2]
    assert draw.log_density.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("recency_tau", 0.0),
        ("recency_tau", math.nan),
        ("advantage_exponent", -0.1),
        ("advantage_exponent", math.inf),
        ("advantage_epsilon", 0.0),
        ("rarity_exponent", -1.0),
        ("uniform_floor", 1.5),
    ],
)
def test_impossible_settings_are_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{setting} is {value}"):
        PrioritySampler(**{setting: value})
