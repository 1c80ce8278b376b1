"""Folders that a command writes to: tried before anything is played or learned, and refused in a sentence."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from impala_llm.config import ConfigError


def try_to_write(folder: Path) -> None:
    """Make a folder if it is missing, and write to it, before work begins whose results could not be saved in it.

    Raises:
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"a disk that is full refuses this")


@contextmanager
def removed_if_refused(folder: Path, note: str) -> Iterator[None]:
    """Remove a folder that the block makes before it raises an error, unless more files than `note` are in it."""
    missing = [part for part in (folder, *folder.parents) if not os.path.exists(part)]
    try:
        yield
    except Exception:
        if missing and {path.name for path in folder.rglob("*") if not path.is_dir()} <= {note}:
            shutil.rmtree(folder, ignore_errors=True)
            for part in missing[1:]:
                with suppress(OSError):  # it could not be made, or another process uses it by now
                    part.rmdir()
        raise


@contextmanager
def writing_to(named: str) -> Iterator[None]:
    """Raise ConfigError where the disk refuses what the block writes. named: folder and setting, `sft.dir=out`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{named} cannot be written to ({reason}): name another folder, or put that right") from None
