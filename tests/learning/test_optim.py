"""The optimizer step: its schedule, its groups, its clip, and what a gradient that is not finite does."""

import math
from pathlib import Path

import pytest
import torch

from impala_llm.learning.optim import MOST_LEFT_OUT, NothingLearned, Optimizer, schedule
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.settings import LearnerConfig
from tests.learning.builders import save_lm


def test_the_schedule_rises_and_decays() -> None:
    config = LearnerConfig(warmup_updates=4, decay="linear", final_learning_rate_fraction=0.1)
    assert [schedule(config, update, 0.0) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule(config, 10, 0.5) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule(config, 10, 1.0) == pytest.approx(0.1)
    config.decay = "cosine"
    assert schedule(config, 10, 0.25) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    config.decay, config.warmup_updates = "constant", 0
    assert schedule(config, 0, 0.9) == 1.0


def fill_gradients(model: PolicyModel, size: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, size)


def copies(model: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(model: PolicyModel, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def make(tmp_path: Path, **changes: float) -> tuple[PolicyModel, Optimizer]:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    return model, Optimizer(model, LearnerConfig(warmup_updates=0, decay="constant", **changes))  # type: ignore[arg-type]


def test_a_first_step_moves_by_the_learning_rate_of_its_group(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, learning_rate=1e-3, value_learning_rate=1e-2, max_grad_norm=1e9)
    before = copies(model)
    fill_gradients(model, 1.0)
    result = optimizer.step(0, 0.0)
    assert not result.clipped and not result.skipped and result.learning_rate == 1e-3
    # Adam's first step is the learning rate against the gradient's sign, whatever the size
    for name, p in model.named_parameters():
        rate = 1e-2 if name.startswith("value_head") else 1e-3
        torch.testing.assert_close(p.detach(), before[name] - rate, atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for p in model.parameters())


def test_wide_layers_of_the_value_head_learn_as_much_slower(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path), value_hidden_size=256)
    config = LearnerConfig(warmup_updates=0, decay="constant", value_learning_rate=1e-2, max_grad_norm=1e9)
    optimizer = Optimizer(model, config)
    first, _, last = model.value_head
    before = copies(model)
    fill_gradients(model, 1.0)
    optimizer.step(0, 0.0)
    # 32 inputs, 256 inputs, and biases, which have one
    for name, p, rate in [
        ("0.weight", first.weight, 1e-2),
        ("0.bias", first.bias, 1e-2),
        ("2.weight", last.weight, 1e-2 * 64 / 256),
        ("2.bias", last.bias, 1e-2),
    ]:
        torch.testing.assert_close(p.detach(), before[f"value_head.{name}"] - rate, atol=1e-6, rtol=1e-5)


def test_only_matrices_of_the_policy_decay(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, learning_rate=1e-2, weight_decay=0.5)
    before = copies(model)
    fill_gradients(model, 0.0)
    optimizer.step(0, 0.0)
    assert moved(model, before) == {name for name, p in model.lm.named_parameters(prefix="lm") if p.ndim >= 2}


def test_the_norm_is_reported_before_the_clip(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, max_grad_norm=0.5)
    fill_gradients(model, 2.0)
    entries = sum(p.numel() for p in model.lm.parameters())
    result = optimizer.step(0, 0.0)
    assert result.clipped
    assert result.gradient_norm == pytest.approx(2.0 * math.sqrt(entries), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["lm", "value_head"])
def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path, bad: float, part: str) -> None:
    model, optimizer = make(tmp_path)
    before = copies(model)
    fill_gradients(model, 1.0)
    next(getattr(model, part).parameters()).grad.view(-1)[0] = bad
    assert optimizer.step(0, 0.0).skipped
    assert not moved(model, before)
    assert all(p.grad is None for p in model.parameters())
    fill_gradients(model, 1.0)
    assert not optimizer.step(1, 0.0).skipped
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_only_the_value_head_learns_while_it_warms_up(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, value_warmup_updates=1)
    before = copies(model)
    fill_gradients(model, 1.0)
    optimizer.step(0, 0.0)
    assert moved(model, before) == {f"value_head.{name}" for name, _ in model.value_head.named_parameters()}
    fill_gradients(model, 1.0)
    optimizer.step(1, 0.0)
    assert moved(model, before) == {name for name, _ in model.named_parameters()}


def test_the_policy_warms_up_after_the_value_head(tmp_path: Path) -> None:
    """Four updates of each: the policy begins with a quarter of its rate when the value head has all of its own."""
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    config = LearnerConfig(
        **{"learning_rate": 1e-3, "value_learning_rate": 1e-2, "warmup_updates": 4, "value_warmup_updates": 4},
        decay="constant",
        max_grad_norm=1e9,
    )
    optimizer = Optimizer(model, config)
    rates = []
    for update in range(5):
        before = copies(model)
        fill_gradients(model, 1.0)
        rates.append(optimizer.step(update, 0.0).learning_rate)
    assert rates == [0.0, 0.0, 0.0, 0.0, 0.25e-3]
    for name, p in model.named_parameters():
        rate = 1e-2 if name.startswith("value_head") else 0.25e-3
        torch.testing.assert_close(p.detach(), before[name] - rate, atol=1e-6, rtol=1e-4)


def test_a_step_that_is_to_be_skipped_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    before = copies(model)
    fill_gradients(model, 1.0)
    assert optimizer.step(0, 0.0, skip=True).skipped
    assert not moved(model, before)
    assert all(p.grad is None for p in model.parameters())


def test_steps_that_are_left_out_without_end_end_the_run(tmp_path: Path) -> None:
    _, optimizer = make(tmp_path)
    for _ in range(MOST_LEFT_OUT - 1):
        optimizer.step(0, 0.0, skip=True)
    optimizer.step(0, 0.0)
    for _ in range(MOST_LEFT_OUT - 1):
        optimizer.step(0, 0.0, skip=True)
    with pytest.raises(NothingLearned, match=f"{MOST_LEFT_OUT} optimizer steps in a row .*learner.learning_rate="):
        optimizer.step(0, 0.0, skip=True)


def test_an_optimizer_goes_on_from_the_state_of_another(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, value_warmup_updates=1)
    fill_gradients(model, 1.0)
    optimizer.step(0, 0.0)
    other = PolicyModel.from_pretrained(tmp_path)
    other.load_state_dict(model.state_dict())
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert state["lm.model.norm.weight.step"] == 0 and state["value_head.0.bias.step"] == 1
    resumed = Optimizer(other, LearnerConfig(warmup_updates=0, decay="constant", value_warmup_updates=1))
    resumed.load(lambda name, tensor: tensor.copy_(state[name]))
    for update in (1, 2):
        for one, its in ((model, optimizer), (other, resumed)):
            fill_gradients(one, -0.5)
            its.step(update, 0.0)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_state_is_taken_over_without_a_second_copy_of_it(tmp_path: Path) -> None:
    """Else a learner would need more memory to go on than it has trained with."""
    model, optimizer = make(tmp_path)
    fill_gradients(model, 1.0)
    optimizer.step(0, 0.0)
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    _, resumed = make(tmp_path)
    given: list[torch.Tensor] = []

    def read(name: str, tensor: torch.Tensor) -> None:
        given.append(tensor.copy_(state[name]))

    resumed.load(read)
    theirs = {tensor.data_ptr() for tensor in resumed.state_dict().values()}
    assert {tensor.data_ptr() for tensor in given} == theirs and len(given) == len(state)


def test_moments_come_with_the_first_step_and_not_again(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path)
    expected = 2 * sum(p.nbytes for p in model.parameters())
    assert (optimizer.bytes_to_come("cpu"), optimizer.bytes_to_come("cuda")) == (expected, 0)
    fill_gradients(model, 1.0)
    optimizer.step(0, 0.0)
    assert optimizer.bytes_to_come("cpu") == 0
