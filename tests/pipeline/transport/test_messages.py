"""Every message comes back equal; anything else is a WireError."""

import contextlib
import struct
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.messages import Descriptor, WireError
from tests.examples import examples

POSITIVE = st.integers(0, 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
IDS = st.lists(POSITIVE, max_size=5).map(tuple)
DESCRIPTORS = st.builds(Descriptor, POSITIVE, POSITIVE, POSITIVE, POSITIVE, st.integers(-(2**63), 2**63 - 1))
ENGINES = st.lists(POSITIVE, max_size=4, unique=True).flatmap(
    lambda openings: st.builds(
        messages.Engines,
        st.tuples(*[TEXT.map("http://{}".format)] * len(openings)),
        st.just(tuple(openings)),
    )
)
NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True)
MESSAGES = st.one_of(
    st.builds(messages.Hello, NAMES, POSITIVE, IDS, NAMES | st.just("")),
    st.builds(messages.TicketRequest, st.integers(0, messages.MAX_ITEMS)),
    st.lists(DESCRIPTORS, min_size=1, max_size=4).map(messages.DescriptorBatch.of),
    st.builds(messages.TicketFailed, POSITIVE, TEXT),
    st.builds(
        messages.Heartbeat,
        IDS,
        st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
        st.integers(0, messages.MAX_ITEMS),
        POSITIVE,
    ),
    st.just(messages.Goodbye()),
    ENGINES,
    st.just(messages.HelloWanted()),
    st.builds(
        messages.Grant,
        st.lists(st.builds(Ticket, POSITIVE, st.integers(-5, 5), POSITIVE, POSITIVE, POSITIVE), max_size=3).map(tuple),
    ),
    st.builds(messages.Ack, IDS),
    st.builds(messages.Refused, POSITIVE, TEXT),
    st.builds(messages.WeightsAnnounced, POSITIVE, POSITIVE),
    st.builds(messages.Shutdown, TEXT),
    st.builds(messages.Revoked, IDS),
    st.builds(messages.RecordsWanted, IDS),
    st.builds(messages.EvaluationRequest, st.integers(0, messages.MAX_ITEMS)),
    st.builds(
        messages.EvaluationResult,
        *(POSITIVE, st.integers(-5, 5), st.floats(0, 1), st.booleans()),
        *(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 5), st.integers(5, 2**63 - 1)),
    ),
    st.builds(messages.EvaluationFailed, POSITIVE, st.integers(-5, 5), TEXT),
    st.builds(
        messages.EvaluationGrant,
        *(POSITIVE, POSITIVE, st.floats(0, messages.MAX_TEMPERATURE)),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
    ),
)
CODES = [1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23]


def frame_of(body: bytes, run_id: int = 0) -> bytes:
    """With its checksum and run id in front."""
    rest = struct.pack("<Q", run_id) + body
    return struct.pack("<I", zlib.crc32(rest)) + rest


def packed(*values: object) -> bytes:
    return frame_of(msgpack.packb([messages.SCHEMA_VERSION, *values]))


def nested(depth: int) -> bytes:
    """msgpack of an array in an array in an array ..."""
    return b"\x91" * depth + b"\x90"


