"""Two threads in place of two processes."""

import threading
from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from impala_llm.learning.ranks.parallel import Ranks


class Meeting:
    """A meeting point at which rank 0 and rank 1 exchange objects, again and again."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._brought: list[Any] = [None, None]

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Wait for the other rank; return what both brought, rank 0 first. BrokenBarrierError after 30 s without it."""
        self._brought[rank] = mine
        self._barrier.wait(30)
        both = list(self._brought)
        self._barrier.wait(30)
        return both


class ThreadRanks(Ranks):
    """Two ranks in one process, a thread each."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__("cpu")
        self.rank = self.process = rank
        self.world_size = self.num_processes = 2
        self._meeting = meeting

    def sum(self, numbers: Sequence[float], of_processes: bool = False) -> list[float]:
        return [sum(pair) for pair in zip(*self._meeting.exchange(self.rank, list(numbers)), strict=True)]

    def gather(self, item: dict[str, list[Any]], of_processes: bool = False) -> list[dict[str, list[Any]]]:
        return [msgpack.unpackb(part) for part in self._meeting.exchange(self.rank, msgpack.packb(item))]


class TrainingRanks(ThreadRanks):
    """Two ranks that sum their gradients up."""

    def sum_gradients(self, model: torch.nn.Module) -> None:
        parameters = list(model.parameters())
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for p, *both in zip(parameters, *self._meeting.exchange(self.rank, mine), strict=True):
            p.grad = both[0] + both[1]
