"""Other models' views of the policy's tokens: a teacher that reads more, and pairs as a policy gradient."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from impala_llm.algorithms.losses import Reinforce
from impala_llm.algorithms.preference import Preference, pair_advantages
from impala_llm.config import ConfigError, load
from impala_llm.engines.base import ModelRefused
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.packing import OutOfMemory, pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import Scorers, action_log_probs
from impala_llm.trainer import Trainer
from tests.learning.builders import (
    make_batch,
    make_config,
    make_trajectory,
    save_lm,
    trainer_with,
    varied,
)

RANKS = Ranks("cpu")


def test_a_teacher_reads_its_context_before_each_episode(tmp_path: Path) -> None:
    """Each row by itself, the context in front: the same log-probabilities of the same tokens."""
    directory = make_scratch_policy(tmp_path / "policy")
    config = load(
        [
            "model=scratch",
            f"run.dir={tmp_path}",
            "algorithm.credit=distillation",
            "algorithm.credit.teacher_context=hint b",
        ]
    )
    model = PolicyModel.from_pretrained(directory)
    scorers = Scorers(config, model, RANKS)
    rows = make_batch()
    (batch,) = pack(rows, 1000)
    found = scorers.teacher(batch)
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    context = torch.tensor(tokenizer.encode("hint b", add_special_tokens=False))
    assert len(context) == len("hint b")
    expected = []
    for index in batch.members:
        row = rows[index]
        tokens = torch.cat([context, torch.tensor(row.tokens, dtype=torch.int64)])
        with torch.no_grad():
            hidden = model.hidden(tokens, torch.arange(len(tokens)), torch.tensor([len(tokens)]))
            log_probs = model.logits(hidden).log_softmax(-1)
        at = torch.tensor(row.action_mask).nonzero()[:, 0] + len(context)
        expected.append(log_probs[at - 1, tokens[at]])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, action_log_probs(model, batch, 1.0), atol=1e-3)


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Settings are refused when they are read; where the policy is made from scratch, once it is there."""
    other, kl = make_scratch_policy(tmp_path / "other"), ["algorithm.kl_coef=0.1", "engine.max_length=128"]
    lm = save_lm(tmp_path / "lm")
    said = rf"algorithm.reference={other} has a vocabulary of 100 tokens, the policy one of 50: name a model"
    with pytest.raises(ConfigError, match=said):
        load([f"model.path={lm}", f"algorithm.reference={other}", *kl])
    config = load(["model=scratch", f"run.dir={tmp_path}", f"algorithm.reference={other}", *kl])
    with pytest.raises(ConfigError, match=said):
        Scorers(config, PolicyModel.from_pretrained(lm), RANKS)


@pytest.mark.parametrize("key", ["algorithm.reference", "algorithm.credit.teacher"])
def test_a_setting_that_names_a_model_without_all_weights_is_named(tmp_path: Path, key: str) -> None:
    lacking, lm = save_lm(tmp_path / "lacking"), save_lm(tmp_path / "lm")
    weights = load_file(lacking / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    words = ["algorithm.kl_coef=0.1"] if key == "algorithm.reference" else ["algorithm.credit=distillation"]
    config = load([f"model.path={lm}", *words, f"{key}={lacking}", "engine.max_length=128"])
    with pytest.raises(ModelRefused, match=f"{key}={lacking} lacks weights .*model.norm.weight; .*set {key}"):
        Scorers(config, PolicyModel.from_pretrained(lm), RANKS)


@pytest.mark.parametrize(
    ("words", "named", "fix"),
    [
        (["algorithm.kl_coef=0.1"], "algorithm.reference=null, the policy that", "model.lora.rank=16"),
        (
            ["algorithm.kl_coef=0.1", "learner.tensor_parallel=2"],
            "algorithm.reference=null, the policy that",
            "set model.lora.rank=16 and learner.tensor_parallel=1, ",
        ),
        (
            ["algorithm.kl_coef=0.1", "algorithm.reference="],
            "algorithm.reference=",
            "set algorithm.reference to a smaller",
        ),
        (
            ["algorithm.credit=distillation", "algorithm.credit.teacher="],
            "algorithm.credit.teacher=",
            "set algorithm.credit.teacher to a smaller",
        ),
    ],
)
def test_a_device_that_does_not_hold_another_model_is_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str, fix: str
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    lm = save_lm(tmp_path)
    words = [f"{word}{lm}" if word.endswith("=") else word for word in words]
    policy = PolicyModel.from_pretrained(lm)
    monkeypatch.setattr(PolicyModel, "to", full)
    with pytest.raises(OutOfMemory, match=f"memory does not suffice for {named}.* on cpu, .*{fix}"):
        Scorers(load([f"model.path={lm}", "engine.max_length=128", *words]), policy, RANKS)


def test_a_context_that_leaves_the_longest_episode_no_positions_is_refused(tmp_path: Path) -> None:
    """The policy has 256 positions."""
    scratch = make_scratch_policy(tmp_path / "policy")
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "lm"))
    words = ["model=scratch", f"run.dir={tmp_path}", "algorithm.credit=distillation", f"model.path={scratch}"]
    words += ["algorithm.credit.teacher_context=hint b"]
    said = "teacher_context has 6 tokens, .*engine.max_length=251 .*256 positions .*at most 250"
    with pytest.raises(ConfigError, match=said):
        Scorers(load([*words, "engine.max_length=251"]), model, RANKS)
    Scorers(load([*words, "engine.max_length=250"]), model, RANKS)


