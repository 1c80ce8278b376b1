"""Publishing of the weights: which version goes to engines, over which ways, and when.

Three transports bring a version to engines:

- board: `write_to_board` puts it into shared memory, where engines of the same host read it (`WeightReader.lease`,
  then `Engine.load_shared`).
- relay: a `WeightRelay` on another host fetches it from the learner's board (through `WeightServer`) to a board of its
  own, where engines read it in the same way. It follows the board by itself.
- process group: `send_to_servers` broadcasts it to SGLang servers; their engines only take note (`SGLangEngine.adopt`).

Where ranks share the policy, each writes its part of a version to the board. Tensors that a process group sends of it,
or of a version that is converted on its way to the board, are read from the board.

A `VersionPublisher` sends a version to one of two places, or to none:

- to engines, over all of its transports, and then announces it: every `interval`-th version, any version without which
  this rank gets no batch, and the last one where it is to be evaluated. The board comes first: an engine that another
  transport misses reads it there.
- to the board of kept versions, which only a restarted learner reads: a version that is not published while what was
  trained on since the last one on a board fills its share of the trajectory store.

A restarted learner continues from the newest version on either board. Each version has its value head beside it.

Invariant: a caller that waits for a version gets it in the end. A version is skipped, because readers hold all slots of
the board, only if tickets can do without it: the ticket that the step from version v takes demands v - η at most
(pipeline/tickets/staleness.py), so a learner at v gets its next batch while the newest published version is not older
than v - η. Otherwise the learner waits until a reader ends its lease. Its ranks meet after each attempt, since a
collective in which one of them is awaited for too long is an error. Where tickets ended without a trajectory, so that
all that are left demand a later version, the learner's version is published at once.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from impala_llm.engines.embedded.model_weights import SAFETENSORS_NAMES
from impala_llm.engines.sglang.weight_push import WeightSender
from impala_llm.learning.origin import board_dtype
from impala_llm.learning.policy.lora import is_adapted
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline import LearnerEndpoint
from impala_llm.pipeline.transport.receiver import Receiver
from impala_llm.pipeline.weights.board import SlotsInUse, WeightLease, WeightPublisher, WeightReader
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.processes.stop_signals import Stopped
from impala_llm.processes.supervised import report_progress
from impala_llm.settings import Config

PATIENCE_S = 1.0
"""Seconds that a learner waits for a slot of the board before it continues without publishing."""
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


def write_to_board(
    board: WeightPublisher,
    timeout_s: float,
    export: PolicyExport,
    dtype: torch.dtype | None,
    is_main: bool,
    model: PolicyModel,
    version: int,
) -> dict[str, float]:
    """Deliver a version, with its value head, to a weight board. See `WeightTransport`. All ranks that share the policy
    call it, else rank 0.

    Args:
        timeout_s: seconds to wait for a free slot.
        export: of the model.
        dtype: on the board; None: that of the weights.
    """
    tensors, num_threads = export.tensors(dtype), torch.get_num_threads()
    if is_main:
        board.publish(tensors, version, timeout_s, export.beside(), export.sharing, num_threads)
    elif export.sharing is not None and not board.contribute(tensors, export.sharing, num_threads):
        raise SlotsInUse("rank 0 has found no slot")
    return {}


def send_to_servers(
    sender: WeightSender,
    find_servers: Callable[[], Mapping[int, str]],
    model: PolicyModel,
    version: int,
    board: WeightReader | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Deliver a version to SGLang servers by process group. See `WeightTransport`.

    Args:
        find_servers: returns those that want weights now, opening -> URL, as `Receiver.engines`. A server that cannot
            take the version is left to the board.
        board: holds the version, and is what is sent; None: the model's tensors are.
        device: of the process group; None: where the tensors are.
    """
    if board is None:
        return sender.send(find_servers(), dict(model.policy_weights()), version, device).metrics()
    with board.lease(version) as lease:
        return sender.send(find_servers(), lease_tensors(lease), version, device).metrics()


