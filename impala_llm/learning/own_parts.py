"""Calls of credits and losses, those that a user wrote and those of this package.

An error in a user's part is reported once, with the name of its setting, and ends the run: the same call would fail
again after a restart. A metric that such a part declares and never returns is reported once. Parts of this package are
called without these checks.
"""

import math
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from impala_llm.algorithms.interface import (
    BatchLoss,
    Credit,
    Episodes,
    Loss,
    LossOutput,
    PackedBatch,
    Prepared,
    Scored,
    Worth,
)
from impala_llm.algorithms.registry import CREDITS, LOSSES
from impala_llm.config import ConfigError
from impala_llm.engines.out_of_memory import is_out_of_memory
from impala_llm.learning import packing
from impala_llm.learning.ranks import parallel
from impala_llm.plugs import raised_at
from impala_llm.processes.supervised import say

_WATCHED_UPDATES = 5
"""A metric may come with some micro-batches or steps alone: it counts as missing after so many whole updates."""
_CALLED_BACK = (packing.__file__, parallel.__file__)
"""Modules that a user's part may call. A RuntimeError raised there is not its fault: memory ran out, or a rank died."""
_Result = TypeVar("_Result", LossOutput, Worth, Prepared)


class PartFault(ConfigError):
    """A credit or loss of the user's raised, or returned what cannot be used. The message names it."""


@dataclass
class _Awaited:
    """Metrics that a part declares and has not returned yet."""

    metrics: set[str]
    versions: set[int] = field(default_factory=set)
    """Policy versions at which the part was called with tokens."""


_awaited: dict[str, _Awaited] = {}
"""By the setting that names the part."""


def call_loss(loss: Loss, scored: Scored, advantages: Tensor) -> LossOutput:
    """Loss of N action tokens.

    Raises:
        PartFault: it is a user's, and raised, or its result is not as `LossOutput` says.
    """
    if is_ours(loss):
        return loss(scored, advantages)
    if not len(advantages):  # too old or rejected, all of them: the maximum of none, for one, would raise
        return LossOutput(0.0 * scored.log_probs, {}, advantages)
    name = f"algorithm.loss={loss.name}"
    output = _require(name, LossOutput, _call(name, lambda: loss(scored, advantages)))
    _require_floats(f"{name} returned per_token", output.per_token, advantages)
    _require_constants(f"{name} returned weights", output.weights, advantages)
    unusable = ~((output.weights >= 0) & output.weights.isfinite()) & output.per_token.isfinite()
    if unusable.any():  # where the loss is not finite either, the step is left out
        raise PartFault(
            f"{name} returned a weight of {output.weights[unusable][0]:g}: weights are the sizes of the factors of "
            "A ∇log π, finite and at least 0"
        )
    if scored.log_probs.requires_grad and not output.per_token.requires_grad:
        raise PartFault(
            f"{name} returned per_token without a gradient, so that nothing would be learned: compute it from "
            "scored.log_probs (scored.log_ratio is a constant)"
        )
    if not isinstance(output.metrics, Mapping):
        raise PartFault(f"{name} returned metrics = {_kind(output.metrics)}: a mapping of names to scalars is expected")
    for metric, value in output.metrics.items():
        _require_name(name, loss, metric)
        if getattr(value, "shape", None) != torch.Size() or not _is_number(value):
            raise PartFault(f"{name} returned metric {metric} = {_kind(value)}: a scalar tensor is expected")
    _await_metrics(loss, "loss", output.metrics, scored)
    return output


def call_credit(credit: Credit, scored: Scored, batch: PackedBatch, prepared: Tensor | None) -> Worth:
    """Advantages of a micro-batch of N action tokens.

    Raises:
        PartFault: it is a user's, and raised, or its result is not as `Worth` says.
    """
    if is_ours(credit):
        return credit(scored, batch, prepared)
    name = f"algorithm.credit={credit.name}"
    worth = _require(name, Worth, _call(name, lambda: credit(scored, batch, prepared)))
    _require_constants(f"{name} returned advantages", worth.advantages, scored.log_probs)
    _require_fit(name, worth)
    _require_value_loss(name, worth, batch)
    if worth.values is not None and not credit.uses_values:
        raise PartFault(
            f"{name} returned values, and its class does not say that it needs the value head: write "
            "uses_values = True in it"
        )
    if credit.of_episodes:
        assert prepared is not None  # see `call_prepare`
        _require_prepared(name, worth, prepared[scored.segment_ids])
    _require_metrics(name, credit, worth.metrics)
    _await_metrics(credit, "credit", [metric for metric, _, _ in worth.metrics], scored)
    return worth


