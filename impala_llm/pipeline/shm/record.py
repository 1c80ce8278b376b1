"""Record: a trajectory as bytes, the same in an actor's arena, in a trajectory store and on the wire to another host.

    88 bytes      header, 8 bytes a word, little endian: magic and format; T; K; bytes of the first four texts (16 bits
                  each); number of stats (32 bits) and bytes of their names (32 bits); ticket_id; group_id; task_id;
                  unroll_index; score; flags (1: bootstrap, 2: success, 4: continues, and then bootstrap as well)
                  A number or flag that is added to `Trajectory` gets its position by itself.
    float64 each  values of the stats
    texts         UTF-8, end to end: episode_id, env, actor_id, signature, names of the stats with a zero byte between
                  two; then zeros up to a multiple of 8 bytes
    block         the arrays, as `Trajectory.block` holds them

Invariant: `decode_record` returns a valid trajectory or raises RecordError, whatever the bytes.
`record_kernels.take_records` applies the same rules at memory speed; a record that it rejects goes through
`decode_record` for the reason.
"""

from __future__ import annotations

import functools
import operator
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from impala_llm.pipeline.shm.record_layout import (
    ALL_FLAGS,
    FACT_INDEX,
    FLAG_NAMES,
    FLAGS,
    FLOATS,
    HEADER_WORDS,
    INTEGERS,
    NUM_TOKENS,
    NUM_TURNS,
    STATS,
    TEXT_NAMES,
    TEXTS,
    TICKET_ID,
)
from impala_llm.trajectory import (
    ARRAY_FIELDS,
    METADATA_FIELDS,
    TURN_FIELDS,
    Trajectory,
    TrajectoryError,
    block_views,
    block_words,
)

MAX_TOKENS = 1 << 24
MAX_TEXT_BYTES = (1 << 16) - 1
"""Maximum size of each text, and of all names of stats together."""
MAX_STATS = 256
_FORMAT = 3
"""Raised where the layout, or a rule of `Trajectory`, changes in another way than by a field."""
_FIELDS: list[tuple[object, ...]] = [
    *((name, dtype.base.str) for name, dtype in ARRAY_FIELDS.items()),
    *((n, k.__name__) for n, k in METADATA_FIELDS.items()),
    # Arrays with an item for each turn, or with several numbers in an item, are described further. `turns` is not, so
    # that checkpoints written before there was such a description stay readable.
    *(
        (n, d.shape, n in TURN_FIELDS)
        for n, d in ARRAY_FIELDS.items()
        if n != "turns" and (d.shape or n in TURN_FIELDS)
    ),
]
MAGIC = _FORMAT << 48 | 0x6C6C_6D69 << 16 | zlib.crc32(repr(_FIELDS).encode()) & 0xFFFF  # in the middle "imll"
"""First word of a record: of releases whose trajectories have other fields it differs."""
_HEADER = struct.Struct(f"<QqqHHHHII{len(INTEGERS)}q{len(FLOATS)}dQ")
_WORDS = struct.Struct(f"<{HEADER_WORDS}q")
_DOUBLES, _BITS = struct.Struct(f"<{len(FLOATS)}d"), struct.Struct(f"<{len(FLOATS)}q")
_FIRST, _FIRST_FLOAT = FACT_INDEX[INTEGERS[0]], FACT_INDEX[FLOATS[0]]
_METADATA_NAMES = (*TEXT_NAMES, *INTEGERS, *FLOATS, *FLAG_NAMES, "stats")
_PADDING = [bytes(-length % 8) for length in range(8)]
_FLAG_SETS = [tuple(bool(word >> bit & 1) for bit in range(len(FLAG_NAMES))) for word in range(ALL_FLAGS + 1)]
"""Values of the flags, by their word."""
_FLAG_WORDS = {flags: word for word, flags in enumerate(_FLAG_SETS)}
_numbers, _flags = operator.attrgetter(*INTEGERS, *FLOATS), operator.attrgetter(*FLAG_NAMES)

Facts = Sequence[int]
"""A row of FACTS integers."""


class RecordError(ValueError):
    """Bytes that are no valid record, or a trajectory that cannot be encoded."""


