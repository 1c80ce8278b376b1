"""Calls of credits and losses. What one that a user wrote does wrong is said once, in terms of its setting, and ends
the run: the same call would fail again after a restart. Parts of this package are called as they are.
"""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from impala_llm.algorithms.interface import Credit, Loss, LossOutput, PackedBatch, Scored, Worth
from impala_llm.config import ConfigError
from impala_llm.learning.packing import is_out_of_memory

_Result = TypeVar("_Result", LossOutput, Worth)


class PartFault(ConfigError):
    """A credit or loss of the user's raised, or returned what cannot be used. The message names it."""


def call_loss(loss: Loss, scored: Scored, advantages: Tensor) -> LossOutput:
    """Loss of N action tokens.

    Raises:
        PartFault: it is a user's, and raised, or its result is not as `LossOutput` says.
    """
    if _is_ours(loss):
        return loss(scored, advantages)
    name = f"algorithm.loss={loss.name}"
    output = _call(name, LossOutput, lambda: loss(scored, advantages))
    _require_floats(f"{name} returned per_token", output.per_token, advantages)
    _require_floats(f"{name} returned weights", output.weights, advantages)
    if scored.log_probs.requires_grad and len(advantages) and not output.per_token.requires_grad:
        raise PartFault(
            f"{name} returned per_token without a gradient, so that nothing would be learned: compute it from "
            "scored.log_probs (scored.log_ratio is a constant)"
        )
    for metric, value in output.metrics.items():
        if getattr(value, "shape", None) != torch.Size():
            raise PartFault(f"{name} returned metric {metric} = {_kind(value)}: a scalar tensor is expected")
    return output


def call_credit(credit: Credit, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
    """Advantages of a micro-batch of N action tokens.

    Raises:
        PartFault: it is a user's, and raised, or its result is not as `Worth` says.
    """
    if _is_ours(credit):
        return credit(scored, batch, prepared)
    name = f"algorithm.credit={credit.name}"
    worth = _call(name, Worth, lambda: credit(scored, batch, prepared))
    _require_floats(f"{name} returned advantages", worth.advantages, scored.log_probs)
    return worth


def _is_ours(part: object) -> bool:
    return type(part).__module__.startswith("impala_llm.")


def _call(name: str, expected: type[_Result], call: Callable[[], Any]) -> _Result:
    try:
        result = call()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exception(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise PartFault(f"{name} raised {type(error).__name__}: {error}, in {frame.filename}:{frame.lineno}") from error
    if not isinstance(result, expected):
        raise PartFault(f"{name} returned {_kind(result)}: a {expected.__name__} is expected")
    return result


def _require_floats(what: str, value: object, like: Tensor) -> None:
    if not isinstance(value, Tensor) or value.shape != like.shape or not value.is_floating_point():
        size = list(like.shape)
        raise PartFault(f"{what} = {_kind(value)}: a float tensor of shape {size} is expected, a number for each token")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
