import contextlib
import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline import wire
from impala_llm.pipeline.arena import Descriptor
from impala_llm.pipeline.tickets import Ticket
from impala_llm.pipeline.wire import WireError
from impala_llm.trajectory import METADATA_FIELDS, Trajectory
from tests.pipeline.support import contents, make_trajectory

POSITIVE = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=50)
IDS = st.lists(POSITIVE, max_size=5).map(tuple)
MESSAGES = st.one_of(
    st.builds(
        wire.Hello, st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True), POSITIVE, st.just(1), POSITIVE, IDS
    ),
    st.builds(wire.TicketRequest, st.integers(0, wire.MAX_ITEMS)),
    st.builds(
        wire.DescriptorBatch,
        st.lists(
            st.builds(
                wire.Record,
                POSITIVE,
                POSITIVE,
                st.builds(Descriptor, POSITIVE, POSITIVE, POSITIVE, POSITIVE),
                st.binary(max_size=50),
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(wire.TicketFailed, POSITIVE, TEXT),
    st.builds(wire.Heartbeat, IDS, st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3)),
    st.just(wire.Goodbye()),
    st.just(wire.HelloWanted()),
    st.builds(
        wire.Grant,
        st.lists(st.builds(Ticket, POSITIVE, st.integers(-5, 5), POSITIVE, POSITIVE, POSITIVE), max_size=3).map(tuple),
    ),
    st.builds(wire.Ack, IDS),
    st.builds(wire.Refused, POSITIVE, TEXT),
    st.builds(wire.WeightsAnnounced, POSITIVE),
    st.builds(wire.Shutdown, TEXT),
)


@settings(deadline=None)
@given(MESSAGES)
def test_every_message_comes_back_equal(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.binary(max_size=200), MESSAGES.map(wire.encode)), st.data())
def test_broken_bytes_are_a_wire_error_and_nothing_else(frame: bytes, data: st.DataObject) -> None:
    broken = bytearray(frame)
    for _ in range(data.draw(st.integers(0, 3))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.integers(0, len(broken)))]
    for decode in (wire.decode, wire.decode_header):
        with contextlib.suppress(WireError):
            decode(bytes(broken))


NESTED = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14, 15, 99]), st.lists(NESTED, max_size=5))
def test_well_formed_msgpack_of_the_wrong_types_is_a_wire_error(code: int, fields: list[object]) -> None:
    try:
        message = wire.decode(msgpack.packb([wire.SCHEMA_VERSION, code, *fields]))
    except WireError:
        return
    assert wire.decode(wire.encode(message)) == message


def test_errors_name_what_is_wrong() -> None:
    for frame, expected in [
        (msgpack.packb([99, 14, 3]), "schema version 99"),
        (msgpack.packb([1, 77]), "code 77"),
        (msgpack.packb([1]), "no code"),
        (msgpack.packb({"a": 1}), "array is expected"),
        (msgpack.packb([1, 14]), "WeightsAnnounced has 0 fields: 1"),
        (msgpack.packb([1, 14, -1]), "version is -1"),
        (msgpack.packb([1, 14, True]), "version is True"),
        (msgpack.packb([1, 1, "../x", 1, 1, 1, []]), "actor_id"),
        (bytes(wire.MAX_MESSAGE_BYTES + 1), "at most"),
    ]:
        with pytest.raises(WireError, match=expected):
            wire.decode(frame)


def test_a_message_that_is_too_large_is_refused_by_the_sender() -> None:
    record = wire.Record(0, 0, Descriptor(0, 0, 0, 0), bytes(wire.MAX_HEADER_BYTES))
    with pytest.raises(WireError, match="at most"):
        wire.encode(wire.DescriptorBatch((record,) * 200))


@pytest.mark.parametrize("num_tokens", [6, 9, 33, 1000])
def test_a_trajectory_comes_back_equal_from_one_contiguous_payload(num_tokens: int) -> None:
    trajectory = make_trajectory(num_tokens=num_tokens, seed=num_tokens)
    encoded = wire.encode_trajectory(trajectory)
    payload = b"".join(encoded.parts)

    def padded(size: int) -> int:
        return (size + 7) // 8 * 8

    # tokens, mask, logprobs, versions, rewards, turns
    sizes = [4 * num_tokens, num_tokens, 4 * num_tokens, 4 * num_tokens, 4 * num_tokens, 2 * 4 * 2]
    assert encoded.num_bytes == len(payload) == sum(map(padded, sizes))
    assert np.array_equal(np.frombuffer(payload[: sizes[0]], np.int32), trajectory.tokens)
    decoded = wire.decode_trajectory(encoded.header, payload)
    assert contents(decoded) == contents(trajectory)


def test_a_decoded_trajectory_is_writable_where_its_payload_is() -> None:
    encoded = wire.encode_trajectory(make_trajectory())
    assert wire.decode_trajectory(encoded.header, bytearray(b"".join(encoded.parts))).tokens.flags.writeable


def test_malformed_trajectories_are_wire_errors_that_name_the_field() -> None:
    encoded = wire.encode_trajectory(make_trajectory(num_tokens=40))
    payload = b"".join(encoded.parts)
    values = msgpack.unpackb(encoded.header)
    place = {name: index + 3 for index, name in enumerate(METADATA_FIELDS)}

    def header(**changes: object) -> bytes:
        changed = list(values)
        for name, value in changes.items():
            changed[place[name]] = value
        return msgpack.packb(changed)

    bad_mask = bytearray(payload)
    bad_mask[160 + 5] = 2
    negative = bytearray(payload)
    negative[0:4] = b"\xff\xff\xff\xff"
    for bad_header, bad_payload, expected in [
        (header(score=2.0), payload, "score"),
        (header(score=None), payload, "score"),
        (header(episode_id=""), payload, "episode_id"),
        (header(ticket_id="7"), payload, "ticket_id"),
        (header(unroll_index=-1), payload, "unroll_index"),
        (header(stats={"a": "b"}), payload, "stats"),
        (header(), payload[:-8], "payload"),
        (header(), payload + bytes(8), "payload"),
        (header(), b"", "payload"),
        (header(), bad_mask, "action_mask"),
        (header(), negative, "tokens"),
        (msgpack.packb([1, 0, *values[2:]]), payload, "number of tokens"),
        (msgpack.packb([1, 1 << 60, *values[2:]]), payload, "number of tokens"),
        (msgpack.packb(values[:-1]), payload, "fields"),
        (encoded.header + b"x", payload, "msgpack"),
        (bytes(wire.MAX_HEADER_BYTES + 1), payload, "at most"),
    ]:
        with pytest.raises(WireError, match=expected):
            wire.decode_trajectory(bad_header, bad_payload)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_corrupted_trajectories_are_valid_or_wire_errors(data: st.DataObject) -> None:
    encoded = wire.encode_trajectory(make_trajectory(num_tokens=12, episode_id="e"))
    header, payload = bytearray(encoded.header), bytearray(b"".join(encoded.parts))
    for target in (header, payload):
        for _ in range(data.draw(st.integers(0, 2))):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    try:
        trajectory = wire.decode_trajectory(bytes(header), payload)
    except WireError:
        return
    assert isinstance(trajectory, Trajectory)


def test_metadata_that_cannot_be_sent_is_refused_by_the_sender() -> None:
    trajectory = make_trajectory()
    with pytest.raises(WireError, match="shorten signature"):
        wire.encode_trajectory(dataclasses.replace(trajectory, signature="x" * wire.MAX_HEADER_BYTES))
    with pytest.raises(WireError, match="cannot be sent"):
        wire.encode_trajectory(dataclasses.replace(trajectory, group_id=1 << 70))
