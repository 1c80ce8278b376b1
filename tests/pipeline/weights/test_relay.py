import errno
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq

from impala_llm.pipeline.shm.run_directory import shared_memory
from impala_llm.pipeline.weights.board import WEIGHTS_FILE, WeightPublisher, WeightReader, WeightsError
from impala_llm.pipeline.weights.relay_client import WeightRelay
from impala_llm.pipeline.weights.relay_messages import (
    MAX_CHUNK_BYTES,
    SCHEMA_VERSION,
    ChunkRequest,
    Gone,
    Latest,
    LatestRequest,
    ManifestRequest,
    decode_reply,
    encode,
)
from impala_llm.pipeline.weights.relay_server import WeightServer
from impala_llm.pipeline.weights.tensor_writing import TensorBytes

FILES = {"config.json": b'{"a": 1}', "tokenizer.json": bytes(range(256)) * 20, "empty.txt": b""}
CHUNK = 1000
_names = itertools.count()


def make_tensors(version: int, size: int = 5000) -> dict[str, TensorBytes]:
    rng = np.random.default_rng(version)
    return {
        "matrix": ("F32", (size,), rng.integers(0, 256, 4 * size).astype(np.uint8)),
        "odd": ("U8", (13,), rng.integers(0, 256, 13).astype(np.uint8)),
    }


class Host:
    """A learner's board with its server, and relays to boards of other hosts."""

    def __init__(self, folder: Path, num_slots: int = 3) -> None:
        self.context = zmq.Context()
        self.skipped = 0.0
        """Seconds that only the test has passed."""
        self.folder = folder
        self.publisher = WeightPublisher(folder / "learner", num_slots, FILES)
        self.here = WeightReader(folder / "relay")
        self.relays: list[WeightRelay] = []
        self.num_connections = 0
        self.chunk_bytes = 0
        """Bytes of the chunks that the relays have received, those that were damaged on the way included."""
        self.server = self.serve()

    def serve(self) -> WeightServer:
        # A name of its own: ZeroMQ gives the last server's name free some time after its socket was closed.
        self.endpoint = f"inproc://{next(_names)}"
        socket = self.context.socket(zmq.ROUTER)
        socket.bind(self.endpoint)
        server = WeightServer(self.folder / "learner", socket, monotonic=self.monotonic)
        server.start()
        return server

    def monotonic(self) -> float:
        """Time for both ends."""
        return time.monotonic() + self.skipped

    def connect(self) -> "zmq.Socket[bytes]":
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.endpoint)
        return socket

    def newest(self) -> int:
        """On the learner's board."""
        newest = WeightReader(self.folder / "learner").latest()
        assert newest is not None
        return newest

    def relay(
        self,
        make_socket: Callable[[], object] | None = None,
        answer_s: float = 20.0,
        folder: str = "relay",
        chunk_bytes: int = CHUNK,
    ) -> WeightRelay:
        def count(frames: list[bytes]) -> list[list[bytes]]:
            self.chunk_bytes += sum(map(len, frames[1:]))
            return [frames]

        def counted() -> Cable:
            self.num_connections += 1
            return Cable((make_socket or self.connect)(), count)  # type: ignore[arg-type]

        relay = WeightRelay(
            self.folder / folder,
            counted,  # type: ignore[arg-type]
            chunk_bytes=chunk_bytes,
            answer_s=answer_s,
            poll_s=0.01,
            monotonic=self.monotonic,
        )
        self.relays.append(relay)
        return relay

    def assert_has(self, version: int, size: int = 5000) -> None:
        with self.here.lease() as lease:
            assert lease.version == version
            read = lease.tensors()
            assert {name: (*value[:2], value[2].tobytes()) for name, value in read.items()} == {
                name: (*value[:2], value[2].tobytes()) for name, value in make_tensors(version, size).items()
            }
            assert {path.name: path.read_bytes() for path in lease.path.iterdir() if path.name in FILES} == FILES

    def total_bytes(self) -> int:
        with WeightReader(self.folder / "learner").lease() as lease:
            return lease.manifest.num_bytes + sum(map(len, FILES.values()))

    def close(self) -> None:
        for relay in self.relays:
            relay.close()
        self.server.close()
        self.context.destroy(linger=0)  # `term` would wait for ever for a socket that a failed test left open


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


