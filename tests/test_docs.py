"""The documents name what exists."""

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
