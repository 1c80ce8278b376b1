"""Frequencies of draws, weights and evictions against the definition, computed in plain Python."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from impala_llm.replay import OldestFirst, PrioritySampler, ReplayBuffer, Sampler
from tests.replay.builders import make_trajectory

VERSIONS = [3, 0, 7, 7, 5, 1]
ADVANTAGES = [0.0, 0.3, 0.05, 1.2, 0.7, 0.3]
SIGNATURES = [0, 1, 1, 2, 1, 2]
NUM_DRAWS = 5000
"""At 4.5 standard errors they find 3 percentage points. They show that items are drawn by the P of their weights, which
are compared with the definition to nine digits."""
BIG = 1 << 60


def filled(
    sampler: Sampler,
    versions: Sequence[int] = VERSIONS,
    advantages: Sequence[float] = ADVANTAGES,
    signatures: Sequence[int] = SIGNATURES,
    seed: int = 0,
) -> ReplayBuffer:
    """A buffer of these items, whose ids are their indices; they stay however often they are drawn."""
    buffer = ReplayBuffer(sampler, max(1000, len(versions)), BIG, max_replays=BIG, seed=seed)
    items = [[make_trajectory(version=v, signature=f"s{s}")] for v, s in zip(versions, signatures, strict=True)]
    buffer.insert_all(items, max(versions))
    buffer.update_advantages(range(len(versions)), advantages)
    return buffer


def draw(buffer: ReplayBuffer, num_items: int, version: int = 7) -> tuple[int, ...]:
    return tuple(buffer.sample(num_items, version).item_ids.tolist())


def defined(
    sampler: PrioritySampler, versions: Sequence[int], advantages: Sequence[float], signatures: Sequence[int]
) -> list[float]:
    """P_i as defined, with the age in full."""
    p = []
    for v, advantage, signature in zip(versions, advantages, signatures, strict=True):
        recency = math.exp(-(max(versions) - v) / sampler.recency_tau)
        size = (advantage + sampler.advantage_epsilon) ** sampler.advantage_exponent
        p.append(recency * size * signatures.count(signature) ** -sampler.rarity_exponent)
    floor = sampler.uniform_floor
    return [(1 - floor) * x / sum(p) + floor / len(p) for x in p]


def successive(p: Sequence[float], num_items: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of draws without replacement."""
    chances = {}
    for drawn in itertools.permutations(range(len(p)), num_items):
        left, chance = 1.0, 1.0
        for item in drawn:
            chance *= p[item] / left
            left -= p[item]
        chances[drawn] = chance
    return chances


def assert_frequencies(counts: Counter, expected: dict, draws: int) -> None:
    """Each within 4.5 standard errors, and all together by chi-square within 4.5 of its own."""
    assert set(counts) <= set(expected)
    chi_square = 0.0
    for outcome, p in expected.items():
        error = math.sqrt(p * (1 - p) / draws)
        assert abs(counts[outcome] / draws - p) <= 4.5 * error + 1e-12, (outcome, counts[outcome] / draws, p)
        chi_square += (counts[outcome] - draws * p) ** 2 / (draws * p)
    freedom = len(expected) - 1
    assert chi_square <= freedom + 4.5 * math.sqrt(2 * freedom) + 10


def assert_weights(buffer: ReplayBuffer, p: Sequence[float], version: int) -> None:
    """With b = 1 they are the smallest P over that of each item."""
    sample = buffer.sample(len(p), version)
    assert sorted(sample.item_ids) == list(range(len(p)))
    np.testing.assert_allclose(sample.weights, min(p) / np.array(p)[sample.item_ids], rtol=1e-9)


SAMPLERS = [
    PrioritySampler(),
    PrioritySampler(recency_tau=2.0),
    PrioritySampler(advantage_exponent=0.6, advantage_epsilon=0.01),
    PrioritySampler(rarity_exponent=0.5),
    PrioritySampler(recency_tau=4.0, advantage_exponent=0.6, advantage_epsilon=0.05, rarity_exponent=0.25),
    PrioritySampler(1.0, 2.0, 0.05, 1.0, uniform_floor=0.2),
    PrioritySampler(1.0, 2.0, 0.05, 1.0, uniform_floor=1.0),
]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_first_draws_follow_the_definition(sampler: PrioritySampler) -> None:
    buffer = filled(sampler)
    counts = Counter(draw(buffer, 1) for _ in range(NUM_DRAWS))
    expected = successive(defined(sampler, VERSIONS, ADVANTAGES, SIGNATURES), 1)
    assert_frequencies(counts, expected, NUM_DRAWS)


