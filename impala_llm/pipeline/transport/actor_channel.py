"""Actor's end of the channel between actors and a learner rank. The learner's end is receiver.py.

Invariant: a trajectory that `send` accepted is offered to the learner until the learner has acknowledged or refused it,
and its ticket counts as held until then. The learner drops duplicates, so that each arrives exactly once. Lost grants
and reports of failure are repaired by the heartbeat, which lists the tickets that are held.

Messages: see the table in messages.py.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterable

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import ActorKeys
from impala_llm.pipeline.shm.record import EncodedTrajectory, encode_record
from impala_llm.pipeline.shm.ring import ArenaWriter, Place, RecordTooLarge
from impala_llm.pipeline.shm.run_directory import RunDirectory, check_name
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.messages import (
    MAX_MESSAGE_BYTES,
    UNKNOWN_RUN,
    Ack,
    DescriptorBatch,
    Engines,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    HelloWanted,
    Message,
    RecordsWanted,
    Refused,
    Revoked,
    Shutdown,
    TicketFailed,
    TicketRequest,
    WeightsAnnounced,
    WireError,
    decode,
    encode,
    run_id_of,
)
from impala_llm.trajectory import Trajectory

_log = logging.getLogger(__name__)
_MAX_RECORDS = 64
"""Maximum of records in a message, and of records that wait for the next one."""
_MAX_WAITING_WORDS = 1 << 20
"""Words of unsent records from which on they are offered without waiting for the next `poll`."""
_MAX_INLINE_BYTES = 4 << 20
"""Bytes from which on no further record goes into a message, where records travel in it."""
_MAX_REASON = 1000
_PATIENCE_HEARTBEATS = 5
_SILENT_HEARTBEATS = 10
"""Heartbeats without an answer after which the learner's silence is logged, once."""
_MAX_PATIENCE_S = 60.0
_ROW = struct.Struct("<5q")  # wire.Descriptor
_REMINDERS = 5
"""Number of reminders of a record whose intervals double; later ones keep the last interval."""

Context = zmq.Context[zmq.Socket[bytes]]
"""ZeroMQ context, with its threads, for any number of channels of a process."""

Event = Grant | Ack | Refused | WeightsAnnounced | Shutdown | Revoked | HelloWanted


class LearnerLost(RuntimeError):
    """The learner was silent for too long, or another run has taken its place: the actor should end."""


_InFlight = tuple[bytes, Place, int]
"""Record without an answer yet: (its descriptor as it is sent, its place, id of the ticket that the answer ends or
_GOES_ON)."""
_GOES_ON = -1
"""Stands for no ticket, where more unrolls of the episode are to come: the ticket stays held."""


