"""Where torch.compile keeps its results in the processes that train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOWS = """
import os
from pathlib import Path
import impala_llm.learner
from impala_llm.processes.compiled_code import keep_compiled_code
keep_compiled_code(Path({otherwise!r}))
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def found(home: Path, otherwise: Path, **given: str) -> Path:
    """The folder that torch uses in a new process, after the learner's imports, which are torch's too."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    code = SHOWS.format(otherwise=str(otherwise))
    environment |= {"HOME": str(home), **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


@pytest.mark.system
def test_compiled_layers_lie_where_no_other_user_can_put_code(tmp_path: Path) -> None:
    lasting = found(tmp_path, tmp_path / "run")
    assert lasting == tmp_path / ".cache" / "impala_llm" / "inductor" and lasting.stat().st_mode & 0o777 == 0o700
    own = tmp_path / "own"
    assert found(tmp_path, tmp_path / "run", TORCHINDUCTOR_CACHE_DIR=str(own)) == own
    lasting.chmod(0o777)
    assert found(tmp_path, tmp_path / "run") == tmp_path / "run"