class Cable:
    """A socket whose answers pass through a function, which may change, add, hold back or count them."""

    def __init__(self, socket: "zmq.Socket[bytes]", through: Callable[[list[bytes]], list[list[bytes]]]) -> None:
        self.socket = socket
        self.through = through
        self.ready: list[list[bytes]] = []

    def send(self, frame: bytes, flags: int) -> None:
        self.socket.send(frame, flags)

    def poll(self, timeout: int) -> bool:
        if not self.ready and self.socket.poll(timeout):
            self.ready.extend(self.through(self.socket.recv_multipart()))
        return bool(self.ready)

    def recv_multipart(self) -> list[bytes]:
        return self.ready.pop(0)

    def close(self, linger: int) -> None:
        self.socket.close(linger)


def cut_after(num_chunks: int) -> Callable[[list[bytes]], list[list[bytes]]]:
    count = itertools.count()
    return lambda frames: [frames] if len(frames) == 1 or next(count) < num_chunks else []


def die_after(num_chunks: int) -> Callable[[list[bytes]], list[list[bytes]]]:
    count = itertools.count()

    def through(frames: list[bytes]) -> list[list[bytes]]:
        if len(frames) == 2 and next(count) == num_chunks:
            raise KeyboardInterrupt
        return [frames]

    return through


def test_each_new_version_arrives_once_with_its_files(host: Host) -> None:
    relay = host.relay()
    assert relay.turn() is None  # nothing published yet
    for version in (0, 1, 7):
        host.publisher.publish(make_tensors(version), version)
        assert relay.turn() == version
        assert relay.turn() is None
        host.assert_has(version)
    assert (host.chunk_bytes, host.num_connections) == (3 * host.total_bytes(), 1)


