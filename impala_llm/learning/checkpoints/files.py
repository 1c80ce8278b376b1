"""Checkpoints on disk: where they lie, which of them are whole, which are kept. No torch here.

    <run.dir>/checkpoints/update-000123/    one checkpoint, named by the updates of the run so far
        manifest.json                       written last: what it is of, every file with its size and CRC-32, and in
                                            which file, and where, each tensor lies
        policy/                             a plain Hugging Face directory with the value head beside it
        rank-0.safetensors                  what else rank 0 holds in tensors: moments of the optimizer, shares
        rank-0.msgpack                      the rest of its state: tickets, replay, control, random numbers
        rank-0.records                      its trajectories, end to end, as record.py has them
                                            (with tensor parallelism: of each process, those that lead a rank first)
    <run.dir>/checkpoints/update-000124.damaged/    one that was not whole when a learner went on from an older one
    <run.dir>/checkpoints/best              a link to the best one by evaluation
    <run.dir>/checkpoints/versions.json     up to which version the run may have published, how many times it
                                            has gone on without shared memory, and its number

Invariant: a folder named update-* was whole when it got its name: it is written under another, brought to the disk and
then renamed. What has happened to the disk since is found by sizes and checksums before it is used.
"""

import json
import os
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impala_llm.learning.checkpoints.policy_folders import remove_folder
from impala_llm.processes.limited_warnings import RateLimitedWarnings

FORMAT = 2
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
BEST = "best"
VERSIONS = "versions.json"
NEW = ".new"
"""Suffix of a checkpoint that is being written."""
REPLACED = ".old"
"""Suffix of a checkpoint while another of the same update takes its name; it counts where none has it."""
REMOVED = ".removed"
"""Suffix of an old checkpoint while it is removed."""
DAMAGED = ".damaged"
"""Suffix of a checkpoint that is damaged and was passed over. It no longer counts as a checkpoint, and is kept for
inspection."""
RESERVED = 256
"""Versions that are reserved at a time: so many may be left out when a host is lost."""
_NAME = re.compile(r"update-(\d+)(?:\.old)?")
_CHUNK = 16 << 20
_MARK_BYTES = 192


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message says which file, and why."""


@dataclass(frozen=True)
class Part:
    """Where a piece of a tensor lies: the tensor `key` in `file`, which begins at `offsets` of the whole one."""

    file: str
    key: str
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of a checkpoint."""

    path: Path = field(compare=False)
    update: int
    """Updates of the run so far."""
    version: int
    """Version of its weights."""
    run_id: int
    num_ranks: int
    minutes_used: float
    """Minutes used of learner.max_minutes."""
    files: Mapping[str, tuple[int, int]]
    """Size and CRC-32, by path within the folder."""
    tensors: Mapping[str, tuple[Part, ...]]
    patience: int = 0
    """`evaluation.patience` that has ended the run; 0: it has not."""
    start: int | None = None
    """Checksum of the model that training began with, see `model_checksum`; None: a random one, or not known."""

    def verify(self) -> None:
        """Read all files. Raises CheckpointError where one is missing or differs."""
        for name, expected in self.files.items():
            if (found := checksum(self.path / name)) != expected:
                what = "is missing" if found is None else f"has {found[0]} bytes, not {expected[0]}"
                what = "has another checksum" if found and found[0] == expected[0] else what
                raise CheckpointError(f"{name} {what}")


def checkpoints(run_folder: Path) -> list[Path]:
    """Folders of a run's checkpoints, the newest first."""
    folder = run_folder / FOLDER
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if os.path.isdir(folder) else []
    found = [path for path in found if path.suffix != REPLACED or not path.with_suffix("").exists()]
    return sorted(found, key=update_of, reverse=True)


def update_of(path: Path) -> int:
    """Updates that a checkpoint's folder is named by."""
    return int(path.name.removesuffix(REPLACED).partition("-")[2])


def name_of(update: int) -> str:
    """Name of the folder of a checkpoint."""
    return f"update-{update:06d}"


