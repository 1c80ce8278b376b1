"""Trajectories in a trajectory store, without the ingest: what its tests build."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.record import facts_of, record_bytes
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.trajectory import Trajectory
from tests.pipeline.support import make_trajectory


def make(ticket_id: int, num_tokens: int | None = None) -> Trajectory:
    """The same for the same arguments."""
    size = 6 + ticket_id * 37 % 90 if num_tokens is None else num_tokens
    trajectory = make_trajectory(seed=ticket_id, num_tokens=size, episode_id=f"episode {ticket_id}")
    return dataclasses.replace(trajectory, ticket_id=ticket_id)


def words_of(trajectory: Trajectory) -> np.ndarray:
    """uint64[n]: its record."""
    return np.frombuffer(record_bytes(trajectory), np.uint64)


def checksum_of(words: np.ndarray) -> int:
    """Checksum of uint64[n], as int64: as descriptors and the index hold it."""
    return int(np.array(int(copy_kernels.checksum(words)), np.uint64).view(np.int64))


def lay_down(arena: TrajectoryStore, start: int, words: np.ndarray) -> tuple[int, int, int, list[int]]:
    """Copy a record to where room was reserved. Returns what `commit_laid` takes."""
    arena.words[start : start + len(words)] = words
    return start, len(words), checksum_of(words), list(facts_of(memoryview(words).cast("B")))


def commit_laid(arena: TrajectoryStore, laid: Sequence[tuple[int, int, int, list[int]]]) -> list[Trajectory]:
    starts, sizes, checksums, facts = (np.array(column, np.int64) for column in zip(*laid, strict=True))
    return arena.commit(starts, sizes, checksums, facts)


def commit(arena: TrajectoryStore, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Keep as many of the first ones as there is room for."""
    records = [words_of(trajectory) for trajectory in trajectories]
    starts = arena.reserve(np.array([len(words) for words in records], np.int64)).tolist()
    laid = [lay_down(arena, start, words) for start, words in zip(starts, records, strict=False)]
    return commit_laid(arena, laid) if laid else []