def test_a_teacher_is_asked_alone_whatever_would_shape_rewards(tmp_path: Path) -> None:
    """Settings of a file wait: no reference is loaded, and no reward is changed."""
    words = ["algorithm.credit=distillation", f"algorithm.credit.teacher={save_lm(tmp_path / 'teacher', seed=1)}"]
    trainer = trainer_with(tmp_path / "lm", *words, "engine.max_length=256")
    config = dataclasses.replace(trainer.config, algorithm=dataclasses.replace(trainer.config.algorithm))
    config.algorithm.overlong_tokens, config.algorithm.overlong_penalty = 250, 9.0
    config.algorithm.reward_kl_coef, config.algorithm.normalize_reward = 0.7, True
    shaped = Trainer(config, Ranks("cpu"), trainer.model)
    (batch,) = pack(make_batch(), 1000)
    assert shaped.scorers.reference(batch) is None
    shaped.update(varied(), version=3, progress=0.0)
    metrics = shaped.log.flush()
    assert "reward/shaping" not in metrics and metrics["optimizer/reward_divisor"] == 1.0


@pytest.mark.parametrize("old", [0, 1])
def test_a_pair_is_learned_from_whole_however_old_one_half_is(tmp_path: Path, old: int) -> None:
    words = ["algorithm=dpo", f"algorithm.reference={save_lm(tmp_path / 'reference')}", "engine.max_length=256"]
    rows = [_rewarded(make_trajectory(12, [(4, 12)], seed), 1.0 - seed) for seed in range(2)]
    gradients = []
    for versions in ((3, 3), (0, 3) if old == 0 else (3, 0)):
        trainer = trainer_with(tmp_path / "lm", *words, "learner.batch_size=2", "algorithm.max_staleness=2")
        aged = [
            dataclasses.replace(row, versions=np.where(row.action_mask, version, -1).astype(np.int32))
            for row, version in zip(rows, versions, strict=True)
        ]
        trainer.update(Batch(tuple(aged), (1.0,) * 2, (0, 0), 1.0), 3, 0.0)
        gradients.append(trainer.log.flush()["optimizer/gradient_norm"])
    assert gradients[0] == gradients[1] > 0


def test_pairs_are_the_gradient_of_dpo() -> None:
    torch.manual_seed(0)
    log_probs, reference = torch.randn(8), torch.randn(8)
    scores, groups = torch.tensor([0.0, 1, 0.5, 0.5, 0.2, 0.9, 0.1, 0.4]), torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    found = pair_advantages(log_probs, reference, scores, groups, beta=0.7)
    policy = log_probs.clone().requires_grad_()
    total = torch.zeros(())
    for better, worse in ((1, 0), (5, 6)):  # group 1 is a tie
        margin = (policy[better] - reference[better]) - (policy[worse] - reference[worse])
        total = total - torch.nn.functional.logsigmoid(0.7 * margin)
    total.backward()
    torch.testing.assert_close(found.advantages, -policy.grad)
    assert found.num_pairs == 2 and found.loss == pytest.approx(total.item(), rel=1e-5)


def test_a_dpo_update_moves_the_weights_as_its_loss_says(tmp_path: Path) -> None:
    """By plain gradient descent on the loss written out, over micro-batches that part the pairs."""
    directory = save_lm(tmp_path / "lm")
    config = make_config(Preference(beta=0.3), Reinforce(), group_size=2, aggregate="sequence_mean_token_sum")
    config.model.path = str(directory)
    config.learner.token_budget, config.learner.max_grad_norm = 24, 1e9
    rows = [make_trajectory(12, [(4, 8), (9, 12)], seed, group_id=seed // 2) for seed in range(4)]
    rows = [_rewarded(row, score) for row, score in zip(rows, (0.1, 0.8, 0.6, 0.2), strict=True)]
    model = PolicyModel.from_pretrained(directory)
    with torch.no_grad():
        for p in model.lm.parameters():
            p.add_(0.01 * torch.randn_like(p))  # away from the reference
    trainer = Trainer(config, Ranks("cpu"), model)
    gradients: list[torch.Tensor] = []

    def record(update: int, progress: float, skip: bool) -> object:
        gradients.extend(p.grad.clone() for p in model.lm.parameters() if p.grad is not None)
        return step(update, progress, skip)

    step = trainer.optimizer.step
    trainer.optimizer.step = record  # type: ignore[method-assign,assignment]
    before = {name: p.detach().clone() for name, p in model.lm.named_parameters()}
    trainer.update(Batch(tuple(rows), (1.0,) * 4, (0, 0, 1, 1), 1.0), 3, 0.0)

    model.lm.load_state_dict(before, strict=False)
    model.zero_grad()
    reference = PolicyModel.from_pretrained(directory)
    loss = torch.zeros(())
    for better, worse in ((1, 0), (2, 3)):
        margin = torch.zeros(())
        for index, sign in ((better, 1), (worse, -1)):
            for scorer, side in ((model, 1), (reference, -1)):
                margin = margin + sign * side * _sum_log_probs(scorer, rows[index])
        loss = loss - torch.nn.functional.logsigmoid(0.3 * margin) / 2
    loss.backward()
    expected = [p.grad for p in model.lm.parameters() if p.grad is not None]
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


def _rewarded(row, reward):
    rewards = np.zeros_like(row.rewards)
    rewards[row.turns[-1, 1] - 1] = reward
    return dataclasses.replace(row, rewards=rewards)


def _sum_log_probs(model: PolicyModel, row) -> torch.Tensor:
    tokens = torch.tensor(row.tokens, dtype=torch.int64)
    hidden = model.hidden(tokens, torch.arange(len(tokens)), torch.tensor([len(tokens)]))
    log_probs = model.logits(hidden).log_softmax(-1)
    at = torch.tensor(row.action_mask).nonzero()[:, 0]
    return log_probs[at - 1, tokens[at]].sum()
