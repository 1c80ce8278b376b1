"""Rate-limited warnings: log lines about peers that misbehave, without letting them fill the log."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

from impala_llm.processes.supervised import tell

_log = logging.getLogger(__name__)


class RateLimitedWarnings:
    """Logs the first warning of a kind, then at most one in `interval_s` seconds with the number of those left out.

    Args:
        on_terminal: the supervisor, if there is one, shows them as well: for warnings that the user must see.
    """

    def __init__(self, interval_s: float = 10.0, on_terminal: bool = False) -> None:
        self._interval_s = interval_s
        self._on_terminal = on_terminal
        self._last: dict[str, float] = {}
        self._num_silent: Counter[str] = Counter()

    def log(self, kind: str, text: str) -> None:
        """Log a warning, unless one of its kind was logged a moment ago.

        Args:
            kind: name under which warnings are counted together.
            text: details. A peer may have chosen them, so unprintable characters are escaped: they could forge lines of
                the log, or control the terminal that shows it.
        """
        now = time.monotonic()
        if now - self._last.get(kind, -math.inf) < self._interval_s:
            self._num_silent[kind] += 1
            return
        self._last[kind] = now
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        num_silent = self._num_silent.pop(kind, 0)
        line = f"{kind}: {shown}" + (f" ({num_silent} more like it not shown)" if num_silent else "")
        _log.warning("%s", line)
        if self._on_terminal:
            tell(say=f"learner: {line}")
