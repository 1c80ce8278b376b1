"""Checksums by their definition; the compiled checks say what `Trajectory` says, and touch nothing else."""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.pipeline.shm import copy_kernels, record_kernels, text_kernels
from impala_llm.pipeline.shm.record import (
    MAGIC,
    MAX_STATS,
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    RecordError,
    decode_record,
    encode_record,
    facts_of,
    record_bytes,
)
from impala_llm.pipeline.shm.record_kernels import COPIED, INVALID, TORN
from impala_llm.pipeline.shm.record_layout import (
    FACTS,
    HEADER_WORDS,
)
from impala_llm.trajectory import Trajectory, TrajectoryError
from tests.examples import examples
from tests.pipeline.support import VOCAB_SIZE, make_trajectory

GUARD = 0xDEADBEEFDEADBEEF
WORDS = st.lists(st.integers(0, 2**64 - 1), max_size=70)


def defined_checksum(words: list[int], first: int = 0) -> int:
    keyed = [word ^ ((first + i) * 0x9E3779B97F4A7C15 % 2**64) for i, word in enumerate(words)]
    return sum(x + (x % 2**32) * (x >> 32) for x in keyed) % 2**64


def take(
    words: np.ndarray, spans: list[tuple[int, int, int]], room: int, vocab_size: int = VOCAB_SIZE
) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """`take_with`, the same for records that are streamed and for those that are not."""
    verdicts, target = take_with(words, spans, room, vocab_size, large=2**62)
    streamed, streamed_target = take_with(words, spans, room, vocab_size, large=0)
    assert [row[0] for row in streamed] == [row[0] for row in verdicts]
    assert [row for row in streamed if row[0] == COPIED] == [row for row in verdicts if row[0] == COPIED]
    assert (streamed_target == target).all()
    return verdicts, target


def take_with(
    words: np.ndarray, spans: list[tuple[int, int, int]], room: int, vocab_size: int, large: int
) -> tuple[list[tuple[int, int, int]], np.ndarray]:
    """`take_records` into a guarded target, records `room` words apart. Returns verdicts and the target."""
    target = np.full(1 + (room + 1) * len(spans), GUARD, np.uint64)
    starts = np.arange(len(spans), dtype=np.int64) * (room + 1) + 1
    guarded = np.full((len(spans) + 2, FACTS), 99, np.int64)
    before = words.copy()
    rules = (MAGIC, MAX_TOKENS, MAX_STATS, MAX_TEXT_BYTES, vocab_size, large)
    rows = np.array([(0, 0, *span) for span in spans], np.int64).reshape(-1, 5)
    record_kernels.take_records(words, rows, target, starts, *rules, guarded[1:-1])
    assert (words == before).all() and (guarded[0] == 99).all() and (guarded[-1] == 99).all()
    facts = guarded[1:-1].tolist()
    for row, start, (_, size, _) in zip(facts, starts.tolist(), spans, strict=True):
        if row[0] == COPIED:
            assert row[3:] == list(facts_of(memoryview(target[start : start + size]).cast("B")))[3:]
    return [tuple(row[:3]) for row in facts], target


def signed(checksum: int) -> int:
    return checksum - 2**64 if checksum >= 2**63 else checksum


def verdict(data: bytes, vocab_size: int = VOCAB_SIZE) -> tuple[int, int, int]:
    """Verdict on one record that is whole."""
    words = np.frombuffer(data, np.uint64)
    span = (0, len(words), signed(defined_checksum(words.tolist())))
    verdicts, target = take(words, [span], len(words), vocab_size)
    assert target[0] == GUARD and target[-1] == GUARD
    return verdicts[0]


# --- checksums


@settings(deadline=None)
@given(WORDS, st.integers(0, 2**40))
def test_the_checksum_is_its_definition(words: list[int], first: int) -> None:
    array = np.array(words, np.uint64)
    assert int(copy_kernels.checksum(array)) == defined_checksum(words)
    assert int(copy_kernels.checksum(array, first)) == defined_checksum(words, first)
    target = np.full(len(words) + 2, GUARD, np.uint64)
    assert int(copy_kernels.copy_checksum(target[1:-1], array, first)) == defined_checksum(words, first)
    assert target.tolist() == [GUARD, *words, GUARD]


