#!/usr/bin/env python
"""Write the results of benchmarks into docs/benchmarks.md, between its two markers.

    python tools/benchmark_tables.py outputs/benchmarks.jsonl      # one line of `impala-llm bench NAME --json` each

A ratio of ours to a peer's that is on the wrong side of 1 is marked.
"""

import argparse
import json
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by tools/benchmarks.sh -->", "<!-- end of figures -->"
MORE_IS_BETTER = ("ratio_", "embedded_")
LESS_IS_BETTER = ("cpu_ratio_", "latency_p99_ratio_")


def section(result: dict[str, Any]) -> str:
    """Headings and tables of one benchmark."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"### {result['bench']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + (f"; left out: {', '.join(result['left_out'])}" if result["left_out"] else "")
        + ".",
        "",
        "| figure | value | |",
        "|---|---|---|",
        *(f"| `{name}` | {number(value)} | {'behind' if behind(name, value) else ''} |"
          for name, value in result["figures"].items()),
        "",
    ]  # fmt: skip
    columns = list(dict.fromkeys(column for row in result["rows"] for column in row))
    lines += ["<details><summary>rows</summary>", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(number(row.get(column)) for column in columns) + " |" for row in result["rows"]]
    return "\n".join([*lines, "", "</details>", ""])


def behind(figure: str, value: float) -> bool:
    """Whether a peer is ahead of us."""
    return (figure.startswith(MORE_IS_BETTER) and value < 1) or (figure.startswith(LESS_IS_BETTER) and value > 1)


def number(value: object) -> str:
    """Three digits; nothing where there is nothing."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    try:
        results = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        parser.error(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n" + "\n".join(map(section, results)) + f"{END}{after}")


if __name__ == "__main__":
    main()
