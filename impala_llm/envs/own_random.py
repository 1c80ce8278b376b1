"""Keeps what one episode draws from the global generators of Python and NumPy apart from everybody else's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class OwnRandom:
    """The global generators as one episode's own, for libraries that draw from them.

    >>> own = OwnRandom(seed=3)
    >>> with own.drawn():
    ...     first = random.random()
    >>> _ = random.random()  # of somebody else
    >>> with own.drawn():
    ...     second = random.random()
    >>> with OwnRandom(seed=3).drawn():
    ...     (first, second) == (random.random(), random.random())
    True
    """

    def __init__(self, seed: int) -> None:
        outside = _states()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._own = _states()
        _restore(outside)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """The generators are the episode's inside, and go on from where they were outside. Nothing may be awaited."""
        outside = _states()
        _restore(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _restore(outside)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
