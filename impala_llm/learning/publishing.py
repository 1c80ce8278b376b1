"""Publishing of the weights: which version goes to engines, over which ways, and when.

Three transports bring a version to engines:

- board: `write_to_board` puts it into shared memory, where engines of the same host read it (`WeightReader.lease`,
  then `Engine.load_shared`).
- relay: a `WeightRelay` on another host fetches it from the learner's board (through `WeightServer`) to a board of its
  own, where engines read it in the same way. It follows the board by itself.
- process group: `send_to_servers` broadcasts it to SGLang servers; their engines only take note (`SGLangEngine.adopt`).

A `VersionPublisher` sends a version to one of two places, or to none:

- to engines, over all of its transports, and then announces it: every `interval`-th version, and any version without
  which this rank gets no batch. The board comes first: an engine that another transport misses reads it there.
- to the board of kept versions, which only a restarted learner reads: a version that is not published while what was
  trained on since the last one on a board fills its share of the trajectory store.

A restarted learner goes on from the newest version on either board. Each version has its value head beside it.

Invariant: whoever waits for a version gets it in the end. A version is skipped because readers hold all slots of the
board only where tickets can do without it: the ticket that the step from version v takes demands v - η at most
(pipeline/tickets/staleness.py), so a learner at v gets its next batch while the newest published version is not older
than v - η. Otherwise the learner waits until a reader ends its lease. Its ranks meet after each attempt, since a
collective in which one of them is awaited for too long is an error. Where tickets ended without a trajectory, so that
all that are left demand a later version, the learner's version is published at once.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from impala_llm.engines.sglang.weight_push import WeightSender
from impala_llm.learning.model import PolicyModel
from impala_llm.learning.parallel import Ranks
from impala_llm.limited_warnings import RateLimitedWarnings
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.pipeline.weights.board import SlotsInUse, WeightPublisher, WeightReader
from impala_llm.supervised import report_progress

PATIENCE_S = 1.0
"""Seconds that a learner waits for a slot of the board before it goes on without publishing."""
_KEEP_TIMEOUT_S = 60.0


class WeightTransport(Protocol):
    """One way of the weights out of the learner. For the learner's thread."""

    def __call__(self, model: PolicyModel, version: int) -> dict[str, float]:
        """Deliver a version. The model must stay as it is until this returns.

        Returns:
            Metrics by name, see observability/metrics.py.

        Raises:
            SlotsInUse: nothing was delivered, since readers hold all slots. It can be tried again.
        """
        ...


def write_to_board(board: WeightPublisher, timeout_s: float, model: PolicyModel, version: int) -> dict[str, float]:
    """Deliver a version, with its value head, to a weight board. See `WeightTransport`.

    Args:
        timeout_s: seconds to wait for a free slot.
    """
    board.publish(dict(model.policy_tensors()), version, timeout_s, model.value_head_bytes())
    return {}


def send_to_servers(
    sender: WeightSender, find_servers: Callable[[], Mapping[int, str]], model: PolicyModel, version: int
) -> dict[str, float]:
    """Deliver a version to SGLang servers by process group. See `WeightTransport`.

    Args:
        find_servers: returns those that want weights now, opening -> URL, as `Receiver.engines`. A server that cannot
            take the version is left to the board.
    """
    return sender.send(find_servers(), dict(model.policy_weights()), version).metrics()


