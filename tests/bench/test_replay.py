import numpy as np
import pytest

from impala_llm.bench import replay
from impala_llm.bench.frame import run_bench


@pytest.mark.system
def test_the_benchmark_reports_all_that_is_installed() -> None:
    result = run_bench("replay", {"sizes": "300,1000", "batch": "16", "rounds": "1", "cycles": "2", "signatures": "7"})
    rows = result["rows"]
    assert isinstance(rows, list)
    for size in (300, 1000):
        rates = {row["contender"]: row["cycles_per_s"] for row in rows if row["items"] == size}
        assert "impala_llm" in rates and all(rate > 0 for rate in rates.values())
        peers = [rate for name, rate in rates.items() if name in replay.PEERS]
        figures = {f"ratio_best_{size}": rates["impala_llm"] / max(peers)} if peers else {}
        if "cpprb_three_factors" in rates:
            figures[f"ratio_three_factors_{size}"] = rates["impala_llm"] / rates["cpprb_three_factors"]
        assert ("ratio_worst" in result["figures"]) == bool(peers)
        measured = {k: v for k, v in result["figures"].items() if k.endswith(f"_{size}")}
        assert measured.pop(f"draw_ms_{size}") > 0
        assert measured == pytest.approx(figures)


def test_rates_are_medians_of_the_turns_that_count_and_the_order_rotates() -> None:
    turns: list[str] = []

    def contender(name: str):
        def cycle(values: np.ndarray) -> None:
            assert values.shape == (4,)
            turns.append(name)

        return cycle

    rates = replay.measure({name: contender(name) for name in "ab"}, batch=4, rounds=3, cycles=5)
    assert "".join(turns[::5]) == "abbaabba" and len(turns) == 40 and set(rates) == {"a", "b"}


def test_a_cycle_inserts_as_much_as_it_draws_into_a_full_buffer_at_the_next_version() -> None:
    draw_times: list[float] = []
    cycle = replay.buffer_cycle(size=100, batch=8, num_signatures=3, num_cycles=20, draw_times=draw_times)
    newest = set()
    for _ in range(20):
        sample = cycle(np.ones(8))
        assert len(set(sample.item_ids.tolist())) == 8
        newest.add(int(max(t.newest_version for members in sample.trajectories for t in members)))
        assert sample.item_ids.max() < 100 + 20 * 8
    assert len(newest) > 5 and len(draw_times) == 20
