"""Shape and type checks that the functions of this folder run on entry.

Invariant: a wrong argument raises an error that names the argument, its shape or dtype and the expected one. It is
never broadcast in a later operation.
"""

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float64)


def require_same_floats(*named: tuple[str, Tensor], ndim: int) -> None:
    """Require that all tensors have the shape and dtype, float32 or float64, of the first one.

    Args:
        named: (name for the error message, tensor) each.
        ndim: number of dimensions that they must have.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong shape.
    """
    first_name, first = named[0]
    require_float(first_name, first, ndim=ndim)
    for name, tensor in named[1:]:
        if tensor.shape != first.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, {first_name} has {list(first.shape)}: they must be equal"
            )
        require_dtype_of(name, tensor, first_name, first)


def require_float(name: str, tensor: Tensor, *, ndim: int) -> None:
    """Require a float32 or float64 tensor.

    Args:
        name: for the error message.
        tensor: to check.
        ndim: number of dimensions that it must have.

    Raises:
        TypeError: wrong dtype.
        ValueError: wrong number of dimensions.
    """
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}: convert it to float32 or float64")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: {ndim} dimension(s) expected")


def require_dtype_of(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require that two tensors have the same dtype.

    Args:
        name, tensor: the tensor to check, with its name for the error message.
        other_name, other: the tensor that it is compared with.

    Raises:
        TypeError: the dtypes differ.
    """
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, {other_name} has {other.dtype}: they must be equal")


def require_bootstrap(bootstrap_value: Tensor, values: Tensor) -> None:
    """Require bootstrap values of the dtype of the values, one for each column.

    Args:
        bootstrap_value: float[B].
        values: float[T, B].

    Raises:
        TypeError: the dtypes differ.
        ValueError: the numbers of columns differ.
    """
    require_float("bootstrap_value", bootstrap_value, ndim=1)
    require_dtype_of("bootstrap_value", bootstrap_value, "values", values)
    if bootstrap_value.shape[0] != values.shape[1]:
        raise ValueError(
            f"bootstrap_value has {bootstrap_value.shape[0]} elements, values has {values.shape[1]} columns: one each"
        )


def require_indices(name: str, indices: Tensor, length: int, bound: int | None = None) -> None:
    """Require int64 indices, in any order.

    Args:
        name: for the error message.
        indices: int64[length], >= 0.
        length: number of indices.
        bound: exclusive upper limit; None: there is none.

    Raises:
        TypeError, ValueError: wrong dtype, shape or range.
    """
    _require_index_shape(name, indices, length)
    if length:
        low, high = (int(edge) for edge in torch.aminmax(indices))
        _require_range(name, low, high, bound)


def require_segment_ids(name: str, segment_ids: Tensor, length: int, num_segments: int | None = None) -> None:
    """Require non-decreasing int64 segment ids. An id may be missing: that segment is empty.

    Args:
        name: for the error message.
        segment_ids: int64[length], >= 0.
        length: number of elements.
        num_segments: exclusive upper limit of the ids; None: there is none.

    Raises:
        TypeError, ValueError: wrong dtype, shape, order or range.
    """
    _require_index_shape(name, segment_ids, length)
    if length == 0:
        return
    if bool((segment_ids[1:] < segment_ids[:-1]).any()):
        raise ValueError(f"{name} decreases somewhere: lay the rows end to end, in order")
    _require_range(name, int(segment_ids[0]), int(segment_ids[-1]), num_segments)


def require_at_least(name: str, value: float, smallest: float) -> None:
    """Require `value` >= `smallest`; NaN is refused.

    Args:
        name: for the error message.
        value, smallest: the number, and its least allowed value.

    Raises:
        ValueError: the number is smaller, or NaN.
    """
    if not value >= smallest:
        raise ValueError(f"{name} is {value}: it must be at least {smallest:g}")


def require_positive(name: str, value: float) -> None:
    """Require `value` > 0; NaN is refused.

    Args:
        name: for the error message.
        value: to check.

    Raises:
        ValueError: it is not positive.
    """
    if not value > 0:
        raise ValueError(f"{name} is {value}: it must be positive, such as 1")


def _require_index_shape(name: str, indices: Tensor, length: int) -> None:
    if indices.dtype != torch.int64:
        raise TypeError(f"{name} has dtype {indices.dtype}: int64 expected")
    if indices.shape != (length,):
        raise ValueError(f"{name} has shape {list(indices.shape)}: [{length}] expected, one for each element")


def _require_range(name: str, low: int, high: int, bound: int | None) -> None:
    if low < 0:
        raise ValueError(f"{name} holds {low}: indices start at 0")
    if bound is not None and high >= bound:
        raise ValueError(f"{name} holds {high}, but there are only {bound} of what it counts")


def require_discounts(discounts: Tensor) -> None:
    """Require discounts, float[T, B] of padded rows or float[N], in [0, 1]. Behind the first 0 of a padded row may be
    anything.

    Raises:
        ValueError: one is not.
    """
    is_wrong = ~((discounts >= 0.0) & (discounts <= 1.0))
    if discounts.ndim == 2:
        is_wrong &= (discounts == 0.0).cumsum(0) == 0
    if is_wrong.any():
        raise ValueError(f"discounts holds {float(discounts[is_wrong][0]):g}: it must lie in [0, 1]")