class VersionPublisher:
    """Publishes or keeps the learner's versions. One for each rank, all of which have the same weights.

    Rank 0 publishes what is due. Any rank publishes a version without which it gets no batch: rank 0 may wait for it.
    Only rank 0 knows servers: what another rank publishes, their actors load from the board.

    Args:
        board: read by engines.
        kept: board of versions that are kept for a restarted learner.
        interval: updates between two versions that are published; None: none after the first.
        max_staleness: η; None: free running.
        timeout_s: seconds to wait for a free slot of the board in one attempt.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: PolicyModel,
        board: WeightPublisher,
        kept: WeightPublisher,
        interval: int | None,
        max_staleness: int | None,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self.transports: list[WeightTransport] = [partial(write_to_board, board, timeout_s)]
        """Ways to engines, in the order in which a version goes over them. The board stays the first."""
        self._ranks = ranks
        self._model = model
        self._board = board
        self._kept = kept
        self._reader = WeightReader(board.directory)
        self._interval = interval
        self._max_staleness = max_staleness
        self._last_due = 0
        self._warnings = RateLimitedWarnings()

    def begin(self, version: int) -> None:
        """Publish the version that training starts from, and reserve memory for later ones. All ranks call it.

        Where `interval` is None, engines stay with the version that an earlier learner has published, if there is one.
        """
        found, is_due = None, False
        if self._ranks.is_main:
            for board in (self._board,) if self._interval == 1 else (self._board, self._kept):
                board.reserve(dict(self._model.policy_tensors()))
            found = self._reader.latest()
            is_due = found is None or self._interval is not None
        self._send_together(version, is_due, may_skip=found == version)
        self._last_due = self._reader.latest() or 0

    def publish(self, version: int, receiver: Receiver) -> dict[str, float]:
        """Publish or keep a version that was just made, if it is due, and announce it. All ranks call it.

        After a version that was skipped the next one is due.

        Returns:
            Metrics by name.
        """
        began = time.perf_counter()
        behind = version - self._last_due
        is_due = self._ranks.is_main and self._interval is not None and behind >= self._interval
        may_skip = self._max_staleness is None or behind <= self._max_staleness
        sent = self._send_together(version, is_due, may_skip)
        metrics = {"weights/skipped": float(sent is None), **(sent or {})} if is_due else {}
        # All ranks wait here: a version that a rank announces must lie on the board.
        is_published, must_keep = (
            n > 0 for n in self._ranks.sum([float(sent is not None), float(receiver.must_keep())])
        )
        if is_published:
            self._last_due = version
        elif must_keep:
            if self._ranks.is_main:
                write_to_board(self._kept, _KEEP_TIMEOUT_S, self._model, version)
            self._ranks.barrier()
        if self._ranks.is_main and (is_published or must_keep):
            report_progress()
        receiver.announce(version, published=is_published, kept=must_keep)
        return {**metrics, "weights/publish_s": time.perf_counter() - began}

    def publish_early(self, version: int, receiver: Receiver) -> dict[str, float]:
        """Publish and announce the learner's version where this rank gets no batch without it.

        Does nothing where a batch may come, or readers hold all slots: call it again. The next version that is due
        stays the same.

        Returns:
            Metrics by name.
        """
        if not receiver.needs_weights():
            return {}
        # Another rank may have needed it, too.
        sent = {} if self._reader.latest() == version else self._send(version, may_skip=True)
        if sent is None:
            return {}
        receiver.announce_late(version)
        return sent

    def keep(self, version: int) -> None:
        """Put the learner's version on the board of kept versions, unless it lies on a board. For rank 0 alone."""
        if version not in (self._reader.latest(), WeightReader(self._kept.directory).latest()):
            write_to_board(self._kept, _KEEP_TIMEOUT_S, self._model, version)

    def _send_together(self, version: int, is_due: bool, may_skip: bool) -> dict[str, float] | None:
        """Deliver a version from the rank where it is due. All ranks call it, and return once it is sent or skipped.

        Returns:
            Metrics, or None where this rank has sent nothing.
        """
        while True:
            sent = self._send(version, may_skip) if is_due else None
            if self._ranks.sum([float(is_due and sent is None and not may_skip)])[0] == 0:
                return sent

    def _send(self, version: int, may_skip: bool) -> dict[str, float] | None:
        """Deliver a version over all transports. Returns metrics, or None where readers hold all slots."""
        metrics: dict[str, float] = {}
        try:
            for transport in self.transports:
                metrics |= transport(self._model, version)
        except SlotsInUse as error:
            fate = "is skipped" if may_skip else "waits"
            self._warnings.log("a version was kept from the board", f"{version} {fate}: {error}")
            return None
        return metrics
