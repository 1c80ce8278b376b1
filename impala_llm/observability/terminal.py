"""Shows a run's metrics in the terminal: five live lines, or one plain line now and then where no terminal is attached.

Invariants: the view never raises for the metrics that it is given, and a step may lack most of them. One process draws:
the supervisor where there is one, to which the learner sends the metrics (`SupervisorView`), so that the clock runs and
messages stand above the lines even after the learner has died.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Column
from rich.text import Text

from impala_llm.processes.supervised import SUPERVISED, tell

PLAIN_INTERVAL_S = 10.0
PLAIN_PROGRESS_S = 60.0
"""Seconds without a line after which a log says how far an update is."""
PATIENCE_S = 2.0
"""Seconds that a step waits for its batch before the view says so."""
REFRESHES_PER_S = 4
SHOWN = (
    "actor/connected",
    "rollout/window_score",
    "rollout/window_success_rate",
    "rollout/window_episodes",
    "rollout/turns",
    "rollout/length_tokens",
    "loss/policy",
    "loss/value",
    "loss/entropy",
    "optimizer/gradient_norm",
    "optimizer/learning_rate",
    "staleness/mean",
    "staleness/oldest",
    "ratio/max",
    "loss/clip_share",
    "ratio/ess",
    "actor/generated_tokens_per_s",
    "actor/idle_share",
    "learner/trained_tokens_per_s",
    "time/idle_share",
    "evaluation/score",
    "evaluation/score_low",
    "evaluation/score_high",
    "evaluation/update",
    "evaluation/best_score",
    "evaluation/best_update",
)
"""The metrics of the lines."""
SECONDS = "progress/seconds"
"""The metric that the clock follows: seconds of training, restarts included, as learner.max_minutes counts them."""


class View:
    """Interface by which a learner shows its progress; this one shows nothing."""

    def wait(self, what: str) -> None:
        """Shows what the next step waits for."""

    def compute(self, step: int, num_done: int, num_tokens: int) -> None:
        """Shows how many tokens of a step have been computed."""

    def update(self, step: int, metrics: Mapping[str, float], progress: float | None = None) -> None:
        """Shows a step that is complete."""


class TerminalView(View):
    """Progress of a run of `num_steps` learner steps, on `stream`; standard output, unless told.

    On a terminal five lines are redrawn in place, with a clock that runs between steps; what is printed meanwhile
    stands above them. Elsewhere (a log file, CI) the first step, the last one and one every `PLAIN_INTERVAL_S` seconds
    print a line each.

        with TerminalView(num_steps) as view:
            view.update(step, metrics)
    """

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        self.position = ""
        """The last step that was shown, and the share of the run that is over with it."""
        self._stream = stream or sys.stdout
        self._clock = clock
        self._started = self._last_update = clock()
        self._first: tuple[float, float] | None = None
        self._ends_at: float | None = None
        self._last_line: float | None = None
        self._last_step: float | None = None
        """Time of the last line, and of the last one of a step, where no terminal is attached."""
        self._seen: dict[str, float] = {}
        self._status = ""
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> "TerminalView":
        if self._stream.isatty():
            is_stdout = self._stream is sys.stdout
            self._live = Live(
                console=Console(file=self._stream),
                get_renderable=self._draw,
                refresh_per_second=REFRESHES_PER_S,
                redirect_stdout=is_stdout,
                redirect_stderr=is_stdout and sys.stderr.isatty(),
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._status = ""
            self._live.transient = not self._seen  # nothing to leave behind
            self._live.stop()

    def status(self, text: str) -> None:
        """Shows a line under the others until the next step, in the place of an earlier one."""
        if self._live is not None:
            self._status = text
            self._live.refresh()
        elif text != self._status and (self._last_line is None or self._clock() - self._last_line >= PLAIN_INTERVAL_S):
            self._status = text
            self._last_line = self._clock()
            self._print(f"{_clock_text(self._last_line - self._started)} {text}")

    def wait(self, what: str) -> None:
        """Shows what the next step waits for, once it has waited for `PATIENCE_S`."""
        if not self._seen or self._clock() - self._last_update >= PATIENCE_S:
            self.status(f"{'waiting for the next batch' if self._seen else 'no batch yet'}: {what}")

    def compute(self, step: int, num_done: int, num_tokens: int) -> None:
        """Shows how far `step` is, once the one before is `PATIENCE_S` old.

        Args:
            num_done: tokens that have been computed, of num_tokens.
        """
        last_line = self._last_update if self._last_line is None else max(self._last_update, self._last_line)
        since, patience = (self._last_update, PATIENCE_S) if self._live is not None else (last_line, PLAIN_PROGRESS_S)
        if self._clock() - since >= patience:
            self.status(f"update {step}: {num_done:,} of {num_tokens:,} tokens computed")

    def update(self, step: int, metrics: Mapping[str, float], progress: float | None = None) -> None:
        """Shows `step` (counted from 1). A metric that a step lacks keeps the value it had last.

        progress: share of the run that is over, in (0, 1], where time may end it too; None: share of `num_steps`.
        """
        self._seen.update(metrics)
        self._last_update = now = self._clock()
        if SECONDS in metrics:
            self._started = now - metrics[SECONDS]
        self._status = ""
        share = step / max(1, self._num_steps) if progress is None else progress
        self.position = f"{step} ({share:.0%})"
        # The time before the first step was start-up: it does not tell the duration of the other steps.
        if self._first is None:
            self._first = (share, now)
        done, since = share - self._first[0], now - self._first[1]
        self._ends_at = now + since / done * (1.0 - share) if done > 0 and share < 1.0 else None
        if self._live is not None:
            self._live.refresh()
        elif self._last_step is None or share >= 1.0 or now - self._last_step >= PLAIN_INTERVAL_S:
            lines = render(self._seen, self._progress(now))
            self._print(" | ".join(re.sub(" {3,}", " ", line) for line in lines[:3]))
            self._last_line = self._last_step = now

    def _print(self, line: str) -> None:
        with suppress(OSError):  # on a full disk the line is lost, and the run continues
            print(line, file=self._stream, flush=True)

    def _progress(self, now: float) -> str:
        remaining = "" if self._ends_at is None else f", about {_clock_text(max(0.0, self._ends_at - now))} to go"
        return f"{self.position}  {_clock_text(now - self._started)} gone{remaining}"

    def _draw(self) -> RenderableType:
        """The lines as of now. Another thread asks for them, a few times a second."""
        now = self._clock()
        parts: list[RenderableType] = []
        if self._seen:
            lines = render(self._seen, self._progress(now))
            parts.append(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        if status := self._status:
            self._spinner.update(text=Text(status if self._seen else f"{_clock_text(now - self._started)} {status}"))
            parts.append(self._spinner)
        return Group(*parts)


class SupervisorView(View):
    """Sends what a learner shows to its supervisor, which calls the method of this name of its `TerminalView`."""

    def __init__(self) -> None:
        self._computed_told = 0.0

    def wait(self, what: str) -> None:
        tell(wait=what)

    def compute(self, step: int, num_done: int, num_tokens: int) -> None:
        if time.monotonic() - self._computed_told >= 1 / REFRESHES_PER_S:  # the pipe has room for what matters more
            self._computed_told = time.monotonic()
            tell(compute=[step, num_done, num_tokens])

    def update(self, step: int, metrics: Mapping[str, float], progress: float | None = None) -> None:
        tell(update=[step, {name: metrics[name] for name in (*SHOWN, SECONDS) if name in metrics}, progress])


def make_view(num_steps: int, is_shown: bool, stack: ExitStack) -> View:
    """Make the view of a learner: its supervisor's, if it has one, else one of its own, which `stack` closes."""
    if not is_shown:
        return View()
    return SupervisorView() if SUPERVISED in os.environ else stack.enter_context(TerminalView(num_steps))


