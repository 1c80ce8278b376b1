"""The tool behind the figures of docs/pipeline.md, "Long episodes": the direction of its rules."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "long_episodes.py"


def figures(*args: str) -> dict[str, float]:
    command = [sys.executable, str(TOOL), "--versions", "30", "--playing", "192", *args]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def test_long_episodes_teach_where_they_are_kept() -> None:
    kept, halves, waited, in_time = (
        figures(*args) for args in ((), ("--keep", "0.5"), ("--wait", "inf"), ("--staleness", "0"))
    )
    assert kept["all_dropped_share"] == 0 < halves["below_4k_dropped_share"]
    assert kept["below_4k_share_of_taught"] > halves["below_4k_share_of_taught"]
    assert waited["below_4k_lost_tokens_share"] < kept["below_4k_lost_tokens_share"] < 1
    assert waited["taught_per_time"] < kept["taught_per_time"]
    assert in_time["all_lost_tokens_share"] == 0
