"""Loops that numba compiles: at the first call, without the GIL, kept on disk for the next process.

Invariant: the cache only saves time, and always matches the sources. numba checks the file of a function alone; here a
change in a file from which it imports constants or functions makes it compile anew as well. A disk that is full or
cannot be written, and a damaged file, cost the compilation and one warning, and never make a call fail.

Compiled code is kept beside the source, or, if this user cannot write there, in the user's own cache folder; a user
without one only reads the code beside the source.
NUMBA_CACHE_DIR names another one: its files are unpickled, so that no other user may write there.
"""

import ast
import contextlib
import functools
import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, InTreeCacheLocator
from numba.core.registry import cpu_target

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Installed(InTreeCacheLocator):
    """Cache beside the source, read-only: that of an installation which was compiled when it was made."""

    def ensure_cache_path(self) -> None:
        if not any(Path(self.get_cache_path()).glob("*.nbi")):
            raise FileNotFoundError(f"{self.get_cache_path()} holds no compiled code")


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes = [*CompileResultCacheImpl._locator_classes, _Installed]


class _Cache(FunctionCache):
    """numba's own, but for what happens when its files fail or cannot be written."""

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = _stamp(Path(function.__code__.co_filename))
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # of pickled bytes that were changed anything may come
            _log.warning("compiled code of %s cannot be read and is compiled again: %r", self.cache_path, error)
            with contextlib.suppress(OSError):
                self.flush()  # otherwise the next one could not be kept
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _log.warning("compiled code cannot be kept in %s, each start compiles again: %s", self.cache_path, error)


@functools.cache
def _stamp(path: Path) -> str:
    """Hash of a source file and of those from which it imports names, theirs included within this package."""
    source = path.read_bytes()
    digest = hashlib.blake2b(source)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and statement.module in sys.modules:
            file = getattr(sys.modules[statement.module], "__file__", None)
            if file and statement.module.startswith(f"{__package__}."):
                digest.update(_stamp(Path(file)).encode())
            elif file and file.endswith(".py"):
                digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def import_registries() -> None:
    """Import what numba would import at the first call of a compiled function, so that forks of this process need not:
    its own functions and those of the C library, in Python and in LLVM."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """A decorator: `numba.njit` that releases the GIL, with further options of it."""

    def compile_(function: _Function) -> Any:
        dispatcher = numba.njit(nogil=True, **options)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # no folder for the cache: an installation that is read-only, a user without a home
            _log.info("compiled code of %s is kept nowhere", function.__name__)
        return dispatcher

    return compile_
