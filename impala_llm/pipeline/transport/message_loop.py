"""Message loop of a receiver: handles messages of actors, stores their records, grants tickets, announces versions.

Invariant: a trajectory is acknowledged once it lies, valid, in the trajectory store. Malformed records, and records
that do not match their ticket, are refused and counted. No message of a peer can end the receiver: an error in handling
one ends that peer's session. The rules for connected and lost actors are in sessions.py, those for valid records in
ingest.py.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from impala_llm.hosts import is_loopback_url
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.transport.actor_sockets import ActorSockets, Address
from impala_llm.pipeline.transport.evaluation_tasks import EvaluationTasks
from impala_llm.pipeline.transport.ingest import Ingest, IngestBroken
from impala_llm.pipeline.transport.messages import (
    UNKNOWN_RUN,
    Ack,
    DescriptorBatch,
    Engines,
    EvaluationFailed,
    EvaluationRequest,
    EvaluationResult,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    HelloWanted,
    RecordsWanted,
    Refused,
    Revoked,
    Shutdown,
    TicketFailed,
    TicketRequest,
    WeightsAnnounced,
    WireError,
    decode,
    run_id_of,
)
from impala_llm.pipeline.transport.sessions import ActorSession, IntroductionRefused, SessionRegistry
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_log = logging.getLogger(__name__)
_RETRY_S = 0.1
"""Seconds between two attempts to store records that wait for room, where no space was freed."""
_DEAL_S = 0.5
"""Seconds between two redistributions of evaluation tasks, from actors that have left to others."""
_MAX_REASON = 1000
_MAX_WAITING_BYTES = 256 << 20
"""Bytes of records of an actor on another host that may wait here for room; beyond it no further ones are taken."""


class MessageLoop:
    """Serves the actors of one rank, a `turn` at a time. For one thread at a time.

    Any thread may call `announce`, set `shutdown_reason`, and read `published`, `totals` and `is_full`.

    Args:
        actors: sockets to them.
        registry: of their sessions; this loop ticks its clock.
        ledger: of the rank.
        ingest: takes their records into the trajectory store.
        store: the trajectory store.
        evaluation: tasks of the evaluation inside of the run.
        published: version that actors find on the board at the start.
        max_remembered: limit of refusals, and of sequences out of order, that are remembered of an actor.
    """

    def __init__(
        self,
        actors: ActorSockets,
        registry: SessionRegistry,
        ledger: TicketLedger,
        ingest: Ingest,
        store: TrajectoryStore,
        evaluation: EvaluationTasks[Address],
        published: int,
        max_remembered: int,
    ) -> None:
        self._actors = actors
        self._registry = registry
        self._ledger = ledger
        self._ingest = ingest
        self._store = store
        self._evaluation = evaluation
        self._next_deal = 0.0
        self._max_remembered = max_remembered
        self._published = published
        self.shutdown_reason: str | None = None
        """Once set, all actors are told to end, and no ticket is granted."""
        self.totals: Counter[str] = Counter()
        """Counters: messages_malformed, sessions_broken, evaluation_unwanted."""
        self._announced = published
        self._acks: defaultdict[Address, list[int]] = defaultdict(list)
        self._offered: dict[Address, ActorSession] = {}
        """Sessions that have offered records in this turn."""
        self._waiting: dict[Address, ActorSession] = {}
        """Sessions with records that wait, for room or for their version, since an earlier turn."""
        self._taken_in_at = (0, 0.0)
        """(version, time) of the last attempt to store records that wait."""
        self._warnings = RateLimitedWarnings()
        self._failures = RateLimitedWarnings(interval_s=60.0, on_terminal=True)

    def announce(self, version: int) -> None:
        """Have all actors told, in the next turn, that a version lies on the board."""
        self._published = version

    @property
    def published(self) -> int:
        """Version that actors find on the board."""
        return self._published

    @property
    def is_full(self) -> bool:
        """Whether records that actors offer wait for room in the trajectory store."""
        return any(session.offers.queue and not session.has_ended for session in list(self._waiting.values()))

    def turn(self, ready: set[object]) -> None:
        """Handle messages, store records, check actors, grant tickets. `Receiver` calls it in turn, in its thread.

        Args:
            ready: sockets with messages, see `ActorSockets.wait`.
        """
        self._registry.clock.tick()
        for address, frames, key in self._actors.receive(ready):
            self._handle(address, frames, key)
        self._send_acks()
        self._take_in_all()
        self._check_actors()
        if self.shutdown_reason is not None:
            self.send_shutdown()
        else:
            self._grant()
            self._deal_evaluation()

    def send_shutdown(self) -> None:
        """Tell all actors to end, where there is a reason to."""
        if self.shutdown_reason is None:
            return
        for session in list(self._registry.by_address.values()):
            self._actors.send(session.address, Shutdown(self.shutdown_reason))
            self._registry.drop(session)

    # --- messages

    def _handle(self, address: Address, frames: list[bytes], key: str | None) -> None:
        try:
            if not frames:
                raise WireError("a message has no frames: at least 1 is expected")
            message = decode(frames[0])
            if len(frames) > 1 and not isinstance(message, DescriptorBatch):
                raise WireError(f"{type(message).__name__} has {len(frames)} frames: 1 is expected")
            if run_id_of(frames[0]) not in (UNKNOWN_RUN, self._actors.run_id):
                self._shut_down_foreign_actor(address)
                return
            if isinstance(message, Hello):
                self._handle_hello(address, message, key)
                return
            session = self._registry.by_address.get(address)
            if session is None:
                if not isinstance(message, Goodbye):
                    self._actors.send(address, HelloWanted())
                return
            session.last_heard = self._registry.clock.now
            match message:
                case TicketRequest(want):
                    self._ledger.request(session.actor_id, want)
                case DescriptorBatch():
                    self._handle_offer(session, message, frames[1:])
                case TicketFailed(ticket_id, reason):
                    self._ledger.failed(ticket_id, session.actor_id)
                    self._failures.log("an episode failed", f"ticket {ticket_id} at {session.actor_id}: {reason}")
                case Heartbeat():
                    self._handle_heartbeat(session, message)
                case Goodbye():
                    self._registry.drop(session)
                case Engines(urls):
                    if address[0] > 0 and any(map(is_loopback_url, urls)):
                        raise WireError(f"{session.actor_id} on another host offers servers of this one: {urls}")
                    self._registry.offer_engines(session, message)
                case EvaluationRequest(want):
                    session.evaluation_want = want
                case EvaluationResult():
                    self.totals["evaluation_unwanted"] += not self._evaluation.answered(address, message)
                case EvaluationFailed(_, task_id, reason):
                    self.totals["evaluation_unwanted"] += not self._evaluation.failed(address, message)
                    self._warnings.log("an evaluation task failed", f"task {task_id} at {session.actor_id}: {reason}")
                case _:
                    raise WireError(f"{type(message).__name__} is a learner's message, and an actor sent it")
        except WireError as error:
            self.totals["messages_malformed"] += 1
            self._warnings.log("a malformed message was dropped", str(error))
        except Exception as error:
            self._end_broken(address, error)

    def _isolated(self, session: ActorSession, action: Callable[[ActorSession], None]) -> None:
        """Call `action` for a session. An error in it ends only this session."""
        try:
            action(session)
        except IngestBroken:
            raise
        except Exception as error:
            self._end_broken(session.address, error)

    def _end_broken(self, address: Address, error: Exception) -> None:
        """End the session at an address after an error of our own. A living actor introduces itself again."""
        self.totals["sessions_broken"] += 1
        _log.error("an error in dealing with the peer %r ends its session", address[1], exc_info=error)
        if (session := self._registry.by_address.get(address)) is not None:
            self._registry.lose(session, f"an error of the learner's: {error!r}")

    def _handle_hello(self, address: Address, hello: Hello, key: str | None) -> None:
        try:
            session = self._registry.introduce(address, hello, key)
        except IntroductionRefused as refusal:
            self._actors.send(address, Shutdown(str(refusal)[:_MAX_REASON]))
            return
        if session is not None:
            self._send_version([session])

    def _shut_down_foreign_actor(self, address: Address) -> None:
        """Shut down an actor of an earlier run of this name, whose tickets and records are invalid here."""
        text = f"{address[1][:_MAX_REASON]!r} belongs to another run, which has ended: start it again"
        self._warnings.log("an actor of another run was told to end", text)
        self._actors.send(address, Shutdown(text[:_MAX_REASON]))

    def _handle_heartbeat(self, session: ActorSession, heartbeat: Heartbeat) -> None:
        self._ledger.request(session.actor_id, heartbeat.want)
        session.offers.answered_below(heartbeat.first_sequence)
        self._registry.report(session, heartbeat.stats)
        if again := self._registry.lost_grants(session, heartbeat.held):
            self._send_grant(session, again)
        self._send_version([session])

    # --- trajectories

    def _handle_offer(self, session: ActorSession, offer: DescriptorBatch, frames: list[bytes]) -> None:
        rows, travels = offer.array, session.offers.reader is None
        # Records that are dropped for lack of room are requested after the actor's next reminder, once there is room.
        has_room = not travels or session.offers.num_bytes <= min(_MAX_WAITING_BYTES, self._store.capacity)
        settled: list[int] = []
        if travels and not frames:
            settled, lacking = session.offers.look_up(rows[:, 0].tolist())
            if lacking and has_room:
                self._actors.send(session.address, RecordsWanted(tuple(lacking)))
        elif len(frames) != (len(rows) if travels else 0):
            raise WireError(f"{len(rows)} records of {session.actor_id} came with {len(frames)} frames")
        elif has_room:
            settled = session.offers.add(rows, frames)
            self._offered[session.address] = session
        for sequence in settled:
            # Its answer was lost: repeat it.
            if (reason := session.offers.refused.get(sequence)) is not None:
                self._actors.send(session.address, Refused(sequence, reason))
            else:
                self._acks[session.address].append(sequence)
        if session.offers.num_gaps > self._max_remembered:
            self._registry.lose(session, f"it sent {session.offers.num_gaps} records without those before them")

    def _take_in_all(self) -> None:
        """Store the records offered in this turn, and those that wait where room or version have changed."""
        tried, self._offered = self._offered, {}
        if self._waiting:
            version, tried_at = self._taken_in_at
            now = self._registry.clock.now
            has_room = bool(self._store.dropped) or now - tried_at >= _RETRY_S
            if has_room or version != self._ledger.version:
                self._taken_in_at = self._ledger.version, now
                tried = {**self._waiting, **tried}
        for address, session in tried.items():
            self._waiting.pop(address, None)
            if session.has_ended:
                continue
            self._isolated(session, self._take_in)
            if not session.has_ended and (session.offers.queue or session.offers.early):
                self._waiting[address] = session

    def _take_in(self, session: ActorSession) -> None:
        if session.offers.early:
            session.offers.announced(self._ledger.version)
        while session.offers.queue:
            settled = self._ingest.take(session.offers, session.actor_id)
            if settled.acks:
                session.brought_at = self._registry.clock.now
                session.progress_at |= dict.fromkeys(settled.tickets, session.brought_at)
                self._acks[session.address] += settled.acks
                self._send_acks()
            for sequence, reason in settled.refusals:
                self._warnings.log("a trajectory was refused", f"record {sequence} of {session.actor_id}: {reason}")
                reason = reason[:_MAX_REASON]
                refused = session.offers.refused
                refused[sequence] = reason
                if len(refused) > self._max_remembered:
                    del refused[next(iter(refused))]
                self._actors.send(session.address, Refused(sequence, reason))
            if not settled.acks and not settled.refusals:
                return  # the other records must wait: for room, or for their version

    def _send_acks(self) -> None:
        for address, sequences in self._acks.items():
            self._actors.send_items(address, Ack, sequences)
        self._acks.clear()

    # --- tickets, weights, actors

    def _grant(self) -> None:
        grants = self._ledger.grantable()
        # Read after the grants: no ticket then demands a version that its actor has not heard of.
        version = self.published
        if version != self._announced:
            self._announced = version
            self._send_version(self._registry.by_address.values())
        for actor_id, tickets in grants:
            self._send_grant(self._registry.by_actor[actor_id], tickets)

    def _send_version(self, sessions: Iterable[ActorSession]) -> None:
        heartbeat_s = self._registry.heartbeat_s()
        frame = self._actors.encode(WeightsAnnounced(self.published, heartbeat_s))
        for session in sessions:
            session.heartbeat_s = heartbeat_s
            self._actors.send_frame(session.address, frame)

    def _send_grant(self, session: ActorSession, tickets: list[Ticket]) -> None:
        self._registry.granted(session, tickets)
        self._actors.send_items(session.address, Grant, tickets)

    def _deal_evaluation(self) -> None:
        """Deal evaluation tasks: at once after a result or the start of an evaluation, else every `_DEAL_S`."""
        now = self._registry.clock.now
        if self._evaluation.has_changed or (self._evaluation.is_under_way and now >= self._next_deal):
            self._next_deal = now + _DEAL_S
            wants = {address: session.evaluation_want for address, session in self._registry.by_address.items()}
            for address, grant in self._evaluation.deal(wants, now).items():
                self._actors.send(address, grant)

    def _check_actors(self) -> None:
        if not self._registry.is_check_due():
            return
        for action in (self._registry.check_life, self._expire):
            for session in list(self._registry.by_address.values()):
                self._isolated(session, action)

    def _expire(self, session: ActorSession) -> None:
        if late := self._registry.expire(session):
            self._actors.send_items(session.address, Revoked, late)