class EncodedTrajectory(NamedTuple):
    """A record in two parts.

    Attributes:
        header: bytes before the block, a multiple of 8.
        block: uint64[n].
        num_words: words of 8 bytes of both parts.
    """

    header: bytes
    block: np.ndarray
    num_words: int


def encode_record(trajectory: Trajectory) -> EncodedTrajectory:
    """Encode a trajectory without copying its arrays.

    Returns:
        The record in two parts, the arrays in the second one.

    Raises:
        RecordError: its metadata is too large.
    """
    t = trajectory
    num_tokens = len(t.tokens)
    stats = t.stats
    episode, env, actor, signature = parts = t.episode_id, t.env, t.actor_id, t.signature
    try:
        names, num_name_bytes, header = _stats_layout(tuple(stats))
        text = f"{episode}{env}{actor}{signature}{names}"
        data = text.encode()
        lengths = len(episode), len(env), len(actor), len(signature)
        if len(data) != len(text):  # letters of more than one byte
            lengths = tuple(len(part.encode()) for part in parts)  # type: ignore[assignment]  # four as well
        head = header.pack(
            MAGIC,
            num_tokens,
            len(t.turns),
            *lengths,
            len(stats),
            num_name_bytes,
            *_numbers(t),
            _FLAG_WORDS[_flags(t)],
            *stats.values(),
        )
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        if isinstance(error, _StatsError):
            raise RecordError(f"stats of episode {t.episode_id!r:.80} has {error}") from error
        if max(map(len, parts)) > MAX_TEXT_BYTES:
            raise RecordError(
                f"a text of episode {t.episode_id!r:.80} is too long: at most {MAX_TEXT_BYTES} bytes are allowed, "
                "shorten episode_id, env, actor_id or signature"
            ) from error
        raise RecordError(f"the metadata of episode {t.episode_id!r:.80} cannot be encoded: {error}") from error
    if num_tokens > MAX_TOKENS:
        raise RecordError(f"episode {t.episode_id!r} has {num_tokens} tokens: at most {MAX_TOKENS} are allowed")
    head += data + _PADDING[len(data) % 8]
    block = t.block
    # Three times as fast as to call the class.
    return tuple.__new__(EncodedTrajectory, (head, block, len(head) // 8 + len(block)))


class _StatsError(ValueError):
    """Stats with too many entries, too long names or a zero byte in a name."""


@functools.lru_cache(maxsize=1024)
def _stats_layout(names: tuple[str, ...]) -> tuple[str, int, struct.Struct]:
    """Prepare to write stats with these names.

    Returns:
        (names joined by zero bytes, number of their bytes, format of the header with the values).
    """
    joined = "\0".join(names)
    num_bytes = len(joined.encode())
    if len(names) > MAX_STATS or num_bytes > MAX_TEXT_BYTES or joined.count("\0") > max(0, len(names) - 1):
        raise _StatsError(
            f"{len(names)} names of {num_bytes} bytes in all: at most {MAX_STATS} of {MAX_TEXT_BYTES} are allowed, "
            "without zero bytes"
        )
    return joined, num_bytes, struct.Struct(f"{_HEADER.format}{len(names)}d")


def record_bytes(trajectory: Trajectory) -> bytes:
    """Encode a trajectory as one piece of bytes. Raises RecordError as `encode_record`."""
    encoded = encode_record(trajectory)
    return encoded.header + encoded.block.tobytes()


def facts_of(record: memoryview) -> Facts:
    """Read the header of a record without checking its values.

    Raises:
        RecordError: the record is shorter than a header, or begins with another magic number.
    """
    if record.nbytes < _WORDS.size or record.nbytes % 8:
        raise RecordError(f"a record of {record.nbytes} bytes: a multiple of 8, {_WORDS.size} at least, is expected")
    magic, *words = _WORDS.unpack_from(record)
    if magic != MAGIC:
        raise RecordError(
            f"a record begins with {magic:#x}, this program writes {MAGIC:#x}: run the same release on both sides"
        )
    begin = 8 * (HEADER_WORDS + (words[STATS - NUM_TOKENS] & 0xFFFFFFFF))
    return [0, 0, 0, *words, begin, begin + (words[TEXTS - NUM_TOKENS] & 0xFFFF)]


def metadata_of(record: memoryview, facts: Facts) -> dict[str, Any]:
    """Read METADATA_FIELDS of a record by name.

    Args:
        record: its bytes.
        facts: of its header, see `facts_of`.

    Raises:
        RecordError: a text is no UTF-8, or the names of stats are not as many as their values, or not all different.
    """
    num_stats = facts[STATS] & 0xFFFFFFFF
    start = 8 * HEADER_WORDS
    values = struct.unpack_from(f"<{num_stats}d", record, start)
    start += 8 * num_stats
    texts = []
    for length in _text_lengths(facts):
        try:
            texts.append(str(record[start : start + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise RecordError(f"a text of a record is no UTF-8: {error}") from error
        start += length
    names = texts[4].split("\0") if num_stats else []
    if len(names) != num_stats or len(set(names)) != num_stats or (texts[4] and not num_stats):
        raise RecordError(f"stats has {num_stats} values and the names {names!r:.80}: one each, all different")
    integers, floats = facts[_FIRST:_FIRST_FLOAT], facts[_FIRST_FLOAT:FLAGS]
    flags = _FLAG_SETS[facts[FLAGS] & ALL_FLAGS]
    del texts[len(TEXT_NAMES) :]
    return dict(
        zip(
            _METADATA_NAMES,
            (*texts, *integers, *_DOUBLES.unpack(_BITS.pack(*floats)), *flags, dict(zip(names, values, strict=True))),
            strict=True,
        )
    )


def block_start(facts: Facts) -> int:
    """Index of the first word of the block in a record."""
    num_text = sum(_text_lengths(facts))
    return HEADER_WORDS + (facts[STATS] & 0xFFFFFFFF) + -(-num_text // 8)


def decode_record(record: bytes | bytearray | memoryview) -> Trajectory:
    """Decode a record and check every rule.

    Raises:
        RecordError: a rule is broken; the message says which.
    """
    view = memoryview(record).cast("B")
    facts = facts_of(view)
    for name, index, low, high in (
        ("the number of tokens", NUM_TOKENS, 1, MAX_TOKENS),
        ("the number of turns", NUM_TURNS, 1, MAX_TOKENS),
        ("ticket_id", TICKET_ID, 0, 2**63 - 1),
        ("flags", FLAGS, 0, ALL_FLAGS),
    ):
        if not low <= facts[index] <= high:
            raise RecordError(f"{name} is {facts[index]}: it must lie in [{low}, {high}]")
    if facts[STATS] & 0xFFFFFFFF > MAX_STATS or not 0 <= facts[STATS] >> 32 <= MAX_TEXT_BYTES:
        raise RecordError(f"stats is said to have more than {MAX_STATS} values or {MAX_TEXT_BYTES} bytes of names")
    num_tokens, num_turns = facts[NUM_TOKENS], facts[NUM_TURNS]
    start = block_start(facts)
    if view.nbytes != 8 * (start + block_words(num_tokens, num_turns)):
        raise RecordError(f"a record has {view.nbytes} bytes: its header says something else")
    metadata = metadata_of(view, facts)
    arrays: dict[str, Any] = block_views(np.frombuffer(view[8 * start :], np.uint64), num_tokens, num_turns)
    for name, array in arrays.items():
        # numpy takes any byte for a bool; 2 would be True and yet unequal to it.
        if array.dtype == np.bool_ and array.view(np.uint8).max() > 1:
            raise RecordError(f"{name} holds a byte that is neither 0 nor 1")
    try:
        return Trajectory(**arrays, **metadata)
    except TrajectoryError as error:
        raise RecordError(str(error)) from error


def _text_lengths(facts: Facts) -> tuple[int, ...]:
    """Lengths of the five texts in bytes."""
    packed = facts[TEXTS]
    return (*(packed >> shift & 0xFFFF for shift in (0, 16, 32, 48)), facts[STATS] >> 32 & 0xFFFFFFFF)
