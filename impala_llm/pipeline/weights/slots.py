"""Files of a weight board, shared by publisher, readers and relay: pointer, manifests, locks, mapped weights.

Invariant: the contents of a file are checked before use. A malformed manifest, or a weights file of another size than
its manifest states, raises a WeightsError that names the file.

    latest         symbolic link to slot-<k>/<version>, which names the newest version; replaced by an atomic rename.
                   The target does not exist: a short link takes no memory, and can be written on a full file system
    slot-<k>/      a Hugging Face directory: model.safetensors, and the files given to the publisher
    slot-<k>.json  the manifest of the slot, JSON; named slot-<k>.json.new while the slot is written
    slot-<k>.extra bytes beside a version that readers of weights do not need, such as the value head
    slot-<k>.lock  flock: shared by the readers of the slot, exclusive for the publisher; the kernel releases it when
                   its holder ends. It stays when a publisher with fewer slots removes the others' files
    publisher.lock flock: exclusive while a publisher writes
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.reserved_file import overwrite, reserve
from impala_llm.pipeline.shm.ring import populate
from impala_llm.pipeline.weights import safetensors_layout
from impala_llm.pipeline.weights.safetensors_layout import LayoutError, TensorInfo
from impala_llm.pipeline.weights.tensor_writing import (
    UINT64,
    TensorBytes,
)

WEIGHTS_FILE = "model.safetensors"
PUBLISHER_LOCK = "publisher.lock"
_ROOM_TIMEOUT_S = 60.0
_RETRY_S = 0.05
_LATEST = "latest"
_POINTER = re.compile("slot-([0-9]{1,20})/([0-9]{1,20})")


class WeightsError(RuntimeError):
    """A version cannot be published or read."""


class SlotsInUse(WeightsError):
    """Readers hold all slots but that of the latest version. The message names the processes."""


@dataclass(frozen=True)
class WeightsManifest:
    """Description of the weights in a slot. Checksums are `copy_kernels.bytes_checksum`.

    Attributes:
        version: of the weights.
        num_bytes: of the weights file.
        header_checksum: of the bytes before the first tensor.
        checksums: of the tensors, in the order of the file.
    """

    version: int
    num_bytes: int
    header_checksum: int
    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        sums = (self.header_checksum, *self.checksums)
        if any(type(value) is not int or value < 0 for value in (self.version, self.num_bytes, *sums)):
            raise ValueError(f"version {self.version!r}, {self.num_bytes!r} bytes: integers >= 0 are expected")
        if max(sums) >= UINT64:
            raise ValueError(f"checksum {max(sums)} has more than 64 bits")

    def to_json(self) -> bytes:
        """Contents of a manifest file, padded: for any version of the same tensors they have the same size."""
        return json.dumps(vars(self)).encode().ljust(_manifest_bytes(len(self.checksums)))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> WeightsManifest:
        """Make a manifest of values from JSON or a message.

        Raises:
            ValueError: a field is missing or of another type.
        """
        try:
            return cls(**{**values, "checksums": tuple(values["checksums"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a manifest of weights: {error}") from error


def _manifest_bytes(num_tensors: int) -> int:
    """Size of a manifest file: a number, such as a checksum, has 20 digits at most."""
    return 192 + 22 * num_tensors


@dataclass(frozen=True)
class MappedWeights:
    """A weights file in memory.

    Attributes:
        data: uint8[bytes of the file].
        header: bytes before the first tensor.
        infos: of the tensors, in the order of the file.
    """

    data: np.ndarray
    header: bytes
    infos: dict[str, TensorInfo]

    def is_of(self, manifest: WeightsManifest) -> bool:
        """Return whether the header in the file, which may be rewritten, is the parsed one and the manifest's."""
        header = self.data[: len(self.header)]
        return (
            len(self.infos) == len(manifest.checksums)
            and copy_kernels.bytes_checksum(header) == manifest.header_checksum
            and header.tobytes() == self.header
        )

    def tensors(self, manifest: WeightsManifest, source: str, verify: bool) -> dict[str, TensorBytes]:
        """Return views of all tensors.

        Args:
            manifest: of the version, see `is_of`.
            source: name of the file, for the error message.
            verify: compare the checksums.

        Raises:
            WeightsError: a checksum differs.
        """
        tensors: dict[str, TensorBytes] = {}
        for (name, info), checksum in zip(self.infos.items(), manifest.checksums, strict=True):
            data = self.data[info.start : info.end]
            if verify and copy_kernels.bytes_checksum(data) != checksum:
                raise damaged(source, manifest.version, name)
            tensors[name] = (info.dtype, info.shape, data)
        return tensors


