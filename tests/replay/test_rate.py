"""The samples-per-insert limit: its rule, its average, and that sampling does not wait for ever."""

import itertools
import math

import pytest

from impala_llm.replay.rate import SamplesPerInsert


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.5])
def test_the_rule(ratio: float) -> None:
    min_size, error = 5, 6.0
    for inserts, samples, k in itertools.product(range(20), range(0, 40, 3), (1, 2)):
        limiter = SamplesPerInsert(ratio, min_size, error)
        limiter.record_inserts(inserts)
        limiter.record_samples(samples)
        may_sample = inserts >= min_size and inserts * ratio - samples - k >= min_size * ratio - error
        assert limiter.can_sample(k) == may_sample


@pytest.mark.parametrize(("ratio", "batch"), [(1.0, 1), (0.1, 1), (3.0, 1), (1.0, 16), (0.3, 7), (1 / 3, 8)])
def test_sampling_goes_on_and_holds_the_average(ratio: float, batch: int) -> None:
    limiter = SamplesPerInsert(ratio, batch, error=batch * max(1.0, ratio))
    samples = 0
    for inserts in range(1, 3000):
        limiter.record_inserts(1)
        while limiter.can_sample(batch):
            limiter.record_samples(batch)
            samples += batch
        if inserts >= batch:
            most = inserts * ratio + batch * max(0.0, 1.0 - ratio)
            assert most - batch - 1e-6 < samples <= most + 1e-6


def test_nothing_is_sampled_before_min_size() -> None:
    limiter = SamplesPerInsert(1.0, 3, math.inf)
    limiter.record_inserts(2)
    assert not limiter.can_sample(1)
    limiter.record_inserts(1)
    assert limiter.can_sample(1)


def test_state_survives() -> None:
    limiter = SamplesPerInsert(1.5, 2, 4.0)
    limiter.record_inserts(5)
    limiter.record_samples(3)
    state = limiter.state_dict()
    assert state == {"inserts": 5, "samples": 3}
    restored = SamplesPerInsert(1.5, 2, 4.0)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert [restored.can_sample(k) for k in range(10)] == [limiter.can_sample(k) for k in range(10)]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ratio": 0.0}, "ratio is 0.0"),
        ({"ratio": math.inf}, "ratio is inf"),
        ({"min_size": 0}, "min_size is 0"),
        ({"error": math.nan}, "error is nan"),
        ({"error": 0.0}, "error is 0.0"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SamplesPerInsert(**({"ratio": 1.0, "min_size": 1, "error": 100.0} | settings))
