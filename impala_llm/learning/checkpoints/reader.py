"""Reader of checkpoints: by any number of ranks, whatever number has written them. Written by writer.py."""

from typing import Any

import msgpack
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from impala_llm.learning.checkpoints.arrays import unpack
from impala_llm.learning.checkpoints.files import CheckpointError, CheckpointManifest
from impala_llm.learning.checkpoints.writer import learned, offsets_of
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.pipeline.shm.record import RecordError, decode_record
from impala_llm.trajectory import Trajectory


class CheckpointReader:
    """Reads a checkpoint that was verified.

    Raises CheckpointError in every method, for contents that do not fit.
    """

    def __init__(self, manifest: CheckpointManifest) -> None:
        self.manifest = manifest
        self._open: dict[str, Any] = {}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.manifest.path / name, "pt")
        return self._open[name]

    def plain(self, rank: int) -> dict[str, Any]:
        """The state of a rank besides tensors and trajectories."""
        try:
            content = (self.manifest.path / f"rank-{rank}.msgpack").read_bytes()
            state: dict[str, Any] = msgpack.unpackb(content, ext_hook=unpack, strict_map_key=False)
            return state
        except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise CheckpointError(f"{self.manifest.path.name}: rank-{rank}.msgpack cannot be read: {error}") from error

    def trajectories(self, rank: int, shift: int = 0) -> dict[int, Trajectory]:
        """Trajectories of a rank by `unroll_id`.

        Args:
            shift: is added to the versions of all tokens.
        """
        try:
            content = memoryview((self.manifest.path / f"rank-{rank}.records").read_bytes())
            found, start = {}, 0
            for number, size in self.plain(rank)["records"]:
                found[number] = _shifted(decode_record(bytearray(content[start : start + size])), shift)
                start += size
            return found
        except (OSError, RecordError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.manifest.path.name}: rank-{rank}.records cannot be read: {error}") from error

    def load_model(self, model: PolicyModel) -> None:
        """Give a model the weights of the checkpoint."""
        with torch.no_grad():
            for name, tensor in learned(model).items():
                self._read(f"model.{name}", tensor)

    def load_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer the moments of the checkpoint."""
        with torch.no_grad():
            optimizer.load(lambda name, tensor: self._read(f"optimizer.{name}", tensor))

    def _read(self, name: str, target: Tensor) -> None:
        """Copy a tensor, or this rank's shard of a sharded one, from the files that hold it."""
        local = target.to_local() if isinstance(target, DTensor) else target
        begin = offsets_of(target)
        parts = self.manifest.tensors.get(name)
        if parts is None:
            raise CheckpointError(f"{self.manifest.path.name} has no tensor {name}: it is of another model")
        num_read = 0
        shapes = [self._file(part.file).get_slice(part.key).get_shape() for part in parts]
        ends = [
            [o + n for o, n in zip(part.offsets, shape, strict=True)] for part, shape in zip(parts, shapes, strict=True)
        ]
        whole = [max(end) for end in zip(*ends, strict=True)]
        if list(target.shape) != whole:
            raise CheckpointError(
                f"{self.manifest.path.name} has {name} of shape {whole}, this model of {list(target.shape)}"
            )
        for part, end in zip(parts, ends, strict=True):
            # The share and this piece have these indices of the whole tensor in common.
            first = [max(pair) for pair in zip(begin, part.offsets, strict=True)]
            last = [min(a + n, b) for a, n, b in zip(begin, local.shape, end, strict=True)]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            theirs = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, part.offsets, strict=True))
            ours = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, begin, strict=True))
            file = self._file(part.file)
            found = file.get_slice(part.key)[theirs] if theirs else file.get_tensor(part.key)
            local[ours].copy_(found)
            num_read += found.numel()
        if num_read != local.numel():
            raise CheckpointError(f"{self.manifest.path.name} has only {num_read} elements of {name} for this rank")


def _shifted(trajectory: Trajectory, shift: int) -> Trajectory:
    """A trajectory whose action tokens have versions that are higher by `shift`."""
    if shift:
        trajectory.versions[trajectory.action_mask] += np.int32(shift)
    return trajectory
