"""One learner, or one warm start, at a time writes to a folder, also where several hosts share it. No torch here.

A learner notes in the folder who it is, and changes a number there every few seconds. Another one that is about to
begin looks at the number: while it changes, the first one lives, and the second is refused. Where it stands still, as
after a lost host, the second takes the folder; should the first come back after all, it finds another's name there, and
ends. The name stays when a learner has ended, and is marked as over. On one host the system says at once whether a
process lives.

Two that begin within seconds may both find the folder free. Where the file is not there, one of them creates it, and
the other finds its name. Where both take the place of an earlier one, the name that is written last stays: a learner
looks again when it has loaded its model, before it writes versions and metrics, and ends if it finds another's. So two
write to one folder only if one of them stands still between its first look and its write for longer than the other
loads its model, and then until the other's next beat. NFS, from version 3 on, lets only one create the file as well,
and a look opens the file anew, so that it finds what another host has closed. It may find the content of before, up to
a minute by default, where the mount has `nocto` or the server's times do not tell two writes apart.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from impala_llm.config import ConfigError
from impala_llm.learning.checkpoints.files import CheckpointError

FILE = "owner.json"
BEAT_S = 3.0
"""Seconds between two changes of the number."""
SILENCE_S = 15.0
"""Seconds without a change after which a learner of another host counts as lost."""
_LOOKS = 30
"""Looks at the number in the time after which a learner counts as lost."""
_BYTES = 512
_STARTED_AT = 19
"""Index of the start time in /proc/PID/stat, proc_pid_stat(5), after the name."""


RUN_FIX = "end it first, or set another run.name, and another run.dir if you set one"
"""Fix to offer where the folder of a run is in use."""


class FolderTaken(CheckpointError):
    """Another learner has taken the run's folder."""


