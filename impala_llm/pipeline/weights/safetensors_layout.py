"""Safetensors file format: the part that a file which is rewritten in place needs.

8 bytes: length n of the header, little endian; n bytes: JSON, padded with blanks; then the tensors without gaps, at the
offsets that the header gives. Invariant: tensors are laid in order of falling item size, so each is aligned to its own.
Source: the format section of https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ITEM_SIZES: dict[str, int] = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Bytes of an element, by the name of its dtype in the format."""
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the JSON in a file, by the format's reference implementation."""
_MAX_OFFSET = 2**63
_MAX_DIMENSIONS = 64


class LayoutError(ValueError):
    """Invalid description of tensors, or invalid header."""


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor: bytes [start, end) of the file; dtype by its safetensors name."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Layout of a file.

    Attributes:
        header: first bytes of the file.
        infos: by tensor name, in the order of the file.
        num_bytes: of the whole file.
    """

    header: bytes
    infos: dict[str, TensorInfo]
    num_bytes: int


def plan(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
    """Lay out tensors, given as name -> (dtype, shape), in a file.

    Raises:
        LayoutError: a dtype is unknown, a name is reserved, or a size is negative.
    """
    for name, (dtype, shape) in tensors.items():
        if dtype not in ITEM_SIZES:
            raise LayoutError(f"tensor {name!r} has dtype {dtype!r}: use one of {', '.join(ITEM_SIZES)}")
        if name == "__metadata__" or any(size < 0 for size in shape):
            raise LayoutError(
                f"tensor {name!r} of shape {shape} cannot be stored: the name is reserved or a size negative"
            )
    ordered = sorted(tensors, key=lambda name: (-ITEM_SIZES[tensors[name][0]], name))
    # transformers refuses files that do not say who wrote them.
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    spans: dict[str, tuple[int, int]] = {}
    offset = 0
    for name in ordered:
        dtype, shape = tensors[name]
        end = offset + _num_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        spans[name] = (offset, end)
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    infos = {
        name: TensorInfo(tensors[name][0], tuple(tensors[name][1]), len(header) + start, len(header) + end)
        for name, (start, end) in spans.items()
    }
    return Layout(header, infos, len(header) + offset)


def parse(data: memoryview) -> dict[str, TensorInfo]:
    """Find the tensors in a file.

    Returns:
        What is known of each, by name, in the order of the file.

    Raises:
        LayoutError: the header is malformed or exceeds the file, or tensors overlap or leave gaps.
    """
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        begin = _LENGTH.size + length
        if length > MAX_HEADER_BYTES or begin > len(data):
            raise LayoutError(f"a header of {length} bytes in a file of {len(data)}: at most {MAX_HEADER_BYTES}")
        table = json.loads(bytes(data[_LENGTH.size : begin]))
        found = [(name, _info(name, entry, begin)) for name, entry in table.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LayoutError(f"not a safetensors file: {error}") from error
    infos = dict(sorted(found, key=lambda item: (item[1].start, item[1].end)))
    end = begin
    for name, info in infos.items():
        if info.start != end or not info.start <= info.end <= len(data):
            raise LayoutError(f"tensor {name!r} lies at [{info.start}, {info.end}): it should begin at {end}")
        end = info.end
    if end != len(data):
        raise LayoutError(f"the tensors end at byte {end}, the file has {len(data)}")
    return infos


def _info(name: str, entry: Mapping[str, Any], begin: int) -> TensorInfo:
    start, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if any(type(value) is not int or not 0 <= value < _MAX_OFFSET for value in (start, end, *shape)):
        raise LayoutError(f"tensor {name!r} has the shape {shape} and lies at [{start}, {end}): impossible")
    if len(shape) > _MAX_DIMENSIONS or end - start != _num_bytes(dtype, shape):
        raise LayoutError(f"tensor {name!r} of shape {shape} and dtype {dtype} takes {end - start} bytes: impossible")
    return TensorInfo(dtype, shape, begin + start, begin + end)


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = ITEM_SIZES[dtype]
    for extent in shape:
        size *= extent
    return size
