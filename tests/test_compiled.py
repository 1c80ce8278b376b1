"""Compiled code is kept for the next process where that is possible, and is no obstacle where it is not."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
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


def run(folder: Path, *arguments: str, inside: Sequence[str] = (), cache: str = "cache") -> tuple[str, str]:
    """Output and errors of the module with its cache in `folder`. inside: command before its own."""
    script = folder / "module.py"
    if not script.exists():
        script.write_text(MODULE)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache and str(folder / cache), "XDG_CACHE_HOME": "/proc/nowhere"}
    command = [*inside, sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.system
def test_code_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    assert [run(tmp_path) for _ in range(2)] == [("42 0", ""), ("42 1", "")]


@pytest.mark.system
def test_a_constant_that_changes_in_a_file_beside_it_compiles_a_function_again(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        MODULE.replace("2 * x", "FACTOR * x").replace("import sys", "import sys\nfrom beside import FACTOR")
    )
    for factor in (2, 3):
        (tmp_path / "beside.py").write_text(f"FACTOR = {factor}\n")
        assert [run(tmp_path) for _ in range(2)] == [(f"{21 * factor} 0", ""), (f"{21 * factor} 1", "")]


@pytest.mark.system
def test_a_full_disk_costs_the_compilation_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        printed, said = run(tmp_path, "full")
        assert printed == "42 0"
        assert "cannot be kept" in said and str(tmp_path / "cache") in said


@pytest.mark.system
@pytest.mark.parametrize("kind", ["nbi", "nbc"])  # the index, and the code
def test_a_damaged_cache_is_compiled_again(tmp_path: Path, kind: str) -> None:
    run(tmp_path)
    files = list((tmp_path / "cache").rglob(f"*.{kind}"))
    for content in (b"", b"\0" * 1000, b"garbage"):  # as after a crash of the machine
        for path in files:
            path.write_bytes(content)
        printed, said = run(tmp_path)
        assert files and printed == "42 0" and "compiled again" in said
    assert run(tmp_path) == ("42 1", "")


READ_ONLY = ("unshare", "--mount", "sh", "-c", 'mount --bind -o ro "$0" "$0" && exec "$@"')
"""Followed by a folder and a command, for which the folder cannot be written."""


@pytest.mark.system
def test_a_user_without_a_place_of_his_own_reads_what_the_installation_brings(tmp_path: Path) -> None:
    inside = (*READ_ONLY, str(tmp_path))
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to mount here")
    assert run(tmp_path, cache="") == ("42 0", "")  # who installs it compiles it
    assert run(tmp_path, cache="", inside=inside) == ("42 1", "")
    for path in (tmp_path / "__pycache__").glob("*.nb*"):
        path.unlink()
    assert run(tmp_path, cache="", inside=inside) == ("42 0", "")  # without either it is compiled each time
