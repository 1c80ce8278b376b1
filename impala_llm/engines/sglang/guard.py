"""Entry: guard process between an owner and one SGLang server; only `SGLangServer` starts it.

    python guard.py OWNER_PID COMMAND...

Invariant: when this process ends, no process that the server started is left, and the files that it made in shared
memory and in its temporary folder are removed. No other files are: weights in shared memory, which it maps while it
loads them, are not its own. The guard ends when the server ends, when its owner says so (SIGTERM), or when its owner is
dead, even by SIGKILL.

A death signal on the server alone is not enough: SGLang's children ask for theirs only after seconds of imports, and a
server that is killed unlinks nothing. The owner asks by SIGUSR1, once the server is up, to note these files; a line on
standard output says that it is done. All other output goes to standard error.

The server's API key comes in a variable, and is passed on in a file of the temporary folder, which only this user can
read: not on a command line, which every user can read.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHARED_MEMORY = Path("/dev/shm")
KEY_VARIABLE = "IMPALA_LLM_SERVER_KEY"
TRACKER_GRACE_S = 2.0
"""Seconds for Python's resource trackers, which unlink semaphores once all other processes are dead, and then end."""
WAKE_UPS = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1})


def main(owner: int, command: Sequence[str]) -> int:
    """Run the command to its end. Returns its exit code, 128 + n after signal n, or 0 if the guard ended it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKE_UPS)
    _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != owner:  # it died before its death signal was requested
        return 0
    files: dict[Path, int] = {}
    earlier = frozenset(entry.inode() for entry in os.scandir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset()
    with tempfile.TemporaryDirectory(prefix="impala-sglang-", ignore_cleanup_errors=True) as folder:
        try:
            server = subprocess.Popen(
                [*command, *_key_words(folder)],
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                preexec_fn=_prepare_server,
            )
            return _watch(owner, server, files, earlier)
        finally:
            files |= _made_by_server(earlier)
            _end_descendants()
            for file, inode in files.items():
                with contextlib.suppress(FileNotFoundError):
                    if file.stat().st_ino == inode:
                        file.unlink()


def _watch(owner: int, server: subprocess.Popen[bytes], files: dict[Path, int], earlier: Set[int]) -> int:
    while True:
        number = signal.sigwait(WAKE_UPS)
        for pid, code in _reap():
            if pid == server.pid:
                server.returncode = code
                return code if code >= 0 else 128 - code
        if number == signal.SIGUSR1:
            files |= _made_by_server(earlier)
            print("noted", flush=True)
        elif number == signal.SIGTERM or os.getppid() != owner:
            # SIGHUP also comes when only the thread that started us has ended: then the owner is still our parent.
            return 0


def _key_words(folder: str) -> list[str]:
    """Arguments of SGLang's command line for its API key, if there is one; the variable is removed."""
    key = os.environ.pop(KEY_VARIABLE, None)
    if key is None:
        return []
    settings = Path(folder) / "server.yaml"
    settings.write_text(json.dumps({"api-key": key}))  # which is YAML too
    return ["--config", str(settings)]


def _environment(folder: str) -> dict[str, str]:
    """Variables of the server: temporary files in the folder, a lasting cache of compiled code, no path of ours."""
    environment = {**os.environ, "TMPDIR": folder}
    # An owner that imports torch has the variable with torch's own choice, a folder that anybody may have made.
    of_torch = f"{tempfile.gettempdir()}/torchinductor_"
    if environment.get("TORCHINDUCTOR_CACHE_DIR", of_torch).startswith(of_torch):
        environment["TORCHINDUCTOR_CACHE_DIR"] = _compiled_code(folder)
    environment.pop("PYTHONPATH", None)
    return environment


def _compiled_code(folder: str) -> str:
    """A folder for compiled code that lasts; `folder` where others could put code there for the server to run."""
    try:
        cache = Path.home() / ".cache" / "impala_llm" / "inductor"
        for each in (cache.parent, cache):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = each.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise PermissionError(f"{each} must be user {os.getuid()}'s and closed to others: chmod 700 {each}")
        return str(cache)
    except (OSError, RuntimeError) as error:
        print(f"each start compiles anew, as compiled code has no safe place: {error}", file=sys.stderr)
        return folder


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


def _made_by_server(earlier: Set[int]) -> dict[Path, int]:
    """Find the files in shared memory that our descendants have made and mapped. Returns path -> inode.

    These are files without a folder, as shm_open makes them, that are mapped for writing by all and whose inodes are
    new. Files of others are mapped for reading.
    """
    files = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                _, permissions, _, _, inode, *path = line.split(maxsplit=5)
                is_shared = {"w", "s"} <= {*permissions}
                if is_shared and path and Path(path[0]).parent == SHARED_MEMORY and int(inode) not in earlier:
                    files[Path(path[0])] = int(inode)
    return files


def _end_descendants() -> None:
    """Kill descendants until none is left: orphans become our children."""
    spare_until = time.monotonic() + TRACKER_GRACE_S
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            try:
                tracker = any("resource_tracker" in word for word in process.cmdline())
                if not tracker or time.monotonic() > spare_until:
                    process.kill()
            except psutil.Error:
                continue
        _reap()
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
