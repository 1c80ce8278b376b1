"""Compiled copies with checksums, for records in shared memory and for weights.

All functions release the GIL, so that other threads compute meanwhile, and touch only the arrays they are given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from impala_llm.compiled import compiled

STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: neighbouring words get unlike keys
_LOW = np.uint64(0xFFFFFFFF)
_BLOCK = 64
"""Words that are summed and then stored: a multiple of a cache line's 8, small enough for the level 1 cache."""
LARGE = 4096
"""Words from which on a record is written past the caches: the other process's core reads it from memory anyway, at
half the speed while both compete for the memory's bandwidth."""

_compiled = compiled()


@_compiled
def mixed(word: int, key: int) -> int:
    """Mix a word: x + low(x)·high(x) modulo 2^64 of x = word XOR key, where low and high are the halves of x.

    A flipped bit k of the low half changes it by ±2^k·(1 + high), of the high half by ±2^k·(2^32 + low): never by a
    multiple of 2^64.

    Args:
        word, key: uint64.
    """
    word = word ^ key
    return word + (word & _LOW) * (word >> np.uint64(32))


@_compiled
def checksum(words: np.ndarray, first: int = 0) -> int:
    """Checksum: sum over i of mixed(words[i], (first + i)·k), modulo 2^64, with k = `STEP`.

    A flipped bit always changes it, other accidents (such as moved words) almost surely. It does not protect against
    adversaries. It runs at memory speed, ten times faster than a CRC.

    Args:
        words: uint64[n].
        first: as for `copy_checksum`.
    """
    total = np.uint64(0)
    key = np.uint64(first) * STEP
    for i in range(words.size):
        total += mixed(words[i], key + np.uint64(i) * STEP)
    return total


@_compiled
def copy_checksum(target: np.ndarray, source: np.ndarray, first: int = 0) -> int:
    """Copy words, and compute their checksum in the same pass.

    Args:
        target, source: uint64[n].
        first: index of source[0] in a larger array, whose checksum is the sum of those of its pieces, modulo 2^64.

    Returns:
        The checksum of the words that were copied.
    """
    total = np.uint64(0)
    key = np.uint64(first) * STEP
    for i in range(source.size):
        word = source[i]
        target[i] = word
        total += mixed(word, key + np.uint64(i) * STEP)
    return total


@_compiled
def lay_end_to_end(sizes: np.ndarray, unit: int, starts: np.ndarray) -> int:
    """Place pieces one behind the other, at multiples of `unit`.

    Args:
        sizes: int64[n].
        unit: of the starts.
        starts: int64[n], set here: the start of each piece.

    Returns:
        The end of the last one.
    """
    end = 0
    for n in range(sizes.size):
        starts[n] = end
        end += (sizes[n] + unit - 1) // unit * unit
    return end


@_compiled
def _tail_word(data: np.ndarray) -> int:
    """Last, incomplete word of uint8[n], padded with zeros; 0 where there is none."""
    word = np.uint64(0)
    begin = data.size // 8 * 8
    for i in range(begin, data.size):
        word |= np.uint64(data[i]) << np.uint64(8 * (i - begin))
    return word


@_compiled
def bytes_checksum(data: np.ndarray) -> int:
    """Compute the `checksum` of uint8[n], read as little-endian words, the last one padded with zeros."""
    num_words = data.size // 8
    total = checksum(data[: num_words * 8].view(np.uint64))
    if data.size % 8:
        total += mixed(_tail_word(data), np.uint64(num_words) * STEP)
    return total


# --- past the caches


