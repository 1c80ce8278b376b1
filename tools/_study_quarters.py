"""Part (b) of the second study: which quarter of the tokens breaks a run under lag, and which protects it.

A token outside of the band [0.8, 1.28] of its ratio ρ = π/μ is in one of four quarters, by the sign of its advantage
and the side of its ratio. `Quarters` gives each quarter a weight of 0, of 1, or of ρ (at most 3), so it is 81 losses;
inside of the band all weights are ρ. Losses with a name are among them:

    A > 0, ρ > 1.28    A > 0, ρ < 0.8    A < 0, ρ > 1.28    A < 0, ρ < 0.8
    0                  ρ                 ρ                  0                 PPO's clip
    1                  ρ                 1                  ρ                 truncated importance sampling, cap 1
    1                  1                 1                  ρ                 TOPR, ratios of tokens
    ρ                  ρ                 ρ                  ρ                 importance sampling
    1                  1                 1                  1                 no correction
    0                  0                 0                  0                 two-sided mask

Invariant: a cell is chosen by the fitted model below, from all runs at once, and not for its own score.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from impala_llm.algorithms.importance import ratios, segment_sum
from impala_llm.algorithms.interface import Loss, LossOutput, Scored
from impala_llm.settings import bounded, one_of

LEVELS = ("0", "1", "ratio")
QUARTERS = ("good_above", "good_below", "bad_above", "bad_below")
"""Fields of `Quarters`, in the order of a cell's words."""
SYMBOLS = {
    "good_above": "A > 0, ρ > 1",
    "good_below": "A > 0, ρ < 1",
    "bad_above": "A < 0, ρ > 1",
    "bad_below": "A < 0, ρ < 1",
}

Cell = tuple[str, str, str, str]
"""Weight of each quarter."""
CELLS: tuple[Cell, ...] = tuple(itertools.product(LEVELS, repeat=4))  # type: ignore[arg-type]
KNOWN: dict[Cell, str] = {
    ("0", "ratio", "ratio", "0"): "PPO's clip",
    ("1", "ratio", "1", "ratio"): "truncated importance sampling",
    ("1", "1", "1", "ratio"): "TOPR, ratios of tokens",
    ("ratio", "ratio", "ratio", "ratio"): "importance sampling",
    ("1", "1", "1", "1"): "no correction",
    ("0", "0", "0", "0"): "two-sided mask",
}

OUTWEIGHING = (("1", "ratio"), ("1", "0"), ("ratio", "0"))
"""Weights of (A > 0, ρ < 1) and of (A < 0, ρ < 1) with which good tokens that the policy has left outweigh bad ones."""


@dataclass
class Quarters(Loss):
    """-sg(w) A log π, with a weight for each quarter of the tokens; see the module."""

    vanishes_with_advantage = True
    metrics = {
        f"{quarter}_share": f"share of the action tokens that teach with {SYMBOLS[quarter]}, outside of the band"
        for quarter in QUARTERS
    }
    good_above: str = one_of("ratio", "0", "1")
    """Weight where A > 0 and ρ > 1 + band_high: ratio (ρ, at most `cap`), 0 or 1."""
    good_below: str = one_of("ratio", "0", "1")
    """Weight where A > 0 and ρ < 1 - band_low."""
    bad_above: str = one_of("ratio", "0", "1")
    """Weight where A < 0 and ρ > 1 + band_high."""
    bad_below: str = one_of("ratio", "0", "1")
    """Weight where A < 0 and ρ < 1 - band_low."""
    band_low: float = bounded(0.2, 0, 1)
    """The band begins at 1 - band_low: PPO's clip."""
    band_high: float = bounded(0.28, 0)
    """The band ends at 1 + band_high."""
    cap: float = bounded(3.0, 1)
    """Largest weight: PPO's dual clip."""
    level: str = one_of("token", "sequence")
    """The ratio is of a token | of all tokens of an episode together (sequence)."""

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> LossOutput:
        log_ratio = scored.log_ratio
        if self.level == "sequence":
            log_ratio = segment_sum(log_ratio, scored.segment_ids)[scored.segment_ids]
        ratio = ratios(log_ratio).clamp(max=self.cap)
        above, below = ratio > 1 + self.band_high, ratio < 1 - self.band_low
        weights = ratio.clone()
        metrics = {}
        for quarter in QUARTERS:
            sign, side = quarter.split("_")
            inside = (above if side == "above" else below) & ((advantages > 0) if sign == "good" else (advantages < 0))
            if (word := getattr(self, quarter)) != "ratio":
                weights[inside] = float(word)
            metrics[f"{quarter}_share"] = inside.sum() / max(1, inside.numel())
        return LossOutput(-weights * advantages * scored.log_probs, metrics, weights)


