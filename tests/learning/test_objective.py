"""The loss of a batch: equal to its definition written out per trajectory, and the same however the batch is cut."""

import numpy as np
import pytest
import torch

from impala_llm.algorithms.advantages import GroupRelative
from impala_llm.algorithms.vtrace import VTrace
from impala_llm.learning.mismatch import Recomputed
from impala_llm.learning.objective import Denominators, Rows, Rules, objective
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.observability.metrics import MetricLog
from impala_llm.trajectory import Trajectory
from tests.learning.builders import make_config

VERSION = 5


def make_trajectories(model: PolicyModel, temperature: float, noise: float, bootstrap: bool) -> list[Trajectory]:
    """Six random episodes of one to three turns; μ is π of the same model plus noise."""
    rng = np.random.default_rng(0)
    trajectories = []
    for number in range(6):
        spans, length = [], int(rng.integers(2, 6))
        for _ in range(int(rng.integers(1, 4))):
            end = length + int(rng.integers(1, 5))
            spans.append((length, end))
            length = end + int(rng.integers(1, 4))
        num_tokens = spans[-1][1]
        tokens = rng.integers(4, 100, num_tokens).astype(np.int32)
        mask = np.zeros(num_tokens, bool)
        for start, end in spans:
            mask[start:end] = True
        with torch.no_grad():
            logits = model.lm.model.forward(
                torch.tensor(tokens[None].astype(np.int64)), segments=_one_segment(num_tokens)
            ).last_hidden_state
            log_probs = (model.logits(logits)[0] / temperature).log_softmax(-1)
        exact = np.zeros(num_tokens, np.float32)
        exact[1:] = log_probs[:-1].gather(1, torch.tensor(tokens[1:, None].astype(np.int64)))[:, 0].numpy()
        log_probs = np.where(mask, np.minimum(exact + noise * rng.standard_normal(num_tokens), 0.0), 0.0)
        rewards = np.zeros(num_tokens, np.float32)
        rewards[num_tokens - 1] = number / 6
        trajectories.append(
            Trajectory(
                tokens=tokens,
                action_mask=mask,
                behaviour_log_probs=log_probs.astype(np.float32),
                versions=np.where(mask, VERSION - number % 3, -1).astype(np.int32),
                rewards=rewards,
                turns=np.array(spans, np.int32),
                bootstrap=bootstrap and number % 2 == 0,
                episode_id=f"e{number}",
                group_id=number // 3,
                task_id=0,
                env="toy",
                actor_id="a",
                ticket_id=number,
                score=number / 6,
                success=False,
            )
        )
    return trajectories


def _one_segment(length: int):
    from impala_llm.learning.policy.attention import SegmentPlan

    return SegmentPlan(torch.tensor([length]))


@pytest.fixture
def model(tiny_model) -> PolicyModel:
    model = PolicyModel.from_pretrained(tiny_model)
    torch.manual_seed(0)
    for p in model.value_head.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


def gradient(config, model, trajectories, budget, advantages=None, weights=None):
    """Loss and gradient of the whole batch, over as many micro-batches as the budget gives."""
    counts = Denominators(
        sum(t.num_action_tokens for t in trajectories), sum(len(t.turns) for t in trajectories), len(trajectories)
    )
    weights = torch.ones(len(trajectories)) if weights is None else weights
    model.zero_grad()
    total, log = 0.0, MetricLog()
    for micro in pack(trajectories, budget):
        members = torch.tensor(micro.members)
        chosen = None if advantages is None else advantages[members]
        outcome = objective(config, model, micro, Rows(weights[members], chosen), Rules(counts, VERSION))
        outcome.loss.backward()
        total += outcome.loss.item()
        log.add_all(outcome.metrics + outcome.comparison.metrics)
    return total, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]), log.flush()


def plain_loss(config, model, trajectories, advantages=None):
    """The definition in float64, trajectory by trajectory, turn by turn, with V-trace as its sum over later turns."""
    credit, temperature = VTrace(), config.engine.temperature
    policy, value, tokens, turns = 0.0, 0.0, 0, 0
    for number, t in enumerate(trajectories):
        row = torch.tensor(t.tokens[None].astype(np.int64))
        hidden = model.lm.model(row, segments=_one_segment(t.num_tokens)).last_hidden_state[0]
        log_probs = (model.logits(hidden).double() / temperature).log_softmax(-1)
        values = model.values(hidden).double()
        spans = t.turns.tolist()
        logp = [log_probs[range(s - 1, e - 1), row[0, s:e]] for s, e in spans]
        mu = [torch.tensor(t.behaviour_log_probs[s:e]).double() for s, e in spans]
        ratio = [float((lp.detach() - m).mean().exp()) for lp, m in zip(logp, mu, strict=True)]
        v = [values[s - 1].item() for s, _ in spans] + [values[-1].item() if t.bootstrap else 0.0]
        r = [float(t.rewards[s:e].sum()) for s, e in spans]
        k_turns = len(spans)
        targets = []
        for k in range(k_turns):
            target = v[k]
            for j in range(k, k_turns):
                trace = np.prod([min(credit.c_bar, ratio[i]) for i in range(k, j)])
                target += trace * min(credit.rho_bar, ratio[j]) * (r[j] + v[j + 1] - v[j])
            targets.append(target)
        targets.append(v[-1])
        for k in range(k_turns):
            a = r[k] + targets[k + 1] - v[k] if advantages is None else float(advantages[number])
            w = (logp[k].detach() - mu[k]).exp().clamp(max=config.algorithm.loss.cap)
            policy = policy - (w * a * logp[k]).sum()
            value = value + 0.5 * (values[spans[k][0] - 1] - targets[k]) ** 2
            tokens += len(mu[k])
        turns += k_turns
    loss = policy / tokens
    return loss if advantages is not None else loss + credit.value_coef * value / turns


