"""Compiled loops over bytes: copying with a checksum, and the checks of a trajectory's arrays.

Everything here releases the GIL, so that the learner's thread computes meanwhile, and touches only the arrays it is
given. Invariant: no input makes a loop read or write outside of its arrays; what lies in shared memory is not trusted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from impala_llm.compiled import compiled

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbouring words get unlike keys
_LOW = np.uint64(0xFFFFFFFF)
_MAX_LOGPROB = np.float32(1e-4).view(np.int32)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_NONE = np.uint32(0xFFFFFFFF)
_BLOCK = 64
"""Words that are summed and then stored: a multiple of a cache line's 8, little enough for the innermost cache."""
_LARGE = 4096
"""Words of a block that is streamed past the caches: the other process's core reads it from memory anyway, and copies
there meanwhile, at half the speed where both fight for the memory's bandwidth."""


_compiled = compiled()


@_compiled
def _mixed(word: int, key: int) -> int:
    """x + low(x)·high(x) of x = word XOR key, modulo 2^64: low and high are its halves. A flipped bit k of the low half
    changes it by ±2^k·(1 + high), of the high half by ±2^k·(2^32 + low): never by a multiple of 2^64."""
    word = word ^ key
    return word + (word & _LOW) * (word >> np.uint64(32))


@_compiled
def checksum(words: np.ndarray, first: int = 0) -> int:
    """Sum over i of mixed(words[i], (first + i)·k), modulo 2^64. words: uint64[n]. first: as for `copy_checksum`.

    Any flipped bit changes it; other accidents, words that moved among them, almost surely. Not against adversaries.
    At memory speed, where a CRC is ten times slower.
    """
    total = np.uint64(0)
    key = np.uint64(first) * _STEP
    for i in range(words.size):
        total += _mixed(words[i], key + np.uint64(i) * _STEP)
    return total


@_compiled
def copy_checksum(target: np.ndarray, source: np.ndarray, first: int = 0) -> int:
    """Copy uint64[n] to uint64[n] in one pass. Returns the checksum of what was copied.

    first: place of source[0] in a larger whole, whose checksum is the sum of those of its pieces, modulo 2^64.
    """
    total = np.uint64(0)
    key = np.uint64(first) * _STEP
    for i in range(source.size):
        word = source[i]
        target[i] = word
        total += _mixed(word, key + np.uint64(i) * _STEP)
    return total


@intrinsic
def _stream_line(typing: Any, target: Any, place: Any, source: Any, index: Any) -> Any:
    """target[place : place + 8] = source[index : index + 8], uint64, by a store that leaves the caches alone: the old
    content is not fetched first. The target's place lies at a multiple of 64 bytes in memory."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        to = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        of = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        words = builder.load(builder.bitcast(builder.gep(of, [arguments[3]]), line), align=8)
        store = builder.store(words, builder.bitcast(builder.gep(to, [arguments[1]]), line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, place, source, index), generate


@intrinsic
def _fence(typing: Any) -> Any:
    """Streamed stores are seen by others before whatever is stored after this."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_compiled
def _stream_checksum(target: np.ndarray, source: np.ndarray, first: int) -> int:
    """`copy_checksum` past the caches. Others may see the words only after a `_fence`."""
    total = np.uint64(0)
    # numba has no other way to an address than this; a target that begins within a word has no whole lines.
    lead = (-(target.ctypes.data >> 3)) & 7 if target.ctypes.data & 7 == 0 else source.size
    lead = min(lead, source.size)
    end = lead + (source.size - lead) // 8 * 8
    total += copy_checksum(target[:lead], source[:lead], first)
    for begin in range(lead, end, _BLOCK):
        block = source[begin : min(begin + _BLOCK, end)]
        # Two loops over what is in the innermost cache after the first: together they would not become vector code.
        total += checksum(block, first + begin)
        for i in range(0, block.size, 8):
            _stream_line(target, begin + i, block, i)
    return total + copy_checksum(target[end : source.size], source[end:], first + end)


