"""Receiver of a process that shares a rank of the learner with another one, which receives for both."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from impala_llm.pipeline.tickets.journal_rows import Row
from impala_llm.trajectory import Trajectory


class NoReceiver:
    """Null object for `Receiver` in processes that receive nothing.

    Each method takes what the `Receiver`'s method of its name takes, has no effect, and returns at once what a receiver
    returns that holds nothing.
    """

    is_full = False
    counters_at_start: Mapping[str, float] = defaultdict(float)

    def drain(self, timeout_s: float) -> list[Trajectory]:
        return []

    def trained(self, unroll_ids: Iterable[int]) -> None:
        return

    def announce(self, version: int, published: bool = True, kept: bool = False) -> None:
        return

    def announce_late(self, version: int) -> None:
        return

    def needs_weights(self) -> bool:
        return False

    def must_keep(self) -> bool:
        return False

    def rows(self, version: int) -> list[Row]:
        return []

    def held(self) -> dict[int, Callable[[], memoryview]]:
        return {}

    def counters(self) -> dict[str, float]:
        return defaultdict(float)
