"""Entry: guard process between an owner and one SGLang server; only `SGLangServer` starts it.

    python guard.py OWNER_PID COMMAND...

Invariant: when this process ends by itself, no process that the server started is left, nor its temporary folder, nor a
file in shared memory that a look has found. A look, at least every `NOTE_S` seconds, finds the files that the server's
processes have made and map; so a server that is killed leaves at most those that it made after the last look, and those
that none of its processes mapped. No other files are removed: weights in shared memory, which it maps while it loads
them, are not its own, and a file that any other process maps is left. The guard ends when the server ends, when its
owner says so (SIGTERM), or when its owner is dead, even by SIGKILL.

A guard that is itself killed has its owner do the rest, by `finish`. Where both are killed at once, the server dies
with the guard, but workers that are still importing, the folder and the files may be left.

A death signal on the server alone is not enough: SGLang's children ask for theirs only after seconds of imports, and a
server that is killed unlinks nothing. The owner asks by SIGUSR1, once the server is up, for a look at once; a line on
standard output says that it is done. All other output goes to standard error.

The server's API key comes in a variable, and is passed on in a file of the temporary folder, which only this user can
read: not on a command line, which every user can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

import psutil

from impala_llm.processes.compiled_code import keep_compiled_code

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = Path("/dev/shm")
KEY_VARIABLE = "IMPALA_LLM_SERVER_KEY"
FOLDER_VARIABLE = "IMPALA_LLM_SERVER_FOLDER"
"""Path at which the guard makes the server's temporary folder; without it, at one of its own choice."""
NOTES = "shared_memory.json"
"""File of the folder with the name and inode of each file that was found in shared memory, for `finish`."""
NOTE_S = 0.5
"""Seconds between two looks for files in shared memory."""
TRACKER_GRACE_S = 2.0
"""Seconds for Python's resource trackers, which unlink semaphores once all other processes are dead, and then end."""
FINISH_S = 10.0
"""Seconds after which an owner leaves processes that do not die."""
WAKE_UPS = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1})


def main(owner: int, command: Sequence[str]) -> int:
    """Run the command to its end. Returns its exit code, 128 + n after signal n, or 0 if the guard ended it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKE_UPS)
    _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:  # it died before its death signal was requested
        return 0
    earlier = frozenset(entry.inode() for entry in os.scandir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset()
    folder = Path(os.environ.pop(FOLDER_VARIABLE, "") or new_folder())
    folder.mkdir(mode=0o700)
    files: dict[str, int] = {}
    try:
        server = subprocess.Popen(
            [*command, *_key_words(folder)],
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=_prepare_server,
        )
        return _watch(owner, server, partial(_note, files, folder, earlier))
    finally:
        _note(files, folder, earlier)
        _end_all(_left)
        _remove(files)
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> Path:
    """Choose a path for a server's temporary folder, which does not exist yet."""
    return Path(tempfile.gettempdir()) / f"impala-sglang-{secrets.token_hex(8)}"


def finish(guard: int, folder: Path) -> None:
    """Do the rest for a guard that was killed: end the server's processes, remove its files and its folder.

    Args:
        guard: process id, of which the exit code was read.
        folder: given to it in `FOLDER_VARIABLE`.
    """
    _end_all(partial(_family, guard, folder), FINISH_S)
    with contextlib.suppress(OSError, ValueError):  # it was killed before it found any
        _remove(json.loads((folder / NOTES).read_text()))
    shutil.rmtree(folder, ignore_errors=True)


def _watch(owner: int, server: subprocess.Popen[bytes], note: Callable[[], None]) -> int:
    while True:
        woken = signal.sigtimedwait(WAKE_UPS, NOTE_S)
        note()
        for pid, code in _reap():
            if pid == server.pid:
                server.returncode = code
                return code if code >= 0 else 128 - code
        number = None if woken is None else woken.si_signo
        if number == signal.SIGUSR1:
            print("noted", flush=True)
        elif number == signal.SIGTERM or os.getppid() != owner:
            # SIGHUP also comes when only the thread that started us has ended: then the owner is still our parent.
            return 0


