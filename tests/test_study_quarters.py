"""Part (b) of the study: the weights of the quarters, and what is drawn from 81 losses, by their definitions."""

import itertools
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from impala_llm.algorithms.interface import Scored
from impala_llm.algorithms.losses import ppo_clip, truncated_is
from impala_llm.config import load
from tests.test_study_plan import as_scored
from tools import _study_plan as plan
from tools import _study_quarters as quarter
from tools import _study_stats as stats
from tools import study

LOG_RATIOS = torch.tensor([-1.0, -0.1, 0.1, 0.5, -1.0, -0.1, 0.1, 0.5])
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0])


def scored() -> Scored:
    behaviour = torch.full((8,), -2.0)
    segments = torch.arange(8) // 4
    log_probs = (behaviour + LOG_RATIOS).requires_grad_()
    return Scored(log_probs, torch.zeros(8), behaviour, segments, torch.zeros(8).long(), 1, lambda indices: indices)


def gradient_of(per_token: torch.Tensor, log_probs: torch.Tensor) -> list[float]:
    [gradient] = torch.autograd.grad(per_token.sum(), log_probs)
    return gradient.tolist()


def gradient_of_cell(cell: quarter.Cell, level: str = "token") -> list[float]:
    tokens = scored()
    loss = quarter.Quarters(*cell, level=level)
    return gradient_of(loss(tokens, ADVANTAGES).per_token, tokens.log_probs)


def test_the_cells_of_named_losses_have_their_gradients() -> None:
    tokens = scored()
    clipped = ppo_clip(tokens.log_probs, tokens.behaviour_log_probs, ADVANTAGES, 0.2, 0.28).per_token
    of_clip = gradient_of(clipped, tokens.log_probs)
    assert gradient_of_cell(("0", "ratio", "ratio", "0")) == pytest.approx(of_clip)
    assert gradient_of_cell(("ratio",) * 4) == pytest.approx((-LOG_RATIOS.exp() * ADVANTAGES).tolist())
    outside = [0, 3, 4, 7]
    capped = truncated_is(tokens.log_probs, tokens.behaviour_log_probs, ADVANTAGES, 1.0).per_token
    of_cap = gradient_of(capped, tokens.log_probs)
    of_cell = gradient_of_cell(("1", "ratio", "1", "ratio"))
    assert [of_cell[n] for n in outside] == pytest.approx([of_cap[n] for n in outside])


def test_a_quarter_is_outside_of_the_band_and_its_share_is_logged() -> None:
    gradients = gradient_of_cell(("0", "0", "0", "0"))
    assert [g == 0 for g in gradients] == [True, False, False, True] * 2
    metrics = quarter.Quarters()(scored(), ADVANTAGES).metrics
    assert {name: float(value) for name, value in metrics.items()} == {f"{q}_share": 0.125 for q in quarter.QUARTERS}


def test_weights_are_capped_and_ratios_of_episodes_are_products() -> None:
    tokens = scored()
    weights = quarter.Quarters(level="sequence")(tokens, ADVANTAGES).weights
    assert weights.tolist() == pytest.approx([float(LOG_RATIOS[:4].sum().exp())] * 8)
    assert float(quarter.Quarters(cap=1.5)(tokens, ADVANTAGES).weights.max()) == 1.5


def test_every_cell_is_a_setting_of_its_own_and_the_learner_accepts_it() -> None:
    assert len(set(quarter.CELLS)) == 81 == len({quarter.label(cell) for cell in quarter.CELLS})
    assert set(quarter.KNOWN) <= set(quarter.CELLS) and len(get_args(quarter.Cell)) == len(quarter.QUARTERS)
    loss = load(quarter.overrides(("0", "1", "ratio", "0"))).algorithm.loss
    assert [getattr(loss, name) for name in quarter.QUARTERS] == ["0", "1", "ratio", "0"]


def additive(weights: np.ndarray, pair: float = 0.0) -> np.ndarray:
    """float[81, 2]: scores that are sums of a number for each level, and `pair` where the first two are ρ."""
    scores = []
    for levels in itertools.product(range(3), repeat=4):
        score = sum(weights[q, level] for q, level in enumerate(levels)) + (pair if levels[:2] == (2, 2) else 0.0)
        scores.append([score + 0.1, score - 0.1])
    return np.array(scores)


