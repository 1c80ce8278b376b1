"""Messages between actors and learner ranks, as bytes.

The types and their checks stand together in this one file, which is long for that reason.

Invariant: `decode` returns a valid message or raises WireError, whatever the bytes.

A message is a ZeroMQ frame: CRC-32 of the rest (4 bytes), run id (8 bytes, both little endian), then a msgpack array
[schema version, code, fields in the order of the dataclass]. The run id is `RunDirectory.run_id`, or 0 from an actor
that has not heard it yet: one on another host learns it from the learner's first answer.

    code  message           from     meaning
    1     Hello             actor    introduces the actor: its settings, its arena, the tickets that it still holds
    2     TicketRequest     actor    number of tickets that the actor wants to have under way
    3     DescriptorBatch   actor    records in the arena, or in the frames that follow; a reminder has no frames
    4     TicketFailed      actor    the attempt at a ticket failed
    5     Heartbeat         actor    the actor is alive; tickets that it holds and wants; its latest metrics
    6     Goodbye           actor    the actor leaves: grant its tickets to others
    7     Engines           actor    servers of the actor to which the learner is to send new weights
    10    HelloWanted       learner  the actor is unknown (the learner is new, or has given it up): send Hello
    11    Grant             learner  play these episodes
    12    Ack               learner  the trajectories are stored: free their space
    13    Refused           learner  a trajectory is malformed or not wanted: free its space, do not send it again
    14    WeightsAnnounced  learner  the current version; also the answer to Hello and Heartbeat
    15    Shutdown          learner  the run is over: end
    16    Revoked           learner  the time for these tickets is over: stop playing them
    17    RecordsWanted     learner  records that were named and are not here: send them
    20    EvaluationRequest actor    number of evaluation tasks that the actor wants to have at a time
    21    EvaluationResult  actor    an evaluation task was played
    22    EvaluationFailed  actor    the attempt at an evaluation task failed
    23    EvaluationGrant   learner  the evaluation tasks that the actor has from now on

Records: see record.py.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from impala_llm.pipeline.shm.run_directory import check_name
from impala_llm.pipeline.tickets.ledger import Ticket

SCHEMA_VERSION = 5
RUN_OVER = "the run is over"
"""Reason of the `Shutdown` that ends all actors for good."""
UNKNOWN_RUN = 0
MAX_MESSAGE_BYTES = 8 << 20
"""Limit of a message; the records that follow it have a limit of their own."""
MAX_RECORD_BYTES = 512 << 20
MAX_ITEMS = 1 << 16
"""Limit of tickets, records or metrics in one message."""
_MAX_TEXT = 4096
MAX_TEMPERATURE = 100.0
_INT32, _INT64 = 1 << 31, 1 << 63
_CRC = struct.Struct("<I")
_RUN_ID = struct.Struct("<Q")
DESCRIPTOR = struct.Struct("<5q")
"""A `Descriptor` as a row of `DescriptorBatch`."""
_BODY_AT = _CRC.size + _RUN_ID.size


class WireError(ValueError):
    """Bytes that are no valid message of this schema, or a value that cannot be sent."""


class Descriptor(NamedTuple):
    """One record of a DescriptorBatch.

    Attributes:
        sequence: number of the trajectory in this actor process; acknowledgements name it.
        ticket_id: as in the record, so that a ticket can be closed when the record is unreadable.
        start, num_words, checksum: see `ring.Span`; start is 0 where the record follows as a frame.
    """

    sequence: int
    ticket_id: int
    start: int
    num_words: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of an actor process.

    Attributes:
        incarnation: random number of this actor process, also in its arena.
        held: as in Heartbeat.
        arena: name of the arena with its records (`RunDirectory.arena_path`); empty: they follow their descriptors as
            frames.
        first_sequence: sequence below which all records have been answered.
        settings: of the actor that must be the learner's, as texts by key, see shared_settings.py.
    """

    actor_id: str
    incarnation: int
    held: tuple[int, ...]
    arena: str
    first_sequence: int = 0
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name("actor_id", self.actor_id)
        _check_int("first_sequence", self.first_sequence, 0)
        _check_map("settings", self.settings)
        for text in (*self.settings, *self.settings.values()):
            _check_text("a key or value in settings", text)
        if self.arena != "":
            _check_name("arena", self.arena)
        _check_int("incarnation", self.incarnation, 0)
        _check_ints("held", self.held)