def test_a_frame_is_checksum_version_code_and_fields() -> None:
    ticket = Ticket(ticket_id=1, task_id=-2, group_id=3, seed=4, min_version=5)
    for message, values in [
        (messages.Hello("a", 1, (4, 5), "a-0", 6, {"k": "v"}), [1, "a", 1, [4, 5], "a-0", 6, {"k": "v"}]),
        (messages.TicketRequest(7), [2, 7]),
        (messages.DescriptorBatch.of([Descriptor(1, 2, 3, 4, -5)]), [3, struct.pack("<5q", 1, 2, 3, 4, -5)]),
        (messages.TicketFailed(7, "why"), [4, 7, "why"]),
        (messages.Heartbeat((1,), {"a": 2.0}, 3, 4), [5, [1], {"a": 2.0}, 3, 4]),
        (messages.Goodbye(), [6]),
        (messages.Engines(("http://a:1", "https://b"), (5, 6)), [7, ["http://a:1", "https://b"], [5, 6]]),
        (messages.HelloWanted(), [10]),
        (messages.Grant((ticket,)), [11, [[1, -2, 3, 4, 5]]]),
        (messages.Ack((1, 2)), [12, [1, 2]]),
        (messages.Refused(1, "why"), [13, 1, "why"]),
        (messages.WeightsAnnounced(3, 10), [14, 3, 10]),
        (messages.Shutdown("why"), [15, "why"]),
        (messages.Revoked((1,)), [16, [1]]),
        (messages.EvaluationRequest(7), [20, 7]),
        (messages.EvaluationResult(1, -2, 0.5, True, 3, 4, 5, 6), [21, 1, -2, 0.5, True, 3, 4, 5, 6]),
        (messages.EvaluationFailed(1, -2, "why"), [22, 1, -2, "why"]),
        (messages.EvaluationGrant(1, 2, 0.5, (-3, 4)), [23, 1, 2, 0.5, [-3, 4]]),
    ]:
        frame = messages.encode(message)
        assert frame == packed(*values)
        assert messages.decode(frame) == message


def test_a_frame_names_the_run() -> None:
    frame = messages.encode(messages.HelloWanted(), run_id=2**63 - 1)
    assert frame == frame_of(msgpack.packb([5, 10]), 2**63 - 1)
    assert (messages.decode(frame), messages.run_id_of(frame)) == (messages.HelloWanted(), 2**63 - 1)
    assert messages.run_id_of(messages.encode(messages.HelloWanted())) == messages.UNKNOWN_RUN


@settings(deadline=None, max_examples=200)
@given(MESSAGES)
def test_every_message_comes_back_equal(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message


def test_a_batch_gives_its_descriptors_as_rows() -> None:
    descriptors = [Descriptor(5, 6, 7, 8, -9), Descriptor(2**63 - 1, 0, 0, 0, -(2**63))]
    batch = messages.decode(messages.encode(messages.DescriptorBatch.of(descriptors)))
    assert isinstance(batch, messages.DescriptorBatch)
    assert batch.array.dtype == np.int64 and batch.array.tolist() == [list(row) for row in descriptors]
    assert not batch.array.flags.writeable


@settings(deadline=None, max_examples=examples(80))
@given(MESSAGES.map(messages.encode), st.data())
def test_a_frame_that_was_changed_or_cut_on_its_way_is_refused(frame: bytes, data: st.DataObject) -> None:
    broken = bytearray(frame)
    bit = data.draw(st.integers(0, 8 * len(broken) - 1))
    broken[bit // 8] ^= 1 << bit % 8
    for bad in (bytes(broken), frame[: data.draw(st.integers(0, len(frame) - 1))], frame + b"\0"):
        with pytest.raises(WireError, match="checksum"):
            messages.decode(bad)


@settings(deadline=None, max_examples=examples(80))
@given(st.one_of(st.binary(max_size=200), MESSAGES.map(lambda message: messages.encode(message)[12:])), st.data())
def test_broken_bytes_under_a_right_checksum_are_a_wire_error_and_nothing_else(
    body: bytes, data: st.DataObject
) -> None:
    broken = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.integers(0, len(broken)))]
    with contextlib.suppress(WireError):
        message = messages.decode(frame_of(bytes(broken)))
        assert repr(messages.decode(messages.encode(message))) == repr(message)


NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, max_examples=examples(80))
@given(st.sampled_from([*CODES, 0, 8, 99]), st.lists(NESTED, max_size=6))
def test_well_formed_msgpack_of_the_wrong_types_is_a_wire_error(code: int, fields: list[object]) -> None:
    try:
        message = messages.decode(packed(code, *fields))
    except WireError:
        return
    assert repr(messages.decode(messages.encode(message))) == repr(message)


