"""Run directory: holds the sockets, arenas and weight slots of a run, and says who may delete them.

Invariant: the owner holds the lock of owned_directory.py from the directory's creation to its removal. All other
processes attach and create files inside.

Each run has a random number, its run id, made at the first start and kept when a dead owner's run is resumed. The files
of the run lie in a folder of that name: a process of an earlier run of the same name finds none of them.

Layout, below `/dev/shm/impala_llm-<uid>-<run name>/` (mode 0700):

    run.json                run id, API key of the run's SGLang servers, and the owner's process id for error messages
    <run id>/learner-<rank>.sock    the socket of a learner rank
    <run id>/learner-<rank>.replay  the trajectory store of a learner rank
    <run id>/learner-<rank>.journal the journal of its tickets
    <run id>/<actor id>.arena       the arena of an actor
    <run id>/weights/               the weight board
    <run id>/kept/                  the weight board of versions that only a restarted learner reads
    <run id>/unsaved                there while the disk does not have all work of the run, see `RunDirectory.keep`
    <run id>/learner.json           life and number of ranks of its learner, see `RunDirectory.note_learner`
    <run id>/clock                  two float64: the time at which the run would have begun to train without
                                    interruption (not a number: it has not begun), and seconds for which it has trained
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import secrets
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.owned_directory import (
    RUN_FILE,
    empty,
    has_owner,
    in_use,
    read_file,
    read_run_id,
    take_lock,
)
from impala_llm.pipeline.shm.owned_directory import RunDirectoryError as RunDirectoryError
from impala_llm.pipeline.shm.reserved_file import overwrite, reserve
from impala_llm.processes.supervised import SUPERVISED

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEARNER_FILE = "learner.json"
_CLOCK = struct.Struct("<dd")
ARENA = ".arena"
"""Suffix of the file of an actor's arena."""
_ATTACH_INTERVAL_S = 0.05
# sun_path holds 108 bytes with its closing zero (unix(7)); 104 on the BSDs.
_MAX_SOCKET_PATH = 103


