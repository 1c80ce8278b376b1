"""Faults of an environment, and errors of the engine, at an actor: how long to wait after each, and when there have
been too many."""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from impala_llm.engines.base import EngineError
from impala_llm.envs import contract
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.plugs import own_line, raised_at
from impala_llm.rollout import ENGINE_AWAITED, EpisodeAborted


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
    """Warns of an environment that blocks the event loop of its actor, and ends the process where that goes on.

    Such a call holds up all episodes, and no time-out reaches it. To be made in the event loop.
    Seconds are counted by pauses of this thread: a process that was suspended has blocked nothing meanwhile.

    Args:
        env: name of the environment, for messages.
        warn_s, end_s: seconds without a turn of the loop after which it warns, and after which it ends the process.
        warn: called with the warning.
        end: called with the reason; by default it prints that, and the stack, and exits with 1.
        pause_s: seconds between two looks.
    """

    def __init__(
        self,
        env: str,
        warn_s: float,
        end_s: float,
        warn: Callable[[str], object],
        end: Callable[[str], object] | None = None,
        pause_s: float = 1.0,
    ) -> None:
        super().__init__(name="blocking-watchdog", daemon=True)
        self._env, self._warn_s, self._end_s, self._pause_s = env, warn_s, end_s, pause_s
        self._warn, self._end = warn, end or self._exit
        self._loop, self._looping = asyncio.get_running_loop(), threading.get_ident()

    def run(self) -> None:
        answered = threading.Event()
        while not self._loop.is_closed():
            answered.clear()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # it was closed just now
                return
            blocked_s, is_told = 0.0, False
            while not answered.wait(self._pause_s) and not self._loop.is_closed():
                blocked_s += self._pause_s
                is_told = is_told or (blocked_s >= self._warn_s and self._tell(self._warn, blocked_s))
                if blocked_s >= self._end_s and self._tell(self._end, blocked_s):
                    return
            time.sleep(self._pause_s)

    def _tell(self, how: Callable[[str], object], blocked_s: float) -> bool:
        """Returns whether the environment is what blocks: engines may, while they load or compile."""
        stack = self._stack()
        if not any(frame.filename == contract.__file__ for frame in stack):
            return False
        how(
            f"env {self._env} has blocked its actor for {blocked_s:g} s{own_line(stack)}, and its episodes wait: "
            f"let it wait in an `async def`, by await; an actor that is blocked for {self._end_s:g} s is ended"
        )
        return True

    def _stack(self) -> traceback.StackSummary:
        return traceback.extract_stack(sys._current_frames().get(self._looping))

    def _exit(self, reason: str) -> None:
        sys.stderr.write("".join(self._stack().format()))
        print(reason, file=sys.stderr, flush=True)
        os._exit(1)  # an exception cannot reach the thread that is blocked
