"""V-trace against its definition as a double sum, in plain Python floats."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.algorithms.advantages import gae
from impala_llm.algorithms.vtrace import Steps, token_vtrace, turn_vtrace, vtrace, vtrace_packed

Row = dict[str, list[float]]


def reference(
    row: Row,
    bootstrap: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[float], list[float]]:
    """v_s = V_s + sum over t >= s of (prod over s <= i < t of γ_i c_i) δ_t, IMPALA equation 1, term by term."""
    log_rhos, discounts, rewards = row["log_rhos"], row["discounts"], row["rewards"]
    values = [*row["values"], bootstrap]
    steps = len(rewards)
    vs = []
    for s in range(steps):
        target, product = values[s], 1.0
        for t in range(s, steps):
            delta = rewards[t] + discounts[t] * values[t + 1] - values[t]
            target += product * min(rho_bar, math.exp(log_rhos[t])) * delta
            product *= discounts[t] * lam * min(c_bar, math.exp(log_rhos[t]))
        vs.append(target)
    following = [*vs[1:], bootstrap]
    advantages = [
        min(pg_rho_bar, math.exp(log_rhos[t])) * (rewards[t] + discounts[t] * following[t] - values[t])
        for t in range(steps)
    ]
    return vs, advantages


def random_row(rng: np.random.Generator, steps: int) -> Row:
    return {
        "log_rhos": rng.uniform(-5, 5, steps).tolist(),
        "discounts": rng.choice([0.0, 0.9, 0.99, 1.0], steps, p=[0.05, 0.35, 0.3, 0.3]).tolist(),
        "rewards": rng.normal(size=steps).tolist(),
        "values": rng.normal(size=steps).tolist(),
    }


def packed(rows: list[Row], dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    """log_rhos, discounts, rewards, values laid end to end, and segment_ids."""
    names = ("log_rhos", "discounts", "rewards", "values")
    columns = [torch.tensor([x for row in rows for x in row[name]], dtype=dtype) for name in names]
    lengths = torch.tensor([len(row["rewards"]) for row in rows])
    return columns, torch.repeat_interleave(torch.arange(len(rows)), lengths)


CAPS = [
    {},
    {"rho_bar": 2.0, "c_bar": 0.5, "pg_rho_bar": 3.0, "lam": 0.9},
    {"rho_bar": math.inf, "c_bar": 1.0, "pg_rho_bar": math.inf, "lam": 0.5},
    {"c_bar": 0.0},
    {"lam": 0.0},
]


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("lengths", [[1], [5], [1, 1, 1], [31, 32, 33], [70, 1, 0, 65, 2], [130]])
def test_packed_equals_the_double_sum(lengths: list[int], caps: dict[str, float]) -> None:
    rng = np.random.default_rng(sum(lengths))
    rows = [random_row(rng, steps) for steps in lengths]
    bootstrap = rng.normal(size=len(rows))
    columns, segment_ids = packed(rows)
    out = vtrace_packed(*columns, torch.tensor(bootstrap), segment_ids, **caps)
    expected = [reference(row, b, **caps) for row, b in zip(rows, bootstrap, strict=True)]
    np.testing.assert_allclose(out.vs, [v for vs, _ in expected for v in vs], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(out.pg_advantages, [a for _, adv in expected for a in adv], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, 4), (7, 3), (32, 2), (33, 2), (100, 2)])
def test_padded_equals_the_double_sum(steps: int, batch: int, caps: dict[str, float]) -> None:
    rng = np.random.default_rng(steps)
    rows = [random_row(rng, steps) for _ in range(batch)]
    bootstrap = rng.normal(size=batch)
    names = ("log_rhos", "discounts", "rewards", "values")
    columns = [torch.tensor([row[name] for row in rows], dtype=torch.float64).T for name in names]
    out = vtrace(*columns, torch.tensor(bootstrap), **caps)
    for b, row in enumerate(rows):
        vs, advantages = reference(row, bootstrap[b], **caps)
        np.testing.assert_allclose(out.vs[:, b], vs, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(out.pg_advantages[:, b], advantages, rtol=1e-10, atol=1e-10)


def test_scan_over_three_levels_equals_the_recursion() -> None:
    rng = np.random.default_rng(3)
    steps = 32 * 32 * 2 + 5
    terms, log_rhos = rng.normal(size=steps), rng.uniform(-0.2, 0.2, steps)
    out = vtrace_packed(
        torch.tensor(log_rhos),
        torch.full((steps,), 0.999, dtype=torch.float64),
        torch.tensor(terms),
        torch.zeros(steps, dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(steps, dtype=torch.int64),
        rho_bar=math.inf,
        c_bar=math.inf,
    )
    expected, following = np.empty(steps), 0.0
    for t in reversed(range(steps)):
        following = math.exp(log_rhos[t]) * (terms[t] + 0.999 * following)  # V = 0, so v_t = ρ_t (r_t + γ v_{t+1})
        expected[t] = following
    np.testing.assert_allclose(out.vs, expected, rtol=1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_rows_do_not_see_each_other(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, steps) for steps in lengths]
    bootstrap = torch.tensor(rng.normal(size=len(rows)))
    columns, segment_ids = packed(rows)
    together = vtrace_packed(*columns, bootstrap, segment_ids)
    for i, row in enumerate(rows):
        single, zeros = packed([row])
        alone = vtrace_packed(*single, bootstrap[i : i + 1], zeros)
        torch.testing.assert_close(together.vs[segment_ids == i], alone.vs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            together.pg_advantages[segment_ids == i], alone.pg_advantages, rtol=1e-12, atol=1e-12
        )


def test_products_that_overflow_stay_in_their_row() -> None:
    # e^20 a step for 200 steps is beyond float32; the short row in front ends at a factor of 0
    lengths = [3, 200]
    segment_ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    log_rhos = torch.cat([torch.zeros(3), torch.full((200,), 20.0)])
    ones, zeros = torch.ones(203), torch.zeros(203)
    out = vtrace_packed(log_rhos, ones, zeros, zeros, torch.zeros(2), segment_ids, rho_bar=math.inf, c_bar=math.inf)
    assert torch.equal(out.vs, zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_terminal_reward_reaches_every_step(dtype: torch.dtype) -> None:
    lengths, scores = [1, 50, 7, 64], [0.25, 1.0, 0.0, 0.5]
    segment_ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    count = len(segment_ids)
    rewards = torch.zeros(count, dtype=dtype)
    rewards[torch.tensor(lengths).cumsum(0) - 1] = torch.tensor(scores, dtype=dtype)
    values = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
    zeros, ones = torch.zeros(count, dtype=dtype), torch.ones(count, dtype=dtype)
    out = vtrace_packed(zeros, ones, rewards, values, torch.zeros(4, dtype=dtype), segment_ids)
    returns = torch.tensor(scores, dtype=dtype)[segment_ids]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out.vs, returns, rtol=0, atol=tolerance)
    torch.testing.assert_close(out.pg_advantages, returns - values, rtol=0, atol=tolerance)
    assert out.vs.dtype == dtype


def test_targets_carry_no_gradient_and_inputs_are_left_alone() -> None:
    columns, segment_ids = packed([random_row(np.random.default_rng(0), 40)])
    values = columns[3].requires_grad_()
    before = [column.detach().clone() for column in columns]
    out = vtrace_packed(*columns, torch.ones(1, dtype=torch.float64), segment_ids)
    assert not out.vs.requires_grad and not out.pg_advantages.requires_grad
    padded = vtrace(*(c[:, None] for c in columns[:3]), values[:, None], torch.ones(1, dtype=torch.float64))
    assert not padded.vs.requires_grad
    for column, copy in zip(columns, before, strict=True):
        assert torch.equal(column.detach(), copy)


def test_empty_input_gives_empty_output() -> None:
    none = torch.zeros(0)
    out = vtrace_packed(none, none, none, none, torch.zeros(2), torch.zeros(0, dtype=torch.int64))
    assert out.vs.shape == (0,) and out.pg_advantages.shape == (0,)
    rectangle = torch.zeros(0, 3)
    assert vtrace(rectangle, rectangle, rectangle, rectangle, torch.zeros(3)).vs.shape == (0, 3)


# Two episodes: turns 0, 1, 2 and turns 3, 4, of 2, 1, 3, 1, 2 action tokens.
TURN_IDS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4])
TURN_SEGMENT_IDS = torch.tensor([0, 0, 0, 1, 1])
TOKEN_LOG_RATIOS = torch.tensor([0.4, -1.0, 0.3, -0.2, 0.005, -0.9, 2.0, -0.004, 0.7], dtype=torch.float64)
TURN_REWARDS = torch.tensor([0.1, 0.0, 1.0, -0.5, 0.25], dtype=torch.float64)
TURN_VALUES = torch.tensor([0.3, -0.2, 0.6, 0.1, 0.9], dtype=torch.float64)
TURN_BOOTSTRAP = torch.tensor([0.0, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("dead_band", [0.0, 0.01])
@pytest.mark.parametrize("ratio", ["geometric", "product"])
def test_turns_equal_the_double_sum_over_turns(ratio: str, dead_band: float) -> None:
    caps = {"rho_bar": 1.5, "c_bar": 1.1, "lam": 0.95}
    out = turn_vtrace(
        TOKEN_LOG_RATIOS, Steps(TURN_IDS, TURN_SEGMENT_IDS, TURN_REWARDS, TURN_VALUES, TURN_BOOTSTRAP),
        discount=0.9, ratio=ratio, dead_band=dead_band, **caps,
    )  # fmt: skip
    noise = 0.0 if dead_band else 1.0  # of the tokens at 0.005 and -0.004
    sums = [0.4 - 1.0, 0.3, -0.2 + 0.005 * noise - 0.9, 2.0, -0.004 * noise + 0.7]
    log_ratios = [s / n for s, n in zip(sums, [2, 1, 3, 1, 2], strict=True)] if ratio == "geometric" else sums
    np.testing.assert_allclose(out.log_ratios, log_ratios, rtol=1e-12)
    for episode, turns in enumerate([[0, 1, 2], [3, 4]]):
        row = {
            "log_rhos": [log_ratios[k] for k in turns],
            "discounts": [0.9] * len(turns),
            "rewards": TURN_REWARDS[turns].tolist(),
            "values": TURN_VALUES[turns].tolist(),
        }
        vs, _ = reference(row, float(TURN_BOOTSTRAP[episode]), **caps)
        following = [*vs[1:], float(TURN_BOOTSTRAP[episode])]
        np.testing.assert_allclose(out.vs[turns], vs, rtol=1e-12)
        # no ratio: the loss weights each token by its own
        advantages = [row["rewards"][k] + 0.9 * following[k] - row["values"][k] for k in range(len(turns))]
        np.testing.assert_allclose(out.advantages[turns], advantages, rtol=1e-12)


def test_one_turn_of_one_token_is_the_textbook() -> None:
    columns, segment_ids = packed([random_row(np.random.default_rng(5), steps) for steps in (4, 9)])
    log_rhos, _, rewards, values = columns
    discounts = torch.full_like(rewards, 0.97)
    bootstrap = torch.tensor([0.5, -0.5], dtype=torch.float64)
    tokens = vtrace_packed(log_rhos, discounts, rewards, values, bootstrap, segment_ids, pg_rho_bar=2.0)
    turns = turn_vtrace(log_rhos, Steps(torch.arange(13), segment_ids, rewards, values, bootstrap), discount=0.97)
    torch.testing.assert_close(turns.vs, tokens.vs)
    torch.testing.assert_close(turns.advantages * log_rhos.exp().clamp(max=2.0), tokens.pg_advantages)


@pytest.mark.parametrize("dead_band", [0.0, 0.01])
def test_tokens_equal_the_double_sum_over_tokens(dead_band: float) -> None:
    caps = {"rho_bar": 1.5, "c_bar": 1.1, "lam": 0.95}
    values = torch.linspace(-1, 1, 9, dtype=torch.float64)
    out = token_vtrace(
        TOKEN_LOG_RATIOS, Steps(TURN_IDS, TURN_SEGMENT_IDS, TURN_REWARDS, values, TURN_BOOTSTRAP),
        discount=0.9, dead_band=dead_band, **caps,
    )  # fmt: skip
    log_ratios = [0.0 if abs(x) < dead_band else x for x in TOKEN_LOG_RATIOS.tolist()]
    assert out.log_ratios.tolist() == log_ratios
    # the reward of a turn and its discount come with its last token: tokens 1, 2, 5 and 6, 8
    rewards = [0.0, 0.1, 0.0, 0.0, 0.0, 1.0, -0.5, 0.0, 0.25]
    discounts = [1.0, 0.9, 0.9, 1.0, 1.0, 0.9, 0.9, 1.0, 0.9]
    for episode, tokens in enumerate([range(0, 6), range(6, 9)]):
        here = slice(tokens.start, tokens.stop)
        row = {"log_rhos": log_ratios[here], "discounts": discounts[here], "rewards": rewards[here]}
        row["values"] = values[here].tolist()
        vs, _ = reference(row, float(TURN_BOOTSTRAP[episode]), **caps)
        following = [*vs[1:], float(TURN_BOOTSTRAP[episode])]
        steps = zip(rewards[here], discounts[here], following, row["values"], strict=True)
        advantages = [reward + gamma * after - value for reward, gamma, after, value in steps]
        np.testing.assert_allclose(out.vs[here], vs, rtol=1e-12)
        np.testing.assert_allclose(out.advantages[here], advantages, rtol=1e-12)


def test_tokens_and_turns_are_the_same_where_a_turn_is_a_token() -> None:
    ids, rows = torch.arange(9), torch.tensor([0] * 6 + [1] * 3)
    rewards, values = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    arguments = (TOKEN_LOG_RATIOS, Steps(ids, rows, rewards, values, TURN_BOOTSTRAP), 0.9)
    for a, b in zip(token_vtrace(*arguments), turn_vtrace(*arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_dead_band_takes_small_log_ratios_for_none(form: str) -> None:
    row = random_row(np.random.default_rng(11), 30)
    row["log_rhos"] = [x / 100 for x in row["log_rhos"]]
    within = {**row, "log_rhos": [0.0 if abs(x) < 0.02 else x for x in row["log_rhos"]]}
    assert within != row and any(within["log_rhos"])
    columns, segment_ids = packed([row])
    bootstrap = torch.tensor([0.5], dtype=torch.float64)
    caps = {"rho_bar": 2.0, "c_bar": 2.0, "pg_rho_bar": 2.0}
    if form == "packed":
        out = vtrace_packed(*columns, bootstrap, segment_ids, **caps, dead_band=0.02)
    else:
        out = vtrace(*(c[:, None] for c in columns), bootstrap, **caps, dead_band=0.02)
    vs, advantages = reference(within, 0.5, **caps)
    np.testing.assert_allclose(out.vs.flatten(), vs, rtol=1e-10)
    np.testing.assert_allclose(out.pg_advantages.flatten(), advantages, rtol=1e-10)


@pytest.mark.parametrize("extreme", [5.0, -5.0])
def test_extreme_ratios_in_float32(extreme: float) -> None:
    row = random_row(np.random.default_rng(7), 40)
    row["log_rhos"] = [extreme] * 40
    columns, segment_ids = packed([row], torch.float32)
    caps = {"rho_bar": 2.0, "c_bar": 1.0, "pg_rho_bar": 3.0}
    out = vtrace_packed(*columns, torch.tensor([0.25]), segment_ids, **caps)
    vs, advantages = reference(row, 0.25, **caps)
    np.testing.assert_allclose(out.vs, vs, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.pg_advantages, advantages, rtol=1e-4, atol=1e-4)


def test_nan_in_observations_and_padding_does_not_leak() -> None:
    # what is no action is not gathered; what lies behind the end of a padded row is not looked at
    rng = np.random.default_rng(2)
    rows = [random_row(rng, steps) for steps in (5, 9)]
    for row in rows:
        row["discounts"][-1] = 0.0
    columns, segment_ids = packed(rows)
    everything = [torch.full((40,), math.nan, dtype=torch.float64) for _ in columns]
    is_action = torch.zeros(40, dtype=torch.bool)
    is_action[torch.tensor([3, 4, 7, 8, 9, 15, 16, 17, 18, 20, 25, 31, 32, 39])] = True
    for full, column in zip(everything, columns, strict=True):
        full[is_action] = column
    bootstrap = torch.full((2,), math.nan, dtype=torch.float64)  # both ended: discount 0
    out = vtrace_packed(*(full[is_action] for full in everything), bootstrap, segment_ids)
    padded = [torch.full((12, 2), math.nan, dtype=torch.float64) for _ in columns]
    for b in range(2):
        for rectangle, column in zip(padded, columns, strict=True):
            rectangle[: len(rows[b]["rewards"]), b] = column[segment_ids == b]
    rectangles = vtrace(*padded, bootstrap)
    for b, row in enumerate(rows):
        vs, advantages = reference(row, 0.0)
        np.testing.assert_allclose(out.vs[segment_ids == b], vs, rtol=1e-12)
        np.testing.assert_allclose(rectangles.vs[: len(vs), b], vs, rtol=1e-12)
        np.testing.assert_allclose(rectangles.pg_advantages[: len(vs), b], advantages, rtol=1e-12)


def test_noise_halves_credit_over_tokens_but_not_over_turns() -> None:
    # 10 turns of 200 tokens, one reward at the end, no critic, noise of mean |l| = 0.011 and no staleness
    generator = torch.Generator().manual_seed(0)
    noise = 0.011 * math.sqrt(math.pi / 2) * torch.randn(2000, generator=generator)
    ones, zeros = torch.ones(2000), torch.zeros(2000)
    rewards = zeros.clone()
    rewards[-1] = 1.0
    row = torch.zeros(2000, dtype=torch.int64)
    over_tokens = vtrace_packed(noise, ones, rewards, zeros, torch.zeros(1), row)
    turn_ids = torch.arange(2000) // 200
    turn_rewards = torch.zeros(10)
    turn_rewards[-1] = 1.0
    over_turns = turn_vtrace(noise, Steps(turn_ids, row[:10], turn_rewards, torch.zeros(10), torch.zeros(1)))
    survives = math.exp(-0.0055 * 2000)  # E log min(1, e^l) = -mean|l|/2 a token
    assert math.log(over_tokens.vs[0]) == pytest.approx(math.log(survives), abs=1.0)
    assert over_turns.vs[0] > 0.98


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"log_rhos": torch.zeros(3)}, ValueError, "discounts has shape"),
        ({"log_rhos": torch.zeros(4, dtype=torch.float16)}, TypeError, "log_rhos has dtype torch.float16"),
        ({"values": torch.zeros(4, dtype=torch.float64)}, TypeError, "values has dtype"),
        ({"segment_ids": torch.tensor([0, 1, 0, 1])}, ValueError, "segment_ids decreases"),
        ({"segment_ids": torch.tensor([0, 0, 1, 2])}, ValueError, "segment_ids holds 2, but there are only 2"),
        ({"segment_ids": torch.tensor([-1, 0, 1, 1])}, ValueError, "segment_ids holds -1"),
        ({"segment_ids": torch.zeros(4)}, TypeError, "segment_ids has dtype"),
        ({"segment_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "segment_ids has shape"),
        ({"bootstrap_value": torch.zeros(2, 1)}, ValueError, "bootstrap_value has shape"),
        ({"rho_bar": 0.0}, ValueError, "rho_bar is 0.0"),
        ({"pg_rho_bar": math.nan}, ValueError, "pg_rho_bar is nan"),
        ({"c_bar": -1.0}, ValueError, "c_bar is -1.0"),
        ({"lam": 1.5}, ValueError, "lam is 1.5"),
        ({"dead_band": -0.1}, ValueError, "width is -0.1"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], error: type[Exception], match: str) -> None:
    good = {name: torch.zeros(4) for name in ("log_rhos", "discounts", "rewards", "values")}
    good |= {"bootstrap_value": torch.zeros(2), "segment_ids": torch.tensor([0, 0, 1, 1])}
    vtrace_packed(**good)
    with pytest.raises(error, match=match):
        vtrace_packed(**{**good, **change})


@pytest.mark.parametrize("discount", [-1.0, 5.0, math.nan])
def test_a_discount_outside_of_0_and_1_is_named_but_behind_the_end_of_a_padded_row(discount: float) -> None:
    rng = np.random.default_rng(0)
    columns, segment_ids = packed([random_row(rng, 6), random_row(rng, 6)])
    columns[1][:] = torch.tensor([1.0, 0.5, 0.9, 0.0, discount, 1.0] + [0.9] * 6)
    bootstrap = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"discounts holds {discount:g}: "):
        vtrace_packed(*columns, bootstrap, segment_ids)
    padded = [column.reshape(2, 6).T for column in columns]
    out = vtrace(*padded, bootstrap)
    short, zeros = [column[:4] for column in columns], segment_ids[:4]
    torch.testing.assert_close(out.vs[:4, 0], vtrace_packed(*short, bootstrap[:1], zeros).vs)
    padded[1] = padded[1].clone()
    padded[1][4, 0], padded[1][2, 1] = 1.0, discount
    with pytest.raises(ValueError, match=f"discounts holds {discount:g}: "):
        vtrace(*padded, bootstrap)
    with pytest.raises(ValueError, match=f"discounts holds {discount:g}: "):
        gae(padded[2], padded[3], bootstrap, padded[1])


def with_change(steps: Steps, change: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a recursion, of which some, or fields of the steps, are others."""
    fields = {name: change[name] for name in change if name in Steps._fields}
    others = {name: change[name] for name in change if name not in fields}
    return {"token_log_ratios": TOKEN_LOG_RATIOS, "steps": steps._replace(**fields), **others}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"turn_ids": TURN_IDS + 1}, ValueError, "turn_ids holds 5"),
        ({"turn_rewards": torch.zeros(4, dtype=torch.float64)}, ValueError, "turn_rewards has shape"),
        ({"turn_segment_ids": TURN_SEGMENT_IDS.flip(0)}, ValueError, "turn_segment_ids decreases"),
        ({"token_log_ratios": TOKEN_LOG_RATIOS.float()}, TypeError, "token_log_ratios has dtype"),
        ({"ratio": "arithmetic"}, ValueError, "ratio is 'arithmetic'"),
        ({"discount": 1.01}, ValueError, "discount is 1.01"),
        ({"dead_band": -0.1}, ValueError, "width is -0.1"),
    ],
)
def test_mistakes_in_turns_are_named(change: dict[str, object], error: type[Exception], match: str) -> None:
    steps = Steps(TURN_IDS, TURN_SEGMENT_IDS, TURN_REWARDS, TURN_VALUES, TURN_BOOTSTRAP)
    with pytest.raises(error, match=match):
        turn_vtrace(**with_change(steps, change))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"turn_ids": torch.tensor([0, 0, 1, 2, 2, 2, 4, 4, 4])}, ValueError, "turn_ids names 4 of the 5 turns"),
        ({"turn_ids": TURN_IDS.flip(0)}, ValueError, "turn_ids decreases"),
        ({"turn_segment_ids": TURN_SEGMENT_IDS + 1}, ValueError, "turn_segment_ids holds 2"),
        ({"values": TURN_VALUES}, ValueError, "token_values has shape"),
        ({"turn_rewards": TURN_REWARDS.float()}, TypeError, "turn_rewards has dtype"),
        ({"discount": -0.1}, ValueError, "discount is -0.1"),
    ],
)
def test_mistakes_in_tokens_are_named(change: dict[str, object], error: type[Exception], match: str) -> None:
    values = torch.zeros(9, dtype=torch.float64)
    steps = Steps(TURN_IDS, TURN_SEGMENT_IDS, TURN_REWARDS, values, TURN_BOOTSTRAP)
    token_vtrace(TOKEN_LOG_RATIOS, steps)
    with pytest.raises(error, match=match):
        token_vtrace(**with_change(steps, change))