def damaged(source: str, version: int, tensor: str) -> WeightsError:
    """Make the error for a tensor whose checksum is not the published one.

    Args:
        source, version, tensor: name of the file, version that it holds, name of the tensor.
    """
    return WeightsError(
        f"{source} was changed after version {version} was published: the checksum of tensor {tensor!r} differs"
    )


class Slot:
    """One slot of a board. It keeps its mappings of the weights file until the file is replaced.

    Args:
        board: directory of the board.
        index: of the slot, from 0.
    """

    def __init__(self, board: Path, index: int) -> None:
        self.index = index
        self.directory = board / f"slot-{index}"
        self.weights = self.directory / WEIGHTS_FILE
        self.manifest = board / f"slot-{index}.json"
        self.lock = board / f"slot-{index}.lock"
        self.extra = board / f"slot-{index}.extra"
        self._writable: np.ndarray | None = None
        self._writable_file: tuple[int, int, int] | None = None
        self._mapped: MappedWeights | None = None
        self._mapped_file: tuple[int, int, int] | None = None

    def read_manifest(self) -> WeightsManifest | None:
        """Read the manifest. Returns None while the slot is written.

        Raises:
            WeightsError: the file is malformed.
        """
        values = _read_json(self.manifest)
        try:
            return None if values is None else WeightsManifest.from_values(values)
        except ValueError as error:
            raise WeightsError(f"{self.manifest}: {error}") from error

    def has_file_of(self, num_bytes: int) -> bool:
        """Return whether the slot has a weights file of this size, which can be overwritten in place."""
        try:
            found = self.weights.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == num_bytes

    def withdraw(self) -> None:
        """Take the manifest away, and keep its memory for the next one. Needs the exclusive lock."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.manifest, _next_of(self.manifest))

    def reserve_beside(self, num_tensors: int, extra_bytes: int) -> None:
        """Reserve memory for the files that are written beside the weights, unless the slot has it already.

        Args:
            num_tensors: of a version.
            extra_bytes: of `extra`; 0 where that is not known.

        Raises:
            OSError: the file system has no room.
        """
        if not self.manifest.exists():
            reserve(_next_of(self.manifest), _manifest_bytes(num_tensors))
        if extra_bytes and not self.extra.exists():
            reserve(self.extra, extra_bytes)

    def writable(self, num_bytes: int) -> np.ndarray:
        """Map the weights file for writing, resident; a file of another size is replaced. Needs the exclusive lock.

        Returns:
            uint8[num_bytes].

        Raises:
            WeightsError: memory is short.
        """
        is_new = not self.has_file_of(num_bytes)
        if is_new:
            self._writable = None
            self.withdraw()
            self.weights.unlink(missing_ok=True)
        handle = os.open(self.weights, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            found = _identity(os.fstat(handle))
            if self._writable is None or found != self._writable_file:
                os.posix_fallocate(handle, 0, num_bytes)
                mapping = mmap.mmap(handle, num_bytes)
                populate(mapping, write=True)
                self._writable = np.frombuffer(mapping, np.uint8)
                self._writable_file = _identity(os.fstat(handle))
        except OSError as error:
            if is_new:
                self.weights.unlink()
            raise WeightsError(
                f"cannot reserve {num_bytes} bytes for {self.weights}: {error}. Free memory in /dev/shm"
            ) from error
        finally:
            os.close(handle)
        return self._writable

    def mapped(self, manifest: WeightsManifest) -> MappedWeights:
        """Map the weights file read-only. Needs the shared lock. The checksums of the tensors are not compared.

        Raises:
            WeightsError: size or header of the file disagree with the manifest.
        """
        try:
            handle = os.open(self.weights, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise WeightsError(f"{self.weights} cannot be opened: {error}") from error
        try:
            found = os.fstat(handle)
            # A page that is mapped beyond the end of a file would kill this process when it is touched.
            if not stat.S_ISREG(found.st_mode) or found.st_size != manifest.num_bytes or not found.st_size:
                raise WeightsError(
                    f"{self.weights} has {found.st_size} bytes, version {manifest.version} has {manifest.num_bytes}: "
                    "another process wrote to it; have the learner publish again"
                )
            file = _identity(found)
            if file != self._mapped_file:
                self._mapped = self._mapped_file = None
                mapping = mmap.mmap(handle, found.st_size, prot=mmap.PROT_READ)
                populate(mapping, write=False)
                self._mapped = MappedWeights(np.frombuffer(mapping, np.uint8), b"", {})
                self._mapped_file = file
        finally:
            os.close(handle)
        assert self._mapped is not None
        if not self._mapped.is_of(manifest):
            self._mapped = parse_weights(self._mapped.data, manifest, str(self.weights))
        return self._mapped


def parse_weights(data: np.ndarray, manifest: WeightsManifest, source: str) -> MappedWeights:
    """Find the tensors of a weights file.

    Args:
        data: uint8[bytes of the file].
        manifest: that the header must match.
        source: name of the file, for the error message.

    Raises:
        WeightsError: the header is not that of the manifest.
    """
    try:
        infos = safetensors_layout.parse(data.data)
    except LayoutError as error:
        raise WeightsError(f"{source}: {error}") from error
    begin = min((info.start for info in infos.values()), default=data.size)
    weights = MappedWeights(data, data[:begin].tobytes(), infos)
    if not weights.is_of(manifest):
        raise WeightsError(
            f"{source} holds {len(infos)} tensors, version {manifest.version} has {len(manifest.checksums)}, "
            "or the checksum of the header differs"
        )
    return weights


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, found.st_size


def holders(locks: Sequence[Path]) -> list[str]:
    """Find the processes that have one of these lock files open, with their command lines, as far as visible."""
    paths = {str(lock) for lock in locks}
    found = []
    for process in psutil.process_iter():
        try:
            if any(file.path in paths for file in process.open_files()):
                found.append(f"process {process.pid} ({' '.join(process.cmdline())[:100]})")
        except (psutil.Error, OSError):
            continue  # gone, or another user's
    return found


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: other processes see its old content or the new one. Waits for room as `write_in_place` does.

    Args:
        path, content: as for `write_in_place`.

    Raises:
        WeightsError: there is no room in time.
    """
    write_in_place(_next_of(path), content)
    os.replace(_next_of(path), path)


