"""Arrays among the plain values of a checkpoint, which msgpack does not know."""

import msgpack
import numpy as np

_ARRAY = 1
"""Code of msgpack's extension type."""


def pack(value: object) -> msgpack.ExtType:
    """For msgpack's `default`. Raises TypeError for what is neither an array nor a number of numpy."""
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}")


def unpack(code: int, content: bytes) -> object:
    """For msgpack's `ext_hook`. Raises ValueError for what `pack` does not write."""
    if code != _ARRAY:
        raise ValueError(f"code {code} is not of this format")
    dtype, shape, data = msgpack.unpackb(content)
    if not isinstance(dtype, str) or np.dtype(dtype).hasobject:
        raise ValueError(f"dtype {dtype!r} is not of this format")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
