"""Weight board: versions of the weights in shared memory, from the learner to all engines of its host.

Invariant: a leased version is whole and does not change until the lease ends. The publisher writes only into slots
without a lease, and makes a version the latest after its last byte. So a publisher may be killed at any moment: the
latest version stays readable, and the next publisher continues with the same slots.

Weights are copied once in and, by a reader that wants its own, once out; checksums are computed in the same passes. The
file of a slot keeps its size and pages from version to version: fresh pages cost several times the copy. The files are
described in slots.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.file_lock import flock
from impala_llm.pipeline.weights import safetensors_layout
from impala_llm.pipeline.weights.safetensors_layout import Layout
from impala_llm.pipeline.weights.slots import (
    PUBLISHER_LOCK,
    WEIGHTS_FILE,
    Slot,
    SlotsInUse,
    WeightsError,
    WeightsManifest,
    damaged,
    holders,
    read_latest,
    write_atomically,
    write_in_place,
    write_latest,
)
from impala_llm.pipeline.weights.tensor_writing import (
    SharedWriting,
    TensorBytes,
    TensorSource,
    write_tensors,
    write_version,
)

__all__ = [
    "WEIGHTS_FILE",
    "SlotsInUse",
    "WeightLease",
    "WeightPublisher",
    "WeightReader",
    "WeightsError",
]

_RETRY_S = 0.005
_NO_SLOT = -1


def _check_bytes(layout: Layout, tensors: Mapping[str, TensorSource]) -> None:
    """Raise ValueError where an array does not have its tensor's size."""
    for name, info in layout.infos.items():
        array, size = tensors[name][2], info.end - info.start
        if not isinstance(array, np.ndarray):
            continue
        if array.dtype != np.uint8 or array.shape != (size,) or not array.flags.c_contiguous:
            raise ValueError(
                f"tensor {name!r} has bytes of dtype {array.dtype}, shape {array.shape} and strides {array.strides}: "
                f"contiguous uint8 of shape ({size},) is expected for {info.dtype} of shape {info.shape}"
            )


def _indices(board: Path) -> list[int]:
    """Find the slots that a board has."""
    numbers = (path.name.removeprefix("slot-") for path in sorted(board.glob("slot-*/")))
    return [int(number) for number in numbers if number.isdecimal()]


