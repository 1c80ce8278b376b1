"""Compiled code is kept for the next process where that is possible, and is no obstacle where it is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import logging
import resource
import sys

logging.basicConfig()
from impala_llm.compiled import compiled


@compiled()
def double(x):
    return 2 * x


if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no byte more can be written to any file
print(double(21), sum(double.stats.cache_hits.values()))
"""


def run(folder: Path, *arguments: str) -> tuple[str, str]:
    """What the module prints and says with its cache in `folder`."""
    script = folder / "module.py"
    script.write_text(MODULE)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.system
def test_code_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    assert [run(tmp_path) for _ in range(2)] == [("42 0", ""), ("42 1", "")]


@pytest.mark.system
def test_a_full_disk_costs_the_compilation_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        printed, said = run(tmp_path, "full")
        assert printed == "42 0"
        assert "cannot be kept" in said and str(tmp_path / "cache") in said


@pytest.mark.system
def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    run(tmp_path)
    indices = list((tmp_path / "cache").rglob("*.nbi"))
    for path in indices:
        path.write_bytes(b"")  # as after a crash of the machine
    printed, said = run(tmp_path)
    assert indices and printed == "42 0" and "compiled again" in said
    assert run(tmp_path) == ("42 1", "")