@_compiled
def check_arrays(
    tokens: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
    rewards: np.ndarray,
    turns: np.ndarray,
    mask: np.ndarray,
    vocab_size: int,
) -> tuple[bool, int, int]:
    """Whether a trajectory's arrays are valid, by the rules of `Trajectory`, and its oldest and newest version.

    tokens: uint32[T]; logprobs, rewards: the bits of float32[T] as int32; versions: int32[T]; turns: int32[2·K];
    mask: uint8[T]. T >= 1. All conditions are written on integers, without branches: so they become vector code.
    """
    bad = np.int32(0)
    num_actions = np.int32(0)
    largest = np.uint32(0)
    newest = np.int32(-1)
    oldest = _NONE
    for i in range(tokens.size):
        action = np.int32(mask[i])
        other = action - np.int32(1)  # all bits where no action is, none where one is
        version = versions[i]
        largest = max(largest, tokens[i])
        bad |= (action & np.int32(-2)) | ((version >> np.int32(31)) ^ other) | np.int32(version < np.int32(-1))
        size = logprobs[i] & _MAGNITUDE
        bad |= np.int32(size >= _INFINITY) | np.int32(logprobs[i] > _MAX_LOGPROB) | (size & other)
        size = rewards[i] & _MAGNITUDE
        bad |= np.int32(size >= _INFINITY) | (size & other)
        num_actions += action
        newest = max(newest, version)
        oldest = min(oldest, np.uint32(version))  # -1 becomes the largest number
    if bad != 0 or num_actions == 0 or mask[0] != 0 or largest >= vocab_size:
        return False, 0, 0
    num_covered = 0
    last_end = 0
    for k in range(0, turns.size, 2):
        start, end = turns[k], turns[k + 1]
        if start < last_end or end <= start or end > tokens.size:
            return False, 0, 0
        span = mask[start:end]
        inside = np.int32(0)
        for i in range(span.size):
            inside += np.int32(span[i])
        if inside != end - start:
            return False, 0, 0
        num_covered += inside
        last_end = end
    return num_covered == num_actions, np.int64(oldest), np.int64(newest)


@_compiled
def lay_block(ring: np.ndarray, start: int, num_header: int, block: np.ndarray) -> int:
    """Complete the record whose header, of so many words, lies at ring[start:]: copy its block, uint64[n], behind it.

    Returns the checksum of the whole record, as int64.
    """
    middle = start + num_header
    total = checksum(ring[start:middle])
    place = ring[middle : middle + block.size]
    if block.size < _LARGE:
        return np.int64(total + copy_checksum(place, block, num_header))
    total += _stream_checksum(place, block, num_header)
    _fence()
    return np.int64(total)


COPIED, TORN, INVALID = 1, 2, 3
"""What `take_records` says of a record. Torn: it lies outside of the source, or its checksum disagrees. Invalid: it is
whole, but breaks a rule."""


@_compiled
def is_utf8(text: np.ndarray) -> bool:
    """Whether uint8[n] is UTF-8 by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF."""
    i = 0
    while i < text.size:
        first = np.int64(text[i])
        if first < 0x80:
            i += 1
            continue
        if 0xC2 <= first <= 0xDF:
            more, low, high = 1, 0x80, 0xBF
        elif 0xE0 <= first <= 0xEF:
            more = 2
            low = 0xA0 if first == 0xE0 else 0x80
            high = 0x9F if first == 0xED else 0xBF
        elif 0xF0 <= first <= 0xF4:
            more = 3
            low = 0x90 if first == 0xF0 else 0x80
            high = 0x8F if first == 0xF4 else 0xBF
        else:
            return False
        if i + more >= text.size:
            return False
        for k in range(1, more + 1):
            byte = np.int64(text[i + k])
            if byte < low or byte > high:
                return False
            low, high = 0x80, 0xBF
        i += more + 1
    return True


@_compiled
def _check_names(names: np.ndarray, num_stats: int) -> bool:
    """Whether uint8[n] holds this many different names with a zero byte between two."""
    if num_stats == 0:
        return names.size == 0
    starts = np.empty(num_stats + 1, np.int64)
    starts[0] = 0
    count = 1
    for i in range(names.size):
        if names[i] == 0:
            if count == num_stats:
                return False
            starts[count] = i + 1
            count += 1
    if count != num_stats:
        return False
    starts[count] = names.size + 1
    for k in range(num_stats):
        for other in range(k):
            length = starts[k + 1] - starts[k]
            if length == starts[other + 1] - starts[other]:
                same = True
                for i in range(length - 1):
                    same = same and names[starts[k] + i] == names[starts[other] + i]
                if same:
                    return False
    return True


