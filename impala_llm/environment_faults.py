"""Faults of an environment, and errors of the engine, at an actor: how long to wait after each, and when there have
been too many; and a watch for calls that block the event loop."""

import asyncio
import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from impala_llm.engines.base import EngineError
from impala_llm.envs import contract
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.plugs import is_outside, own_line, raised_at
from impala_llm.rollout import ENGINE_AWAITED, EpisodeAborted
from impala_llm.settings import Config


def is_fault(error: Exception) -> bool:
    """Return whether the environment, or the agent, is why an episode failed: not where the engine was awaited."""
    if isinstance(error, TimeoutError):
        cancelled = error.__cause__ or error.__context__  # asyncio.timeout names no cause before Python 3.11.4
        return cancelled is None or ENGINE_AWAITED not in cancelled.args
    return not isinstance(error, EngineError | EpisodeAborted)


def failure_reason(error: Exception, timeout_s: float) -> str:
    """Return why an episode failed. timeout_s: actor.episode_timeout_s."""
    if isinstance(error, EnvironmentFault):
        return str(error)
    said = str(error)
    if isinstance(error, TimeoutError) and not said:
        said = f"not done in actor.episode_timeout_s={timeout_s:g}"
        if not is_fault(error):
            said += ", when the engine was still at a completion: where it is slow, raise it"
    return f"{type(error).__name__}: {said}"


class EnvironmentBroken(RuntimeError):
    """The environment fails again and again. The message has the last reason."""


class EnvironmentFaults:
    """Faults of the environment since the last episode that it completed.

    The first fault of each kind is printed with its traceback. Faults in a row are answered ever more slowly, so that a
    broken environment fills no log and takes no core; after a while they end the actor. A wrong return value comes
    again: of those, the number in a row suffices.

    Args:
        patience_s: seconds of faults after which the actor ends.
    """

    MOST_IN_A_ROW = 32
    MAX_DELAY_S = 2.0

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self.num_in_a_row = 0
        self._num_breaches = 0
        self._num_engine_errors = 0
        self._clock = clock
        self._since = 0.0
        self._seen: set[str] = set()

    def clear(self) -> None:
        """An episode was played to its end."""
        self.num_in_a_row = self._num_breaches = self._num_engine_errors = 0

    def observe(self, error: Exception) -> float:
        """An episode failed: returns the seconds to wait before its ticket is given back.

        Of faults, and of errors of the engine: an actor whose engine answers nothing would otherwise be granted most of
        the tickets, and use up their attempts. Those of the engine end no actor.
        """
        if not is_fault(error):
            self._num_engine_errors += isinstance(error, EngineError)
            return min(self.MAX_DELAY_S, 0.1 * self._num_engine_errors) if isinstance(error, EngineError) else 0.0
        if not self.num_in_a_row:
            self._since = self._clock()
        self.num_in_a_row += 1
        self._num_breaches += isinstance(error, EnvironmentFault) and error.__cause__ is None
        cause = error.__cause__ or error
        # A cause that was raised in another process, or never, has no traceback.
        kind = f"{type(error).__name__}, {type(cause).__name__}{raised_at(cause) or raised_at(error)}"
        if kind not in self._seen:
            self._seen.add(kind)
            with suppress(OSError, ValueError):  # of a full disk, or a stream that is closed: the fault counts
                traceback.print_exception(error)
        return min(self.MAX_DELAY_S, 0.1 * self.num_in_a_row)

    @property
    def is_broken(self) -> bool:
        """Whether there have been so many, for so long, that the next ones will not be better."""
        is_lasting = self._clock() - self._since >= self._patience_s
        return self._num_breaches >= self.MOST_IN_A_ROW or (self.num_in_a_row >= self.MOST_IN_A_ROW and is_lasting)


