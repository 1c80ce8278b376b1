"""tools/gpu_check.sh without a GPU: every part runs through the same script on the CPU, with gloo in place of NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.sglang import needs_sglang, sglang_python

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def check(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Status and rows of the table, by part."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "tools/gpu_check.sh"), "--json", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr
    return done.returncode, {row["part"]: row for row in rows}


def test_every_part_passes_on_the_cpu_and_names_its_figure() -> None:
    words = {
        "engine": "nats apart",
        "packed": "gradients differ by",
        "bfloat16": "nats apart",
        "ranks": "updates differ by",
        "fsdp2": "updates differ by",
        "checkpoint": "going on from update ",
        "speed": "TFLOP/s, MFU ",
        "idle": "learner idle",
    }
    status, rows = check("--device", "cpu", "--peak-tflops", "1", *words)
    assert list(rows) == list(words)
    for part, word in words.items():
        assert rows[part]["result"] == "pass" and word in rows[part]["figure"], rows[part]
    assert status == 0


def test_what_needs_a_gpu_is_skipped_without_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, rows = check("engine", "ranks")
    assert status == 0
    assert rows["engine"]["result"] == rows["ranks"]["result"] == "skipped"
    assert "needs a GPU, and there are 0" in rows["engine"]["figure"]
    assert "needs 2 GPUs, and there are 0" in rows["ranks"]["figure"]


def test_a_part_that_breaks_fails_alone_with_the_reason(tmp_path: Path) -> None:
    status, rows = check("--device", "cpu", "--model", str(tmp_path / "none"), "speed", "bfloat16")
    assert status == 1
    assert rows["speed"]["result"] == "FAIL" and str(tmp_path / "none") in rows["speed"]["figure"]
    assert rows["bfloat16"]["result"] == "pass"


@needs_sglang
def test_weights_pass_to_sglang_on_the_cpu() -> None:
    """By a process group; `sglang-disk` is the same run with another setting, as in test_sglang_train.py."""
    python = sglang_python()
    assert python is not None
    status, rows = check("--device", "cpu", "--sglang-python", python, "sglang-group")
    assert status == 0, rows
    figure = rows["sglang-group"]["figure"]
    assert "nats between engine and learner" in figure and "pause a version" in figure and "versions sent" in figure
