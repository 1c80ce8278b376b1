import pytest

from impala_llm.bench.frame import BenchError, run_bench

SMALL = {"rounds": "1", "episodes": "2", "tokens": "4", "hidden": "16", "processes": "1"}


@pytest.mark.system
def test_both_ways_play_the_same_episodes() -> None:
    """That their tokens agree the benchmark checks itself."""
    result = run_bench("gateway", SMALL)
    assert set(result["figures"]) == {"gateway_over_direct", "own_over_direct"}
    assert all(value > 0 for value in result["figures"].values())
    assert [row["way"] for row in result["rows"]] == ["direct", "gateway"]


@pytest.mark.parametrize("option", [{"rounds": "0"}, {"episodes": "many"}])
def test_malformed_options_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(option))} is"):
        run_bench("gateway", SMALL | option)