def test_a_relay_works_in_a_thread(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.publisher.publish(make_tensors(0), 0)
    done = threading.Event()
    publish = WeightPublisher.publish

    def publish_and_tell(self: WeightPublisher, tensors: dict[str, TensorBytes], version: int) -> float:
        seconds = publish(self, tensors, version)
        done.set()
        return seconds

    monkeypatch.setattr(WeightPublisher, "publish", publish_and_tell)
    relay = host.relay()
    relay.start()
    assert done.wait(20)
    relay.close()
    host.assert_has(0)


def test_a_relay_that_finds_no_file_descriptor_tries_again(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    failures = iter([zmq.ZMQError(errno.EMFILE)])

    def connect() -> object:
        if (failure := next(failures, None)) is not None:
            raise failure
        return host.connect()

    relay = host.relay(connect)
    relay.start()
    deadline = time.monotonic() + 20
    while host.here.latest() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    relay.close()
    host.assert_has(0)


def test_after_a_cut_the_fetching_goes_on_at_the_missing_chunk(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    cables = iter([Cable(host.connect(), cut_after(7))])
    relay = host.relay(lambda: next(cables, None) or host.connect(), answer_s=0.2)
    assert relay.turn() == 0
    host.assert_has(0)
    assert host.num_connections >= 2
    assert host.chunk_bytes == host.total_bytes()


def test_a_new_relay_begins_anew_where_the_last_one_died_amid_a_download(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    first = host.relay(lambda: Cable(host.connect(), die_after(7)))
    with pytest.raises(KeyboardInterrupt):
        first.turn()
    assert host.chunk_bytes == 7 * CHUNK
    assert host.here.latest() is None
    assert host.relay().turn() == 0
    assert host.chunk_bytes == 7 * CHUNK + host.total_bytes()
    host.assert_has(0)


def test_after_the_first_version_no_other_one_needs_memory() -> None:
    """Others may fill /dev/shm from then on, and take at once what a relay gives up."""
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder, closing(Host(Path(folder))) as host:
        used: list[int] = []

        def note(frames: list[bytes]) -> list[list[bytes]]:
            used.append(sum(path.lstat().st_blocks for path in (host.folder / "relay").rglob("*")))
            return [frames]

        relay = host.relay(lambda: Cable(host.connect(), note))
        for version in range(5):
            host.publisher.publish(make_tensors(version), version)
            assert relay.turn() == version
            host.assert_has(version)
            if not version:
                used.clear()
        assert relay.turn() is None  # looks once more
        assert len(used) > 4 * host.total_bytes() // CHUNK and len(set(used)) == 1


def test_a_relay_without_room_for_all_slots_publishes_nothing_and_goes_on_later(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.publisher.publish(make_tensors(0), 0)
    allocate = os.posix_fallocate
    slots_with_room = iter([True, True, False])

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(WEIGHTS_FILE) and not next(slots_with_room, True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    relay = host.relay()
    with pytest.raises(WeightsError, match="Free memory"):
        relay.turn()
    assert host.here.latest() is None
    assert relay.turn() == 0
    assert host.chunk_bytes == host.total_bytes(), "what was received is not fetched again"
    host.assert_has(0)


def test_what_was_received_of_another_version_counts_for_nothing(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    with pytest.raises(KeyboardInterrupt):
        host.relay(lambda: Cable(host.connect(), die_after(7))).turn()
    host.publisher.publish(make_tensors(1), 1)
    host.server.close()
    host.server = host.serve()  # which keeps nothing for the relay that died
    host.chunk_bytes = 0
    assert host.relay().turn() == 1
    assert host.chunk_bytes == host.total_bytes()
    host.assert_has(1)


def test_a_new_server_serves_the_rest(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    chunks = itertools.count()

    def restart(frames: list[bytes]) -> list[list[bytes]]:
        if len(frames) == 2 and next(chunks) == 5:
            host.server.close()
            host.server = host.serve()
        return [frames]

    relay = host.relay(lambda: Cable(host.connect(), restart), answer_s=0.2)
    assert relay.turn() == 0
    host.assert_has(0)


def changed_once(number: int, change: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[list[bytes]]]:
    """A cable that changes the data of a chunk, by its number from 0."""
    chunks = itertools.count()

    def through(frames: list[bytes]) -> list[list[bytes]]:
        return [[frames[0], change(frames[1])] if len(frames) == 2 and next(chunks) == number else frames]

    return through


def test_a_chunk_of_another_length_is_asked_for_again(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    cable = changed_once(3, lambda data: data[:-1])
    assert host.relay(lambda: Cable(host.connect(), cable)).turn() == 0
    assert host.chunk_bytes == host.total_bytes() + CHUNK - 1
    host.assert_has(0)


@pytest.mark.parametrize(("number", "index"), [(0, 0), (0, 60), (10, 500), (20, -1), (21, 0), (27, -1)])
def test_a_version_with_a_byte_that_was_changed_on_the_way_is_fetched_again(
    host: Host, number: int, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the header's length, the header, either tensor, either file beside them."""

    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[index] ^= 1
        return bytes(changed)

    host.publisher.publish(make_tensors(0), 0)
    cable = changed_once(number, flip)
    relay = host.relay(lambda: Cable(host.connect(), cable))
    assert relay.turn() is None and "weights arrived damaged" in caplog.text
    assert host.here.latest() is None
    assert relay.turn() == 0
    assert host.chunk_bytes == 2 * host.total_bytes()
    host.assert_has(0)


def test_weights_that_are_not_what_was_announced_are_never_published(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.publisher.publish(make_tensors(0), 0)
    forge = True

    def change_contents(frames: list[bytes]) -> list[list[bytes]]:
        values = msgpack.unpackb(frames[0])
        if values[1] == 12 and forge:
            values[6][1] ^= 1  # the checksum of a tensor
            return [[msgpack.packb(values)]]
        return [frames]

    relay = host.relay(lambda: Cable(host.connect(), change_contents))
    assert relay.turn() is None
    assert "weights arrived damaged" in caplog.text
    assert host.here.latest() is None
    forge = False
    assert relay.turn() == 0
    host.assert_has(0)


def test_malformed_and_doubled_answers_are_passed_over(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.publisher.publish(make_tensors(0), 0)

    def malformed(frames: list[bytes]) -> list[list[bytes]]:
        return [[b"\xc1"], [b""], [*frames, b"more", b"frames"], frames, frames]

    relay = host.relay(lambda: Cable(host.connect(), malformed))
    assert relay.turn() == 0
    assert "malformed answer of the weight server" in caplog.text
    host.assert_has(0)


def test_a_version_that_was_overwritten_is_dropped_for_the_newest(tmp_path: Path) -> None:
    host = Host(tmp_path, num_slots=2)  # none to spare for a relay
    host.publisher.publish(make_tensors(0), 0)
    versions = itertools.count(1)

    def learn(frames: list[bytes]) -> list[list[bytes]]:
        if len(frames) == 2:
            version = next(versions)
            if version < 4:
                host.publisher.publish(make_tensors(version), version)
        return [frames]

    relay = host.relay(lambda: Cable(host.connect(), learn))
    assert relay.turn() is None
    assert host.here.latest() is None
    # How many answers came before the one that named the loss, and so how many versions there are, is a matter of time.
    newest = max(next(versions), 4)
    host.publisher.publish(make_tensors(newest), newest)
    assert relay.turn() == newest
    host.assert_has(newest)
    host.close()


def test_a_version_is_held_for_the_relay_that_fetches_it(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    versions = itertools.count(1)

    def learn(frames: list[bytes]) -> list[list[bytes]]:
        if len(frames) == 2:
            version = next(versions)
            host.publisher.publish(make_tensors(version), version, timeout_s=5)
        return [frames]

    relay = host.relay(lambda: Cable(host.connect(), learn))
    assert relay.turn() == 0
    host.assert_has(0)


def learning(host: Host, count: int, seconds: float) -> Callable[[list[bytes]], list[list[bytes]]]:
    """A cable on which a chunk takes so long, while the learner publishes a version; `count` of them in all."""
    versions = iter(range(host.newest() + 1, host.newest() + 1 + count))

    def through(frames: list[bytes]) -> list[list[bytes]]:
        if len(frames) == 2:
            host.skipped += seconds
            for version in itertools.islice(versions, 1):
                host.publisher.publish(make_tensors(version), version, timeout_s=5)
        return [frames]

    return through


def test_a_download_that_progresses_keeps_its_version_however_long_it_takes(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    cable = learning(host, 50, 9.0)
    relay = host.relay(lambda: Cable(host.connect(), cable))
    assert relay.turn() == 0
    assert host.skipped > 120
    newest = host.newest()
    assert newest > 10
    assert relay.turn() == newest  # those between are skipped; and this one is kept at once
    assert host.newest() > newest + 10
    host.assert_has(newest)


def test_a_download_that_takes_an_hour_comes_to_an_end(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    cable = learning(host, 0, 150.0)
    assert host.relay(lambda: Cable(host.connect(), cable)).turn() == 0
    assert host.skipped > 3600


def test_a_relay_for_which_no_version_can_be_kept_gets_one_that_is_kept_for_another(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    with pytest.raises(KeyboardInterrupt):  # version 0 is kept for this one
        host.relay(lambda: Cable(host.connect(), die_after(3))).turn()
    for version in (1, 2, 3):
        host.publisher.publish(make_tensors(version), version, timeout_s=5)
    cable = learning(host, 1000, 1.0)
    second = host.relay(lambda: Cable(host.connect(), cable), folder="second")
    assert second.turn() == 0
    assert second.turn() is None  # nothing newer is kept, and it is slower than the learner
    host.skipped += 3600.0  # the first is given up
    newest = host.newest()
    assert second.turn() == newest < host.newest()


def test_a_version_is_not_kept_for_a_relay_that_is_gone(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    with pytest.raises(KeyboardInterrupt):
        host.relay(lambda: Cable(host.connect(), die_after(3))).turn()
    host.skipped += 3600.0
    assert host.relay().turn() == 0  # an answer, so the server has seen the time
    host.server.close()
    for version in (1, 2, 3):
        host.publisher.publish(make_tensors(version), version, timeout_s=5)


def test_an_older_version_is_not_fetched(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    WeightPublisher(host.folder / "relay", files=FILES).publish(make_tensors(5), 5)
    host.publisher.publish(make_tensors(4), 4)
    assert host.relay().turn() is None
    assert "4 there, 5 here" in caplog.text
    host.assert_has(5)


def test_a_silent_server_costs_a_deadline(host: Host) -> None:
    relay = host.relay(lambda: Cable(host.connect(), lambda frames: []), answer_s=0.05)
    assert relay.turn() is None
    assert relay.turn() is None
    assert host.num_connections == 2


def test_the_silence_of_a_server_is_said_once_each_time(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it lasts: an actors' host may be up hours before the learner's."""
    minutes = itertools.count(0, 60)
    monkeypatch.setattr("impala_llm.processes.limited_warnings.time", SimpleNamespace(monotonic=lambda: next(minutes)))
    is_silent = True

    def through(frames: list[bytes]) -> list[list[bytes]]:
        if not is_silent:
            return [frames]
        host.skipped += 60.0
        return []

    relay = host.relay(lambda: Cable(host.connect(), through))
    host.publisher.publish(make_tensors(0), 0)
    for num_times in (1, 2):
        is_silent = True
        assert [relay.turn() for _ in range(3)] == [None] * 3
        assert caplog.text.count("the weight server does not answer") == num_times
        assert caplog.text.count("pipeline.connect") == 1, "it is right once the server has answered"
        is_silent = False
        assert relay.turn() == (0 if num_times == 1 else None)


def test_over_a_slow_network_less_is_asked_for_at_a_time_until_it_is_fast_again(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    size, bytes_per_s, answer_s, sizes = 700_000, 10_000, 20.0, []

    def through(frames: list[bytes]) -> list[list[bytes]]:
        taken_s = sum(map(len, frames)) / bytes_per_s
        host.skipped += min(taken_s, answer_s)
        if taken_s >= answer_s:
            return []
        sizes.extend(map(len, frames[1:]))
        return [frames]

    relay = host.relay(lambda: Cable(host.connect(), through), answer_s, chunk_bytes=1 << 20)
    host.publisher.publish(make_tensors(0, size), 0)
    assert relay.turn() == 0
    host.assert_has(0, size)
    assert host.chunk_bytes == host.total_bytes() and max(sizes) == 1 << 17
    assert host.num_connections == 6, "at 4 MiB, 2 MiB, 1 MiB, 512 KiB and 256 KiB it was overdue"
    assert "the network is slower than" in caplog.text and "pipeline.connect" not in caplog.text
    bytes_per_s = 1 << 30
    sizes.clear()
    host.publisher.publish(make_tensors(1, size), 1)
    assert relay.turn() == 1
    host.assert_has(1, size)
    assert max(sizes) == 1 << 20 and host.num_connections == 6


def test_the_server_outlives_what_is_no_request(host: Host) -> None:
    host.publisher.publish(make_tensors(0), 0)
    socket = host.connect()
    bad = [
        [b""],
        [b"\xc1"],
        [b"x" * 5000],
        [encode(LatestRequest(1)), b"more"],
        [encode(Latest(1, 2))],
        [msgpack.packb([99, 1, 1])],
        [msgpack.packb([SCHEMA_VERSION, 3, 1, 0, "../../latest", 0, 10])],
        [msgpack.packb([SCHEMA_VERSION, 3, 1, 0, "absent", 0, 10])],
        [encode(ChunkRequest(1, 0, "config.json", 5, 10))],
        [encode(ChunkRequest(1, 0, "model.safetensors", 10**9, 10))],
        [msgpack.packb([SCHEMA_VERSION, 3, 1, 0, "model.safetensors", 0, MAX_CHUNK_BYTES + 1])],
        [msgpack.packb([SCHEMA_VERSION, 3, 1, 0, "model.safetensors", -5, 10])],
    ]
    for frames in bad:
        socket.send_multipart(frames)
    socket.send(encode(LatestRequest(17)))
    assert socket.poll(20_000)
    assert decode_reply(socket.recv()) == Latest(17, 0), "none of the others was answered"
    socket.send(encode(ManifestRequest(18, 9, -1)))
    assert socket.poll(20_000)
    assert decode_reply(socket.recv()) == Gone(18, 9)
    socket.close(0)
