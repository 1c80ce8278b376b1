"""Actor's end of the channel between actors and a learner rank. The learner's end is receiver.py, whose message_loop.py
handles what an actor sends.

Invariant: a trajectory that `send` accepted is offered to the learner until the learner has acknowledged or refused it,
and its ticket counts as held until then. The learner drops duplicates, so that each arrives exactly once. Lost grants
and reports of failure are repaired by the heartbeat, which lists the tickets that are held.

Messages: see the table in messages.py. Records: records_in_flight.py. Socket and silence: learner_connection.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from impala_llm.pipeline.network.keys import ActorKeys
from impala_llm.pipeline.shm.record import encode_record
from impala_llm.pipeline.shm.ring import ArenaWriter, RecordTooLarge
from impala_llm.pipeline.shm.run_directory import RunDirectory, check_name
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, Context, LearnerConnection
from impala_llm.pipeline.transport.messages import (
    Ack,
    Engines,
    EvaluationFailed,
    EvaluationGrant,
    EvaluationRequest,
    EvaluationResult,
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
)
from impala_llm.pipeline.transport.records_in_flight import Offer, RecordsInFlight
from impala_llm.trajectory import Trajectory

_MAX_REASON = 1000

Event = Grant | Ack | Refused | WeightsAnnounced | Shutdown | Revoked | HelloWanted | EvaluationGrant


class ActorChannel:
    """An actor's connection to one learner rank. For one thread or event loop. Only `poll` with a timeout blocks.

    A turn of an actor: `poll`, start an episode for each granted ticket, `send` the finished trajectories.

    Args:
        endpoint: of the rank: `RunDirectory.endpoint`, or a tcp endpoint on another host.
        actor_id: unique among living actors; a later process of the same id takes over once the first is dead or, on
            another host, silent.
        run_dir: run directory with the arena, shared with the learner; None on another host: records travel over the
            wire.
        arena_bytes: room for trajectories under way (config: pipeline.arena_mb).
        keys: needed for another host.
        times: see `ChannelTimes`.
        arena_name: of the arena's file, actor_id by default; an actor of several ranks has one for each.
        context: shared with other channels, and ended by its maker; None: the channel makes its own.

    Raises:
        ValueError: an endpoint on another host without keys, or a name that cannot be part of a file name.
        ArenaError: no room for the arena, or a living process has it.
    """

    def __init__(
        self,
        endpoint: str,
        actor_id: str,
        run_dir: RunDirectory | None,
        arena_bytes: int,
        keys: ActorKeys | None = None,
        times: ChannelTimes | None = None,
        arena_name: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.actor_id = check_name("actor_id", actor_id)
        self._times = times = times or ChannelTimes()
        self._incarnation = secrets.randbits(63)
        identity = f"{actor_id}#{self._incarnation:016x}".encode()
        arena_name = arena_name or actor_id
        self._connection = LearnerConnection(endpoint, identity, run_dir, keys, times, context)
        try:
            path = None if run_dir is None else run_dir.arena_path(arena_name)
            self._arena = ArenaWriter(path, arena_bytes, self._incarnation)
        except BaseException:
            self._connection.close()
            raise
        self._shared_arena = "" if run_dir is None else arena_name
        """Name of the arena that the learner reads; empty: records travel."""
        self._records = RecordsInFlight(self._arena, run_dir is not None, times.resend_s, times.monotonic)
        self._next_due = times.monotonic() + times.heartbeat_s
        self._next_heartbeat = self._next_due
        self._settings: dict[str, str] = {}
        self._is_hello_due = False
        self._next_hello = 0.0
        self._want: int | None = None
        self._engines: Engines | None = None
        self._evaluation_want: int | None = None
        self._held: dict[int, Ticket] = {}
        self._stats: dict[str, float] = {}
        self._version: int | None = None

    def hello(self, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Introduce this actor: once, before anything else. The channel repeats it when the learner asks for it.

        Args:
            settings: of this actor, see `shared_settings`; a learner that has others refuses it.
        """
        self._settings = dict(settings)
        self._introduce()

    def _introduce(self) -> None:
        held, first = tuple(self._held), self._records.first_sequence
        self._connection.send(Hello(self.actor_id, self._incarnation, held, self._shared_arena, first, self._settings))

    def request(self, want: int) -> None:
        """Set how many tickets this actor wants to have under way: a level, not an increment.

        The learner keeps it filled by itself: a ticket is under way from its grant until its trajectory is acknowledged
        or refused, or `fail`. With max_staleness 0 the learner grants whole batches instead.

        Args:
            want: tickets; 0 asks for no more.
        """
        self._want = want
        self._connection.send(TicketRequest(want))

    def offer_engines(self, engines: Engines) -> None:
        """Name the servers that the learner may send weights to. The channel repeats it: a message may get lost."""
        if engines != self._engines:
            self._engines = engines
            self._connection.send(engines)

    def request_evaluation(self, want: int) -> None:
        """Set how many evaluation tasks this actor wants to have at a time: a level. The channel repeats it."""
        self._evaluation_want = want
        self._connection.send(EvaluationRequest(want))

    def evaluated(self, result: EvaluationResult) -> None:
        """Send the result of an evaluation task. It may get lost: the learner then names the task again."""
        self._connection.send(result)

    def evaluation_failed(self, evaluation_id: int, task_id: int, reason: str) -> None:
        """Give an evaluation task back whose episode failed.

        Args:
            evaluation_id, task_id: of its `EvaluationGrant`.
            reason: for the learner's log, cut to 1,000 characters.
        """
        self._connection.send(EvaluationFailed(evaluation_id, task_id, _sendable(reason)))

    def send(self, trajectory: Trajectory, *, may_offer: bool = True) -> bool:
        """Hand over a finished trajectory, or an unroll of one; it is never lost while this process lives.

        The learner is offered it at once where nothing else waits for an answer, otherwise at the next `poll` or when
        enough of them have gathered.

        Args:
            trajectory: its ticket is held by this actor.
            may_offer: False: not before the next `poll`.

        Returns:
            True if it lies in the arena; False if the arena is full and it waits here for acknowledgements: finish no
            more episodes for a while.

        Raises:
            RecordTooLarge: it does not fit even into an empty arena. `fail` its ticket.
            RecordError: its metadata is too large. `fail` its ticket.
        """
        encoded = encode_record(trajectory)
        if 8 * encoded.num_words > self._arena.capacity:
            raise RecordTooLarge(
                f"episode {trajectory.episode_id!r} of {trajectory.num_tokens} tokens takes {8 * encoded.num_words} "
                f"bytes, the arena has {self._arena.capacity}: raise pipeline.arena_mb or shorten the episodes"
            )
        if not self._records.add(trajectory.ticket_id, trajectory.continues, encoded):
            return False
        # At once where the learner has nothing of this actor to do; otherwise some are gathered.
        if may_offer and self._records.is_offer_due:
            self._offer(self._records.unsent())
        else:
            self._connection.wake()  # the next `poll` offers it
        return True

    def fail(self, ticket_id: int, reason: str) -> None:
        """Give a ticket back whose episode failed.

        Args:
            ticket_id: of the ticket.
            reason: for the learner's log, cut to 1,000 characters.

        Raises:
            ValueError: this actor does not hold the ticket.
        """
        if self._held.pop(ticket_id, None) is None:
            raise ValueError(f"ticket {ticket_id} is not held by {self.actor_id}: it was finished or given back before")
        self._connection.send(TicketFailed(ticket_id, _sendable(reason)))

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
            are not wanted any more. HelloWanted has been answered already: the learner was restarted, or had given this
            actor up. EvaluationGrant is returned as it was sent, also where nothing in it is new.

        Raises:
            LearnerLost: see `learner_timeout_s`, or the run has ended.
        """
        deadline = self._times.monotonic() + timeout_s
        while True:
            events = self._turn()
            remaining = deadline - self._times.monotonic()
            if events or remaining <= 0:
                return events
            self._connection.wait(remaining)

    async def readable(self, timeout_s: float) -> None:
        """Wait until a message can be read, something waits to be sent, or the time is over, a heartbeat at most."""
        if not self._records.has_unsent:
            await self._connection.readable(timeout_s)

    @property
    def held(self) -> list[Ticket]:
        """Tickets granted to this actor and neither given back nor acknowledged."""
        return list(self._held.values())

    @property
    def num_unacknowledged(self) -> int:
        """Trajectories sent, or waiting for room, that the learner has not answered."""
        return self._records.num_unanswered

    @property
    def arena_fill(self) -> float:
        """Share of the arena in use, in [0, 1]."""
        return self._arena.used / self._arena.capacity

    def close(self) -> None:
        """Leave, and remove the arena. The learner grants tickets still held to others; unacknowledged data is lost."""
        self._connection.send(Goodbye())
        self._connection.close()
        self._arena.close()

    # --- one turn

    def _turn(self) -> list[Event]:
        events: list[Event] = []
        hello_wanted = False
        while (message := self._connection.receive()) is not None:
            if isinstance(message, HelloWanted):
                if not hello_wanted:
                    events.append(message)
                hello_wanted = True
            else:
                events += self._handle(message)
        if self._connection.check():
            self._offer(self._records.all_reminders())
        self._is_hello_due = self._is_hello_due or hello_wanted
        # At most four per heartbeat: while another process has this name, each Hello is answered by a HelloWanted.
        if self._is_hello_due and self._times.monotonic() >= self._next_hello:
            self._is_hello_due = False
            self._next_hello = self._times.monotonic() + self._times.heartbeat_s / 4
            self._introduce_again()
        self._records.use_room()
        self._offer(self._records.unsent())
        self._send_due()
        return events

    def _handle(self, message: Message) -> list[Event]:
        """Handle a message of the learner. Returns the events that it causes."""
        match message:
            case Grant(tickets):
                fresh = tuple(ticket for ticket in tickets if ticket.ticket_id not in self._held)
                self._held |= {ticket.ticket_id: ticket for ticket in fresh}
                return [Grant(fresh)] if fresh else []
            case Ack(sequences):
                for ticket_id, continues in self._records.settle(sequences):
                    if not continues:
                        self._held.pop(ticket_id, None)
                return [message]
            case Refused(sequence, _):
                events: list[Event] = [message]
                for ticket_id, continues in self._records.settle([sequence]):
                    # The remaining turns of an episode are of no use once one of its unrolls was refused.
                    if self._held.pop(ticket_id, None) is not None and continues:
                        events.append(Revoked((ticket_id,)))
                return events
            case WeightsAnnounced(version, heartbeat_s):
                self._connection.set_pause(heartbeat_s)
                is_new, self._version = version != self._version, version
                return [message] if is_new else []
            case RecordsWanted(sequences):
                self._offer(self._records.wanted(sequences))
            case Revoked(ticket_ids):
                for ticket_id in ticket_ids:
                    self._held.pop(ticket_id, None)
                return [message]
            case Shutdown() | EvaluationGrant():
                return [message]
        return []

    def _introduce_again(self) -> None:
        # The learner is new, or had given this actor up: it does not know the tickets and records that are under way.
        self._version = None
        self._introduce()
        if self._want is not None:
            self.request(self._want)
        self._repeat()
        self._offer(self._records.all_reminders())

    def _repeat(self) -> None:
        """Repeat the messages that may have been lost and that a heartbeat does not contain."""
        if self._engines is not None:
            self._connection.send(self._engines)
        if self._evaluation_want is not None:
            self._connection.send(EvaluationRequest(self._evaluation_want))

    def _send_due(self) -> None:
        now = self._times.monotonic()
        if now < self._next_due:
            return
        self._next_due = now + self._times.heartbeat_s
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._connection.pause_s
            first = self._records.first_sequence
            self._connection.send(Heartbeat(tuple(self._held), self._stats, self._want or 0, first))
            self._repeat()
        self._offer(self._records.reminders())

    def _offer(self, offers: Iterable[Offer]) -> None:
        for batch, records in offers:
            self._connection.send(batch, records)


def _sendable(reason: str) -> str:
    """Shorten a text of any origin, and replace characters that cannot be sent: msgpack takes no lone surrogates."""
    return reason[:_MAX_REASON].encode(errors="replace").decode()