@settings(deadline=None)
@given(WORDS, st.data())
def test_a_checksum_is_the_sum_of_those_of_its_pieces(words: list[int], data: st.DataObject) -> None:
    middle = data.draw(st.integers(0, len(words)))
    array = np.array(words, np.uint64)
    pieces = int(copy_kernels.checksum(array[:middle])) + int(copy_kernels.checksum(array[middle:], middle))
    assert pieces % 2**64 == defined_checksum(words)


@settings(deadline=None)
@given(WORDS.filter(bool), st.data())
def test_a_flipped_bit_or_two_swapped_words_change_the_checksum(words: list[int], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(words) - 1))
    flipped = list(words)
    flipped[index] ^= 1 << data.draw(st.integers(0, 63))
    assert int(copy_kernels.checksum(np.array(flipped, np.uint64))) != defined_checksum(words)
    other = data.draw(st.integers(0, len(words) - 1))
    if words[index] != words[other]:
        swapped = list(words)
        swapped[index], swapped[other] = words[other], words[index]
        assert int(copy_kernels.checksum(np.array(swapped, np.uint64))) != defined_checksum(words)


def test_a_record_is_written_end_to_end_and_nowhere_else() -> None:
    encoded = encode_record(make_trajectory(num_tokens=31))
    header = np.frombuffer(encoded.header, np.uint64)
    ring = np.full(encoded.num_words + 7, GUARD, np.uint64)
    ring[3 : 3 + len(header)] = header
    checksum = copy_kernels.lay_block(ring, 3, len(header), encoded.block)
    expected = [*header.tolist(), *encoded.block.tolist()]
    assert ring.tolist() == [GUARD] * 3 + expected + [GUARD] * 4
    assert checksum == signed(defined_checksum(expected))


# --- checks


def test_a_valid_record_is_copied_and_its_versions_told() -> None:
    trajectory = make_trajectory(num_tokens=41, version=5)
    versions = trajectory.versions.copy()
    versions[trajectory.turns[1, 0]] = 3
    versions[trajectory.turns[1, 0] + 1] = 9
    trajectory.versions[:] = versions
    words = np.frombuffer(record_bytes(trajectory), np.uint64)
    span = (0, len(words), signed(defined_checksum(words.tolist())))
    verdicts, target = take(words, [span], len(words))
    assert verdicts == [(COPIED, 3, 9)]
    assert target.tolist() == [GUARD, *words.tolist(), GUARD]


@pytest.mark.system
def test_records_are_judged_one_by_one_and_copied_to_their_rows() -> None:
    records = [np.frombuffer(record_bytes(make_trajectory(num_tokens=n, version=n)), np.uint64) for n in (9, 40, 23)]
    source = np.concatenate([records[0], np.zeros(3, np.uint64), records[1], records[2]])
    starts = [0, len(records[0]) + 3, len(records[0]) + 3 + len(records[1])]
    sums = [signed(defined_checksum(words.tolist())) for words in records]
    spans = [(start, len(words), total) for start, words, total in zip(starts, records, sums, strict=True)]
    spans[1] = (*spans[1][:2], spans[1][2] ^ 1)
    room = max(map(len, records))
    verdicts, target = take(source, spans, room)
    assert verdicts[0] == (COPIED, 9, 9) and verdicts[1][0] == TORN and verdicts[2] == (COPIED, 23, 23)
    for n in (0, 2):
        begin = 1 + n * (room + 1)
        assert target[begin : begin + len(records[n])].tolist() == records[n].tolist()
    assert (target[:: room + 1] == GUARD).all()


