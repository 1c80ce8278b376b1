"""The trace trap: how fast V-trace forgets where every ratio carries a little engine noise, and what it should be.

Without a critic and with a reward of 1 at the end, v_t is the product of the truncated ratios from t to the end:
log v_t = sum of min(0, l). So credit halves every ln 2 / -E[min(0, l)] tokens; with zero-mean normal noise of mean
|l| = m that is 2 ln 2 / m. Here v_t comes from `impala_llm.algorithms.vtrace` on long episodes of injected noise, and
its half-life, from a line through the mean of log v_t, is compared with the formula.

Invariant: no policy, no training, no staleness: what decays here decays by noise alone.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.vtrace import Steps, token_vtrace, turn_vtrace

NUM_EPISODES = 128
NUM_TOKENS = 4096
"""Tokens of an episode."""
TURN_TOKENS = 32


@dataclass(frozen=True)
class TraceSettings:
    mean_abs: float
    """m: mean |l| in nats a token."""
    noise: str
    """normal | laplace, with mean 0 | exact: normal, with the mean that makes E[e^l] = 1, as a ratio has."""
    granularity: str
    """token | geometric | product: of turns of `TURN_TOKENS` tokens."""
    dead_band: float


def all_settings() -> list[TraceSettings]:
    settings = []
    for mean_abs in (0.01, 0.04):
        for noise in ("normal", "exact", "laplace"):
            for granularity in ("token", "geometric", "product"):
                settings.append(TraceSettings(mean_abs, noise, granularity, 0.0))
        for share in (1.0, 2.0, 4.0):
            settings.append(TraceSettings(mean_abs, "normal", "token", share * mean_abs))
    return settings


def draw_noise(settings: TraceSettings, shape: tuple[int, int], seed: int) -> Tensor:
    """float64[episodes, tokens]: log-ratios."""
    # Settings share no random numbers: their agreement with the formula is evidence of each.
    rng = np.random.default_rng([seed, zlib.crc32(str(settings).encode())])
    if settings.noise == "laplace":
        return torch.from_numpy(rng.laplace(0.0, settings.mean_abs, shape))
    sigma = settings.mean_abs * math.sqrt(math.pi / 2)
    shift = -0.5 * sigma**2 if settings.noise == "exact" else 0.0
    return torch.from_numpy(rng.normal(shift, sigma, shape))


def credit(settings: TraceSettings, log_ratios: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(tokens from the start of each step to the end [S], v at these [episodes, S]).

    Args:
        log_ratios: float64[episodes, tokens]; the tokens a multiple of `TURN_TOKENS`.
    """
    num_episodes, num_tokens = log_ratios.shape
    num_turns = num_tokens // TURN_TOKENS
    turn_ids = torch.arange(num_episodes * num_turns).repeat_interleave(TURN_TOKENS)
    turn_segment_ids = torch.arange(num_episodes).repeat_interleave(num_turns)
    rewards = torch.zeros(num_episodes, num_turns, dtype=log_ratios.dtype)
    rewards[:, -1] = 1.0
    by_token = settings.granularity == "token"
    num_steps = num_tokens if by_token else num_turns
    values = torch.zeros(num_episodes * num_steps, dtype=log_ratios.dtype)
    ends = torch.zeros(num_episodes, dtype=log_ratios.dtype)
    steps = Steps(turn_ids, turn_segment_ids, rewards.reshape(-1), values, ends)
    if by_token:
        target = token_vtrace(log_ratios.reshape(-1), steps, dead_band=settings.dead_band)
    else:
        ratio = "geometric" if settings.granularity == "geometric" else "product"
        target = turn_vtrace(log_ratios.reshape(-1), steps, ratio=ratio, dead_band=settings.dead_band)
    distances = (num_steps - np.arange(num_steps)) * (num_tokens // num_steps)
    return distances, target.vs.reshape(num_episodes, num_steps).numpy()


def half_life(distances: np.ndarray, values: np.ndarray) -> float:
    """In tokens, of a line through the origin and the mean over episodes of log v; infinite where nothing decays."""
    logs = np.log(values).mean(axis=0)
    slope = float(distances @ logs / (distances @ distances))
    return math.inf if slope >= 0.0 else -math.log(2.0) / slope


def predicted_half_life(settings: TraceSettings) -> float:
    """ln 2 / -E[min(0, l)] a token, in tokens; for turns of n tokens with l of the turn, n times as many."""
    steps = {"token": 1, "geometric": TURN_TOKENS, "product": TURN_TOKENS}[settings.granularity]
    sigma = settings.mean_abs * math.sqrt(math.pi / 2)
    shift = -0.5 * sigma**2 if settings.noise == "exact" else 0.0
    if settings.noise == "laplace":
        # The difference of two exponentials; a mean or sum over turns is one of two gammas of shape n.
        if steps == 1:
            loss = 0.5 * settings.mean_abs
        else:
            scale = settings.mean_abs / (steps if settings.granularity == "geometric" else 1)
            loss = 0.5 * scale * _mean_abs_gamma_difference(steps)
        return math.log(2.0) * steps / loss
    if settings.granularity == "geometric":
        sigma /= math.sqrt(steps)
    elif settings.granularity == "product":
        sigma *= math.sqrt(steps)
        shift *= steps
    return math.log(2.0) * steps / _mean_negative_part(shift, sigma, settings.dead_band)


def _mean_negative_part(mean: float, sigma: float, dead_band: float) -> float:
    """-E[l; l < 0 and |l| >= dead_band] of a normal l."""
    z = (-dead_band - mean) / sigma
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return sigma * density - mean * 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))


def _mean_abs_gamma_difference(shape: int) -> float:
    """E|G - G'| of two independent Gamma(n, 1): 2 Γ(n + 1/2) / (sqrt(π) Γ(n))."""
    return 2.0 * math.exp(math.lgamma(shape + 0.5) - math.lgamma(shape)) / math.sqrt(math.pi)


def measure(
    seeds: Sequence[int], num_episodes: int = NUM_EPISODES, num_tokens: int = NUM_TOKENS
) -> list[dict[str, Any]]:
    """One entry a setting: half-lives of the seeds, the formula's, and a thinned curve of credit."""
    results = []
    for settings in all_settings():
        found, curves = [], []
        for seed in seeds:
            distances, values = credit(settings, draw_noise(settings, (num_episodes, num_tokens), seed))
            found.append(half_life(distances, values))
            curves.append(np.exp(np.log(values).mean(axis=0)))
        mean_curve = np.mean(curves, axis=0)
        thinned = np.unique(np.geomspace(1, len(distances), 60).astype(int)) - 1
        kept = len(distances) - 1 - thinned
        results.append(
            {
                "settings": asdict(settings),
                "half_lives": [round(h, 2) for h in found],
                "predicted": round(predicted_half_life(settings), 2),
                "distance": distances[kept].tolist(),
                "credit": [float(f"{c:.4g}") for c in mean_curve[kept]],
            }
        )
    return results
