"""Every correction that a configuration can name reaches the gradient as its definition says."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.distillation import Distillation
from impala_llm.algorithms.interface import Credit, Loss, PackedBatch
from impala_llm.algorithms.losses import CISPO, GSPO, DecoupledPPO, PPOClip, Reinforce, TruncatedIS
from impala_llm.algorithms.stale_losses import M2PO, TOPR
from impala_llm.algorithms.vtrace import GAE, VTrace
from impala_llm.config import load
from impala_llm.learning.objective import Denominators, MicroBatchResult, Rows, Rules, objective
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.scoring import TokenScores, action_log_probs
from impala_llm.settings import Config
from tests.learning.builders import make_batch, make_config, save_lm

VERSION = 6  # three above that of the builders' trajectories


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    model = PolicyModel.from_pretrained(save_lm(tmp_path_factory.mktemp("lm")))
    torch.manual_seed(0)
    for p in model.value_head.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    (packed,) = pack(make_batch(), 1000)
    return packed


def settings(loss: Loss | None = None, credit: Credit | None = None, **algorithm: object) -> Config:
    return make_config(credit or GroupRelative(), loss or Reinforce(), **algorithm)


def run(
    config: Config,
    model: PolicyModel,
    batch: PackedBatch,
    advantages: Tensor | None = None,
    scores: TokenScores | None = None,
    **rules: float,
) -> MicroBatchResult:
    """With one denominator of 1, so that sums stay sums."""
    model.zero_grad()
    rows = Rows(torch.ones(len(batch.lengths)), advantages, scores=scores or TokenScores())
    outcome = objective(config, model, batch, rows, Rules(Denominators(1, 1, 1), VERSION, **rules))  # type: ignore[arg-type]
    outcome.loss.backward()
    return outcome


def gradient(model: PolicyModel) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.lm.parameters() if p.grad is not None])


def expected(model: PolicyModel, batch: PackedBatch, per_token: Tensor) -> Tensor:
    """Gradient of the sum of per_token · log π, per_token constant."""
    model.zero_grad()
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
    actions = batch.action_positions
    log_probs, _ = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], 1.0)
    (per_token * log_probs).sum().backward()
    return gradient(model)


ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0, 2.0, 0.0])


def weights_by_definition(name: str, log_pi: Tensor, log_mu: Tensor, advantages: Tensor, rows: Tensor) -> Tensor:
    """d loss / d log π of each token."""
    ratio = (log_pi - log_mu).exp()
    rising, falling = advantages > 0, advantages < 0
    if name == "reinforce":
        return -advantages
    if name == "truncated_is":
        return -ratio.clamp(max=1.5) * advantages
    if name == "sequence":
        total = torch.stack([(log_pi - log_mu)[rows == row].sum() for row in rows])
        return -total.exp().clamp(max=1.5) * advantages
    if name == "cispo":
        return -ratio.clamp(max=1.28) * advantages
    if name == "ppo_clip":
        free = ~((rising & (ratio > 1.28)) | (falling & ((ratio < 0.8) | (ratio > 3.0))))
        return torch.where(free, -ratio * advantages, 0.0)
    if name == "decoupled_ppo":  # all tokens are three versions old: the proximal policy is two thirds of the way
        weight, step = ((2 / 3) * (log_pi - log_mu)).exp(), ((1 / 3) * (log_pi - log_mu)).exp()
        free = ~((rising & (step > 1.28)) | (falling & ((step < 0.8) | (step > 3.0))))
        return torch.where(free, -weight.clamp(max=2.0) * step * advantages, 0.0)
    if name == "recomputed":  # π_prox is π: the ratio is 1, and the weight is all
        return -ratio.clamp(max=2.0) * advantages
    if name == "m2po":
        departs = (rising & (ratio > 1)) | (falling & (ratio < 1))
        squares = (log_pi - log_mu).square()
        left = squares[departs].sort().values.tolist()
        while sum(left) / len(left) > 0.5:
            left.pop()
        return torch.where(departs & (squares > left[-1]), 0.0, -ratio * advantages)
    if name == "topr":
        total = torch.stack([(log_pi - log_mu)[rows == row].sum() for row in rows])
        return -torch.where(falling, total.exp().clamp(max=1.0), 1.0) * advantages
    if name == "topr_token":
        return -torch.where(falling, ratio.clamp(0.1, 0.7), ratio.clamp(0.5, 2.0)) * advantages
    assert name == "gspo"
    result = torch.zeros_like(ratio)
    for row in rows.unique():
        mine = rows == row
        share, a = (log_pi - log_mu)[mine].mean().exp(), advantages[mine]
        free = ~(((a > 0) & (share > 1.28)) | ((a < 0) & ((share < 0.8) | (share > 3.0))))
        # each token of the row moves the row's mean, and with it all of the row's terms
        result[mine] = torch.where(free, -share * a, 0.0).mean()
    return result


LOSSES: dict[str, Loss] = {
    "reinforce": Reinforce(),
    "truncated_is": TruncatedIS(cap=1.5),
    "sequence": TruncatedIS(cap=1.5, level="sequence"),
    "cispo": CISPO(),
    "ppo_clip": PPOClip(),
    "decoupled_ppo": DecoupledPPO(proximal_cap=2.0),
    "recomputed": DecoupledPPO(proximal="recomputed", proximal_cap=2.0),
    "gspo": GSPO(clip_low=0.2, clip_high=0.28),
    "m2po": M2PO(threshold=0.5),
    "topr": TOPR(),
    "topr_token": TOPR("token", 0.5, 2.0, 0.1, 0.7),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_each_loss_is_that_of_its_definition(model: PolicyModel, batch: PackedBatch, name: str) -> None:
    outcome = run(settings(LOSSES[name]), model, batch, ADVANTAGES)
    found = gradient(model)
    weights = weights_by_definition(
        name, outcome.log_probs, batch.behaviour_log_probs, ADVANTAGES[batch.segment_ids], batch.segment_ids
    )
    scale = float(found.abs().max())  # the weights of whole rows are small here
    assert scale > 1e-6
    torch.testing.assert_close(found, expected(model, batch, weights), atol=max(1e-5 * scale, 5e-8), rtol=1e-3)


def test_what_is_rejected_does_not_teach(model: PolicyModel, batch: PackedBatch) -> None:
    config = settings(reject="token", reject_low=0.5, reject_high=2.0)
    outcome = run(config, model, batch, ADVANTAGES)
    found = gradient(model)
    ratio = (outcome.log_probs - batch.behaviour_log_probs).exp()
    keep = (ratio >= 0.5) & (ratio <= 2.0)
    assert 0 < int(keep.sum()) < len(keep)
    weights = torch.where(keep, -ADVANTAGES[batch.segment_ids], 0.0)
    torch.testing.assert_close(found, expected(model, batch, weights), atol=1e-5, rtol=1e-4)
    share = dict((name, value) for name, value, _ in outcome.metrics)["ratio/rejected_share"]
    assert share == pytest.approx(1 - keep.float().mean().item())
    num_kept = int(keep.sum())
    assert outcome.weight_sums == pytest.approx((len(keep), num_kept, num_kept)), "1 each, and 0 for what is left out"


def test_icepop_weighs_by_the_ratio_and_leaves_tokens_out_on_both_of_its_sides(
    model: PolicyModel, batch: PackedBatch
) -> None:
    """Ring-1T (arXiv 2510.18855): the weight of a token is π/μ where that lies in [0.5, 5], and 0 elsewhere."""
    preset = load(["model=scratch", "algorithm=icepop"]).algorithm
    how = {"reject": preset.reject, "reject_low": preset.reject_low, "reject_high": preset.reject_high}
    assert how == {"reject": "token", "reject_low": 0.5, "reject_high": 5.0}
    batch = dataclasses.replace(batch, behaviour_log_probs=batch.behaviour_log_probs - 1)
    found = []
    for loss in (preset.loss, TruncatedIS(cap=5.0)):  # a cap that no token that is kept reaches
        assert isinstance(loss, Loss)
        outcome = run(settings(loss, **how), model, batch, ADVANTAGES)
        found.append(gradient(model))
    ratio = (outcome.log_probs - batch.behaviour_log_probs).exp()
    assert bool((ratio < 0.5).any()) and bool((ratio > 5).any())
    weights = torch.where((ratio >= 0.5) & (ratio <= 5.0), -ratio * ADVANTAGES[batch.segment_ids], 0.0)
    for each in found:
        torch.testing.assert_close(each, expected(model, batch, weights), atol=1e-5, rtol=1e-3)


def test_floored_importance_sampling_never_weighs_a_good_token_below_1(model: PolicyModel, batch: PackedBatch) -> None:
    """docs/algorithms.md: min(max(ρ, 1), 3) where A >= 0, min(ρ, 3) where A < 0, with the ratio of each token."""
    preset = load(["model=scratch", "algorithm=floored_is"]).algorithm
    assert preset.credit.name == "gae" and isinstance(preset.loss, Loss)
    moved = torch.arange(len(batch.behaviour_log_probs)) % 3 - 1.0  # some likelier than they were, some less
    batch = dataclasses.replace(batch, behaviour_log_probs=batch.behaviour_log_probs + 1.5 * moved)
    outcome = run(settings(preset.loss), model, batch, ADVANTAGES)
    found = gradient(model)
    advantages = ADVANTAGES[batch.segment_ids]
    ratio = (outcome.log_probs - batch.behaviour_log_probs).exp()
    good = advantages >= 0
    for there in (good & (ratio < 1), good & (ratio > 3), ~good & (ratio < 1), ~good & (ratio > 3)):
        assert bool(there.any())
    weights = torch.where(good, ratio.clamp(1, 3), ratio.clamp(max=3)) * -advantages
    torch.testing.assert_close(found, expected(model, batch, weights), atol=1e-5, rtol=1e-3)


def test_tokens_that_have_moved_enough_are_left_out(model: PolicyModel, batch: PackedBatch) -> None:
    config = settings(probability_limit=0.05)
    outcome = run(config, model, batch, ADVANTAGES)
    found = gradient(model)
    advantages = ADVANTAGES[batch.segment_ids]
    moved = outcome.log_probs.exp() - batch.behaviour_log_probs.exp()
    keep = ~(((advantages > 0) & (moved > 0.05)) | ((advantages < 0) & (moved < -0.05)))
    assert 0 < int(keep.sum()) < len(keep)
    weights = torch.where(keep, -advantages, 0.0)
    torch.testing.assert_close(found, expected(model, batch, weights), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_weights_that_steer_replay_are_those_of_the_loss(model: PolicyModel, batch: PackedBatch, name: str) -> None:
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0, 2.0, -3.0])
    outcome = run(settings(LOSSES[name]), model, batch, advantages)
    of_tokens = advantages[batch.segment_ids]
    slopes = weights_by_definition(name, outcome.log_probs, batch.behaviour_log_probs, of_tokens, batch.segment_ids)
    weights = -slopes / of_tokens
    assert outcome.weight_sums == pytest.approx(
        (len(weights), weights.sum().item(), weights.square().sum().item()), rel=1e-3
    )


@pytest.mark.parametrize("granularity", ["turn", "token"])
@pytest.mark.parametrize("advantage", ["vtrace", "gae"])
def test_advantages_of_the_value_head_by_turn_and_by_token(
    model: PolicyModel, batch: PackedBatch, advantage: str, granularity: str
) -> None:
    """Against the recursion written out step by step in float64, without corrections for gae."""
    kind = GAE if advantage == "gae" else VTrace
    config = settings(credit=kind(granularity=granularity, lam=0.9, discount=0.95, value_coef=0.0))
    outcome = run(config, model, batch)
    found = gradient(model)
    with torch.no_grad():
        hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
        actions = batch.action_positions
        at = actions - 1 if granularity == "token" else batch.turn_value_positions
        values = model.values(hidden[at]).double()
        last = model.values(hidden[batch.last_positions]).double()
    log_ratio = (outcome.log_probs - batch.behaviour_log_probs).double()
    num_tokens, turn_of = len(actions), batch.turn_ids
    if granularity == "token":
        ends = [i for i in range(num_tokens) if i + 1 == num_tokens or turn_of[i + 1] != turn_of[i]]
        rewards = torch.zeros(num_tokens, dtype=torch.float64)
        discounts = torch.ones(num_tokens, dtype=torch.float64)
        rewards[ends], discounts[ends] = batch.turn_rewards.double(), 0.95
        ratio, rows = log_ratio.exp(), batch.segment_ids
    else:
        num_turns = len(batch.turn_rewards)
        ratio = torch.stack([log_ratio[turn_of == k].mean().exp() for k in range(num_turns)])
        rewards, discounts = batch.turn_rewards.double(), torch.full((num_turns,), 0.95, dtype=torch.float64)
        rows = batch.turn_segment_ids
    if advantage == "gae":
        ratio = torch.ones_like(ratio)
    steps = torch.zeros_like(values)
    for i in reversed(range(len(values))):
        ends_row = i + 1 == len(values) or rows[i + 1] != rows[i]
        after = (last[rows[i]] if batch.bootstrap[rows[i]] else 0.0) if ends_row else values[i + 1]
        clipped = min(1.0, float(ratio[i]))
        carried = 0.0 if ends_row else steps[i + 1]
        delta = clipped * (rewards[i] + discounts[i] * after - values[i])
        steps[i] = delta + discounts[i] * 0.9 * clipped * carried  # v - V
    if advantage == "gae":
        by_step = steps
    else:
        targets = steps + values
        by_step = torch.zeros_like(values)
        for i in range(len(values)):
            ends_row = i + 1 == len(values) or rows[i + 1] != rows[i]
            after = (last[rows[i]] if batch.bootstrap[rows[i]] else 0.0) if ends_row else targets[i + 1]
            by_step[i] = rewards[i] + discounts[i] * after - values[i]
    of_tokens = by_step if granularity == "token" else by_step[turn_of]
    torch.testing.assert_close(found, expected(model, batch, -of_tokens.float()), atol=2e-3, rtol=1e-3)


def test_the_divergence_from_the_reference_is_pushed_down(
    model: PolicyModel, batch: PackedBatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = PolicyModel.from_pretrained(save_lm(tmp_path_factory.mktemp("other"), seed=1))
    scores = TokenScores(reference=action_log_probs(other, batch, 1.0))
    config = settings(kl_coef=0.5)
    outcome = run(config, model, batch, torch.zeros(6), scores=scores)
    found = gradient(model)
    assert scores.reference is not None
    weight = (outcome.log_probs - batch.behaviour_log_probs).exp().clamp(max=1.0)
    # Under π the mean of (log π - log ref) grad log π is the gradient of KL(π || ref).
    slope = outcome.log_probs - scores.reference
    torch.testing.assert_close(found, expected(model, batch, 0.5 * weight * slope), atol=1e-4, rtol=1e-3)
    figure = dict((name, value) for name, value, _ in outcome.metrics)["loss/reference_kl"]
    assert figure == pytest.approx(float((weight * ((-slope).exp() + slope - 1)).mean()), rel=1e-4), "k3"


def test_the_teacher_takes_the_place_of_the_advantage(model: PolicyModel, batch: PackedBatch) -> None:
    teacher = torch.linspace(-3.0, -0.1, len(batch.action_positions))
    config = settings(TruncatedIS(cap=math.inf), Distillation())
    outcome = run(config, model, batch, scores=TokenScores(teacher=teacher))
    found = gradient(model)
    ratio = (outcome.log_probs - batch.behaviour_log_probs).exp()
    weights = -ratio * (teacher - outcome.log_probs)
    torch.testing.assert_close(found, expected(model, batch, weights), atol=1e-3, rtol=1e-3)


def test_tokens_that_are_too_old_do_not_teach_and_the_others_of_their_row_do(
    model: PolicyModel, batch: PackedBatch
) -> None:
    versions = torch.full_like(batch.versions, VERSION - 1)
    versions[::2] = VERSION - 3
    mixed = dataclasses.replace(batch, versions=versions)
    advantages = ADVANTAGES[: len(batch.lengths)]
    config = settings()
    outcome = run(config, model, mixed, advantages, oldest_version=VERSION - 2)
    found = gradient(model)
    per_token = torch.where(versions >= VERSION - 2, -advantages[batch.segment_ids], 0.0)
    torch.testing.assert_close(found, expected(model, batch, per_token))
    metrics = {name: value for name, value, _ in outcome.metrics}
    assert (metrics["staleness/oldest"], metrics["staleness/newest"], metrics["staleness/mean"]) == (1.0, 1.0, 1.0)
    assert metrics["ratio/rejected_share"] == pytest.approx(float((versions < VERSION - 2).float().mean()))


def half_old(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """Every second token is too old for `oldest_version` VERSION - 2; and which are not."""
    versions = torch.full_like(batch.versions, VERSION - 1)
    versions[::2] = VERSION - 3
    return dataclasses.replace(batch, versions=versions), versions >= VERSION - 2


def test_the_ratio_of_a_row_is_that_of_the_tokens_that_teach(model: PolicyModel, batch: PackedBatch) -> None:
    """GSPO: a token that is too old moves neither the ratio of its row nor, through it, the policy."""
    mixed, keep = half_old(batch)
    config = settings(LOSSES["gspo"])
    outcome = run(config, model, mixed, ADVANTAGES, oldest_version=VERSION - 2)
    found = gradient(model)
    rows = batch.segment_ids[keep]
    weights = torch.zeros(len(keep))
    weights[keep] = weights_by_definition(
        "gspo", outcome.log_probs[keep], batch.behaviour_log_probs[keep], ADVANTAGES[rows], rows
    )
    scale = float(found.abs().max())
    assert scale > 1e-6
    torch.testing.assert_close(found, expected(model, batch, weights), atol=max(1e-5 * scale, 5e-8), rtol=1e-3)


def test_the_entropy_bonus_is_for_the_tokens_that_teach(model: PolicyModel, batch: PackedBatch) -> None:
    mixed, keep = half_old(batch)
    config = settings()
    run(config, model, mixed, torch.zeros(6), entropy_coef=0.5, oldest_version=VERSION - 2)
    found = gradient(model)
    model.zero_grad()
    hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)
    actions = batch.action_positions
    _, entropy = model.action_log_probs(hidden[actions - 1], batch.tokens[actions], 1.0)
    (-0.5 * entropy[keep].sum()).backward()
    torch.testing.assert_close(found, gradient(model))