def call_prepare(credit: Credit, episodes: Episodes) -> Prepared | None:
    """Result of `Credit.prepare` for a batch of M episodes.

    Raises:
        PartFault: it is a user's, and raised, or its result is not as `Prepared` says.
    """
    if is_ours(credit):
        return credit.prepare(episodes)
    name = f"algorithm.credit={credit.name}: prepare"
    result = _call(name, lambda: credit.prepare(episodes))
    if result is None and credit.of_episodes:
        raise PartFault(
            f"{name} returned None, and its class says of_episodes = True: return Prepared(advantages), one for each "
            "episode, or take of_episodes = True out of it"
        )
    if result is None:
        return None
    prepared = _require(name, Prepared, result)
    _require_constants(f"{name} returned advantages", prepared.advantages, episodes.returns, "episode")
    _require_metrics(name, credit, prepared.metrics)
    _await_metrics(credit, "credit", [metric for metric, _, _ in prepared.metrics])
    return prepared


def call_measure(loss: BatchLoss, scored: Scored, advantages: Tensor) -> Tensor:
    """Result of `BatchLoss.measure` for N action tokens, float[n].

    Raises:
        PartFault: it is a user's, and raised, or its result is no such tensor.
    """
    if is_ours(loss):
        return loss.measure(scored, advantages)
    name = f"algorithm.loss={loss.name}: measure"
    found = _call(name, lambda: loss.measure(scored, advantages))
    if not isinstance(found, Tensor) or found.ndim != 1 or not found.is_floating_point():
        raise PartFault(f"{name} returned {_kind(found)}: a float tensor of shape [n] is expected, of any n")
    return found


def call_batch_limit(
    loss: BatchLoss, measured: Tensor, sum_over_ranks: Callable[[Sequence[float]], list[float]]
) -> float:
    """The limit that a loss finds over the batch.

    Raises:
        PartFault: it is a user's, and raised, or its result is no number.
    """
    if is_ours(loss):
        return loss.batch_limit(measured, sum_over_ranks)
    name = f"algorithm.loss={loss.name}: batch_limit"
    limit = _call(name, lambda: loss.batch_limit(measured, sum_over_ranks))
    try:
        return float(limit)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PartFault(f"{name} returned {_kind(limit)}: a number is expected") from error


def is_ours(part: object) -> bool:
    """Whether a credit or loss is one of this package."""
    return type(part).__module__.startswith("impala_llm.")


