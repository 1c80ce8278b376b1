"""The samples-per-insert band: its rule, its average, and that nobody waits for ever."""

import itertools
import math

import numpy as np
import pytest

from impala_llm.replay.rate import SamplesPerInsert, smallest_error


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.5])
def test_the_rule(ratio: float) -> None:
    min_size, error = 5, 6.0
    for inserts, samples, k in itertools.product(range(20), range(0, 40, 3), (1, 2)):
        limiter = SamplesPerInsert(ratio, min_size, error)
        limiter.record_inserts(inserts)
        limiter.record_samples(samples)
        may_sample = inserts >= min_size and inserts * ratio - samples - k >= min_size * ratio - error
        may_insert = (inserts + k) * ratio - samples <= min_size * ratio + error
        assert (limiter.can_sample(k), limiter.can_insert(k)) == (may_sample, may_insert)


@pytest.mark.parametrize(
    ("ratio", "sample_batch", "insert_batch"),
    [(1.0, 1, 1), (0.1, 1, 1), (3.0, 1, 1), (1.0, 16, 1), (2.0, 1, 4), (0.3, 7, 5), (1 / 3, 8, 3)],
)
def test_the_narrowest_band_never_stops_and_holds_the_average(
    ratio: float, sample_batch: int, insert_batch: int
) -> None:
    error = smallest_error(ratio, sample_batch, insert_batch)
    rng = np.random.default_rng(0)
    for min_size in (1, 2, 10):
        limiter = SamplesPerInsert(ratio, min_size, error, sample_batch, insert_batch)
        for _ in range(3000):
            may_insert, may_sample = limiter.can_insert(insert_batch), limiter.can_sample(sample_batch)
            assert may_insert or may_sample
            if may_insert and (not may_sample or rng.random() < 0.5):
                limiter.record_inserts(insert_batch)
            else:
                limiter.record_samples(sample_batch)
        state = limiter.state_dict()
        surplus = state["inserts"] * ratio - state["samples"]
        assert abs(surplus - min_size * ratio) <= error + 1e-6


def test_a_band_that_would_deadlock_does_and_is_refused() -> None:
    # S = 1, e = 0.5: after m inserts neither d - 1 >= m - 0.5 nor d + 1 <= m + 0.5 holds
    with pytest.raises(ValueError, match="error is 0.5: .* at least 1"):
        SamplesPerInsert(1.0, 4, 0.5)
    with pytest.raises(ValueError, match="both sides could wait for ever; set it to at least 32"):
        SamplesPerInsert(1.0, 64, 20.0, sample_batch=60, insert_batch=4)
    with pytest.raises(ValueError, match="at least 6"):  # a last insert of 4 must fit before m is reached
        SamplesPerInsert(2.0, 10, 5.0, insert_batch=4)
    SamplesPerInsert(2.0, 10, 6.0, insert_batch=4)


def test_nothing_is_sampled_before_min_size() -> None:
    limiter = SamplesPerInsert(1.0, 3, math.inf)
    limiter.record_inserts(2)
    assert not limiter.can_sample(1)
    limiter.record_inserts(1)
    assert limiter.can_sample(1) and limiter.can_insert(1000)


def test_what_was_evicted_unseen_does_not_block_the_inserts() -> None:
    limiter = SamplesPerInsert(2.0, 2, 4.0)
    limiter.record_inserts(4)
    assert not limiter.can_insert(1)
    limiter.forfeit(2.0)  # one trajectory left before its two samples
    assert limiter.can_insert(1)


def test_state_survives() -> None:
    limiter = SamplesPerInsert(1.5, 2, 4.0)
    limiter.record_inserts(5)
    limiter.record_samples(3)
    limiter.forfeit(1.5)
    state = limiter.state_dict()
    assert state == {"inserts": 5, "samples": 3, "forfeited": 1.5}
    restored = SamplesPerInsert(1.5, 2, 4.0)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert restored.can_insert(1) == limiter.can_insert(1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ratio": 0.0}, "ratio is 0.0"),
        ({"ratio": math.inf}, "ratio is inf"),
        ({"min_size": 0}, "min_size is 0"),
        ({"error": math.nan}, "error is nan"),
        ({"sample_batch": 0}, "sample_batch is 0"),
        ({"insert_batch": 0}, "insert_batch is 0"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplesPerInsert(**({"ratio": 1.0, "min_size": 1, "error": 100.0} | settings))
    with pytest.raises(ValueError, match="num_samples is -1"):
        SamplesPerInsert(1.0, 1, 1.0).forfeit(-1)
