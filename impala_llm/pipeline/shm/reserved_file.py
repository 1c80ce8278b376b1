"""Small files that are rewritten often and must stay writable when the file system is full: their memory is reserved
beforehand."""

from __future__ import annotations

import os
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def reserve(path: Path, num_bytes: int) -> None:
    """Reserve memory for the first bytes of a file. An existing file keeps its contents; a new one consists of zeros.

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
    """Replace a file's contents in place. No new memory is needed up to the size that it had, or had reserved.

    Args:
        path: of the file, made where it is missing.
        content: all that it holds afterwards.

    Raises:
        OSError: the file system has no room for the bytes beyond that size.
    """
    with open(os.open(path, _FLAGS, 0o600), "wb") as file:
        file.write(content)
        file.truncate()