@_compiled
def take_records(
    source: np.ndarray,
    places: np.ndarray,
    target: np.ndarray,
    starts: np.ndarray,
    magic: int,
    max_tokens: int,
    max_stats: int,
    max_text: int,
    vocab_size: int,
    facts: np.ndarray,
) -> None:
    """Copy records and check the copies, which nobody else can change any more.

    source, target: uint64. places: int64[n, 3], where each lies in the source: start and length in words, and its
    checksum. starts: int64[n], where each goes; there is room. facts: int64[n, record.FACTS], set; the first of a row
    is one of COPIED, TORN and INVALID, and the others are meant where it is COPIED. Layout and rules: record.py.
    """
    for n in range(places.shape[0]):
        start, size = places[n, 0], places[n, 1]
        facts[n, 0] = TORN
        if start < 0 or size < 11 or size > source.size or start > source.size - size:
            continue
        record = target[starts[n] : starts[n] + size]
        if np.int64(copy_checksum(record, source[start : start + size])) != places[n, 2]:
            continue
        facts[n, 0] = INVALID
        for i in range(1, 11):
            facts[n, 2 + i] = np.int64(record[i])
        num_tokens, num_turns = np.int64(record[1]), np.int64(record[2])
        if record[0] != np.uint64(magic) or record[10] > np.uint64(7) or record[10] & np.uint64(5) == np.uint64(4):
            continue
        if not (1 <= num_tokens <= max_tokens and 1 <= num_turns <= max_tokens):
            continue
        num_stats = np.int64(record[4] & np.uint64(0xFFFFFFFF))
        num_names = np.int64(record[4] >> np.uint64(32))
        if num_stats > max_stats or num_names > max_text:
            continue
        num_episode = np.int64(record[3] & np.uint64(0xFFFF))
        num_text = num_episode + num_names
        for shift in range(16, 64, 16):
            num_text += np.int64((record[3] >> np.uint64(shift)) & np.uint64(0xFFFF))
        block_start = 11 + num_stats + (num_text + 7) // 8
        if size != block_start + (17 * num_tokens + 8 * num_turns + 7) // 8:
            continue
        score = record[9:10].view(np.float64)[0]
        if np.int64(record[5]) < 0 or np.int64(record[8]) < 0 or not (0.0 <= score <= 1.0) or num_episode == 0:
            continue
        text = record[11 + num_stats : block_start].view(np.uint8)
        if not _check_names(text[num_text - num_names : num_text], num_stats):
            continue
        # Each on its own: a letter may not begin in one text and end in the next.
        begin = 0
        good = True
        for shift in range(0, 64, 16):
            end = begin + np.int64((record[3] >> np.uint64(shift)) & np.uint64(0xFFFF))
            good = good and is_utf8(text[begin:end])
            begin = end
        if not good or not is_utf8(text[begin:num_text]):
            continue
        fields = record[block_start:].view(np.int32)
        end = 4 * num_tokens + 2 * num_turns
        ok, oldest, newest = check_arrays(
            fields[:num_tokens].view(np.uint32),
            fields[num_tokens : 2 * num_tokens],
            fields[2 * num_tokens : 3 * num_tokens],
            fields[3 * num_tokens : 4 * num_tokens],
            fields[4 * num_tokens : end],
            fields[end:].view(np.uint8)[:num_tokens],
            vocab_size,
        )
        if ok:
            facts[n, 0], facts[n, 1], facts[n, 2] = COPIED, oldest, newest


@_compiled
def _tail_word(data: np.ndarray) -> int:
    """The last, incomplete word of uint8[n], filled up with zeros; 0 where there is none."""
    word = np.uint64(0)
    begin = data.size // 8 * 8
    for i in range(begin, data.size):
        word |= np.uint64(data[i]) << np.uint64(8 * (i - begin))
    return word


@_compiled
def bytes_checksum(data: np.ndarray) -> int:
    """The `checksum` of uint8[n], read as words with the lowest byte first, the last one filled up with zeros."""
    num_words = data.size // 8
    total = checksum(data[: num_words * 8].view(np.uint64))
    if data.size % 8:
        total += _mixed(_tail_word(data), np.uint64(num_words) * _STEP)
    return total


@_compiled
def stream_bytes(target: np.ndarray, source: np.ndarray) -> int:
    """Copy uint8[n] to uint8[n] past the caches, in one pass. Returns the `bytes_checksum` of what was copied.

    For data that is larger than the caches or will be read by another core. Fastest where the target lies at a multiple
    of 8.
    """
    if target.size != source.size:
        raise ValueError("target and source differ in size")
    num_words = source.size // 8
    words = source[: num_words * 8].view(np.uint64)
    total = _stream_checksum(target[: num_words * 8].view(np.uint64), words, 0)
    if source.size % 8:
        total += _mixed(_tail_word(source), np.uint64(num_words) * _STEP)
        for i in range(num_words * 8, source.size):
            target[i] = source[i]
    _fence()
    return total
