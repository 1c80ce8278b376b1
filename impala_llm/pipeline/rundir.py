"""The run directory: the place of a run for its sockets, arenas and weight slots, and the rule for who may delete it.

Invariant: a run directory exists together with its owner file, from its first moment (it is made under another name and
renamed into place). It is removed by its living owner, or by a later start of the same run name when the owner is dead;
never while the owner lives. Everybody else attaches and creates files inside.

Layout, below `/dev/shm/impala_llm-<uid>-<run name>/` (mode 0700):

    owner.json          pid and start time of the owning process
    learner-<rank>.sock the socket of a learner rank
    learner-<rank>.replay   the replay arena of a learner rank
    learner-<rank>.journal  what became of its tickets
    <actor id>.arena    the arena of an actor
    weights/            the weight board
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUPERVISED = "IMPALA_LLM_SUPERVISED"
"""Environment variable of a learner whose run directory belongs to its supervisor, and outlives it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWNER_FILE = "owner.json"
_ATTACH_INTERVAL_S = 0.05
# sun_path holds 108 bytes with its closing zero (unix(7)); 104 on the BSDs.
_MAX_SOCKET_PATH = 103


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used: it belongs to a living owner, to another user, or does not exist."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same pid.

    pid: process id. start_time: kernel clock ticks between boot and start of the process; 0 where the system has no
    /proc, and then the pid alone decides.
    """

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of the process that has this pid now, None where there is none (zombies count as dead)."""
        if not Path("/proc/self/stat").exists():
            return cls(pid, 0) if _pid_exists(pid) else None
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # Field 2 is the command in brackets and may itself hold blanks and brackets: count from the last one.
        fields = stat[stat.rindex(")") + 2 :].split()
        return None if fields[0] in ("Z", "X") else cls(pid, int(fields[19]))

    @classmethod
    def mine(cls) -> ProcessIdentity:
        """Identity of the calling process."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessIdentity.of(self.pid) == self


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_name(what: str, name: str) -> str:
    """Return `name` where it may become part of a file name; ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} is {name!r}: use 1 to 64 letters, digits, '.', '_' or '-', not starting with a sign")
    return name


def _default_base() -> Path:
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())


def _run_path(run_name: str, base: Path | None) -> Path:
    check_name("run name", run_name)
    return (base or _default_base()) / f"impala_llm-{os.getuid()}-{run_name}"


class RunDirectory:
    """Paths inside a run directory. Made by `create` (the owner) or `attach` (everybody else).

    >>> with RunDirectory.create("docs-example") as run:            # doctest: +SKIP
    ...     receiver = Receiver(run.endpoint(rank=0), ...)
    """

    def __init__(self, path: Path, *, owned: bool) -> None:
        self.path = path
        self._owned = owned

    @classmethod
    def for_learner(cls, run_name: str, resume: bool) -> RunDirectory:
        """The supervisor's, where there is one (`SUPERVISED`); else see `create`."""
        return cls.attach(run_name) if os.environ.get(SUPERVISED) else cls.create(run_name, take_over=resume)

    @classmethod
    def create(cls, run_name: str, base: Path | None = None, take_over: bool = False) -> RunDirectory:
        """Make the directory of a run and own it until `remove`; a dead owner's directory of that name goes first.

        take_over: a dead owner's directory is gone on with instead: what its learner acknowledged is in there.

        base: parent directory; /dev/shm by default, the directory for temporary files where there is no /dev/shm.
        Raises RunDirectoryError when the owner is alive or the path belongs to another user.
        """
        path = _run_path(run_name, base)
        _remove_leftovers(path)
        fresh = Path(tempfile.mkdtemp(prefix=f"{path.name}.new-{os.getpid()}-", dir=path.parent))
        try:
            owner = ProcessIdentity.mine()
            (fresh / _OWNER_FILE).write_text(json.dumps({"pid": owner.pid, "start_time": owner.start_time}))
            while True:
                try:
                    # Fails where a directory with an owner file exists already: two starts cannot both win.
                    os.rename(fresh, path)
                    return cls(path, owned=True)
                except OSError:
                    if not os.path.lexists(path):
                        raise
                if take_over:
                    with _locked_and_dead(path, run_name) as is_there:
                        if is_there:
                            os.replace(fresh / _OWNER_FILE, path / _OWNER_FILE)
                            os.rmdir(fresh)
                            return cls(path, owned=True)
                else:
                    _remove_if_dead(path, run_name)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise

    @classmethod
    def attach(cls, run_name: str, base: Path | None = None, timeout_s: float = 0.0) -> RunDirectory:
        """Use the directory that another process owns, waiting up to `timeout_s` seconds for it to appear.

        Raises RunDirectoryError when it does not exist by then, or its owner is dead, or it belongs to another user.
        """
        path = _run_path(run_name, base)
        deadline = time.monotonic() + timeout_s
        # What a dead owner left is about to be replaced by the next start: as good as nothing.
        while (owner := read_owner(path)) is None or not owner.alive():
            if time.monotonic() >= deadline:
                raise RunDirectoryError(
                    f"run {run_name!r} has no directory {path} with a living owner after {timeout_s:g} s: start its "
                    "learner first, or check that both sides use the same run name, user and host"
                )
            time.sleep(_ATTACH_INTERVAL_S)
        _check_ours(path)
        return cls(path, owned=False)

    def endpoint(self, rank: int = 0) -> str:
        """ZeroMQ endpoint of a learner rank. RunDirectoryError where the path is too long for a socket."""
        path = self.path / f"learner-{rank}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise RunDirectoryError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, at most {_MAX_SOCKET_PATH} are possible: "
                "use a shorter run name or base directory"
            )
        return f"ipc://{path}"

    def arena_path(self, actor_id: str) -> Path:
        """File of an actor's arena. ValueError where the id cannot be part of a file name."""
        return self.path / f"{check_name('actor_id', actor_id)}.arena"

    def replay_path(self, rank: int = 0) -> Path:
        """File of a learner rank's replay arena."""
        return self.path / f"learner-{rank}.replay"

    def journal_path(self, rank: int = 0) -> Path:
        """File of a learner rank's ticket journal."""
        return self.path / f"learner-{rank}.journal"

    @property
    def weights_path(self) -> Path:
        """Directory of the weight board."""
        return self.path / "weights"

    def remove(self) -> None:
        """Delete the directory and everything in it. Only the owner may; a second call does nothing."""
        if not self._owned:
            raise RunDirectoryError(f"{self.path} was attached, not created: its owner removes it")
        if read_owner(self.path) == ProcessIdentity.mine():
            _discard(self.path)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._owned:
            self.remove()