@pytest.mark.parametrize("sampler", SAMPLERS[4:])
@pytest.mark.parametrize("num_items", [2, 3])
def test_later_draws_follow_the_definition_without_replacement(sampler: PrioritySampler, num_items: int) -> None:
    buffer = filled(sampler, seed=1)
    counts = Counter(draw(buffer, num_items) for _ in range(NUM_DRAWS))
    expected = successive(defined(sampler, VERSIONS, ADVANTAGES, SIGNATURES), num_items)
    assert_frequencies(counts, expected, NUM_DRAWS)


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_a_large_buffer_draws_by_the_definition(floor: float) -> None:
    sampler = PrioritySampler(6.0, 0.6, 0.01, 0.7, floor)
    rng = np.random.default_rng(2)
    versions, signatures = rng.integers(30, size=700).tolist(), rng.integers(60, size=700).tolist()
    advantages = rng.exponential(size=700).tolist()
    buffer = filled(sampler, versions, advantages, signatures)
    p = np.array(defined(sampler, versions, advantages, signatures))
    ours, plain = np.zeros(700), np.zeros(700)
    num_batches = 1500
    for _ in range(num_batches):
        drawn = draw(buffer, 40, version=30)
        assert len(set(drawn)) == 40
        ours[list(drawn)] += 1
        plain[rng.choice(700, 40, replace=False, p=p)] += 1
    both = (ours + plain) / (2 * num_batches)
    error = np.sqrt(2 * both * (1 - both) / num_batches)
    assert (np.abs(ours - plain) / num_batches <= 4.5 * error + 5 / num_batches).all()
    assert_weights(buffer, p.tolist(), version=30)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_weights_follow_the_definition(sampler: PrioritySampler) -> None:
    assert_weights(filled(sampler), defined(sampler, VERSIONS, ADVANTAGES, SIGNATURES), version=7)


def test_recency_depends_on_differences_of_versions_only() -> None:
    later = [v + 10**6 for v in VERSIONS]
    samples = [filled(SAMPLERS[4], versions).sample(6, max(versions)) for versions in (VERSIONS, later)]
    assert samples[0].item_ids.tolist() == samples[1].item_ids.tolist()
    np.testing.assert_allclose(samples[0].weights, samples[1].weights, rtol=1e-12)


@pytest.mark.parametrize("versions", [[0, 100_000, 200_000, 200_000, 0, 5], [0, 5, 100_000, 200_000, 200_000, 0]])
def test_extreme_ages_neither_overflow_nor_vanish(versions: list[int]) -> None:
    sample = filled(PrioritySampler(recency_tau=1.0), versions).sample(6, 200_000, importance_exponent=0.001)
    drawn = sample.item_ids.tolist()
    assert sorted(drawn) == list(range(6)) and np.isfinite(sample.weights).all()
    assert [versions[item] for item in drawn[:4]] == [200_000, 200_000, 100_000, 5]
    ages = np.array([200_000 - versions[item] for item in drawn])
    np.testing.assert_allclose(sample.weights, np.exp(0.001 * (ages - ages.max())), rtol=1e-9)


def test_what_has_almost_no_mass_is_drawn_in_proportion() -> None:
    """Two items hold nearly all of the mass; what is left is e^-600 of it."""
    sampler = PrioritySampler(recency_tau=1.0, rarity_exponent=1.0)
    buffer = filled(sampler, [0, 1, 1600, 1601], [0.0] * 4, [0, 0, 1, 1], seed=5)
    counts = Counter(draw(buffer, 3, version=1601)[2] for _ in range(NUM_DRAWS))
    assert_frequencies(counts, {0: 1 / (1 + math.e), 1: math.e / (1 + math.e)}, NUM_DRAWS)


def test_an_exponent_that_no_sum_can_hold() -> None:
    buffer = filled(PrioritySampler(rarity_exponent=2000.0), [0] * 4, [0.0] * 4, [0] * 4, seed=6)
    counts = Counter(draw(buffer, 1)[0] for _ in range(NUM_DRAWS))
    assert_frequencies(counts, {item: 0.25 for item in range(4)}, NUM_DRAWS)


