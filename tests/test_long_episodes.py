"""The tool behind the figures of docs/pipeline.md, "Long episodes": the direction of its rules."""

import json
import subprocess
import sys

import pytest

from tools import long_episodes

pytestmark = pytest.mark.system

WORDS = (long_episodes.__file__, "--versions", "30", "--playing", "192")


def test_long_episodes_teach_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def figures(*more: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", [*WORDS, *more])
        long_episodes.main()
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    kept = json.loads(subprocess.run([sys.executable, *WORDS], check=True, capture_output=True).stdout)
    halves, waited, in_time = figures("--keep", "0.5"), figures("--wait", "inf"), figures("--staleness", "0")
    assert kept["all_dropped_share"] == 0 < halves["below_4k_dropped_share"]
    assert kept["below_4k_share_of_taught"] > halves["below_4k_share_of_taught"]
    assert waited["below_4k_lost_tokens_share"] < kept["below_4k_lost_tokens_share"] < 1
    assert waited["taught_per_time"] < kept["taught_per_time"]
    assert in_time["all_lost_tokens_share"] == 0