def _key_words(folder: Path) -> list[str]:
    """Arguments of SGLang's command line for its API key, if there is one; the variable is removed."""
    key = os.environ.pop(KEY_VARIABLE, None)
    if key is None:
        return []
    settings = folder / "server.yaml"
    settings.write_text(json.dumps({"api-key": key}))  # which is YAML too
    return ["--config", str(settings)]


def _environment(folder: Path) -> dict[str, str]:
    """Variables of the server: temporary files in the folder, a lasting cache of compiled code, no path of ours."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    keep_compiled_code(folder, environment)
    environment.pop("PYTHONPATH", None)
    return environment


def _prepare_server() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKE_UPS)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _reap() -> list[tuple[int, int]]:
    """Pid and exit code of each child that has ended, adopted ones included."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def _note(files: dict[str, int], folder: Path, earlier: Set[int]) -> None:
    """Add the server's files in shared memory to `files`, name -> inode, and to the notes for `finish`.

    These are the files directly in shared memory, as shm_open makes them, that a descendant of this process has mapped
    as shared and writable, and whose inodes are not in `earlier`. Files of other owners are mapped read-only.
    """
    mapped = {inode for each in _descendants() for inode in _mapped(each.pid, {"w", "s"})} - earlier
    if not mapped:
        return
    # Matched by inode: a process that created a semaphore has it mapped under a temporary name that no longer exists.
    found = {entry.name: entry.inode() for entry in os.scandir(SHARED_MEMORY) if entry.inode() in mapped}
    if found.items() <= files.items():
        return
    files |= found
    with contextlib.suppress(OSError):  # no room: this process still has them, only `finish` in its owner has not
        unfinished = folder / f"{NOTES}.new"
        unfinished.write_text(json.dumps(files))
        unfinished.replace(folder / NOTES)


def _mapped(pid: int, permissions: Set[str] = frozenset()) -> set[int]:
    """Inodes of files without a folder in shared memory that a process maps so; none if it has ended or is not ours."""
    inodes = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_bytes().decode(errors="replace").split("\n"):
            if f"{SHARED_MEMORY}/" in line:
                _, given, _, _, inode, path = line.split(maxsplit=5)
                if permissions <= {*given} and Path(path).parent == SHARED_MEMORY:
                    inodes.add(int(inode))
    return inodes


def _remove(files: Mapping[str, int]) -> None:
    """Remove files from shared memory, but for those that were replaced and those that a living process maps."""
    in_use = {inode for pid in psutil.pids() for inode in _mapped(pid)} if files else set()
    for name, inode in files.items():
        with contextlib.suppress(OSError):  # it is gone
            file = SHARED_MEMORY / name
            if inode not in in_use and file.stat().st_ino == inode:
                file.unlink()


def _end_all(find: Callable[[], list[psutil.Process]], at_most_s: float = math.inf) -> None:
    """Kill the processes that are found until none is."""
    begin = time.monotonic()
    while (processes := find()) and time.monotonic() < begin + at_most_s:
        for process in processes:
            try:
                tracker = any("resource_tracker" in word for word in process.cmdline())
                if not tracker or time.monotonic() > begin + TRACKER_GRACE_S:
                    process.kill()
            except psutil.Error:
                continue
        time.sleep(0.01)


def _descendants() -> list[psutil.Process]:
    """Find the descendants of this process: orphans become our children."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def _left() -> list[psutil.Process]:
    """Find the descendants that have not ended."""
    _reap()
    return _descendants()


def _family(guard: int, folder: Path) -> list[psutil.Process]:
    """Find the living processes of a dead guard's server: those in its session, and those with the temporary folder."""
    found = []
    # While its session has a process, its number is given to no other.
    is_reused = psutil.pid_exists(guard)
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # gone, or another user's
            process = psutil.Process(pid)
            in_session = not is_reused and os.getsid(pid) == guard
            if process.status() != psutil.STATUS_ZOMBIE and (
                in_session or process.environ().get("TMPDIR") == str(folder)
            ):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
