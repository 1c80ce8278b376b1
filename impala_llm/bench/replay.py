"""Prioritised replay as a learner uses it: how many cycles a second. A cycle inserts as many new items as a batch used,
into a buffer that is full, so as many have to go; the policy version is one more than before; 256 items are drawn
without replacement, with their weights; and all of them get new priorities.

Figures: `ratio_best_N`, our rate over that of the fastest peer that is installed, at N items; `ratio_worst`, the
smallest of these: the main figure. `ratio_three_factors_N`, our rate over that of cpprb as it would be given the same
priorities as ours. `draw_ms_N`, the time of one of our draws. All are given a batch in one call. Ours is the whole
`ReplayBuffer` with all three factors and a uniform floor, evicts the lowest priority, takes in and gives back
trajectories, and says what became of each. The peers have the advantage factor alone, draw with replacement, and
overwrite the oldest; what their items hold is one number (cpprb) or one reference (torchrl). Rows: cycles a second of
CPU time of each; medians over rounds in which all take their turn, in an order that rotates.

One thread in this process; its own CPU time is measured, so that other processes cost it little but caches.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from impala_llm.replay import PrioritySampler, ReplayBuffer
from impala_llm.trajectory import Trajectory

OPTIONS = {
    "sizes": "numbers of items, with commas between; default 4096,16384,100000",
    "batch": "items of a draw; default 256",
    "rounds": "turns of each contender; default 9",
    "cycles": "cycles of a turn; default 100",
    "signatures": "different signatures; default 1000",
}
PEERS = ("cpprb", "torchrl")
"""Contenders that `ratio_best` compares with."""

_SAMPLER = PrioritySampler(recency_tau=100.0, advantage_exponent=0.6, rarity_exponent=0.5, uniform_floor=0.1)
_WEIGHT_EXPONENT = 0.6
_NUM_VERSIONS = 500

Cycle = Callable[[np.ndarray], object]
"""A cycle that sets these priorities, float64[batch]. Everything else that it needs is made before the clock starts."""


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measures; see the module for figures and rows."""
    sizes = [int(size) for size in options.get("sizes", "4096,16384,100000").split(",")]
    batch, rounds = int(options.get("batch", 256)), int(options.get("rounds", 9))
    cycles, num_signatures = int(options.get("cycles", 100)), int(options.get("signatures", 1000))
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for size in sizes:
        draw_times: list[float] = []
        contenders = {"impala_llm": buffer_cycle(size, batch, num_signatures, (rounds + 1) * cycles, draw_times)}
        for name, peer in (
            ("cpprb", cpprb_cycle(size, batch)),
            ("torchrl", torchrl_cycle(size, batch)),
            ("cpprb_three_factors", cpprb_three_factors_cycle(size, batch, num_signatures)),
        ):
            if peer is not None:
                contenders[name] = peer
        rates = measure(contenders, batch, rounds, cycles)
        peers = [rate for name, rate in rates.items() if name in PEERS]
        if peers:
            figures[f"ratio_best_{size}"] = rates["impala_llm"] / max(peers)
        if "cpprb_three_factors" in rates:
            figures[f"ratio_three_factors_{size}"] = rates["impala_llm"] / rates["cpprb_three_factors"]
        figures[f"draw_ms_{size}"] = 1e3 * statistics.median(draw_times)
        rows += [{"items": size, "contender": name, "cycles_per_s": rate} for name, rate in rates.items()]
    best = [value for name, value in figures.items() if name.startswith("ratio_best")]
    return ({"ratio_worst": min(best)} if best else {}) | figures, rows


def measure(contenders: dict[str, Cycle], batch: int, rounds: int, cycles: int) -> dict[str, float]:
    """Median rate of each, in cycles a second of CPU time, after a turn that does not count."""
    values = np.random.default_rng(1).random((cycles, batch))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            cycle = contenders[name]
            begin = time.thread_time()
            for row in values:
                cycle(row)
            if turn:
                rates[name].append(cycles / (time.thread_time() - begin))
    return {name: statistics.median(found) for name, found in rates.items()}


def buffer_cycle(size: int, batch: int, num_signatures: int, num_cycles: int, draw_times: list[float]) -> Cycle:
    """Ours, as the learner uses it, for so many cycles. The items of a version hold one and the same trajectory, which
    is a version old when it comes: what it weighs is not measured. draw_times: gets the seconds of CPU time of each
    draw."""
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer(_SAMPLER, size, 1 << 60, max_replays=1 << 60)
    names = [f"signature {i}" for i in range(num_signatures)]
    signatures = itertools.cycle([names[i] for i in rng.integers(num_signatures, size=size).tolist()])
    members = [[_trajectory(version)] for version in range(_NUM_VERSIONS + num_cycles)]
    for version in range(_NUM_VERSIONS):
        num_new = size * (version + 1) // _NUM_VERSIONS - size * version // _NUM_VERSIONS
        buffer.insert_all([members[version]] * num_new, version, list(itertools.islice(signatures, num_new)))
    buffer.update_advantages(np.arange(size), rng.random(size))
    versions = itertools.count(_NUM_VERSIONS)

    def cycle(values: np.ndarray) -> object:
        version = next(versions)
        buffer.insert_all([members[version - 1]] * batch, version, list(itertools.islice(signatures, batch)))
        begin = time.thread_time()
        sample = buffer.sample(batch, version, _WEIGHT_EXPONENT)
        draw_times.append(time.thread_time() - begin)
        buffer.update_advantages(sample.item_ids, values)
        return sample

    return cycle


