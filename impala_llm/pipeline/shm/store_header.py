"""Header of a trajectory store: the sizes that its file is made with. No process of the run need exist to read it."""

import struct
from pathlib import Path

from impala_llm.settings import ReplayConfig

MAGIC = b"ILLMKEEP"
FORMAT = 1
HEADER = struct.Struct("<8sQQQ")
"""Magic, format, most records, capacity in bytes."""


def sizes(replay: ReplayConfig) -> tuple[int, int]:
    """Return (capacity in bytes, most records) of a learner rank's trajectory store."""
    # Beyond the buffer's own capacity: open groups, what is queued for it, headers and gaps.
    return (replay.capacity_mb * 5 // 4 + 64) << 20, 4 * replay.capacity


def settings_of(path: Path) -> dict[str, int]:
    """Read the settings by which `sizes` gave those of a store: key -> value.

    Args:
        path: file of the store.

    Returns:
        Nothing where the file has no header.
    """
    try:
        with path.open("rb") as file:
            magic, version, max_records, capacity = HEADER.unpack(file.read(HEADER.size))
    except (OSError, struct.error):
        return {}
    if (magic, version) != (MAGIC, FORMAT):
        return {}
    return {"replay.capacity": max_records // 4, "replay.capacity_mb": -(-4 * ((capacity >> 20) - 64) // 5)}
