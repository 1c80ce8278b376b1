"""The processes of the transport benchmark: what a contender is, and a crew of producers and one consumer for each.

Invariant: no wait is longer than its deadline, and when the process of the benchmark is gone, the others end as well.
Idle members of a crew block on a pipe, so that they take no time from the contender whose turn it is.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, NO_VERSION, Trajectory

SPAWN = get_context("spawn")
VOCAB_SIZE = 32_000
NUM_RECORDS = 16
"""Different trajectories of a producer, which it sends over and over."""
BATCH_BYTES = 64 << 20
"""Size of the consumer's batch, which is filled over and over."""
DEADLINE_S = 20.0
"""Most seconds for one measurement, or for one wait of a contender."""
_TOKENS_A_TURN = 256
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Load:
    """Load of the benchmark. folder: for sockets and temporary files. cluster: Ray's address, where one was started."""

    num_tokens: int
    num_actors: int
    folder: str
    cluster: str = ""
    cluster_pid: int = 0


class Record:
    """A prebuilt trajectory with its parts: metadata (bytes, msgpack), arrays in wire order and as bytes, and for those
    who send one piece, payload: the bytes of all arrays end to end, as a trajectory holds them."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.metadata: bytes = msgpack.packb([getattr(trajectory, name) for name in METADATA_FIELDS])
        self.arrays: list[np.ndarray] = [getattr(trajectory, name) for name in ARRAY_FIELDS]
        self.buffers = [array.data.cast("B") for array in self.arrays]
        self.payload = b"".join(self.buffers)
        self.nbytes = trajectory.nbytes


def make_records(num_tokens: int, seed: int, num_records: int = NUM_RECORDS) -> list[Record]:
    """Random valid trajectories, all of the same size: turns of up to 256 tokens, the second half of each sampled."""
    rng = np.random.default_rng(seed)
    num_turns = max(1, num_tokens // _TOKENS_A_TURN)
    edges = np.linspace(0, num_tokens, num_turns + 1).astype(np.int32)
    turns = np.stack([(edges[:-1] + edges[1:] + 1) // 2, edges[1:]], axis=1).astype(np.int32)
    mask = np.zeros(num_tokens, np.bool_)
    for start, end in turns:
        mask[start:end] = True
    rewards = np.zeros(num_tokens, np.float32)
    rewards[-1] = 1.0
    return [
        Record(
            Trajectory(
                tokens=rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
                action_mask=mask.copy(),
                behaviour_log_probs=np.where(mask, -rng.random(num_tokens), 0.0).astype(np.float32),
                versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                rewards=rewards.copy(),
                turns=turns.copy(),
                bootstrap=False,
                episode_id=f"episode-{seed}-{index}",
                group_id=index,
                task_id=index,
                env="webshop",
                actor_id=f"actor-{seed}",
                ticket_id=index,
                signature="a pair of red shoes",
                score=0.5,
                success=False,
                stats={"steps": float(num_turns), "generate_s": 1.5},
            )
        )
        for index in range(num_records)
    ]


class Batch:
    """The consumer's preallocated, pre-faulted buffer for payloads: one row each, arrays one behind the other."""

    def __init__(self, record: Record, num_bytes: int = BATCH_BYTES) -> None:
        self.array = np.ones((max(NUM_RECORDS, num_bytes // record.nbytes), record.nbytes), np.uint8)
        ends = np.cumsum([len(buffer) for buffer in record.buffers]).tolist()
        self._parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self._rows = [row.data for row in self.array]
        self.metadata: list[bytes] = [b""] * len(self._rows)
        self._index = 0

    def put_packed(self, metadata: bytes, payload: Any) -> None:
        """Copy one payload that lies in one piece."""
        index = self._index
        self._rows[index][:] = payload
        self._advance(metadata)

    def put_parts(self, metadata: bytes, buffers: Sequence[Any]) -> None:
        """Copy one payload that lies in one piece (of bytes) an array."""
        row = self._rows[self._index]
        for part, buffer in zip(self._parts, buffers, strict=True):
            row[part] = buffer
        self._advance(metadata)

    def put_arrays(self, metadata: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Copy one payload of arrays."""
        self.put_parts(metadata, [array.data.cast("B") for array in arrays])

    def _advance(self, metadata: bytes) -> None:
        self.metadata[self._index] = metadata
        self._index = (self._index + 1) % len(self._rows)


class Contender(ABC):
    """A way from producers to a consumer. Made by the benchmark, then handed to each process as it starts.

    A producer calls `connect_producer`, then `prepare` off the clock and `send`, `settle` on it, again and again; the
    consumer `connect_consumer` and then `receive`. No call may take longer than DEADLINE_S, and `receive` gives up far
    sooner. Nothing may poll between calls. `close` is called by every process, the benchmark's last.
    """

    name = ""
    module: str | None = None
    """The module that must be installed."""
    needs_cluster = False
    """Whether it needs Ray's processes."""
    most_actors: int | None = None
    """Largest number of producers that it works with; None: any."""
    may_be_killed = False
    """Whether its producers and consumer leave nothing behind when they are killed, which is faster."""
    chunk = 1
    """Trajectories in one put; the numbers to send are multiples of it. 1 while latency is measured."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.path = str(Path(load.folder) / f"{self.name}-{load.num_tokens}-{load.num_actors}")

    @abstractmethod
    def connect_producer(self, index: int, records: list[Record]) -> None:
        """In a producer: open its end."""

    @abstractmethod
    def connect_consumer(self, batch: Batch) -> None:
        """In the consumer: open its end. It copies what arrives to the batch."""

    def prepare(self, count: int) -> None:  # noqa: B027  # not everybody has something to do
        """Prepare everything that need not be timed."""

    @abstractmethod
    def send(self, count: int) -> None:
        """Hand over `count` trajectories: the records in turn."""

    def settle(self) -> None:  # noqa: B027  # not everybody has something to do
        """Wait until all that was sent is acknowledged, where there is such a thing."""

    @abstractmethod
    def receive(self) -> int:
        """Wait a short while for something to arrive, copy it, and say how many trajectories it were."""

    def arrival_time(self) -> float:
        """When the last one was copied."""
        return time.monotonic()

    def server_pids(self) -> list[int]:
        """Processes that work for it beside producers and consumer."""
        return []

    def close(self) -> None:  # noqa: B027  # not everybody has something to do
        """Free what this process holds."""


class ContenderError(RuntimeError):
    """A contender did not start, crashed, or took too long."""


@dataclass(frozen=True)
class Burst:
    """One measurement. seconds: from the first send until the last one was copied and all were acknowledged.
    cpu_s: user and system time of all processes of the contender."""

    num_trajectories: int
    seconds: float
    cpu_s: float


class Crew:
    """The processes of one contender, started at once and ready after `wait_ready`. Close it, whatever happens."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        load = contender.load
        wakeups = SPAWN.Pipe(duplex=False)
        self._members = [_Member(contender, -1, wakeups[1])]
        self._members += [_Member(contender, index, wakeups[0]) for index in range(load.num_actors)]
        for wakeup in wakeups:
            wakeup.close()
        self._consumer, *self._producers = self._members

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ContenderError."""
        for member in self._members:
            member.result(timeout_s)

    def burst(self, num_trajectories: int) -> Burst:
        """Send so many trajectories, in equal shares (of whole chunks). Raises ContenderError."""
        share = max(1, num_trajectories // len(self._producers) // self.contender.chunk) * self.contender.chunk
        for member in self._producers:
            member.ask("prepare", share)
        for member in self._producers:
            member.result()
        own_before, servers_before = self._usage()
        self._consumer.ask("receive", share * len(self._producers))
        start_at = time.monotonic() + 0.005
        for member in self._producers:
            member.ask("send", share, start_at)
        spans = [member.result() for member in self._producers]
        end = max(self._consumer.result(), *(end for _, end in spans))
        seconds = end - min(start for start, _ in spans)
        own, servers = self._usage()
        served = sum(used - servers_before.get(thread, 0.0) for thread, used in servers.items())
        return Burst(share * len(self._producers), seconds, own - own_before + served)

    def latencies(self, count: int) -> list[float]:
        """Seconds from before a send until the trajectory is in the consumer's hands, one at a time."""
        producer = self._producers[0]
        producer.ask("prepare", count)
        producer.result()
        self._consumer.ask("catch", count)
        producer.ask("trickle", count)
        sent, caught = producer.result(), self._consumer.result()
        return [arrival - start for start, arrival in zip(sent, caught, strict=True)]

    def dismiss(self) -> None:
        """Let the producers end by themselves: before `close`, where several crews are to be closed."""
        for member in self._producers:
            member.dismiss()

    def close(self) -> None:
        """End all processes: asked first, then killed."""
        self.dismiss()
        for member in self._producers:
            member.end(self.contender.may_be_killed)
        self._consumer.dismiss()
        self._consumer.end(self.contender.may_be_killed)
        self.contender.close()

    def _usage(self) -> tuple[float, dict[str, float]]:
        """CPU seconds until now: of the members together, and of each thread of the servers."""
        for member in self._members:
            member.ask("usage")
        own = sum(member.result() for member in self._members)
        servers: dict[str, float] = {}
        for pid in self.contender.server_pids():
            servers |= cpu_seconds(pid)
        return own, servers


class _Member:
    """A process of a crew, seen from the benchmark. index: of a producer, -1 for the consumer."""

    def __init__(self, contender: Contender, index: int, wakeup: Connection) -> None:
        self._name = f"{contender.name} " + ("consumer" if index < 0 else f"producer {index}")
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_main, args=(contender, index, theirs, wakeup), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, command: str, *arguments: Any) -> None:
        try:
            self._pipe.send((command, *arguments))
        except OSError as error:
            raise ContenderError(f"{self._name} is gone: {error}") from error

    def result(self, timeout_s: float = 2 * DEADLINE_S) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise ContenderError(f"{self._name} did not answer within {timeout_s:g} s")
            fine, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise ContenderError(f"{self._name} died, exit status {self._process.exitcode}") from error
        if not fine:
            raise ContenderError(f"{self._name}: {value}")
        return value

    def dismiss(self) -> None:
        """A closed pipe is the sign to end."""
        self._pipe.close()

    def end(self, at_once: bool) -> None:
        """Wait for the end, and bring it about where it does not come by itself."""
        ways = [self._process.kill] if at_once else [lambda: None, self._process.terminate, self._process.kill]
        for way in ways:
            way()
            self._process.join(5.0)
            if not self._process.is_alive():
                return


def _main(contender: Contender, index: int, pipe: Connection, wakeup: Connection) -> None:
    for name in _THREAD_LIMITS:
        os.environ[name] = "1"
    try:
        records = make_records(contender.load.num_tokens, seed=max(index, 0))
        if index < 0:
            contender.connect_consumer(Batch(records[0]))
        else:
            contender.connect_producer(index, records)
        pipe.send((True, None))
        while True:
            command, *arguments = pipe.recv()
            pipe.send((True, _obey(contender, wakeup, command, *arguments)))
    except EOFError:
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {error}"[:500]))
    finally:
        contender.close()


def _obey(contender: Contender, wakeup: Connection, command: str, *arguments: Any) -> Any:
    match command, *arguments:
        case ["prepare", count]:
            contender.prepare(count)
            # The garbage collector must not search the prepared objects while the clock runs.
            gc.collect()
            gc.freeze()
        case ["usage"]:
            return time.process_time()
        case ["send", count, start_at]:
            time.sleep(max(0.0, start_at - time.monotonic()))
            start = time.monotonic()
            contender.send(count)
            contender.settle()
            return start, time.monotonic()
        case ["receive", count]:
            _receive(contender, count)
            return contender.arrival_time()
        case ["trickle", count]:
            return _trickle(contender, count, wakeup)
        case ["catch", count]:
            return _catch(contender, count, wakeup)
    return None


def _receive(contender: Contender, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    num_received = 0
    while num_received < count:
        num_received += contender.receive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_received} of {count} trajectories arrived within {DEADLINE_S:g} s")


def _trickle(contender: Contender, count: int, wakeup: Connection) -> list[float]:
    chunk, contender.chunk = contender.chunk, 1
    rng = random.Random(0)
    starts = []
    for _ in range(count):
        # A pause, so that the consumer has gone to sleep, and at no fixed phase of its polling.
        time.sleep(rng.uniform(0.0002, 0.001))
        starts.append(time.monotonic())
        contender.send(1)
        if not wakeup.poll(DEADLINE_S):
            raise TimeoutError(f"a trajectory did not arrive within {DEADLINE_S:g} s")
        wakeup.recv_bytes()
        contender.settle()
    contender.chunk = chunk
    return starts


def _catch(contender: Contender, count: int, wakeup: Connection) -> list[float]:
    chunk, contender.chunk = contender.chunk, 1
    arrivals = []
    for _ in range(count):
        _receive(contender, 1)
        arrivals.append(contender.arrival_time())
        wakeup.send_bytes(b"!")
    contender.chunk = chunk
    return arrivals


def cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of each thread of a process until now, in seconds, by thread id."""
    seconds: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                seconds[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds
