"""The benchmark of checkpoints, on a model of one layer."""

from pathlib import Path

import pytest

from impala_llm.bench import checkpoint
from impala_llm.bench.frame import BenchError


@pytest.mark.parametrize("options", [{"layers": "x"}, {"layers": "0"}, {"steps": "1"}, {"rounds": "0"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options))} is"):
        checkpoint.run(options)


def test_figures_follow_from_the_times() -> None:
    times = {
        "none": [(10.0, 10.0, 0.0), (12.0, 12.0, 0.0), (10.0, 10.0, 0.0)],
        "ours": [(10.6, 11.0, 5e6), (12.6, 13.0, 5e6), (10.5, 12.0, 5e6)],
        "torch_save": [(13.0, 13.0, 4e6)] * 3,
        "async_save": [(11.2, 14.0, 4e6), (13.2, 14.0, 4e6), (11.2, 14.0, 4e6)],
    }
    figures = checkpoint.figures_of(times)
    assert figures["cost_s_ours"] == pytest.approx(0.6) and figures["share_ours"] == pytest.approx(0.01)
    assert figures["ratio_torch_save"] == pytest.approx(3.0 / 0.6)
    assert figures["ratio_worst"] == figures["ratio_async_save"] == pytest.approx(2.0)
    rows = {row["contender"]: row for row in checkpoint.rows_of(times)}
    assert rows["ours"]["left_to_write_s"] == pytest.approx(0.4) and rows["ours"]["megabytes"] == 5.0


@pytest.mark.system
@pytest.mark.timeout(240)
def test_all_contenders_write_and_leave_nothing(tmp_path: Path) -> None:
    options = {"layers": "1", "tokens": "4", "steps": "2", "rounds": "1", "folder": str(tmp_path)}
    figures, rows = checkpoint.run(options)
    assert {row["contender"] for row in rows} == {"none", "ours", "torch_save", "async_save"}
    assert all(row["megabytes"] > 300 for row in rows if row["contender"] != "none")
    assert figures["ratio_worst"] > 0 and list(tmp_path.iterdir()) == []
