"""Sampling: draws tokens from logits, with the log-probability of each under the distribution that it was drawn from.

Invariant: the i-th draw of a stream depends on its key and on i alone, so a session's tokens do not depend on which
other sessions share the batch.
"""

import math

import numpy as np
import torch

from impala_llm.engines.embedded import cpu_kernels

_BELOW_ONE = 1.0 - 1e-12


def stream_key(engine_seed: int, session_seed: int) -> np.uint64:
    """Make the key of a session's random stream. Seeds are taken modulo 2^64."""
    return np.uint64(cpu_kernels.stream_key(np.uint64(engine_seed % 2**64), np.uint64(session_seed % 2**64)))


def uniforms(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return draw number `counters` (int64[R]) of the streams `keys` (uint64[R]): float64[R] in [0, 1)."""
    draws = np.empty(len(keys))
    cpu_kernels.uniforms(keys, counters, draws)
    return draws


def draw(
    logits: torch.Tensor, inverse_temperatures: np.ndarray, is_greedy: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Choose one token for each row: sampled, or the most likely one where the row is greedy.

    Args:
        logits: float32[R, V].
        inverse_temperatures: float32[R], 1 in greedy rows. is_greedy: bool[R]. draws: float64[R] in [0, 1).

    Returns:
        tokens int64[R]; log_probs float32[R] at the row's temperature, NaN where its logits are not finite.
    """
    if logits.device.type == "cpu":
        tokens, log_probs = np.empty(len(draws), dtype=np.int64), np.empty(len(draws), dtype=np.float32)
        cpu_kernels.draw(logits.numpy(), inverse_temperatures, is_greedy, draws, tokens, log_probs)
        return tokens, log_probs
    chosen, chosen_log_probs = greedy(logits)
    if not is_greedy.all():
        scales = torch.from_numpy(inverse_temperatures)[:, None].to(logits.device)
        sampled, sampled_log_probs = sample(logits, scales, torch.from_numpy(draws).to(logits.device))
        rows = torch.from_numpy(is_greedy).to(logits.device)
        chosen = torch.where(rows, chosen, sampled)
        chosen_log_probs = torch.where(rows, chosen_log_probs, sampled_log_probs)
    return chosen.cpu().numpy(), chosen_log_probs.cpu().numpy()


def sample(
    logits: torch.Tensor, inverse_temperatures: torch.Tensor | None, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token for each row by inversion of the cumulative distribution.

    The vocabulary is searched in two levels of about its square root: the sums of blocks first, then inside the block
    that holds the draw. That costs one pass over the probabilities instead of a full cumulative sum.

    Args:
        logits: float32[R, V].
        inverse_temperatures: float32[R, 1]; None where all are 1.
        draws: float64[R] in [0, 1).

    Returns:
        tokens int64[R]; log_probs float32[R] at the sampling temperature, NaN where a row's logits are not finite.
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
    """Choose the most likely token of each row: int64[R], and its log-probability at temperature 1: float32[R]."""
    highest, tokens = logits.max(dim=-1)
    return tokens, highest - logits.logsumexp(dim=-1)


def _block_size(vocab_size: int) -> int:
    """Find a divisor of the vocabulary near its square root, so that no padding is needed; else the square root."""
    root = math.isqrt(vocab_size)
    near = [size for size in range(max(1, root // 2), 2 * root + 1) if vocab_size % size == 0]
    return min(near, key=lambda size: abs(size - root), default=root)
