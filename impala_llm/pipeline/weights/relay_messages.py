"""Messages between a weight relay and the learner's weight server, as bytes.

Invariant: `decode` returns a valid message or raises RelayWireError, whatever the bytes.

A message is a msgpack array [schema version, code, fields in the order of the dataclass]; only Chunk has a second
frame, its data. Every request carries a number, and its answer the same.

    code  message          from    meaning
    1     LatestRequest    relay   which version is the newest?
    2     ManifestRequest  relay   which files has this version, or one that is kept? I am going to fetch it
    3     ChunkRequest     relay   bytes of a file of this version
    11    Latest           server  the newest version
    12    Contents         server  sizes and checksums of all files of a version
    13    Chunk            server  the bytes
    14    Gone             server  the version was overwritten: ask for the newest
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgpack

from impala_llm.pipeline.weights.slots import WEIGHTS_FILE, WeightsManifest

SCHEMA_VERSION = 3
MAX_CHUNK_BYTES = 16 << 20
MAX_FRAME_BYTES = MAX_CHUNK_BYTES
"""Limit of any frame, to be set on the sockets."""
MAX_REQUEST_BYTES = 1024
QUEUE_LENGTH = 8
"""Maximum of messages that wait for a peer, each of which may hold a chunk of weights: twice as many as a relay asks
for at a time. To be set on the sockets."""
_MAX_TENSORS = 1 << 20
_MAX_FILES = 64
_MAX_FILE_BYTES = 1 << 30
_INT64 = 1 << 63
_MAX_NAME = 128


class RelayWireError(ValueError):
    """Bytes that are no valid message of this schema."""


@dataclass(frozen=True, slots=True)
class LatestRequest:
    """Request for the number of the newest version."""

    request: int

    def __post_init__(self) -> None:
        _check_int("request", self.request)


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """Request for the contents of a version, or of another one that is newer than the relay's.

    Attributes:
        have: version that the relay has; -1 where it has none.
    """

    request: int
    version: int
    have: int

    def __post_init__(self) -> None:
        _check_int("request", self.request)
        _check_int("version", self.version)
        _check_int("have", self.have, -1)


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Request for bytes [offset, offset + length) of a file: the weights, or one of `Contents.files`."""

    request: int
    version: int
    name: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        for name in ("request", "version", "offset"):
            _check_int(name, getattr(self, name))
        _check_name(self.name)
        _check_int("length", self.length, 1, MAX_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Latest:
    """Answer to LatestRequest.

    Attributes:
        version: newest one; -1 where nothing was published yet.
    """

    request: int
    version: int

    def __post_init__(self) -> None:
        _check_int("request", self.request)
        _check_int("version", self.version, -1)


@dataclass(frozen=True, slots=True)
class Contents:
    """Answer to ManifestRequest: the fields of the version's `WeightsManifest`, and its other files.

    Attributes:
        files: (name, bytes, checksum) of each file beside the weights.
    """

    request: int
    version: int
    num_bytes: int
    header_checksum: int
    checksums: tuple[int, ...]
    files: tuple[tuple[str, int, int], ...]

    def __post_init__(self) -> None:
        _check_int("request", self.request)
        _check_int("version", self.version)
        _check_int("num_bytes", self.num_bytes, 1)
        _check_int("header_checksum", self.header_checksum, 0, 2 * _INT64 - 1)
        if not isinstance(self.checksums, tuple) or len(self.checksums) > _MAX_TENSORS:
            raise RelayWireError(f"checksums is no list of at most {_MAX_TENSORS} integers")
        for checksum in self.checksums:
            _check_int("a checksum", checksum, 0, 2 * _INT64 - 1)
        if not isinstance(self.files, tuple) or len(self.files) > _MAX_FILES:
            raise RelayWireError(f"files is no list of at most {_MAX_FILES} files")
        for entry in self.files:
            if not isinstance(entry, tuple) or len(entry) != 3:
                raise RelayWireError(f"a file is {reprlib.repr(entry)}: name, bytes and checksum are expected")
            _check_name(entry[0])
            _check_int("the size of a file", entry[1], 0, _MAX_FILE_BYTES)
            _check_int("the checksum of a file", entry[2], 0, 2 * _INT64 - 1)
        if len({WEIGHTS_FILE, *(entry[0] for entry in self.files)}) != len(self.files) + 1:
            raise RelayWireError(f"files names one file twice, or {WEIGHTS_FILE}")

    @property
    def manifest(self) -> WeightsManifest:
        """Manifest of the version."""
        return WeightsManifest(self.version, self.num_bytes, self.header_checksum, self.checksums)


@dataclass(frozen=True, slots=True)
class WeightsChunk:
    """Answer to ChunkRequest. The data follows as a frame."""

    request: int

    def __post_init__(self) -> None:
        _check_int("request", self.request)


@dataclass(frozen=True, slots=True)
class Gone:
    """Answer where the version was overwritten, or never existed."""

    request: int
    version: int

    def __post_init__(self) -> None:
        _check_int("request", self.request)
        _check_int("version", self.version)


Request = LatestRequest | ManifestRequest | ChunkRequest
Reply = Latest | Contents | WeightsChunk | Gone

_REQUESTS: dict[int, type[Request]] = {1: LatestRequest, 2: ManifestRequest, 3: ChunkRequest}
_REPLIES: dict[int, type[Reply]] = {11: Latest, 12: Contents, 13: WeightsChunk, 14: Gone}
_Message = TypeVar("_Message", Request, Reply)
_CODES: dict[type[Request | Reply], int] = {kind: code for code, kind in (*_REQUESTS.items(), *_REPLIES.items())}


def encode(message: Request | Reply) -> bytes:
    """Encode a message as a frame."""
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    frame: bytes = msgpack.packb([SCHEMA_VERSION, _CODES[type(message)], *values])
    return frame


def decode_request(frame: bytes) -> Request:
    """Decode a relay's message.

    Raises:
        RelayWireError: it is not valid; the message says why.
    """
    return _decode(frame, _REQUESTS, "request", MAX_REQUEST_BYTES)


def decode_reply(frame: bytes) -> Reply:
    """Decode a server's message.

    Raises:
        RelayWireError: it is not valid; the message says why.
    """
    return _decode(frame, _REPLIES, "reply", MAX_FRAME_BYTES)


def _decode(frame: bytes, kinds: Mapping[int, type[_Message]], what: str, max_bytes: int) -> _Message:
    if len(frame) > max_bytes:
        raise RelayWireError(f"a {what} of {len(frame)} bytes: at most {max_bytes} are allowed")
    try:
        values = msgpack.unpackb(frame, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise RelayWireError(f"not msgpack: {error}") from error
    if not isinstance(values, tuple) or len(values) < 2 or any(type(value) is not int for value in values[:2]):
        raise RelayWireError("no schema version and code")
    if values[0] != SCHEMA_VERSION:
        raise RelayWireError(
            f"schema {values[0]}: this side uses schema {SCHEMA_VERSION}, run the same version on all hosts"
        )
    if values[1] not in kinds:
        raise RelayWireError(f"code {values[1]} is no {what}")
    kind, fields = kinds[values[1]], values[2:]
    num_fields = len(dataclasses.fields(kind))
    if len(fields) != num_fields:
        raise RelayWireError(f"{kind.__name__} has {len(fields)} fields: {num_fields} are expected")
    return kind(*fields)


def _check_int(name: str, value: object, low: int = 0, high: int = _INT64 - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RelayWireError(f"{name} is {reprlib.repr(value)}: an integer from {low} to {high} is expected")


def _check_name(value: object) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or value in (".", "..") or {"/", "\0"} & {*value}:
        raise RelayWireError(f"{reprlib.repr(value)} is no plain file name")
