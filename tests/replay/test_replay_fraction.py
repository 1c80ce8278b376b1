"""The fraction of replayed data: its rule, its bounds, its rounding."""

import math

import pytest

from impala_llm.replay import ReplayFraction


def test_it_falls_by_a_factor_and_rises_by_a_step() -> None:
    fraction = ReplayFraction(target=0.5, max_fraction=0.8, min_fraction=0.1, recovery=0.05)
    assert fraction.fraction == 0.8
    fraction.update(0.4)
    assert fraction.fraction == pytest.approx(0.8 * 0.4 / 0.5)
    fraction.update(0.01)  # never by more than half at once
    assert fraction.fraction == pytest.approx(0.32)
    fraction.update(0.5)
    assert fraction.fraction == pytest.approx(0.37)
    for _ in range(10):
        fraction.update(1.0)
    assert fraction.fraction == 0.8
    for _ in range(10):
        fraction.update(0.1)
    assert fraction.fraction == 0.1


def test_it_settles_where_the_target_is_met() -> None:
    fraction = ReplayFraction(target=0.6, max_fraction=1.0)
    seen = []
    for _ in range(400):
        fraction.update(1.0 - 0.8 * fraction.fraction)  # met at a fraction of 1/2
        seen.append(fraction.fraction)
    assert sum(seen[200:]) / 200 == pytest.approx(0.5, abs=0.02)


def test_a_target_of_zero_leaves_it_alone() -> None:
    fraction = ReplayFraction(target=0.0, max_fraction=0.5)
    fraction.update(1e-6)
    assert fraction.fraction == 0.5


@pytest.mark.parametrize("num_items", [1, 3, 16])
def test_the_average_is_the_share_however_small_the_batches(num_items: int) -> None:
    fraction = ReplayFraction(target=0.0, max_fraction=0.3)
    counts = [fraction.num_replayed(num_items) for _ in range(1000)]
    assert sum(counts) == pytest.approx(0.3 * num_items * 1000, abs=1.0)
    assert set(counts) <= {math.floor(0.3 * num_items), math.ceil(0.3 * num_items)}


def test_all_and_nothing() -> None:
    assert ReplayFraction(target=0.0, max_fraction=1.0).num_replayed(7) == 7
    assert ReplayFraction(target=0.0, max_fraction=0.0).num_replayed(7) == 0


def test_state_survives() -> None:
    fraction, restored = (ReplayFraction(target=0.5, max_fraction=0.7) for _ in range(2))
    fraction.update(0.3)
    fraction.num_replayed(3)
    restored.load_state_dict(fraction.state_dict())
    assert restored.state_dict() == fraction.state_dict()
    assert [restored.num_replayed(3) for _ in range(5)] == [fraction.num_replayed(3) for _ in range(5)]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"target": 1.5}, "target is 1.5"),
        ({"max_fraction": -0.1}, "max_fraction is -0.1"),
        ({"min_fraction": 0.9}, "min_fraction is 0.9: it must not exceed max_fraction, 0.5"),
        ({"recovery": 0.0}, "recovery is 0.0"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ReplayFraction(**({"target": 0.5, "max_fraction": 0.5} | settings))
    for value in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="effective_sample_size is"):
            ReplayFraction(target=0.5, max_fraction=0.5).update(value)
