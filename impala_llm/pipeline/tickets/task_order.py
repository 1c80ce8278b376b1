"""Order in which tasks are played: endless, reproducible, without gaps.

Invariant: over all ranks together, each epoch holds every task exactly once; with a curriculum, at most once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from impala_llm.pipeline.tickets.curriculum import Curriculum

_MOST_PASSED = 10_000
"""Most groups that are skipped in a row, so that `next` returns in bounded time."""


class TaskOrder:
    """Endless order of (task, group), reproducible from (tasks, group_size, seed) and a position.

    Each epoch is a new shuffle of all tasks. Ranks take positions rank, rank + world_size, ... of the one global
    order: so no task is skipped or repeated in an epoch, however many ranks share it. The global position is the
    group's id.

    Args:
        tasks: ids, all different, the same on all ranks.
        group_size: tickets of a group.
        seed: of the shuffles and the tickets.
        rank, world_size: this rank, and the number of ranks that share the order.
        curriculum: decides which groups are skipped; None: none is.

    Raises:
        ValueError: there are no tasks or repeated ones, group_size is below 1, or rank is outside of the world.
    """

    def __init__(
        self,
        tasks: Sequence[int],
        group_size: int = 1,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        curriculum: Curriculum | None = None,
    ) -> None:
        if not tasks:
            raise ValueError("tasks is empty: there is nothing to play")
        if len(set(tasks)) != len(tasks):
            raise ValueError(f"tasks repeats ids: {len(tasks)} tasks, {len(set(tasks))} of them different")
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}: at least 1 is needed")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: it must lie in [0, world_size = {world_size})")
        self._tasks = np.asarray(tasks, np.int64)
        self.group_size = group_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._curriculum = curriculum
        self._num_taken = 0
        self._epoch = -1
        self._shuffled = self._tasks

    def next(self) -> tuple[int, int]:
        """Take the next (task_id, group_id) of this rank."""
        for _ in range(_MOST_PASSED):
            group_id = self._num_taken * self._world_size + self._rank
            self._num_taken += 1
            task_id = self.task_of(group_id)
            if self._curriculum is None or self._curriculum.plays(task_id, group_id):
                break
        return task_id, group_id

    def task_of(self, group_id: int) -> int:
        """Id of the task of a group."""
        epoch, index = divmod(group_id, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._tasks)
        return int(self._shuffled[index])

    @property
    def num_taken(self) -> int:
        """Number of groups that this rank has taken."""
        return self._num_taken

    def skip_to(self, num_taken: int) -> None:
        """Continue after this many groups."""
        self._num_taken = num_taken

    def ticket_seed(self, ticket_id: int) -> int:
        """Seed of a ticket's episode, in [0, 2^63)."""
        state = np.random.SeedSequence([self._seed, ticket_id]).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))

    def identity(self) -> dict[str, int]:
        """Numbers that determine the order."""
        return {
            "num_tasks": len(self._tasks),
            "group_size": self.group_size,
            "seed": self._seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }
