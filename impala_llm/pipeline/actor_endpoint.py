"""An actor's end of the pipeline in one object: tickets in, trajectories out, weights to read.

The channels to all learner ranks are used as one: fair shares for the ranks, no idle slot while any rank has tickets.
Invariant: trajectories, failures and acknowledgements use the channel that granted their ticket.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import zmq

from impala_llm.hosts import rank_endpoint
from impala_llm.pipeline.network.keys import load_actor_keys
from impala_llm.pipeline.shared_settings import shared_settings
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.actor_channel import ActorChannel, Event
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, Context
from impala_llm.pipeline.transport.messages import Grant, WeightsAnnounced
from impala_llm.pipeline.weights.board import WeightReader
from impala_llm.settings import Config
from impala_llm.trajectory import Trajectory


class ActorEndpoint:
    """Connections of an actor to all ranks of the learner of `run.name`, here or where `pipeline.connect` says.

    Args:
        config: of the run; its `run`, `pipeline` and `learner` settings are used.
        actor_id: unique among all actors of the run.

    Raises:
        RunDirectoryError: no learner of this run has started within `pipeline.learner_timeout_s`.
    """

    def __init__(self, config: Config, actor_id: str) -> None:
        self._config, self._actor_id = config, actor_id
        self._run_dir = run_dir = RunDirectory.attach(config.run.name, timeout_s=config.pipeline.learner_timeout_s)
        self.board = WeightReader(run_dir.weights_path)
        """Versions on this host's board, the learner's own or the one that a relay fills."""
        self.server_key = run_dir.server_key
        """API key of this run's SGLang servers."""

    def connect(self) -> RankChannels:
        """The channel for tickets, trajectories and announcements. Its `close` is the caller's task.

        Raises:
            KeyFileError: `pipeline.keys` names files that cannot be used.
        """
        return RankChannels(self._connect, self._config.learner.num_ranks, shared_settings(self._config))

    def _connect(self, rank: int, context: Context) -> ActorChannel:
        pipeline = self._config.pipeline
        remote = pipeline.connect and rank_endpoint(pipeline.connect, rank)
        return ActorChannel(
            remote or self._run_dir.endpoint(rank),
            self._actor_id,
            None if remote else self._run_dir,
            arena_bytes=(pipeline.arena_mb << 20) // self._config.learner.num_ranks,
            keys=load_actor_keys(Path(pipeline.keys).expanduser()) if remote and pipeline.keys else None,
            times=ChannelTimes(pipeline.heartbeat_s, learner_timeout_s=pipeline.learner_timeout_s),
            arena_name=f"{self._actor_id}.rank-{rank}",
            context=context,
        )


