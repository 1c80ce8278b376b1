"""The real SGLang for system tests: where it is, the mark of tests that need it, a small model, settings for a CPU."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest

from impala_llm.engines.sglang.launch_args import ServerSettings
from tests.helpers import has_ended, make_tiny_model

ROOT = Path(__file__).parents[2]
INTERPRETER = "IMPALA_LLM_SGLANG_PYTHON"
"""Environment variable that names an interpreter with SGLang."""
DEADLINE_S = 30.0
"""Deadline for the end of a server's processes."""


@cache
def sglang_python() -> str | None:
    """An interpreter that has SGLang: the named one, that of .venv-sglang, or the running one. None: there is none.

    A named one is not looked into: where it lacks SGLang, the tests shall fail and not be skipped.
    """
    if named := os.environ.get(INTERPRETER):
        return shutil.which(named) or named
    installed = ROOT / ".venv-sglang" / "bin" / "python"
    if installed.is_file():
        return str(installed)
    return sys.executable if importlib.util.find_spec("sglang") else None


def descendants(but_for: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the descendants of this process, but for multiprocessing's tracker, which lives to the end of pytest.

    Args:
        but_for: those that other tests have left, such as environments that live as long as the process.
    """
    found = [each for each in psutil.Process().children(recursive=True) if not _is_tracker(each)]
    return [each for each in found if each not in but_for]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline()) and (
            process.ppid() == os.getpid()
        )
    except psutil.NoSuchProcess:
        return True


def without_guard(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that are no guard of a server."""
    return [each for each in processes if "sglang/guard.py" not in " ".join(each.cmdline())]


def find(processes: Iterable[psutil.Process], word: str) -> psutil.Process:
    """The only one with this word on its command line."""
    (found,) = [each for each in processes if any(word in argument for argument in each.cmdline())]
    return found


def assert_all_end(processes: Collection[psutil.Process]) -> None:
    """Wait until they have ended."""
    assert processes
    assert [each for each in processes if not has_ended(each, DEADLINE_S)] == []


needs_sglang = pytest.mark.skipif(
    sglang_python() is None,
    reason=f"NO SGLANG HERE: run tools/install_sglang_cpu.sh, or set {INTERPRETER} to an interpreter that has it",
)


def tiny_checkpoint(path: Path) -> Path:
    """A random float32 Qwen3 with tokenizer (100 characters) and chat template, 2,048 positions; returns the path."""
    return make_tiny_model(path)


def cpu_settings(model: Path, folder: Path, max_length: int = 512, max_running: int = 16) -> ServerSettings:
    """Settings of a server that logs into the folder. Only for tests with the mark `needs_sglang`."""
    python = sglang_python()
    assert python is not None
    return ServerSettings(
        model=model, log=folder / "sglang.log", python=python, max_length=max_length, max_running=max_running
    )


def shared_files() -> set[str]:
    """Names in shared memory of what SGLang leaves there."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("sglang_", "sgl_shm"))}


def mapped_shared_files(processes: Iterable[psutil.Process]) -> set[str]:
    """Those of them that these processes have mapped: other servers on this machine have files of their own."""
    mapped: set[str] = set()
    for process in processes:
        with suppress(psutil.Error):
            mapped |= {Path(region.path).name for region in process.memory_maps()}
    return mapped & shared_files()
