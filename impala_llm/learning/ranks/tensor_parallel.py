"""Tensor parallelism: each process of a rank holds a part of the layers' matrices, and computes the same rows with it.

Which matrices are divided, and how, says the model's own plan in transformers; torch's `parallelize_module` divides
them, as DTensors. Embeddings, norms and head, of which the plan says nothing or that the loss reads as a whole, stay
whole in each process.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from impala_llm.checks.known_models import HEADS, NOT_DIVIDED, undivided
from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_check import describe, random_rows, refusing
from impala_llm.learning.policy.model import PolicyModel

_PARTIAL = "replicated_with_grad_allreduce"
"""Style of what is whole in each process, and whose gradient is not, such as the norm of some of the heads."""
_STYLES: dict[str, Callable[[], ColwiseParallel | RowwiseParallel]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
}
_CHECK_TOKENS = 16
_TOLERANCE = 1e-3
"""Largest difference of hidden states, as a share of the largest."""
_GRADIENT_TOLERANCE = 0.05
"""Largest difference of a parameter's gradient, as a share of its norm; it is 0.5 and more where a process has only a
part of the gradient."""
_ROUNDING = 1e-5
"""Norm that a gradient of 0 may have by rounding, as a share of the largest parameter's."""


def divide(model: PolicyModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Leave to this process its part of the layers' matrices, by the model's own plan.

    Args:
        model: whole, and the same in all processes of `mesh`; changed in place.
        mesh: of the processes of a rank.

    Returns:
        Parameters that are whole in each process, and whose gradient is the sum of what the processes compute.

    Raises:
        ModelRefused: it has no plan, one that is not known here, or parts that are not equal; or its hidden states or
            gradients are others once it is divided.
    """
    lm, size = model.lm, mesh.size()
    styles = {name: style for name, style in _plan(lm) if style in _STYLES}
    _check_sizes(lm, styles, size)
    row = random_rows(model.vocab_size, [_CHECK_TOKENS], torch.device("cpu"))[0]
    of_whole: dict[str, Tensor] = {}

    def keep(name: str, p: Tensor) -> None:
        of_whole[name] = _part(styles, mesh, name, p.grad)
        p.grad = None

    # One by one: the host need not hold gradients of all of the model for each process.
    trained = [(name, p) for name, p in lm.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(functools.partial(keep, name)) for name, p in trained]
    expected = _probe(model, row)
    for hook in hooks:
        hook.remove()
    # Each process has all of it: nothing is sent.
    plan: dict[str, Any] = {name: _STYLES[style]() for name, style in styles.items()}
    try:
        with refusing(f"{_cannot(lm, size)} cannot be computed once it is divided", NOT_DIVIDED):
            parallelize_module(lm, mesh, plan, src_data_rank=None)
            model.to(mesh.device_type)
            partial = {p for name, style in _plan(lm) if style == _PARTIAL for p in lm.get_submodule(name).parameters()}
            found = _probe(model, row)
    except ModelRefused:
        dist.all_reduce(torch.zeros(()), group=mesh.get_group())  # fails where the cause is a process that has gone
        raise
    if not float((found - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max()):
        raise _refused(lm, size, "computes something else once it is divided")
    wrong = _wrong_gradient(lm, mesh, of_whole, partial)
    model.zero_grad(set_to_none=True)
    if wrong is not None:
        raise _refused(lm, size, f"has {wrong}, whose gradient is another once it is divided")
    return partial


def _probe(model: PolicyModel, row: Tensor) -> Tensor:
    """Compute the hidden states [M, H] of a row [M], and the gradients of a random projection of them."""
    device = model.lm.device
    hidden = model.hidden(row.to(device), torch.arange(len(row), device=device), torch.tensor([len(row)]))
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * weights.to(hidden)).sum().backward()
    return hidden.detach().cpu()


def _part(styles: dict[str, str], mesh: DeviceMesh, name: str, grad: Any) -> Tensor:
    """The part of a whole parameter's gradient that will belong to this process."""
    dim = {"colwise": 0, "rowwise": 1}.get(styles.get(name.rpartition(".")[0], ""), grad.ndim)
    part: Tensor = grad if dim >= grad.ndim else grad.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    return part


def _wrong_gradient(
    lm: PreTrainedModel, mesh: DeviceMesh, expected: dict[str, Tensor], partial: set[nn.Parameter]
) -> str | None:
    """Name a parameter whose gradient, added up as `Ranks.sum_gradients` does it, is not that of the undivided model.

    Args:
        expected: this process's part of each, by name.
        partial: parameters whose gradient is the sum of what the processes compute.

    Returns:
        The first one, the same in all processes; None where there is none.
    """
    squares = {}
    for name, p in lm.named_parameters():
        if name in expected:
            grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
            if isinstance(p, DTensor):
                grad = grad.redistribute(placements=p.placements).to_local()
            else:
                dist.all_reduce(grad, group=mesh.get_group())
                grad = grad if p in partial else grad / mesh.size()
            whole = expected[name].to(grad.device)
            squares[name] = torch.stack([(grad - whole).square().sum(), whole.square().sum()])
    sums = torch.stack(list(squares.values()))
    dist.all_reduce(sums, group=mesh.get_group())
    apart, norms = sums.sqrt().T
    is_right = apart <= _GRADIENT_TOLERANCE * norms + _ROUNDING * norms.max()
    return next((name for name, right in zip(squares, is_right.tolist(), strict=True) if not right), None)


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
    for name in HEADS:
        if (number := getattr(config, name, size)) % size:
            raise _refused(lm, size, undivided(name, number))
    for name in styles:
        layer = lm.get_submodule(name)
        if not isinstance(layer, nn.Linear) or layer.in_features % size or layer.out_features % size:
            raise _refused(lm, size, f"has {name}, {layer}, which it does not divide")


def _refused(lm: PreTrainedModel, size: int, reason: str) -> ModelRefused:
    return ModelRefused(f"{_cannot(lm, size)} {reason}; {NOT_DIVIDED}")


def _cannot(lm: PreTrainedModel, size: int) -> str:
    """Begin the sentence of a refusal."""
    return f"learner.tensor_parallel={size} cannot be used: {describe(lm)}"