def read_manifest(path: Path) -> CheckpointManifest:
    """Read a manifest, and nothing else. Raises CheckpointError where none of this format is whole."""
    try:
        values = json.loads((path / MANIFEST).read_bytes())
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{MANIFEST} has format {values['format']}, of another release, and this program reads {FORMAT}: go on "
                "with that release, or begin a new run from its policy/"
            )
        if values.pop("crc32") != _crc(values):
            raise CheckpointError(f"{MANIFEST} has another checksum")
        if path.name.removesuffix(REPLACED) != name_of(values["update"]):
            raise CheckpointError(f"{MANIFEST} is of update {values['update']}")
        return CheckpointManifest(
            path,
            int(values["update"]),
            int(values["version"]),
            int(values["run_id"]),
            int(values["num_ranks"]),
            float(values["minutes_used"]),
            {name: (int(size), int(crc)) for name, (size, crc) in values["files"].items()},
            {
                name: tuple(Part(file, key, tuple(offsets)) for file, key, offsets in parts)
                for name, parts in values["tensors"].items()
            },
            int(values["patience"]),
            values["start"],
        )
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged ({error!r})") from error


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """A manifest as the file that `read_manifest` reads."""
    names = ("update", "version", "run_id", "num_ranks", "minutes_used", "patience", "start")
    values: dict[str, Any] = {"format": FORMAT, **{name: getattr(manifest, name) for name in names}}
    values["files"] = {name: list(entry) for name, entry in manifest.files.items()}
    values["tensors"] = {
        name: [[part.file, part.key, list(part.offsets)] for part in parts] for name, parts in manifest.tensors.items()
    }
    return json.dumps(values | {"crc32": _crc(values)}, indent=1).encode()


def _crc(values: dict[str, Any]) -> int:
    """Checksum of what a file of JSON holds beside it."""
    return zlib.crc32(json.dumps(values).encode())


def newest_whole(run_folder: Path, verifies: bool = True) -> tuple[CheckpointManifest | None, list[str]]:
    """Find the newest checkpoint that can be used.

    Args:
        verifies: read all of its files; else its manifest alone.

    Returns:
        It, or None; and a reason for each newer one that cannot be used, with its name.
    """
    passed_over: list[str] = []
    for path in checkpoints(run_folder):
        try:
            manifest = read_manifest(path)
            if verifies:
                manifest.verify()
            return manifest, passed_over
        except CheckpointError as error:
            passed_over.append(f"{path.name}: {error}")
    return None, passed_over


def set_aside(path: Path) -> str:
    """Rename a damaged checkpoint, so that it is none: else it would count among those that are kept.

    An earlier one of the new name is removed.

    Returns:
        What has become of it, in words: in a folder that cannot be written it stays as it is.
    """
    target = path.with_name(path.name + DAMAGED)
    best = path.with_name(BEST)
    try:
        remove_folder(target)
        path.rename(target)
        if best.is_symlink() and os.readlink(best) == path.name:
            best.unlink()
    except OSError as error:
        return f"and cannot be renamed ({error.strerror})"
    return f"and stays as {target.name}"


def remove_unfinished(run_folder: Path, but: Path | None = None) -> list[Path]:
    """Remove what a process that died amid a checkpoint, or amid the removal of one, left. Returns the folders of those
    that were being written; one that is still there could not be removed.

    One that was about to be replaced has its name again, or counts under its other one.

    Args:
        but: folder of the one that is being written.
    """
    folder = run_folder / FOLDER
    for path in list(folder.glob(f"update-*{REPLACED}")):
        if path.with_suffix("").exists():
            remove_folder(path)
        else:
            with suppress(OSError):
                path.rename(path.with_suffix(""))
    for path in list(folder.glob(f"update-*{REMOVED}")):
        remove_folder(path)
    found = [path for path in sorted(folder.glob(f"update-*{NEW}")) if path != but]
    for path in found:
        remove_folder(path)
    return found


def retire_old(run_folder: Path, num_kept: int, passed_over: Collection[str] = ()) -> tuple[list[Path], list[str]]:
    """Rename all checkpoints but the newest ones and the best: they are none any more.

    Args:
        num_kept: newest ones that stay.
        passed_over: names of damaged ones, which do not count among these, and stay.

    Returns:
        Their folders, to be removed; and which cannot be renamed, and why.
    """
    best = best_of(run_folder)
    retired, failed = [], []
    for path in [path for path in checkpoints(run_folder) if path.name not in passed_over][num_kept:]:
        if path.name != best:
            gone = path.with_name(path.name + REMOVED)
            try:
                path.rename(gone)
            except OSError as error:
                failed.append(f"{path} cannot be removed ({error.strerror})")
            else:
                retired.append(gone)
    return retired, failed


