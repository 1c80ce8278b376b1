"""A directory with one owner: its lock, its file `run.json`, and its end.

Invariant: the owner holds a lock (flock) on the directory. The kernel frees it with the process, whatever ends that,
and every process sees it, from other PID namespaces too. Only the holder of the lock removes files inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

from impala_llm.pipeline.shm.file_lock import FileLock

RUN_FILE = "run.json"
"""Run id, API key of the run's SGLang servers, folder on disk, and the owner's process id."""
_LOCK_TRIES = 20
_LOCK_INTERVAL_S = 0.01


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used: it belongs to a living owner, to another user, or does not exist."""


def check_ours(root: Path, fix: str = "choose another run name") -> None:
    """Require a directory of this user.

    Args:
        root: to check.
        fix: end of the error message, which says what to do.

    Raises:
        RunDirectoryError: it is another user's, a link, or not a directory.
        FileNotFoundError: it does not exist.
    """
    # /dev/shm is writable for every user: never follow links that another user has put there.
    status = os.lstat(root)
    if root.is_symlink() or not root.is_dir() or status.st_uid != os.getuid():
        raise RunDirectoryError(f"{root} is not a directory of user {os.getuid()}: {fix}")


def _open_directory(root: Path) -> FileLock | None:
    """Open the directory; None where there is none. Raises RunDirectoryError where it is another user's."""
    try:
        check_ours(root)
        return FileLock(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None


def take_lock(root: Path, run_name: str, make: bool) -> FileLock | None:
    """Lock the directory of a run.

    Args:
        root: the directory.
        run_name: for the error message.
        make: create the directory where there is none.

    Returns:
        The lock, which is the caller's to close; None where there is no directory, or it was removed meanwhile: try
        again.

    Raises:
        RunDirectoryError: another process holds the lock.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
    if (lock := _open_directory(root)) is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(lock.close)
        for attempt in range(_LOCK_TRIES):
            if lock.take(fcntl.LOCK_EX):
                break
            # The holder may be a process that checks for an owner, for a moment.
            if attempt + 1 == _LOCK_TRIES:
                raise in_use(root, run_name)
            time.sleep(_LOCK_INTERVAL_S)
        if not lock.is_at(root):
            return None
        stack.pop_all()
        return lock


def in_use(root: Path, run_name: str) -> RunDirectoryError:
    """Make the error for a directory whose owner lives.

    Args:
        root: the directory.
        run_name: of its run.
    """
    return RunDirectoryError(
        f"run.name={run_name} is in use: {root} belongs to the living process {_owner_pid(root)}; stop that process, "
        "or choose another run name"
    )


def has_owner(root: Path) -> bool:
    """Return whether a living process holds the lock.

    Raises:
        RunDirectoryError: it is another user's directory.
    """
    if (lock := _open_directory(root)) is None:
        return False
    with contextlib.closing(lock):
        return not lock.take(fcntl.LOCK_SH)


def read_run_id(root: Path) -> int | None:
    """Read the run id; None where there is no run, or one that is being made or removed."""
    value = read_file(root).get("run_id")
    return value if type(value) is int and 0 < value < 2**63 else None


def _owner_pid(root: Path) -> object:
    return read_file(root).get("pid", "that makes or removes it")


def read_file(root: Path, name: str = RUN_FILE) -> dict[str, object]:
    """Read a JSON object from a file of a run's directory.

    Args:
        root: the directory.
        name: of the file.

    Returns:
        The object; empty if the file is missing or malformed.
    """
    try:
        values = json.loads((root / name).read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def empty(root: Path) -> None:
    """Remove all files in a directory whose lock is held, also while ending actors create and remove files in it."""
    (root / RUN_FILE).unlink(missing_ok=True)  # first: no process attaches to a directory that is half deleted
    for path in root.iterdir():
        while os.path.lexists(path):
            try:
                path.unlink() if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
            except OSError as error:
                # A file was created or removed after the listing: list again.
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    raise
