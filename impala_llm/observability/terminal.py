"""Shows a run's metrics in the terminal: five live lines, or one plain line now and then where no terminal is attached.

Invariant: it only shows. Whatever it is given, including steps without most of the metrics, training goes on.
"""

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_INTERVAL_S = 10.0


class TerminalView:
    """Progress of a run of `num_steps` learner steps, on `stream`; standard output, unless told.

    On a terminal five lines are redrawn in place. Elsewhere (a log file, CI) the first step, the last one and one every
    `PLAIN_INTERVAL_S` seconds print a line each.

        with TerminalView(num_steps) as view:
            view.update(step, metrics)
    """

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._started = clock()
        self._first: tuple[float, float] | None = None
        self._last_line: float | None = None
        self._seen: dict[str, float] = {}
        self._live: Live | None = None

    def __enter__(self) -> "TerminalView":
        if self._stream.isatty():
            self._live = Live(
                Text("waiting for the first batch"), console=Console(file=self._stream), auto_refresh=False
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def wait(self, what: str) -> None:
        """Shows what the first step waits for; later steps leave the lines of the last one."""
        now = self._clock()
        if self._seen:
            return
        text = f"waiting {_clock_text(now - self._started)} for the first batch: {what}"
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        elif self._last_line is None or now - self._last_line >= PLAIN_INTERVAL_S:
            print(text, file=self._stream, flush=True)
            self._last_line = now

    def update(self, step: int, metrics: Mapping[str, float], progress: float | None = None) -> None:
        """Shows `step` (counted from 1). A metric that a step lacks keeps the value it had last.

        progress: share of the run that is over, in (0, 1], where time may end it too; None: share of `num_steps`.
        """
        self._seen.update(metrics)
        now = self._clock()
        share = step / max(1, self._num_steps) if progress is None else progress
        lines = render(self._seen, self._progress(step, share, now))
        if self._live is not None:
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._last_line is None or share >= 1.0 or now - self._last_line >= PLAIN_INTERVAL_S:
            print(" | ".join(line.split("  ", 1)[1].strip() for line in lines[:3]), file=self._stream, flush=True)
            self._last_line = now

    def _progress(self, step: int, share: float, now: float) -> str:
        elapsed = now - self._started
        # What passed before the first step was start-up: it says nothing about the rest.
        if self._first is None:
            self._first = (share, elapsed)
        done, since = share - self._first[0], elapsed - self._first[1]
        remaining = f", about {_clock_text(since / done * (1.0 - share))} to go" if done > 0 else ""
        return f"{step} ({share:.0%})  {_clock_text(elapsed)} gone{remaining}"


def render(metrics: Mapping[str, float], progress: str) -> list[str]:
    """The five lines as plain text, each short enough for 80 columns; a metric without a value yet is a dash."""

    def show(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    return [
        f"step      {progress}  actors {show('actor/connected', '.0f')}",
        f"episodes  score {show('rollout/window_score', '.3f')}  success {show('rollout/window_success_rate', '.1%')}"
        f" (last {show('rollout/window_episodes', ',.0f')})  turns {show('rollout/turns', '.1f')}"
        f"  tokens {show('rollout/length_tokens', '.0f')}",
        f"update    policy {show('loss/policy', '+.4f')}  value {show('loss/value', '.4f')}"
        f"  entropy {show('loss/entropy', '.2f')}  grad {show('optimizer/gradient_norm', '.2f')}"
        f"  lr {show('optimizer/learning_rate', '.1e')}",
        f"lag       staleness {show('staleness/mean', '.1f')} (oldest {show('staleness/oldest', '.0f')})"
        f"  max ratio {show('ratio/max', '.2f')}  capped {show('ratio/pg_clip_share', '.0%')}"
        f"  ESS {show('ratio/ess', '.2f')}",
        f"speed     sampled {show('actor/generated_tokens_per_s', ',.0f')} tok/s"
        f" (idle {show('actor/idle_share', '.0%')})  trained {show('learner/trained_tokens_per_s', ',.0f')} tok/s"
        f" (idle {show('time/idle_share', '.0%')})",
    ]


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
