"""Files of a Hugging Face directory: its weights, those beside them, and checksums that tell models apart. No torch
here."""

import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from impala_llm.settings import model_directory

VALUE_HEAD_FILE = "value_head.safetensors"
_PIECES, _PIECE = 1024, 4096
"""Number of pieces of a weights file that its fingerprint is computed from, and bytes of each: a file of up to 4 MB is
read as a whole."""


def policy_files(directory: Path) -> dict[str, bytes]:
    """Files of a policy's directory beside the weights: configuration and tokenizer, by name."""
    suffixes = {".json", ".jinja", ".txt", ".model"}
    skipped = {"training.json", "evaluation.json"}  # of other weights, as an index of their shards is
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in suffixes and path.name not in skipped
        if not path.name.endswith(".index.json")
    }


def weight_files(directory: Path) -> list[Path]:
    """Files that hold a model's weights: those that its index names, else model.safetensors. Others, such as
    consolidated.safetensors, hold the same again. Raises ValueError where the index is damaged."""
    index = directory / "model.safetensors.index.json"
    files = json_object(index).get("weight_map") if index.is_file() else {"all": "model.safetensors"}
    if not isinstance(files, dict):
        raise ValueError(f"{index.name} has no weight_map")
    return [directory / name for name in sorted(map(str, set(files.values())))]


def base_checksum(directory: Path) -> int:
    """Checksum of the weights in a Hugging Face directory, by pieces of each file: quick for any size."""
    found = 0
    files = sorted((*directory.glob("*.safetensors"), *directory.glob("*.bin")))
    for path in (path for path in files if path.name != VALUE_HEAD_FILE):
        size = path.stat().st_size
        found = zlib.crc32(f"{path.name} {size}".encode(), found)
        with path.open("rb") as file:
            for number in range(_PIECES):
                file.seek(number * size // _PIECES)
                found = zlib.crc32(file.read(_PIECE), found)
    return found


def model_checksum(directory: Path) -> int:
    """Checksum of the model in a Hugging Face directory: of its weights, see `base_checksum`, its configuration and its
    tokenizer. It is the same wherever the directory lies."""
    found = base_checksum(directory)
    for name, content in policy_files(directory).items():
        found = zlib.crc32(content, zlib.crc32(name.encode(), found))
    return found


def float32_bytes(path: str) -> int:
    """Bytes that the weights of a model take in float32: in the learner, and on the weight board.

    Args:
        path: value of `model.path`.

    Returns:
        0 where the model is made from scratch, or cannot be read.
    """
    return sum(4 * math.prod(shape) for _, shape in tensor_shapes(path))


def layer_parameters(path: str) -> int:
    """Number of parameters in the matrices of a model's layers, which tensor parallelism divides.

    Args:
        path: value of `model.path`.

    Returns:
        0 where the model is made from scratch, or cannot be read.
    """
    shapes = tensor_shapes(path)
    return sum(math.prod(shape) for name, shape in shapes if len(shape) > 1 and re.search(r"\.\d+\.", name))


def tensor_shapes(path: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors of a `model.path`; none where the model is made from scratch. Files that cannot
    be read are left out: `model_problems` reports them."""
    directory = model_directory(path)
    return ((name, tensor.get_shape()) for name, tensor in _tensors(directory)) if directory else iter(())


def stored_types(directory: Path) -> set[str]:
    """Types of the tensors in a Hugging Face directory, by safetensors' names: F32, BF16 and so on."""
    return {tensor.get_dtype() for _, tensor in _tensors(directory)}


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Names and slices of the tensors; those of files that cannot be read are left out."""
    files = []
    with contextlib.suppress(ValueError):
        files = weight_files(directory)
    for file in files:
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, "np") as tensors:
            names = tensors.keys()  # it is no dict
            yield from ((name, tensors.get_slice(name)) for name in names)


def json_object(path: Path) -> dict[str, Any]:
    """Parse a file; raises ValueError where it cannot be read or holds no JSON object."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return values
