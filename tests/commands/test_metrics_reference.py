"""docs/metrics.md has every metric, as it is declared."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from impala_llm.commands.metrics_reference import PARTS, WATCH
from impala_llm.observability.metrics import describe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


@pytest.mark.system
def test_the_page_of_metrics_is_what_the_declarations_say() -> None:
    """In a process of its own: tests of credits and losses declare more."""
    command = [sys.executable, "-m", "impala_llm.commands.metrics_reference"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    assert PAGE.read_text() == written, "python -m impala_llm.commands.metrics_reference > docs/metrics.md"
    names = re.findall(r"^- `([\w/]+)`", written, re.MULTILINE)
    assert len(names) == len(set(names)) > 150
    assert {name.partition("/")[0] for name in names} == PARTS.keys()


def test_metrics_to_watch_exist() -> None:
    assert [describe(name).name for names, _, _ in WATCH for name in names]
