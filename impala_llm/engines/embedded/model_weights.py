"""Replaces a model's weights in place.

Invariant: all or nothing: names and shapes are compared before the first value is written, so a refused set of weights
leaves the old one as it was.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from impala_llm.engines.base import EngineError, ModelRefused, WeightSource
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE

SAFETENSORS_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""By dtype."""


def checkpoint_tensors(model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a model's state dict to the names and pieces of a Hugging Face directory.

    A model may hold as one tensor what its files hold as many: the experts of a layer. The pieces are views of it.
    """
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
    return tensors


class ModelWeights:
    """Tensors of a model under their names in a Hugging Face directory. Tied tensors have several; one suffices.

    Raises:
        EngineError: the model's files hold something else than pieces of its tensors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        state = model.state_dict()
        self._tensors = checkpoint_tensors(model, state)
        storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        copies = [n for n, t in self._tensors.items() if t.untyped_storage().data_ptr() not in storages]
        if copies:
            raise EngineError(
                f"the model's files hold {copies[0]} in another form than the model: its weights cannot be replaced in "
                "place; use engine=sglang or another model"
            )
        self._aliases: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            self._aliases.setdefault(tensor.data_ptr(), []).append(name)

    def load_file(self, directory: Path) -> None:
        """Copy from a directory's model.safetensors.

        Raises EngineError where it is unreadable, ModelRefused where names or shapes do not fit.
        """
        path = Path(directory) / WEIGHTS_FILE
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self._copy(shapes, file.get_tensor, str(path))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"cannot read the weights {path}: {error}") from error

    def load_source(self, source: WeightSource) -> None:
        """Copy from shared memory, every byte compared with its checksum; in one pass where dtypes are the same.

        Raises ModelRefused where names or shapes do not fit, and what the source raises for damaged weights: these may
        have been written in part, and must be loaded again before use.
        """
        found = source.tensors(verify=False)
        self._check({name: shape for name, (_, shape, _) in found.items()}, str(source.path))
        tensors = {name: self._tensors[name] for name in found}
        if all(
            tensor.is_contiguous()
            and tensor.device.type == "cpu"
            and SAFETENSORS_NAMES.get(tensor.dtype) == found[name][0]
            for name, tensor in tensors.items()
        ):
            source.copy_into({name: t.detach().view(-1).view(torch.uint8).numpy() for name, t in tensors.items()})
        else:
            source.tensors(verify=True)
            self.load_file(source.path)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy from tensors in memory, of any dtype and device. Raises ModelRefused where they do not fit."""
        self._copy({name: tuple(tensor.shape) for name, tensor in state.items()}, state.__getitem__, "the state")

    @torch.no_grad()
    def _copy(self, shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], torch.Tensor], source: str) -> None:
        self._check(shapes, source)
        for name in shapes:
            self._tensors[name].copy_(tensor(name))

    def _check(self, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
        unknown = sorted(shapes.keys() - self._tensors.keys())
        missing = [names[0] for names in self._aliases.values() if shapes.keys().isdisjoint(names)]
        wrong = [
            f"{name} is {list(shape)} and should be {list(self._tensors[name].shape)}"
            for name, shape in shapes.items()
            if name in self._tensors and shape != tuple(self._tensors[name].shape)
        ]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong))
            if names
        ]
        if problems:
            raise ModelRefused(
                f"the weights in {source} are not of this engine's model ({'; '.join(problems)});"
                " the old weights stay in use: give the engine the model that the learner trains"
            )