@pytest.mark.parametrize("advantage", ["vtrace", "group_relative"])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_loss_and_gradient_equal_the_definition(model, advantage, bootstrap):
    config = make_config(GroupRelative() if advantage == "group_relative" else VTrace())
    config.engine.temperature = 0.7
    trajectories = make_trajectories(model, 0.7, noise=0.5, bootstrap=bootstrap)
    advantages = torch.linspace(-1, 1, 6) if advantage == "group_relative" else None
    loss, grad, _ = gradient(config, model, trajectories, 1000, advantages)
    model.zero_grad()
    expected = plain_loss(config, model, trajectories, advantages)
    expected.backward()
    expected_grad = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    assert loss == pytest.approx(float(expected), abs=1e-5)
    torch.testing.assert_close(grad, expected_grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"])
def test_cutting_into_micro_batches_changes_nothing(model, aggregate):
    config = make_config()
    config.algorithm.aggregate = aggregate
    trajectories = make_trajectories(model, 1.0, noise=0.3, bootstrap=True)
    whole_loss, whole, whole_metrics = gradient(config, model, trajectories, 1000)
    budget = max(t.num_tokens for t in trajectories)
    cut_loss, cut, cut_metrics = gradient(config, model, trajectories, budget)
    assert len(pack(trajectories, budget)) >= 3
    assert cut_loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(cut, whole, atol=1e-6, rtol=1e-5)
    for name in whole_metrics:
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-6), name


def test_on_policy_ratio_is_one_and_nothing_is_clipped(model):
    config = make_config()
    _, _, metrics = gradient(config, model, make_trajectories(model, 1.0, 0.0, False), 1000)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ratio/ess"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/logprob_max"] < 1e-5


def test_temperature_is_the_engines(model):
    """Scored at another temperature than it was sampled with, the same policy looks like another one."""
    config = make_config()
    _, _, metrics = gradient(config, model, make_trajectories(model, 0.7, 0.0, False), 1000)
    assert metrics["ratio/k3"] > 1e-3


def test_weights_of_the_draw_scale_their_trajectories(model):
    config = make_config(GroupRelative())
    trajectories = make_trajectories(model, 1.0, 0.2, False)
    advantages = torch.linspace(-1, 1, 6)
    weights = torch.tensor([1.0, 0.5, 0.0, 1.0, 0.25, 1.0])
    _, weighted, _ = gradient(config, model, trajectories, 1000, advantages, weights)
    _, scaled, _ = gradient(config, model, trajectories, 1000, advantages * weights)
    torch.testing.assert_close(weighted, scaled, atol=1e-7, rtol=1e-5)


def test_value_loss_leaves_the_trunk_alone_unless_told(model):
    config = make_config()
    trajectories = make_trajectories(model, 1.0, 0.2, False)
    zero = make_config(VTrace(value_coef=0.0))
    _, with_value, _ = gradient(config, model, trajectories, 1000)
    _, without, _ = gradient(zero, model, trajectories, 1000)
    size = sum(p.numel() for p in model.lm.parameters())
    torch.testing.assert_close(with_value[:size], without[:size])
    model.value_trunk_gradient = True
    _, reaching, _ = gradient(config, model, trajectories, 1000)
    assert (reaching[:size] - without[:size]).abs().max() > 1e-5


def test_staleness_is_learner_version_minus_token_version(model):
    _, _, metrics = gradient(make_config(), model, make_trajectories(model, 1.0, 0.2, False), 1000)
    assert (metrics["staleness/newest"], metrics["staleness/oldest"]) == (0.0, 2.0)


def test_recomputed_log_probabilities_enter_the_ratios_and_not_the_comparison(model):
    """μ' = π of this forward for half of the rows, and half of what the engine said for the others."""
    trajectories = make_trajectories(model, 1.0, 0.4, False)
    (micro,) = pack(trajectories, 1000)
    counts = Denominators(len(micro.versions), len(micro.turn_ids), len(trajectories))
    is_new = micro.segment_ids % 2 == 0
    recomputed = Recomputed(micro.behaviour_log_probs / 2, is_new, share=1.0)
    advantages = torch.linspace(-1, 1, 6)
    plain, replaced = (
        objective(
            make_config(GroupRelative()), model, micro, Rows(torch.ones(6), advantages, given), Rules(counts, VERSION)
        )
        for given in (None, recomputed)
    )
    log_ratio = torch.where(is_new, 0.0, plain.log_probs - micro.behaviour_log_probs / 2)
    expected = -(log_ratio.exp().clamp(max=1.0) * advantages[micro.segment_ids] * plain.log_probs).mean()
    assert replaced.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert replaced.loss.item() != pytest.approx(plain.loss.item(), rel=1e-2)
    metrics = {name: value for name, value, _ in replaced.metrics}
    assert metrics["ratio/mean"] == pytest.approx(log_ratio.exp().mean().item(), rel=1e-5)
    assert replaced.comparison == plain.comparison
