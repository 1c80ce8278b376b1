"""Exchange of drawn items between the learner's ranks before an update, so that each of them computes about as much.

Each rank draws from its own replay shard, and all wait for the one whose rows take longest. Whole items move, so that a
group stays together, and for this update alone: tickets, replay and priorities stay with the rank that has drawn them.

The work of a context of n tokens is P n + L d n² multiplications, with P parameters in L layers of width d: the
matrices, and causal attention. In units of L d that is n² + n P / (L d). A row has one context or several.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from impala_llm.algorithms.interface import MetricValue
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.shm.record import decode_record, record_bytes
from impala_llm.trajectory import Trajectory

TOLERANCE = 0.03
"""Difference between the most and the least loaded rank, in units of the mean load, that is not worth an exchange."""


class WorkBalance:
    """Owned by the learner's thread of one rank; all processes of all ranks call its methods together.

    Args:
        model: its size says what a token costs beside a pair of tokens.
    """

    def __init__(self, ranks: Ranks, model: PolicyModel) -> None:
        self._ranks = ranks
        shape = model.lm.config.get_text_config()
        num_parameters = sum(p.numel() for p in model.lm.parameters())
        self._token = num_parameters / (shape.num_hidden_layers * shape.hidden_size)
        self._is_exchanged = False

    def work(self, trajectory: Trajectory) -> float:
        """Return the work of a row, in products of a pair of tokens in all layers."""
        lengths = trajectory.context_lengths
        return float((lengths * (lengths + self._token)).sum())

    def exchange(self, batch: Batch, computed: Sequence[bool], stays: bool) -> tuple[Batch, list[MetricValue]]:
        """Exchange items with the other ranks.

        Args:
            batch: that this rank has drawn.
            computed: whether each trajectory is computed; others are only counted.
            stays: leave this rank out. It gives no item away and takes none.

        Returns:
            The batch that this rank computes, and metrics, where there are several ranks.
        """
        self._is_exchanged = False
        if self._ranks.world_size == 1:
            return batch, []
        indices: dict[int, list[int]] = {}
        for i, item in enumerate(batch.item_ids):
            indices.setdefault(item, []).append(i)
        works = [sum(self.work(batch.trajectories[i]) for i in rows if computed[i]) for rows in indices.values()]
        found = self._ranks.gather({"works": works, "stays": [float(stays)]})
        taking_part = [rank for rank, part in enumerate(found) if not part["stays"][0]]
        assigned = assign([found[rank]["works"] for rank in taking_part])
        loads = np.array([sum(part["works"]) for part in found])
        if not loads.any():
            return batch, []
        metrics: list[MetricValue] = [("learner/imbalance_drawn", float(loads.max() / loads.mean()), 1.0)]
        for rank, homes in zip(taking_part, assigned, strict=True):
            loads[rank] = sum(found[taking_part[home]]["works"][index] for home, index in homes)
        metrics.append(("learner/imbalance", float(loads.max() / loads.mean()), 1.0))
        goes_to = {
            (taking_part[home], index): rank
            for rank, homes in zip(taking_part, assigned, strict=True)
            for home, index in homes
            if taking_part[home] != rank
        }
        self._is_exchanged = bool(goes_to)
        return self._exchanged(batch, list(indices.items()), goes_to) if goes_to else batch, metrics

    def _exchanged(
        self, batch: Batch, items: Sequence[tuple[int, list[int]]], goes_to: dict[tuple[int, int], int]
    ) -> Batch:
        """Send and receive items.

        Args:
            items: number of each item of this rank, and the indices of its trajectories in the batch.
            goes_to: (rank that has drawn it, its index in that rank's `items`) -> rank that computes it.
        """
        rank, sent, rows = self._ranks.rank, [], []
        for index, (item, indices) in enumerate(items):
            if (rank, index) not in goes_to:
                rows += [(batch.trajectories[i], batch.weights[i], item) for i in indices]
            elif self._ranks.leads:
                records = [record_bytes(batch.trajectories[i]) for i in indices]
                sent.append([goes_to[rank, index], item, [batch.weights[i] for i in indices], records])
        borrowed: dict[int, tuple[int, int]] = {}
        for home, part in enumerate(self._ranks.gather({"items": sent})):
            for destination, item, weights, records in part["items"]:
                if destination == rank:
                    number = -1 - len(borrowed)
                    borrowed[number] = (home, item)
                    trajectories = [decode_record(bytearray(record)) for record in records]
                    rows += [(t, weight, number) for t, weight in zip(trajectories, weights, strict=True)]
        rows.sort(key=lambda row: (row[0].ticket_id, row[0].unroll_index))
        trajectories_here, weights_here, numbers = zip(*rows, strict=True)
        return dataclasses.replace(
            batch, trajectories=trajectories_here, weights=weights_here, item_ids=numbers, borrowed=borrowed
        )

    def send_back(self, batch: Batch, sizes: dict[int, float]) -> dict[int, float]:
        """Send the numbers of items to the ranks that have drawn them; return those of this rank's items.

        Args:
            batch: that `exchange` returned.
            sizes: a number for each item of it.
        """
        if not self._is_exchanged:
            return sizes
        mine = {item: size for item, size in sizes.items() if item not in batch.borrowed}
        sent = [[home, item, sizes[number]] for number, (home, item) in batch.borrowed.items()]
        for part in self._ranks.gather({"sizes": sent if self._ranks.leads else []}):
            mine |= {item: size for home, item, size in part["sizes"] if home == self._ranks.rank}
        return mine


def assign(works: Sequence[Sequence[float]]) -> list[list[tuple[int, int]]]:
    """Assign items to ranks so that no rank has much more work than another, and few items move.

    Again and again the most loaded rank gives the least loaded one an item, alone or for another one, as it makes their
    loads most equal.

    Args:
        works: of each item, by the rank that has drawn it.

    Returns:
        For each rank its items, as (rank that has drawn it, index there).
    """
    held = [[(work, rank, index) for index, work in enumerate(mine)] for rank, mine in enumerate(works)]
    loads = np.array([sum(mine) for mine in works])
    for _ in range(4 * sum(map(len, works))):  # each exchange makes two loads more equal: it ends far sooner
        most, least = int(loads.argmax()), int(loads.argmin())
        gap = loads[most] - loads[least]
        if gap <= TOLERANCE * loads.mean():
            break
        given = np.array([work for work, _, _ in held[most]])
        taken = np.array([0.0, *(work for work, _, _ in held[least])])
        moved = given[:, None] - taken[None, :]
        best = int(np.abs(moved - gap / 2).argmin())
        i, j = divmod(best, len(taken))
        if not 0 < moved[i, j] < gap:
            break
        item = held[most].pop(i)
        if j:
            held[most].append(held[least].pop(j - 1))
        held[least].append(item)
        loads[most] -= moved[i, j]
        loads[least] += moved[i, j]
    return [[(rank, index) for _, rank, index in sorted(mine, key=lambda item: item[1:])] for mine in held]
