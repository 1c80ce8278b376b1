"""Record: a trajectory as bytes, the same in an actor's arena, in a replay arena and on the wire to another host.

    80 bytes         header: magic and format, T, K, bytes of text, ticket_id, group_id, task_id, unroll_index, score,
                     flags (1: bootstrap, 2: success); little endian, 8 bytes each
    text             msgpack: [episode_id, env, actor_id, signature, stats], zeros up to a multiple of 8 bytes
    block            the arrays, as `Trajectory.block` holds them

Invariant: `decode_record` returns a valid trajectory or raises RecordError, whatever the bytes. `kernels.take_records`
applies the same rules at memory speed; what it turns away goes through `decode_record` for the reason.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from impala_llm.trajectory import Trajectory, TrajectoryError, block_views, block_words

MAX_TOKENS = 1 << 24
MAX_TEXT_BYTES = 64 << 10
MAGIC = 0x0001_6C6C_6D69_0001  # "imll", then the format's number
HEADER_WORDS = 10
MAX_HEADER_WORDS = HEADER_WORDS + MAX_TEXT_BYTES // 8
_HEADER = struct.Struct("<QqqqqqqqdQ")
_BOOTSTRAP, _SUCCESS = 1, 2
_NUMBERS = (int, float)

# Places in a header, in words of 8 bytes.
NUM_TOKENS, NUM_TURNS, TEXT_BYTES, TICKET_ID, GROUP_ID, TASK_ID, UNROLL_INDEX, SCORE, FLAGS = range(1, HEADER_WORDS)


class RecordError(ValueError):
    """Bytes that are no valid record, or a trajectory that cannot become one."""


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A record in two parts: header and text as bytes, a multiple of 8; block: uint64[n]. num_words: of 8 bytes, of
    both together."""

    header: bytes
    block: np.ndarray
    num_words: int