class RankChannels:
    """An `ActorChannel` to each rank of the learner, in one ZeroMQ context. Messages about a ticket use the channel
    that granted it.

    Args:
        connect: makes the channel to a rank, in the context given.
        num_ranks: learner ranks.
        settings: of the actor, see `shared_settings`.
        share_every_s: seconds between two redistributions of the slots that some ranks did not fill.
    """

    def __init__(
        self,
        connect: Callable[[int, Context], ActorChannel],
        num_ranks: int,
        settings: Mapping[str, str] = MappingProxyType({}),
        share_every_s: float = 1.0,
    ) -> None:
        self._context: Context = zmq.Context()
        self._settings = settings
        self._channels: list[ActorChannel] = []
        try:
            for rank in range(num_ranks):
                self._channels.append(connect(rank, self._context))
        except BaseException:
            self.close()
            raise
        self._came_by: dict[int, ActorChannel] = {}
        self._want = 0
        self._levels = [0] * len(self._channels)
        self._peaks = [0] * len(self._channels)
        self._share_every_s = share_every_s
        self._next_share = 0.0
        self._version: int | None = None

    def hello(self) -> None:
        """Introduce this actor to all ranks, see `ActorChannel.hello`."""
        for channel in self._channels:
            channel.hello(self._settings)

    def request(self, want: int) -> None:
        """Divide a request over all ranks, see `ActorChannel.request`.

        Args:
            want: tickets to hold at a time, of all ranks together.
        """
        self._want = want
        self._levels = [-(-want // len(self._channels))] * len(self._channels)
        for channel, level in zip(self._channels, self._levels, strict=True):
            channel.request(level)
        self._next_share = time.monotonic() + self._share_every_s

    def send(self, trajectory: Trajectory) -> bool:
        """Send to the rank that granted the trajectory's ticket, see `ActorChannel.send`.

        Returns:
            Whether there was room for it in the arena; finish no more episodes for a while where there was none.

        Raises:
            ValueError: the ticket was not granted to this actor.
            RecordTooLarge, RecordError: see `ActorChannel.send`.
        """
        return self._channel_of(trajectory.ticket_id).send(trajectory)

    def fail(self, ticket_id: int, reason: str) -> None:
        """Report the failure of an episode to the rank that granted its ticket, see `ActorChannel.fail`.

        Args:
            ticket_id: of a ticket that this actor holds.
            reason: for the learner's log.

        Raises:
            ValueError: this actor does not hold the ticket.
        """
        self._channel_of(ticket_id).fail(ticket_id, reason)

    @property
    def first(self) -> ActorChannel:
        """The channel to the first rank, which adds up metrics, publishes and evaluates for all."""
        return self._channels[0]

    async def poll_async(self, timeout_s: float) -> list[Event]:
        """Return the events of all ranks; if there are none, wait for one for at most `timeout_s`. Each version is
        reported once.

        Raises:
            LearnerLost: see `ActorChannel.poll`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            events = [event for channel in self._channels for event in self._taken(channel)]
            self._share_out()
            remaining = deadline - time.monotonic()
            if events or remaining <= 0:
                return events
            await self._any_readable(remaining)

    @property
    def held(self) -> list[Ticket]:
        """Tickets held, of all ranks; see `ActorChannel.held`."""
        return [ticket for channel in self._channels for ticket in channel.held]

    @property
    def arena_fill(self) -> float:
        """Share of the fullest arena in use, in [0, 1]."""
        return max(channel.arena_fill for channel in self._channels)

    def close(self) -> None:
        """Close all channels and their context."""
        for channel in self._channels:
            channel.close()
        self._context.term()

    def _channel_of(self, ticket_id: int) -> ActorChannel:
        channel = self._came_by.get(ticket_id)
        if channel is None:
            raise ValueError(f"ticket {ticket_id} was not granted to this actor")
        return channel

    def _taken(self, channel: ActorChannel) -> list[Event]:
        """Return a rank's events, without versions that another rank has announced already."""
        events: list[Event] = []
        for event in channel.poll():
            match event:
                case Grant(tickets):
                    self._came_by |= {ticket.ticket_id: channel for ticket in tickets}
                case WeightsAnnounced(version):
                    if self._version is not None and version <= self._version:
                        continue
                    self._version = version
            events.append(event)
        if len(self._came_by) > 2 * len(self.held) + 1024:
            held = {ticket.ticket_id for ticket in self.held}
            self._came_by = {ticket_id: c for ticket_id, c in self._came_by.items() if ticket_id in held}
        return events

    def _share_out(self) -> None:
        """Request an equal share of slots from each rank. If a rank cannot fill its share for lack of tickets, request
        the rest from ranks that filled theirs."""
        self._peaks = [max(peak, len(c.held)) for peak, c in zip(self._peaks, self._channels, strict=True)]
        now = time.monotonic()
        if now < self._next_share:
            return
        self._next_share = now + self._share_every_s
        share = -(-self._want // len(self._channels))
        spare = sum(max(0, share - peak) for peak in self._peaks)
        num_full = sum(peak >= share for peak in self._peaks)
        for index, channel in enumerate(self._channels):
            is_full = self._peaks[index] >= share
            level = share + (spare // num_full if is_full else 0)
            if level != self._levels[index]:
                self._levels[index] = level
                channel.request(level)
            self._peaks[index] = len(channel.held)

    async def _any_readable(self, timeout_s: float) -> None:
        if len(self._channels) == 1:
            await self._channels[0].readable(timeout_s)
            return
        waiting = [asyncio.ensure_future(channel.readable(timeout_s)) for channel in self._channels]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def actor_name(config: Config, index: int) -> str:
    """Make a name that is unique among all actors of a run.

    Args:
        config: of the run; with `pipeline.connect` the name begins with that of this host.
        index: of the actor among those of its host, from 0.
    """
    if config.pipeline.connect is None:
        return f"actor-{index}"
    node = platform.node()
    host = re.sub(r"[^A-Za-z0-9-]", "-", node).strip("-")[:32]
    if not host or host != node:
        # Two host names may differ only in characters that were replaced or cut off: the hash keeps them apart.
        host = f"{host[:23] or 'host'}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"
    return f"{host}-actor-{index}"
