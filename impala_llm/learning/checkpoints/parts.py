"""Parts of a checkpoint, each written by one process: what was written, and tensors as safetensors. For writer.py."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from impala_llm.engines.embedded.model_weights import SAFETENSORS_NAMES
from impala_llm.learning.checkpoints.files import Part, write_file
from impala_llm.pipeline.weights.safetensors_layout import plan


class Written:
    """Files and tensors of a part of a checkpoint."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, list[Part]] = {}

    def to_bytes(self) -> bytes:
        parts = {name: [[p.file, p.key, p.offsets] for p in found] for name, found in self.tensors.items()}
        return json.dumps({"files": self.files, "tensors": parts}).encode()

    def add(self, content: bytes) -> None:
        """Take in another rank's `to_bytes`."""
        values = json.loads(content)
        self.files |= {name: (size, crc) for name, (size, crc) in values["files"].items()}
        for name, parts in values["tensors"].items():
            self.tensors.setdefault(name, []).extend(Part(file, key, tuple(at)) for file, key, at in parts)


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, Tensor]]) -> tuple[int, int]:
    """Write a safetensors file. tensors: key -> (name, tensor in host memory)."""
    layout = plan({key: (_dtype_name(t), tuple(t.shape)) for key, (_, t) in tensors.items()})

    def pieces() -> Iterator[bytes | memoryview]:
        yield layout.header
        for key in layout.infos:
            tensor = tensors[key][1]
            if tensor.numel():
                yield tensor.reshape(-1).view(torch.uint8).numpy().data

    return write_file(path, pieces())


def _dtype_name(tensor: Tensor) -> str:
    names = {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
    return (SAFETENSORS_NAMES | names)[tensor.dtype]
