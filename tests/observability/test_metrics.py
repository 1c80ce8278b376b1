import math
import re

import numpy as np
import pytest
import torch

from impala_llm.observability.metrics import METRICS, STAGES, Aggregation, MetricError, MetricLog, describe
from impala_llm.observability.stages import StageTimer


def test_every_name_has_the_form_part_slash_what_and_a_meaning() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z0-9]+/[a-z0-9_]+", name), name
        assert metric.name == name
        assert metric.meaning


def test_an_undeclared_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(MetricError, match="rollout/score"):
        MetricLog().add("rollout/scores", 1.0)
    with pytest.raises(MetricError, match="unknown metric"):
        MetricLog().merge({"nowhere/at_all": [1.0, 1.0]})


def test_the_environment_chooses_its_own_names_under_env() -> None:
    log = MetricLog()
    log.add("env/invalid_actions", 2.0)
    log.add("env/invalid_actions", 4.0)
    assert log.summary() == {"env/invalid_actions": 3.0}
    with pytest.raises(MetricError):
        log.add("env/", 1.0)


def test_a_mean_is_weighted_by_its_denominator() -> None:
    log = MetricLog()
    log.add("loss/policy", 1.0, weight=30)
    log.add("loss/policy", 4.0, weight=10)
    assert log.summary()["loss/policy"] == pytest.approx((1.0 * 30 + 4.0 * 10) / 40)


def test_each_kind_combines_as_declared() -> None:
    log = MetricLog()
    expected = {
        "ratio/max": (Aggregation.MAX, 3.0),
        "staleness/newest": (Aggregation.MIN, 1.0),
        "pipeline/refused": (Aggregation.SUM, 6.0),
        "learner/version": (Aggregation.LAST, 2.0),
        "rollout/score": (Aggregation.MEAN, 2.0),
    }
    for name, (kind, _) in expected.items():
        assert describe(name).kind is kind
        for value in (1.0, 3.0, 2.0):
            log.add(name, value)
    assert log.summary() == {name: value for name, (_, value) in expected.items()}


def test_figures_of_a_batch_are_those_of_all_its_parts_and_ranks_together() -> None:
    values, other = np.array([1.0, 2.0, 6.0, 1.5, 0.5]), np.array([1.0, 1.0, 4.0, 2.0, 1.0])
    rank, log = MetricLog(), MetricLog()
    for into, part in ((rank, slice(0, 1)), (log, slice(1, 3)), (log, slice(3, 5))):
        moments = [(x.mean(), (x**2).mean()) for x in (values[part], values[part] - other[part])]
        size = len(values[part])
        into.add("advantage/std", moments[0], size)
        into.add("ratio/ess", moments[0], size)
        into.add("value/explained_variance", (*moments[0], *moments[1]), size)
    log.merge(rank.state())
    assert log.summary() == pytest.approx(
        {
            "advantage/std": values.std(),
            "ratio/ess": values.sum() ** 2 / (5 * (values**2).sum()),
            "value/explained_variance": 1 - (values - other).var() / values.var(),
        }
    )


def test_figures_of_what_does_not_vary_are_zero() -> None:
    log = MetricLog()
    log.add("advantage/std", (0.1, 0.01), 3)
    log.add("ratio/ess", (0.0, 0.0), 3)
    log.add("value/explained_variance", (0.7, 0.49, 0.2, 0.05), 3)
    assert log.summary() == {"advantage/std": 0.0, "ratio/ess": 0.0, "value/explained_variance": 0.0}


def test_small_targets_are_explained_as_well_as_large_ones() -> None:
    log = MetricLog()
    log.add("value/explained_variance", (2e-4, 8e-8, 0.0, 0.0), 4)  # of 0, 4e-4, 0, 4e-4, by a critic without errors
    assert log.summary() == {"value/explained_variance": 1.0}


def test_a_value_that_does_not_fit_the_metric_is_refused() -> None:
    with pytest.raises(MetricError, match="'advantage/std'.* 2 numbers"):
        MetricLog().add("advantage/std", 1.0)
    with pytest.raises(MetricError, match="'loss/policy'.* 1 number"):
        MetricLog().add("loss/policy", (1.0, 2.0))


