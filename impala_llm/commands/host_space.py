"""Shared memory and disk space that a run reserves, and whether this host has them. Each problem is a sentence with
key, value and fix."""

import contextlib
import os
import shutil
from pathlib import Path

from impala_llm.learning.checkpoints.files import checkpoints
from impala_llm.learning.policy.model_files import float32_bytes
from impala_llm.pipeline.shm.run_directory import ARENA, left_bytes, shared_memory
from impala_llm.settings import Config

MEGABYTE = 1 << 20
RELAY_COPIES = 4
"""Copies of the weights on a host of actors: three slots of the relay's board, and the version that arrives."""
DISK_SPARE = 32 * MEGABYTE
"""For logs, metrics and a small policy."""


def reserved_bytes(config: Config) -> dict[str, int]:
    """Bytes of shared memory by the setting that they follow from, on the learner's host; where the learner is on
    another one, on that of its actors.

    All of it is reserved as the processes start: without room they would fail again and again.
    """
    pipeline, path = config.pipeline, config.model.path
    published = float32_bytes(path) // (2 if config.publishes_bfloat16 else 1)
    if not config.learner_processes_here:  # what the relay fetches
        return {f"model.path={path}": RELAY_COPIES * published}
    # A version that is not published may be kept, on a board of two slots, in float32.
    kept = 0 if config.learner.sync_interval == 1 else 2 * float32_bytes(path)
    return {
        "replay.capacity_mb": config.learner.num_ranks * (config.replay.capacity_mb * 5 // 4 + 64) * MEGABYTE,
        "pipeline.arena_mb": config.num_actors * pipeline.arena_mb * MEGABYTE,
        "pipeline.weight_slots": pipeline.weight_slots * published + kept,
    }


def memory_problems(config: Config) -> list[str]:
    """Shared memory of a run that this host does not have."""
    return _shortage(reserved_bytes(config), left_bytes(config.run.name))


def actors_memory_problems(config: Config) -> list[str]:
    """Beside a learner the arenas of actors lie in shared memory."""
    parts = reserved_bytes(config)
    if config.learner_processes_here:
        return _shortage({"pipeline.arena_mb": parts["pipeline.arena_mb"]}, left_bytes(config.run.name, suffix=ARENA))
    return _shortage(parts, left_bytes(config.run.name))


def _shortage(parts: dict[str, int], left: int) -> list[str]:
    """A sentence where shared memory has no room for the bytes by setting.

    Args:
        left: bytes that a dead owner has left of this run: they are used again, or go first.
    """
    needed, free = sum(parts.values()), shutil.disk_usage(shared_memory()).free + left
    if needed <= free:
        return []
    shares = ", ".join(f"{size / MEGABYTE:,.0f} MiB for {key}" for key, size in parts.items())
    return [
        f"{shared_memory()} has {free / MEGABYTE:,.0f} MiB free, and the run reserves {needed / MEGABYTE:,.0f} MiB "
        f"({shares}): lower what these settings take, or enlarge it (Docker: --shm-size)"
    ]


def disk_problems(config: Config) -> list[str]:
    """Disk space for the last policy, without which a run has learned for nothing, and for checkpoints. With
    evaluations inside of the run there are two more policies, the best one and the one that is being evaluated, and the
    checkpoint of the best."""
    folder, kept = Path(config.run.dir), config.learner.checkpoints_kept
    num_policies = 3 if config.evaluation.inside_run else 1
    # One more is there while it is written. Beside the weights it has their moments, twice as large, and of ranks that
    # share the policy their shares of it; of adapters all of these are small.
    num_checkpoints = kept + (2 if config.evaluation.inside_run else 1) if kept else 0
    is_shared = config.learner.sharding == "fsdp2" or config.learner.tensor_parallel > 1
    num_parts = 1 if config.model.lora.rank else 4 if is_shared else 3
    weights = float32_bytes(config.model.path)
    needed = DISK_SPARE + (num_policies + num_parts * num_checkpoints) * weights
    # Their successors are written before they are removed.
    largest = num_parts if kept else 1
    needed = max(needed - _bytes_replaced(folder), DISK_SPARE + largest * weights)
    there = next(part for part in (folder, *folder.absolute().parents) if os.path.isdir(part))
    if (free := shutil.disk_usage(there).free) >= needed:
        return []
    fewer = ", lower learner.checkpoints_kept" if kept else ""
    return [
        f"run.dir={folder} has {free / MEGABYTE:,.0f} MiB of free disk space, and policies, checkpoints and logs take "
        f"{needed / MEGABYTE:,.0f} MiB: make room{fewer}, or name a folder on another disk"
    ]


def _bytes_replaced(folder: Path) -> int:
    """Bytes of the checkpoints and policies of a run that give way to later ones: not those of learner.save_every."""
    policies = [folder / name for name in ("policy", "policy-best", "policy-candidate")]
    total = 0
    parts = [part for part in (*checkpoints(folder), *policies) if os.path.isdir(part)]
    for path in (path for part in parts for path in part.rglob("*")):
        with contextlib.suppress(OSError):  # a learner may be at work
            total += path.stat().st_size if path.is_file() else 0
    return total