def test_what_lies_outside_of_the_source_is_torn_and_never_read() -> None:
    words = np.frombuffer(record_bytes(make_trajectory(num_tokens=40)), np.uint64)
    size = len(words)
    whole = np.concatenate([np.full(5, GUARD, np.uint64), words, words, np.full(5, GUARD, np.uint64)])
    total = signed(defined_checksum(words.tolist()))
    for begin, end, start in [
        (6, 6 + size, -1),  # a whole record in the surroundings, but not in the source
        (5, 4 + size, 0),
        (5, 5 + size + size - 1, size),
        (5 + size, 5 + 2 * size, -size),
    ]:
        verdicts, target = take(whole[begin:end], [(start, size, total)], size)
        assert verdicts[0][0] == TORN and (target == GUARD).all()
    source = whole[5 : 5 + size]
    for start, length in [
        *((0, n) for n in (0, -1, HEADER_WORDS - 1, size + 1, 2**31, 2**62, 2**63 - 1, -(2**63))),
        *((n, size) for n in (1, -1, 2**62, 2**63 - 1, 2**63 - size, -(2**63), 2**61)),
        *((n, m) for n in (2**62, 2**63 - 1, -(2**63)) for m in (2**62, 2**63 - 1, -(2**63))),
    ]:
        for checksum in (total, 0):
            verdicts, target = take(source, [(start, length, checksum)], size)
            assert verdicts[0][0] == TORN and (target == GUARD).all()
    for checksum in (total + 1, 0, -1):
        assert take(source, [(0, size, checksum)], size)[0][0][0] == TORN
    assert take(source, [(0, size, total)], size)[0][0][0] == COPIED


@settings(deadline=None, max_examples=examples(80))
@given(st.data())
def test_spans_and_checksums_of_any_kind_touch_nothing_outside(data: st.DataObject) -> None:
    words = np.frombuffer(record_bytes(make_trajectory(num_tokens=12)), np.uint64)
    number = st.integers(-3, len(words) + 3) | st.integers(-(2**63), 2**63 - 1)
    spans = data.draw(st.lists(st.tuples(number, number), min_size=1, max_size=5))
    # Where they lie inside, the checksum agrees: then the rest of the checks must cope.
    summed = [
        (start, size, signed(defined_checksum(words[start : start + size].tolist())))
        if 0 <= start <= start + size <= len(words)
        else (start, size, 0)
        for start, size in spans
    ]
    verdicts, target = take(words, summed, len(words))
    for (start, size, _), (outcome, _, _) in zip(summed, verdicts, strict=True):
        if (start, size) == (0, len(words)):
            assert outcome == COPIED
        else:
            assert outcome in ((TORN, INVALID) if size >= HEADER_WORDS and 0 <= start <= len(words) - size else (TORN,))
    assert (target[:: len(words) + 1] == GUARD).all()


# --- the same rules as Trajectory's


def slow_rules(data: bytes, vocab_size: int = VOCAB_SIZE) -> tuple[int, int, int]:
    """Verdict of the rules written in Python."""
    try:
        trajectory = decode_record(data)
        trajectory.validate_vocabulary(vocab_size)
    except (RecordError, TrajectoryError):
        return INVALID, 0, 0
    return COPIED, trajectory.oldest_version, trajectory.newest_version


def assert_same_verdict(data: bytes, vocab_size: int = VOCAB_SIZE) -> None:
    expected = slow_rules(data, vocab_size)
    found = verdict(data, vocab_size)
    assert found[0] == expected[0]
    assert found[0] == INVALID or found == expected


NUM_TOKENS = 13
STATS = {"a": 1.0, "bé": 2.0, "c": 3.0}


def sample(num_tokens: int = NUM_TOKENS) -> Trajectory:
    """Letters of all lengths in UTF-8, and stats."""
    trajectory = make_trajectory(num_tokens=num_tokens, seed=num_tokens, version=2, episode_id="ep€")
    return dataclasses.replace(trajectory, signature="ä😀z", stats=STATS)


