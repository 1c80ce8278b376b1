"""The weight board: versions of the weights in shared memory, from the learner to all engines of its host.

Invariant: what a reader holds a lease on is one whole version and stays so until the lease ends. The publisher writes
only into slots that nobody leases, and says that a version is there after the last byte of it.

    latest         JSON: the slot that holds the newest version; replaced by an atomic rename
    slot-<k>/      a Hugging Face directory: model.safetensors, and the files given to the publisher
    slot-<k>.json  JSON: version, number of bytes and checksum in the slot; absent while it is written
    slot-<k>.lock  flock: shared by the readers of the slot, exclusive for the publisher; the kernel frees it with
    its holder

The file of a slot keeps its size and pages from version to version: fresh pages cost several times the copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from impala_llm.pipeline import safetensors_layout
from impala_llm.pipeline.arena import populate
from impala_llm.pipeline.safetensors_layout import Layout, LayoutError

WEIGHTS_FILE = "model.safetensors"
_LATEST = "latest"
_RETRY_S = 0.005

TensorBytes = tuple[str, tuple[int, ...], np.ndarray]
"""(dtype by its safetensors name, shape, uint8[number of bytes])."""


class WeightsError(RuntimeError):
    """A version cannot be published or read."""


@dataclass(frozen=True)
class _Manifest:
    """What a slot holds. checksum: CRC-32 of the whole weights file."""

    version: int
    num_bytes: int
    checksum: int


class _Slot:
    """Paths of a slot, and the publisher's mapping of its weights file."""

    def __init__(self, board: Path, index: int) -> None:
        self.directory = board / f"slot-{index}"
        self.weights = self.directory / WEIGHTS_FILE
        self.manifest = board / f"slot-{index}.json"
        self.lock = board / f"slot-{index}.lock"
        self.map: mmap.mmap | None = None
        self.header = b""

    def read_manifest(self) -> _Manifest | None:
        values = _read_json(self.manifest)
        return None if values is None else _Manifest(**values)

    def prepare(self, layout: Layout) -> mmap.mmap:
        """The slot's file, mapped and resident, of the layout's size. A file of another layout is replaced."""
        if self.map is not None and self.header == layout.header:
            return self.map
        self.map = None
        self.weights.unlink(missing_ok=True)
        handle = os.open(self.weights, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, layout.num_bytes)
            self.map = mmap.mmap(handle, layout.num_bytes)
        except OSError as error:
            self.weights.unlink()
            raise WeightsError(
                f"cannot reserve {layout.num_bytes} bytes for {self.weights}: {error}. Free memory"
            ) from error
        finally:
            os.close(handle)
        populate(self.map, write=True)
        self.header = layout.header
        return self.map


