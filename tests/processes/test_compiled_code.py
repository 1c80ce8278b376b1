"""Where torch.compile keeps its results in the processes that train."""

import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from impala_llm.processes.compiled_code import keep_compiled_code

SHOWS = """
import os
from pathlib import Path
import {imports}
from impala_llm.processes.compiled_code import keep_compiled_code
keep_compiled_code(Path({otherwise!r}))
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def found(home: Path, otherwise: Path, imports: str = "torch", **given: str) -> Path:
    """The folder that torch uses in a new process, after these imports."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    code = SHOWS.format(imports=imports, otherwise=str(otherwise))
    environment |= {"HOME": str(home), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


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
    lasting = found(tmp_path, tmp_path / "run", "impala_llm.learner")
    assert lasting == tmp_path / ".cache" / "impala_llm" / "inductor" and lasting.stat().st_mode & 0o777 == 0o700
    own = tmp_path / "own"
    assert found(tmp_path, tmp_path / "run", TORCHINDUCTOR_CACHE_DIR=str(own)) == own
    lasting.chmod(0o777)
    assert found(tmp_path, tmp_path / "run") == tmp_path / "run"
