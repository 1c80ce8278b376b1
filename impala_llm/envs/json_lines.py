"""Files of JSON lines: one reader for all files of tasks."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Read a file with a JSON object in each line. A byte-order mark, and blank lines, are passed over.

    Returns:
        The objects, by the number of their line, from 1.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not in UTF-8, or a line, which the message names, is no object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}): convert it") from None
    found: dict[int, dict[str, Any]] = {}
    # Not splitlines, which parts a line where a text has one of Unicode's separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: this is not JSON ({error}): correct it") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: each line must be a JSON object: correct it")
        found[number] = row
    return found