def server_transport(
    config: Config, ranks: Ranks, model: PolicyModel, endpoint: LearnerEndpoint, stack: ExitStack
) -> WeightTransport | None:
    """Make the way of versions to SGLang servers by process group, on rank 0, where the settings want it; else None.

    Args:
        endpoint: which listens.
        stack: closes it.
    """
    if not ranks.is_main or config.engine.transfer != "distributed":
        return None
    key = endpoint.run_dir.server_key if config.engine.urls is None else None
    in_flight: Any = config.engine.in_flight  # one that config.py has checked
    sender = stack.enter_context(WeightSender(in_flight, urls=config.engine.urls, key=key))
    # Tensors that no rank holds in the form in which they are sent are read from the board.
    is_made = ranks.is_sharded or board_dtype(config) is not None or is_adapted(model.lm)
    board = WeightReader(endpoint.board.directory) if is_made else None
    return partial(send_to_servers, sender, endpoint.receiver.engines, board=board, device=ranks.device)


def lease_tensors(lease: WeightLease) -> dict[str, Tensor]:
    """Tensors of a leased version, not copied: to be read only, while the lease lasts."""
    dtypes = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch would let one write what is mapped for reading
        for name, (dtype, shape, data) in lease.tensors(verify=False).items():
            found[name] = torch.from_numpy(data).view(dtypes[dtype]).view(shape)
    return found


def make_publisher(config: Config, ranks: Ranks, model: PolicyModel, endpoint: LearnerEndpoint) -> "VersionPublisher":
    """Make the publisher of a rank's versions, which goes by the boards; `server_transport` is added to it."""
    interval, staleness = config.learner.sync_interval, config.algorithm.max_staleness
    boards = endpoint.board, endpoint.kept
    return VersionPublisher(ranks, model, *boards, interval, staleness, dtype=board_dtype(config))


