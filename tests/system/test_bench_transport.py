"""The transport benchmark with real processes, tiny: it measures, and leaves nothing behind."""

import os
from pathlib import Path

import psutil
import pytest

from impala_llm.bench import transport
from impala_llm.bench.transport import ZmqMultipart

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("bench_transport")]  # they look for what is left


class Crashing(ZmqMultipart):
    name = "zmq_tcp"  # takes its place

    def send(self, count: int) -> None:
        os._exit(7)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BURST_S", 0.02)
    monkeypatch.setattr(transport, "WARM_S", 0.005)
    monkeypatch.setattr(transport, "LATENCIES", 5)


def leftovers() -> set[Path]:
    shared = Path("/dev/shm")
    return {*Path("/tmp").glob("illm-*"), *shared.glob("illm-*"), *shared.glob(f"*-bench-{os.getpid()}-*")}


def test_ours_and_two_peers_are_measured(small: None) -> None:
    before = leftovers()
    options = {"sizes": "512", "actors": "1,2", "peers": "mp_queue,zmq_ipc,bare_ring", "rounds": "2"}
    found, rows = transport.run(options)
    expected = {"ratio_512_1", "ratio_512_2", "memcpy_fraction_512", "ring_fraction_512", "cpu_ratio_512"}
    assert expected | {"latency_p99_ratio_512", "ratio_worst"} == set(found)
    assert all(value > 0 for value in found.values())
    for_one = ["impala_llm", "mp_queue", "zmq_ipc", "bare_ring", "memcpy"]
    contenders = [(name, 1) for name in for_one] + [(name, 2) for name in for_one if name != "bare_ring"]
    assert [(row["contender"], row["actors"]) for row in rows] == contenders
    assert leftovers() <= before
    assert [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())] == []


def test_a_peer_that_crashes_is_named(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONTENDERS", (transport.OurPipeline, ZmqMultipart, Crashing))
    found, rows = transport.run({"sizes": "512", "actors": "1", "rounds": "1"})
    assert "ratio_512_1" in found
    (crashed,) = [row for row in rows if row["contender"] == "zmq_tcp"]
    assert "exit status 7" in crashed["failed"]