class WeightPublisher:
    """The only writer of a board, but for processes that `contribute` parts of a version to it. For one thread.

    Args:
        directory: of the board, `RunDirectory.weights_path`; made if missing; an existing board is continued.
        num_slots: 2 at least: the latest version is never overwritten. With 3 one reader may lag without holding up
            the publisher.
        files: name -> contents of the files that, with the weights, make a slot a Hugging Face directory (config.json,
            tokenizer files).
        takeover_s: seconds to wait for another publisher that ends.

    Raises:
        ValueError: num_slots is below 2, or a name in files is not a plain file name.
        WeightsError: there is no memory for the files.
    """

    def __init__(
        self,
        directory: Path,
        num_slots: int = 3,
        files: Mapping[str, bytes] | None = None,
        takeover_s: float = 60.0,
    ) -> None:
        if num_slots < 2:
            raise ValueError(
                f"num_slots is {num_slots}: at least 2 are needed, the latest version is never overwritten"
            )
        for name in files or {}:
            if Path(name).name != name or name in ("..", WEIGHTS_FILE):
                raise ValueError(f"files has {name!r}: a plain file name other than {WEIGHTS_FILE} is expected")
        self.directory = directory
        self._takeover_s = takeover_s
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / PUBLISHER_LOCK).touch()
        self._layout: Layout | None = None
        self._described: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._slots = [Slot(directory, index) for index in range(num_slots)]
        for slot in self._slots:
            slot.lock.touch()
            slot.directory.mkdir(exist_ok=True)
            for name, content in (files or {}).items():
                path = slot.directory / name
                # Written again it would need memory, which others may have filled since.
                if not path.exists() or path.read_bytes() != content:
                    write_atomically(path, content)

    def reserve(self, tensors: Mapping[str, TensorSource], extra_bytes: int = 0) -> float:
        """Reserve memory for all slots, so that later versions need not wait for it, nor fail on a full file system.

        Slots that are being read, or hold the latest version, are left for later; so is the removal of those that a
        publisher with more slots has left.

        Args:
            tensors: as for `publish`; only dtypes and shapes are used.
            extra_bytes: of `publish`'s extra; 0 where they are not known: the first `publish` then reserves them.

        Returns:
            Seconds taken.

        Raises:
            WeightsError: memory is short.
        """
        begin = time.monotonic()
        layout = self._plan(tensors)
        with self._alone(begin):
            latest = read_latest(self.directory)
            self._remove_surplus(latest)
            for slot in self._slots:
                with flock(slot.lock, fcntl.LOCK_EX) as locked:
                    is_latest = latest is not None and slot.index == latest[0]
                    if locked and (not is_latest or slot.has_file_of(layout.num_bytes)):
                        slot.writable(layout.num_bytes)
            try:
                self._reserve_beside(layout, extra_bytes)
            except OSError as error:
                raise WeightsError(f"cannot reserve memory in {self.directory}: {error}. Free memory") from error
        return time.monotonic() - begin

    def publish(
        self,
        tensors: Mapping[str, TensorSource],
        version: int,
        timeout_s: float = 60.0,
        extra: bytes = b"",
        sharing: SharedWriting | None = None,
        num_threads: int = 1,
    ) -> float:
        """Write a version and make it the latest.

        Args:
            tensors: name -> (dtype, shape, source), see `slots.TensorSource`; arrays are contiguous.
            version: not below the latest.
            timeout_s: seconds to wait while readers hold all other slots.
            extra: kept with the version, see `WeightLease.extra`.
            sharing: with processes that write their parts of the version by `contribute`.
            num_threads: threads that write tensors which are in memory.

        Returns:
            Seconds taken.

        Raises:
            SlotsInUse: no slot becomes free in time.
            WeightsError: the version is below the latest, another publisher is at work, or memory is short.
            ValueError: an array does not have its tensor's size.
        """
        begin = time.monotonic()
        layout = self._plan(tensors)
        _check_bytes(layout, tensors)
        with self._alone(begin + self._takeover_s):
            latest = read_latest(self.directory)
            if latest is not None and version < latest[1]:
                raise WeightsError(
                    f"version {version} is older than {latest[1]} on {self.directory}: versions never decrease"
                )
            try:
                with self._writable_slot(latest, time.monotonic() + timeout_s) as slot:
                    slot.withdraw()
                    with contextlib.suppress(OSError):  # without room now, the writing itself waits for it
                        self._reserve_beside(layout, len(extra))
                    write_in_place(slot.extra, extra)
                    target = slot.writable(layout.num_bytes)
                    if sharing is not None:
                        sharing.tell(slot.index)
                    sums = write_version(layout, target, tensors, sharing, num_threads)
                    manifest = WeightsManifest(version, layout.num_bytes, *sums)
                    write_atomically(slot.manifest, manifest.to_json())
            except SlotsInUse:
                if sharing is not None:
                    sharing.tell(_NO_SLOT)
                raise
            write_latest(self.directory, slot.index, version)
            self._remove_surplus((slot.index, version))
        return time.monotonic() - begin

    def contribute(self, tensors: Mapping[str, TensorSource], sharing: SharedWriting, num_threads: int = 1) -> bool:
        """Write this process's parts of the version that the board's publisher publishes with the same `sharing`.

        Args:
            tensors: of the same names, dtypes and shapes as the publisher's.
            sharing: with the publisher and the other processes.
            num_threads: as for `publish`.

        Returns:
            Whether they were written; False if readers hold all slots.

        Raises:
            WeightsError: memory is short.
        """
        index = sharing.tell(_NO_SLOT)
        if index == _NO_SLOT:
            return False
        layout = self._plan(tensors)
        target = self._slots[index].writable(layout.num_bytes)
        sharing.gather(write_tensors(layout, target, tensors, num_threads))
        return True

    def _reserve_beside(self, layout: Layout, extra_bytes: int) -> None:
        """Reserve memory for the small files of the slots. Raises OSError where the file system has no room."""
        for slot in self._slots:
            slot.reserve_beside(len(layout.infos), extra_bytes)

    def _remove_surplus(self, latest: tuple[int, int] | None) -> None:
        """Remove slots that an earlier publisher with more of them has left, except the latest version's and slots that
        are being read."""
        for index in _indices(self.directory):
            if index < len(self._slots) or (latest is not None and index == latest[0]):
                continue
            slot = Slot(self.directory, index)
            with flock(slot.lock, fcntl.LOCK_EX) as locked:
                if locked:
                    for path in self.directory.glob(f"slot-{index}.*"):
                        if path != slot.lock:  # a reader may be about to open it
                            path.unlink()
                    shutil.rmtree(slot.directory)  # last: a later call finds the slot by it if this one is interrupted

    def _plan(self, tensors: Mapping[str, TensorSource]) -> Layout:
        described = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
        if self._layout is None or described != self._described:
            self._layout = safetensors_layout.plan(described)
            self._described = described
        return self._layout

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """Lock out other publishers, such as a predecessor that was stopped and continues."""
        while True:
            with flock(self.directory / PUBLISHER_LOCK, fcntl.LOCK_EX) as locked:
                if locked:
                    yield
                    return
            if time.monotonic() >= deadline:
                raise WeightsError(f"another publisher writes to {self.directory}: end it, a board has one")
            time.sleep(_RETRY_S)

    @contextlib.contextmanager
    def _writable_slot(self, latest: tuple[int, int] | None, deadline: float) -> Iterator[Slot]:
        """Lock the slot of the oldest version that is not being read, against readers."""
        latest_slot, latest_version = (None, None) if latest is None else latest

        def age(slot: Slot) -> int:
            manifest = slot.read_manifest()
            # A version above the latest never became the latest: its publisher died just before.
            announced = manifest is not None and latest_version is not None and manifest.version <= latest_version
            return manifest.version if manifest is not None and announced else -1

        candidates = sorted((slot for slot in self._slots if slot.index != latest_slot), key=age)
        while True:
            for slot in candidates:
                with flock(slot.lock, fcntl.LOCK_EX) as locked:
                    if locked:
                        yield slot
                        return
            if time.monotonic() >= deadline:
                who = holders([slot.lock for slot in candidates])
                raise SlotsInUse(
                    f"all {len(self._slots)} slots of {self.directory} hold the latest version or are being read by "
                    f"{', '.join(who) or 'a process that cannot be seen from here'}: it hangs or reads too slowly; "
                    "raise pipeline.weight_slots if that is how it is"
                )
            time.sleep(_RETRY_S)


