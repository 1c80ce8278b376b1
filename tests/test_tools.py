"""Parts of the scripts in tools/ that nothing else runs."""

import os
import subprocess
from pathlib import Path

from tests.helpers import write_program

TOOLS = Path(__file__).parents[1] / "tools"


def find_python(**environment: str) -> subprocess.CompletedProcess[str]:
    code = f"name=test venv=none; . '{TOOLS}/lib/venv.sh'; find_python"
    return subprocess.run(["bash", "-c", code], env=os.environ | environment, capture_output=True, text=True)


def test_an_interpreter_may_lie_in_a_folder_with_a_space(tmp_path: Path) -> None:
    (tmp_path / "my pythons").mkdir()
    python = write_program(tmp_path / "my pythons" / "python3", "")
    assert find_python(PYTHON=str(python)).stdout == f"{python}\n"
    assert find_python(PYTHON="").stdout
    none = find_python(PYTHON=str(tmp_path / "no python"))
    assert none.returncode == 1 and f"no Python >= 3.11 among: {tmp_path}/no python" in none.stderr


def test_the_facts_of_a_small_policy_are_the_last_losses_that_were_written() -> None:
    """The last line has no loss of training where the last measurement follows what was told a moment before."""
    from tools import make_tiny_policy  # here: it loads torch

    lines = ['{"step": 8, "sft/loss": 0.75, "sft/held_out_loss": 0.5}', '{"step": 9, "sft/loss": 0.25}']
    assert make_tiny_policy.last_values(lines, "step", "sft/loss", "sft/held_out_loss") == [9, 0.25, 0.5]
    assert make_tiny_policy.last_values(lines[1:], "sft/loss", "sft/held_out_loss") == [0.25, None]
