import logging

import pytest

from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.processes.limited_warnings import RateLimitedWarnings


def test_long_gaps_count_as_short_ones() -> None:
    real = [100.0]
    clock = ActiveClock(max_gap_s=2.0, monotonic=lambda: real[0])
    real[0] += 1.5
    assert clock.tick() == 1.5
    real[0] += 3600.0
    assert clock.tick() == 3.5
    assert clock.now == 3.5


def test_what_a_peer_says_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    RateLimitedWarnings().log("an episode failed", "größer\n12:00 ERROR all is lost\r\x1b[2J\u202e\ud800")
    [record] = caplog.records
    shown = "größer\\n12:00 ERROR all is lost\\r\\x1b[2J\\u202e\\ud800"
    assert record.message == f"an episode failed: {shown}"


def test_repeated_warnings_are_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RateLimitedWarnings(interval_s=3600.0)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            warnings.log("malformed", f"number {number}")
        warnings.log("other", "once")
    assert [record.message for record in caplog.records] == [
        "malformed: number 0",
        "other: once",
    ]
