"""Weights of an engine's servers: which version is the newest, and loading it into one server or all of them.

Invariant: `lock` is held while any server's weights change, so that a server that comes back gets the newest version
after an update of the others, and never a version between.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.client import ServerLost, SGLangClient
from impala_llm.engines.sglang.replica import Replica
from impala_llm.engines.sglang.weight_lock import load_in_turn
from impala_llm.engines.sglang.weight_update import (
    InFlight,
    Layout,
    UpdateTimes,
    check_layout,
    read_layout,
    update_in_flight,
)

_log = logging.getLogger(__name__)

UPDATE_TIMEOUT_S = 600.0
"""Deadline of a server for reading weights, or for ending its completions."""

WeightsSource = Callable[[], AbstractContextManager[tuple[Path, int]]]
"""Source of the newest weights: (Hugging Face directory, version), which do not change within the context."""


class ReplicaWeights:
    """Loads versions into servers."""

    def __init__(
        self, in_flight: InFlight, is_fed: bool, source: WeightsSource | None, changed: Callable[[], Awaitable[object]]
    ) -> None:
        """
        Args:
            in_flight: policy for completions under way when weights change.
            is_fed: the learner sends weights to the servers too.
            source: of the newest weights for a started or restarted server; None: `newest`.
            changed: waits for the next change in servers or completions.
        """
        self.lock = asyncio.Lock()
        self.last_update: UpdateTimes | None = None
        """Times of the latest successful `load`."""
        self.in_flight: InFlight = in_flight
        self.newest: tuple[Path, int] | None = None
        """Directory and version of the last `load`; before it, those that servers are to begin with. None: any."""
        self._is_fed = is_fed
        self._source = source
        self._changed = changed
        self._layout: Layout | None = None

    def learn_layout(self, directory: Path) -> None:
        """Take the tensors' names, dtypes and shapes from a server's model, if they are not known."""
        if self._layout is None and directory.is_dir():
            self._layout = read_layout(directory)

    def check_layout(self, directory: Path) -> None:
        """Raise ModelRefused where a directory does not hold the tensors of the servers' model."""
        layout = read_layout(directory)
        if self._layout is None:
            self._layout = layout
        check_layout(layout, self._layout, directory)

    async def give_newest(self, client: SGLangClient, present: int) -> int:
        """Give a new server the newest weights; under the lock.

        Args:
            present: version that the server counts as having where there are no newer weights.

        Returns:
            The version that it has now.
        """
        with self._source() if self._source is not None else nullcontext(self.newest) as newest:
            if newest is None:
                await client.relabel(present)
                return present
            directory, version = newest
            directory = Path(directory).absolute()
            self.check_layout(directory)
            if self._is_fed:
                await load_in_turn(client, directory, version, self.in_flight, UPDATE_TIMEOUT_S)
            else:
                await client.update_weights(directory, version, True, UPDATE_TIMEOUT_S)
            return version

    async def load(self, serving: Sequence[Replica], directory: Path, version: int, anew: bool = False) -> None:
        """Load a version into servers; under the lock. Keepers deal with servers that die.

        Args:
            anew: also into servers that have the version or a newer one.

        Raises:
            EngineError: a server refuses the version.
        """
        before, self.newest = self.newest, (directory, version)
        behind = [replica for replica in serving if replica.version is not None and (anew or replica.version < version)]
        outcomes = await asyncio.gather(
            *(self._load_one(replica, directory, version, anew) for replica in behind), return_exceptions=True
        )
        refusals = []
        for replica, outcome in zip(behind, outcomes, strict=True):
            if isinstance(outcome, ServerLost):
                _log.warning("version %d did not reach %s: %s", version, replica.server.url, outcome)
                replica.suspect(outcome)
                replica.version = None
            elif isinstance(outcome, EngineError):
                refusals.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        times = [outcome for outcome in outcomes if isinstance(outcome, UpdateTimes)]
        if refusals and not times:
            self.newest = before
        if times:
            self.last_update = UpdateTimes(max(t.pause_s for t in times), max(t.transfer_s for t in times))
        if refusals:
            raise EngineError(
                f"version {version} in {directory} was refused, the old weights stay in use: "
                + "; ".join(str(refusal) for refusal in refusals)
            )

    async def _load_one(self, replica: Replica, directory: Path, version: int, anew: bool) -> UpdateTimes:
        assert replica.client is not None
        if self._is_fed:
            wanted = None if anew else version
            loaded = await load_in_turn(replica.client, directory, version, self.in_flight, UPDATE_TIMEOUT_S, wanted)
            if loaded is None:
                replica.version = version
                return UpdateTimes(0.0, 0.0)
            replica.given(version)
            return loaded

        async def drained() -> None:
            replica.is_draining = True
            while replica.running:
                await self._changed()

        try:
            times = await update_in_flight(
                replica.client, directory, version, self.in_flight, drained, UPDATE_TIMEOUT_S
            )
        finally:
            replica.is_draining = False
        replica.version = version
        return times
