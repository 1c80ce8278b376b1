"""Faults of an environment, and errors of the engine, at an actor: how long to wait after each, and when there have
been too many."""

import asyncio
import faulthandler
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
            traceback.print_exception(error)
        return min(self.MAX_DELAY_S, 0.1 * self.num_in_a_row)

    @property
    def is_broken(self) -> bool:
        """Whether there have been so many, for so long, that the next ones will not be better."""
        is_lasting = self._clock() - self._since >= self._patience_s
        return self._num_breaches >= self.MOST_IN_A_ROW or (self.num_in_a_row >= self.MOST_IN_A_ROW and is_lasting)


class BlockingWatchdog(threading.Thread):
    """Warns once of an environment that blocks the event loop of its process, which it ends where that goes on.

    Such a call holds up all episodes, and no time-out reaches it. What counts is the time of one task, by looks at its
    stack: engines may block the loop too, while they load or compile, and many short steps in a row are none that
    hangs. A process that was suspended has blocked nothing meanwhile.

    Args:
        loop: of this thread; it need not run yet. Until it is closed it is watched.
        env: name of the environment, for messages.
        warn_s, end_s: seconds in which one task has the loop, after which it warns, and after which the process ends.
        warn: called with the warning.
        end: called with the reason; by default it prints that, and the stack, and exits with 1. A call that keeps even
            the interpreter's lock, as a regular expression does, ends the process by default as well, without a reason.
        pause_s: seconds between two looks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: str,
        warn_s: float,
        end_s: float,
        warn: Callable[[str], object],
        end: Callable[[str], object] | None = None,
        pause_s: float = 1.0,
    ) -> None:
        super().__init__(name="blocking-watchdog", daemon=True)
        self._env, self._warn_s, self._end_s, self._pause_s = env, warn_s, end_s, pause_s
        self._warn, self._end = warn, end
        self._loop, self._looping = loop, threading.get_ident()

    def run(self) -> None:
        has_turned, task, is_told = threading.Event(), None, False
        blocked_s, alarm_s = 0.0, 0.0
        try:
            self._loop.call_soon_threadsafe(has_turned.set)
            while not self._loop.is_closed():
                if self._end is None and alarm_s <= 0.0:
                    alarm_s = self._end_s / 10
                    with suppress(OSError):  # standard error is no file
                        faulthandler.dump_traceback_later(self._end_s + alarm_s, exit=True)
                time.sleep(self._pause_s)
                alarm_s -= self._pause_s
                if has_turned.is_set():
                    has_turned.clear()
                    self._loop.call_soon_threadsafe(has_turned.set)
                    task = None
                    continue
                before, (task, stack) = task, self._environment()
                blocked_s = blocked_s + self._pause_s if task is not None and task is before else 0.0
                if blocked_s >= self._warn_s and not is_told:
                    is_told = True
                    self._warn(self._said(blocked_s, stack))
                if blocked_s >= self._end_s:
                    (self._end or self._exit)(self._said(blocked_s, stack))
                    return
        except RuntimeError:  # the loop was closed just now
            return
        finally:
            if self._end is None:
                faulthandler.cancel_dump_traceback_later()

    def _environment(self) -> tuple[FrameType | None, traceback.StackSummary]:
        """The outermost frame of the task that the loop is in, and its stack, if that is the environment's doing: it is
        called in contract.py, or has made the task itself. Else (None, empty)."""
        frames, frame = [], sys._current_frames().get(self._looping)
        while frame is not None and frame.f_code.co_filename != asyncio.events.__file__:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        if frame is None or not frames:
            return None, traceback.StackSummary()
        frames.reverse()
        task = frames[0][0]
        is_called = any(each.f_code.co_filename == contract.__file__ for each, _ in frames)
        if not is_called and not is_outside(task.f_code.co_filename):
            return None, traceback.StackSummary()
        return task, traceback.StackSummary.extract(iter(frames))

    def _said(self, blocked_s: float, stack: traceback.StackSummary) -> str:
        return (
            f"env {self._env} has blocked all episodes for {blocked_s:g} s{own_line(stack)}: let it wait in an "
            f"`async def`, by await; a process that is blocked for {self._end_s:g} s is ended"
        )

    def _exit(self, reason: str) -> None:
        with suppress(OSError):  # a full disk
            print("".join(self._environment()[1].format()), reason, sep="", file=sys.stderr, flush=True)
        os._exit(1)  # an exception cannot reach the thread that is blocked


def watch_for_blocking(
    config: Config, env: str, warn: Callable[[str], object], loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Start the watchdog of an actor or an evaluation.

    Args:
        env, warn: as for `BlockingWatchdog`.
        loop: of this thread; None: the one that runs.
    """
    silence_s = config.pipeline.actor_timeout_s  # from then on the learner takes an actor for dead
    longest_s = max(config.actor.episode_timeout_s, 3 * silence_s)
    BlockingWatchdog(loop or asyncio.get_running_loop(), env, silence_s, longest_s, warn).start()