def write_in_place(path: Path, content: bytes) -> None:
    """Write a file that no process reads meanwhile.

    Waits for room, at most a minute, where others have filled the file system and the file was shorter before.

    Args:
        path: of the file, made where it is missing.
        content: all that it holds afterwards.

    Raises:
        WeightsError: there is no room in time.
    """
    _when_there_is_room(path, lambda: overwrite(path, content))


def _when_there_is_room(path: Path, write: Callable[[], None]) -> None:
    deadline = time.monotonic() + _ROOM_TIMEOUT_S
    while True:
        try:
            write()
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() >= deadline:
                raise WeightsError(f"cannot write {path}: {error}. Free memory") from error
            time.sleep(_RETRY_S)


def _next_of(path: Path) -> Path:
    """The file that takes the place of `path` when it is written."""
    return path.with_name(path.name + ".new")


def write_latest(board: Path, slot: int, version: int) -> None:
    """Make the version in a slot the latest one.

    Args:
        board, slot: directory of the board, and index of the slot.
        version: that the slot holds.

    Raises:
        WeightsError: it cannot be written.
    """
    path = board / _LATEST
    new = _next_of(path)
    new.unlink(missing_ok=True)
    _when_there_is_room(path, lambda: os.symlink(f"slot-{slot}/{version}", new))
    os.replace(new, path)


def read_latest(board: Path) -> tuple[int, int] | None:
    """Read (slot, version) of the newest version; None before the first.

    Raises:
        WeightsError: the link is malformed.
    """
    path = board / _LATEST
    try:
        target = os.readlink(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    match = _POINTER.fullmatch(target)
    if match is None:
        raise WeightsError(f"{path} leads to {target[:40]!r}: slot-<index>/<version> is expected")
    return int(match[1]), int(match[2])


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds {str(values)[:40]!r}: it was not written by a WeightPublisher")
    return values
