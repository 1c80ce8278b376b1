"""Where torch.compile keeps its results in the processes that train."""

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from impala_llm.processes.compiled_code import VARIABLE, keep_compiled_code

SHOWS = """
import os, sys
from pathlib import Path
import impala_llm.learner
from impala_llm.processes.compiled_code import VARIABLE, keep_compiled_code
from torch._inductor.runtime.cache_dir_utils import cache_dir

def show():
    keep_compiled_code(Path(sys.argv[1]))
    print(cache_dir())

show()
os.environ[VARIABLE] = sys.argv[2]
show()
del os.environ[VARIABLE]
(Path.home() / ".cache/impala_llm/inductor").chmod(0o777)
show()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF headers")
def test_a_library_whose_compiler_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would load it at each later start, and fail."""
    folder = tmp_path / ".cache" / "impala_llm" / "inductor" / "ab"
    folder.mkdir(parents=True)
    whole = Path(msgpack._cmsgpack.__file__).read_bytes()
    for name, content in {
        "whole": whole,
        "empty": b"",
        "cut": whole[:-100],
        "begun": whole[:10],
        "at_work": b"",
    }.items():
        (folder / f"{name}.so").write_bytes(content)
    compiler = "import sys; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", compiler, "-o", str(folder / "at_work.so")]
    monkeypatch.setenv("HOME", str(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        keep_compiled_code(tmp_path / "run", {})
        assert {path.stem for path in folder.iterdir()} == {"whole", "at_work"}
        other.communicate()
    keep_compiled_code(tmp_path / "run", {})
    assert {path.stem for path in folder.iterdir()} == {"whole"}


@pytest.mark.system
def test_compiled_layers_lie_where_no_other_user_can_put_code(tmp_path: Path) -> None:
    """By itself; where the user names a folder; and where others may write into that of before."""
    own, run = tmp_path / "own", tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", SHOWS, str(run), str(own)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lasting = tmp_path / ".cache" / "impala_llm" / "inductor"
    assert [Path(line) for line in done.stdout.splitlines()[-3:]] == [lasting, own, run]
