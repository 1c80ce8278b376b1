"""V-trace: value targets and advantages from data of an older policy (IMPALA, arXiv 1802.01561, section 4.1).

With l_t = log π(a_t|x_t) - log μ(a_t|x_t), ρ_t = min(ρ̄, e^l_t) and c_t = λ min(c̄, e^l_t):

    δ_t       = ρ_t (r_t + γ_t V_{t+1} - V_t)
    v_t - V_t = δ_t + γ_t c_t (v_{t+1} - V_{t+1})
    A_t       = min(ρ̄_pg, e^l_t) (r_t + γ_t v_{t+1} - V_t)

ρ̄ decides which policy's value is the fixed point, c̄ only how fast and how noisily it is reached. Past the last
step V is the bootstrap value: the learner's estimate where the episode was cut, 0 where it ended.

Two forms: `vtrace` on rectangles [T, B] and `vtrace_packed` on ragged rows laid end to end [N]. For the episodes of an
agent there are `turn_vtrace`, where a whole turn is one step of the recursion, and `token_vtrace`, where a token is.
With all ratios 1 it is GAE (arXiv 1506.02438), whose credit stands beside V-trace's at the end.
Observation tokens are no decisions and must not be in the input.

Invariant: nothing that is returned carries a gradient, no row sees another one, not even its NaN, and what follows a
discount of 0 is not seen either.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from impala_llm.algorithms import kernels, scan
from impala_llm.algorithms.checks import (
    require_at_least,
    require_bootstrap,
    require_dtype_of,
    require_float,
    require_indices,
    require_positive,
    require_same_floats,
    require_segment_ids,
)
from impala_llm.algorithms.importance import Caps, apply_dead_band, ratios, segment_mean, segment_sum
from impala_llm.algorithms.interface import Credit, MetricValue, PackedBatch, Scored, Worth, credit
from impala_llm.settings import bounded, one_of


class VTraceOutput(NamedTuple):
    """Shape of the rewards, without gradient."""

    vs: Tensor
    """v_t: targets of the values."""
    pg_advantages: Tensor
    """A_t: factor of grad log π in the policy gradient, truncated ratio included."""


class TurnVTraceOutput(NamedTuple):
    """Per step of the recursion, without gradient: [K] over turns, [N] over tokens."""

    vs: Tensor
    """v_k: targets of the values at the starts of the steps."""
    advantages: Tensor
    """r_k + γ v_{k+1} - V_k WITHOUT a ratio: the loss weights each token by its own truncated ratio."""
    log_ratios: Tensor
    """log-ratio that the recursion used for each step, before truncation; a metric."""


class Steps(NamedTuple):
    """Steps of a recursion over the turns, or the action tokens, of episodes laid end to end; all but their ratios."""

    turn_ids: Tensor
    """int64[N], in [0, K): the turn of each action token, counted through all episodes."""
    turn_segment_ids: Tensor
    """int64[K], non-decreasing, in [0, num_segments): the episode of each turn."""
    turn_rewards: Tensor
    """float[K], sum of the rewards of each turn."""
    values: Tensor
    """float[K], V at the start of each turn; or float[N], V before each token."""
    bootstrap_value: Tensor
    """float[num_segments], V after the last step of each episode; 0 where it ended."""


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
    dead_band: float = 0.0,
) -> VTraceOutput:
    """V-trace on B rows of the same length T, time first.

    Args:
        log_rhos: float[T, B], l_t; clamped to ±20.
        discounts: float[T, B], γ_t in [0, 1]: what discounts the step after t, 0 where the episode ended with t.
        rewards: float[T, B], r_t, received after step t.
        values: float[T, B], V_t.
        bootstrap_value: float[B], V after the last step; 0 where the episode ended.
        rho_bar, pg_rho_bar: caps > 0; infinity does not truncate.
        c_bar: cap >= 0. Above 1 the product of the c_t grows with the length of the row, and may overflow.
        lam: λ in [0, 1].
        dead_band: log-ratios smaller than this in absolute value count as 0, see `apply_dead_band`.

    Behind a step with discount 0 anything may lie, NaN too, as in the padding of a row that ended early. Rows that were
    cut at different times, each with a bootstrap value, are for `vtrace_packed`.

    Raises:
        TypeError, ValueError: wrong dtype, shape or cap; a discount outside of [0, 1], on the CPU, up to the first 0 of
            its row. On a GPU discounts are not looked at, since that would wait for it.
    """
    require_same_floats(
        ("log_rhos", log_rhos), ("discounts", discounts), ("rewards", rewards), ("values", values), ndim=2
    )
    require_bootstrap(bootstrap_value, values)
    _require_caps(rho_bar, c_bar, pg_rho_bar, lam)
    if values.numel() == 0:
        return VTraceOutput(values.clone(), values.clone())

    ratio = ratios(apply_dead_band(log_rhos, dead_band))
    loops = kernels if values.device.type == "cpu" else scan
    vs, advantages = loops.padded_targets(ratio, discounts, rewards, values, bootstrap_value, Caps(rho_bar, c_bar, lam))
    return VTraceOutput(vs, advantages.mul_(ratio.clamp_(max=pg_rho_bar)))


@torch.no_grad()
def vtrace_packed(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    lam: float = 1.0,
    dead_band: float = 0.0,
) -> VTraceOutput:
    """V-trace on rows of any lengths, laid end to end without padding.

    Args:
        log_rhos, discounts, rewards, values: float[N], as in `vtrace`.
        bootstrap_value: float[num_segments], V after the last step of each row.
        segment_ids: int64[N], non-decreasing, the row of each step; a row may be empty.
        rho_bar, c_bar, pg_rho_bar, lam, dead_band: as in `vtrace`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order or cap; on the CPU, a discount outside of [0, 1].
    """
    require_same_floats(
        ("log_rhos", log_rhos), ("discounts", discounts), ("rewards", rewards), ("values", values), ndim=1
    )
    _require_caps(rho_bar, c_bar, pg_rho_bar, lam)
    ratio = ratios(apply_dead_band(log_rhos, dead_band))
    vs, advantages = _packed_targets(
        ratio, discounts, rewards, values, bootstrap_value, segment_ids, "segment_ids", Caps(rho_bar, c_bar, lam)
    )
    return VTraceOutput(vs, advantages.mul_(ratio.clamp_(max=pg_rho_bar)))


@torch.no_grad()
def turn_vtrace(
    token_log_ratios: Tensor,
    steps: Steps,
    discount: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
    ratio: Literal["geometric", "product"] = "geometric",
    dead_band: float = 0.0,
) -> TurnVTraceOutput:
    """V-trace where one step is a whole turn: all tokens that the agent wrote between two observations.

    Over single tokens the product of the c_t decays by numerical noise alone, and a reward at the end of a long
    episode reaches nothing before it. Over turns the product has as many factors as the episode has decisions.

    The advantage that is returned is r_k + γ v_{k+1} - V_k. Unlike `VTraceOutput.pg_advantages` it has no ratio in
    it: the loss gives every token of the turn this advantage and its own truncated ratio min(C, e^l_t), so that one
    odd token does not weigh on the whole turn. Applying a turn's ratio here as well would correct twice.

    Args:
        token_log_ratios: float[N], l_t of the action tokens.
        steps: with values [K], of turns.
        discount: γ in [0, 1], a turn.
        rho_bar, c_bar, lam: as in `vtrace`, on the ratio of the turn.
        ratio: of a turn. `geometric`: e^(mean of l over its tokens). `product`: e^(sum), the exact one. A turn
            without tokens has ratio 1.
        dead_band: token log-ratios smaller than this in absolute value count as 0, see `apply_dead_band`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order, cap, discount or name of a ratio.
    """
    turn_ids, turn_segment_ids, turn_rewards, turn_values, bootstrap_value = steps
    require_float("token_log_ratios", token_log_ratios, ndim=1)
    require_same_floats(("turn_values", turn_values), ("turn_rewards", turn_rewards), ndim=1)
    require_dtype_of("token_log_ratios", token_log_ratios, "turn_values", turn_values)
    num_turns = turn_values.shape[0]
    require_indices("turn_ids", turn_ids, token_log_ratios.shape[0], num_turns)
    _require_caps(rho_bar, c_bar, 1.0, lam)
    _require_discount(discount)
    if ratio not in ("geometric", "product"):
        raise ValueError(f"ratio is {ratio!r}: choose geometric or product")

    over_tokens = segment_mean if ratio == "geometric" else segment_sum
    log_ratios = over_tokens(apply_dead_band(token_log_ratios, dead_band), turn_ids, num_turns)
    discounts = torch.full_like(turn_values, discount)
    vs, advantages = _packed_targets(
        ratios(log_ratios), discounts, turn_rewards, turn_values, bootstrap_value, turn_segment_ids, "turn_segment_ids",
        Caps(rho_bar, c_bar, lam),
    )  # fmt: skip
    return TurnVTraceOutput(vs, advantages, log_ratios)


@torch.no_grad()
def token_vtrace(
    token_log_ratios: Tensor,
    steps: Steps,
    discount: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lam: float = 1.0,
    dead_band: float = 0.0,
) -> TurnVTraceOutput:
    """V-trace where one step is one action token, on the same episodes as `turn_vtrace`.

    The reward of a turn comes with its last token, and only from there to the next turn is discounted: a value means
    the same under both. Numerical noise alone makes credit decay along an episode here, see `turn_vtrace`; `dead_band`
    is the remedy.

    Args:
        token_log_ratios: float[N], l_t of the action tokens.
        steps: with values [N], of tokens. `turn_ids` must not decrease, and every turn has a token.
        discount: γ in [0, 1], a turn.
        rho_bar, c_bar, lam, dead_band: as in `vtrace`.

    Returns:
        [N] each; the advantages without a ratio, as in `turn_vtrace`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order, cap or discount, a turn without tokens.
    """
    turn_ids, turn_segment_ids, turn_rewards, token_values, bootstrap_value = steps
    require_same_floats(("token_log_ratios", token_log_ratios), ("token_values", token_values), ndim=1)
    require_float("turn_rewards", turn_rewards, ndim=1)
    require_dtype_of("turn_rewards", turn_rewards, "token_values", token_values)
    num_turns = turn_rewards.shape[0]
    require_segment_ids("turn_ids", turn_ids, token_log_ratios.shape[0], num_turns)
    require_segment_ids("turn_segment_ids", turn_segment_ids, num_turns, bootstrap_value.shape[0])
    _require_caps(rho_bar, c_bar, 1.0, lam)
    _require_discount(discount)

    is_last = torch.ones_like(turn_ids, dtype=torch.bool)
    is_last[:-1] = turn_ids[1:] != turn_ids[:-1]
    if (num_full := int(is_last.sum())) != num_turns:
        raise ValueError(f"turn_ids names {num_full} of the {num_turns} turns: each one needs a token")
    rewards = torch.zeros_like(token_values).masked_scatter_(is_last, turn_rewards)
    discounts = torch.ones_like(token_values).masked_fill_(is_last, discount)
    log_ratios = apply_dead_band(token_log_ratios, dead_band)
    vs, advantages = _packed_targets(
        ratios(log_ratios), discounts, rewards, token_values, bootstrap_value, turn_segment_ids[turn_ids],
        "turn_segment_ids", Caps(rho_bar, c_bar, lam),
    )  # fmt: skip
    return TurnVTraceOutput(vs, advantages, log_ratios)


def _packed_targets(
    ratio: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    segment_ids: Tensor,
    segment_ids_name: str,
    caps: Caps,
) -> tuple[Tensor, Tensor]:
    """v_t and r_t + γ_t v_{t+1} - V_t, both [N], of rows laid end to end."""
    require_float("bootstrap_value", bootstrap_value, ndim=1)
    require_dtype_of("bootstrap_value", bootstrap_value, "values", values)
    require_segment_ids(segment_ids_name, segment_ids, values.shape[0], bootstrap_value.shape[0])
    if values.numel() == 0:
        return values.clone(), values.clone()
    loops = kernels if values.device.type == "cpu" else scan
    targets: tuple[Tensor, Tensor] = loops.packed_targets(
        ratio, discounts, rewards, values, bootstrap_value, segment_ids, caps
    )
    return targets


def _require_caps(rho_bar: float, c_bar: float, pg_rho_bar: float, lam: float) -> None:
    for name, cap in (("rho_bar", rho_bar), ("pg_rho_bar", pg_rho_bar)):
        require_positive(name, cap)
    require_at_least("c_bar", c_bar, 0.0)
    if not 0.0 <= lam <= 1.0:
        raise ValueError(f"lam is {lam}: λ must lie in [0, 1]")


def _require_discount(discount: float) -> None:
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount is {discount}: it must lie in [0, 1]")


@dataclass
class ValueCredit(Credit):
    """Advantages and targets of values by a recursion over the turns, or the action tokens, of an episode."""

    uses_values: ClassVar[bool] = True
    granularity: str = one_of("turn", "token")
    """One step of the recursion is a turn | token (the textbook; see algorithms/vtrace.py)."""
    lam: float = bounded(1.0, 0, 1)
    """λ: how far a difference of values is carried back."""
    value_coef: float = bounded(0.5, 0, 1000)
    """Weight of the value loss."""

    @abstractmethod
    def targets(self, scored: Scored, steps: Steps) -> tuple[Tensor, TurnVTraceOutput]:
        """Return the advantages of the steps, float[N], and the output of the recursion.

        Args:
            scored: the policy's log-probabilities and values of a micro-batch.
            steps: its N steps, tokens or turns by `granularity`.
        """

    def __call__(self, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
        by_token = self.granularity == "token"
        values = scored.values(batch.action_positions - 1 if by_token else batch.turn_value_positions)
        bootstrap = values.new_zeros(len(batch.lengths))
        cut = batch.bootstrap
        if bool(cut.any()):
            bootstrap[cut] = scored.values(batch.last_positions[cut]).detach()
        constant = values.detach()
        steps = Steps(batch.turn_ids, batch.turn_segment_ids, batch.turn_rewards, constant, bootstrap)
        advantages, target = self.targets(scored, steps)
        return Worth(
            advantages if by_token else advantages[batch.turn_ids],
            values,
            target.vs,
            batch.segment_ids if by_token else batch.turn_segment_ids,
            "tokens" if by_token else "turns",
            self.value_coef,
            self.measure(target),
        )

    def measure(self, target: TurnVTraceOutput) -> list[MetricValue]:
        """Return the metrics of a micro-batch.

        Args:
            target: output of the recursion.
        """
        return []


@credit("gae")
@dataclass
class GAE(ValueCredit):
    """The λ-return minus the value: V-trace without ratios, and so without correction for the age of the data."""

    def targets(self, scored: Scored, steps: Steps) -> tuple[Tensor, TurnVTraceOutput]:
        recursion = token_vtrace if self.granularity == "token" else turn_vtrace
        target = recursion(torch.zeros_like(scored.log_ratio), steps, self.discount, 1.0, 1.0, self.lam)
        return target.vs - steps.values, target


@credit("vtrace")
@dataclass
class VTrace(ValueCredit):
    """V-trace: estimates the value of the learner's policy from data of an older policy."""

    metrics = {
        "ratio/rho_clip_share": "share of ratios above rho_bar, which the value targets truncate",
        "ratio/c_clip_share": "share of ratios above c_bar, which the trace truncates",
    }
    rho_bar: float = bounded(1.0, 1e-3)
    """ρ̄, cap of the weight of a temporal difference; it decides what value is learned."""
    c_bar: float = bounded(1.0, 0)
    """c̄, cap of the weight with which later differences count; it decides how fast."""
    turn_ratio: str = one_of("geometric", "product")
    """Ratio of a turn: geometric (mean of its tokens' log-ratios) | product."""
    dead_band: float = bounded(0.0, 0)
    """Token log-ratios smaller than this count as 0 in the recursion."""

    @property
    def ignores_turn_ratio(self) -> bool:
        return self.granularity == "token"

    def targets(self, scored: Scored, steps: Steps) -> tuple[Tensor, TurnVTraceOutput]:
        rules = (self.discount, self.rho_bar, self.c_bar, self.lam)
        if self.granularity == "token":
            target = token_vtrace(scored.log_ratio, steps, *rules, self.dead_band)
        else:
            ratio: Any = self.turn_ratio  # checked by config.load
            target = turn_vtrace(scored.log_ratio, steps, *rules, ratio, self.dead_band)
        return target.advantages, target

    def measure(self, target: TurnVTraceOutput) -> list[MetricValue]:
        ratio, weight = ratios(target.log_ratios), float(len(target.vs))
        return [
            ("ratio/rho_clip_share", (ratio > self.rho_bar).float().mean().item(), weight),
            ("ratio/c_clip_share", (ratio > self.c_bar).float().mean().item(), weight),
        ]
