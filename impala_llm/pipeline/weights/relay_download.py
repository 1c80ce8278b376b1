"""Download of one version by a relay, in files that outlive the relay.

Invariant: a chunk counts as received only after its bytes lie in the file and their checksum agreed; so a relay that
opens the files after a kill continues at the first missing chunk.

    download           the weights, then the files beside them, end to end; its pages are used for the next version
    download.progress  32 bytes, a hash of contents and chunk size, then a byte for each chunk: 1 is received. It is
                       overwritten in place: others may have filled the file system since
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import mmap
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.reserved_file import reserve
from impala_llm.pipeline.shm.ring import populate
from impala_llm.pipeline.weights.relay_messages import Contents, encode
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE, WeightsError, parse_weights
from impala_llm.pipeline.weights.tensor_writing import TensorBytes

_DOWNLOAD = "download"
_PROGRESS = "download.progress"
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class FileChunk:
    """A part of a file: bytes [offset, offset + length) of `name`, which lie at `position` of the download."""

    index: int
    name: str
    offset: int
    length: int
    position: int


class Download:
    """Received part of one version. A directory has one at a time.

    Args:
        directory: of the local board.
        contents: the server's description of the version; a partial download of the same contents is continued.
        chunk_bytes: size of all chunks but the last of a file.

    Raises:
        WeightsError: memory is short, or another relay uses the directory.
    """

    def __init__(self, directory: Path, contents: Contents, chunk_bytes: int) -> None:
        self.contents = contents
        self._source = directory / _DOWNLOAD
        sizes = {WEIGHTS_FILE: contents.num_bytes, **{name: size for name, size, _ in contents.files}}
        total = sum(sizes.values())
        disk = os.statvfs(directory)
        if total > disk.f_blocks * disk.f_frsize:
            raise WeightsError(f"version {contents.version} has {total} bytes: more than all of {directory} can hold")
        self._sections: dict[str, tuple[int, int]] = {}
        self._chunks: list[FileChunk] = []
        position = 0
        for name, size in sizes.items():
            for offset in range(0, size, chunk_bytes):
                length = min(chunk_bytes, size - offset)
                self._chunks.append(FileChunk(len(self._chunks), name, offset, length, position + offset))
            self._sections[name] = (position, position + size)
            position += size
        with ExitStack() as opened:
            self._handle = _open(self._source, opened)
            self._lock(opened)
            try:
                self._data = self._map(total)
                reserve(directory / _PROGRESS, _DIGEST_BYTES + len(self._chunks))
            except OSError as error:
                raise WeightsError(f"cannot reserve {total} bytes for {self._source}: {error}. Free memory") from error
            self._progress = _open(directory / _PROGRESS, opened)
            received = self._received_before(chunk_bytes)
            self._opened = opened.pop_all()
        self._missing = {chunk.index: chunk for chunk in self._chunks if received[chunk.index] != 1}

    def missing(self) -> list[FileChunk]:
        """List the chunks that were not received yet, in order."""
        return list(self._missing.values())

    def put(self, chunk: FileChunk, data: bytes, checksum: int) -> bool:
        """Store the data of a chunk.

        Args:
            chunk: that the data belong to.
            data: bytes that were received.
            checksum: that they must have, see `copy_kernels.bytes_checksum`.

        Returns:
            False, and the chunk stays missing, if length or checksum disagree.
        """
        target = self._data[chunk.position : chunk.position + chunk.length]
        if len(data) != chunk.length or copy_kernels.stream_bytes(target, np.frombuffer(data, np.uint8)) != checksum:
            return False
        os.pwrite(self._progress, b"\1", _DIGEST_BYTES + chunk.index)
        self._missing.pop(chunk.index, None)
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

    def forget(self) -> None:
        """Mark all chunks as missing; the files stay for the next version."""
        os.pwrite(self._progress, bytes(_DIGEST_BYTES), 0)

    def close(self) -> None:
        """Close the files; they keep the received chunks."""
        self._opened.close()

    def _lock(self, opened: ExitStack) -> None:
        """Lock the download until the stack is closed."""
        # Not that of the open file which is mapped: the mapping keeps it open, and may live on.
        lock = FileLock(self._source, os.O_RDWR | os.O_NOFOLLOW)
        opened.callback(lock.close)
        if not lock.take(fcntl.LOCK_EX):
            raise WeightsError(f"{self._source} is in use: one relay a host is enough, end the other one")

    def _received_before(self, chunk_bytes: int) -> bytes:
        """A byte for each chunk, 1 where an earlier download has received it; that of other contents is forgotten."""
        # The number of the request differs each time.
        identity = encode(dataclasses.replace(self.contents, request=0)) + chunk_bytes.to_bytes(8, "little")
        digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).digest()
        known = os.pread(self._progress, _DIGEST_BYTES + len(self._chunks), 0)
        if known[:_DIGEST_BYTES] != digest:
            os.pwrite(self._progress, bytes(_DIGEST_BYTES + len(self._chunks)), 0)
            os.pwrite(self._progress, digest, 0)  # last: a kill in between leaves none
            known = b""
        return known[_DIGEST_BYTES:].ljust(len(self._chunks), b"\0")

    def _map(self, num_bytes: int) -> np.ndarray:
        if os.fstat(self._handle).st_size != num_bytes:
            os.ftruncate(self._handle, 0)
        os.posix_fallocate(self._handle, 0, num_bytes)
        mapping = mmap.mmap(self._handle, num_bytes)
        populate(mapping, write=True)
        return np.frombuffer(mapping, np.uint8)


def _open(path: Path, opened: ExitStack) -> int:
    """Open or create a file. Returns its descriptor, which the stack closes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    opened.callback(os.close, descriptor)
    return descriptor