def test_effects_of_levels_are_means_over_all_other_levels() -> None:
    weights = np.arange(12.0).reshape(4, 3) ** 1.5
    scores = additive(weights)
    assert np.diff(quarter.main_effects(scores), axis=1) == pytest.approx(np.diff(weights, axis=1))
    assert quarter.contrast_of_levels(scores, 2, 1, 0) == pytest.approx(np.full(27, weights[2, 1] - weights[2, 0]))
    assert quarter.fitted(scores) == pytest.approx(scores.mean(axis=1))
    shares = quarter.variance_shares(scores)
    spread = weights.var(axis=1)
    assert [shares[(q,)] for q in range(4)] == pytest.approx((spread / spread.sum()).tolist())
    assert sum(shares.values()) == pytest.approx(1.0)


def test_pairs_of_quarters_are_fitted_and_what_three_do_is_not() -> None:
    scores = additive(np.zeros((4, 3)), pair=1.0)
    assert quarter.fitted(scores) == pytest.approx(scores.mean(axis=1))
    assert quarter.best_cell(scores)[:2] == ("ratio", "ratio")
    assert quarter.variance_shares(scores)[(0, 1)] == pytest.approx(0.5, abs=0.01)
    means = quarter.pair_means(scores, 0, 1)
    assert means[..., 0].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]] and means.shape == (3, 3, 2)
    means = quarter.pair_means(additive(np.arange(12.0).reshape(4, 3)), 1, 3)
    of_others = np.arange(12.0).reshape(4, 3)[[0, 2]].mean(axis=1).sum()
    assert means[2, 0, 0] == pytest.approx(5 + 9 + of_others), "rows are the first quarter's levels"
    spread = np.std(np.add.outer(np.arange(3), np.arange(3)), ddof=1)
    assert means[..., 1] == pytest.approx(np.full((3, 3), spread))
    lonely = np.zeros((81, 1))
    lonely[quarter.CELLS.index(("0", "1", "0", "1"))] = 1.0
    assert quarter.fitted(lonely).max() < 0.5, "one cell's own score does not make it the best"


def test_the_best_of_each_pair_is_the_one_with_the_highest_mean() -> None:
    scores = np.zeros((81, 2))
    best = [("1", "1", "0", "ratio"), ("0", "1", "1", "0"), ("ratio", "ratio", "ratio", "0")]
    for cell in best:
        scores[quarter.CELLS.index(cell)] = [0.4, 0.6]
    scores[quarter.CELLS.index(("0", "0", "0", "0"))] = 1.0  # is in none of the pairs
    assert quarter.best_of_pairs(scores) == best


def test_what_is_built_comes_from_all_cells_and_is_confirmed_where_nobody_has_looked() -> None:
    good = {quarter.label(cell): 0.8 for cell in quarter.CELLS if cell[1] == "1" and cell[3] == "ratio"}
    built_names = {
        f"{quarter.label((a, '1', c, 'ratio'))}, sequence": 0.9 for a in quarter.LEVELS for c in quarter.LEVELS
    }
    finished = as_scored({"TOPR": 0.7, **good, **built_names})
    built = plan.built(range(2), finished)
    assert {run.evaluate_on for run in built} == {"validation"}
    assert all({"algorithm.loss.good_below=1", "algorithm.loss.bad_below=ratio"} <= set(run.overrides) for run in built)
    again = plan.built_again(range(2), finished)
    pairs = {
        tuple(sorted(w for w in run.overrides if "loss.good_below" in w or "loss.bad_below" in w)) for run in again
    }
    assert len(pairs) == 3 and len({run.method for run in again}) == 6
    confirmed = plan.confirm(range(10), finished)
    seeds = {run.seed for run in confirmed}
    earlier = [*plan.main(range(30), finished), *plan.quarters(range(2)), *built, *again, *plan.rates(range(3))]
    assert not seeds & {run.seed for run in earlier} and {run.evaluate_on for run in confirmed} == {"test"}
    methods = list(dict.fromkeys(run.method for run in confirmed))
    assert methods[:2] == ["PPO clip", "TOPR"] and methods[2] in built_names


def test_the_report_has_a_row_for_each_quarter_and_names_known_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 300)  # of constant data
    finished = as_scored({"0ρρ0": 0.6})
    tables = study.report_of_second("quarters", finished(plan.quarters(range(2))), tmp_path)
    assert "| A > 0, ρ < 1 |" in tables and "PPO's clip" in tables and "chance" in tables
    assert "| weight ρ | " in tables
    assert "no table yet" in study.report_of_second("quarters", finished(plan.quarters([0, 1])[:9]), tmp_path / "some")
    with pytest.raises(ValueError, match="80 of 81 cells have no run"):
        quarter.scores_of({"0000": {0: 0.5}})