VALID = record_bytes(sample())
BLOCK = len(VALID) - 8 * -(-(17 * NUM_TOKENS + 8 * 2) // 8)
INT64S = [
    *(0, 1, 2, 3, 4, 5, NUM_TOKENS, NUM_TOKENS + 1, 255, 2**15 - 1, 2**15, MAX_TOKENS, MAX_TOKENS + 1),
    *(2**31, 2**32, 2**61, 2**62),
]
BITS64 = [n % 2**64 for n in (*INT64S, -1, -2, -(2**63), 2**63 - 1)]
FLOAT64S = [struct.unpack("<Q", struct.pack("<d", x))[0] for x in (0.0, -0.0, 1.0, 1 + 2**-52, -1e-300, np.inf, np.nan)]
ONE_HUNDREDTH_OF_A_PERCENT = int(np.float32(1e-4).view(np.uint32))
BITS32 = [
    *(n % 2**32 for n in (0, 1, 2, 3, -1, -2, 7, NUM_TOKENS, NUM_TOKENS + 1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**30)),
    *(0x7FFFFFFF, 0x80000000, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F7FFFFF, 0xBF800000),
    *(ONE_HUNDREDTH_OF_A_PERCENT + n for n in (-1, 0, 1)),
]


def with_bits(data: bytes, offset: int, value: int, size: int) -> bytes:
    return data[:offset] + value.to_bytes(size, "little") + data[offset + size :]


def test_every_field_of_the_header_is_judged_alike() -> None:
    assert_same_verdict(VALID)
    for word in range(HEADER_WORDS):
        for value in BITS64 + FLOAT64S:
            assert_same_verdict(with_bits(VALID, 8 * word, value, 8))
    for half in range(24, 40, 2):  # the lengths of texts
        for value in (*range(24), 255, 256, 257, 2**16 - 1):
            assert_same_verdict(with_bits(VALID, half, value, 2))


def test_every_byte_of_stats_and_texts_is_judged_alike() -> None:
    for offset in range(8 * HEADER_WORDS, BLOCK):
        for value in (0, 1, 0x41, 0x61, 0x7F, 0x80, 0xA4, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xFF):
            assert_same_verdict(with_bits(VALID, offset, value, 1))


def with_texts(texts: list[bytes], names: bytes, num_stats: int) -> bytes:
    """A record with these texts, valid or not; all else is."""
    header = VALID[:24] + struct.pack("<HHHHII", *map(len, texts), num_stats, len(names)) + VALID[40:88]
    text = b"".join(texts) + names
    return header + bytes(8 * num_stats) + text + bytes(-len(text) % 8) + VALID[BLOCK:]


TEXTS = st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=4)
NAMES = st.lists(st.sampled_from([b"", b"a", b"ab", b"b", b"\xc3\xa9", b"\xc3"]), max_size=4).map(b"\0".join)


@settings(deadline=None, max_examples=examples(120))
@given(st.lists(TEXTS, min_size=4, max_size=4), NAMES | st.binary(max_size=6), st.integers(0, 5))
def test_texts_of_any_kind_are_judged_alike(texts: list[bytes], names: bytes, num_stats: int) -> None:
    assert_same_verdict(with_texts(texts, names, num_stats))


@pytest.mark.parametrize("num_stats", [MAX_STATS - 1, MAX_STATS, MAX_STATS + 1])
@pytest.mark.parametrize("num_bytes", [MAX_TEXT_BYTES - 1, MAX_TEXT_BYTES, MAX_TEXT_BYTES + 1])
def test_the_limits_of_stats_are_judged_alike(num_stats: int, num_bytes: int) -> None:
    names = b"\0".join(b"%d" % i for i in range(num_stats))
    for text in (names, names.ljust(num_bytes, b"x"), names.ljust(num_bytes, b"\0")):
        assert_same_verdict(with_texts([b"e", b"", b"", b""], text, num_stats))


# --- UTF-8


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_utf8_is_what_python_takes_for_it() -> None:
    edges = [0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED]
    edges += [0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xF8, 0xFF]
    texts = [b"", *(bytes([a]) for a in range(256)), *(bytes([a, b]) for a in range(256) for b in edges)]
    texts += [bytes([a, b, c]) for a in edges for b in edges for c in (0x41, 0x80, 0xBF, 0xC2)]
    texts += [bytes([a, b, 0x80, c]) for a in edges for b in edges for c in (0x41, 0x80, 0xBF, 0xC2)]
    for text in texts:
        assert text_kernels.is_utf8(np.frombuffer(text, np.uint8)) == is_utf8(text), text