@pytest.mark.parametrize("rarity_exponent", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("num_signatures", [1, 7, 400])
def test_a_full_buffer_gives_up_the_lowest_priority_again_and_again(
    rarity_exponent: float, num_signatures: int
) -> None:
    """Against a plain search for the lowest after each item that goes, in batches of all sizes."""
    sampler = PrioritySampler(6.0, 0.6, 0.01, rarity_exponent)
    buffer, rng = ReplayBuffer(sampler, 300, BIG, max_replays=BIG), np.random.default_rng(3)
    held: dict[int, tuple[int, float, int, int]] = {}  # version, |A|, signature, trajectories
    next_id = 0
    for version, num_new in enumerate([200, 1, 40, 2, 150, 199, 13, 200]):
        signatures = rng.integers(num_signatures, size=num_new).tolist()
        sizes = rng.choice([1, 1, 1, 1, 1, 1, 1, 3], size=num_new).tolist()
        expected = []
        while sum(size for *_, size in held.values()) + sum(sizes) > 300:
            counts = Counter(signature for _, _, signature, _ in held.values())
            priority = {
                item_id: v / 6.0 + 0.6 * math.log(a + 0.01) - rarity_exponent * math.log(counts[s])
                for item_id, (v, a, s, _) in held.items()
            }
            expected.append(min(held, key=lambda item_id: (priority[item_id], item_id)))
            del held[expected[-1]]
        names = [f"s{signature}" for signature in signatures]
        evicted = buffer.insert_all([[make_trajectory(version=version)] * size for size in sizes], version, names)
        assert [item.item_id for item in evicted] == expected
        ids = range(next_id, next_id + num_new)
        advantages = rng.exponential(size=num_new).tolist()
        buffer.update_advantages(ids, advantages)
        new = zip(ids, advantages, signatures, sizes, strict=True)
        held |= {item_id: (version, a, s, size) for item_id, a, s, size in new}
        next_id += num_new
    assert next_id - len(held) > 400


def test_classes_are_drawn_each_by_itself_and_count_together_for_rarity() -> None:
    sampler = PrioritySampler(4.0, 0.6, 0.05, 1.0, uniform_floor=0.1)
    buffer = ReplayBuffer(sampler, 100, BIG, max_replays=BIG, separate_replayed=True)
    order = [1, 3, 4, 0, 2, 5]
    for indices in (order[:3], order[3:]):
        assert buffer.sample(3, 7, max_replayed=0).items == ()
        items = [[make_trajectory(version=VERSIONS[i], signature=f"s{SIGNATURES[i]}")] for i in indices]
        buffer.insert_all(items, 7)
        if indices == order[:3]:
            buffer.sample(3, 7, max_replayed=0)
    buffer.update_advantages(range(6), [ADVANTAGES[i] for i in order])
    p = defined(PrioritySampler(4.0, 0.6, 0.05, 1.0), VERSIONS, ADVANTAGES, SIGNATURES)
    by_class = []
    for indices in (order[:3], order[3:]):
        whole = sum(p[i] for i in indices)
        by_class.append([0.9 * p[i] / whole + 0.1 / 3 for i in indices])
    counts = Counter(buffer.sample(1, 7, max_replayed=1).item_ids.tolist()[0] for _ in range(NUM_DRAWS))
    assert_frequencies(counts, dict(enumerate(by_class[0])), NUM_DRAWS)
    sample = buffer.sample(6, 7, max_replayed=3)
    assert set(sample.item_ids[:3]) == {3, 4, 5}  # the fresh ones come first
    chances = np.array(by_class[0] + by_class[1])
    np.testing.assert_allclose(sample.weights, chances.min() / chances[sample.item_ids], rtol=1e-9)


def test_the_queue_takes_the_oldest_version_then_the_first_come() -> None:
    buffer = filled(OldestFirst())
    sample = buffer.sample(5, 7)
    assert sample.item_ids.tolist() == [1, 5, 0, 4, 2]
    assert sample.weights.tolist() == [1.0] * 5


def test_a_queue_has_no_classes() -> None:
    with pytest.raises(ValueError, match="separate_replayed is True"):
        ReplayBuffer(OldestFirst(), 10, BIG, separate_replayed=True)


def test_signatures_that_come_and_go_are_counted_as_long_as_they_are_there() -> None:
    buffer = ReplayBuffer(PrioritySampler(rarity_exponent=1.0), 10, BIG, max_staleness=1, max_replays=BIG)
    for version in range(200):
        names = ["same"] + [f"v{version} i{i // 2}" for i in range(4)]
        buffer.insert_all(
            [[make_trajectory(version=version, ticket_id=5 * version + i)] for i in range(5)], version, names
        )
    restored = ReplayBuffer(PrioritySampler(rarity_exponent=1.0), 10, BIG, max_staleness=1, max_replays=BIG)
    restored.load_state_dict(buffer.state_dict(), {t.unroll_id: t for t in buffer.snapshot().trajectories})
    for each in (buffer, restored):
        each.insert_all([[make_trajectory(version=200)]] * 5, 200, ["same"] * 5)
        weights = {item.item_id: item.weight for item in each.sample(10, 200).items}
        # p is 1/6 of the six "same" and 1/2 of two pairs; the smallest p has weight 1
        expected = {995 + i: 1.0 if i in (0, *range(5, 10)) else 1 / 3 for i in range(10)}
        assert weights == pytest.approx(expected)


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