@pytest.mark.parametrize("depth", [100, 990, 1010, 1022, 5000, 1 << 20])
def test_what_is_nested_deep_is_a_wire_error(depth: int) -> None:
    deep = nested(depth)
    bodies = [deep, b"\x92\x04" + deep]
    for code in CODES:
        for num_fields in range(1, 7):
            for index in range(num_fields):
                head = bytes([0x92 + num_fields, messages.SCHEMA_VERSION, code])
                bodies.append(head + b"\x01" * index + deep + b"\x01" * (num_fields - index - 1))
        if depth > 5000:
            break
    bodies.append(b"\x96\x04\x05\x90\x81\xa1a" + deep + b"\0\0")  # in the figures of a heartbeat
    bodies.append(b"\x96\x04\x05\x90\x81" + deep + b"\x01\0\0")
    bodies.append(b"\x93\x04\x0b\x91\x95\x01\x01\x01\x01" + deep)  # in a ticket
    for body in bodies:
        with pytest.raises(WireError):
            messages.decode(frame_of(body))


def row(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def test_errors_name_what_is_wrong() -> None:
    hello = ["actor", 1, [], "arena", 0, {}]
    played = [1, 2, 0.5, True, 3, 4, 5, 6]
    for frame, expected in [
        (b"", "a frame of 0 bytes"),
        (b"\0\0\0", "a frame of 3 bytes"),
        (frame_of(b""), "no msgpack"),
        (frame_of(msgpack.packb([99, 14, 3])), "schema version 99"),
        (frame_of(msgpack.packb([True, 14, 3])), "schema version True"),
        (frame_of(msgpack.packb([5.0, 14, 3])), "schema version 5.0"),
        (packed(), "no code"),
        (frame_of(msgpack.packb([])), "array is expected"),
        (frame_of(msgpack.packb({"a": 1})), "array is expected"),
        (packed(77), "code 77"),
        (packed(True), "code True"),
        (packed(14), "WeightsAnnounced has 0 fields: 2"),
        (packed(14, 1, 2, 3), "WeightsAnnounced has 3 fields: 2"),
        (packed(14, -1, 0), "version is -1"),
        (packed(14, 2**63, 0), "version is 9223372036854775808"),
        (packed(14, True, 0), "version is True"),
        (packed(1, "../x", *hello[1:]), "actor_id"),
        (packed(1, b"actor", *hello[1:]), "actor_id"),
        (packed(1, *hello[:1], -1, *hello[2:]), "incarnation is -1"),
        (packed(1, *hello[:2], [-1], "", 0, {}), "held"),
        (packed(1, *hello[:2], 3, "", 0, {}), "held"),
        (packed(1, *hello[:2], [], 1, 0, {}), "arena is 1"),
        (packed(1, *hello[:2], [], "../../x", 0, {}), "arena"),
        (packed(1, *hello[:5], [1]), "settings is"),
        (packed(1, *hello[:5], {"k": 1}), "value in settings is 1"),
        (packed(1, *hello[:5], {1: "v"}), "key or value in settings|int is not allowed"),
        (packed(1, *hello[:5], {str(i): "" for i in range(messages.MAX_ITEMS + 1)}), "settings has 65537 entries"),
        (packed(2, -1), "want is -1"),
        (packed(2, messages.MAX_ITEMS + 1), "want"),
        (packed(3, b""), "rows has 0 bytes"),
        (packed(3, row(1, 2, 3, 4)), "rows has 32 bytes"),
        (packed(3, row(1, 2, 3, 4, 5) + b"x"), "rows has 41 bytes"),
        (packed(3, row(1, 2, 3, 4, 5) * (messages.MAX_ITEMS + 1)), "rows has"),
        *((packed(3, row(*(-1 if i == k else 1 for k in range(5)))), "rows holds a negative") for i in range(4)),
        (packed(3, [1, 2, 3, 4, 5]), "rows is"),
        (packed(3, "text"), "rows is 'text'"),
        (packed(4, 1, "x" * 5000), "reason"),
        (packed(4, 1, b"x"), "reason is b'x'"),
        (packed(5, [], {"a": True}, 0, 0), r"stats\['a'\] is True"),
        (packed(5, [], {"a": "b"}, 0, 0), r"stats\['a'\] is 'b'"),
        (packed(5, [], {b"a": 1}, 0, 0), "name in stats"),
        (packed(5, [], [1], 0, 0), "stats is"),
        (packed(7, "http://a", [1]), "urls is 'http://a'"),
        (packed(7, [b"http://a"], [1]), "urls is"),
        (packed(7, ["file:///etc/passwd"], [1]), "a url is 'file:///etc/passwd'"),
        (packed(7, ["http://" + "x" * 5000], [1]), "a url is"),
        (packed(7, ["http://a"], [-1]), "openings is"),
        (packed(7, ["http://a"], [1, 2]), "openings is"),
        (packed(7, ["http://a", "http://b"], [1, 1]), "openings is"),
        (packed(11, 5), "tickets is 5"),
        (packed(11, [5]), "a ticket is 5"),
        (packed(11, [[1, 2, 3, 4]]), "array of 5"),
        (packed(11, [[1, 2, 3, 4, None]]), "field of a ticket is None"),
        (packed(12, [1.5]), "sequences is"),
        (packed(12, [2**63]), "sequences is"),
        (packed(13, 1, 2), "reason is 2"),
        (packed(16, [True]), "ticket_ids is"),
        (packed(20, -1), "want is -1"),
        (packed(20, True), "want is True"),
        (packed(21, -1, *played[1:]), "evaluation_id is -1"),
        (packed(21, 1, "2", *played[2:]), "task_id is '2'"),
        *(
            (packed(21, 1, 2, score, *played[3:]), "score is")
            for score in (float("nan"), float("inf"), -0.5, 1.5, True, "1", None, [1])
        ),
        (packed(21, 1, 2, 0.5, 1, *played[4:]), "success is 1"),
        (packed(21, *played[:4], -1, 4, 5, 6), "num_tokens is -1"),
        (packed(21, *played[:4], 2**31, 4, 5, 6), "num_tokens is"),
        (packed(21, *played[:5], 0.5, 5, 6), "num_turns is 0.5"),
        (packed(21, *played[:6], 7, 6), "first_version is 7"),
        (packed(21, *played[:6], 5, -1), "last_version is -1"),
        (packed(22, 1, 2, 3), "reason is 3"),
        (packed(22, 1, None, "why"), "task_id is None"),
        (packed(23, 1, 2, float("nan"), []), "temperature is nan"),
        (packed(23, 1, 2, -1.0, []), "temperature is -1"),
        (packed(23, 1, 2, 0.5, [2**63]), "a task id is"),
        (packed(23, 1, 2, 0.5, [True]), "task_ids is"),
        (packed(23, 1, 2, 0.5, 3), "task_ids is"),
        (packed(23, 1, -2, 0.5, []), "min_version is -2"),
        (bytes(messages.MAX_MESSAGE_BYTES + 1), "at most"),
    ]:
        with pytest.raises(WireError, match=expected):
            messages.decode(frame)


def test_a_message_that_cannot_be_sent_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="at most"):
        messages.encode(messages.Heartbeat((), {f"{i:0200}": 1.0 for i in range(messages.MAX_ITEMS)}))
    with pytest.raises(WireError, match="cannot be sent"):
        messages.encode(messages.Heartbeat((), {"a": 1 << 70}))
    with pytest.raises(WireError, match="cannot be sent"):
        messages.encode(messages.Shutdown("\ud800"))
    with pytest.raises(WireError, match="rows"):
        messages.DescriptorBatch.of([])


def test_an_error_shows_no_more_than_a_line_of_what_was_sent() -> None:
    long = "x" * 100_000
    for frame in [
        frame_of(msgpack.packb([long])),
        packed(long),
        packed(14, long, 0),
        packed(1, long, 1, [], "", 0, {}),
        packed(5, [], {"a": long}, 0, 0),
        packed(5, [], {"x" * 4000: "b"}, 0, 0),
    ]:
        with pytest.raises(WireError) as caught:
            messages.decode(frame)
        assert len(str(caught.value)) < 500
