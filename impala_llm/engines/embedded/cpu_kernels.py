"""Compiled loops of the CPU decoder and of the draws: the operations between two matrix products, fused.

On small models and few rows an operator of torch costs more to call than to compute. All functions run on one thread,
release the GIL, and take C-contiguous arrays whose sizes agree. Invariant: a value that is not finite is never turned
into a finite one, so a broken policy shows in the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from impala_llm.compiled import compiled

# Sums in any order, fused multiply-adds; but numbers that are not finite are still expected.
_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
_ROUND = np.float32(1.5 * 2**23)  # a float32 plus this and minus it again is a whole number
_LEAST = np.float32(-126.0)
_MOST = np.float32(126.0)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LOG2_E = np.float32(1.4426950408889634)
# 2^f = sum of (f ln 2)^k / k!; for |f| <= 1/2 the first term left out is below 6e-9.
_C = tuple(np.float32(np.log(2.0) ** k / np.prod(np.arange(1.0, k + 1))) for k in range(8))
_BINS = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TO_UNIT = 2.0**-53


def _compiled(reordered: bool, inline: bool = False) -> Callable[..., Any]:
    """Compile a function.

    Args:
        reordered: allow sums in another order. A function without it keeps its order where it is inlined into one with
            it.
        inline: inline it into its callers. One that adds in another order must be: else a process that compiles the
            caller calls the function itself, one that loads the caller its copy of it, and their last bits differ.
    """
    fastmath = _REORDERED if reordered else {"contract"}
    return compiled(fastmath=fastmath, error_model="numpy", **({"forceinline": True} if inline else {}))


@intrinsic
def _power_of_two(typing: Any, rounded: Any) -> Any:
    """Compute 2^n as float32 from n + _ROUND, -126 <= n <= 126: the low bits of the sum, n, go into the exponent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        exponent = builder.add(bits, ir.Constant(ir.IntType(32), 127 - int(_ROUND.view(np.int32))))
        return builder.bitcast(builder.shl(exponent, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def _ordered(typing: Any, value: Any) -> Any:
    """Map float32 to int32 in the same order. Maxima of integers become vector code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], ir.IntType(32))
        sign = builder.ashr(bits, ir.Constant(ir.IntType(32), 31))
        return builder.xor(bits, builder.and_(sign, ir.Constant(ir.IntType(32), 0x7FFFFFFF)))

    return types.int32(types.float32), generate


@intrinsic
def _of_order(typing: Any, order: Any) -> Any:
    """Inverse of `_ordered`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sign = builder.ashr(arguments[0], ir.Constant(ir.IntType(32), 31))
        bits = builder.xor(arguments[0], builder.and_(sign, ir.Constant(ir.IntType(32), 0x7FFFFFFF)))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@_compiled(reordered=False, inline=True)
def _exp2(x: float) -> float:
    """2^x to float32 accuracy for x <= 126, NaN for NaN; 0 below -126."""
    near = _MOST if x > _MOST else x
    near = _LEAST if near < _LEAST else near
    rounded = near + _ROUND
    f = near - (rounded - _ROUND)
    power = _C[6] + f * _C[7]
    power = _C[5] + f * power
    power = _C[4] + f * power
    power = _C[3] + f * power
    power = _C[2] + f * power
    power = _C[1] + f * power
    power = _C[0] + f * power
    power = power * _power_of_two(rounded)
    return _ZERO if x < _LEAST else power


@_compiled(reordered=False)
def _highest(row: np.ndarray) -> float:
    """Largest of float32[n], n >= 1. Where one is NaN the result is NaN or meaningless."""
    highest = _ordered(row[0])
    for i in range(row.size):
        highest = max(highest, _ordered(row[i]))
    return _of_order(highest)


@_compiled(reordered=True, inline=True)
def _norm_row(out: np.ndarray, row: np.ndarray, weight: np.ndarray, eps: float) -> None:
    total = _ZERO
    for i in range(row.size):
        total += row[i] * row[i]
    scale = _ONE / np.sqrt(total / np.float32(row.size) + np.float32(eps))
    for i in range(row.size):
        out[i] = row[i] * scale * weight[i]


@_compiled(reordered=True)
def embed(
    tokens: np.ndarray, embedding: np.ndarray, weight: np.ndarray, eps: float, hidden: np.ndarray, normed: np.ndarray
) -> None:
    """hidden = the tokens' embeddings; normed = RMS norm of it (Zhang and Sennrich, 2019). Both float32[N, width]."""
    for n in range(tokens.size):
        row, source = hidden[n], embedding[tokens[n]]
        for i in range(row.size):
            row[i] = source[i]
        _norm_row(normed[n], row, weight, eps)


@_compiled(reordered=True)
def add_norm(hidden: np.ndarray, update: np.ndarray, weight: np.ndarray, eps: float, normed: np.ndarray) -> None:
    """hidden += update; normed = RMS norm of it. All float32[N, width]."""
    for n in range(hidden.shape[0]):
        row, more = hidden[n], update[n]
        for i in range(row.size):
            row[i] += more[i]
        _norm_row(normed[n], row, weight, eps)


@_compiled(reordered=True)
def gate(gate_up: np.ndarray, out: np.ndarray) -> None:
    """out[n, i] = silu(gate_up[n, i]) * gate_up[n, I + i]: float32[N, 2 I] -> float32[N, I]."""
    size = out.shape[1]
    for n in range(out.shape[0]):
        gates, ups, row = gate_up[n, :size], gate_up[n, size:], out[n]
        for i in range(size):
            row[i] = gates[i] / (_ONE + _exp2(-gates[i] * _LOG2_E)) * ups[i]


@_compiled(reordered=True)
def write_heads(
    projected: np.ndarray,
    weights: np.ndarray,
    normalise: bool,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    table: np.ndarray,
    pool: np.ndarray,
) -> None:
    """Normalise, weight and rotate queries and keys in place; write keys and values into the cache.

    Args:
        projected: float32[>= N, (heads + 2 kv_heads) head_dim]: queries, keys, values.
        weights: float32[heads + kv_heads, head_dim].
        normalise: the model has head norms.
        cos, sin: float32[positions, head_dim], the first half of sin negated.
        positions, slots: int64[>= N], int64[N].
        table: int64[slots, blocks].
        pool: float32[2, blocks, kv_heads, block, head_dim].
    """
    turned, head_dim = weights.shape
    kv_heads, block_size = pool.shape[2], pool.shape[3]
    heads = turned - kv_heads
    half = head_dim // 2
    for n in range(slots.size):
        position = positions[n]
        block, offset = table[slots[n], position // block_size], position % block_size
        cos_row, sin_row, row = cos[position], sin[position], projected[n]
        for h in range(turned):
            head = row[h * head_dim : (h + 1) * head_dim]
            weight = weights[h]
            scale = _ONE
            if normalise:
                total = _ZERO
                for i in range(head_dim):
                    total += head[i] * head[i]
                scale = _ONE / np.sqrt(total / np.float32(head_dim) + np.float32(eps))
            for i in range(half):
                low, high = head[i] * scale * weight[i], head[half + i] * scale * weight[half + i]
                head[i] = low * cos_row[i] + high * sin_row[i]
                head[half + i] = high * cos_row[half + i] + low * sin_row[half + i]
        for part in range(2):
            for h in range(kv_heads):
                start = (heads + part * kv_heads + h) * head_dim
                target = pool[part, block, h, offset]
                for i in range(head_dim):
                    target[i] = row[start + i]


@_compiled(reordered=True)
def attend(
    queries: np.ndarray,
    indices: np.ndarray,
    slots: np.ndarray,
    lengths: np.ndarray,
    table: np.ndarray,
    pool: np.ndarray,
    scores: np.ndarray,
    out: np.ndarray,
) -> None:
    """Attention of one query for each session over the first `lengths` tokens of its cache.

    Args:
        queries: float32[N, >= heads * head_dim], scaled for powers of two.
        indices: int64[R], of queries.
        slots, lengths: int64[R].
        table, pool: as for `write_heads`.
        scores: float32[>= the largest length], scratch memory.
        out: float32[>= R, heads * head_dim], set.
    """
    kv_heads, block_size, head_dim = pool.shape[2], pool.shape[3], pool.shape[4]
    group = out.shape[1] // head_dim // kv_heads
    for r in range(slots.size):
        length = lengths[r]
        num_blocks = (length + block_size - 1) // block_size
        blocks = table[slots[r]]
        for h in range(kv_heads):
            for g in range(group):
                start = (h * group + g) * head_dim
                query = queries[indices[r], start : start + head_dim]
                for b in range(num_blocks):
                    keys = pool[0, blocks[b], h]
                    part = scores[b * block_size : min(length, (b + 1) * block_size)]
                    whole = part.size // 4 * 4
                    for j in range(0, whole, 4):
                        key0, key1, key2, key3 = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
                        dot0 = dot1 = dot2 = dot3 = _ZERO
                        for i in range(head_dim):
                            dot0 += query[i] * key0[i]
                            dot1 += query[i] * key1[i]
                            dot2 += query[i] * key2[i]
                            dot3 += query[i] * key3[i]
                        part[j], part[j + 1], part[j + 2], part[j + 3] = dot0, dot1, dot2, dot3
                    for j in range(whole, part.size):
                        key0 = keys[j]
                        dot0 = _ZERO
                        for i in range(head_dim):
                            dot0 += query[i] * key0[i]
                        part[j] = dot0
                weights = scores[:length]
                highest = _highest(weights)
                total = _ZERO
                for j in range(length):
                    weights[j] = _exp2(weights[j] - highest)
                    total += weights[j]
                mixed = out[r, start : start + head_dim]
                mixed[:] = _ZERO
                for b in range(num_blocks):
                    values = pool[1, blocks[b], h]
                    part = scores[b * block_size : min(length, (b + 1) * block_size)]
                    whole = part.size // 4 * 4
                    for j in range(0, whole, 4):
                        value0, value1, value2, value3 = values[j], values[j + 1], values[j + 2], values[j + 3]
                        w0, w1, w2, w3 = part[j], part[j + 1], part[j + 2], part[j + 3]
                        for i in range(head_dim):
                            mixed[i] += w0 * value0[i] + w1 * value1[i] + w2 * value2[i] + w3 * value3[i]
                    for j in range(whole, part.size):
                        value0, w0 = values[j], part[j]
                        for i in range(head_dim):
                            mixed[i] += w0 * value0[i]
                for i in range(head_dim):
                    mixed[i] /= total


@_compiled(reordered=True)
def draw(
    logits: np.ndarray,
    inverse_temperatures: np.ndarray,
    is_greedy: np.ndarray,
    draws: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """Draw one token for each row by inversion of the cumulative distribution, or take the most likely one.

    Args:
        logits: float32[R, V].
        inverse_temperatures: float32[R].
        is_greedy: bool[R].
        draws: float64[R] in [0, 1).
        tokens: int64[R], set.
        log_probs: float32[R], set; NaN where a row's logits are not finite.
    """
    vocab_size = logits.shape[1]
    masses = np.empty((vocab_size + _BINS - 1) // _BINS, np.float32)
    weights = np.empty(vocab_size, np.float32)
    for r in range(tokens.size):
        row = logits[r]
        inverse = inverse_temperatures[r]
        scale = inverse * _LOG2_E
        highest = _highest(row)
        total = 0.0
        for b in range(masses.size):
            part = row[b * _BINS : (b + 1) * _BINS]
            out = weights[b * _BINS : (b + 1) * _BINS]
            mass = _ZERO
            for i in range(part.size):
                out[i] = _exp2((part[i] - highest) * scale)
                mass += out[i]
            masses[b] = mass
            total += mass
        token = 0
        if not total >= 1.0 - 1e-6:  # the most likely token alone has weight 1
            tokens[r], log_probs[r] = 0, np.nan
            continue
        if is_greedy[r]:
            while row[token] < highest:
                token += 1
        else:
            target = draws[r] * total
            before = 0.0
            bin_ = 0
            last = -1
            for b in range(masses.size):
                if masses[b] > _ZERO:
                    last = b
                    bin_ = b
                    if before + masses[b] > target:
                        break
                    before += masses[b]
            if before >= total:  # a draw beside 1, by rounding: the last index with weight
                before -= masses[last]
            for i in range(bin_ * _BINS, min(vocab_size, (bin_ + 1) * _BINS)):
                if weights[i] > _ZERO:
                    token = i
                    before += weights[i]
                    if before > target:
                        break
        tokens[r] = token
        log_probs[r] = (row[token] - highest) * inverse - np.float32(np.log(total))


@_compiled(reordered=False)
def _finalise(state: np.uint64) -> np.uint64:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


@_compiled(reordered=False)
def stream_key(engine_seed: np.uint64, session_seed: np.uint64) -> np.uint64:
    """Combine two seeds into the key of a random stream."""
    return _finalise(_finalise(engine_seed + _GOLDEN) * _GOLDEN + _finalise(session_seed + _GOLDEN))


@_compiled(reordered=False)
def uniforms(keys: np.ndarray, counters: np.ndarray, draws: np.ndarray) -> None:
    """Set draws[i], float64 in [0, 1), to draw number counters[i], int64, of the stream keys[i], uint64.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) used as a
    counter-based generator: its n-th output is a hash of key + n x the golden gamma.
    """
    for i in range(keys.size):
        state = keys[i] + (np.uint64(counters[i]) + np.uint64(1)) * _GOLDEN
        draws[i] = (_finalise(state) >> np.uint64(11)) * _TO_UNIT
