"""Publisher, relay and readers as processes that are killed: what can be read is always one whole version."""

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq

from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.relay_server import WeightServer

NUM_WORDS = 200_000

PUBLISH = """
import sys
from pathlib import Path
import numpy as np
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
directory, num_words = Path(sys.argv[1]), int(sys.argv[2])
publisher = WeightPublisher(directory)
version = (WeightReader(directory).latest() or 0) + 1
while True:
    words = np.full(num_words, version, np.int32).view(np.uint8)
    publisher.publish({name: ("I32", (num_words,), words) for name in "ab"}, version)
    print(version, flush=True)
    version += 1
"""

RELAY = """
import sys
from pathlib import Path
import zmq
from impala_llm.pipeline.weights.relay_client import WeightRelay
context = zmq.Context()
def connect():
    socket = context.socket(zmq.DEALER)
    socket.connect(sys.argv[2])
    return socket
relay = WeightRelay(Path(sys.argv[1]), connect, chunk_bytes=20_000, answer_s=2.0)
while relay.turn() is None:
    pass
"""


def start(script: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_whole(reader: WeightReader, own: dict[str, np.ndarray]) -> int:
    """The version that can be leased now, after looking at every word of it, copied and in place."""
    with reader.lease(timeout_s=20) as lease:
        lease.copy_into(own)
        for array in (*own.values(), *(data for _, _, data in lease.tensors().values())):
            assert (array.view(np.int32) == lease.version).all()
        return lease.version


@pytest.mark.system
def test_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path: Path) -> None:
    rng = random.Random(0)
    reader = WeightReader(tmp_path)
    own = {name: np.zeros(4 * NUM_WORDS, np.uint8) for name in "ab"}
    last = 0
    for _ in range(8):
        publisher = start(PUBLISH, tmp_path, NUM_WORDS)
        try:
            assert publisher.stdout is not None
            for _ in range(rng.randrange(2, 12)):
                published = int(publisher.stdout.readline())
                assert published > last
                assert check_whole(reader, own) >= published
            # Publishing goes on all the time: this falls anywhere into it.
            publisher.send_signal(signal.SIGKILL)
        finally:
            publisher.kill()
            publisher.wait()
        now = check_whole(reader, own)
        assert now >= published
        last = now
    assert check_whole(WeightReader(tmp_path), own) == last


@pytest.mark.system
def test_a_stopped_publisher_does_not_write_over_its_successor(tmp_path: Path) -> None:
    reader = WeightReader(tmp_path)
    own = {name: np.zeros(4 * NUM_WORDS, np.uint8) for name in "ab"}
    first = start(PUBLISH, tmp_path, NUM_WORDS)
    second = None
    try:
        assert first.stdout is not None
        first.stdout.readline()
        first.send_signal(signal.SIGSTOP)
        second = start(PUBLISH, tmp_path, NUM_WORDS)
        first.send_signal(signal.SIGCONT)
        seen = 0
        for _ in range(10):
            newest = check_whole(reader, own)
            assert newest >= seen
            seen = newest
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


@pytest.mark.system
def test_a_relay_begins_anew_where_one_was_killed_amid_a_download(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 4_000_000).astype(np.uint8)
    WeightPublisher(tmp_path / "there", files={"config.json": b"{}"}).publish({"x": ("U8", data.shape, data)}, 3)
    context = zmq.Context()
    behind = context.socket(zmq.ROUTER)
    behind.bind("inproc://server")
    server = WeightServer(tmp_path / "there", behind)
    server.start()
    # A cable that lets 90 chunks through, and no more until the first relay is dead.
    front = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{tmp_path / 'relay.sock'}"
    front.bind(endpoint)
    back = context.socket(zmq.DEALER)
    back.connect("inproc://server")
    cut, mended, ended = threading.Event(), threading.Event(), threading.Event()

    def carry() -> None:
        num_chunks, relay = 0, b""
        poller = zmq.Poller()
        for socket in (front, back):
            poller.register(socket, zmq.POLLIN)
        while not ended.is_set():
            for socket, _ in poller.poll(50):
                frames = socket.recv_multipart()
                if socket is front:
                    relay = frames[0]
                    back.send_multipart(frames[1:])
                    continue
                num_chunks += len(frames) == 2
                if num_chunks <= 90 or mended.is_set():
                    front.send_multipart([relay, *frames])
                else:
                    cut.set()

    carrier = threading.Thread(target=carry)
    carrier.start()
    relays = []
    try:
        relays.append(start(RELAY, tmp_path / "here", endpoint))
        assert cut.wait(60)
        relays[0].send_signal(signal.SIGKILL)
        relays[0].wait()
        mended.set()
        assert WeightReader(tmp_path / "here").latest() is None
        relays.append(start(RELAY, tmp_path / "here", endpoint))
        assert relays[1].wait(60) == 0
        with WeightReader(tmp_path / "here").lease() as lease:
            assert lease.version == 3
            assert (lease.tensors()["x"][2] == data).all()
            assert (lease.path / "config.json").read_bytes() == b"{}"
    finally:
        for process in relays:
            process.kill()
            process.wait()
        ended.set()
        carrier.join()
        for socket in (front, back):
            socket.close(0)
        server.close()
        context.term()