class BlockingWatchdog(threading.Thread):
    """Warns, once, of code of a user's that blocks the event loop, and of one call of an environment that goes on.

    Such a call holds up all episodes, and no time-out reaches it. What counts is the time of one call, by looks at the
    stack of the loop's thread: many short steps in a row are none that hangs, nor does this package's own code count,
    such as an engine that loads. Seconds are counted by the pauses between looks: a suspended process blocks nothing.
    A call that keeps the interpreter's lock, as some regular expressions do, keeps this thread from looking, too.

    Args:
        loop: of this thread; it need not run yet. Until it is closed it is watched.
        warn_s, end_s: seconds of one call after which it warns; and, where it is a call of the environment, ends.
        warn, end: called with the reason.
        pause_s: seconds between two looks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        warn_s: float,
        end_s: float,
        warn: Callable[[str], object],
        end: Callable[[str], object],
        pause_s: float = 1.0,
    ) -> None:
        super().__init__(name="blocking-watchdog", daemon=True)
        self._loop, self._looping, self._pause_s = loop, threading.get_ident(), pause_s
        self._warn_s, self._end_s, self._warn, self._end = warn_s, end_s, warn, end

    def run(self) -> None:
        has_turned, call, blocked_s, is_told = threading.Event(), None, 0.0, False
        has_turned.set()
        while not self._loop.is_closed():
            if has_turned.is_set():
                has_turned.clear()
                call = None
                with suppress(RuntimeError):  # the loop was closed just now
                    self._loop.call_soon_threadsafe(has_turned.set)
            time.sleep(self._pause_s)
            if has_turned.is_set():
                continue
            before, (call, is_environment, where) = call, self._look()
            blocked_s = blocked_s + self._pause_s if call is not None and call is before else 0.0
            if blocked_s >= self._warn_s and not is_told:
                is_told = True
                with suppress(Exception):  # of a stream that is closed, or on a full disk
                    self._warn(self._said(blocked_s, where))
            if blocked_s >= self._end_s and is_environment:
                self._end(self._said(blocked_s, where))
                return

    def _look(self) -> tuple[FrameType | None, bool, str]:
        """Look at what the loop's thread is in.

        Returns:
            (the call's frame, whether contract.py made the call, ", in FILE:LINE"). Without a call of contract.py the
            frame is that of a task whose code is neither ours nor Python's, or None.
        """
        frames, frame = [], sys._current_frames().get(self._looping)
        while frame is not None and frame.f_code.co_filename != asyncio.events.__file__:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        for number, (each, _) in enumerate(frames):  # the innermost first
            if each.f_code.co_filename == contract.__file__:
                return each, True, own_line(traceback.StackSummary.extract(reversed(frames[:number])))
        if frame is not None and frames and is_outside(frames[-1][0].f_code.co_filename):
            return frames[-1][0], False, own_line(traceback.StackSummary.extract(reversed(frames)))
        return None, False, ""

    def _said(self, blocked_s: float, where: str) -> str:
        fix = "let it wait in an `async def`, by await"
        end = f"; a call of the environment ends the process after {self._end_s:g} s" if self._end_s < math.inf else ""
        return f"a call has blocked all episodes of this process for {blocked_s:g} s{where}: {fix}{end}"


def watch_for_blocking(
    config: Config, warn: Callable[[str], object], loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Start the watchdog of an actor, which it may end; or of an evaluation, which goes on waiting.

    Args:
        warn: called with the warning.
        loop: of an evaluation, in this thread; None: an actor's, which runs.
    """
    silence_s = config.pipeline.actor_timeout_s  # from then on the learner takes an actor for dead
    longest_s = max(config.actor.episode_timeout_s, 3 * silence_s)
    if loop is None:
        BlockingWatchdog(asyncio.get_running_loop(), silence_s, longest_s, warn, _end_process).start()
    else:
        BlockingWatchdog(loop, silence_s, math.inf, warn, warn).start()


def _end_process(reason: str) -> None:
    """End this process with a traceback of all threads and the reason on standard error: no exception reaches a thread
    that is blocked. sys.stderr may be something else while the environment's call is under way."""
    try:
        faulthandler.dump_traceback(2)
        os.write(2, f"{reason}\n".encode())
    finally:
        os._exit(1)
