"""Trajectories and weights of the chaos test, made so that every byte of them can be checked."""

import hashlib
import mmap
from dataclasses import replace

import numpy as np

from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.weights.tensor_writing import TensorBytes
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory
from tests.pipeline.support import VOCAB_SIZE, make_trajectory

MIN_TOKENS, MAX_TOKENS = 50, 20_000
NUM_WORDS = 500_000


def digest(trajectory: Trajectory) -> str:
    """Digest of everything in a trajectory."""
    total = hashlib.sha256()
    for name in ARRAY_FIELDS:
        array = getattr(trajectory, name)
        total.update(f"{name} {array.dtype.str} {array.shape}".encode())
        total.update(array.tobytes())
    total.update(repr([getattr(trajectory, name) for name in METADATA_FIELDS]).encode())
    return total.hexdigest()


def make_episode(
    ticket: Ticket,
    attempt: int,
    version: int,
    episode_id: str,
    actor_id: str,
    flaw: str,
    unroll_index: int = 0,
    continues: bool = False,
) -> Trajectory:
    """A trajectory of 50 to 20,000 tokens, small ones as often as large ones.

    flaw: what is wrong with it, if anything: an unknown token (vocabulary), another group (group), a version to come
    (future). What is to be changed in the arena later (scribbled) is right for now.
    """
    rng = np.random.default_rng([ticket.ticket_id, attempt])
    trajectory = make_trajectory(
        ticket,
        seed=int(rng.integers(2**31)),
        num_tokens=int(np.exp(rng.uniform(np.log(MIN_TOKENS), np.log(MAX_TOKENS)))),
        version=version + 1000 if flaw == "future" else version,
        episode_id=episode_id,
        unroll_index=unroll_index,
        continues=continues,
        actor_id=actor_id,
    )
    if flaw == "group":
        return replace(trajectory, group_id=ticket.group_id + 1)
    if flaw == "vocabulary":
        tokens = trajectory.tokens.copy()
        tokens[rng.integers(len(tokens))] = VOCAB_SIZE
        return replace(trajectory, tokens=tokens)
    return trajectory


def scribble(run_dir: RunDirectory, trajectory: Trajectory) -> bool:
    """Change a byte of a trajectory in its actor's arena. False where it does not lie there."""
    with run_dir.arena_path(trajectory.actor_id).open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        found = arena.find(trajectory.episode_id.encode())
        if found < 0:
            return False
        # The arrays follow the text, which is short.
        arena[found + 300] ^= 1
        return True


_WORDS = np.arange(NUM_WORDS, dtype=np.uint32) * np.uint32(2_654_435_761)


def weights(version: int) -> dict[str, TensorBytes]:
    """Every word of it says which version it belongs to."""
    words = _WORDS + np.uint32(version * 40_503 % 2**32)
    return {name: ("U32", (NUM_WORDS,), (words ^ np.uint32(i)).view(np.uint8)) for i, name in enumerate("ab")}


def is_whole(tensors: dict[str, TensorBytes], version: int) -> bool:
    """Whether all bytes are those of the version."""
    expected = weights(version)
    return tensors.keys() == expected.keys() and all(
        np.array_equal(tensors[name][2], expected[name][2]) for name in expected
    )
