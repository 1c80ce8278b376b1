"""Conversion of float32 to bfloat16 on the way into shared memory: rounded, summed and stored in one pass.

Invariant: the bytes are those of `torch.Tensor.to(torch.bfloat16)`. Rounds to nearest, ties to even; keeps denormal
numbers and infinities; NaN becomes 0xFFFF.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from impala_llm.compiled import compiled
from impala_llm.pipeline.shm.copy_kernels import STEP, borrowed, fence, mixed, prefetch

_STREAMS = 4
"""Positions in an array from which a thread reads at once. A processor fetches ahead within a page of each only: with
one position 134 M elements take 1.9 times as long."""
_AHEAD = 256
"""Elements by which they are fetched before they are needed."""
_HALF = np.uint32(0x7FFF)
_INFINITY = np.uint32(0x7F800000)
_SIGNLESS = np.uint32(0x7FFFFFFF)
_NAN = np.uint32(0xFFFF)

_compiled = compiled()


@_compiled
def _rounded(bits: int) -> int:
    """The bits of a float32 as those of a bfloat16."""
    if bits & _SIGNLESS > _INFINITY:
        return _NAN
    return (bits + _HALF + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@_compiled
def _convert_words(target: np.ndarray, source: np.ndarray, begin: int, end: int, key: int) -> int:
    """Set target[begin:end], uint64, to `_rounded` of source. Returns the part of the checksum."""
    total = np.uint64(0)
    for i in range(begin, end):
        word = np.uint64(0)
        for k in range(4):
            word |= np.uint64(_rounded(source[4 * i + k])) << np.uint64(16 * k)
        target[i] = word
        total += mixed(word, key + np.uint64(i) * STEP)
    return total


@intrinsic
def _convert_line(
    typing: Any, target: Any, target_index: Any, source: Any, source_index: Any, key: Any, sums: Any, lane: Any
) -> Any:
    """Set target[target_index:][:8], uint64, to `_rounded` of source[source_index:][:32], by a store past the caches.

    The address of target[target_index] is a multiple of 64 bytes. Adds `mixed(target[target_index + i], key + i·k)`,
    with k = `STEP`, to sums[lane + i], uint64: compiled from such loops it would not become vector code of one pass,
    and adding up the eight of each line would cost a third of its cycles.
    """
    half, word = ir.IntType(32), ir.IntType(64)
    words = ir.VectorType(word, 8)

    def halves(value: np.uint32 | int) -> ir.Constant:
        return ir.Constant(ir.VectorType(half, 32), [int(value)] * 32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        of = context.make_array(signature.args[2])(context, builder, arguments[2]).data
        read = builder.bitcast(builder.gep(of, [arguments[3]]), ir.VectorType(half, 32).as_pointer())
        bits = builder.load(read, align=4)
        is_odd = builder.and_(builder.lshr(bits, halves(16)), halves(1))
        rounded = builder.lshr(builder.add(builder.add(bits, halves(_HALF)), is_odd), halves(16))
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, halves(_SIGNLESS)), halves(_INFINITY))
        narrow = builder.trunc(builder.select(is_nan, halves(_NAN), rounded), ir.VectorType(ir.IntType(16), 32))
        line = builder.bitcast(narrow, words)
        store = builder.store(line, builder.bitcast(builder.gep(to, [arguments[1]]), words.as_pointer()), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(half, 1)]))
        undefined = ir.Constant(words, ir.Undefined)
        first = builder.insert_element(undefined, arguments[4], ir.Constant(half, 0))
        same = builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(half, 8), [0] * 8))
        keyed = builder.xor(line, builder.add(same, ir.Constant(words, [i * int(STEP) % 2**64 for i in range(8)])))
        low = builder.and_(keyed, ir.Constant(words, [2**32 - 1] * 8))
        product = builder.mul(low, builder.lshr(keyed, ir.Constant(words, [32] * 8)))
        kept = context.make_array(signature.args[5])(context, builder, arguments[5]).data
        at = builder.bitcast(builder.gep(kept, [arguments[6]]), words.as_pointer())
        builder.store(builder.add(builder.load(at, align=8), builder.add(keyed, product)), at, align=8)
        return context.get_dummy_value()

    return types.void(target, target_index, source, source_index, key, sums, lane), generate


def convert_bytes(target: np.ndarray, source: np.ndarray, first: int = 0) -> int:
    """Convert float32 to bfloat16, past the caches, and compute the checksum in the same pass.

    Fastest where the target's address is a multiple of 8.

    Args:
        target: uint8[2n].
        source: float32[n].
        first: as for `copy_kernels.stream_bytes`, of the target.

    Returns:
        The `copy_kernels.bytes_checksum` of the bytes that were written.
    """
    bits = source.view(np.uint32)
    bits.flags.writeable = False  # for all callers: numba would compile once more for writable arrays
    total: int = _convert(target, bits, first)
    return total


@_compiled
def _convert(target: np.ndarray, source: np.ndarray, first: int) -> int:
    if target.size != 2 * source.size:
        raise ValueError("target and source differ in size")
    target, source = borrowed(target), borrowed(source)
    num_words = source.size // 4
    words = target[: num_words * 8].view(np.uint64)
    key = np.uint64(first) * STEP
    total = np.uint64(0)
    # A target that begins within a word has no whole lines.
    lead = (-(target.ctypes.data >> 3)) & 7 if target.ctypes.data & 7 == 0 else num_words
    lead = min(lead, num_words)
    stream = (num_words - lead) // (8 * _STREAMS) * 8
    end = lead + _STREAMS * stream
    sums = np.zeros(8 * _STREAMS, np.uint64)
    borrowed_sums = borrowed(sums)  # of which the loop below keeps the memory
    for begin in range(lead, lead + stream, 8):
        for n in range(_STREAMS):
            index = begin + n * stream
            prefetch(source, 4 * index + _AHEAD)
            prefetch(source, 4 * index + _AHEAD + 16)
            _convert_line(words, index, source, 4 * index, key + np.uint64(index) * STEP, borrowed_sums, 8 * n)
    for part in sums:
        total += part
    total += _convert_words(words, source, 0, lead, key) + _convert_words(words, source, end, num_words, key)
    if source.size % 4:
        word = np.uint64(0)
        for i in range(4 * num_words, source.size):
            value = _rounded(source[i])
            word |= np.uint64(value) << np.uint64(16 * (i - 4 * num_words))
            target[2 * i] = np.uint8(value & np.uint32(0xFF))
            target[2 * i + 1] = np.uint8(value >> np.uint32(8))
        total += mixed(word, key + np.uint64(num_words) * STEP)
    fence()
    return total