def best_of(run_folder: Path) -> str | None:
    """Name of the best checkpoint; None where none was marked, or somebody has removed it."""
    try:
        name = os.readlink(run_folder / FOLDER / BEST)
    except OSError:
        return None
    return name if _NAME.fullmatch(name) and (run_folder / FOLDER / name).is_dir() else None


def mark_best(run_folder: Path, name: str) -> None:
    """Let `best` mean this checkpoint from now on."""
    new = run_folder / FOLDER / (BEST + NEW)
    new.unlink(missing_ok=True)
    new.symlink_to(name)
    new.rename(run_folder / FOLDER / BEST)


class VersionMark:
    """Up to which version a run may have published, on the disk that has its checkpoints.

    A host that is lost takes along what it has published since its last checkpoint. The learner that goes on must use
    none of these versions again, since engines may still have them: it begins above the mark, also where there was no
    checkpoint yet and the run begins again. A learner that ends in order sets the mark to its last version, so that the
    next one goes on without a gap.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / VERSIONS
        self._warnings = RateLimitedWarnings(60.0)
        try:
            values = json.loads(self._path.read_bytes())
            if values.pop("crc32", None) not in (None, _crc(values)):  # an earlier release wrote none
                raise ValueError("it has another checksum")
            self.reserved, self.ahead = int(values["reserved"]), int(values["ahead"])
            self.life: int | None = int(values["life"])
            self.run_id: int | None = None if values["run_id"] is None else int(values["run_id"])
            self.has_ended = bool(values["has_ended"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.reserved, self.ahead, self.life, self.run_id, self.has_ended = -1, 0, None, None, False
        """Highest version that may have been published, -1: not known; by how much versions are ahead of updates; how
        many times the run has gone on without shared memory, and the number of the run, None: not known; whether it
        has ended in order since it last published."""

    def unused(self, version: int) -> int:
        """First number for the weights of a checkpoint of this version: its own, unless later ones may be known."""
        reserved = self.reserved if self.reserved >= 0 else version + RESERVED
        return version if reserved <= version else reserved + 1

    def begin_life(self) -> None:
        """Note that the run goes on from a checkpoint alone, or begins again: what it has left in any host's shared
        memory is stale."""
        self._write(self.reserved, self.ahead, (self.life or 0) + 1)

    def reserve(self, version: int, ahead: int) -> None:
        """Make sure, on the disk, that this version may be published. Where it cannot be written that is only said."""
        if version > self.reserved or ahead != self.ahead:
            self._write(version + RESERVED, ahead)

    def end(self, version: int) -> None:
        """Note that the run has ended in order, with a checkpoint of this version, its last."""
        self._write(version, self.ahead, has_ended=True)

    def _write(self, reserved: int, ahead: int, life: int | None = None, has_ended: bool = False) -> None:
        life = (self.life or 0) if life is None else life
        # All are of one length, so that one can be written over another.
        values = {"reserved": reserved, "ahead": ahead, "life": life, "run_id": self.run_id, "has_ended": has_ended}
        content = json.dumps(values | {"crc32": _crc(values)}).encode().ljust(_MARK_BYTES)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_file(self._path, [content])
            except OSError:
                self._overwrite(content)
            else:
                sync(self._path.parent)
        except OSError as error:
            self._warnings.log(
                "the versions of the run cannot be noted",
                f"{self._path}: {error.strerror}; training goes on, but if this host is lost now, versions above "
                f"{self.reserved} may be used twice: make room on that disk",
            )
            return
        self.reserved, self.ahead, self.life, self.has_ended = reserved, ahead, life, has_ended

    def _overwrite(self, content: bytes) -> None:
        """Write over the file that is there: on a full disk that needs no room, where the file system does not copy."""
        with self._path.open("r+b", buffering=0) as file:
            file.write(content)  # within one block, and so whole or not at all
            os.fsync(file.fileno())


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a file to the disk; nobody sees half of it under its name. Returns its size and CRC-32."""
    new = path.with_name(path.name + NEW)
    size = crc = 0
    with new.open("wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
            size += len(view)
        os.fsync(file.fileno())
    new.rename(path)
    return size, crc


def checksum(path: Path) -> tuple[int, int] | None:
    """Size and CRC-32 of a file; None where it cannot be read."""
    size = crc = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    except OSError:
        return None
    return size, crc


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
