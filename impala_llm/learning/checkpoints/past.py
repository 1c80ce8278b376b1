"""The state that a rank takes over from a checkpoint: its own, or its share of one that another number of ranks wrote.

The id of a group of tickets determines its rank. So each live ticket, trajectory and item of the buffer has exactly one
new rank, and no task is skipped or repeated that some ranks had reached in the order and others had not. With another
number of ranks the states of the random generators are lost, and the remainders of counts that each rank keeps.

Invariant: the result does not depend on the current state of a rank; its versions are those with which the learner
continues.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.pipeline.learner_endpoint import PastTickets
from impala_llm.pipeline.tickets import journal_rows
from impala_llm.pipeline.tickets.curriculum import merged
from impala_llm.trajectory import MAX_TICKETS, Trajectory


@dataclass(frozen=True)
class Past:
    """State of a rank, from a checkpoint."""

    plain: Mapping[str, Any]
    """See `State.plain`."""
    tickets: PastTickets
    settled: Mapping[int, Trajectory]
    """Trajectories by `unroll_id` whose tickets have ended, and that may be used again."""

    @classmethod
    def of(cls, checkpoint: CheckpointReader, rank: int, num_ranks: int, version: int, is_lost: bool) -> "Past":
        """Read the state of a rank.

        Args:
            num_ranks: of this run.
            version: that the learner continues with; all others are shifted with it.
            is_lost: whether tickets and trajectories are wanted; else they lie in shared memory, and none is read.

        Raises:
            CheckpointError: it cannot be read.
        """
        manifest = checkpoint.manifest
        shift = version - manifest.version
        if manifest.num_ranks == num_ranks:
            plain, writers = checkpoint.plain(rank), range(rank, rank + 1)
        else:
            writers = range(manifest.num_ranks)
            plain = dealt([checkpoint.plain(each) for each in writers], rank, num_ranks)
        if not is_lost:
            return cls(plain, PastTickets((), ()), {})
        everywhere = {n: t for each in writers for n, t in checkpoint.trajectories(each, shift).items()}
        trajectories = {n: t for n, t in everywhere.items() if t.group_id % num_ranks == rank}
        rows = journal_rows.renumbered(np.asarray(plain["rows"]).tolist(), shift)
        held = set(plain["held"])
        tickets = PastTickets(rows, [trajectories[number] for number in plain["held"]])
        return cls(plain, tickets, {number: t for number, t in trajectories.items() if number not in held})


def dealt(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """The state of one of several ranks, from the states of another number of them.

    Args:
        states: of the ranks that wrote the checkpoint, see `State.plain`.
    """
    rows = [np.asarray(state["rows"]).tolist() for state in states]
    group_size = journal_rows.group_size_of(rows[0])

    def is_mine(unroll: int) -> bool:
        return unroll % MAX_TICKETS // group_size % num_ranks == rank

    first = states[0]
    of_trainer = dict(first["states"]["trainer"])
    returns = [value for state in states for value in state["states"]["trainer"]["rewards"]["first"]]
    of_trainer["rewards"] = {**of_trainer["rewards"], "first": returns if rank == 0 else []}
    begun = [row for state in states for row in state["states"]["meters"]["begun"] if is_mine(row[0])]
    of_meters = {**first["states"]["meters"], "begun": begun}
    sources = [state["batches"] for state in states]
    rates = [source["rate"] for source in sources]
    return {
        "rows": np.array(journal_rows.dealt(rows, rank, num_ranks), np.int64),
        "held": [number for state in states for number in state["held"] if is_mine(number)],
        "random": states[min(rank, len(states) - 1)]["random"],
        "states": {**first["states"], "trainer": of_trainer, "meters": of_meters},
        "batches": {
            **sources[0],
            "buffer": _dealt_buffer([source["buffer"] for source in sources], is_mine),
            "rate": {name: sum(rate[name] for rate in rates) / num_ranks for name in rates[0]},
            "groups": {
                name: sorted(n for source in sources for n in source["groups"][name])
                for name in ("closed_short", "open")
            },
            "max_replayed": None,
            # A checkpoint of an earlier release has none.
            "received": [n for source in sources for n in source.get("received", ()) if is_mine(n)],
            "curriculum": merged([known for source in sources if (known := source["curriculum"])]),
        },
    }


def rates_of(past: Past | None) -> Mapping[str, Any] | None:
    """The state of its curriculum; None where it has none."""
    return None if past is None else past.plain["batches"]["curriculum"]


def _dealt_buffer(buffers: Sequence[Mapping[str, Any]], is_mine: Callable[[int], bool]) -> dict[str, Any]:
    """The items of several buffers that belong to a rank, in the order in which they came, with new ids."""
    rows = [
        (int(buffer["columns"]["item_id"][row]), number, row)
        for number, buffer in enumerate(buffers)
        for row, members in enumerate(buffer["trajectories"])
        if is_mine(members[0])
    ]
    rows.sort()
    columns = {
        name: np.array([buffers[number]["columns"][name][row] for _, number, row in rows], column.dtype)
        for name, column in buffers[0]["columns"].items()
    }
    return {
        **buffers[0],
        "version": max(buffer["version"] for buffer in buffers),
        "next_id": len(rows),
        "columns": {**columns, "item_id": np.arange(len(rows))},
        "signatures": [buffers[number]["signatures"][row] for _, number, row in rows],
        "trajectories": [buffers[number]["trajectories"][row] for _, number, row in rows],
    }
