"""Tensor parallelism: each process of a rank holds a part of the layers' matrices, and computes the same rows with it.

Which matrices are divided, and how, says the model's own plan in transformers; torch's `parallelize_module` divides
them, as DTensors. Embeddings, norms and head, of which the plan says nothing or that the loss reads as a whole, stay
whole in each process.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_check import describe, random_rows
from impala_llm.learning.model import PolicyModel

_PARTIAL = "replicated_with_grad_allreduce"
"""Style of what is whole in each process, and whose gradient is not, such as the norm of some of the heads."""
_STYLES: dict[str, Callable[[], ColwiseParallel | RowwiseParallel]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}
_CHECK_TOKENS = 16
_TOLERANCE = 1e-3
"""Of hidden states, as a share of the largest."""


def divide(model: PolicyModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave to this process its part of the layers' matrices, by the model's own plan.

    Args:
        model: whole, and the same in all processes of `mesh`; changed in place.
        mesh: of the processes of a rank.

    Returns:
        Parameters that are whole in each process, and whose gradient is the sum of what the processes compute.

    Raises:
        ModelRefused: it has no plan, one that is not known here, or parts that are not equal.
    """
    lm, size = model.lm, mesh.size()
    styles = {name: style for name, style in _plan(lm) if style in _STYLES}
    _check_sizes(lm, styles, size)
    row = random_rows(model.vocab_size, [_CHECK_TOKENS], lm.device)[0]
    arguments = (row, torch.arange(_CHECK_TOKENS, device=row.device), torch.tensor([_CHECK_TOKENS]))
    with torch.no_grad():
        expected = model.hidden(*arguments)
        # Each process has all of it: nothing is sent.
        plan: dict[str, Any] = {name: _STYLES[style]() for name, style in styles.items()}
        parallelize_module(lm, mesh, plan, src_data_rank=None)
        model.to(mesh.device_type)
        found = model.hidden(*(each.to(lm.device) for each in arguments)).to(expected.device)
    if not float((found - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max()):
        raise _refused(lm, size, "computes something else once it is divided")
    return {p for name, style in _plan(lm) if style == _PARTIAL for p in lm.get_submodule(name).parameters()}


def _plan(lm: PreTrainedModel) -> list[tuple[str, str]]:
    """Modules that the model's plan names, with their styles; but for embeddings and head."""
    whole = (lm.get_input_embeddings(), lm.get_output_embeddings())
    plan = lm.tp_plan or {}
    named = [(name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)), module) for name, module in lm.named_modules()]
    return [(name, style) for name, style, module in named if style is not None and module not in whole]


def _check_sizes(lm: PreTrainedModel, styles: dict[str, str], size: int) -> None:
    """Raise ModelRefused where the model cannot be divided into so many equal parts."""
    others = {style for _, style in _plan(lm)} - {*_STYLES, _PARTIAL}
    if others or not styles:
        kinds = f"parts that its plan divides as {', '.join(sorted(others))}" if others else "no plan in transformers"
        raise _refused(lm, size, f"has {kinds}")
    config: Any = lm.config.get_text_config()
    heads = {name: getattr(config, name, size) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, number in heads.items():
        if number % size:
            raise _refused(lm, size, f"has {name}={number}, which it does not divide")
    for name in styles:
        layer = lm.get_submodule(name)
        if not isinstance(layer, nn.Linear) or layer.in_features % size or layer.out_features % size:
            raise _refused(lm, size, f"has {name}, {layer}, which it does not divide")


def _refused(lm: PreTrainedModel, size: int, reason: str) -> ModelRefused:
    return ModelRefused(
        f"learner.tensor_parallel={size} cannot be used: {describe(lm)} {reason}; set another number, or "
        "learner.tensor_parallel=1 with learner.sharding=fsdp2"
    )
