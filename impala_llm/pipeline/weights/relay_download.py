"""Download of one version by a relay, in the file `download`: the weights, then the files beside them, end to end.

Invariant: `tensors` and `files` return what the server has described, by its checksums, whatever the file held before.
The file stays, and its pages are used for the next version: others may have filled the file system since.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.ring import populate
from impala_llm.pipeline.weights.relay_messages import Contents
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE, WeightsError, parse_weights
from impala_llm.pipeline.weights.tensor_writing import TensorBytes

_DOWNLOAD = "download"


@dataclass(frozen=True)
class FileChunk:
    """A part of a file: bytes [offset, offset + length) of `name`, which lie at `position` of the download."""

    name: str
    offset: int
    length: int
    position: int

    def split(self, num_bytes: int) -> tuple[FileChunk, FileChunk]:
        """Return its first bytes, and the rest."""
        rest = {name: getattr(self, name) + num_bytes for name in ("offset", "position")}
        return replace(self, length=num_bytes), replace(self, length=self.length - num_bytes, **rest)


class Download:
    """Memory for one version. A directory has one at a time.

    Args:
        directory: of the local board.
        contents: the server's description of the version.

    Raises:
        WeightsError: memory is short, or another relay uses the directory.
    """

    def __init__(self, directory: Path, contents: Contents) -> None:
        self.contents = contents
        self._source = directory / _DOWNLOAD
        sizes = {WEIGHTS_FILE: contents.num_bytes, **{name: size for name, size, _ in contents.files}}
        total = sum(sizes.values())
        disk = os.statvfs(directory)
        if total > disk.f_blocks * disk.f_frsize:
            raise WeightsError(f"version {contents.version} has {total} bytes: more than all of {directory} can hold")
        self._sections: dict[str, tuple[int, int]] = {}
        self.chunks: list[FileChunk] = []
        """All files that are not empty, in order, each as one chunk."""
        position = 0
        for name, size in sizes.items():
            if size:
                self.chunks.append(FileChunk(name, 0, size, position))
            self._sections[name] = (position, position + size)
            position += size
        with ExitStack() as opened:
            # Not that of the open file which is mapped: the mapping keeps it open, and may live on.
            lock = opened.enter_context(closing(FileLock(self._source, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)))
            if not lock.take(fcntl.LOCK_EX):
                raise WeightsError(f"{self._source} is in use: one relay a host is enough, end the other one")
            try:
                self._data = _map(self._source, total)
            except OSError as error:
                raise WeightsError(f"cannot reserve {total} bytes for {self._source}: {error}. Free memory") from error
            self._opened = opened.pop_all()

    def put(self, chunk: FileChunk, data: bytes) -> None:
        """Store the data of a chunk.

        Args:
            chunk: that the data belong to.
            data: as many bytes as it has.
        """
        self._data[chunk.position : chunk.position + chunk.length] = np.frombuffer(data, np.uint8)

    def is_whole(self) -> bool:
        """Return whether the version is here already: it arrived whole, and could not be published."""
        try:
            self.tensors()
            self.files()
        except WeightsError:
            return False
        return True

    def tensors(self) -> dict[str, TensorBytes]:
        """Return the tensors of the complete version, without a copy.

        Raises:
            WeightsError: a checksum differs.
        """
        start, end = self._sections[WEIGHTS_FILE]
        manifest = self.contents.manifest
        weights = parse_weights(self._data[start:end], manifest, str(self._source))
        return weights.tensors(manifest, str(self._source), verify=True)

    def files(self) -> dict[str, bytes]:
        """Return the files beside the weights, name -> contents.

        Raises:
            WeightsError: a checksum differs.
        """
        files = {}
        for name, _, checksum in self.contents.files:
            start, end = self._sections[name]
            data = self._data[start:end]
            if copy_kernels.bytes_checksum(data) != checksum:
                raise WeightsError(f"{self._source}: the checksum of {name} is not that of the server's file")
            files[name] = data.tobytes()
        return files

    def close(self) -> None:
        """Let another download have the file."""
        self._opened.close()


def _map(path: Path, num_bytes: int) -> np.ndarray:
    """Map a file for writing, resident, and give it this size."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size != num_bytes:
            os.ftruncate(handle, 0)
        os.posix_fallocate(handle, 0, num_bytes)
        mapping = mmap.mmap(handle, num_bytes)
    finally:
        os.close(handle)
    populate(mapping, write=True)
    return np.frombuffer(mapping, np.uint8)
