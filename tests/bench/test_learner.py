import pytest

from impala_llm.bench import learner
from impala_llm.bench.frame import BenchError


@pytest.mark.parametrize(
    "options", [{"models": "7b"}, {"rounds": "0"}, {"rounds": "x"}, {"padded_rounds": "-1"}, {"memory": "maybe"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(options)).split('_')[0]}"):
        learner.run(options)


@pytest.mark.parametrize("num_rows", [16, 32])
def test_rows_have_the_mean_and_the_longest_that_are_told(num_rows: int) -> None:
    lengths = learner.lengths(num_rows)
    assert sum(lengths) / num_rows == pytest.approx(300, abs=1)
    assert max(lengths) == 1024 and min(lengths) >= 2


def test_figures_are_of_the_rounds_that_both_took_part_in() -> None:
    times = {"trainer": [2.0, 4.0, 2.0], "bare": [2.0, 3.0, 1.0], "hf_packed": [4.0, 8.0, 8.0], "padded": [20.0]}
    assert learner.figures_of(times) == {"bound_fraction": 0.75, "ratio_hf_packed": 2.0, "ratio_padded": 10.0}
    sizes = dict.fromkeys(times, 1024)
    first, *_, last = learner.rows_of(times, sizes, 100)
    assert first == {"contender": "trainer", "micro_batch": 1024, "tokens_per_s": 50.0, "min": 25.0, "max": 50.0}
    assert last["tokens_per_s"] == 5.0


@pytest.mark.system
def test_all_contenders_find_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    # Several micro-batches, and all in one.
    monkeypatch.setattr(learner, "NUM_ROWS", {"5m": 4})
    monkeypatch.setattr(learner, "SIZES", {"5m": (1024, 1 << 20)})
    figures, rows = learner.run({"rounds": "1", "padded_rounds": "0"})
    assert set(figures) == {"bound_fraction", "ratio_hf_packed", "ratio_hf_packed_2048"}
    assert [row["contender"] for row in rows] == ["trainer", "bare", "hf_packed", "hf_packed_2048"]
