"""Wire: what actors and learner ranks say to each other, as bytes.

Invariant: `decode` returns a valid message or raises WireError, whatever the bytes; so does `decode_trajectory`.

A message is one ZeroMQ frame: a msgpack array [schema version, code, fields in the order of the dataclass].

    code  message           from     meaning
    1     Hello             actor    here I am, this is my arena, these tickets I still hold
    2     TicketRequest     actor    how many tickets I want to have under way
    3     DescriptorBatch   actor    trajectories that lie in my arena
    4     TicketFailed      actor    my attempt at a ticket came to nothing
    5     Heartbeat         actor    I live; the tickets that I hold; my latest figures
    6     Goodbye           actor    I leave: grant my tickets to others
    10    HelloWanted       learner  I do not know you (I am new, or thought you dead): say Hello
    11    Grant             learner  play these episodes
    12    Ack               learner  these trajectories are mine now: free their space
    13    Refused           learner  this trajectory is malformed or not wanted: free its space, do not send it again
    14    WeightsAnnounced  learner  my current version; also the answer to Hello and Heartbeat
    15    Shutdown          learner  the run is over: end

A trajectory is a header (msgpack: schema version, T, K, then METADATA_FIELDS in order) and a payload: the arrays in the
order of ARRAY_FIELDS, end to end, each padded with zeros to a multiple of 8 bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from impala_llm.pipeline.arena import Descriptor
from impala_llm.pipeline.rundir import check_name
from impala_llm.pipeline.tickets import Ticket
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory, TrajectoryError

SCHEMA_VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 10
MAX_TOKENS = 1 << 24
MAX_ITEMS = 1 << 16
"""Most tickets, records or figures in one message."""
_MAX_TEXT = 4096
_ALIGNMENT = 8
_INT64 = 1 << 63


class WireError(ValueError):
    """Bytes that are no valid message or trajectory of this schema, or a value that cannot be sent."""


@dataclass(frozen=True, slots=True)
class Record:
    """One trajectory of a DescriptorBatch.

    sequence: counts the trajectories of this actor process; acknowledgements name it. ticket_id: as in the header, so
    that a ticket can be closed when the header is unreadable. descriptor: where the payload lies. header: see above.
    """

    sequence: int
    ticket_id: int
    descriptor: Descriptor
    header: bytes

    def __post_init__(self) -> None:
        _check_int("sequence", self.sequence, 0)
        _check_int("ticket_id", self.ticket_id, 0)
        _check_type("header", self.header, bytes)
        if len(self.header) > MAX_HEADER_BYTES:
            raise WireError(f"header has {len(self.header)} bytes: at most {MAX_HEADER_BYTES} are allowed")


@dataclass(frozen=True, slots=True)
class Hello:
    """incarnation: random number of this actor process, also in its arena. held: as in Heartbeat. pid, start_time:
    as in `rundir.ProcessIdentity`, so that a learner on the same host sees at once that the process died."""

    actor_id: str
    incarnation: int
    pid: int
    start_time: int
    held: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_actor_id(self.actor_id)
        _check_int("incarnation", self.incarnation, 0)
        _check_int("pid", self.pid, 1)
        _check_int("start_time", self.start_time, 0)
        _check_ints("held", self.held)


@dataclass(frozen=True, slots=True)
class TicketRequest:
    """want: a level, not an increment; see `TicketLedger.request`."""

    want: int

    def __post_init__(self) -> None:
        _check_int("want", self.want, 0, MAX_ITEMS)


@dataclass(frozen=True, slots=True)
class DescriptorBatch:
    """records: at least one, oldest first."""

    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _check_items("records", self.records, Record)


@dataclass(frozen=True, slots=True)
class TicketFailed:
    """reason: for the log."""

    ticket_id: int
    reason: str

    def __post_init__(self) -> None:
        _check_int("ticket_id", self.ticket_id, 0)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """held: tickets granted to this actor of which it has neither reported a failure nor seen an acknowledgement; what
    the learner misses here was lost on the way and is sent again. stats: figures for the learner's metrics."""

    held: tuple[int, ...]
    stats: dict[str, float]

    def __post_init__(self) -> None:
        _check_ints("held", self.held)
        _check_type("stats", self.stats, dict)
        if len(self.stats) > MAX_ITEMS:
            raise WireError(f"stats has {len(self.stats)} entries: at most {MAX_ITEMS} are allowed")
        for name, value in self.stats.items():
            _check_text("a name in stats", name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise WireError(f"stats[{name!r}] is {value!r}: a number is expected")


@dataclass(frozen=True, slots=True)
class Goodbye:
    """No fields."""


@dataclass(frozen=True, slots=True)
class HelloWanted:
    """No fields."""


@dataclass(frozen=True, slots=True)
class Grant:
    """tickets: in the order in which they should be played."""

    tickets: tuple[Ticket, ...]

    def __post_init__(self) -> None:
        _check_items("tickets", self.tickets, Ticket)


@dataclass(frozen=True, slots=True)
class Ack:
    """sequences: of records."""

    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints("sequences", self.sequences)


@dataclass(frozen=True, slots=True)
class Refused:
    """sequence: of a record. reason: for the log."""

    sequence: int
    reason: str

    def __post_init__(self) -> None:
        _check_int("sequence", self.sequence, 0)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class WeightsAnnounced:
    """version: the learner's current one."""

    version: int

    def __post_init__(self) -> None:
        _check_int("version", self.version, 0)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """reason: for the log."""

    reason: str

    def __post_init__(self) -> None:
        _check_text("reason", self.reason)


Message = (
    Hello
    | TicketRequest
    | DescriptorBatch
    | TicketFailed
    | Heartbeat
    | Goodbye
    | HelloWanted
    | Grant
    | Ack
    | Refused
    | WeightsAnnounced
    | Shutdown
)

_TYPES: dict[int, type[Message]] = {
    1: Hello,
    2: TicketRequest,
    3: DescriptorBatch,
    4: TicketFailed,
    5: Heartbeat,
    6: Goodbye,
    10: HelloWanted,
    11: Grant,
    12: Ack,
    13: Refused,
    14: WeightsAnnounced,
    15: Shutdown,
}
_CODES = {kind: code for code, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    """Bytes of a message. WireError where it is larger than MAX_MESSAGE_BYTES or a number leaves 64 bits."""
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    match message:
        case DescriptorBatch(records):
            values = [[[r.sequence, r.ticket_id, *_astuple(r.descriptor), r.header] for r in records]]
        case Grant(tickets):
            values = [[_astuple(ticket) for ticket in tickets]]
    frame = _pack([SCHEMA_VERSION, _CODES[type(message)], *values])
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} has {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return frame


def decode(frame: bytes) -> Message:
    """The message in a frame. WireError for anything else, with what is wrong."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    values = _unpack_versioned(frame, "a message")
    if not values or type(values[0]) is not int or values[0] not in _TYPES:
        raise WireError(f"code {values[0]!r} is none of {list(_TYPES)}" if values else "a message has no code")
    kind, values = _TYPES[values[0]], values[1:]
    num_fields = len(dataclasses.fields(kind))
    if len(values) != num_fields:
        raise WireError(f"{kind.__name__} has {len(values)} fields: {num_fields} are expected")
    if kind is DescriptorBatch:
        return DescriptorBatch(tuple(_decode_record(item) for item in _items("records", values[0])))
    if kind is Grant:
        return Grant(tuple(_decode_ticket(item) for item in _items("tickets", values[0])))
    fields: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return kind(*fields)


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """header: for the record. parts: 1-d views of bytes to be laid end to end as the payload; they keep the arrays
    alive. num_bytes: of the payload."""

    header: bytes
    parts: tuple[memoryview, ...]
    num_bytes: int


def encode_trajectory(trajectory: Trajectory) -> EncodedTrajectory:
    """Header and payload of a trajectory, without copying its arrays. WireError where its metadata is too large."""
    metadata = [getattr(trajectory, name) for name in METADATA_FIELDS]
    header = _pack([SCHEMA_VERSION, len(trajectory.tokens), len(trajectory.turns), *metadata])
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"the metadata of episode {trajectory.episode_id!r} has {len(header)} bytes: at most {MAX_HEADER_BYTES} "
            "are allowed, shorten signature or stats"
        )
    parts: list[memoryview] = []
    for name in ARRAY_FIELDS:
        array = np.ascontiguousarray(getattr(trajectory, name)).reshape(-1).view(np.uint8)
        parts.append(array.data)
        if padding := -array.nbytes % _ALIGNMENT:
            parts.append(memoryview(bytes(padding)))
    return EncodedTrajectory(header, tuple(parts), sum(part.nbytes for part in parts))


@dataclass(frozen=True, slots=True)
class TrajectoryHeader:
    """num_tokens: T. num_turns: K. metadata: values of METADATA_FIELDS, unchecked but for the three below."""

    num_tokens: int
    num_turns: int
    metadata: dict[str, Any]

    @property
    def key(self) -> tuple[int, str, int]:
        """(ticket_id, episode_id, unroll_index): what the ledger asks for."""
        return self.metadata["ticket_id"], self.metadata["episode_id"], self.metadata["unroll_index"]


def decode_header(header: bytes) -> TrajectoryHeader:
    """WireError where the header is malformed."""
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(header)} bytes: at most {MAX_HEADER_BYTES} are allowed")
    values = _unpack_versioned(header, "a trajectory header")
    if len(values) != 2 + len(METADATA_FIELDS):
        raise WireError(f"a trajectory header has {len(values)} fields: {2 + len(METADATA_FIELDS)} are expected")
    num_tokens, num_turns, *metadata = values
    _check_int("number of tokens", num_tokens, 1, MAX_TOKENS)
    _check_int("number of turns", num_turns, 1, MAX_TOKENS)
    named = dict(zip(METADATA_FIELDS, metadata, strict=True))
    _check_int("ticket_id", named["ticket_id"], 0)
    _check_int("unroll_index", named["unroll_index"], 0)
    _check_text("episode_id", named["episode_id"])
    return TrajectoryHeader(num_tokens, num_turns, named)


def decode_trajectory(header: bytes, payload: bytes | bytearray | memoryview) -> Trajectory:
    """The trajectory, validated; its arrays are views of `payload`. WireError for anything malformed."""
    decoded = decode_header(header)
    view = memoryview(payload)
    arrays: dict[str, Any] = {}
    offset = 0
    for name, dtype in ARRAY_FIELDS.items():
        count = 2 * decoded.num_turns if name == "turns" else decoded.num_tokens
        size = count * dtype.itemsize
        if offset + size > view.nbytes:
            raise WireError(f"the payload has {view.nbytes} bytes: {name} alone ends at byte {offset + size}")
        arrays[name] = np.frombuffer(view, dtype, count, offset)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    if offset != view.nbytes:
        raise WireError(f"the payload has {view.nbytes} bytes, its header says {offset}")
    # numpy takes any byte for a bool; 2 would be True and yet unequal to it.
    if arrays["action_mask"].view(np.uint8).max() > 1:
        raise WireError("action_mask holds a byte that is neither 0 nor 1")
    arrays["turns"] = arrays["turns"].reshape(-1, 2)
    try:
        return Trajectory(**arrays, **decoded.metadata)
    except TrajectoryError as error:
        raise WireError(str(error)) from error


def _decode_record(item: object) -> Record:
    values = _items("a record", item, 7)
    sequence, ticket_id, *descriptor, header = values
    for value in descriptor:
        _check_int("a field of a descriptor", value, 0)
    return Record(sequence, ticket_id, Descriptor(*descriptor), header)


def _decode_ticket(item: object) -> Ticket:
    values = _items("a ticket", item, 5)
    for value in values:
        _check_int("a field of a ticket", value, -_INT64)
    return Ticket(*values)


def _astuple(value: Descriptor | Ticket) -> list[int]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _pack(values: list[Any]) -> bytes:
    try:
        return msgpack.packb(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"cannot be sent: {error}") from error


def _unpack_versioned(frame: bytes, what: str) -> list[Any]:
    try:
        values = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"{what} is no msgpack: {error}") from error
    if not isinstance(values, list) or not values:
        raise WireError(f"{what} is a {type(values).__name__}: a non-empty array is expected")
    if values[0] != SCHEMA_VERSION or type(values[0]) is not int:
        raise WireError(
            f"{what} has schema version {values[0]!r}, this program speaks {SCHEMA_VERSION}: "
            "run the same release on both sides"
        )
    return values[1:]


def _items(name: str, value: object, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise WireError(f"{name} is {_shown(value)}: an array{f' of {count}' if count else ''} is expected")
    return value


def _check_type(name: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise WireError(f"{name} is {_shown(value)}: {kind.__name__} is expected")


def _check_int(name: str, value: object, low: int, high: int = _INT64 - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{name} is {_shown(value)}: an integer in [{low}, {high}] is expected")


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise WireError(f"{name} is {_shown(value)}: a text of at most {_MAX_TEXT} characters is expected")


def _check_actor_id(value: object) -> None:
    _check_text("actor_id", value)
    assert isinstance(value, str)
    try:
        check_name("actor_id", value)
    except ValueError as error:
        raise WireError(str(error)) from error


def _check_ints(name: str, value: object) -> None:
    _check_items(name, value, int)
    assert isinstance(value, tuple)
    for item in value:
        _check_int(f"an item of {name}", item, 0)


def _check_items(name: str, value: object, kind: type) -> None:
    if type(value) is not tuple or len(value) > MAX_ITEMS or any(type(item) is not kind for item in value):
        raise WireError(f"{name} is {_shown(value)}: at most {MAX_ITEMS} of {kind.__name__} are expected")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