def render(metrics: Mapping[str, float], progress: str) -> list[str]:
    """The lines as plain text, each short enough for 80 columns; a metric without a value yet is a dash.

    Five, and one more where there was an evaluation inside of the run.
    """

    def show(name: str, form: str) -> str:
        value = metrics.get(name)
        # A value loss of exactly 0 is that of a run without a value head.
        return "-" if value is None or (name == "loss/value" and value == 0) else format(value, form)

    evaluated = [
        f"evaluated update {show('evaluation/update', '.0f')}  score {show('evaluation/score', '.3f')}"
        f" [{show('evaluation/score_low', '.3f')}, {show('evaluation/score_high', '.3f')}]"
        f"  best {show('evaluation/best_score', '.3f')} at {show('evaluation/best_update', '.0f')}"
    ]
    return [
        f"update    {progress}  actors {show('actor/connected', '.0f')}",
        f"episodes  score {show('rollout/window_score', '.3f')}  success {show('rollout/window_success_rate', '.1%')}"
        f" (last {show('rollout/window_episodes', ',.0f')})  turns {show('rollout/turns', '.1f')}"
        f"  tokens {show('rollout/length_tokens', '.0f')}",
        f"losses    policy {show('loss/policy', '+.4f')}  value {show('loss/value', '.4f')}"
        f"  entropy {show('loss/entropy', '.2f')}  grad {show('optimizer/gradient_norm', '.2f')}"
        f"  lr {show('optimizer/learning_rate', '.1e')}",
        f"lag       {show('staleness/mean', '.1f')} (oldest {show('staleness/oldest', '.0f')})"
        f"  ratio max {show('ratio/max', '.3g')}, clipped {show('loss/clip_share', '.0%')}"
        f"  ESS {show('ratio/ess', '.2f')}",
        f"speed     generated {show('actor/generated_tokens_per_s', ',.0f')} tok/s"
        f" (idle {show('actor/idle_share', '.0%')})  trained {show('learner/trained_tokens_per_s', ',.0f')} tok/s"
        f" (idle {show('time/idle_share', '.0%')})",
        *(evaluated if "evaluation/score" in metrics else []),
    ]


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something is under way while the context is open, on a terminal only."""
    with Console(stderr=True).status(text):
        yield


@contextmanager
def counting(
    text: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[], None]]:
    """Show how many of `total` things are done, while the context is open. Yields what is called after each.

    On a terminal a bar, which is redrawn between them too; elsewhere a line every `PLAIN_INTERVAL_S` seconds.

    Args:
        stream: standard error, unless told.
    """
    console = Console(file=stream or sys.stderr)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    shown, done, last_line = bar.add_task(text, total=total), 0, clock()

    def advance() -> None:
        nonlocal done, last_line
        done += 1
        bar.advance(shown)
        if not console.is_terminal and done < total and clock() - last_line >= PLAIN_INTERVAL_S:
            last_line = clock()
            with suppress(OSError):
                print(f"{text}: {done} of {total}", file=console.file, flush=True)

    with bar:
        yield advance


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
