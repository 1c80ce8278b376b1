from pathlib import Path

import pytest

from impala_llm.bench import weights
from impala_llm.bench._weight_export import measure_export
from impala_llm.bench._weight_peers import tensor_shapes
from impala_llm.bench.frame import BenchError
from tests.bench.preloading import preloaded


@pytest.mark.parametrize("megabytes", [1, 25, 500, 2048])
def test_the_tensors_have_the_size_asked_for(megabytes: int) -> None:
    shapes = tensor_shapes(megabytes)
    num_bytes = 0
    for dtype, shape in shapes.values():
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        num_bytes += size
    assert num_bytes == pytest.approx(megabytes * 1e6, rel=0.01 if megabytes > 1 else 1)
    assert len({dtype for dtype, _ in shapes.values()}) == 2


@pytest.mark.parametrize("options", [{"megabytes": "x"}, {"megabytes": "0"}, {"rounds": "0"}, {"megabytes": "1,,2"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options))} is"):
        weights.run(options)


def test_an_answer_that_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(BenchError, match="--bfloat16 is 'on': it takes yes or no"):
        weights.run({"bfloat16": "on"})


def test_figures_follow_from_the_times() -> None:
    times = {
        "bound_whole": [(1.0, 1.0, 1.0), (3.0, 1.0, 1.0), (3.0, 1.0, 1.0)],
        "bound_tensors": [(2.0, 1.0, 1.0)] * 3,
        "ours": [(4.0, 3.0, 1.0), (8.0, 6.0, 2.0), (2.0, 1.0, 1.0)],
        "ours_mapped": [(1.0, 0.5, 0.25)] * 3,
        "safetensors": [(12.0, 1.0, 1.0)] * 3,
        "gloo": [(6.0, 6.0, 6.0)] * 3,
    }
    assert weights.figures_of(times, 25) == {
        "ratio_25": 1.5,
        "ratio_safetensors_25": 3.0,
        "ratio_gloo_25": 1.5,
        "bound_fraction_25": 0.5,
        "publish_ms_25": 3000.0,
        "read_ms_25": 1000.0,
        "mapped_read_ms_25": 250.0,
    }


@pytest.mark.system
@pytest.mark.xdist_group("bench_weights")
def test_a_small_run_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").iterdir())
    figures, rows = weights.run({"megabytes": "3", "rounds": "2"})
    assert set(figures) == {
        "ratio_worst",
        "ratio_3",
        "bound_fraction_3",
        "ratio_safetensors_3",
        "ratio_torch_mmap_3",
        "ratio_gloo_3",
        "ratio_zmq_3",
        "publish_ms_3",
        "read_ms_3",
        "mapped_read_ms_3",
    }
    assert all(value > 0 for value in figures.values())
    assert {row["contender"] for row in rows} == {
        "bound_whole",
        "bound_tensors",
        "ours",
        "ours_mapped",
        "safetensors",
        "torch_mmap",
        "gloo",
        "zmq",
    }
    left = {
        path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("impala_llm-bench-weights")
    }
    assert not left


@pytest.mark.system
@pytest.mark.xdist_group("bench_weights")
def test_publishing_in_bfloat16_is_measured_by_one_rank_and_by_two() -> None:
    before = set(Path("/dev/shm").iterdir())
    with preloaded(["impala_llm.bench._weight_export"]):
        figures, rows = measure_export(2, "5m")
    names = ("bound_fraction_bfloat16", "publish_ms_bfloat16", "held_ms_bfloat16")
    assert set(figures) == {f"{name}{suffix}" for name in names for suffix in ("", "_threads", "_fsdp2")}
    assert all(value > 0 for value in figures.values())
    assert [row["ranks"] for row in rows] == [1, 1, 2]
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [path for path in left if path.name.startswith("impala_llm-bench-weights")]