class ActorChannel:
    """An actor's connection to one learner rank. For one thread or event loop. Only `poll` with a timeout blocks.

    A turn of an actor: `poll`, start an episode for each granted ticket, `send` what is finished.

    Args:
        endpoint: of the rank: `RunDirectory.endpoint`, or a tcp endpoint on another host.
        actor_id: unique among living actors; a later process of the same id takes over once the first is dead or
            silent.
        run_dir: run directory with the arena, shared with the learner; None on another host: records travel over the
            wire.
        arena_bytes: room for trajectories under way (config: pipeline.arena_mb).
        keys: needed for another host.
        heartbeat_s: seconds between heartbeats, sent by `poll`; a learner of many actors asks for fewer.
        resend_s: seconds without an acknowledgement after which the learner is reminded of a trajectory; later
            reminders become rarer. The record itself travels again only where the learner lacks it.
        learner_timeout_s: seconds of silence of the learner, its start included, after which `poll` raises
            LearnerLost; None: never. Only time in which this actor polled counts, a gap between two polls as one
            heartbeat at most.
        arena_name: of the arena's file, actor_id by default; an actor of several ranks has one for each.
        context: shared with other channels, and ended by its maker; None: the channel makes its own.

    Raises:
        ValueError: an endpoint on another host without keys, or a name that cannot be part of a file name.
    """

    def __init__(
        self,
        endpoint: str,
        actor_id: str,
        run_dir: RunDirectory | None,
        arena_bytes: int,
        keys: ActorKeys | None = None,
        heartbeat_s: float = 1.0,
        resend_s: float = 5.0,
        learner_timeout_s: float | None = None,
        arena_name: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.actor_id = check_name("actor_id", actor_id)
        self._heartbeat_s = heartbeat_s
        self._resend_s = resend_s
        self._learner_timeout_s = learner_timeout_s
        self._incarnation = secrets.randbits(63)
        self._context: Context = zmq.Context() if context is None else context
        self._owns_context = context is None
        self._endpoint, self._keys = endpoint, keys
        try:
            self._socket = self._connect()
        except BaseException:
            self._end_context()
            raise
        self._run_dir = run_dir
        self._run_id = UNKNOWN_RUN if run_dir is None else run_dir.run_id
        self._is_shared = run_dir is not None
        self._arena_name = arena_name or actor_id
        path = None if run_dir is None else run_dir.arena_path(self._arena_name)
        self._arena = ArenaWriter(path, arena_bytes, self._incarnation)
        self._clock = ActiveClock(heartbeat_s)
        self._learner_heard = 0.0
        self._is_waiting = False
        """Whether the learner's silence was logged."""
        self._patience_s = _PATIENCE_HEARTBEATS * heartbeat_s
        self._next_connect = self._patience_s
        self._pause_s = heartbeat_s
        """Seconds between two heartbeats."""
        self._next_due = time.monotonic() + heartbeat_s
        self._next_heartbeat = self._next_due
        self._is_hello_due = False
        self._next_hello = 0.0
        self._next_sequence = 0
        self._want: int | None = None
        self._engines: Engines | None = None
        self._held: dict[int, Ticket] = {}
        self._stats: dict[str, float] = {}
        self._outbox: deque[tuple[int, int, EncodedTrajectory]] = deque()
        self._unsent: list[int] = []
        self._unsent_words = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._offered: list[deque[tuple[float, list[int]]]] = [deque() for _ in range(_REMINDERS)]
        """(time, sequences) of offers, by the number of reminders before; each queue is in the order of time."""
        self._version: int | None = None
        self._waiter: asyncio.Future[None] | None = None

    def hello(self) -> None:
        """Introduce this actor: once, before anything else. The channel repeats it by itself when the learner asks."""
        held = tuple(self._held)
        arena = self._arena_name if self._is_shared else ""
        self._send(Hello(self.actor_id, self._incarnation, held, arena, self._first_sequence()))

    def request(self, want: int) -> None:
        """Set how many tickets this actor wants to have under way: a level, not an increment.

        The learner keeps it filled by itself: a ticket is under way from its grant until its trajectory is acknowledged
        or refused, or `fail`. With max_staleness 0 the learner grants whole batches instead.

        Args:
            want: tickets; 0 asks for no more.
        """
        self._want = want
        self._send(TicketRequest(want))

    def offer_engines(self, engines: Engines) -> None:
        """Name the servers that the learner may send weights to. The channel repeats it: a message may get lost."""
        if engines != self._engines:
            self._engines = engines
            self._send(engines)

    def send(self, trajectory: Trajectory) -> bool:
        """Hand over a finished trajectory, or an unroll of one; it is never lost while this process lives.

        The learner is offered it at once where nothing else waits for an answer, otherwise at the next `poll` or when
        enough of them have gathered.

        Returns:
            True if it lies in the arena; False if the arena is full and it waits here for acknowledgements: finish no
            more episodes for a while.

        Raises:
            RecordTooLarge: it does not fit even into an empty arena. `fail` its ticket.
            RecordError: its metadata is too large. `fail` its ticket.
        """
        encoded = encode_record(trajectory)
        ticket_id = trajectory.ticket_id
        ended = _GOES_ON if trajectory.continues else ticket_id
        if not self._outbox and self._lay(ticket_id, ended, encoded):
            num_unsent = len(self._unsent)
            # At once where the learner has nothing of this actor to do; otherwise some are gathered.
            if (
                num_unsent == len(self._in_flight)
                or num_unsent >= _MAX_RECORDS
                or self._unsent_words >= _MAX_WAITING_WORDS
            ):
                self._offer_unsent()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)  # the turn of whoever waits offers it
            return True
        if 8 * encoded.num_words > self._arena.capacity:
            raise RecordTooLarge(
                f"episode {trajectory.episode_id!r} of {trajectory.num_tokens} tokens takes {8 * encoded.num_words} "
                f"bytes, the arena has {self._arena.capacity}: raise pipeline.arena_mb or shorten the episodes"
            )
        self._outbox.append((ticket_id, ended, encoded))
        return False

    def fail(self, ticket_id: int, reason: str) -> None:
        """Give a ticket back whose episode failed.

        Args:
            reason: for the learner's log.

        Raises:
            ValueError: this actor does not hold the ticket.
        """
        if self._held.pop(ticket_id, None) is None:
            raise ValueError(f"ticket {ticket_id} is not held by {self.actor_id}: it was finished or given back before")
        # The text may come from anywhere, and msgpack takes no lone surrogates.
        self._send(TicketFailed(ticket_id, reason[:_MAX_REASON].encode(errors="replace").decode()))

    def report(self, stats: dict[str, float]) -> None:
        """Set the metrics that each heartbeat brings to the learner, by name."""
        self._stats = {name: float(value) for name, value in stats.items()}

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """Receive messages of the learner, and send what is due.

        Args:
            timeout_s: seconds to wait for a message.

        Returns:
            Events. Grant holds only tickets that are new to this actor. WeightsAnnounced comes when the version differs
            from the last one. Revoked also follows the refusal of an unroll, since the remaining turns of its episode
            are not wanted any more. HelloWanted was answered already: the learner is another one, or had given this
            actor up.

        Raises:
            LearnerLost: see `learner_timeout_s`, or the run has ended.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            events = self._turn()
            remaining = deadline - time.monotonic()
            if events or remaining <= 0:
                return events
            self._socket.poll(math.ceil(1000 * min(remaining, self._heartbeat_s)))

    async def poll_async(self, timeout_s: float) -> list[Event]:
        """`poll` for an event loop; other coroutines may use the channel meanwhile, except for this method."""
        deadline = time.monotonic() + timeout_s
        while True:
            events = self._turn()
            remaining = deadline - time.monotonic()
            if events or remaining <= 0:
                return events
            await self.readable(remaining)

    @property
    def held(self) -> list[Ticket]:
        """Tickets granted to this actor and neither given back nor acknowledged."""
        return list(self._held.values())

    @property
    def num_unacknowledged(self) -> int:
        """Trajectories sent, or waiting for room, that the learner has not answered."""
        return len(self._in_flight) + len(self._outbox)

    @property
    def arena_fill(self) -> float:
        """Share of the arena in use, in [0, 1]."""
        return self._arena.used / self._arena.capacity

    def close(self) -> None:
        """Leave, and remove the arena. The learner grants tickets still held to others; unacknowledged data is lost."""
        self._send(Goodbye())
        self._socket.close()
        self._end_context()
        self._arena.close()

    def _end_context(self) -> None:
        if self._owns_context:
            self._context.term()

    # --- one turn

    def _turn(self) -> list[Event]:
        self._clock.tick()
        events: list[Event] = []
        hello_wanted = False
        while (message := self._receive()) is not None:
            if self._is_waiting:
                _log.warning("the learner is back after %.0f s", self._clock.now - self._learner_heard)
                self._is_waiting = False
            self._learner_heard = self._clock.now
            self._patience_s = _PATIENCE_HEARTBEATS * self._pause_s
            self._next_connect = self._clock.now + self._patience_s
            if isinstance(message, HelloWanted):
                if not hello_wanted:
                    events.append(message)
                hello_wanted = True
            else:
                events += self._handle(message)
        if self._clock.now > self._next_connect:
            self._connect_again()
        self._is_hello_due = self._is_hello_due or hello_wanted
        # Not at once each time: where another process has this name, each introduction is answered like this.
        if self._is_hello_due and time.monotonic() >= self._next_hello:
            self._is_hello_due = False
            self._next_hello = time.monotonic() + self._heartbeat_s / 4
            self._introduce_again()
        while self._outbox and self._lay(*self._outbox[0]):
            self._outbox.popleft()
        self._offer_unsent()
        self._send_due()
        self._check_silence()
        return events

    def _handle(self, message: Message) -> list[Event]:
        """Handle a message of the learner. Returns what the actor must know of it."""
        match message:
            case Grant(tickets):
                fresh = tuple(ticket for ticket in tickets if ticket.ticket_id not in self._held)
                self._held |= {ticket.ticket_id: ticket for ticket in fresh}
                return [Grant(fresh)] if fresh else []
            case Ack(sequences):
                self._settle(sequences)
                return [message]
            case Refused(sequence, _):
                revoked = self._revoked_by_refusal(sequence)
                self._settle([sequence])
                return [message, *revoked]
            case WeightsAnnounced(version, heartbeat_s):
                # Several answers must come before the learner counts as silent.
                most_s = (self._learner_timeout_s or math.inf) / _PATIENCE_HEARTBEATS
                self._pause_s = max(self._heartbeat_s, min(heartbeat_s, most_s))
                is_new, self._version = version != self._version, version
                return [message] if is_new else []
            case RecordsWanted(sequences):
                self._offer(sequences, None)
            case Revoked(ticket_ids):
                for ticket_id in ticket_ids:
                    self._held.pop(ticket_id, None)
                return [message]
            case Shutdown():
                return [message]
        return []

    def _check_silence(self) -> None:
        """Log the learner's silence once; raise LearnerLost where it has lasted for too long."""
        silence = self._clock.now - self._learner_heard
        if self._learner_timeout_s is not None and silence > self._learner_timeout_s:
            raise LearnerLost(
                f"the learner has been silent for {silence:.0f} s, more than pipeline.learner_timeout_s="
                f"{self._learner_timeout_s:g}"
            )
        if silence > _SILENT_HEARTBEATS * self._pause_s and not self._is_waiting:
            limit = "null, for ever" if self._learner_timeout_s is None else f"{self._learner_timeout_s:g}"
            _log.warning(
                "the learner has been silent for %.0f s: waiting for it (pipeline.learner_timeout_s=%s)", silence, limit
            )
            self._is_waiting = True

    def _connect(self) -> zmq.Socket[bytes]:
        identity = f"{self.actor_id}#{self._incarnation:016x}".encode()
        return sockets.dealer(self._context, self._endpoint, identity, MAX_MESSAGE_BYTES, self._keys)

    def _connect_again(self) -> None:
        """The learner answers each heartbeat. If it does not, the connection may be one that libzmq has given up.

        It does so for good after an error of protocol, such as bytes that were changed on their way.
        """
        if self._run_dir is not None and self._run_dir.has_ended():
            raise LearnerLost(f"this actor's run has ended, or another run has its name: {self._run_dir.path} is gone")
        self._socket.close(linger=0)
        self._socket = self._connect()
        self._patience_s = min(2 * self._patience_s, _MAX_PATIENCE_S)
        self._next_connect = self._clock.now + self._patience_s
        self._offer_all_again()  # what was on its way may be lost

    def _receive(self) -> Message | None:
        while self._has_input():
            try:
                frame = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
                message = decode(frame)
            except WireError as error:
                _log.warning("a message of the learner was dropped: %s", error)
                continue
            run_id = run_id_of(frame)
            if self._run_id == UNKNOWN_RUN:
                self._run_id = run_id
            elif run_id not in (UNKNOWN_RUN, self._run_id):
                raise LearnerLost(f"another run listens at {self._endpoint}: this actor's run has ended")
            return message
        return None

    def _settle(self, sequences: Iterable[int]) -> None:
        in_flight, held, free = self._in_flight, self._held, self._arena.free
        for sequence in sequences:
            answered = in_flight.pop(sequence, None)
            if answered is not None:
                _, place, ended = answered
                free(place.start)
                held.pop(ended, None)

    def _first_sequence(self) -> int:
        """Sequence below which all records have been answered."""
        return min(self._in_flight, default=self._next_sequence)

    def _revoked_by_refusal(self, sequence: int) -> list[Revoked]:
        """Revoke the ticket of an episode that goes on, one of whose unrolls was refused."""
        row, _, ended = self._in_flight.get(sequence, (b"", None, 0))
        if ended != _GOES_ON:
            return []
        _, ticket_id, *_ = _ROW.unpack(row)
        return [Revoked((ticket_id,))] if self._held.pop(ticket_id, None) is not None else []

    def _introduce_again(self) -> None:
        # The learner is new, or had given this actor up: it knows nothing of what is under way.
        self._version = None
        self.hello()
        if self._want is not None:
            self.request(self._want)
        if self._engines is not None:
            self._send(self._engines)
        self._offer_all_again()

    def _lay(self, ticket_id: int, ended: int, encoded: EncodedTrajectory) -> bool:
        """Write a record into the arena. Returns False where it has no room now."""
        try:
            place = self._arena.write(encoded)
        except RecordTooLarge:
            return False
        if place is None:
            return False
        sequence = self._next_sequence
        self._next_sequence += 1
        start, num_words, checksum = place
        row = _ROW.pack(sequence, ticket_id, start if self._is_shared else 0, num_words, checksum)
        self._in_flight[sequence] = (row, place, ended)
        self._unsent.append(sequence)
        self._unsent_words += num_words
        return True

    def _offer_unsent(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._unsent_words = 0
            self._offer(unsent)

    def _offer_all_again(self) -> None:
        self._unsent.clear()
        self._unsent_words = 0
        for queue in self._offered:
            queue.clear()
        self._offer(self._in_flight, 0, is_reminder=True)

    def _offer(self, sequences: Iterable[int], reminders: int | None = 0, is_reminder: bool = False) -> None:
        """Offer records in flight to the learner, without those answered meanwhile.

        Args:
            reminders: number of reminders before; None: some are due already.
            is_reminder: send the descriptors without the records.
        """
        batch: list[int] = []
        num_bytes = 0
        for sequence in sequences:
            if sequence not in self._in_flight:
                continue
            batch.append(sequence)
            num_bytes += 8 * self._in_flight[sequence][1].num_words
            if len(batch) == _MAX_RECORDS or (not self._is_shared and num_bytes >= _MAX_INLINE_BYTES):
                self._offer_batch(batch, reminders, is_reminder)
                batch, num_bytes = [], 0
        if batch:
            self._offer_batch(batch, reminders, is_reminder)

    def _offer_batch(self, sequences: list[int], reminders: int | None, is_reminder: bool) -> None:
        if reminders is not None:
            self._offered[reminders].append((time.monotonic(), sequences))
        records = [self._in_flight[sequence] for sequence in sequences]
        frames = [] if self._is_shared or is_reminder else [self._arena.view(place) for _, place, _ in records]
        self._send(DescriptorBatch(b"".join([row for row, _, _ in records])), frames)

    def _send_due(self) -> None:
        now = time.monotonic()
        if now < self._next_due:
            return
        self._next_due = now + self._heartbeat_s
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._pause_s
            self._send(Heartbeat(tuple(self._held), self._stats, self._want or 0, self._first_sequence()))
            if self._engines is not None:
                self._send(self._engines)
        for reminders, queue in enumerate(self._offered):
            again: list[int] = []
            while queue and now - queue[0][0] > self._resend_s * 2**reminders:
                again += queue.popleft()[1]
            self._offer(again, min(reminders + 1, _REMINDERS - 1), is_reminder=True)

    def _send(self, message: Message, records: Iterable[memoryview] = ()) -> None:
        try:
            frames: list[bytes | memoryview] = [encode(message, self._run_id), *records]
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.NOBLOCK)  # several times as fast
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            # The queue of a learner that does not read is full. All that matters is offered again.
            _log.debug("no room to send %s", type(message).__name__)
        # Sending may swallow the signal that a message has arrived: see `readable`.
        if self._waiter is not None and not self._waiter.done() and self._has_input():
            self._waiter.set_result(None)

    # --- asyncio

    def _has_input(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message can be read, something waits to be sent, or the time is over, a heartbeat at most.

        ZeroMQ's descriptor is edge-triggered and stands for commands, not messages: it tells nothing once ZMQ_EVENTS
        was read or anything was sent. So the events are read before waiting, and again after each `_send`.
        """
        loop = asyncio.get_running_loop()
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        waiter = self._waiter = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        loop.add_reader(descriptor, wake)
        timer = loop.call_later(min(timeout_s, self._heartbeat_s), wake)
        try:
            if not self._has_input() and not self._unsent:
                await waiter
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
            self._waiter = None