class WeightLease:
    """A version that cannot be overwritten while the lease lasts. Made by `WeightReader.lease`.

    Args:
        slot: of the version, which the maker keeps locked.
        manifest: of the version.
    """

    def __init__(self, slot: Slot, manifest: WeightsManifest) -> None:
        self.version = manifest.version
        self.manifest = manifest
        self.path = slot.directory
        """A Hugging Face directory."""
        self._slot = slot

    def tensors(self, verify: bool = True) -> dict[str, TensorBytes]:
        """Map all tensors without a copy. Valid until the lease ends.

        Args:
            verify: compare the checksums of all tensors, which reads every byte once.

        Returns:
            name -> (dtype, shape, read-only uint8 array that maps the file), in the order of the file.

        Raises:
            WeightsError: size, header or a checksum disagree.
        """
        return self._slot.mapped(self.manifest).tensors(self.manifest, str(self._slot.weights), verify)

    def extra(self) -> bytes:
        """Bytes that `publish` was given beside the weights. Valid until the lease ends."""
        return self._slot.extra.read_bytes()

    def copy_into(self, targets: Mapping[str, np.ndarray]) -> None:
        """Copy all tensors, comparing their checksums in the same pass.

        Args:
            targets: name -> uint8[bytes of the tensor], writable and contiguous; exactly the names of the version.

        Raises:
            WeightsError: a name or size disagrees, and the targets are unchanged; or a checksum does, and the targets
                must be filled again before use.
        """
        weights = self._slot.mapped(self.manifest)
        for name in weights.infos.keys() ^ targets.keys():
            whose = (
                "version {} has no tensor {!r}" if name in targets else "version {} has a tensor {!r} without target"
            )
            raise WeightsError(f"{self._slot.weights}: {whose.format(self.version, name)}")
        for name, info in weights.infos.items():
            target = targets[name]
            size = info.end - info.start
            if target.dtype != np.uint8 or target.shape != (size,) or not target.flags.c_contiguous:
                raise WeightsError(
                    f"tensor {name!r} ({info.dtype} of shape {info.shape}) has {size} bytes, its target is "
                    f"{target.dtype} of shape {target.shape} and strides {target.strides}: "
                    f"contiguous uint8 of shape ({size},) is expected"
                )
            if not target.flags.writeable:
                raise WeightsError(f"the target of tensor {name!r} is read-only")
        for (name, info), checksum in zip(weights.infos.items(), self.manifest.checksums, strict=True):
            if copy_kernels.stream_bytes(targets[name], weights.data[info.start : info.end]) != checksum:
                raise damaged(str(self._slot.weights), self.version, name)

    def file_bytes(self) -> np.ndarray:
        """Map the whole weights file, read-only uint8, without comparing checksums. Valid until the lease ends.

        Raises:
            WeightsError: size or header of the file disagree with the manifest.
        """
        return self._slot.mapped(self.manifest).data