def cpprb_cycle(size: int, batch: int) -> Cycle | None:
    """cpprb's PrioritizedReplayBuffer, whose items hold one number; new ones get its largest priority."""
    try:
        from cpprb import PrioritizedReplayBuffer
    except ImportError:
        return None
    buffer = PrioritizedReplayBuffer(size, {"x": {}}, alpha=0.6, eps=1e-3)
    buffer.add(x=np.zeros(size), priorities=np.random.default_rng(0).random(size))
    new = np.zeros(batch)

    def cycle(values: np.ndarray) -> object:
        buffer.add(x=new)
        sample = buffer.sample(batch, _WEIGHT_EXPONENT)
        buffer.update_priorities(sample["indexes"], values)
        return sample["weights"]

    return cycle


def cpprb_three_factors_cycle(size: int, batch: int, num_signatures: int) -> Cycle | None:
    """cpprb with our priorities, which it takes as they are: all change whenever the version does. Versions, advantages
    and signatures lie in arrays at the indices of its ring, as numbers from the beginning."""
    try:
        from cpprb import PrioritizedReplayBuffer
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    versions = np.arange(size) * _NUM_VERSIONS // size
    advantages, signatures = rng.random(size), rng.integers(num_signatures, size=size)
    incoming = rng.integers(num_signatures, size=batch)
    everything, new = np.arange(size), np.zeros(batch)
    buffer = PrioritizedReplayBuffer(size, {"x": {}}, alpha=1.0, eps=0.0)
    buffer.add(x=np.zeros(size))
    starts, numbers = itertools.count(0, batch), itertools.count(_NUM_VERSIONS)
    floor = _SAMPLER.uniform_floor / (1.0 - _SAMPLER.uniform_floor)

    def cycle(values: np.ndarray) -> object:
        start, version = next(starts), next(numbers)
        ring = np.arange(start, start + batch) % size
        versions[ring], advantages[ring], signatures[ring] = version - 1, advantages.max(), incoming
        buffer.add(x=new)
        priorities = np.exp((versions - version) / _SAMPLER.recency_tau)
        priorities *= (advantages + _SAMPLER.advantage_epsilon) ** _SAMPLER.advantage_exponent
        counts = np.maximum(np.bincount(signatures), 1)
        priorities *= (counts**-_SAMPLER.rarity_exponent)[signatures]
        priorities += floor * priorities.mean()
        buffer.update_priorities(everything, priorities)
        sample = buffer.sample(batch, _WEIGHT_EXPONENT)
        advantages[sample["indexes"]] = values
        return sample["weights"]

    return cycle


def left_out(options: dict[str, str]) -> list[str]:
    """Peers that are not installed, or do not load."""
    return [name for name, make in (("cpprb", cpprb_cycle), ("torchrl", torchrl_cycle)) if make(256, 256) is None]


def torchrl_cycle(size: int, batch: int) -> Cycle | None:
    """torchrl's PrioritizedSampler over a list of references, written in turn, without the classes around them; None
    where its compiled part does not load."""
    try:
        import torch
        import torchrl._torchrl  # noqa: F401
        from torchrl.data.replay_buffers import ListStorage, PrioritizedSampler
    except (ImportError, OSError):
        return None
    torch.set_num_threads(1)
    sampler = PrioritizedSampler(size, alpha=0.6, beta=_WEIGHT_EXPONENT, eps=1e-3)
    storage = ListStorage(size)
    storage._storage = [0] * size
    sampler.extend(torch.arange(size))
    sampler.update_priority(torch.arange(size), torch.from_numpy(np.random.default_rng(0).random(size)).float())
    starts = itertools.cycle(range(0, size - batch + 1, batch))
    new = [0] * batch

    def cycle(values: np.ndarray) -> object:
        start = next(starts)
        storage._storage[start : start + batch] = new
        sampler.extend(torch.arange(start, start + batch))
        index, info = sampler.sample(storage, batch)
        sampler.update_priority(index, torch.from_numpy(values).float())
        return info

    return cycle


def _trajectory(version: int) -> Trajectory:
    return Trajectory(
        tokens=np.arange(2, dtype=np.int32),
        action_mask=np.array([False, True]),
        behaviour_log_probs=np.zeros(2, np.float32),
        versions=np.array([-1, version], np.int32),
        rewards=np.zeros(2, np.float32),
        turns=np.array([[1, 2]], np.int32),
        bootstrap=False,
        episode_id="episode",
        group_id=0,
        task_id=0,
        env="none",
        actor_id="actor",
        ticket_id=0,
        signature="",
        score=0.0,
        success=False,
        stats={},
    )
