import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.weights import board
from impala_llm.pipeline.weights.board import SlotsInUse, WeightPublisher, WeightReader, WeightsError
from impala_llm.pipeline.weights.tensor_writing import TensorPart, TensorSource
from tests.two_ranks import Meeting

TensorBytes = tuple[str, tuple[int, ...], np.ndarray]

HOLD_A_LEASE = """
import sys
from pathlib import Path
from impala_llm.pipeline.weights.board import WeightReader
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


def test_what_is_not_in_memory_yet_is_written_into_the_slot_piece_by_piece(tmp_path: Path) -> None:
    tensors = make_tensors(3)
    written = []

    def source(name: str, data: np.ndarray) -> Callable[[np.ndarray], None]:
        def write(target: np.ndarray) -> None:
            target[:] = data
            written.append(name)

        return write

    publisher = WeightPublisher(tmp_path)
    sources = {name: (dtype, shape, source(name, data)) for name, (dtype, shape, data) in tensors.items()}
    publisher.reserve(sources)
    assert not written
    publisher.publish(sources, 0)
    with WeightReader(tmp_path).lease() as lease:
        assert_same(lease.tensors(), tensors)
    assert sorted(written) == sorted(tensors)


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
        with pytest.raises(SlotsInUse, match=rf"read by process {os.getpid()} \(.*weight_slots"):
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


def test_a_publisher_that_died_half_way_leaves_the_latest_version_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    reader = WeightReader(tmp_path)
    publisher.publish(make_tensors(0), 0)
    publisher.publish(make_tensors(1), 1)

    def copy_some_and_die(target: np.ndarray, source: np.ndarray) -> int:
        target[: source.size // 2] = 255
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(copy_kernels, "stream_bytes", copy_some_and_die)
        publisher.publish(make_tensors(2), 2)
    assert reader.latest() == 1
    with reader.lease() as lease:
        assert_same(lease.tensors(), make_tensors(1))
    with pytest.raises(WeightsError, match="version 0 is not on the board"), reader.lease(0):
        pass
    publisher.publish(make_tensors(2), 2)


def test_a_version_that_was_never_announced_is_overwritten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=3)
    reader = WeightReader(tmp_path)
    publisher.publish(make_tensors(0), 0)
    publisher.publish(make_tensors(1), 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(board, "write_latest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        publisher.publish(make_tensors(2), 2)  # dies when all is written, before it says so
    assert reader.latest() == 1
    WeightPublisher(tmp_path, num_slots=3).publish(make_tensors(22), 2)
    with reader.lease(2) as lease:
        assert_same(lease.tensors(), make_tensors(22))
    with reader.lease(0) as lease:
        assert_same(lease.tensors(), make_tensors(0))


def test_a_version_may_be_published_again(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path)
    publisher.publish(make_tensors(3), 3)
    publisher.publish(make_tensors(4), 3)
    with WeightReader(tmp_path).lease(3) as lease:
        assert_same(lease.tensors(), make_tensors(4))


def test_a_second_publisher_waits_for_the_first(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, takeover_s=0.02)
    with (tmp_path / "publisher.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="another publisher"):
            publisher.publish(make_tensors(0), 0)
    publisher.publish(make_tensors(0), 0)


def own_tensors(tensors: Mapping[str, TensorBytes]) -> dict[str, np.ndarray]:
    return {name: np.full(data.size, 77, np.uint8) for name, (_, _, data) in tensors.items()}


def test_a_reader_copies_into_its_own_tensors(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    reader = WeightReader(tmp_path)
    own = own_tensors(make_tensors(0))
    for version in range(5):
        publisher.publish(make_tensors(version), version)
        with reader.lease() as lease:
            lease.copy_into(own)
        assert {name: own[name].tobytes() for name in own} == {
            name: data.tobytes() for name, (_, _, data) in make_tensors(version).items()
        }


def test_targets_that_do_not_fit_are_named_and_left_alone(tmp_path: Path) -> None:
    tensors = make_tensors(0)
    WeightPublisher(tmp_path).publish(tensors, 0)
    good = own_tensors(tensors)
    read_only = np.zeros(5, np.uint8)
    read_only.setflags(write=False)
    with WeightReader(tmp_path).lease() as lease:
        for change, expected in [
            ({"odd": np.zeros(6, np.uint8)}, r"'odd' \(U8 of shape \(5,\)\) has 5 bytes, its target is .*\(6,\)"),
            ({"odd": np.zeros(5, np.int8)}, "its target is int8"),
            ({"odd": np.zeros(10, np.uint8)[::2]}, "strides"),
            ({"odd": read_only}, "target of tensor 'odd' is read-only"),
            ({"more": np.zeros(5, np.uint8)}, "version 0 has no tensor 'more'"),
        ]:
            with pytest.raises(WeightsError, match=expected):
                lease.copy_into({**good, **change})
        with pytest.raises(WeightsError, match="version 0 has a tensor 'b.bias' without target"):
            lease.copy_into({name: data for name, data in good.items() if name != "b.bias"})
    assert all((data == 77).all() for data in good.values())


def test_reserved_slots_are_used_for_what_comes(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=3)
    assert publisher.reserve(make_tensors(0)) >= 0
    assert WeightReader(tmp_path).latest() is None
    files = sorted(tmp_path.glob("slot-*/model.safetensors"))
    inodes = [path.stat().st_ino for path in files]
    assert len(files) == 3
    for version in range(4):
        publisher.publish(make_tensors(version), version)
    assert [path.stat().st_ino for path in files] == inodes
    # The slots of a predecessor serve too, and the latest version stays.
    successor = WeightPublisher(tmp_path, num_slots=3)
    successor.reserve(make_tensors(0))
    successor.publish(make_tensors(4), 4)
    assert [path.stat().st_ino for path in files] == inodes
    # Larger weights: all slots are made anew but those of the latest version and of a reader.
    with WeightReader(tmp_path).lease(2) as lease:
        successor.reserve(make_tensors(0, size=500))
        assert_same(lease.tensors(), make_tensors(2))
    with WeightReader(tmp_path).lease() as lease:
        assert lease.version == 4
        assert_same(lease.tensors(), make_tensors(4))
    assert sum(path.stat().st_ino not in inodes for path in files) == 1


def test_a_publisher_with_fewer_slots_removes_those_beyond_unless_they_are_read(tmp_path: Path) -> None:
    before, reader = WeightPublisher(tmp_path, num_slots=6), WeightReader(tmp_path)
    for version in range(6):
        before.publish(make_tensors(version), version)
        with reader.lease() as lease:
            lease.tensors()
    del before
    publisher = WeightPublisher(tmp_path, num_slots=3)
    with reader.lease(3) as lease:
        publisher.reserve(make_tensors(0))
        assert reader.num_slots() == 5, "three, one that is read, and that of the latest version"
        assert reader.latest() == 5
        for version in (6, 7):
            publisher.publish(make_tensors(version), version)
        assert reader.num_slots() == 4
        assert_same(lease.tensors(), make_tensors(3))
        with pytest.raises(WeightsError, match="version 4 is not on the board"):
            reader.lease(4).__enter__()
    publisher.publish(make_tensors(8), 8)
    assert reader.num_slots() == 3
    assert {path.parent.name for path in tmp_path.glob("slot-*/*")} == {"slot-0", "slot-1", "slot-2"}
    assert sum(path.stat().st_size for path in tmp_path.glob("slot-[345]*")) == 0
    del lease
    with reader.lease() as latest:
        assert_same(latest.tensors(), make_tensors(8))
    assert f"{tmp_path}/slot-5" not in Path("/proc/self/maps").read_text(), "readers give the memory back, too"
    WeightPublisher(tmp_path, num_slots=6).publish(make_tensors(9), 9)
    assert reader.num_slots() == 6


def test_a_reader_keeps_its_mapping_until_the_file_is_another(tmp_path: Path) -> None:
    publisher = WeightPublisher(tmp_path, num_slots=2)
    reader = WeightReader(tmp_path)
    addresses = set()
    for version in range(6):
        publisher.publish(make_tensors(version), version)
        with reader.lease() as lease:
            addresses.add(lease.file_bytes().ctypes.data)
    assert len(addresses) == 2
    renamed = {name.replace("odd", "new"): value for name, value in make_tensors(6).items()}
    publisher.publish(renamed, 6)  # the same size, another header
    with reader.lease() as lease:
        assert_same(lease.tensors(), renamed)
    publisher.publish(make_tensors(7, size=300), 7)
    with reader.lease() as lease:
        assert_same(lease.tensors(), make_tensors(7, size=300))


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    with WeightReader(tmp_path).lease() as lease:
        with (lease.path / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        for read in (lease.tensors, lambda: lease.copy_into(own_tensors(make_tensors(0)))):
            with pytest.raises(WeightsError, match=r"model\.safetensors .* checksum of tensor 'odd'"):
                read()
        assert lease.tensors(verify=False).keys() == make_tensors(0).keys()


@pytest.mark.parametrize(
    "target",
    [b"slot-0", b"slot-0/", b"\xff", b"slot-0/1/2", b"slot--1/0", b"slot-0/\xd9\xa1", b"slot-0/" + b"9" * 1000],
)
def test_a_malformed_pointer_is_named(tmp_path: Path, target: bytes) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    (tmp_path / "latest").unlink()
    os.symlink(target, tmp_path / "latest")
    with pytest.raises(WeightsError, match="latest leads to"), WeightReader(tmp_path).lease():
        pass
    with pytest.raises(WeightsError, match="latest leads to"):
        WeightPublisher(tmp_path).publish(make_tensors(1), 1)


def test_a_pointer_that_is_no_link_is_named(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").touch()
    with pytest.raises(WeightsError, match="latest"), WeightReader(tmp_path).lease():
        pass
    with pytest.raises(WeightsError, match="latest"):
        WeightPublisher(tmp_path).publish(make_tensors(1), 1)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0"},
        {"num_bytes": -1},
        {"header_checksum": 2**64},
        {"checksums": None},
        {"checksums": [1.5]},
        {"checksums": [True]},
        {"unknown": 1},
    ],
)
def test_a_malformed_manifest_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    path = tmp_path / "slot-0.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(WeightsError, match=r"slot-0\.json"), WeightReader(tmp_path).lease():
        pass


@pytest.mark.parametrize("size", [0, 1, 7, 100, 2000, 100_000])
def test_weights_of_another_size_are_an_error_and_no_crash(tmp_path: Path, size: int) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    reader = WeightReader(tmp_path)
    with reader.lease() as lease:
        lease.tensors()
        os.truncate(lease.path / "model.safetensors", size)
        for read in (lease.tensors, lease.file_bytes, lambda: lease.copy_into(own_tensors(make_tensors(0)))):
            with pytest.raises(WeightsError, match=r"model\.safetensors has \d+ bytes"):
                read()


def test_weights_that_are_no_plain_file_are_refused(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    path = tmp_path / "slot-0" / "model.safetensors"
    path.rename(tmp_path / "elsewhere")
    with WeightReader(tmp_path).lease() as lease:
        for make in (lambda: None, lambda: os.mkfifo(path), lambda: path.symlink_to(tmp_path / "elsewhere")):
            path.unlink(missing_ok=True)
            make()
            with pytest.raises(WeightsError, match=r"model\.safetensors"):
                lease.tensors()


def test_a_header_that_was_changed_is_noticed(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    reader = WeightReader(tmp_path)
    with reader.lease() as lease:
        path = lease.path / "model.safetensors"
        good = path.read_bytes()
        for change in ((b"odd", b"ood"), (b"F32", b"I32"), (b"F32", b"F99"), (b'{"', b'["')):
            path.write_bytes(good.replace(*change, 1))
            for verify in (True, False):
                with pytest.raises(WeightsError, match=r"model\.safetensors"):
                    lease.tensors(verify)
        path.write_bytes(good)
        assert_same(lease.tensors(), make_tensors(0))


def reference_checksum(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8").tolist()
    keyed = [word ^ (i * 0x9E3779B97F4A7C15 % 2**64) for i, word in enumerate(words)]
    return sum(x + (x % 2**32) * (x >> 32) for x in keyed) % 2**64


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 63, 1001])
def test_checksums_of_bytes_are_what_their_definition_says(size: int) -> None:
    for offset in range(4):
        source = np.random.default_rng(size).integers(0, 256, size + offset).astype(np.uint8)[offset:]
        around = np.full(size + 20, 77, np.uint8)
        target = around[10 - offset : 10 - offset + size]
        expected = reference_checksum(source.tobytes())
        assert copy_kernels.bytes_checksum(source) == expected
        assert copy_kernels.stream_bytes(target, source) == expected
        assert target.tobytes() == source.tobytes()
        assert (around[: 10 - offset] == 77).all() and (around[10 - offset + size :] == 77).all()
    with pytest.raises(ValueError, match="differ in size"):
        copy_kernels.stream_bytes(np.zeros(size + 1, np.uint8), source)


def test_a_reader_waits_for_the_publisher_of_its_slot(tmp_path: Path) -> None:
    WeightPublisher(tmp_path).publish(make_tensors(0), 0)
    slot = os.path.dirname(os.readlink(tmp_path / "latest"))
    with (tmp_path / f"{slot}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="cannot be leased"), WeightReader(tmp_path).lease(timeout_s=0.02):
            pass
    with WeightReader(tmp_path).lease(timeout_s=0):
        pass


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_slots is 1"):
        WeightPublisher(tmp_path, num_slots=1)
    for name in ("../config.json", "..", "model.safetensors"):
        with pytest.raises(ValueError, match="plain file name"):
            WeightPublisher(tmp_path, files={name: b""})
    publisher = WeightPublisher(tmp_path)
    for tensor, expected in [
        (("F12", (1,), np.zeros(4, np.uint8)), "dtype 'F12'"),
        (("F32", (2,), np.zeros(4, np.uint8)), r"uint8 of shape \(8,\)"),
        (("F32", (1,), np.zeros(4, np.float32)), "dtype float32"),
        (("U8", (4,), np.zeros(8, np.uint8)[::2]), r"strides \(2,\)"),
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


class Pair:
    """Two processes that write a version together, as threads: the first is the publisher."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    def tell(self, number: int) -> int:
        return self._meeting.exchange(self._rank, number)[0]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._meeting.exchange(self._rank, list(numbers))


def part_of(tensors: Mapping[str, TensorBytes], rank: int, cut: Mapping[str, int]) -> dict[str, TensorSource]:
    """The bytes of each tensor before, or from, its cut, in pieces of 16 bytes."""
    found: dict[str, TensorSource] = {}
    for name, (dtype, shape, data) in tensors.items():
        start, end = (0, cut[name]) if rank == 0 else (cut[name], data.size)
        pieces = [data[i : min(i + 16, end)] for i in range(start, end, 16)]
        found[name] = (dtype, shape, TensorPart(start, end - start, pieces.__iter__))
    return found


def test_processes_write_the_parts_of_a_version_together(tmp_path: Path) -> None:
    """Parts that begin between words, and within one; one that is empty; and nothing while readers hold all slots."""
    tensors = make_tensors(seed=3)
    cut = {"b.bias": 7, "a.weight": 800, "scalar": 0, "empty": 0, "odd": 3}
    meeting = Meeting()
    boards = [WeightPublisher(tmp_path / "board", num_slots=2) for _ in range(2)]
    outcomes: list[object] = []

    def contribute() -> None:
        for _ in range(3):
            outcomes.append(boards[1].contribute(part_of(tensors, 1, cut), Pair(1, meeting)))

    thread = threading.Thread(target=contribute)
    thread.start()
    reader, mine = WeightReader(tmp_path / "board"), part_of(tensors, 0, cut)
    boards[0].publish(mine, 1, sharing=Pair(0, meeting))
    with reader.lease() as lease:
        assert_same(lease.tensors(verify=True), tensors)
        boards[0].publish(mine, 2, sharing=Pair(0, meeting))
        with pytest.raises(SlotsInUse):
            boards[0].publish(mine, 3, 0.01, sharing=Pair(0, meeting))
    thread.join(30)
    assert outcomes == [True, True, False]
    with reader.lease() as lease:
        assert lease.version == 2
        assert_same(lease.tensors(verify=True), tensors)
