"""The samples-per-insert limit: its rule, its average, and that sampling does not wait for ever."""

import itertools
import math

import pytest

from impala_llm.replay.rate import SamplesPerInsert


def of_ratio(ratio: float) -> SamplesPerInsert:
    """A limiter for batches of 4, as the learner makes it."""
    return SamplesPerInsert(ratio, 4, 4 * max(1.0, ratio))


def use(limiter: SamplesPerInsert, num_inserts: int) -> int:
    """Insert one by one, and sample batches of 4 as soon as they are allowed. Returns how many samples were drawn."""
    samples = 0
    for _ in range(num_inserts):
        limiter.record_inserts(1)
        while limiter.can_sample(4):
            limiter.record_samples(4)
            samples += 4
    return samples


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
    assert state == {"inserts": 5, "surplus": 4.5}
    restored = SamplesPerInsert(1.5, 2, 4.0)
    restored.load_state_dict(state)
    assert restored.state_dict() == state
    assert [restored.can_sample(k) for k in range(10)] == [limiter.can_sample(k) for k in range(10)]


@pytest.mark.parametrize(("before", "now"), [(4.0, 1.0), (1.0, 4.0), (0.5, 2.0), (2.5, 0.3)])
def test_another_ratio_counts_from_where_the_state_was_saved(before: float, now: float) -> None:
    """Neither waits it for ever, nor makes it up for inserts of before."""
    saved, limiter = of_ratio(before), of_ratio(now)
    use(saved, num_inserts=400)
    limiter.load_state_dict(saved.state_dict())
    assert use(limiter, num_inserts=40) == pytest.approx(40 * now, abs=4 * max(1.0, before, now))


def test_how_many_inserts_are_missing_is_known() -> None:
    for ratio, num_inserts in itertools.product((0.3, 1.0, 2.5), (0, 2, 7)):
        limiter = of_ratio(ratio)
        use(limiter, num_inserts)
        missing = limiter.num_missing(4)
        assert missing > 0
        limiter.record_inserts(missing - 1)
        assert not limiter.can_sample(4)
        limiter.record_inserts(1)
        assert limiter.can_sample(4) and limiter.num_missing(4) == 0


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
