"""Records by their definition, and what is turned away."""

import contextlib
import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm import record, record_layout
from impala_llm.pipeline.shm.record import RecordError
from impala_llm.trajectory import Trajectory
from tests.examples import examples
from tests.pipeline.support import contents, make_trajectory

# As in the module's docstring: 11 words. Fields by name, with their offset in bytes and their kind.
HEADER = "<8sqqHHHHIIqqqqdQ"
FIELDS = {
    **{"tokens": (8, "q"), "turns": (16, "q"), "episode_id": (24, "H"), "env": (26, "H"), "signature": (30, "H")},
    **{"stats": (32, "I"), "names": (36, "I"), "ticket_id": (40, "q"), "group_id": (48, "q"), "task_id": (56, "q")},
    **{"unroll_index": (64, "q"), "score": (72, "d"), "flags": (80, "q")},
}


def by_hand(t: Trajectory) -> bytes:
    """The record of a trajectory, from the description of the layout."""

    def padded(data: bytes) -> bytes:
        while len(data) % 8:
            data += b"\0"
        return data

    texts = [text.encode() for text in (t.episode_id, t.env, t.actor_id, t.signature)]
    names = b"\0".join(name.encode() for name in t.stats)
    header = struct.pack(
        HEADER,
        b"\x1e\xb2imll\x03\x00",  # the names and types of these fields, and the format
        *(len(t.tokens), len(t.turns), *map(len, texts), len(t.stats), len(names)),
        *(t.ticket_id, t.group_id, t.task_id, t.unroll_index, t.score),
        (1 if t.bootstrap else 0) | (2 if t.success else 0) | (4 if t.continues else 0),
    )
    assert len(header) == 88
    values = b"".join(struct.pack("<d", value) for value in t.stats.values())
    arrays = (t.tokens, t.behaviour_log_probs, t.versions, t.rewards, t.turns, t.action_mask)
    return header + values + padded(b"".join(texts) + names) + padded(b"".join(array.tobytes() for array in arrays))


def changed(data: bytes, field: str, value: object) -> bytes:
    """With another number in the header."""
    start, kind = FIELDS[field]
    part = struct.pack("<" + kind, value)
    return data[:start] + part + data[start + len(part) :]


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """With another text of the same length."""
    assert data.count(old) == 1 and len(old) == len(new)
    return data.replace(old, new)


@pytest.mark.parametrize("num_tokens", [*range(6, 24), 1000, 4097])
def test_a_record_is_laid_out_as_described_and_comes_back_equal(num_tokens: int) -> None:
    trajectory = dataclasses.replace(
        make_trajectory(num_tokens=num_tokens, seed=num_tokens, version=7, unroll_index=3),
        **{"ticket_id": 11, "group_id": -5, "task_id": 13, "score": 0.25, "success": num_tokens % 2 == 0},
        **{"signature": "ä€😀"[: num_tokens % 4], "stats": {"a" * (n + 1): n / 3 for n in range(num_tokens % 5)}},
    )
    data = record.record_bytes(trajectory)
    assert data == by_hand(trajectory)
    assert contents(record.decode_record(data)) == contents(trajectory)
    encoded = record.encode_record(trajectory)
    assert encoded.header + encoded.block.tobytes() == data
    assert encoded.num_words * 8 == len(data)


# Without lone surrogates, which no UTF-8 can say.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(deadline=None)
@given(
    st.tuples(TEXT.filter(bool), TEXT, TEXT, TEXT),
    st.dictionaries(TEXT.filter(lambda name: name and "\0" not in name), st.floats(allow_nan=False), max_size=4),
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2),
    st.floats(0, 1),
)
def test_any_metadata_comes_back_equal(
    texts: tuple[str, str, str, str], stats: dict[str, float], ids: tuple[int, int], score: float
) -> None:
    trajectory = dataclasses.replace(
        make_trajectory(num_tokens=9),
        **dict(zip(("episode_id", "env", "actor_id", "signature"), texts, strict=True)),
        **{"stats": stats, "score": score, "task_id": ids[0], "group_id": ids[1], "ticket_id": 2**63 - 1},
    )
    data = record.record_bytes(trajectory)
    assert data == by_hand(trajectory)
    assert contents(record.decode_record(data)) == contents(trajectory)


def test_integers_and_booleans_in_stats_come_back_as_numbers() -> None:
    trajectory = dataclasses.replace(make_trajectory(), stats={"steps": 3, "won": True})
    assert record.decode_record(record.record_bytes(trajectory)).stats == {"steps": 3.0, "won": 1.0}


def test_what_a_header_says_names_metadata_episode_and_block() -> None:
    trajectory = dataclasses.replace(make_trajectory(num_tokens=11, unroll_index=4), stats={"a": 1.0, "bé": 2.5})
    data = memoryview(record.record_bytes(trajectory))
    facts = record.facts_of(data)
    assert len(facts) == record_layout.FACTS
    named = record_layout.NUM_TOKENS, record_layout.NUM_TURNS, record_layout.UNROLL_INDEX
    assert [facts[i] for i in named] == [11, 2, 4]
    found = record.metadata_of(data, facts)
    assert all(found[name] == getattr(trajectory, name) for name in found) and len(found) == 13

    assert bytes(data[8 * record.block_start(facts) :]) == trajectory.block.tobytes()