class VersionPublisher:
    """Publishes or keeps the learner's versions. One for each rank, all of which are at the same version.

    All ranks take part in each version, or rank 0 alone where it has all of the weights. So they meet while they wait
    for batches, for the rank that gets none without a newer version.

    Args:
        board: read by engines.
        kept: board of versions that are kept for a restarted learner.
        interval: updates between two versions that are published; None: none after the first.
        max_staleness: η; None: free running.
        timeout_s: seconds to wait for a free slot of the board in one attempt.
        dtype: of the weights for engines; None: the learner's. Kept versions always have the learner's.
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
        dtype: torch.dtype | None = None,
    ) -> None:
        self.export = export = PolicyExport(model, ranks)
        self.transports: list[WeightTransport] = [
            partial(write_to_board, board, timeout_s, export, dtype, ranks.is_main)
        ]
        """Ways to engines, in the order in which a version goes over them. The board stays the first."""
        self._keep = partial(write_to_board, kept, _KEEP_TIMEOUT_S, export, None, ranks.is_main)
        self._dtype = dtype
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
            num_beside = len(self.export.beside())
            self._board.reserve(self.export.tensors(self._dtype), num_beside)
            if self._interval != 1:
                self._kept.reserve(self.export.tensors(), num_beside)
            found = self._reader.latest()
            is_due = found is None or self._interval is not None
        due, may_skip = (n > 0 for n in self._ranks.sum([float(is_due), float(found == version)]))
        self._send_together(version, due, may_skip)
        self._last_due = self._reader.latest() or 0

    def publish(self, version: int, receiver: Receiver) -> dict[str, float]:
        """Publish or keep a version that was just made, if it is due, and announce it. All ranks call it.

        After a version that was skipped the next one is due.

        Returns:
            Metrics by name.
        """
        began = time.perf_counter()
        behind = version - self._last_due
        is_due = self._interval is not None and behind >= self._interval
        may_skip = self._max_staleness is None or behind <= self._max_staleness
        sent = self._send_together(version, is_due, may_skip)
        metrics = {"weights/skipped": float(sent is None), **(sent or {})} if is_due and self._ranks.is_main else {}
        # All ranks wait here: a version that a rank announces must lie on the board.
        is_published, must_keep = (
            n > 0 for n in self._ranks.sum([float(sent is not None), float(receiver.must_keep())])
        )
        if is_published:
            self._last_due = version
        elif must_keep:
            if self._takes_part:
                self._keep(self._model, version)
            self._ranks.barrier()
        if self._ranks.is_main and (is_published or must_keep):
            report_progress()
        receiver.announce(version, published=is_published, kept=must_keep)
        return {**metrics, "weights/publish_s": time.perf_counter() - began}

    def publish_early(self, version: int, receiver: Receiver, is_told_to_stop: Callable[[], bool]) -> dict[str, float]:
        """Publish and announce the learner's version where a rank gets no batch without it.

        For a rank that waits for a batch, again and again; one that has its own calls `wait_for_ranks`. Does nothing
        where batches may come, or readers hold all slots. The next version that is due stays the same.

        Args:
            is_told_to_stop: whether this process is; all ranks learn of it.

        Returns:
            Metrics by name.

        Raises:
            Stopped: a process of any rank is told to stop.
        """
        _, metrics, is_over = self._meet(version, receiver, is_told_to_stop(), has_batch=False)
        if is_over:
            raise Stopped
        return metrics

    def publish_last(self, version: int, receiver: Receiver) -> None:
        """Publish and announce the learner's version after training, where it is not on the board. All ranks call it.

        Does nothing where readers hold all slots.
        """
        [num_there] = self._ranks.sum([float(self._ranks.is_main and self._reader.latest() == version)])
        if not num_there:
            sent = self._send_together(version, True, may_skip=True)
            [num_there] = self._ranks.sum([float(sent is not None)])
        if num_there:
            receiver.announce_late(version)

    def wait_for_ranks(self, version: int, receiver: Receiver, is_told_to_stop: Callable[[], bool]) -> dict[str, float]:
        """Wait until all ranks have a batch, or need none any more, and take part in what `publish_early` publishes.

        Args:
            is_told_to_stop: whether this process is, asked again and again; all ranks learn of it.

        Returns:
            Metrics by name.
        """
        metrics: dict[str, float] = {}
        all_have = False
        while not all_have:
            all_have, found, _ = self._meet(version, receiver, is_told_to_stop(), has_batch=True)
            metrics |= found
        return metrics

    def keep(self, version: int) -> None:
        """Put the learner's version on the board of kept versions, unless it lies on a board. All ranks that share the
        policy call it, else rank 0."""
        newest = (self._reader.latest(), WeightReader(self._kept.directory).latest())
        if version not in newest and self._takes_part:
            self._keep(self._model, version)

    @property
    def _takes_part(self) -> bool:
        return self._ranks.is_main or self._ranks.is_sharded

    def _meet(
        self, version: int, receiver: Receiver, is_told: bool, has_batch: bool
    ) -> tuple[bool, dict[str, float], bool]:
        """Returns whether all ranks have a batch, metrics, and whether a process is told to stop."""
        wants = not has_batch and receiver.needs_weights()
        is_there = self._ranks.is_main and self._reader.latest() == version
        mine = has_batch, wants, is_there, is_told
        num_with_batch, num_wanting, num_there, num_told = self._ranks.sum([float(n) for n in mine], of_processes=True)
        sent: dict[str, float] | None = {}
        if num_wanting and not num_told:  # one that is to end has no time for a whole version
            if not num_there:
                sent = self._send_together(version, True, may_skip=True)
                num_there = self._ranks.sum([float(sent is not None)])[0]
            if wants and num_there:
                receiver.announce_late(version)
        return num_with_batch == self._ranks.num_processes, sent or {}, num_told > 0

    def _send_together(self, version: int, is_due: bool, may_skip: bool) -> dict[str, float] | None:
        """Deliver a version, if it is due. All ranks call it with the same, and return once it is sent or skipped.

        Returns:
            Metrics, or None where this rank has sent nothing.
        """
        while True:
            sent = self._send(version, may_skip) if is_due and self._takes_part else None
            waits = is_due and self._ranks.is_main and sent is None and not may_skip
            if self._ranks.sum([float(waits)])[0] == 0:
                return sent

    def _send(self, version: int, may_skip: bool) -> dict[str, float] | None:
        """Deliver a version over all transports. Returns metrics, or None where readers hold all slots."""
        metrics: dict[str, float] = {}
        try:
            for transport in self.transports:
                metrics |= transport(self._model, version)
        except SlotsInUse as error:
            if self._ranks.is_main:
                fate = "is skipped" if may_skip else "waits"
                self._warnings.log("a version was kept from the board", f"{version} {fate}: {error}")
            return None
        return metrics