class WeightReader:
    """Reader of a board. A board has any number, in any process. For one thread. Slots stay mapped between leases.

    Args:
        directory: as for WeightPublisher.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._slots: dict[int, Slot] = {}

    def latest(self) -> int | None:
        """Newest version on the board; None before the first. Raises WeightsError if the board is malformed."""
        latest = read_latest(self.directory)
        return None if latest is None else latest[1]

    def num_slots(self) -> int:
        """Number of slots of the board."""
        return len(_indices(self.directory))

    @contextlib.contextmanager
    def lease(self, version: int | None = None, timeout_s: float = 60.0) -> Iterator[WeightLease]:
        """Lease a version while entered.

        Args:
            version: None: the latest.
            timeout_s: seconds to try.

        Raises:
            WeightsError: the board has no such version (an old one may be overwritten: take the latest), the latest
                cannot be leased in time, since its publisher died, or a file of the board is malformed.
        """
        deadline = time.monotonic() + timeout_s
        self._slots = {index: slot for index, slot in self._slots.items() if slot.directory.exists()}
        while True:
            latest = read_latest(self.directory)
            if latest is None:
                raise WeightsError(f"{self.directory} holds no version yet: wait until the learner announces one")
            wanted = latest[1] if version is None else version
            slot = self._find(wanted, latest)
            if slot is not None:
                with contextlib.ExitStack() as stack:
                    try:
                        locked = stack.enter_context(flock(slot.lock, fcntl.LOCK_SH))
                    except OSError as error:
                        raise WeightsError(f"{slot.lock} cannot be locked: {error}") from error
                    # The slot keeps its version only while it is locked.
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

    def _find(self, version: int, latest: tuple[int, int]) -> Slot | None:
        if version == latest[1]:
            return self._slot(latest[0])
        for index in _indices(self.directory):
            slot = self._slot(index)
            with flock(slot.lock, fcntl.LOCK_SH) as locked:
                manifest = slot.read_manifest() if locked else None
            if manifest is not None and manifest.version == version:
                return slot
        return None

    def _slot(self, index: int) -> Slot:
        return self._slots.setdefault(index, Slot(self.directory, index))