def test_malformed_records_are_errors_that_name_the_field() -> None:
    trajectory = dataclasses.replace(
        make_trajectory(num_tokens=40, episode_id="episode"), stats={"first": 1.0, "other": 2.0}
    )
    data = by_hand(trajectory)
    block = len(data) - 8 * -(-(17 * 40 + 8 * 2) // 8)

    def byte(offset: int, value: int) -> bytes:
        return data[: block + offset] + bytes([value]) + data[block + offset + 1 :]

    for bad, expected in [
        (b"", "record of 0 bytes"),
        (data[:80], "record of 80 bytes"),
        (data[:-1], "multiple of 8"),
        (data[:-8], "its header says something else"),
        (data + bytes(8), "its header says something else"),
        (b"\x01\x00imll\x01\x00" + data[8:], "begins with 0x1"),
        (changed(data, "tokens", 0), "number of tokens is 0"),
        (changed(data, "tokens", -1), "number of tokens is -1"),
        (changed(data, "tokens", 2**62), "number of tokens"),
        (changed(data, "turns", 0), "number of turns is 0"),
        (changed(data, "turns", -(2**63)), "number of turns"),
        (changed(data, "signature", 2**16 - 1), "its header says something else"),
        (changed(data, "stats", 257), "stats"),
        (changed(data, "stats", 2**32 - 1), "stats"),
        (changed(data, "stats", 0), "its header says something else"),
        (changed(data, "names", 2**16), "stats"),
        (changed(data, "names", 2**32 - 1), "stats"),
        (changed(data, "ticket_id", -1), "ticket_id is -1"),
        (changed(data, "unroll_index", -1), "unroll_index is -1"),
        (changed(data, "unroll_index", 2**15), "unroll_index is 32768"),
        (changed(data, "score", 1.5), "score is 1.5"),
        (changed(data, "score", float("nan")), "score is nan"),
        (changed(data, "flags", 8), "flags is 8"),
        (changed(data, "flags", 6), "continues is True and bootstrap is False"),
        (changed(data, "flags", -1), "flags is -1"),
        (byte(3, 0x80), "tokens holds the negative id"),
        (byte(4 * 40 * 4 + 8 * 2 + 5, 2), "action_mask holds a byte"),
        (byte(4 * 40 * 4 + 8 * 2, 1), "action_mask is True at index 0"),
        (byte(2 * 40 * 4, 0), "versions"),
        (replaced(data, b"episode", b"episod\xff"), "UTF-8"),
        (replaced(data, b"episodetoy", b"episod\xc3\xa4oy"), "UTF-8"),  # a letter over the edge of two texts
        (replaced(data, b"first", b"\xed\xa0\x80st"), "UTF-8"),
        (replaced(data, b"other", b"first"), "stats has 2 values"),
        (replaced(data, b"first\0", b"first,"), "stats has 2 values"),
        (replaced(data, b"other", b"ot\0er"), "stats has 2 values"),
        (changed(changed(data, "episode_id", 0), "env", 10), "episode_id is empty"),
    ]:
        with pytest.raises(RecordError, match=expected):
            record.decode_record(bad)


def test_metadata_that_cannot_be_written_is_refused_by_the_sender() -> None:
    trajectory = make_trajectory()
    for changes, expected in [
        ({"signature": "x" * (1 << 16)}, "shorten.*signature"),
        ({"episode_id": "ä" * (1 << 15)}, "episode"),
        ({"stats": {"x" * (1 << 16): 1.0}}, "stats"),
        ({"stats": {str(i): 1.0 for i in range(257)}}, "at most 256"),
        ({"stats": {"a\0b": 1.0}}, "stats"),
        ({"stats": {"\0": 1.0, "a": 2.0}}, "stats"),
        ({"stats": {"a": 1 << 2000}}, "cannot be encoded"),
        ({"stats": {"\udcff": 1.0}}, "cannot be encoded"),
        ({"episode_id": "\ud800"}, "cannot be encoded"),
    ]:
        with pytest.raises(RecordError, match=expected):
            record.encode_record(dataclasses.replace(trajectory, **changes))


def test_the_largest_metadata_comes_back_equal() -> None:
    trajectory = dataclasses.replace(
        make_trajectory(),
        **{"signature": "x" * 65535, "env": "y" * 65535, "stats": {f"{i:0255}": float(i) for i in range(256)}},
    )
    assert contents(record.decode_record(record.record_bytes(trajectory))) == contents(trajectory)


VALID = by_hand(dataclasses.replace(make_trajectory(num_tokens=13, episode_id="e"), stats={"a": 1.0, "b": 2.0}))
TEXT_END = len(VALID) - 8 * -(-(17 * 13 + 8 * 2) // 8)


@settings(deadline=None, max_examples=examples(80))
@given(st.sampled_from([(0, len(VALID)), (0, 88), (88, TEXT_END), (TEXT_END, len(VALID))]), st.data())
def test_changed_bytes_give_a_valid_trajectory_or_a_record_error(span: tuple[int, int], data: st.DataObject) -> None:
    broken = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(span[0], span[1] - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RecordError):
        decoded = record.decode_record(broken)
        # It was checked: what it is made of makes it again.
        again = record.decode_record(record.record_bytes(decoded))
        assert repr(contents(again)) == repr(contents(decoded))  # by repr: a value of nan may stand in stats


@settings(deadline=None, max_examples=examples(50))
@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_error(data: bytes) -> None:
    for broken in (data, VALID[:8] + data, VALID[:8] + data[: len(data) // 8 * 8]):
        with pytest.raises(RecordError):
            record.decode_record(broken)


def test_a_record_in_memory_that_can_be_written_is_viewed_and_not_copied() -> None:
    data = bytearray(VALID)
    tokens = record.decode_record(data).tokens
    data[TEXT_END] ^= 1
    assert tokens[0] == np.frombuffer(VALID, np.int32, 1, TEXT_END)[0] ^ 1
