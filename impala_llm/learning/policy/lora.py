"""LoRA (Hu et al., arXiv 2106.09685) by peft: low-rank adapters beside the policy's matrices, which alone learn.

The policy's own weights stay as they were at the start, without gradient and moments: without its adapters it is the
reference policy. Engines get matrices with the adapters merged, W + s·B·A, computed a few rows at a time on their way
out (policy_export.py). Beside each version lie the adapters, in float32, with which a restarted learner continues.

Invariant: adapters lie whole, and equal, on every rank, also where ranks share the rest of the policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from impala_llm.engines.base import ModelRefused
from impala_llm.settings import LoraConfig

ADAPTER_FOLDER = "adapter"
_ALL = "all-linear"
_MATRICES = (nn.Linear, Conv1D)
_NAME = "default"
"""The adapter's, as peft calls the first one of a model."""
_PREFIX = "adapter."
"""Prefix of the adapters' tensors among the bytes beside a version."""


@dataclass(frozen=True)
class Adapter:
    """A term that is added to a matrix: `scale` · left @ right.

    Attributes:
        left: [rows of the matrix, rank]. right: [rank, columns].
    """

    left: Tensor
    right: Tensor
    scale: float


def add_adapters(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters into a model, in place, where the settings have a rank; from then on they alone have a gradient.

    They begin as a sum of nothing. Raises ModelRefused where `model.lora.targets` names no matrix of the model, or
    an embedding: adapters of the input's are not merged for engines, and the learner reads the output's without them.
    """
    if not config.rank:
        return
    import peft  # takes seconds, and few runs need it

    _check_names(lm, config.targets)
    targets: Any = _ALL if config.targets == [_ALL] else list(config.targets)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    settings.base_model_name_or_path = lm.config._name_or_path
    lm.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(settings, lm)
    except ValueError as error:
        raise ModelRefused(f"model.lora.targets={config.targets} cannot be used: {error}") from error
    odd = [name for name, layer in _layers_of(lm) if getattr(layer.base_layer, "weight", torch.empty(0)).ndim != 2]
    if odd:
        raise ModelRefused(
            f"model.lora.targets={config.targets} would adapt {odd[0]}, which is no matrix, and could not be merged "
            "for engines: name matrices, such as model.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
        )
    ends = lm.get_input_embeddings(), lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if _NAME in getattr(module, "lora_embedding_A", ()) or (module in ends and hasattr(module, "lora_A")):
            raise ModelRefused(
                f"model.lora.targets={config.targets} would adapt {name}, an embedding, whose adapter would not learn "
                "or would not reach engines: leave it out, such as model.lora.targets=[all-linear]"
            )
    # Its own record of where the adapters are: targets by name, where they were described.
    adapted: Any = lm
    adapted.peft_config = {_NAME: settings}


def _check_names(lm: PreTrainedModel, targets: Sequence[str]) -> None:
    """Raise ModelRefused, with the names of the model's matrices, for a target that is none of its modules."""
    modules = dict(lm.named_modules())
    for target in targets:
        if target != _ALL and not any(f".{name}".endswith(f".{target}") for name in modules):
            own = {name.rpartition(".")[2]: None for name, module in modules.items() if isinstance(module, _MATRICES)}
            raise ModelRefused(
                f"model.lora.targets={list(targets)} cannot be used: the model has no {target}: name some of "
                f"{', '.join(name for name in own if name != 'lm_head')}, or set model.lora.targets=[all-linear]"
            )


def is_adapted(lm: PreTrainedModel) -> bool:
    """Whether a model has adapters."""
    return _NAME in (getattr(lm, "peft_config", None) or {})


def _layers(lm: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Layers with adapters, by name."""
    if is_adapted(lm):
        yield from _layers_of(lm)


def _layers_of(lm: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    for name, module in lm.named_modules():
        if hasattr(module, "lora_A") and _NAME in module.lora_A:
            yield name, module


def adapters(lm: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Adapter]:
    """Return the adapters by the name of the matrix in the model's state dict.

    Args:
        tensors: of the adapters, by the names of `adapter_tensors`; None: those of the model.
    """
    found, own = {}, adapter_tensors(lm) if tensors is None else tensors
    for name, layer in _layers(lm):
        down, up = (own[f"{name}.{part}.{_NAME}.weight"].detach() for part in ("lora_A", "lora_B"))
        left, right = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
        found[f"{name}.base_layer.weight"] = Adapter(left, right, layer.scaling[_NAME])
    return found


def exported_name(name: str) -> str | None:
    """Name of a tensor of an adapted model in one without adapters; None for those of the adapters."""
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


@contextmanager
def without_adapters(lm: PreTrainedModel) -> Iterator[None]:
    """Context in which the model computes without its adapters."""
    layers = [layer for _, layer in _layers(lm)]
    scales = [layer.scaling[_NAME] for layer in layers]
    for layer in layers:
        layer.scaling[_NAME] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_NAME] = scale


def adapter_tensors(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters of the adapters, by their names in the model; none without adapters."""
    return {name: p for name, p in lm.named_parameters() if ".lora_" in name} if is_adapted(lm) else {}


def beside_version(lm: PreTrainedModel, value_head: Mapping[str, Tensor]) -> bytes:
    """The bytes beside a version: the value head and the adapters, as a safetensors file."""
    return save({**value_head, **{_PREFIX + name: p.detach().cpu() for name, p in adapter_tensors(lm).items()}})


def without_prefix(content: bytes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the value head and of the adapters from the bytes beside a version."""
    state = load(content)
    own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    return {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}, own


@torch.no_grad()
def load_adapters(lm: PreTrainedModel, state: Mapping[str, Tensor]) -> bool:
    """Take adapters over. False, and nothing is taken, where those are of other matrices or another rank."""
    mine = adapter_tensors(lm)
    if {name: p.shape for name, p in mine.items()} != {name: tensor.shape for name, tensor in state.items()}:
        return False
    for name, p in mine.items():
        p.copy_(state[name])
    return True


def save_adapter(lm: PreTrainedModel, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write adapters as peft does: for `PeftModel.from_pretrained` with the model that training began with.

    Args:
        tensors: of the adapters, by the names of `adapter_tensors`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings: Any = lm.peft_config[_NAME]
    settings.save_pretrained(str(directory))
    named = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": p.detach().cpu().contiguous()
        for name, p in tensors.items()
    }
    (directory / "adapter_model.safetensors").write_bytes(save(named, {"format": "pt"}))
