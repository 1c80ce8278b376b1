"""Benchmarks whose processes begin with their modules imported: in tests to import them takes most of the time."""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from unittest import mock


@contextlib.contextmanager
def preloaded(modules: Sequence[str]) -> Iterator[None]:
    """Who asks multiprocessing for new processes gets forks of one that has imported these modules and done nothing
    else. It is gone afterwards, so that nobody takes it for what a test has left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    try:
        with mock.patch.object(multiprocessing, "get_context", lambda method: context):
            yield
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
