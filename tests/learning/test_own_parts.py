"""What an own loss or credit does wrong is named, with its setting and what is expected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from impala_llm.algorithms.interface import Credit, Loss, LossOutput, Scored, Worth
from impala_llm.learning.own_parts import PartFault, call_credit, call_loss

N = 3


class OwnLoss(Loss):
    """A user's loss that does what it is told."""

    def __init__(self, act: Callable[[Scored, torch.Tensor], Any]) -> None:
        super().__init__("mine:OwnLoss")
        self.act = act

    def __call__(self, scored: Scored, advantages: torch.Tensor) -> Any:
        return self.act(scored, advantages)


class OwnCredit(Credit):
    def __call__(self, scored: Scored, batch: Any, prepared: Any) -> Worth:
        return Worth(torch.zeros(2))


def scored() -> Scored:
    log_probs = torch.full((N,), -1.0, requires_grad=True)
    ids = torch.zeros(N, dtype=torch.int64)
    return Scored(log_probs, torch.ones(N), torch.full((N,), -1.0), ids, ids, 0, lambda places: places)


ONES = torch.ones(N)


@pytest.mark.parametrize(
    "act, said",
    [
        (
            lambda s, a: LossOutput((-a * s.log_probs).sum(), {}, ONES),
            r"per_token = a tensor of shape \[\].*shape \[3\]",
        ),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, ONES.long()), "weights = a tensor of shape .*dtype int64"),
        (lambda s, a: LossOutput(-a * s.log_probs, {}, None), "weights = a NoneType"),
        (lambda s, a: LossOutput(-a * s.log_ratio, {}, ONES), "without a gradient.*compute it from scored.log_probs"),
        (
            lambda s, a: LossOutput(-a * s.log_probs, {"x_share": ONES}, ONES),
            r"metric x_share = a tensor .*\[3\]",
        ),
        (lambda s, a: LossOutput(-a * s.log_probs, {"x_share": 0.5}, ONES), "metric x_share = a float"),
        (lambda s, a: -a * s.log_probs, "returned a tensor of shape .*a LossOutput is expected"),
        (lambda s, a: s.logprobs, "raised AttributeError: .*logprobs.*test_own_parts.py:[0-9]+"),
    ],
)
def test_a_loss_s_mistake_is_named(act: Callable[..., Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PartFault, match=f"algorithm.loss=mine:OwnLoss .*{said}"):
        call_loss(OwnLoss(act), scored(), ONES)
    assert ("Traceback" in capsys.readouterr().err) == ("raised" in said), "of the user's own lines"


def test_a_credit_s_mistake_is_named() -> None:
    with pytest.raises(PartFault, match=r"algorithm.credit=mine:OwnCredit returned advantages = .*\[2\].*\[3\]"):
        call_credit(OwnCredit("mine:OwnCredit"), scored(), None, None)  # type: ignore[arg-type]


def test_what_is_right_comes_back_as_it_is() -> None:
    tokens = scored()
    output = LossOutput(-tokens.log_probs, {"x_share": torch.tensor(0.5)}, ONES)
    assert call_loss(OwnLoss(lambda s, a: output), tokens, ONES) is output
    nothing = tokens.select(torch.zeros(N, dtype=torch.bool))
    empty = LossOutput(torch.zeros(0), {}, torch.zeros(0))
    assert call_loss(OwnLoss(lambda s, a: empty), nothing, ONES[:0]) is empty, "no token has no gradient"


def test_a_lack_of_memory_is_left_to_whoever_lowers_the_budget() -> None:
    def act(scored: Scored, advantages: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        call_loss(OwnLoss(act), scored(), ONES)
