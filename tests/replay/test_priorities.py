"""Frequencies of draws against the probabilities of the definition, computed in plain Python."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from impala_llm.replay.order import Order
from impala_llm.replay.priorities import OldestFirst, PrioritySampler

VERSIONS = [3, 0, 7, 7, 5, 1]
ADVANTAGES = [0.0, 0.3, 0.05, 1.2, 0.7, 0.3]
SLOTS = [0, 1, 1, 2, 1, 2]
NUM_DRAWS = 20_000


def filled(order: Order, versions: list[int], advantages: list[float], slots: list[int]) -> Order:
    """An order of these items, whose ids are their rows."""
    order.append(np.arange(len(versions)), np.array(versions), np.array(slots))
    order.set_advantages(np.arange(len(versions)), np.array(advantages))
    return order


def one(*numbers: int) -> list[np.ndarray]:
    return [np.array([number]) for number in numbers]


def small(sampler: PrioritySampler, versions: list[int] = VERSIONS) -> Order:
    return filled(sampler.order(separate=False), versions, ADVANTAGES, SLOTS)


def defined(
    sampler: PrioritySampler, versions: list[int], advantages: list[float], slots: list[int], version: int
) -> list[float]:
    """P_i as defined, with the age in full."""
    p = []
    for v, advantage, slot in zip(versions, advantages, slots, strict=True):
        recency = math.exp(-(version - v) / sampler.recency_tau)
        size = (advantage + sampler.advantage_epsilon) ** sampler.advantage_exponent
        p.append(recency * size * slots.count(slot) ** -sampler.rarity_exponent)
    floor = sampler.uniform_floor
    return [(1 - floor) * x / sum(p) + floor / len(p) for x in p]


def probabilities(sampler: PrioritySampler) -> list[float]:
    return defined(sampler, VERSIONS, ADVANTAGES, SLOTS, version=9)


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
    """Each within 4.5 standard errors, and all together by chi-square within 4.5 of its own."""
    assert set(counts) <= set(expected)
    chi_square = 0.0
    for outcome, p in expected.items():
        error = math.sqrt(p * (1 - p) / draws)
        assert abs(counts[outcome] / draws - p) <= 4.5 * error + 1e-12, (outcome, counts[outcome] / draws, p)
        chi_square += (counts[outcome] - draws * p) ** 2 / (draws * p)
    freedom = len(expected) - 1
    assert chi_square <= freedom + 4.5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_first_draws_follow_the_definition(sampler: PrioritySampler) -> None:
    order, rng = small(sampler), np.random.default_rng(0)
    counts = Counter(int(order.draw(1, rng).rows[0]) for _ in range(NUM_DRAWS))
    assert_frequencies(counts, dict(enumerate(probabilities(sampler))), NUM_DRAWS)


@pytest.mark.parametrize("sampler", SAMPLERS[4:])
@pytest.mark.parametrize("num_items", [2, 3])
def test_later_draws_follow_the_definition_without_replacement(sampler: PrioritySampler, num_items: int) -> None:
    order, rng = small(sampler), np.random.default_rng(1)
    counts = Counter(tuple(order.draw(num_items, rng).rows.tolist()) for _ in range(NUM_DRAWS))
    p = probabilities(sampler)
    expected = {}
    for rows in itertools.permutations(range(len(p)), num_items):
        left, chance = 1.0, 1.0
        for row in rows:
            chance *= p[row] / left
            left -= p[row]
        expected[rows] = chance
    assert_frequencies(counts, expected, NUM_DRAWS)


@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("num_slots", [1, 7, 400])
def test_a_large_forest_draws_by_the_definition(floor: float, num_slots: int) -> None:
    """Inner levels, many and few signatures, after a life of additions, removals and changes."""
    sampler = PrioritySampler(6.0, 0.6, 0.01, 0.7, floor)
    order, rng = sampler.order(separate=False), np.random.default_rng(2)
    items: list[tuple[int, int, float, int]] = []  # item_id, version, |A|, slot
    counts: Counter[int] = Counter()
    for item_id in range(3000):
        slot = int(rng.integers(num_slots))
        counts[slot] += 1
        order.append(*one(item_id, item_id // 100, slot))
        items.append((item_id, item_id // 100, 0.0, slot))
        row, value = len(items) - 1, float(rng.exponential())
        order.set_advantages(np.array([row]), np.array([value]))
        items[row] = (*items[row][:2], value, slot)
        if rng.random() < 0.85 and len(items) > 400:
            row = int(rng.integers(len(items)))
            gone, last = items[row], items.pop()
            if gone != last:
                items[row] = last
            counts[gone[3]] -= 1
            order.remove(*one(row))
    _, versions, advantages, slots = map(list, zip(*items, strict=True))
    p = defined(sampler, versions, advantages, slots, version=30)
    assert len(items) > 600
    first: Counter[int] = Counter()
    for _ in range(NUM_DRAWS):
        first[int(order.draw(1, rng).rows[0])] += 1
    likely = {row: chance for row, chance in enumerate(p) if chance * NUM_DRAWS >= 5}
    rest = Counter({row: n for row, n in first.items() if row in likely})
    rest[-1] = NUM_DRAWS - rest.total()
    expected = likely if len(likely) == len(p) else likely | {-1: 1 - sum(likely.values())}
    assert_frequencies(+rest, expected, NUM_DRAWS)
    # inclusion among 40 of them, against a plain sequential draw
    ours, plain = np.zeros(len(p)), np.zeros(len(p))
    num_batches = 1500
    for _ in range(num_batches):
        draw = order.draw(40, rng)
        assert len(set(draw.rows.tolist())) == 40
        ours[draw.rows] += 1
        plain[rng.choice(len(p), 40, replace=False, p=p)] += 1
    both = (ours + plain) / (2 * num_batches)
    error = np.sqrt(2 * both * (1 - both) / num_batches)
    assert (np.abs(ours - plain) / num_batches <= 4.5 * error + 5 / num_batches).all()
    np.testing.assert_allclose(np.exp(draw.log_density), len(p) * np.array(p)[draw.rows], rtol=1e-9)
    # what a full buffer gives up first
    priority = [
        v / 6.0 + 0.6 * math.log(a + 0.01) - 0.7 * math.log(counts[s])
        for v, a, s in zip(versions, advantages, slots, strict=True)
    ]
    assert order.remove_lowest(1).tolist() == [int(np.argmin(priority))]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_densities_are_n_times_the_probability(sampler: PrioritySampler) -> None:
    draw = small(sampler).draw(6, np.random.default_rng(2))
    p = probabilities(sampler)
    np.testing.assert_allclose(np.exp(draw.log_density), [6 * p[row] for row in draw.rows], rtol=1e-9)
    assert sorted(draw.rows) == list(range(6))


def test_recency_depends_on_differences_of_versions_only() -> None:
    sampler = SAMPLERS[4]
    later = [v + 10**6 for v in VERSIONS]
    draws = [small(sampler, versions).draw(6, np.random.default_rng(3)) for versions in (VERSIONS, later)]
    assert draws[0].rows.tolist() == draws[1].rows.tolist()
    np.testing.assert_allclose(draws[0].log_density, draws[1].log_density, atol=1e-6)


@pytest.mark.parametrize("versions", [[0, 100_000, 200_000, 200_000, 0, 5], [0, 5, 100_000, 200_000, 200_000, 0]])
def test_extreme_ages_neither_overflow_nor_vanish(versions: list[int]) -> None:
    draw = small(PrioritySampler(recency_tau=1.0), versions).draw(6, np.random.default_rng(4))
    assert np.isfinite(draw.log_density).all()
    assert [versions[row] for row in draw.rows[:4]] == [200_000, 200_000, 100_000, 5]
    assert sorted(draw.rows) == list(range(6))


def test_draws_in_logarithms_follow_the_definition_too() -> None:
    """Two items hold nearly all of the mass; what is left is e^-600 of it, and still drawn in proportion."""
    sampler = PrioritySampler(recency_tau=1.0, rarity_exponent=1.0)
    order = filled(sampler.order(separate=False), [0, 1, 600, 601], [0.0] * 4, [0, 0, 1, 1])
    rng = np.random.default_rng(5)
    counts = Counter(int(order.draw(3, rng).rows[2]) for _ in range(NUM_DRAWS))
    assert_frequencies(counts, {0: 1 / (1 + math.e), 1: math.e / (1 + math.e)}, NUM_DRAWS)


def test_an_exponent_that_no_sum_can_hold() -> None:
    order = filled(PrioritySampler(rarity_exponent=2000.0).order(separate=False), [0] * 4, [0.0] * 4, [0, 0, 0, 0])
    rng = np.random.default_rng(6)
    counts = Counter(int(order.draw(1, rng).rows[0]) for _ in range(NUM_DRAWS))
    assert_frequencies(counts, {row: 0.25 for row in range(4)}, NUM_DRAWS)


def test_versions_go_on_for_ever() -> None:
    """The common factor of all masses moves on; only differences of versions count."""
    sampler = PrioritySampler(recency_tau=0.5)
    order, rng, held = sampler.order(separate=False), np.random.default_rng(7), []
    for version in range(3000):
        if len(held) == 5:
            row = held.index(version - 5)
            order.remove(*one(row))
            held[row] = held[-1]
            held.pop()
        held.append(version)
        order.append(*one(version, version, 0))
    p = defined(sampler, held, [0.0] * 5, [0] * 5, version=3000)
    draw = order.draw(5, rng)
    np.testing.assert_allclose(np.exp(draw.log_density), 5 * np.array(p)[draw.rows], rtol=1e-9)


@pytest.mark.parametrize("num_slots", [1, 300])
def test_sums_do_not_drift(num_slots: int) -> None:
    """Half a million changes over twenty orders of magnitude leave the densities where the definition has them."""
    sampler = PrioritySampler(recency_tau=50.0, advantage_exponent=4.0, advantage_epsilon=1e-3, rarity_exponent=0.5)
    rng = np.random.default_rng(8)
    versions, slots = rng.integers(100, size=2000).tolist(), rng.integers(num_slots, size=2000).tolist()
    values = rng.random(2000)
    order = filled(sampler.order(separate=False), versions, values.tolist(), slots)
    for _ in range(2000):
        rows = rng.integers(2000, size=250)
        new = 10.0 ** rng.uniform(-4, 4, size=250)
        order.set_advantages(rows, new)
        for row, value in zip(rows.tolist(), new.tolist(), strict=True):
            values[row] = value
        order.draw(16, rng)
    order.set_advantages(np.arange(2000), np.minimum(values, 1e-2))
    p = defined(sampler, versions, np.minimum(values, 1e-2).tolist(), slots, version=100)
    draw = order.draw(2000, rng)
    np.testing.assert_allclose(np.exp(draw.log_density), 2000 * np.array(p)[draw.rows], rtol=1e-10)


def test_classes_are_drawn_each_by_itself_and_count_together_for_rarity() -> None:
    sampler = PrioritySampler(4.0, 0.6, 0.05, 1.0, uniform_floor=0.1)
    order, rng = filled(sampler.order(separate=True), VERSIONS, ADVANTAGES, SLOTS), np.random.default_rng(9)
    order.set_replayed(np.array([1, 3, 4]))
    plain = PrioritySampler(4.0, 0.6, 0.05, 1.0)
    p = defined(plain, VERSIONS, ADVANTAGES, SLOTS, version=9)
    for replayed, rows in ((False, [0, 2, 5]), (True, [1, 3, 4])):
        whole = sum(p[row] for row in rows)
        expected = {row: 0.9 * p[row] / whole + 0.1 / 3 for row in rows}
        draw = order.draw(3, rng, replayed)
        np.testing.assert_allclose(np.exp(draw.log_density), [3 * expected[row] for row in draw.rows], rtol=1e-9)
        counts = Counter(int(order.draw(1, rng, replayed).rows[0]) for _ in range(NUM_DRAWS))
        assert_frequencies(counts, expected, NUM_DRAWS)


def test_the_queue_takes_the_oldest_version_then_the_first_come() -> None:
    order = filled(OldestFirst().order(separate=False), VERSIONS, ADVANTAGES, SLOTS)
    draw = order.draw(5, np.random.default_rng(5))
    assert draw.rows.tolist() == [1, 5, 0, 4, 2]
    assert draw.log_density.tolist() == [0] * 5
    order.remove(*one(1))  # the last row takes its place
    assert order.draw(3, np.random.default_rng(5)).rows.tolist() == [1, 0, 4]


def test_a_queue_has_no_classes() -> None:
    with pytest.raises(ValueError, match="separate_replayed is True"):
        OldestFirst().order(separate=True)


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