def test_weight_zero_leaves_no_trace_and_a_negative_or_missing_one_is_refused() -> None:
    log = MetricLog()
    log.add("loss/policy", math.nan, weight=0)
    assert log.summary() == {}
    for weight in (-1.0, math.nan):
        with pytest.raises(MetricError, match="weight"):
            log.add("loss/policy", 1.0, weight=weight)


def test_a_state_holds_plain_numbers_whatever_was_added() -> None:
    """As a credit of the user's may return tensors."""
    log = MetricLog()
    log.add("rollout/score", torch.tensor(1.0), torch.tensor([3.0]))  # type: ignore[arg-type]
    [numbers] = log.state().values()
    assert numbers == [3.0, 3.0] and all(type(number) is float for number in numbers)


def test_flush_starts_over() -> None:
    log = MetricLog()
    log.update({"rollout/score": 0.5, "rollout/episodes": 1.0})
    assert log.flush() == {"rollout/score": 0.5, "rollout/episodes": 1.0}
    assert log.flush() == {}


def test_merging_two_logs_is_adding_all_values_to_one() -> None:
    names = ("loss/policy", "ratio/max", "staleness/newest", "pipeline/refused")
    one, two, both = MetricLog(), MetricLog(), MetricLog()
    for log, values in ((one, (0.25, 1.5)), (two, (3.0, -2.0, 0.5))):
        for value in values:
            for name in names:
                log.add(name, value, weight=2.0)
                both.add(name, value, weight=2.0)
    one.merge(two.state())
    assert one.summary() == pytest.approx(both.summary())


def test_merging_leaves_the_given_state_alone() -> None:
    source, log = MetricLog(), MetricLog()
    source.add("pipeline/refused", 1.0)
    state = source.state()
    log.merge(state)
    log.add("pipeline/refused", 1.0)
    assert state == {"pipeline/refused": [1.0, 1.0]}


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_shares_of_a_step_sum_to_one_with_the_rest_unaccounted() -> None:
    clock = FakeClock()
    timer = StageTimer(clock)
    for stage, seconds in (("idle", 1.0), ("forward", 2.0), ("backward", 3.0), ("forward", 1.0), ("receive", 0.25)):
        with timer.stage(stage):
            clock.now += seconds
    for stage in ("pack", "publish", "log"):
        with timer.stage(stage):
            clock.now += 0.25
    clock.now += 2.0
    metrics = timer.end_step()
    assert metrics["time/step_s"] == 10.0
    assert metrics["time/idle_share"] == pytest.approx(0.1)
    assert metrics["time/forward_share"] == pytest.approx(0.3)
    assert metrics["time/backward_share"] == pytest.approx(0.3)
    assert metrics["time/unaccounted_share"] == pytest.approx(0.2)
    shares = {f"time/{stage}_share" for stage in STAGES} | {"time/unaccounted_share"}
    assert sum(metrics[name] for name in shares) == pytest.approx(1.0)
    assert metrics["time/overhead_share"] == pytest.approx(1.0 / 9.0), "of the time that is not idle"
    assert set(metrics) == shares | {"time/step_s", "time/overhead_share"}
    assert set(metrics) <= set(METRICS)


def test_the_next_step_begins_where_the_last_one_ended() -> None:
    clock = FakeClock()
    timer = StageTimer(clock)
    with timer.stage("pack"):
        clock.now += 5.0
    timer.end_step()
    clock.now += 3.0
    with timer.stage("log"):
        clock.now += 1.0
    metrics = timer.end_step()
    assert metrics["time/step_s"] == 4.0
    assert metrics["time/pack_share"] == 0.0
    assert metrics["time/unaccounted_share"] == pytest.approx(0.75)


def test_a_stage_that_raises_is_still_charged() -> None:
    clock = FakeClock()
    timer = StageTimer(clock)
    with pytest.raises(RuntimeError), timer.stage("pack"):
        clock.now += 1.0
        raise RuntimeError
    assert timer.end_step()["time/pack_share"] == 1.0


def test_unknown_and_overlapping_stages_are_refused() -> None:
    timer = StageTimer(FakeClock())
    with pytest.raises(MetricError, match="unknown stage"), timer.stage("lunch"):
        pass
    with pytest.raises(MetricError, match="inside 'forward'"), timer.stage("forward"), timer.stage("pack"):
        pass
    with timer.stage("forward"), pytest.raises(MetricError, match="leave the stage"):
        timer.end_step()
