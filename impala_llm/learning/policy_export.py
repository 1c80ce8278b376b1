"""The policy as it leaves the learner: its tensors under the names of a Hugging Face directory, each as the part of it
that this rank holds, and converted on the way.

Where ranks share the policy, each writes its own part into the same memory or file, so that no rank ever holds a second
copy, or more than a few rows of a converted tensor. Where each holds all of it, rank 0 writes.

Invariant: the parts that the ranks write of a tensor cover it once.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_weights import SAFETENSORS_NAMES, checkpoint_tensors
from impala_llm.learning.policy.lora import (
    ADAPTER_FOLDER,
    Adapter,
    adapter_tensors,
    adapters,
    beside_version,
    exported_name,
    is_adapted,
    save_adapter,
)
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks, is_shared, local
from impala_llm.pipeline.weights import safetensors_layout
from impala_llm.pipeline.weights.safetensors_layout import Layout
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE
from impala_llm.pipeline.weights.tensor_writing import SharedWriting, TensorPart, TensorSource, write_tensors

_PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements that are converted at once: on a CPU what its level 2 cache holds."""


class Together:
    """`SharedWriting` by the learner's ranks, of which rank 0 is the publisher."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def tell(self, number: int) -> int:
        return int(self._ranks.sum([number if self._ranks.is_main else 0])[0])

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        found = self._ranks.gather({"numbers": list(numbers)}, of_processes=True)
        return [[int(number) for number in each["numbers"]] for each in found]


@dataclass(frozen=True)
class _Held:
    """This rank's part of a tensor: consecutive elements of it, from `start` on.

    Attributes:
        open: called before they are read; returns what returns the elements [begin, end) of those held, flat. With
            tensor parallelism all processes of a rank call it, for the same tensors in the same order.
        flat: the elements, where they are held as they are written.
        unit: elements that are best read together, such as those of a row.
    """

    start: int
    count: int
    open: Callable[[], Callable[[int, int], Tensor]]
    flat: Tensor | None = None
    unit: int = 1


class PolicyExport:
    """The policy as it leaves the learner. One for each rank.

    Args:
        model: placed on its device, or sharded.
    """

    def __init__(self, model: PolicyModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._together = Together(ranks)
        self._pieces: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}
        self._made: tuple[torch.dtype | None, list[object], dict[str, TensorSource]] | None = None
        """Type, addresses of the weights and result of the last call of `tensors`."""

    @property
    def sharing(self) -> SharedWriting | None:
        """Communication of ranks that write a version together; None where each rank holds the whole policy."""
        return self._together if self._ranks.is_sharded else None

    def tensors(
        self, dtype: torch.dtype | None = None, of_adapters: Mapping[str, Tensor] | None = None
    ) -> dict[str, TensorSource]:
        """The policy, without the value head, for `WeightPublisher.publish` or, on other ranks, `contribute`.

        Args:
            dtype: of what is written; None: that of the weights.
            of_adapters: tensors of the adapters that are merged, by the names of `adapter_tensors`; None: the model's.

        Raises:
            ModelRefused: parts or conversions are asked for, and the policy's files hold something else than pieces of
                its tensors.
        """
        lm = self._model.lm
        if not (self._ranks.is_sharded or is_adapted(lm)) and dtype in (None, next(lm.parameters()).dtype):
            return {name: _whole(tensor) for name, tensor in self._model.policy_weights()}
        with torch.no_grad():
            held = lm.state_dict(keep_vars=True)
            shares = [local(tensor) for tensor in held.values()]
        if is_adapted(lm):
            return self._parts(held, dtype, adapters(lm, of_adapters))
        # Sources refer to the memory of the weights, which a step leaves where it is: to make them anew for each
        # version takes a quarter of the time in which two ranks publish 135 M parameters. Of a weight that is not
        # contiguous they refer to a copy.
        places = [share.data_ptr() if share.is_contiguous() else object() for share in shares]
        if self._made is None or self._made[:2] != (dtype, places):
            self._made = dtype, places, self._parts(held, dtype, {})
        return dict(self._made[2])

    def _parts(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype | None, merged: Mapping[str, Adapter]
    ) -> dict[str, TensorSource]:
        """This rank's parts of the weights, converted. weights: of the language model, by its own names."""
        found: dict[str, TensorSource] = {}
        seen: set[int] = set()
        for held_name, tensor in weights.items():
            name_outside = exported_name(held_name)
            if name_outside is None or id(tensor) in seen:  # an adapter's, or tied to another
                continue
            seen.add(id(tensor))
            held = _hold(tensor.detach(), self._ranks, merged.get(held_name))
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            if held_name not in self._pieces:
                self._pieces[held_name] = _pieces(self._model, name_outside, tensor)
            for name, offset, shape in self._pieces[held_name]:
                begin, end = max(offset, held.start), min(offset + math.prod(shape), held.start + held.count)
                count = max(0, end - begin)
                pieces = _numbers(held, begin - held.start, count, target, tensor.device.type)
                part = TensorPart((begin - offset) * target.itemsize if count else 0, count * target.itemsize, pieces)
                found[name] = (SAFETENSORS_NAMES[target], shape, part)
        return found

    def beside(self) -> bytes:
        """Return the bytes kept beside a version, from which a restarted learner reads value head and adapters."""
        return beside_version(self._model.lm, self._model.value_head.state_dict())

    def save(self, directory: Path, files: Mapping[str, bytes]) -> None:
        """Write a Hugging Face directory, with the value head and the LoRA adapters as further files.

        Ranks that share a sharded policy all call it; otherwise only rank 0 does.

        Args:
            directory: to write; the value of rank 0 is used.
            files: further files by name, such as those of the tokenizer.

        Raises:
            OSError: the disk does not take it.
            SafetensorError: the same.
        """
        if not self._ranks.is_sharded:
            if is_adapted(self._model.lm):
                self.as_it_is(files)(directory)
            else:
                self._model.save(directory, files)
            return
        tensors = self.tensors()
        error: Exception | None = None
        layout = _layout(tensors)
        names = self._ranks.gather({"directory": list(os.fsencode(directory))})
        directory = Path(os.fsdecode(bytes(int(byte) for byte in names[0]["directory"])))
        if self._ranks.is_main:
            try:
                of_adapters = adapter_tensors(self._model.lm)
                self._write_all_but_tensors(directory, self._model.config_files(files), layout, of_adapters)
            except Exception as found:  # whatever it is, the other ranks wait to be told
                error = found
        if self._together.tell(int(error is None)):
            _write_into(directory, layout, tensors)
            self._ranks.barrier()
        if error is not None:
            raise error

    def as_it_is(self, files: Mapping[str, bytes]) -> Callable[[Path], None]:
        """Return a function that does what `save` does, with the policy as it is at this call: in any thread, and while
        the policy learns further. For one with adapters that this rank holds whole: all but adapters and value head
        stays as it is, and of these there is a copy."""
        of_adapters = {name: p.detach().clone() for name, p in adapter_tensors(self._model.lm).items()}
        tensors, own_files = self.tensors(of_adapters=of_adapters), self._model.config_files(files)

        def write(directory: Path) -> None:
            layout = _layout(tensors)
            self._write_all_but_tensors(directory, own_files, layout, of_adapters)
            _write_into(directory, layout, tensors)

        return write

    def _write_all_but_tensors(
        self, directory: Path, files: Mapping[str, bytes], layout: Layout, of_adapters: Mapping[str, Tensor]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_bytes(content)
        if of_adapters:
            save_adapter(self._model.lm, directory / ADAPTER_FOLDER, of_adapters)
        with (directory / WEIGHTS_FILE).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, layout.num_bytes)  # a full disk is an error here, and a signal later
            file.write(layout.header)