def check_name(what: str, name: str) -> str:
    """Return `name` where it may become part of a file name.

    Args:
        what: noun for the error message.
        name: 1 to 64 characters.

    Raises:
        ValueError: it may not.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} is {name!r}: use 1 to 64 letters, digits, '.', '_' or '-', not starting with a sign")
    return name


def shared_memory() -> Path:
    """Default parent of run directories: /dev/shm, or the directory for temporary files where there is none."""
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())


def run_path(run_name: str, base: Path | None = None) -> Path:
    """Directory of a run, whether or not it is there.

    Args:
        run_name, base: as for `RunDirectory.create`.

    Raises:
        ValueError: the name cannot be part of a file name.
    """
    check_name("run name", run_name)
    return (base or shared_memory()) / f"impala_llm-{os.getuid()}-{run_name}"


class RunDirectory:
    """Paths inside a run directory. Made by `create` (the owner) or `attach` (all others).

    Attributes:
        run_id: of the run, in [1, 2^63).
        path: folder of its files.

    >>> with RunDirectory.create("docs-example") as run:            # doctest: +SKIP
    ...     receiver = Receiver(run.endpoint(rank=0), ...)
    """

    def __init__(self, root: Path, run_id: int, lock: FileLock | None = None) -> None:
        """Make the object for a directory that exists.

        Args:
            root: the directory, which holds run.json.
            run_id: of the run that it holds.
            lock: of the directory, owned from now on; None: attached.
        """
        self.run_id = run_id
        # Half of the number, since a socket's path must be short.
        self.path = root / f"{run_id & 0xFFFFFFFF:08x}"
        self._root = root
        self._lock = lock

    @classmethod
    def for_learner(
        cls, run_name: str, take_over: bool = False, run_id: int | None = None, output: Path | None = None
    ) -> RunDirectory:
        """Attach to the supervisor's directory where there is one (`SUPERVISED`), else `create` one.

        Args:
            run_name: of the run.
            take_over, run_id, output: see `create`; without effect under a supervisor.

        Raises:
            RunDirectoryError: see `create` and `attach`.
        """
        if os.environ.get(SUPERVISED):
            return cls.attach(run_name)
        return cls.create(run_name, take_over=take_over, run_id=run_id, output=output)

    @classmethod
    def create(
        cls,
        run_name: str,
        base: Path | None = None,
        take_over: bool = False,
        run_id: int | None = None,
        output: Path | None = None,
    ) -> RunDirectory:
        """Make the directory of a run and own it until `remove`. A dead owner's directory of that name goes first.

        Args:
            run_name: part of the directory's name, see `check_name`.
            base: parent directory; None: see `shared_memory`.
            take_over: resume a dead owner's run instead, with all trajectories that its learner has acknowledged.
            run_id: of a run that goes on from a checkpoint, where nothing is taken over; None: a new one.
            output: folder of the run on disk, for `find_run`.

        Raises:
            RunDirectoryError: the owner is alive, or the path belongs to another user.
            ValueError: run_name cannot be part of a file name.
        """
        root = run_path(run_name, base)
        while (lock := take_lock(root, run_name, make=True)) is None:
            continue
        try:
            left = read_run_id(root) if take_over else None
            server_key = secrets.token_hex(16) if left is None else read_file(root).get("server_key")
            if left is None:
                empty(root)
                os.fchmod(lock.fileno(), 0o700)  # of whatever made it
                left = run_id or 1 + secrets.randbelow(2**63 - 1)
            run = cls(root, left, lock)
            run.path.mkdir(mode=0o700, exist_ok=True)
            reserve(run._clock, _CLOCK.size)
            run._set_clock(math.nan, run.used_s)  # the time since its owner died does not count
            new = root / (RUN_FILE + ".new")
            of_run = {"run_id": left, "server_key": server_key, "output": None if output is None else str(output)}
            new.write_text(json.dumps({**of_run, "pid": os.getpid()}))
            os.replace(new, root / RUN_FILE)  # last: a process that finds it finds all other files
            return run
        except BaseException:
            lock.close()
            raise

    @classmethod
    def attach(cls, run_name: str, base: Path | None = None, timeout_s: float | None = 0.0) -> RunDirectory:
        """Use the directory that another process owns.

        Args:
            run_name, base: as for `create`.
            timeout_s: seconds to wait for it to appear; None: for ever, which is logged once.

        Raises:
            RunDirectoryError: it does not exist by then, its owner is dead, or it belongs to another user.
        """
        root = run_path(run_name, base)
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        is_said = False
        # The next start will replace the files of a dead owner: they do not count.
        while not has_owner(root) or (run_id := read_run_id(root)) is None:
            if timeout_s is None and not is_said:
                _log.warning(
                    "run %r has no directory %s with a living owner yet: waiting for its learner", run_name, root
                )
                is_said = True
            if time.monotonic() >= deadline:
                raise RunDirectoryError(
                    f"run {run_name!r} has no directory {root} with a living owner after {timeout_s:g} s: start its "
                    "learner first, or check that both sides use the same run name, user and host"
                )
            time.sleep(_ATTACH_INTERVAL_S)
        return cls(root, run_id)

    def has_ended(self) -> bool:
        """Return whether the run is over: its owner has removed the directory, or another run has taken the name."""
        return not self.path.is_dir()

    def endpoint(self, rank: int = 0) -> str:
        """ZeroMQ endpoint of a learner rank.

        Raises:
            RunDirectoryError: the path is too long for a socket.
        """
        path = self.path / f"learner-{rank}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise RunDirectoryError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, at most {_MAX_SOCKET_PATH} are possible: "
                "use a shorter run name or base directory"
            )
        return f"ipc://{path}"

    def arena_path(self, actor_id: str) -> Path:
        """File of an actor's arena.

        Raises:
            ValueError: the id cannot be part of a file name.
        """
        return self.path / f"{check_name('actor_id', actor_id)}{ARENA}"

    def replay_path(self, rank: int = 0) -> Path:
        """File of a learner rank's trajectory store."""
        return self.path / f"learner-{rank}.replay"

    def journal_path(self, rank: int = 0) -> Path:
        """File of a learner rank's ticket journal."""
        return self.path / f"learner-{rank}.journal"

    def began_at(self, used_s: float = 0.0) -> float:
        """Time of the first call under this owner, in seconds of `time.monotonic`, which all processes of a host share.

        Args:
            used_s: seconds for which the run has trained before, on another host or in an earlier life of its folder;
                what `note_used` has noted here counts where it is more.
        """
        began_at, used_here_s = self._times()
        if math.isnan(began_at):
            began_at = time.monotonic() - max(used_s, used_here_s)
            self._set_clock(began_at, used_here_s)
        return began_at

    def note_used(self, seconds: float) -> None:
        """Note for how long the run has trained, for a later owner."""
        self._set_clock(self._times()[0], seconds)

    @property
    def used_s(self) -> float:
        """Seconds that `note_used` has noted last; 0 where it has not."""
        return self._times()[1]

    @property
    def _clock(self) -> Path:
        return self.path / "clock"

    def _times(self) -> tuple[float, float]:
        """The contents of the clock."""
        began_at, used_s = _CLOCK.unpack(self._clock.read_bytes())
        return began_at, used_s

    def _set_clock(self, began_at: float, used_s: float) -> None:
        overwrite(self._clock, _CLOCK.pack(began_at, used_s))

    def note_learner(self, life: int, num_ranks: int) -> None:
        """Note whose tickets and versions lie here, for `find_run`. Writes nothing that is noted already.

        Args:
            life: how many times the run has gone on from a checkpoint alone, on any host.
            num_ranks: of its learner.
        """
        values = {"life": life, "num_ranks": num_ranks}
        if read_file(self.path, _LEARNER_FILE) != values:
            new = self.path / (_LEARNER_FILE + ".new")
            new.write_text(json.dumps(values))
            os.replace(new, self.path / _LEARNER_FILE)

    @property
    def kept_path(self) -> Path:
        """Directory of the board of kept versions, which were not published to engines: only learners read it."""
        return self.path / "kept"

    @property
    def weights_path(self) -> Path:
        """Directory of the weight board."""
        return self.path / "weights"

    @property
    def server_key(self) -> str:
        """API key of the SGLang servers that the run starts, for all who may read the run's folder."""
        return str(read_file(self._root)["server_key"])

    @property
    def _unsaved(self) -> Path:
        return self.path / "unsaved"

    @property
    def is_kept(self) -> bool:
        """Whether it holds work that the disk does not have, see `keep`."""
        return self._unsaved.exists()

    def keep(self) -> None:
        """Have each owner leave the directory at its end, until `release`: it holds work that the disk does not have.

        The next owner resumes the run, or removes it, see `create`.
        """
        self._unsaved.touch()

    def release(self) -> None:
        """Have the owner remove the directory at its end, since the work of the run is saved or no longer wanted."""
        self._unsaved.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the directory and everything in it, or leave it and say so, see `keep`. A second call does nothing.

        Raises:
            RunDirectoryError: this process attached to it, and does not own it.
        """
        if self._lock is None:
            raise RunDirectoryError(f"{self._root} was attached, not created: its owner removes it")
        if self._lock.is_open:  # not in a forked process
            if self.is_kept:
                _log.warning(
                    "%s stays in memory, since it holds work of the run that is on no disk: the same command goes on "
                    "with it, with run.resume=true where run.dir has no metrics yet; another run.name begins anew",
                    self._root,
                )
            else:
                empty(self._root)
                self._root.rmdir()
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock is not None:
            self.remove()


@dataclass(frozen=True)
class Left:
    """A run directory whose owner is dead, with what it says of that owner."""

    run: RunDirectory
    output: str | None
    """Folder of the run on disk; None: it is not known, or the owner had actors alone."""
    life: int | None
    num_ranks: int | None
    """The number that the learner has noted with `RunDirectory.note_learner`; None: nothing."""

    @property
    def is_of_learner(self) -> bool:
        """Whether a learner has used it, and not actors alone, whose weights a relay brought."""
        return self.output is not None or self.life is not None


def find_run(run_name: str, base: Path | None = None) -> Left | None:
    """Find the run that a dead owner has left under this name.

    Args:
        run_name, base: as for `RunDirectory.create`.

    Returns:
        None where there is none.

    Raises:
        RunDirectoryError: its owner lives, or it belongs to another user.
    """
    root = run_path(run_name, base)
    if has_owner(root):
        raise in_use(root, run_name)
    if (run_id := read_run_id(root)) is None:
        return None
    run, output = RunDirectory(root, run_id), read_file(root).get("output")
    noted = read_file(run.path, _LEARNER_FILE)
    life, num_ranks = (value if isinstance(value := noted.get(key), int) else None for key in ("life", "num_ranks"))
    return Left(run, output if isinstance(output, str) else None, life, num_ranks)


def left_bytes(run_name: str, base: Path | None = None, suffix: str = "") -> int:
    """Bytes on disk, or in memory, of the files that a run has left.

    Args:
        run_name, base: as for `RunDirectory.create`.
        suffix: only files whose names end with it count.
    """
    total = 0
    for folder, _, names in os.walk(run_path(run_name, base)):
        for name in (name for name in names if name.endswith(suffix)):
            with contextlib.suppress(FileNotFoundError):
                total += 512 * os.lstat(os.path.join(folder, name)).st_blocks
    return total


def remove_run_dir(run_name: str, base: Path | None = None, timeout_s: float = 5.0) -> None:
    """Remove the directory that a dead owner left, if there is one. For benchmarks and tests that kill owners.

    Args:
        run_name, base: as for `RunDirectory.create`.
        timeout_s: seconds to wait for an owner that is being killed.

    Raises:
        RunDirectoryError: the owner is still alive then.
    """
    root = run_path(run_name, base)
    deadline = time.monotonic() + timeout_s
    while os.path.lexists(root):
        try:
            lock = take_lock(root, run_name, make=False)
        except RunDirectoryError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_ATTACH_INTERVAL_S)
            continue
        if lock is not None:
            empty(root)
            root.rmdir()
            lock.close()
