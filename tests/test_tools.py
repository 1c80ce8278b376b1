"""Parts of the scripts in tools/ that nothing else runs."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("tool", "words", "said"),
    [
        ("lost_hosts", "--losses 0", "--losses, --minutes and --updates must be above 0"),
        ("lost_hosts", "--losses many", "argument --losses: invalid"),
        ("seeded_run", "toy_ppo --bogus", "unrecognized arguments: --bogus"),
        ("seeded_run", "toy_ppo toy_sac", "toy_sac is no run: choose of toy_group_relative, toy_ppo, "),
        ("benchmark_tables", "/nope.jsonl", "/nope.jsonl cannot be read: No such file or directory"),
        ("quickstart_results", "/nope", "/nope/tensorboard/metrics.jsonl is missing: name folders of finished runs"),
    ],
)
def test_words_that_a_tool_cannot_take_are_refused_in_a_sentence(
    tool: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *words.split()])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"tools.{tool}").main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error.splitlines()[-1]


def test_each_row_of_gpu_checks_table_has_a_part_that_can_be_run() -> None:
    from tools import _gpu_check_parts, gpu_check  # here: the first loads torch

    assert list(gpu_check.PARTS) == list(_gpu_check_parts.PARTS)
