import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from impala_llm.observability.metrics import MetricError
from impala_llm.observability.tensorboard import METRICS_FILE, MetricWriter


def read_lines(directory: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_both_files_hold_the_same_numbers(tmp_path: Path) -> None:
    steps = {1: {"rollout/score": 0.25, "loss/policy": -0.5}, 2: {"rollout/score": 0.5, "env/invalid_actions": 2.0}}
    with MetricWriter(tmp_path / "run") as writer:
        for step, metrics in steps.items():
            writer.write(step, metrics)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"rollout/score", "loss/policy", "env/invalid_actions"}
    assert [(event.step, event.value) for event in events.Scalars("rollout/score")] == [(1, 0.25), (2, 0.5)]
    lines = read_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line, metrics in zip(lines, steps.values(), strict=True):
        assert {name: value for name, value in line.items() if "/" in name} == metrics


def test_a_step_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"rollout/score": 1.0})
        assert read_lines(tmp_path)[0]["rollout/score"] == 1.0


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricWriter(tmp_path) as writer:
            writer.write(step, {"rollout/score": 0.0})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"loss/policy": math.nan, "ratio/max": math.inf})
    line = read_lines(tmp_path)[0]
    assert line["loss/policy"] is None
    assert line["ratio/max"] is None


def test_an_undeclared_name_writes_nothing(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(MetricError, match="unknown metric 'rollout/happiness'"):
            writer.write(1, {"rollout/score": 1.0, "rollout/happiness": 1.0})
        assert read_lines(tmp_path) == []
