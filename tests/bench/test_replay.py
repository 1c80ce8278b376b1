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
        assert {k: v for k, v in result["figures"].items() if k.endswith(f"_{size}")} == pytest.approx(figures)


def test_rates_are_medians_of_the_turns_that_count() -> None:
    calls = {"a": 0, "b": 0}

    def contender(name: str):
        def cycle(values: np.ndarray) -> None:
            assert values.shape == (4,)
            calls[name] += 1

        return cycle

    rates = replay.measure({name: contender(name) for name in calls}, batch=4, rounds=3, cycles=5)
    assert calls == {"a": 20, "b": 20} and set(rates) == {"a", "b"}