def label(cell: Cell) -> str:
    """A cell in a word, such as 0ρρ0 for PPO's clip."""
    return "".join(cell).replace("ratio", "ρ")


def overrides(cell: Cell) -> tuple[str, ...]:
    words = (f"algorithm.loss.{quarter}={word}" for quarter, word in zip(QUARTERS, cell, strict=True))
    return ("algorithm.credit=gae", f"algorithm.loss={__name__}:Quarters", *words)


def main_effects(scores: np.ndarray) -> np.ndarray:
    """Mean score of each level of each quarter, over all levels of the others.

    Args:
        scores: float[81, n]: of each cell and seed.

    Returns:
        float[4, 3].
    """
    by_level = scores.mean(axis=-1).reshape(3, 3, 3, 3)
    return np.stack([by_level.mean(axis=tuple(a for a in range(4) if a != axis)) for axis in range(4)])


def contrast_of_levels(scores: np.ndarray, quarter: int, level: int, other: int) -> np.ndarray:
    """Score of one level less that of another, in each of the 27 settings of the other quarters: float[27]."""
    by_level = np.moveaxis(scores.mean(axis=-1).reshape(3, 3, 3, 3), quarter, 0)
    return (by_level[level] - by_level[other]).reshape(-1)


def pair_means(scores: np.ndarray, quarter: int, other: int) -> np.ndarray:
    """Mean and standard deviation over the 9 settings of the two other quarters, for each pair of levels.

    Returns:
        float[3, 3, 2].
    """
    by_level = np.moveaxis(scores.mean(axis=-1).reshape(3, 3, 3, 3), (quarter, other), (0, 1)).reshape(3, 3, 9)
    return np.stack([by_level.mean(axis=-1), by_level.std(axis=-1, ddof=1)], axis=-1)


def fitted(scores: np.ndarray) -> np.ndarray:
    """Scores by least squares with the effect of each level and of each pair of levels of two quarters: float[81].

    A cell's own mean has the noise of its few runs; a fitted one is drawn from all of them.
    """
    levels = np.array([[LEVELS.index(word) for word in cell] for cell in CELLS])
    columns = [np.ones(len(CELLS))]
    for size in (1, 2):
        for quarters in itertools.combinations(range(4), size):
            for values in itertools.product((1, 2), repeat=size):
                columns.append(np.all(levels[:, quarters] == values, axis=1).astype(float))
    design = np.stack(columns, axis=1)
    coefficients, *_ = np.linalg.lstsq(design, scores.mean(axis=-1), rcond=None)
    return np.asarray(design @ coefficients)


def scores_of(by_label: dict[str, dict[Any, float]]) -> np.ndarray:
    """float[81, n] over the seeds that all cells have, from label -> seed -> score. A seed may be any key.

    Raises:
        ValueError: a cell is missing, or no seed is common to all.
    """
    missing = [label(cell) for cell in CELLS if label(cell) not in by_label]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(CELLS)} cells have no run, such as {missing[0]}: run --part quarters first"
        )
    seeds = sorted(set.intersection(*(set(by_label[label(cell)]) for cell in CELLS)))
    if not seeds:
        raise ValueError("no seed is common to all cells: run --part quarters first")
    return np.array([[by_label[label(cell)][seed] for seed in seeds] for cell in CELLS])


def best_cell(scores: np.ndarray) -> Cell:
    """The cell with the highest fitted score."""
    return CELLS[int(np.argmax(fitted(scores)))]


def best_of_pairs(scores: np.ndarray) -> list[Cell]:
    """For each of `OUTWEIGHING` the cell with the highest mean score of its runs."""
    means = dict(zip(CELLS, scores.mean(axis=-1).tolist(), strict=True))
    return [max((c for c in CELLS if (c[1], c[3]) == pair), key=lambda cell: means[cell]) for pair in OUTWEIGHING]


def variance_shares(scores: np.ndarray) -> dict[tuple[int, ...], float]:
    """Share of the variance between the 81 cells that each quarter and each pair of quarters explains.

    The design is balanced, so the parts are orthogonal and add up: what is left belongs to three and four quarters
    together, and to chance.
    """
    by_level = scores.mean(axis=-1).reshape(3, 3, 3, 3)
    centred = by_level - by_level.mean()
    shares: dict[tuple[int, ...], float] = {}
    effects: dict[tuple[int, ...], np.ndarray] = {}
    for size in (1, 2):
        for quarters in itertools.combinations(range(4), size):
            effect = centred.mean(axis=tuple(a for a in range(4) if a not in quarters), keepdims=True)
            effect = effect - sum(effects[(q,)] for q in quarters if size == 2)
            effects[quarters] = effect
            shares[quarters] = float((effect**2).mean() / (centred**2).mean())
    return shares
