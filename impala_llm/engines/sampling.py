"""Draws tokens from logits, with the log-probability of each under the very distribution that it was drawn from.

Invariant: the i-th draw of a stream depends on its key and on i alone, so a session's tokens do not depend on which
other sessions share the batch.
"""

import math

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BELOW_ONE = 1.0 - 1e-12


def _finalise(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def stream_key(engine_seed: int, session_seed: int) -> np.uint64:
    """Key of a session's random stream. Seeds of any size and sign are taken modulo 2^64."""
    seeds = np.array([engine_seed % 2**64, session_seed % 2**64], dtype=np.uint64)
    mixed = _finalise(seeds + _GOLDEN)
    return _finalise(mixed[:1] * _GOLDEN + mixed[1:])[0]


def uniforms(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Draw number `counters` (int64[R]) of the streams `keys` (uint64[R]): float64[R] in [0, 1).

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) used as a
    counter-based generator: its n-th output is a hash of key + n x the golden gamma.
    """
    state = keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_finalise(state) >> np.uint64(11)) * 2.0**-53


def sample(
    logits: torch.Tensor, inverse_temperatures: torch.Tensor | None, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row by inversion of the cumulative distribution.

    The vocabulary is searched in two levels of about its square root: the sums of blocks first, then inside the block
    that holds the draw. That costs one pass over the probabilities instead of a full cumulative sum.

    Args:
        logits: float32[R, V].
        inverse_temperatures: float32[R, 1]; None where all are 1.
        draws: float64[R] in [0, 1).

    Returns:
        tokens int64[R]; logprobs float32[R] at the sampling temperature, NaN where a row's logits are not finite.
    """
    scaled = logits if inverse_temperatures is None else logits * inverse_temperatures
    probs = torch.softmax(scaled, dim=-1)
    rows, vocab_size = probs.shape
    block = _block_size(vocab_size)
    padded = probs if vocab_size % block == 0 else torch.nn.functional.pad(probs, (0, -vocab_size % block))
    blocks = padded.view(rows, -1, block)
    masses = blocks.sum(-1, dtype=torch.float32)
    ends = masses.cumsum(-1, dtype=torch.float64)
    draws = draws.clamp(max=_BELOW_ONE)
    target = draws * ends[:, -1]
    chosen = (ends <= target[:, None]).sum(-1, keepdim=True).clamp_(max=blocks.shape[1] - 1)
    mass = masses.gather(1, chosen)[:, 0]
    inside = ((target - ends.gather(1, chosen)[:, 0]) / mass + 1.0).clamp_(0.0, _BELOW_ONE)
    block_probs = blocks.gather(1, chosen[:, :, None].expand(-1, 1, block))[:, 0]
    inner_ends = block_probs.cumsum(-1, dtype=torch.float64)
    # Strictly below the last end, so the search stops at a token of positive probability.
    offset = (inner_ends <= (inside * inner_ends[:, -1])[:, None]).sum(-1, keepdim=True).clamp_(max=block - 1)
    tokens = (chosen * block + offset)[:, 0]
    return tokens, block_probs.gather(1, offset)[:, 0].log()


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row: int64[R], and its log-probability at temperature 1: float32[R]."""
    highest, tokens = logits.max(dim=-1)
    return tokens, highest - logits.logsumexp(dim=-1)


def _block_size(vocab_size: int) -> int:
    """A divisor of the vocabulary near its square root, so that no padding is needed; else the square root."""
    root = math.isqrt(vocab_size)
    near = [size for size in range(max(1, root // 2), 2 * root + 1) if vocab_size % size == 0]
    return min(near, key=lambda size: abs(size - root), default=root)