@intrinsic
def borrowed(typing: Any, array: Any) -> Any:
    """Return the array without reference counting, for a caller that keeps it alive. Each count is an atomic
    instruction, and in a loop it would wait for all streamed stores before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        for name in ("meminfo", "parent"):
            setattr(view, name, ir.Constant(getattr(view, name).type, None))
        return view._getvalue()

    return array(array), generate


@intrinsic
def stream_line(typing: Any, target: Any, target_index: Any, source: Any, source_index: Any) -> Any:
    """Set target[target_index:][:8] = source[source_index:][:8] by a store past the caches: the old contents are not
    fetched first.

    Args:
        target, source: uint64[n]. The address of target[target_index] is a multiple of 64 bytes.
        target_index, source_index: of the first word.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        to = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        of = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        words = builder.load(builder.bitcast(builder.gep(of, [arguments[3]]), line), align=8)
        store = builder.store(words, builder.bitcast(builder.gep(to, [arguments[1]]), line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, target_index, source, source_index), generate


@intrinsic
def prefetch(typing: Any, source: Any, index: Any) -> Any:
    """Prefetch the cache line of source[index].

    Args:
        source: array of any dtype.
        index: may lie outside of the array.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        of = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word = builder.bitcast(builder.gep(of, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [word.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [word, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(source, index), generate


@intrinsic
def fence(typing: Any) -> Any:
    """Make streamed stores visible to others before any later store."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_compiled
def _stream_checksum(target: np.ndarray, source: np.ndarray, first: int) -> int:
    """`copy_checksum` with stores past the caches. Others may see the words only after a `fence`."""
    total = np.uint64(0)
    # The only way to an address in numba; a target that begins within a word has no whole lines.
    lead = (-(target.ctypes.data >> 3)) & 7 if target.ctypes.data & 7 == 0 else source.size
    lead = min(lead, source.size)
    end = lead + (source.size - lead) // 8 * 8
    total += copy_checksum(target[:lead], source[:lead], first)
    for begin in range(lead, end, _BLOCK):
        block = source[begin : min(begin + _BLOCK, end)]
        # Two loops, the second over words in the level 1 cache: one loop would not become vector code.
        total += checksum(block, first + begin)
        for i in range(0, block.size, 8):
            stream_line(target, begin + i, block, i)
    return total + copy_checksum(target[end : source.size], source[end:], first + end)


@_compiled
def lay_block(ring: np.ndarray, start: int, num_header: int, block: np.ndarray) -> int:
    """Complete a record whose header lies in the ring: copy its block behind the header.

    Args:
        ring: uint64[words of the ring].
        start: of the header.
        num_header: words of the header.
        block: uint64[n].

    Returns:
        The checksum of the whole record, as int64.
    """
    middle = start + num_header
    total = checksum(ring[start:middle])
    target = ring[middle : middle + block.size]
    if block.size < LARGE:
        return np.int64(total + copy_checksum(target, block, num_header))
    total += _stream_checksum(target, block, num_header)
    fence()
    return np.int64(total)


def stream_bytes(target: np.ndarray, source: np.ndarray, first: int = 0) -> int:
    """Copy bytes past the caches, and compute their checksum in the same pass.

    For data that is larger than the caches or will be read by another core. Fastest where the target's address is a
    multiple of 8.

    Args:
        target, source: uint8[n].
        first: word at which the source lies in larger data, whose checksum is the sum of those of its pieces, modulo
            2^64; each piece but the last has a multiple of 8 bytes.

    Returns:
        The `bytes_checksum` of the bytes that were copied.
    """
    # Read-only for all callers: numba would compile once more for writable arrays.
    source = source.view()
    source.flags.writeable = False
    total: int = _stream_bytes(target, source, first)
    return total


@_compiled
def _stream_bytes(target: np.ndarray, source: np.ndarray, first: int) -> int:
    if target.size != source.size:
        raise ValueError("target and source differ in size")
    num_words = source.size // 8
    words = source[: num_words * 8].view(np.uint64)
    total = _stream_checksum(target[: num_words * 8].view(np.uint64), words, first)
    if source.size % 8:
        total += mixed(_tail_word(source), np.uint64(first + num_words) * STEP)
        for i in range(num_words * 8, source.size):
            target[i] = source[i]
    fence()
    return total
