"""What is committed as a result can be run again: today's tree takes its settings."""

import json
import re
from pathlib import Path

import pytest

from impala_llm.config import load

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SETTINGS = sorted(RESULTS.rglob("*.yaml"))
STUDIES = sorted(RESULTS.rglob("*.jsonl"))


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_settings_of_a_run_load(path: Path) -> None:
    # The interpreter of an SGLang server is where that machine has it, and so are a model that was downloaded and a
    # policy that a warm start made.
    own = (
        ["model.path=tiny_shopper"] if re.search(r"^  path: (outputs|models)/", path.read_text(), re.MULTILINE) else []
    )
    config = load([f"experiment={path}", "engine.python=null", *own])
    assert config.run.name == path.stem


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_settings_of_a_study_load(path: Path) -> None:
    rows = [json.loads(line)["settings"] for line in path.read_text().splitlines()]
    assert rows
    # Each override once: 81 losses that differ in which four of twelve words they have need not all be loaded.
    seen: set[str] = set()
    for number, overrides in enumerate(row.get("overrides", ()) for row in rows):
        if number == 0 or not seen.issuperset(overrides):
            load(overrides)
            seen.update(overrides)


def test_there_are_results() -> None:
    assert len(SETTINGS) >= 5 and len(STUDIES) >= 5
