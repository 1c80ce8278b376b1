"""Files of JSON lines: one reader for all files of tasks."""

import json
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object in each line. A byte-order mark, and blank lines at its end, are passed over.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not in UTF-8, or a line, which the message names, is no object. A blank line before the last
            task is none, since tasks have the numbers of their lines.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}): convert it") from None
    found: list[dict[str, Any]] = []
    # Not splitlines, which parts a line where a text has one of Unicode's separators.
    for number, line in enumerate(text.split("\n") if text else (), 1):
        if not line.strip():
            raise ValueError(f"{path}, line {number}, is blank: remove it")
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: this is not JSON ({error}): correct it") from None
        if not isinstance(row, dict):
            raise ValueError(f'{path}, line {number}: a mapping such as {{"prompt": "7 + 5 ="}} is expected')
        found.append(row)
    return found
