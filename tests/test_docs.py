"""The documents name what exists."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_files_and_functions_on_the_way_of_a_trajectory_exist() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text()
    rows = re.findall(r"^\| ([\w/]+\.py) \| `(\w+)` \|", text, re.MULTILINE)
    assert len(rows) > 20
    for file, function in rows:
        source = (ROOT / "impala_llm" / file).read_text()
        assert re.search(rf"^ *(async )?def {function}\(", source, re.MULTILINE), f"{file} has no {function}"


def test_scripts_that_the_documents_call_by_their_path_can_be_called_so() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pattern = re.compile(r"^(?: {4})?(tools/\w+\.(?:py|sh))\b", re.MULTILINE)
    called = {path for page in pages for path in pattern.findall(page.read_text())}
    assert len(called) > 5
    assert [path for path in sorted(called) if not os.access(ROOT / path, os.X_OK)] == []