def _layout(tensors: Mapping[str, TensorSource]) -> Layout:
    return safetensors_layout.plan({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()})


def _write_into(directory: Path, layout: Layout, tensors: Mapping[str, TensorSource]) -> None:
    """Write tensors, or this process's parts of them, into the file of weights in a directory."""
    target = np.memmap(directory / WEIGHTS_FILE, np.uint8, "r+", shape=(layout.num_bytes,))
    write_tensors(layout, target, tensors)
    target.flush()


def _whole(tensor: Tensor) -> TensorSource:
    """A tensor as it is held: by a flat uint8 view where it lies in this process's memory, else by what writes it."""

    def write(target: np.ndarray) -> None:
        torch.from_numpy(target).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    is_here = tensor.device.type == "cpu" and tensor.is_contiguous()
    source = tensor.view(-1).view(torch.uint8).numpy() if is_here else write
    return SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), source


def _hold(tensor: Tensor, ranks: Ranks, adapter: Adapter | None) -> _Held:
    """Return what this process holds, and writes, of a tensor, to which an adapter may be added."""
    width = math.prod(tensor.shape[1:])
    if not isinstance(tensor, DTensor) or not is_shared(tensor):
        flat, first_row = local(tensor).reshape(-1), 0
        flat = flat if ranks.is_main else flat[:0]
    elif not ranks.exports:
        flat, first_row = tensor.to_local().reshape(-1)[:0], 0
    else:
        number, size = tensor.device_mesh.get_local_rank(), tensor.device_mesh.size()
        # As torch.chunk cuts it: all parts but the last ones have as many rows.
        num_rows = -(-len(tensor) // size)
        first_row = min(len(tensor), num_rows * number)
        if not tensor.placements[0].is_shard(0):  # columns: each process writes as many rows of the tensor
            count = min(len(tensor), first_row + num_rows) - first_row
            return _Held(first_row * width, count * width, partial(_rows_of, tensor))
        flat = tensor.to_local().reshape(-1)
    if adapter is None:
        return _Held(first_row * width, len(flat), lambda: partial(_slice, flat), flat)

    def merged(begin: int, end: int) -> Tensor:
        rows = slice(first_row + begin // width, first_row + end // width)
        left, right = adapter.left[rows], adapter.right
        of_rows = flat[begin:end].view(-1, width).to(left.device)
        return torch.addmm(of_rows, left, right, alpha=adapter.scale).reshape(-1)

    # Whole rows, and as many of them as make whole words in any type.
    return _Held(first_row * width, len(flat), lambda: merged, unit=width * (8 // math.gcd(8, width)))


def _rows_of(tensor: DTensor) -> Callable[[int, int], Tensor]:
    """Return what reads the rows of this process, of a tensor whose columns are divided: processes exchange them."""
    return partial(_slice, tensor.redistribute(placements=[Shard(0)]).to_local().reshape(-1))


def _slice(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat[begin:end]


def _pieces(model: PolicyModel, name: str, tensor: Tensor) -> list[tuple[str, int, tuple[int, ...]]]:
    """Names, first elements and shapes of the pieces by which a Hugging Face directory holds a tensor."""
    found = []
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    for piece_name, piece in checkpoint_tensors(model.lm, {name: whole}).items():
        if not piece.is_contiguous():
            raise ModelRefused(
                f"the model's files hold {piece_name} in another form than the model, and it cannot be written in "
                "parts: set learner.sharding=replicated and pipeline.weights_dtype=float32"
            )
        found.append((piece_name, int(piece.storage_offset()), tuple(piece.shape)))
    return found


def _numbers(
    held: _Held, begin: int, count: int, dtype: torch.dtype, device_type: str
) -> np.ndarray | Callable[[], Iterator[np.ndarray]]:
    """The elements [begin, begin + count) of what is held, as `TensorPart.pieces`."""
    if held.flat is not None and held.flat.device.type == "cpu" and _is_written_as(dtype, held.flat.dtype):
        return _array(held.flat[begin : begin + count], dtype)
    return partial(_pieces_of, held, begin, count, dtype, device_type)


def _pieces_of(held: _Held, begin: int, count: int, dtype: torch.dtype, device_type: str) -> Iterator[np.ndarray]:
    size = max(1, _PIECE[device_type] // held.unit) * held.unit
    buffer: Tensor | None = None
    read = held.open()
    for offset in range(begin, begin + count, size):
        values = read(offset, min(offset + size, begin + count))
        if not _is_written_as(dtype, values.dtype) or values.device.type != "cpu":
            buffer = torch.empty(min(size, count), dtype=dtype) if buffer is None else buffer
            values = buffer[: len(values)].copy_(values)
        yield _array(values, dtype)


def _is_written_as(dtype: torch.dtype, held: torch.dtype) -> bool:
    """Whether a `TensorPart` of one type may have numbers of the other."""
    return held == dtype or (held, dtype) == (torch.float32, torch.bfloat16)


def _array(values: Tensor, dtype: torch.dtype) -> np.ndarray:
    array: np.ndarray = (values.view(torch.uint8) if values.dtype == dtype else values).numpy()
    return array