@dataclass(frozen=True, slots=True)
class TicketRequest:
    """Request for tickets.

    Attributes:
        want: a level, not an increment; see `TicketLedger.request`.
    """

    want: int

    def __post_init__(self) -> None:
        _check_int("want", self.want, 0, MAX_ITEMS)


@dataclass(frozen=True, slots=True)
class DescriptorBatch:
    """Offer of records.

    Attributes:
        rows: int64[n, 5], little endian, a `Descriptor` each; oldest first.
    """

    rows: bytes

    def __post_init__(self) -> None:
        _check_type("rows", self.rows, bytes)
        row = 8 * len(Descriptor._fields)
        if len(self.rows) % row or not 0 < len(self.rows) <= MAX_ITEMS * row:
            raise WireError(f"rows has {len(self.rows)} bytes: 1 to {MAX_ITEMS} rows of {row} are expected")
        if self.array[:, :4].min() < 0:
            raise WireError("rows holds a negative number: only a checksum may be one")

    @classmethod
    def of(cls, descriptors: Sequence[Descriptor]) -> DescriptorBatch:
        """Make a batch of descriptors."""
        return cls(b"".join([DESCRIPTOR.pack(*descriptor) for descriptor in descriptors]))

    @property
    def array(self) -> np.ndarray:
        """Rows as int64[n, 5], read-only."""
        return np.frombuffer(self.rows, "<i8").reshape(-1, len(Descriptor._fields))


@dataclass(frozen=True, slots=True)
class TicketFailed:
    """Failure of an attempt at a ticket.

    Attributes:
        reason: for the log.
    """

    ticket_id: int
    reason: str

    def __post_init__(self) -> None:
        _check_int("ticket_id", self.ticket_id, 0)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life, which also repairs lost messages.

    Attributes:
        held: tickets granted to this actor of which it has neither reported a failure nor received an acknowledgement;
            the learner grants tickets again that are missing here.
        stats: metrics by name.
        want: as in TicketRequest.
        first_sequence: as in Hello.
    """

    held: tuple[int, ...]
    stats: dict[str, float]
    want: int = 0
    first_sequence: int = 0

    def __post_init__(self) -> None:
        _check_ints("held", self.held)
        _check_int("want", self.want, 0, MAX_ITEMS)
        _check_int("first_sequence", self.first_sequence, 0)
        _check_map("stats", self.stats)
        for name, value in self.stats.items():
            _check_text("a name in stats", name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise WireError(f"stats[{_shown(name)}] is {_shown(value)}: a number is expected")


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Farewell of an actor. No fields."""


@dataclass(frozen=True, slots=True)
class Engines:
    """All servers of this actor that may be sent weights now; each message replaces the one before.

    Attributes:
        urls: of the servers.
        openings: for each, a random number that changes whenever the actor itself has loaded weights into it: a server
            that the learner gave up comes back with another one.
    """

    urls: tuple[str, ...]
    openings: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_items("urls", self.urls, str)
        for url in self.urls:
            _check_text("a url", url)
            if not url.startswith(("http://", "https://")):
                raise WireError(f"a url is {_shown(url)}: http://host:port is expected")
        _check_ints("openings", self.openings)
        if len(self.openings) != len(self.urls) or len(set(self.openings)) != len(self.openings):
            raise WireError(f"openings is {_shown(self.openings)}: a number of its own for each url is expected")


