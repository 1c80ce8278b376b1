import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from impala_llm.pipeline.safetensors_layout import LayoutError, parse, plan
from impala_llm.pipeline.weights import WeightPublisher, WeightReader, WeightsError

TensorBytes = tuple[str, tuple[int, ...], np.ndarray]

HOLD_A_LEASE = """
import sys
from pathlib import Path
from impala_llm.pipeline.weights import WeightReader
with WeightReader(Path(sys.argv[1])).lease():
    print("leased", flush=True)
    sys.stdin.read()
"""


def make_tensors(seed: int, size: int = 100) -> dict[str, TensorBytes]:
    rng = np.random.default_rng(seed)
    arrays = {
        "b.bias": rng.standard_normal(7).astype(np.float16),
        "a.weight": rng.standard_normal((size, 3)).astype(np.float32),
        "scalar": np.float32(seed).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "odd": rng.integers(0, 255, 5).astype(np.uint8),
    }
    names = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}
    return {
        name: (names[array.dtype], array.shape, np.frombuffer(array.tobytes(), np.uint8))
        for name, array in arrays.items()
    }


def assert_same(actual: Mapping[str, TensorBytes], expected: Mapping[str, TensorBytes]) -> None:
    assert set(actual) == set(expected)
    for name, (dtype, shape, data) in expected.items():
        assert actual[name][:2] == (dtype, shape)
        assert actual[name][2].tobytes() == data.tobytes()


def test_what_is_published_is_read_by_us_and_by_the_safetensors_library(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path / "board", files={"config.json": b'{"a": 1}'})
    reader = WeightReader(tmp_path / "board")
    assert reader.latest() is None
    with pytest.raises(WeightsError, match="no version yet"), reader.lease():
        pass
    for version in range(5):
        tensors = make_tensors(version)
        assert publisher.publish(tensors, version) >= 0
        assert reader.latest() == version
        with reader.lease() as lease:
            assert lease.version == version
            read = lease.tensors()
            assert_same(read, tensors)
            assert not read["a.weight"][2].flags.writeable
            assert (lease.path / "config.json").read_bytes() == b'{"a": 1}'
            theirs = load_file(lease.path / "model.safetensors")
            assert {name: array.shape for name, array in theirs.items()} == {n: s for n, (_, s, _) in tensors.items()}
            assert all(theirs[name].tobytes() == data.tobytes() for name, (_, _, data) in tensors.items())
            with safe_open(lease.path / "model.safetensors", "np") as file:
                assert file.metadata() == {"format": "pt"}


def test_a_leased_version_is_never_overwritten(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=3)
    reader = WeightReader(tmp_path)
    publisher.publish(make_tensors(0), 0)
    with reader.lease() as lease:
        kept = lease.tensors()
        for version in range(1, 8):
            publisher.publish(make_tensors(version), version)
            assert_same(kept, make_tensors(0))
            assert_same(lease.tensors(), make_tensors(0))
        with reader.lease() as newest:
            assert newest.version == 7


def test_older_versions_can_be_leased_while_they_are_there(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=3)
    reader = WeightReader(tmp_path)
    for version in range(4):
        publisher.publish(make_tensors(version), version)
    with reader.lease(2) as lease:
        assert_same(lease.tensors(), make_tensors(2))
    for missing in (0, 4):
        with pytest.raises(WeightsError, match=f"version {missing} is not on the board"), reader.lease(missing):
            pass


