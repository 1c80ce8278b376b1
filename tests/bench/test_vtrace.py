import importlib.util
import math

import pytest

from impala_llm.bench import vtrace
from impala_llm.bench.frame import BenchError
from tests.bench.preloading import preloaded


@pytest.mark.parametrize("options", [{"steps": "x"}, {"rows": "0"}, {"rounds": "-1"}, {"rounds": "1.5"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options))} is"):
        vtrace.run(options)


def test_figures_follow_from_the_times() -> None:
    times = {
        "ours": [(0.001, 0.1), (0.002, 0.1), (0.001, 0.1)],
        "ours_packed": [(0.0005, 0.1), (0.0004, 0.3), (0.0009, 0.2)],
        "torchrl": [(0.008, 0.1), (0.01, 0.1), (0.02, 0.1)],
        "rlax": [(0.002, 0.1), (0.002, 0.1), (0.002, 0.1)],
    }
    assert vtrace.figures_of(times, 64) == pytest.approx(
        {"packed_ms_64": 0.5, "ratio_torchrl_64": 8.0, "ratio_rlax_64": 2.0}
    )
    assert vtrace.rows_of(times, 64)[1] == pytest.approx(
        {"steps": 64, "contender": "ours_packed", "ms": 0.5, "least_ms": 0.4, "most_ms": 0.9, "clock_ms": 200.0}
    )


def test_without_peers_their_figures_are_missing() -> None:
    assert list(vtrace.figures_of({"ours": [(0.001, 0.1)], "ours_packed": [(0.001, 0.1)]}, 9)) == ["packed_ms_9"]


@pytest.mark.system
def test_a_small_run_measures_whatever_is_installed() -> None:
    installed = [peer for peer in vtrace.PEERS if importlib.util.find_spec(peer)]
    # Not rlax: what JAX has begun does not survive a fork.
    with preloaded(["impala_llm.algorithms.vtrace", *(["torchrl.objectives"] if "torchrl" in installed else [])]):
        figures, rows = vtrace.run({"steps": "16,64", "rows": "4", "rounds": "2"})
    assert {(row["steps"], row["contender"]) for row in rows} == {
        (steps, name) for steps in (16, 64) for name in ("ours", "ours_packed", *installed)
    }
    assert len(figures) == 2 + (1 + 2 * len(installed) if installed else 0)
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