def _call(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_from_below = isinstance(error, RuntimeError) and any(each.filename in _CALLED_BACK for each in frames)
        if is_from_below or is_out_of_memory(error):
            raise
        traceback.print_exception(error)
        raise PartFault(f"{name} raised {type(error).__name__}: {error}{raised_at(error)}") from error


def _await_metrics(part: Credit | Loss, key: str, returned: Iterable[str], scored: Scored | None = None) -> None:
    """Note the metrics that a part has returned, and say once which of those that it declares it never does.

    Args:
        key: credit | loss.
        scored: the tokens that it was given; None where it was given whole episodes.
    """
    name = f"algorithm.{key}={part.name}"
    declared = {metric.removeprefix(f"{key}/") for metric in part.metrics}
    awaited = _awaited.setdefault(name, _Awaited(declared))
    awaited.metrics -= {metric.removeprefix(f"{key}/") for metric in returned}
    if scored is not None and len(scored.log_probs):
        awaited.versions.add(scored.version)
    if len(awaited.versions) > _WATCHED_UPDATES and awaited.metrics and (os.environ.get("RANK") or "0") == "0":
        say(
            f"learner: {name} declares metrics that it has not returned in {_WATCHED_UPDATES} updates, "
            f"{', '.join(sorted(awaited.metrics))}: return them, or take them out of its `metrics`"
        )
        awaited.metrics.clear()


def _require(name: str, expected: type[_Result], result: object) -> _Result:
    if not isinstance(result, expected):
        raise PartFault(f"{name} returned {_kind(result)}: a {expected.__name__} is expected")
    return result


def _require_metrics(name: str, credit: Credit, metrics: object) -> None:
    if not isinstance(metrics, Sequence):
        raise PartFault(f"{name} returned metrics = {_kind(metrics)}: a sequence of (name, value, weight) is expected")
    for each in metrics:
        if not isinstance(each, tuple) or len(each) != 3:
            raise PartFault(f"{name} returned {each!r:.100} among its metrics: (name, value, weight) is expected")
        metric, value, weight = each
        _require_name(name, credit, metric)
        numbers = value if isinstance(value, tuple) else (value,)
        of_four = metric.endswith("explained_variance")  # as observability/metrics.py has it
        if not all(_is_number(x[()] if isinstance(x, np.ndarray) else x) for x in (*numbers, weight)):
            raise PartFault(
                f"{name} returned metric {metric} = {_kind(value)} with weight {_kind(weight)}: real numbers in the "
                f"range of a float are expected{', the metric as a tuple of four' if of_four else ''}"
            )
        if len(numbers) != (4 if of_four else 1):
            expected = "a tuple of four numbers" if of_four else "one number"
            raise PartFault(f"{name} returned metric {metric} of {len(numbers)} numbers: {expected} is expected")
        if not 0.0 <= float(weight) < math.inf:
            raise PartFault(
                f"{name} returned metric {metric} with weight {float(weight)}: the number of items that the value is a "
                "mean of is expected"
            )


def _require_name(name: str, part: Credit | Loss, metric: object) -> None:
    """Require a metric that the class of the part declares, or one of this package, which it may call."""
    if not isinstance(metric, str):
        raise PartFault(f"{name} returned a metric named {metric!r}: a text is expected")
    key = "credit" if isinstance(part, Credit) else "loss"
    ours: Mapping[str, Any] = CREDITS if isinstance(part, Credit) else LOSSES
    names = {metric, f"{key}/{metric}", metric.removeprefix(f"{key}/")}
    if all(names.isdisjoint(each.metrics) for each in (part, *ours.values())):
        line = f'"{metric}": "what it means"'
        fix = f"add {line} to its `metrics`" if part.metrics else f"add `metrics = {{{line}}}`"
        raise PartFault(f"{name} returned the metric {metric}, which its class does not declare: {fix}")


def _is_number(value: object) -> bool:
    """Whether it is a real number in the range of a float, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:
        return isinstance(value, Real | np.bool_) and isinstance(float(value), float)
    except OverflowError:
        return False


def _require_floats(what: str, value: object, like: Tensor, noun: str = "token") -> None:
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        raise PartFault(f"{what} = {_kind(value)}: {_kind(like)} is expected, a number for each {noun}")


def _require_constants(what: str, value: Tensor, like: Tensor, noun: str = "token") -> None:
    _require_floats(what, value, like, noun)
    _require_no_gradient(what, value)


def _require_no_gradient(what: str, value: Tensor) -> None:
    if value.requires_grad:
        raise PartFault(f"{what} with a gradient, and they are taken for constants: detach them")


def _require_fit(name: str, worth: Worth) -> None:
    """Require values, targets and rows of one length, or none of them."""
    parts = {"values": worth.values, "targets": worth.targets, "value_rows": worth.value_rows}
    if all(part is None for part in parts.values()):
        return
    size = [worth.values.numel()] if isinstance(worth.values, Tensor) else []
    expected = [(dtype, size) for dtype in (torch.float32, torch.float32, torch.int64)]
    if [(part.dtype, list(part.shape)) for part in parts.values() if isinstance(part, Tensor)] != expected:
        given = ", ".join(f"{key} = {_kind(part)}" for key, part in parts.items())
        raise PartFault(
            f"{name} returned {given}: tensors of one length are expected, float32, float32 and int64, or None for all"
        )


def _require_value_loss(name: str, worth: Worth, batch: PackedBatch) -> None:
    """Require a known unit, a number for the weight, rows that exist, and a gradient of the values alone."""
    if worth.num_values not in ("tokens", "turns"):
        raise PartFault(f"{name} returned num_values = {worth.num_values!r}: tokens or turns is expected")
    if not _is_number(worth.value_coef) or not math.isfinite(worth.value_coef):
        raise PartFault(f"{name} returned value_coef = {worth.value_coef!r:.60}: a finite number is expected")
    values, targets, rows = worth.values, worth.targets, worth.value_rows
    if values is None or targets is None or rows is None or not len(rows):
        return
    _require_no_gradient(f"{name} returned targets", targets)
    if worth.value_coef and torch.is_grad_enabled() and not values.requires_grad:
        raise PartFault(
            f"{name} returned values without a gradient, so that the value head would not be fitted: take them from "
            "scored.values, not detached"
        )
    low, high = (int(edge) for edge in torch.aminmax(rows))
    if low < 0 or high >= len(batch.lengths):
        raise PartFault(
            f"{name} returned value_rows from {low} to {high}: 0 to {len(batch.lengths) - 1} is expected, as in "
            "scored.segment_ids"
        )


def _require_prepared(name: str, worth: Worth, expected: Tensor) -> None:
    """Require the prepared advantages alone: whitening, and which episodes are computed, follow from them."""
    if worth.values is not None:
        raise PartFault(
            f"{name} returned values, and its class says of_episodes = True: an episode whose prepared advantage is 0 "
            "may not be computed at all, and its values would not be fitted; take of_episodes = True out of it"
        )
    if not torch.allclose(worth.advantages, expected, rtol=0.0, atol=0.0, equal_nan=True):
        raise PartFault(
            f"{name} returned other advantages than prepared[scored.segment_ids], and its class says of_episodes = "
            "True: the prepared ones decide which episodes are computed, and whitening takes its mean and deviation "
            "from them; return these, or take of_episodes = True out of it"
        )


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