@dataclass(frozen=True, slots=True)
class HelloWanted:
    """Request for a Hello. No fields."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant of tickets.

    Attributes:
        tickets: in the order in which they should be played.
    """

    tickets: tuple[Ticket, ...]

    def __post_init__(self) -> None:
        _check_items("tickets", self.tickets, Ticket)


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledgement of records.

    Attributes:
        sequences: of records that are stored in the learner's trajectory store.
    """

    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints("sequences", self.sequences)


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of a record.

    Attributes:
        sequence: of the record.
        reason: for the log.
    """

    sequence: int
    reason: str

    def __post_init__(self) -> None:
        _check_int("sequence", self.sequence, 0)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class WeightsAnnounced:
    """Announcement of the published version.

    Attributes:
        version: newest that is published.
        heartbeat_s: seconds that the learner wants between two heartbeats, at least; 0: as the actor likes.
    """

    version: int
    heartbeat_s: int = 0

    def __post_init__(self) -> None:
        _check_int("version", self.version, 0)
        _check_int("heartbeat_s", self.heartbeat_s, 0)


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Order to end.

    Attributes:
        reason: `RUN_OVER`, or why this actor is refused.
    """

    reason: str

    def __post_init__(self) -> None:
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Revoked:
    """Revocation of tickets, which are granted to others now.

    Attributes:
        ticket_ids: of attempts to stop; whichever attempt arrives first counts.
    """

    ticket_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints("ticket_ids", self.ticket_ids)


@dataclass(frozen=True, slots=True)
class RecordsWanted:
    """Request for records of an actor whose records come as frames.

    Attributes:
        sequences: of records that a reminder has named, and that never arrived.
    """

    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ints("sequences", self.sequences)


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Request for tasks of the evaluations inside of a run. An actor that sends none is dealt none.

    Attributes:
        want: a level, not an increment.
    """

    want: int

    def __post_init__(self) -> None:
        _check_int("want", self.want, 0, MAX_ITEMS)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation task.

    Attributes:
        evaluation_id, task_id: as granted.
        score: final score in [0, 1].
        success: whether the episode succeeded.
        num_tokens: of the whole episode, observations included.
        num_turns: of the episode.
        first_version, last_version: oldest and newest policy version that sampled any of its tokens.
    """

    evaluation_id: int
    task_id: int
    score: float
    success: bool
    num_tokens: int
    num_turns: int
    first_version: int
    last_version: int

    def __post_init__(self) -> None:
        _check_int("evaluation_id", self.evaluation_id, 0)
        _check_int("task_id", self.task_id, -_INT64)
        _check_number("score", self.score, 0, 1)
        _check_type("success", self.success, bool)
        _check_int("num_tokens", self.num_tokens, 0, _INT32 - 1)
        _check_int("num_turns", self.num_turns, 0, _INT32 - 1)
        _check_int("last_version", self.last_version, 0)
        _check_int("first_version", self.first_version, 0, self.last_version)


@dataclass(frozen=True, slots=True)
class EvaluationFailed:
    """Failure of an attempt at an evaluation task.

    Attributes:
        evaluation_id, task_id: as granted.
        reason: for the log.
    """

    evaluation_id: int
    task_id: int
    reason: str

    def __post_init__(self) -> None:
        _check_int("evaluation_id", self.evaluation_id, 0)
        _check_int("task_id", self.task_id, -_INT64)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class EvaluationGrant:
    """All evaluation tasks that an actor has from now on: it stops those that are not named, and sends again the result
    of one that it has played.

    Attributes:
        evaluation_id: random number of the evaluation.
        min_version: oldest policy version to play with.
        temperature: of sampling; 0: greedy.
        task_ids: in the order in which they should be played.
    """

    evaluation_id: int
    min_version: int
    temperature: float
    task_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_int("evaluation_id", self.evaluation_id, 0)
        _check_int("min_version", self.min_version, 0)
        _check_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _check_items("task_ids", self.task_ids, int)
        for task_id in self.task_ids:
            _check_int("a task id", task_id, -_INT64)


Message = (
    Hello
    | TicketRequest
    | DescriptorBatch
    | TicketFailed
    | Heartbeat
    | Goodbye
    | Engines
    | HelloWanted
    | Grant
    | Ack
    | Refused
    | WeightsAnnounced
    | Shutdown
    | Revoked
    | RecordsWanted
    | EvaluationRequest
    | EvaluationResult
    | EvaluationFailed
    | EvaluationGrant
)

_TYPES: dict[int, type[Message]] = {
    1: Hello,
    2: TicketRequest,
    3: DescriptorBatch,
    4: TicketFailed,
    5: Heartbeat,
    6: Goodbye,
    7: Engines,
    10: HelloWanted,
    11: Grant,
    12: Ack,
    13: Refused,
    14: WeightsAnnounced,
    15: Shutdown,
    16: Revoked,
    17: RecordsWanted,
    20: EvaluationRequest,
    21: EvaluationResult,
    22: EvaluationFailed,
    23: EvaluationGrant,
}
_CODES = {kind: code for code, kind in _TYPES.items()}
_FIELDS = {kind: [field.name for field in dataclasses.fields(kind)] for kind in _CODES}


def encode(message: Message, run_id: int = UNKNOWN_RUN) -> bytes:
    """Encode a message as a frame, with the run id of its sender.

    Args:
        message: to encode.
        run_id: in [1, 2^63), or UNKNOWN_RUN.

    Raises:
        WireError: it is larger than MAX_MESSAGE_BYTES, or a number exceeds 64 bits.
    """
    values = [getattr(message, name) for name in _FIELDS[type(message)]]
    if isinstance(message, Grant):
        values = [[(t.ticket_id, t.task_id, t.group_id, t.seed, t.min_version) for t in message.tickets]]
    try:
        body: bytes = _RUN_ID.pack(run_id) + msgpack.packb([SCHEMA_VERSION, _CODES[type(message)], *values])
    except (ValueError, TypeError, OverflowError) as error:
        raise WireError(f"cannot be sent: {error}") from error
    frame = _CRC.pack(zlib.crc32(body)) + body
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} has {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return frame


def decode(frame: bytes) -> Message:
    """Decode a frame.

    Raises:
        WireError: it is no valid message; the text says why.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    if len(frame) < _BODY_AT or _CRC.unpack_from(frame)[0] != zlib.crc32(memoryview(frame)[_CRC.size :]):
        raise WireError(f"a frame of {len(frame)} bytes has the wrong checksum: it was changed on its way")
    values = _unpack_versioned(frame[_BODY_AT:])
    if not values or type(values[0]) is not int or values[0] not in _TYPES:
        raise WireError(f"code {_shown(values[0])} is none of {list(_TYPES)}" if values else "a message has no code")
    kind, values = _TYPES[values[0]], values[1:]
    num_fields = len(_FIELDS[kind])
    if len(values) != num_fields:
        raise WireError(f"{kind.__name__} has {len(values)} fields: {num_fields} are expected")
    if kind is Grant:
        return Grant(tuple(_decode_ticket(item) for item in _items("tickets", values[0])))
    fields: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return kind(*fields)