def remove_run_dir(run_name: str, base: Path | None = None, timeout_s: float = 5.0) -> None:
    """Remove what a dead owner left of a run; nothing to do where there is nothing. For supervisors, after the end.

    timeout_s: how long to wait for an owner that is being killed. RunDirectoryError where it still lives then.
    """
    path = _run_path(run_name, base)
    deadline = time.monotonic() + timeout_s
    while os.path.lexists(path):
        try:
            _remove_if_dead(path, run_name)
        except RunDirectoryError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_ATTACH_INTERVAL_S)


def read_owner(path: Path) -> ProcessIdentity | None:
    """Owner of a run directory; None where the directory or its owner file is gone or unreadable."""
    try:
        owner = json.loads((path / _OWNER_FILE).read_text())
        return ProcessIdentity(int(owner["pid"]), int(owner["start_time"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_ours(path: Path) -> None:
    # /dev/shm is writable for everybody: never follow what another user has put there.
    status = os.lstat(path)
    if path.is_symlink() or not path.is_dir() or status.st_uid != os.getuid():
        raise RunDirectoryError(f"{path} is not a directory of user {os.getuid()}: choose another run name")


def _remove_leftovers(path: Path) -> None:
    """What a process left that was killed while it made or removed this run's directory."""
    for left in path.parent.glob(f"{path.name}.[no][el][wd]-*"):
        # Both kinds are named after the process that works on them.
        maker = re.fullmatch(r"\.(?:new|old)-(\d+)-.*", left.name.removeprefix(path.name))
        if maker is not None and not _pid_exists(int(maker[1])) and left.lstat().st_uid == os.getuid():
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked_and_dead(path: Path, run_name: str) -> Iterator[bool]:
    """Alone with the directory of a dead owner; yields False where it has gone or was replaced in the meantime.

    RunDirectoryError where the owner lives.
    """
    try:
        _check_ours(path)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            is_same = os.path.samestat(os.stat(path), os.fstat(handle))
        except FileNotFoundError:
            is_same = False
        owner = read_owner(path) if is_same else None
        if owner is not None and owner.alive():
            raise RunDirectoryError(
                f"run {run_name!r} is in use: {path} belongs to the living process {owner.pid}. "
                "Stop that process or choose another run name"
            )
        yield is_same
    finally:
        os.close(handle)


def _remove_if_dead(path: Path, run_name: str) -> None:
    """Remove the directory of a dead owner; RunDirectoryError where the owner lives. Safe against concurrent starts."""
    with _locked_and_dead(path, run_name) as is_there:
        if is_there:
            _discard(path)


def _discard(path: Path) -> None:
    """Remove a run's directory, also while actors that end at this moment remove their own files in it."""
    # Renamed first: nobody attaches to a directory that is half deleted, or puts a new file into it.
    doomed = Path(tempfile.mkdtemp(prefix=f"{path.name}.old-{os.getpid()}-", dir=path.parent))
    os.rename(path, doomed / path.name)
    while os.path.lexists(doomed):
        # A file that somebody else removed after it was listed ends rmtree: what is left is listed again.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(doomed)
