"""Cores, threads and memory that this process may use, by its control groups, such as those of a container.

A container sees all cores and all the memory of its host; what it may use of them stands in files of cgroups(7) alone.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def num_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by the quota of its container."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return int(min(there, most_cores()))


def thread_limit() -> int:
    """Return the first number in OMP_NUM_THREADS, which may be a list; the number of cores where there is none.

    The 1 that torchrun sets for several ranks, where the user has set nothing, does not count.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_torchruns = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != "1"
    return int(given) if given.isdecimal() and int(given) and not is_torchruns else num_cores()


def most_cores() -> float:
    """Return the number of cores, a whole one, that the quota of CPU time allows; infinite without one."""
    limits = [math.inf]
    for folder in _folders("cpu"):
        # Version 2 has both numbers in one file, version 1 in two.
        text = _text(folder / "cpu.max") or _text(folder / "cpu.cfs_quota_us") + _text(folder / "cpu.cfs_period_us")
        numbers = text.split()
        if len(numbers) == 2 and numbers[0] not in ("max", "-1"):
            limits.append(math.ceil(int(numbers[0]) / int(numbers[1])))
    return min(limits)


def most_memory() -> float:
    """Return the bytes of memory that the groups allow; infinite without a limit."""
    limits = [math.inf]
    for folder in _folders("memory"):
        text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if text and not text.startswith("max"):
            limits.append(int(text))
    return min(limits)


def memory_left() -> float:
    """Return the bytes of memory that the groups still allow; infinite without a limit. Files that are mapped or were
    read, and of which nothing is in use, do not count."""
    left = [math.inf]
    for folder in _folders("memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit and used and not limit.startswith("max"):
            numbers = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            unused = int(numbers.get("total_inactive_file") or numbers.get("inactive_file") or 0)
            left.append(max(0, int(limit) - int(used) + unused))
    return min(left)


def _folders(controller: str) -> Iterator[Path]:
    """Folders, there or not, of this process's groups that a controller may limit, and of their parents."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 names no controller. Version 1 may name several that are mounted together, in any order, and have a
        # link for each.
        for mounted in {controllers, controller if controllers else ""}:
            folder = ROOT / "sys/fs/cgroup" / mounted
            yield folder
            # A container may be told its path on the host, while its own group lies at the root.
            for part in path.split("/"):
                folder /= part
                yield folder


def _text(file: Path) -> str:
    """Return what a file says; empty where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