class WeightPublisher:
    """The one writer of a board. For one thread.

    directory: of the board, `RunDirectory.weights_path`; made if missing, and a board that is there goes on.
    num_slots: 2 at least: the latest version is never overwritten. 3 let one reader lag without holding up the
    publisher. files: name -> content, what makes a slot a Hugging Face directory beside the weights (config.json,
    tokenizer files).
    """

    def __init__(self, directory: Path, num_slots: int = 3, files: Mapping[str, bytes] | None = None) -> None:
        if num_slots < 2:
            raise ValueError(
                f"num_slots is {num_slots}: at least 2 are needed, the latest version is never overwritten"
            )
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._slots = [_Slot(directory, index) for index in range(num_slots)]
        for slot in self._slots:
            slot.directory.mkdir(exist_ok=True)
            slot.lock.touch()
        for name, content in (files or {}).items():
            if Path(name).name != name or name == WEIGHTS_FILE:
                raise ValueError(f"files has {name!r}: a plain file name other than {WEIGHTS_FILE} is expected")
            for slot in self._slots:
                _write_atomically(slot.directory / name, content)

    def publish(self, tensors: Mapping[str, TensorBytes], version: int, timeout_s: float = 60.0) -> float:
        """Write a version and make it the latest.

        tensors: name -> (dtype, shape, uint8[bytes]), contiguous. timeout_s: how long to wait while readers hold all
        other slots. Returns the seconds taken. Raises WeightsError where the version is below the latest, where no slot
        becomes free in time, or where memory is short; ValueError where an array does not have its tensor's size.
        """
        begin = time.monotonic()
        latest = _read_latest(self.directory)
        if latest is not None and version < latest[1]:
            raise WeightsError(f"version {version} is older than {latest[1]} on the board: versions never decrease")
        layout = safetensors_layout.plan({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})
        for name, place in layout.places.items():
            array = tensors[name][2]
            if array.dtype != np.uint8 or array.shape != (place.end - place.start,):
                raise ValueError(
                    f"tensor {name!r} has bytes of dtype {array.dtype} and shape {array.shape}: "
                    f"uint8 of shape ({place.end - place.start},) is expected for {place.dtype} of shape {place.shape}"
                )
        with self._writable_slot(None if latest is None else latest[0], begin + timeout_s) as slot:
            slot.manifest.unlink(missing_ok=True)
            target = np.frombuffer(slot.prepare(layout), np.uint8)
            target[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
            checksum = zlib.crc32(layout.header)
            for name, place in layout.places.items():
                target[place.start : place.end] = tensors[name][2]
                checksum = zlib.crc32(tensors[name][2].data, checksum)
            manifest = {"version": version, "num_bytes": layout.num_bytes, "checksum": checksum}
            _write_atomically(slot.manifest, json.dumps(manifest).encode())
        pointer = {"slot": self._slots.index(slot), "version": version}
        _write_atomically(self.directory / _LATEST, json.dumps(pointer).encode())
        return time.monotonic() - begin

    @contextlib.contextmanager
    def _writable_slot(self, latest_slot: int | None, deadline: float) -> Iterator[_Slot]:
        """The slot of the oldest version that nobody reads, locked against readers."""
        candidates = [slot for index, slot in enumerate(self._slots) if index != latest_slot]
        manifests = {slot: slot.read_manifest() for slot in candidates}
        candidates.sort(key=lambda slot: -1 if (m := manifests[slot]) is None else m.version)
        while True:
            for slot in candidates:
                with _flock(slot.lock, fcntl.LOCK_EX) as locked:
                    if locked:
                        yield slot
                        return
            if time.monotonic() >= deadline:
                raise WeightsError(
                    f"all {len(self._slots)} slots of {self.directory} hold the latest version or are being read: "
                    "a reader hangs or reads too slowly; raise pipeline.weight_slots if that is how it is"
                )
            time.sleep(_RETRY_S)


class WeightLease:
    """A version that cannot be overwritten while the lease lasts. Made by `WeightReader.lease`."""

    def __init__(self, slot: _Slot, manifest: _Manifest) -> None:
        self.version = manifest.version
        self.path = slot.directory
        """A Hugging Face directory."""
        self._weights = slot.weights
        self._manifest = manifest

    def tensors(self) -> dict[str, TensorBytes]:
        """name -> (dtype, shape, read-only uint8 array that maps the file), in the order of the file.

        Valid until the lease ends; copy what should live longer. Raises WeightsError where size or checksum disagree.
        """
        with self._weights.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        populate(data, write=False)
        view = memoryview(data)
        if len(view) != self._manifest.num_bytes or zlib.crc32(view) != self._manifest.checksum:
            raise WeightsError(
                f"{self._weights} is not what was published as version {self.version}: its checksum differs"
            )
        try:
            places = safetensors_layout.parse(view)
        except LayoutError as error:
            raise WeightsError(f"{self._weights}: {error}") from error
        file_bytes = np.frombuffer(view, np.uint8)
        return {name: (place.dtype, place.shape, file_bytes[place.start : place.end]) for name, place in places.items()}


class WeightReader:
    """A reader of a board; any number of them, in any process. directory: as for WeightPublisher."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def latest(self) -> int | None:
        """The newest version on the board; None where nothing was published yet."""
        latest = _read_latest(self.directory)
        return None if latest is None else latest[1]

    @contextlib.contextmanager
    def lease(self, version: int | None = None, timeout_s: float = 60.0) -> Iterator[WeightLease]:
        """Hold a version: the one asked for, by default the latest.

        Raises WeightsError where the board has no such version (an old one may be overwritten: take the latest), or
        where the latest cannot be had within `timeout_s` seconds, which takes a publisher that died at a bad moment.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            latest = _read_latest(self.directory)
            if latest is None:
                raise WeightsError(f"{self.directory} holds no version yet: wait until the learner announces one")
            wanted = latest[1] if version is None else version
            slot = self._find(wanted, latest)
            if slot is not None:
                with _flock(slot.lock, fcntl.LOCK_SH) as locked:
                    # Only under the lock does the slot keep what it holds.
                    manifest = slot.read_manifest() if locked else None
                    if manifest is not None and manifest.version == wanted:
                        yield WeightLease(slot, manifest)
                        return
            if version is not None and version != latest[1]:
                raise WeightsError(f"version {version} is not on the board {self.directory}, the latest is {latest[1]}")
            if time.monotonic() >= deadline:
                raise WeightsError(
                    f"version {wanted} on the board {self.directory} cannot be leased: did its learner die?"
                )
            time.sleep(_RETRY_S)

    def _find(self, version: int, latest: tuple[int, int]) -> _Slot | None:
        if version == latest[1]:
            return _Slot(self.directory, latest[0])
        for directory in sorted(self.directory.glob("slot-*/")):
            slot = _Slot(self.directory, int(directory.name.removeprefix("slot-")))
            manifest = slot.read_manifest()
            if manifest is not None and manifest.version == version:
                return slot
        return None


@contextlib.contextmanager
def _flock(path: Path, operation: int) -> Iterator[bool]:
    """Hold a lock on a file if it can be had at once; yields whether it could. Each call is a holder of its own."""
    handle = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, operation | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            locked = False
        yield locked
    finally:
        os.close(handle)


def _write_atomically(path: Path, content: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    os.replace(new, path)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(values, dict):
        raise WeightsError(f"{path} holds {values!r}: it was not written by a WeightPublisher")
    return values


def _read_latest(directory: Path) -> tuple[int, int] | None:
    """(slot, version) of the newest version."""
    values = _read_json(directory / _LATEST)
    return None if values is None else (int(values["slot"]), int(values["version"]))
