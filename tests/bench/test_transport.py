import subprocess
import sys

import numpy as np
import pytest

from impala_llm.bench import transport
from impala_llm.bench._transport_processes import Batch, cpu_seconds, make_records
from impala_llm.bench.transport import CONTENDERS, Result, figures
from impala_llm.trajectory import ARRAY_FIELDS


def result(contender: str, rates: list[float], actors: int = 1, cpu: float = 1.0, latency: float = 0.001) -> Result:
    return Result(contender, 512, actors, rates, [cpu], [latency])


def test_figures_compare_ours_with_the_best_peer_in_each_respect():
    found = figures(
        [
            result("impala_llm", [90.0, 100.0, 500.0], cpu=0.5, latency=0.002),
            result("zmq_ipc", [10.0, 20.0, 21.0], cpu=0.25, latency=0.004),
            result("faster_fifo", [40.0], cpu=2.0, latency=0.001),
            result("faster_fifo_packed", [200.0], cpu=1.0, latency=0.004),
            result("bare_ring", [125.0], cpu=0.1, latency=0.0001),
            Result("memcpy", 512, 1, [1000.0]),
            result("impala_llm", [30.0], actors=4),
            result("redis", [10.0], actors=4),
        ]
    )
    assert found == pytest.approx(
        {
            "ratio_worst": 0.5,
            "ratio_512_1": 0.5,
            "memcpy_fraction_512": 0.1,
            "ring_fraction_512": 0.8,
            "cpu_ratio_512": 2.0,
            "latency_p99_ratio_512": 2.0,
            "ratio_512_4": 3.0,
        }
    )


def test_figures_of_one_actor_are_not_mixed_with_those_of_four():
    found = figures([result("impala_llm", [100.0], actors=4), result("redis", [50.0], actors=4), result("ray", [99.0])])
    assert found == pytest.approx({"ratio_worst": 2.0, "ratio_512_4": 2.0})


def test_a_peer_that_failed_has_a_row_with_the_reason_and_no_figure():
    failed = Result("redis", 512, 1, failure="ContenderError: it fell over")
    assert figures([result("impala_llm", [100.0]), failed]) == {}
    assert failed.row() == {"contender": "redis", "tokens": 512, "actors": 1, "failed": "ContenderError: it fell over"}


def test_row_holds_medians_and_the_spread():
    row = Result("ray", 512, 1, [3.0, 1.0, 2.0], [0.4, 0.2, 0.3], [0.001, 0.002, 0.003]).row()
    assert (row["trajectories_per_s"], row["min"], row["max"]) == (2.0, 1.0, 3.0)
    assert row["cpu_s_per_gb"] == 0.3
    assert row["p50_ms"] == 2.0


@pytest.mark.parametrize("num_tokens", [1000, 515])
def test_the_batch_holds_the_same_bytes_whatever_the_way_in(num_tokens):
    records = make_records(num_tokens, seed=0, num_records=3)
    batch = Batch(records[0], num_bytes=20 * records[0].nbytes)
    batch.put_packed(b"a", records[0].payload)
    batch.put_parts(b"b", records[1].buffers)
    batch.put_arrays(b"c", records[2].arrays)
    for row, record in zip(batch.array, records, strict=False):
        expected = b"".join(getattr(record.trajectory, name).tobytes() for name in ARRAY_FIELDS)
        assert row.tobytes() == expected
    assert batch.metadata[:3] == [b"a", b"b", b"c"]


def test_the_batch_is_filled_in_turn():
    (record,) = make_records(64, seed=0, num_records=1)
    batch = Batch(record, num_bytes=16 * record.nbytes)
    for number in range(17):
        batch.put_packed(str(number).encode(), record.payload)
    assert batch.metadata[:2] == [b"16", b"1"]


def test_records_have_seventeen_bytes_a_token_and_their_turns():
    for num_tokens in (512, 4096):
        (record,) = make_records(num_tokens, seed=1, num_records=1)
        assert record.nbytes == 17 * num_tokens + 8 * (num_tokens // 256)
        assert record.trajectory.num_action_tokens == num_tokens // 2


def test_cpu_seconds_grow_with_work_and_vanish_with_the_process():
    process = subprocess.Popen([sys.executable, "-c", "import sys; sum(range(3_000_000)); print(flush=True); input()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    assert sum(cpu_seconds(process.pid).values()) > 0.001
    process.communicate(b"\n")
    assert cpu_seconds(process.pid) == {}


def test_unknown_peers_are_refused():
    with pytest.raises(ValueError, match="pigeons"):
        transport.run({"peers": "zmq_ipc,pigeons"})


def test_names_are_unique_and_modules_of_peers_are_listed():
    assert len({contender.name for contender in CONTENDERS}) == len(CONTENDERS)
    assert {contender.module for contender in CONTENDERS if contender.module} == set(transport.PEERS)


def test_memcpy_copies_every_byte():
    measured = Result("memcpy", 512, 1)
    memcpy = transport.Memcpy(1_000_000, measured)
    memcpy.source[:] = np.arange(memcpy.source.size).reshape(memcpy.source.shape) % 251
    memcpy.target[:] = 0
    memcpy.measure()
    assert all(np.array_equal(copied, memcpy.source) for copied in memcpy.target)
    assert measured.rate > 0