class FolderOwner:
    """Keeps a run's folder for this process, in a thread, until the `with` block ends.

    Args:
        folder: of the run; exists.
        is_main: whether this is rank 0, which keeps it for all ranks; on others nothing happens.
        lost: what `wait_for_owner` has returned: the id of an owner whose folder may be taken at once.
        beat_s: seconds between two changes of the number.
        silence_s: seconds without a change after which a learner of another host counts as lost.

    Raises:
        FolderTaken: on entering, another living learner has the folder, as after a restart of this one, or where both
            have begun at the same time.
    """

    def __init__(
        self,
        folder: Path,
        is_main: bool = True,
        lost: str | None = None,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._path, self._is_main, self._beat_s = folder / FILE, is_main, beat_s
        self._lost, self._silence_s = lost, silence_s
        self._me = {"id": uuid.uuid4().hex, **_this_process()}
        self._beats = 0
        self._is_over = threading.Event()
        self._before: dict[str, Any] | None = None
        """Record of an owner that lives no longer. It stays in the folder where this one may not write over it."""
        self._other: dict[str, Any] | None = None
        self._looked_at = time.monotonic()
        self.on_taken: Callable[[], object] = lambda: None
        """Called before FolderTaken is raised."""
        self._thread = threading.Thread(target=self._keep, name="folder owner", daemon=True)

    def __enter__(self) -> Self:
        if self._is_main:
            is_first = not self._path.exists()
            self._before = found = _read(self._path)
            if found is not None and found["id"] != self._lost and _lives(found) is not False:
                self._other = _watch(self._path, found, self._silence_s)  # one that is being killed is silent
            self._looked_at = time.monotonic()
            self.check()
            self._write(os.O_EXCL if is_first else 0)
            self.look()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            self._is_over.set()
            self._thread.join()
            if not self.is_taken():
                self._write()

    def is_taken(self) -> bool:
        """Return whether another learner has taken the folder, by what it holds at this moment."""
        if self._is_main:
            self._find_other()
        return self._other is not None

    def check(self) -> None:
        """Raise FolderTaken if another learner has taken the folder, by the last look of the thread."""
        if time.monotonic() - self._looked_at > 2 * self._beat_s:  # this process was frozen, and its thread with it
            self.is_taken()
        if self._other is not None:
            self.on_taken()
            raise FolderTaken(
                f"{_described(self._other)} has gone on with the run in {self._path.parent}, after this learner was "
                "silent or unseen for some time: two would write to one folder, so this one ends; its work since the "
                "checkpoint that the other began with is not kept"
            )

    def look(self) -> None:
        """Raise FolderTaken if another learner has taken the folder, by what it holds at this moment."""
        self.is_taken()
        self.check()

    def _keep(self) -> None:
        while not self._is_over.wait(self._beat_s):
            self._find_other()
            if self._other is not None:
                return
            self._beats += 1
            self._write()

    def _find_other(self) -> None:
        found, self._looked_at = _read(self._path), time.monotonic()
        if found is not None and found["id"] != self._me["id"] and found != self._before:
            self._other = found

    def _write(self, flags: int = 0) -> None:
        record = {**self._me, "beats": self._beats, "over": self._is_over.is_set()}
        content = json.dumps(record).encode().ljust(_BYTES)
        with suppress(OSError):  # on a full disk training goes on, and the file keeps its length
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
            try:
                os.write(file, content)
            finally:
                os.close(file)


def wait_for_owner(
    folder: Path,
    say: Callable[[str], object],
    fix: str,
    silence_s: float = SILENCE_S,
) -> str | None:
    """Return once no living learner or warm start has the folder.

    Args:
        folder: of a run, or of a warm start.
        say: takes a sentence, where this takes longer.
        fix: what a user may do where the folder is in use, with the key that names it.
        silence_s: seconds without a sign of life after which a learner of another host counts as lost.

    Returns:
        The id of an owner that has shown no sign of life, for `FolderOwner`; None where none was waited for.

    Raises:
        ConfigError: one is alive.
    """
    first = _read(folder / FILE)
    lives = False if first is None else _lives(first)
    if first is None or lives is False:
        return None
    found: dict[str, Any] | None = first
    if lives is None:
        say(f"{_described(first)} had {folder} last: waiting {silence_s:.0f} s for a sign of life of it")
        found = _watch(folder / FILE, first, silence_s)
    if found is None:
        return str(first["id"])
    raise ConfigError(f"{folder} is in use: {_described(found)} is training there: {fix}")


def has_same_launcher(folder: Path) -> bool:
    """Return whether the process that had a folder last was started by the process that has started this one."""
    found = _read(folder / FILE)
    return found is not None and found["space"] == _process_space() and found.get("launcher") == _launcher()


def _watch(path: Path, first: dict[str, Any], silence_s: float) -> dict[str, Any] | None:
    """Watch the record of a learner of which only the number tells whether it lives.

    Args:
        first: the record as it was found.
        silence_s: seconds for which to watch it.

    Returns:
        The record of a learner that lives, which may be another one by now; None where none does.
    """
    deadline = time.monotonic() + silence_s
    while (found := _read(path)) == first and not first.get("over") and time.monotonic() < deadline:
        time.sleep(silence_s / _LOOKS)
    return None if found is None or found == first or found.get("over") else found


def _this_process() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "space": _process_space(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "launcher": _launcher(),
    }


def _launcher() -> list[int | float | None]:
    """Number and start of the process that has started this one."""
    return [os.getppid(), _started(os.getppid())]


def _process_space() -> str:
    """Names what process numbers are counted in: this boot of this host, or a container of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def _started(pid: int) -> int | float | None:
    """When a process began: on Linux in ticks since the boot, which stay the same when the clock is set, elsewhere in
    seconds. None where there is none, or only what its parent has not collected yet."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if psutil.LINUX:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[_STARTED_AT])
        seconds: float = process.create_time()
        return seconds
    return None


def _lives(owner: dict[str, Any]) -> bool | None:
    """Whether it lives. None where only the number tells: it is of another host."""
    if owner.get("over"):
        return False
    if owner["space"] != _process_space():
        return None
    now = _started(owner["pid"])
    return now is not None and now == owner["started"]


def _described(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}"


def _read(path: Path) -> dict[str, Any] | None:
    """Content of the file; None where there is none, or none that is whole."""
    try:
        found = json.loads(path.read_bytes())
        whole = isinstance(found["pid"], int) and all(isinstance(found[key], str) for key in ("id", "host", "space"))
        return found if whole and "started" in found else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
