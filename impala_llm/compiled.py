"""Loops that numba compiles: at the first call, without the GIL, kept on disk for the next process."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """A decorator: `numba.njit` that releases the GIL, with further options of it."""

    def compile_(function: _Function) -> _Function:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # no folder for the cache: an installation that is read-only, a user without a home
            return numba.njit(nogil=True, **options)(function)

    return compile_