def test_when_all_slots_are_held_the_publisher_waits_and_then_says_so(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    reader = WeightReader(tmp_path)
    publisher.publish(make_tensors(0), 0)
    publisher.publish(make_tensors(1), 1)
    with reader.lease(0):
        with pytest.raises(WeightsError, match="weight_slots"):
            publisher.publish(make_tensors(2), 2, timeout_s=0.02)
        assert reader.latest() == 1
        waiting = threading.Thread(target=publisher.publish, args=(make_tensors(2), 2))
        waiting.start()
    waiting.join(20)
    assert reader.latest() == 2


def test_the_lease_of_a_killed_reader_ends_with_it(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    publisher.publish(make_tensors(0), 0)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_LEASE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"leased\n"
    publisher.publish(make_tensors(1), 1)
    with pytest.raises(WeightsError):
        publisher.publish(make_tensors(2), 2, timeout_s=0)
    holder.kill()
    holder.wait()
    publisher.publish(make_tensors(2), 2, timeout_s=0)
    assert WeightReader(tmp_path).latest() == 2


def test_the_pages_of_a_slot_are_used_again(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    inodes = set()
    for version in range(6):
        publisher.publish(make_tensors(version), version)
        with WeightReader(tmp_path).lease() as lease:
            inodes.add(os.stat(lease.path / "model.safetensors").st_ino)
    assert len(inodes) == 2
    publisher.publish(make_tensors(6, size=200), 6)  # another layout
    with WeightReader(tmp_path).lease() as lease:
        assert_same(lease.tensors(), make_tensors(6, size=200))


def test_versions_never_decrease_even_for_a_new_publisher(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(5), 5)
    publisher = WeightPublisher(tmp_path)
    with pytest.raises(WeightsError, match="version 4 is older than 5"):
        publisher.publish(make_tensors(4), 4)
    publisher.publish(make_tensors(6), 6)
    with WeightReader(tmp_path).lease() as lease:
        assert_same(lease.tensors(), make_tensors(6))


def test_a_publisher_that_died_half_way_leaves_the_latest_version_readable(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    reader = WeightReader(tmp_path)
    publisher.publish(make_tensors(0), 0)
    publisher.publish(make_tensors(1), 1)
    broken = make_tensors(2)
    broken["odd"] = ("U8", (5,), np.zeros(5, np.uint8)[::-1])  # not contiguous: the checksum cannot be taken
    with pytest.raises(BufferError):
        publisher.publish(broken, 2)
    assert reader.latest() == 1
    with reader.lease() as lease:
        assert_same(lease.tensors(), make_tensors(1))
    with pytest.raises(WeightsError, match="version 0 is not on the board"), reader.lease(0):
        pass
    publisher.publish(make_tensors(2), 2)


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    with WeightReader(tmp_path).lease() as lease:
        with (lease.path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        with pytest.raises(WeightsError, match="checksum"):
            lease.tensors()


def test_a_reader_waits_for_the_publisher_of_its_slot(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    slot = json.loads((tmp_path / "latest").read_bytes())["slot"]
    with (tmp_path / f"slot-{slot}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="cannot be leased"), WeightReader(tmp_path).lease(timeout_s=0.02):
            pass
    with WeightReader(tmp_path).lease(timeout_s=0):
        pass


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_slots is 1"):
        WeightPublisher(tmp_path, num_slots=1)
    for name in ("../config.json", "model.safetensors"):
        with pytest.raises(ValueError, match="plain file name"):
            WeightPublisher(tmp_path, files={name: b""})
    publisher = WeightPublisher(tmp_path)
    for tensor, expected in [
        (("F12", (1,), np.zeros(4, np.uint8)), "dtype 'F12'"),
        (("F32", (2,), np.zeros(4, np.uint8)), r"uint8 of shape \(8,\)"),
        (("F32", (1,), np.zeros(4, np.float32)), "dtype float32"),
    ]:
        with pytest.raises(ValueError, match=expected):
            publisher.publish({"x": tensor}, 0)


def test_concurrent_readers_never_see_half_a_version(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=3)

    def constant(version: int) -> dict[str, TensorBytes]:
        return {"x": ("I32", (5000,), np.full(5000, version, np.int32).view(np.uint8))}

    publisher.publish(constant(0), 0)
    last = 60
    problems: list[str] = []

    def read() -> None:
        reader = WeightReader(tmp_path)
        version = -1
        while version < last:
            with reader.lease() as lease:
                values = lease.tensors()["x"][2].view(np.int32)
                if lease.version < version or not (values == lease.version).all():
                    problems.append(f"{lease.version} after {version}: {set(values.tolist())}")
                version = lease.version

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, last + 1):
        publisher.publish(constant(version), version)
    for thread in threads:
        thread.join(20)
    assert problems == []


def test_headers_that_lie_are_refused() -> None:
    good = plan({"x": ("F32", (2,))})
    data = good.header + bytes(8)
    assert parse(memoryview(data)) == good.places
    for bad in (
        b"",
        data[:4],
        data[:-1],
        b"\xff" * 8 + data[8:],
        data.replace(b"F32", b"F99"),
        data.replace(b"[2]", b"[3]"),
    ):
        with pytest.raises(LayoutError):
            parse(memoryview(bad))