def run_id_of(frame: bytes) -> int:
    """Run id of a frame that `decode` has accepted."""
    run_id: int = _RUN_ID.unpack_from(frame, _CRC.size)[0]
    return run_id


def _decode_ticket(item: object) -> Ticket:
    values = _items("a ticket", item, 5)
    for value in values:
        _check_int("a field of a ticket", value, -_INT64)
    return Ticket(*values)


def _unpack_versioned(frame: bytes) -> list[Any]:
    what = "a message"
    try:
        values = msgpack.unpackb(frame)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"{what} is no msgpack: {error}") from error
    if not isinstance(values, list) or not values:
        raise WireError(f"{what} is a {type(values).__name__}: a non-empty array is expected")
    if values[0] != SCHEMA_VERSION or type(values[0]) is not int:
        raise WireError(
            f"{what} has schema version {_shown(values[0])}, this program speaks {SCHEMA_VERSION}: "
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


def _check_map(name: str, value: object) -> None:
    _check_type(name, value, dict)
    assert isinstance(value, dict)
    if len(value) > MAX_ITEMS:
        raise WireError(f"{name} has {len(value)} entries: at most {MAX_ITEMS} are allowed")


def _check_int(name: str, value: object, low: int, high: int = _INT64 - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{name} is {_shown(value)}: an integer in [{low}, {high}] is expected")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]  # of one of the two
        raise WireError(f"{name} is {_shown(value)}: a number in [{low:g}, {high:g}] is expected")


def _check_text(name: str, value: object) -> None:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise WireError(f"{name} is {_shown(value)}: a text of at most {_MAX_TEXT} characters is expected")


def _check_name(what: str, value: object) -> None:
    _check_text(what, value)
    assert isinstance(value, str)
    try:
        check_name(what, value)
    except ValueError as error:
        raise WireError(str(error)) from error


def _check_ints(name: str, value: object) -> None:
    _check_items(name, value, int)
    assert isinstance(value, tuple)
    if value and not 0 <= min(value) <= max(value) < _INT64:
        raise WireError(f"{name} is {_shown(value)}: integers in [0, {_INT64 - 1}] are expected")


def _check_items(name: str, value: object, kind: type) -> None:
    if type(value) is not tuple or len(value) > MAX_ITEMS or not set(map(type, value)) <= {kind}:
        raise WireError(f"{name} is {_shown(value)}: at most {MAX_ITEMS} of {kind.__name__} are expected")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep"
    return text if len(text) <= 80 else text[:77] + "..."