@settings(deadline=None, max_examples=examples(80))
@given(st.one_of(st.binary(max_size=12), st.text(max_size=6).map(lambda text: text.encode("utf-8", "surrogatepass"))))
def test_random_bytes_are_utf8_where_python_takes_them_for_it(text: bytes) -> None:
    assert text_kernels.is_utf8(np.frombuffer(text, np.uint8)) == is_utf8(text)


# --- arrays


def test_every_element_of_every_array_is_judged_alike() -> None:
    assert verdict(VALID) == (COPIED, 2, 2)
    for offset in range(BLOCK, BLOCK + 16 * NUM_TOKENS + 16, 4):
        for value in BITS32:
            assert_same_verdict(with_bits(VALID, offset, value, 4))
    for offset in range(BLOCK + 16 * NUM_TOKENS + 16, len(VALID)):
        for value in (0, 1, 2, 3, 127, 128, 254, 255):
            assert_same_verdict(with_bits(VALID, offset, value, 1))


@pytest.mark.parametrize("vocab_size", [1, 500, VOCAB_SIZE, 2**31 - 1])
def test_the_vocabulary_is_judged_alike(vocab_size: int) -> None:
    for token in (0, vocab_size - 1, min(vocab_size, 2**31 - 1), 2**31 - 1, 2**31, 2**32 - 1):
        tokens = np.full(NUM_TOKENS, token, np.uint32)
        data = VALID[:BLOCK] + tokens.tobytes() + VALID[BLOCK + 4 * NUM_TOKENS :]
        assert_same_verdict(data, vocab_size)
        assert (verdict(data, vocab_size)[0] == COPIED) == (token < vocab_size)


@settings(deadline=None, max_examples=examples(120))
@given(st.data())
def test_random_changes_are_judged_alike(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(6, 40))
    record = bytearray(record_bytes(sample(num_tokens)))
    block = len(record) - 8 * -(-(17 * num_tokens + 16) // 8)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["header", "element", "bit"]))
        if kind == "header":
            struct.pack_into("<Q", record, 8 * data.draw(st.integers(0, 10)), data.draw(st.sampled_from(BITS64)))
        elif kind == "element":
            index = data.draw(st.integers(0, 4 * num_tokens + 3))
            struct.pack_into("<I", record, block + 4 * index, data.draw(st.sampled_from(BITS32)))
        else:
            record[data.draw(st.integers(88, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_same_verdict(bytes(record))


@settings(deadline=None, max_examples=examples(80))
@given(st.data())
def test_turns_and_masks_of_any_kind_are_judged_alike(data: st.DataObject) -> None:
    """Small arrays, all conditions on actions kept but for the one that turns and mask must agree."""
    num_tokens = data.draw(st.integers(1, 8))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)))
    turn = st.tuples(st.integers(-1, num_tokens + 1), st.integers(-1, num_tokens + 1))
    edges = np.diff(np.concatenate([[0], mask, [0]]).astype(int))
    exact = list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))
    turns = np.array(data.draw(st.lists(turn, min_size=1, max_size=4) | st.just(exact or [(0, 1)])), np.int32)
    header = struct.pack("<Q2q4H2I4qdQ", MAGIC, num_tokens, len(turns), 1, 3, 1, 0, 0, 0, 0, 0, 0, 0, 0.5, 0)
    arrays = (
        np.zeros(num_tokens, np.int32),
        np.zeros(num_tokens, np.float32),
        np.where(mask, 3, -1).astype(np.int32),
        np.zeros(num_tokens, np.float32),
        turns,
        mask,
    )
    block = b"".join(array.tobytes() for array in arrays)
    assert_same_verdict(header + b"etoya\0\0\0" + block + bytes(-len(block) % 8))
