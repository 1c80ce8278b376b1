"""Small files that are written again and again, also where others have filled the file system: in memory that was
reserved while there was some."""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def reserve(path: Path, num_bytes: int) -> None:
    """Reserve memory for the first bytes of a file, which keeps its contents; where there is none it is made, of zeros.

    Args:
        path: of the file.
        num_bytes: 1 at least.

    Raises:
        OSError: the file system has no room.
    """
    handle = os.open(path, _FLAGS, 0o600)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    finally:
        os.close(handle)


def overwrite(path: Path, content: bytes) -> None:
    """Write a file in place: what it held as many bytes of, or had reserved, needs no further memory.

    Args:
        path: of the file, made where it is missing.
        content: all that it holds afterwards.

    Raises:
        OSError: the file system has no room for what is beyond its size.
    """
    with open(os.open(path, _FLAGS, 0o600), "wb") as file:
        file.write(content)
        file.truncate()