def encode_record(trajectory: Trajectory) -> EncodedTrajectory:
    """The record of a trajectory, without copying its arrays. RecordError where its metadata is too large."""
    t = trajectory
    try:
        text = msgpack.packb((t.episode_id, t.env, t.actor_id, t.signature, t.stats))
        header = _HEADER.pack(
            *(MAGIC, len(t.tokens), len(t.turns), len(text), t.ticket_id, t.group_id, t.task_id, t.unroll_index),
            *(t.score, t.bootstrap * _BOOTSTRAP + t.success * _SUCCESS),
        )
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise RecordError(f"the metadata of episode {t.episode_id!r} cannot be encoded: {error}") from error
    if len(text) > MAX_TEXT_BYTES:
        raise RecordError(
            f"the metadata of episode {t.episode_id!r} has {len(text)} bytes: at most {MAX_TEXT_BYTES} are allowed, "
            "shorten signature or stats"
        )
    if len(t.tokens) > MAX_TOKENS:
        raise RecordError(f"episode {t.episode_id!r} has {len(t.tokens)} tokens: at most {MAX_TOKENS} are allowed")
    header += text + bytes(-len(text) % 8)
    return EncodedTrajectory(header, t.block, len(header) // 8 + len(t.block))


def record_bytes(trajectory: Trajectory) -> bytes:
    """The whole record in one piece."""
    encoded = encode_record(trajectory)
    return encoded.header + encoded.block.tobytes()


Header = tuple[Any, ...]
"""Its values, at the places named above."""
Text = tuple[str, str, str, str, dict[str, float]]
"""episode_id, env, actor_id, signature, stats."""


def decode_text(text: bytes | memoryview) -> Text:
    """RecordError where it is malformed; the rules for values are those of `Trajectory`."""
    try:
        values = msgpack.unpackb(text)
        episode_id, env, actor_id, signature, stats = values
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise RecordError(f"the text of a record is not a msgpack array of 5: {error}") from error
    if not (type(episode_id) is type(env) is type(actor_id) is type(signature) is str and type(stats) is dict):
        raise RecordError(f"a text of a record is {_shown(values)}: four texts and a map are expected")
    if not episode_id:
        raise RecordError("episode_id is empty: it names the episode for ever")
    for key, value in stats.items():
        if type(key) is not str or type(value) not in _NUMBERS:
            raise RecordError(f"stats[{_shown(key)}] is {_shown(value)}: names map to numbers")
    return episode_id, env, actor_id, signature, stats


def metadata(header: Header, text: Text) -> dict[str, Any]:
    """METADATA_FIELDS by name."""
    return {
        "bootstrap": bool(header[FLAGS] & _BOOTSTRAP),
        "episode_id": text[0],
        "unroll_index": header[UNROLL_INDEX],
        "group_id": header[GROUP_ID],
        "task_id": header[TASK_ID],
        "env": text[1],
        "actor_id": text[2],
        "ticket_id": header[TICKET_ID],
        "signature": text[3],
        "score": header[SCORE],
        "success": bool(header[FLAGS] & _SUCCESS),
        "stats": text[4],
    }


def block_of(words: np.ndarray, header: Header) -> np.ndarray:
    """The block in a record, as a view. words: uint64[n], the whole record."""
    return words[HEADER_WORDS + -(-header[TEXT_BYTES] // 8) :]


def unpack_metadata(data: memoryview, start: int) -> tuple[Header, Text]:
    """Header, unchecked, and text of the record that begins at byte `start`. RecordError for a malformed text."""
    header = _HEADER.unpack_from(data, start)
    start += _HEADER.size
    return header, decode_text(data[start : start + header[TEXT_BYTES]])


def decode_record(record: bytes | bytearray | memoryview) -> Trajectory:
    """The trajectory in a record, with every rule checked. RecordError says what is wrong."""
    view = memoryview(record).cast("B")
    if view.nbytes < _HEADER.size or view.nbytes % 8:
        raise RecordError(f"a record of {view.nbytes} bytes: a multiple of 8, {_HEADER.size} at least, is expected")
    header = _HEADER.unpack_from(view)
    if header[0] != MAGIC:
        raise RecordError(
            f"a record begins with {header[0]:#x}, this program writes {MAGIC:#x}: run the same release on both sides"
        )
    num_tokens, num_turns, text_bytes = header[NUM_TOKENS], header[NUM_TURNS], header[TEXT_BYTES]
    for name, value, low, high in (
        ("the number of tokens", num_tokens, 1, MAX_TOKENS),
        ("the number of turns", num_turns, 1, MAX_TOKENS),
        ("the length of the text", text_bytes, 1, MAX_TEXT_BYTES),
        ("ticket_id", header[TICKET_ID], 0, 2**63 - 1),
    ):
        if not low <= value <= high:
            raise RecordError(f"{name} is {value}: it must lie in [{low}, {high}]")
    block_start = _HEADER.size + -(-text_bytes // 8) * 8
    if view.nbytes != block_start + 8 * block_words(num_tokens, num_turns):
        raise RecordError(f"a record has {view.nbytes} bytes: its header says something else")
    if header[FLAGS] > _BOOTSTRAP | _SUCCESS:
        raise RecordError(f"flags is {header[FLAGS]}: at most {_BOOTSTRAP | _SUCCESS} is expected")
    text = decode_text(view[_HEADER.size : _HEADER.size + text_bytes])
    arrays: dict[str, Any] = block_views(np.frombuffer(view[block_start:], np.uint64), num_tokens, num_turns)
    # numpy takes any byte for a bool; 2 would be True and yet unequal to it.
    if arrays["action_mask"].view(np.uint8).max() > 1:
        raise RecordError("action_mask holds a byte that is neither 0 nor 1")
    try:
        return Trajectory(**arrays, **metadata(header, text))
    except TrajectoryError as error:
        raise RecordError(str(error)) from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
