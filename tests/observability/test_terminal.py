import io
import re

import pyte

from impala_llm.observability.metrics import METRICS, describe
from impala_llm.observability.terminal import PATIENCE_S, PLAIN_INTERVAL_S, SHOWN, TerminalView, counting, render

EVERYTHING = {
    "rollout/window_score": 0.4567,
    "rollout/window_success_rate": 0.125,
    "rollout/window_episodes": 512.0,
    "actor/generated_tokens_per_s": 3900.0,
    "time/idle_share": 0.25,
    "staleness/oldest": 3.0,
    "ratio/max": 1.0498,
    "loss/clip_share": 0.18,
}


CUT = "ratio max 1.05, clipped 18%"


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTerminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True

    def rows(self) -> list[str]:
        """Rows of the screen, without the empty ones at its end."""
        screen = pyte.Screen(80, 50)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        return "\n".join(row.rstrip() for row in screen.display).rstrip().splitlines()


class Recorder(dict[str, float]):
    """A metrics mapping that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def get(self, name: str, default: float | None = None) -> float | None:  # type: ignore[override]
        self.asked.add(name)
        return default


def test_where_a_run_is_counts_by_what_ends_it() -> None:
    with TerminalView(1500, io.StringIO()) as view:
        assert view.position == ""
        view.update(30, {}, 0.25)  # by learner.max_minutes
        assert view.position == "30 (25%)"


def test_five_lines_whether_or_not_there_are_numbers() -> None:
    assert len(render(EVERYTHING, "1/10")) == 5
    empty = render({}, "1/10")
    assert len(empty) == 5
    assert "score -" in empty[1]


def test_the_view_asks_only_for_declared_metrics() -> None:
    recorder = Recorder()
    render(recorder, "")
    assert recorder.asked == set(SHOWN)
    for name in recorder.asked:
        describe(name)


def test_numbers_are_shown_with_their_units() -> None:
    text = "\n".join(render(EVERYTHING, "1/10"))
    for shown in ("score 0.457", "success 12.5% (last 512)", "generated 3,900 tok/s", "(idle 25%)", "(oldest 3)", CUT):
        assert shown in text


def test_an_evaluation_inside_of_the_run_has_a_line_once_there_was_one() -> None:
    found = {
        "evaluation/score": 0.512,
        "evaluation/score_low": 0.43,
        "evaluation/score_high": 0.594,
        "evaluation/update": 20.0,
        "evaluation/best_score": 0.53,
        "evaluation/best_update": 10.0,
    }
    *others, line = render(found, "21 (5%)")
    assert len(others) == 5
    assert line == "evaluated update 20  score 0.512 [0.430, 0.594]  best 0.530 at 10"


def test_no_line_is_longer_than_80_columns() -> None:
    large = dict.fromkeys(METRICS, 99_999.0) | {
        "rollout/window_score": 1.0,
        "rollout/window_success_rate": 1.0,
        "rollout/window_episodes": 1_024.0,
        "rollout/turns": 100.0,
        "loss/policy": -9.0,
        "loss/value": 9.0,
        "loss/entropy": 10.0,
        "optimizer/gradient_norm": 999.0,
        "optimizer/learning_rate": 1e-3,
        "staleness/mean": 255.5,
        "staleness/oldest": 256.0,
        "ratio/max": 10.25,
        "loss/clip_share": 1.0,
        "ratio/ess": 1.0,
        "actor/idle_share": 1.0,
        "time/idle_share": 1.0,
        "evaluation/score": 1.0,
        "evaluation/score_low": 1.0,
        "evaluation/score_high": 1.0,
        "evaluation/best_score": 1.0,
    }
    for line in render(large, "100000 (100%)  100:00:00 gone, about 100:00:00 to go"):
        assert len(line) < 80, line


def test_without_a_terminal_lines_come_now_and_then_and_at_both_ends() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(100, stream, clock) as view:
        for step in range(1, 101):
            clock.now += PLAIN_INTERVAL_S / 5
            view.update(step, {"rollout/window_score": step / 100})
    lines = stream.getvalue().splitlines()
    shown = [int(re.match(r"update (\d+) \(", line).group(1)) for line in lines]  # type: ignore[union-attr]
    assert shown == [1, *range(6, 100, 5), 100]
    assert "score 1.000" in lines[-1]
    assert "\x1b" not in stream.getvalue()


def test_the_clock_of_a_run_that_goes_on_counts_from_its_first_start() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(200, stream, clock) as view:
        clock.now = 20.0
        view.update(101, {"progress/seconds": 300.0})
    assert "101 (50%)  5:00 gone" in stream.getvalue()


def test_the_time_to_go_follows_from_the_pace_after_the_first_step() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(200, stream, clock) as view:
        clock.now = 90.0
        view.update(1, {}, progress=0.1)
        clock.now = 120.0
        view.update(2, {}, progress=0.2)
    # a tenth took 30 s, eight tenths are left
    assert "2 (20%)  2:00 gone, about 4:00 to go" in stream.getvalue()


def test_a_metric_that_a_step_lacks_keeps_its_last_value() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(2, stream, clock) as view:
        view.update(1, {"rollout/window_score": 0.75})
        view.update(2, {})
    assert stream.getvalue().splitlines()[-1].count("score 0.750") == 1


def test_on_a_terminal_the_five_lines_are_drawn() -> None:
    stream = FakeTerminal()
    with TerminalView(10, stream, FakeClock()) as view:
        view.update(1, EVERYTHING)
    text = stream.getvalue()
    for label in ("update", "episodes", "losses", "lag", "speed"):
        assert label in text


def test_what_is_waited_for_stands_under_the_lines_when_it_takes_long_and_until_it_has_come() -> None:
    clock, stream = FakeClock(), FakeTerminal()
    with TerminalView(10, stream, clock) as view:
        view.status("the learner starts")
        assert stream.rows()[-1].endswith("0:00 the learner starts")
        clock.now = 5.0
        view.wait("0 of 4 groups, 64 episodes under way, 1 actors")
        [row] = stream.rows()
        assert row.endswith("0:05 no batch yet: 0 of 4 groups, 64 episodes under way, 1 actors")
        view.update(1, EVERYTHING)
        assert len(stream.rows()) == 5
        for waited in (PATIENCE_S / 2, PATIENCE_S):
            clock.now = 5.0 + waited
            view.wait("3 of 4 groups")
            assert ("waiting for the next batch: 3 of 4 groups" in stream.rows()[-1]) == (waited >= PATIENCE_S)
        assert "0:07 gone" in stream.rows()[0]  # without a step
    assert len(stream.rows()) == 5 and "update" in stream.rows()[0]


def test_a_long_update_says_how_far_it_is() -> None:
    clock, stream = FakeClock(), FakeTerminal()
    with TerminalView(10, stream, clock) as view:
        view.update(1, EVERYTHING)
        for gone in (PATIENCE_S / 2, PATIENCE_S):
            clock.now = gone
            view.compute(2, 8192, 60_000)
            row = stream.rows()[-1]
            assert row.endswith("update 2: 8,192 of 60,000 tokens computed") == (gone >= PATIENCE_S)
        view.update(2, EVERYTHING)
        assert len(stream.rows()) == 5


def test_without_a_terminal_progress_takes_no_line_of_a_step() -> None:
    """32 micro-batches an update: those of 3 s have a line each 12 s; of one of 100 s a log says once how far it is."""
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(100, stream, clock) as view:
        for step, seconds in enumerate([3.0] * 9 + [100.0], 1):
            for number in range(1, 33):
                clock.now += seconds / 32
                view.compute(step, number, 32)
            view.update(step, EVERYTHING)
    lines = stream.getvalue().splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == [
        "update 1",
        "update 5",
        "update 9",
        "1:30 update",
        "update 10",
    ]
    assert lines[3].endswith("update 10: 20 of 32 tokens computed")


def test_a_view_that_never_got_a_step_leaves_nothing_behind() -> None:
    stream = FakeTerminal()
    with TerminalView(10, stream, FakeClock()) as view:
        view.status("starting")
    assert stream.rows() == []


def test_the_usual_waiting_line_has_its_place_in_80_columns() -> None:
    clock, stream = FakeClock(), FakeTerminal()
    with TerminalView(10, stream, clock) as view:
        clock.now = 600.0
        view.wait("128 of 256 groups, 1024 episodes under way, 16 actors")
        assert len(stream.rows()) == 1


def test_without_a_terminal_waiting_is_said_now_and_then() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with TerminalView(10, stream, clock) as view:
        for second in range(1 + int(2.5 * PLAIN_INTERVAL_S)):
            clock.now = float(second)
            view.wait(f"{second} of 100 trajectories")
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["0:00", "0:10", "0:20"]


def test_without_a_terminal_what_is_done_is_counted_now_and_then() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with counting("tasks of split test", 12, stream, clock) as played:
        for _ in range(12):
            clock.now += PLAIN_INTERVAL_S / 4
            played()
    assert stream.getvalue().splitlines() == ["tasks of split test: 4 of 12", "tasks of split test: 8 of 12"]
