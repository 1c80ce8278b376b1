"""The peers of the transport benchmark that live on Ray, and the Ray processes that they share.

Invariant: Ray's processes are those of one helper process, and end with it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from impala_llm.bench._transport_processes import (
    DEADLINE_S,
    SPAWN,
    Batch,
    Contender,
    ContenderError,
    Record,
    make_records,
)

_NAMESPACE = "transport"
_START_S = 60.0
_OBJECT_STORE_BYTES = 1 << 29
_WAIT_S = 0.2
_PAUSE_S = 0.0005
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}


def _set_environment(folder: str) -> None:
    """Before Ray is imported. The cluster has a token of its own: its ports are open to others on this host."""
    os.environ.update(_QUIET)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(_token_path(folder))})


def _token_path(folder: str) -> Path:
    return Path(folder) / "ray-token"


class RayCluster:
    """Ray's processes on this host, without dashboard, with an object store of 512 MB. Raises ContenderError."""

    def __init__(self, folder: str) -> None:
        token = _token_path(folder)
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_hold_cluster, args=(folder, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> RayCluster:
        try:
            if not self._pipe.poll(_START_S):
                raise ContenderError(f"Ray did not start within {_START_S:g} s")
            self.address, problem = self._pipe.recv()
            if problem:
                raise ContenderError(f"Ray did not start: {problem}")
        except BaseException as error:
            self._end()
            raise ContenderError("Ray's helper process died") if isinstance(error, EOFError) else error from None
        assert self._process.pid is not None
        self.pid = self._process.pid
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def _end(self) -> None:
        remains = [] if self._process.pid is None else _descendants(self._process.pid)
        self._pipe.close()
        self._process.join(DEADLINE_S)
        self._process.kill()
        for process in remains:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(remains, timeout=5.0)


def _hold_cluster(folder: str, pipe: Connection) -> None:
    _set_environment(folder)
    try:
        import ray

        context = ray.init(
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
    except Exception as error:
        pipe.send(("", f"{type(error).__name__}: {error}"))
        return
    pipe.send((context.address_info["address"], ""))
    with contextlib.suppress(EOFError):
        pipe.recv()
    ray.shutdown()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


class _OnRay(Contender):
    """Connects each process to the cluster."""

    module = "ray"
    needs_cluster = True
    may_be_killed = True  # Ray ends the actors of a process that is gone

    def server_pids(self) -> list[int]:
        return [self.load.cluster_pid, *(process.pid for process in _descendants(self.load.cluster_pid))]

    def _connect(self) -> Any:
        _set_environment(self.load.folder)
        import ray

        ray.init(self.load.cluster, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR")
        self._ray: Any = ray
        return ray

    def close(self) -> None:
        if hasattr(self, "_ray"):
            self._ray.shutdown()


class Sink:
    """The consumer as a Ray actor: one thread takes, one waits."""

    def __init__(self, num_tokens: int) -> None:
        self._batch = Batch(make_records(num_tokens, seed=0, num_records=1)[0])
        self._changed = threading.Condition()
        self._num_taken = 0
        self._time = 0.0

    def take(self, items: Sequence[tuple[bytes, np.ndarray]]) -> None:
        """Copy trajectories to the batch."""
        with self._changed:
            for metadata, payload in items:
                self._batch.put_packed(metadata, payload)
            self._num_taken += len(items)
            self._time = time.monotonic()
            self._changed.notify_all()

    def taken(self, more_than: int) -> tuple[int, float]:
        """Number of trajectories taken and time of the last one, as soon as there are more, or after a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_taken > more_than, _WAIT_S)
            return self._num_taken, self._time


class RayObjects(_OnRay):
    """Ray: a call of the consumer, which is an actor, for each trajectory, up to 64 under way at a time.

    The payload is one array of bytes. Calls of 100 kB and more go by the object store, which Ray does by itself, and
    are read there without a copy; smaller ones go with the call, which is faster.
    """

    name = "ray"
    _num_under_way = 64
    _num_known: int
    _time: float

    def connect_consumer(self, batch: Batch) -> None:
        ray = self._connect()
        options = ray.remote(num_cpus=0, max_concurrency=2)
        self._sink = options(Sink).options(name=self._sink_name()).remote(self.load.num_tokens)
        self._num_known, self._time = ray.get(self._sink.taken.remote(-1), timeout=DEADLINE_S)

    def connect_producer(self, index: int, records: list[Record]) -> None:
        ray = self._connect()
        self._records: Iterator[Record] = itertools.cycle(records)
        self._calls: list[Any] = []
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._sink = ray.get_actor(self._sink_name())
                return
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _sink_name(self) -> str:
        return f"{self.name}-{self.load.num_tokens}-{self.load.num_actors}"

    def send(self, count: int) -> None:
        take = self._sink.take
        for _ in range(count // self.chunk):
            some = itertools.islice(self._records, self.chunk)
            self._calls.append(take.remote([(r.metadata, np.frombuffer(r.payload, np.uint8)) for r in some]))
            if len(self._calls) >= self._num_under_way:
                self._wait(self._num_under_way // 2)

    def settle(self) -> None:
        self._wait(len(self._calls))

    def receive(self) -> int:
        before = self._num_known
        self._num_known, self._time = self._ray.get(self._sink.taken.remote(before), timeout=DEADLINE_S)
        return self._num_known - before

    def arrival_time(self) -> float:
        return self._time

    def _wait(self, num_calls: int) -> None:
        if not num_calls:
            return
        done, self._calls = self._ray.wait(self._calls, num_returns=num_calls, timeout=DEADLINE_S)
        if len(done) < num_calls:
            raise TimeoutError(f"{len(done)} of {num_calls} calls ended within {DEADLINE_S:g} s")
        self._ray.get(done)


class RayObjects16(RayObjects):
    """The same with 16 trajectories a call, up to 8 calls under way."""

    name = "ray_16"
    chunk = 16
    _num_under_way = 8


class TransferQueue(_OnRay):
    """TransferQueue, which verl uses: 16 trajectories a put, as one uint8 tensor [16, bytes]; fetched 16 at a time.

    Its own storage (SimpleStorage) with one unit, since there is one host and one consumer; the controller answers at
    once, and an empty answer is followed by a pause of 0.5 ms (otherwise it sleeps for a second); what was read is
    cleared, so that its tables stay small.
    """

    name = "transfer_queue"
    module = "transfer_queue"
    chunk = 16

    def connect_consumer(self, batch: Batch) -> None:
        self._batch = batch
        self._start()

    def connect_producer(self, index: int, records: list[Record]) -> None:
        ray = self._connect()
        self._records = itertools.cycle(records)
        self._row_bytes = max(record.nbytes + len(record.metadata) for record in records)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                ray.get_actor("TransferQueueController", namespace="transfer_queue")
                break
            except ValueError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._start()

    def _start(self) -> None:
        if not hasattr(self, "_ray"):
            self._connect()
        import torch
        import transfer_queue
        from omegaconf import OmegaConf

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._queue: Any = transfer_queue
        transfer_queue.init(
            OmegaConf.create(
                {
                    "controller": {"polling_mode": True},
                    "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
                },
                flags={"allow_objects": True},
            )
        )
        self._client = transfer_queue.get_client()

    def send(self, count: int) -> None:
        from tensordict import TensorDict

        for _ in range(count // self.chunk):
            records = list(itertools.islice(self._records, self.chunk))
            rows = np.stack([np.frombuffer((r.payload + r.metadata).ljust(self._row_bytes), np.uint8) for r in records])
            data = TensorDict({"trajectory": self._torch.from_numpy(rows)}, batch_size=len(records))
            self._client.put(data, partition_id="train")

    def receive(self) -> int:
        meta = self._client.get_meta(["trajectory"], self.chunk, "train", mode="fetch", task_name="learner")
        if meta.size == 0:
            time.sleep(_PAUSE_S)
            return 0
        rows = self._client.get_data(meta)["trajectory"]
        record_bytes = self._batch.array.shape[1]
        for row in rows:
            payload = memoryview(row.numpy())
            self._batch.put_packed(bytes(payload[record_bytes:]), payload[:record_bytes])
        self._client.clear_samples(meta)
        return len(rows)

    def close(self) -> None:
        if hasattr(self, "_queue"):
            self._queue.close()
        super().close()
