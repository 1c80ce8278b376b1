"""The documents name what exists."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_files_and_functions_on_the_way_of_a_trajectory_and_of_the_weights_exist_and_are_counted() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text()
    _, text = text.split("## Code path of a trajectory and of the weights\n")
    paths = re.split(r"^The policy from ", text.partition("\n## ")[0], flags=re.MULTILINE)
    assert len(paths) == 2
    for path in paths:
        rows = re.findall(r"^\| ([\w/]+\.py) \| `(\w+)` \|", path, re.MULTILINE)
        table = "\n".join(line for line in path.splitlines() if line.startswith("| "))
        helpers = set(re.findall(r"`([\w/]+\.py)`", table))
        assert f"{len(rows)} files and {len(helpers)} in brackets" in path
        assert not helpers & {file for file, _ in rows}
        for file, function in rows:
            source = (ROOT / "impala_llm" / file).read_text()
            assert re.search(rf"^ *(async )?def {function}\(", source, re.MULTILINE), f"{file} has no {function}"
        assert all((ROOT / "impala_llm" / file).is_file() for file in helpers)


def test_scripts_that_the_documents_call_by_their_path_can_be_called_so() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pattern = re.compile(r"^(?: {4})?(tools/\w+\.(?:py|sh))\b", re.MULTILINE)
    called = {path for page in pages for path in pattern.findall(page.read_text())}
    assert len(called) > 5
    assert [path for path in sorted(called) if not os.access(ROOT / path, os.X_OK)] == []
