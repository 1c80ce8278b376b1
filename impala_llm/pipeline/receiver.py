"""The learner rank's end of the channel: takes trajectories in, grants tickets, announces weights.

Invariant: a trajectory is acknowledged once it lies, valid, in the queue of this process, and it gets there once.
What is malformed, or says it is what its ticket is not, is refused and counted; no message of a peer can end the
receiver.

One thread owns the socket and all that belongs to actors; it shares with the learner's thread the ledger (which has a
lock), the queue (which has one too) and a pipe to be woken by. Messages: see the table in wire.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from impala_llm.pipeline.arena import ArenaError, ArenaReader
from impala_llm.pipeline.channel import check_endpoint
from impala_llm.pipeline.clock import ActiveClock
from impala_llm.pipeline.complaints import Complaints
from impala_llm.pipeline.inbox import Inbox
from impala_llm.pipeline.rundir import ProcessIdentity, RunDirectory
from impala_llm.pipeline.tickets import Ticket, TicketLedger, Verdict
from impala_llm.pipeline.wire import (
    MAX_MESSAGE_BYTES,
    Ack,
    DescriptorBatch,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    HelloWanted,
    Message,
    Record,
    Refused,
    Shutdown,
    TicketFailed,
    TicketRequest,
    WeightsAnnounced,
    WireError,
    decode,
    decode_header,
    decode_trajectory,
    encode,
)
from impala_llm.trajectory import Trajectory, TrajectoryError

_log = logging.getLogger(__name__)
_POLL_MS = 100
_MAX_GAP_S = 0.5
_PROCESS_CHECK_S = 0.5
_MAX_FRAMES_A_TURN = 1000
_LINGER_MS = 1000
_MAX_REASON = 1000
_PREMATURE_S = 5.0
"""How long a trajectory of a version above the current one may wait for `announce`, which follows `publish`."""


@dataclass(slots=True)
class _Session:
    """An actor process that has introduced itself."""

    identity: bytes
    actor_id: str
    incarnation: int
    process: ProcessIdentity | None
    reader: ArenaReader
    last_heard: float
    seems_dead: bool = False
    granted_at: dict[int, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Waiting:
    """A record that is neither acknowledged nor refused."""

    session: _Session
    record: Record
    trajectory: Trajectory | None = None
    not_after: float = math.inf


class Receiver:
    """Takes trajectories in for one learner rank. Start it, then `drain` in the training loop.

    A step of the learner: `drain` until there is a batch, train, `trained`, publish the weights, `announce`.

    endpoint: `RunDirectory.endpoint(rank)`, or tcp://127.0.0.1:<port or *>. ledger: used by this receiver alone from
    now on, except for reading. vocab_size: token ids must lie below. heartbeat_timeout_s: silence after which an
    actor is given up; one that dies on this host is noticed within about a second. queue_bytes: a fuller queue takes
    no more until it is drained, and nothing is acknowledged meanwhile. grant_resend_s: a granted ticket that its
    actor does not list as held after so long is sent again.
    """

    def __init__(
        self,
        endpoint: str,
        ledger: TicketLedger,
        vocab_size: int,
        run_dir: RunDirectory,
        heartbeat_timeout_s: float = 20.0,
        queue_bytes: int = 256 << 20,
        grant_resend_s: float = 5.0,
    ) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._run_dir = run_dir
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._grant_resend_s = grant_resend_s
        # Shared with the learner's thread. The flags are set once; _lock is for what follows it.
        self._inbox = Inbox(queue_bytes)
        self._shutdown_reason: str | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._actor_stats: dict[str, dict[str, float]] = {}
        # Owned by the receiver's thread.
        self._sessions: dict[bytes, _Session] = {}
        self._waiting: dict[tuple[bytes, int], _Waiting] = {}
        self._acks: defaultdict[bytes, list[int]] = defaultdict(list)
        self._announced = ledger.version
        self._clock = ActiveClock(max_gap_s=_MAX_GAP_S)
        self._next_process_check = 0.0
        self._complaints = Complaints()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    # --- the learner's thread

    def start(self) -> None:
        """Bind the socket and begin. Raises zmq.ZMQError where the endpoint is taken."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # An actor that reconnects is let in, even while its old connection seems to be there.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError:
            self._context.destroy()
            raise
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.rstrip(b"\0").decode()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread.start()

    def drain(self, timeout_s: float) -> list[Trajectory]:
        """All trajectories that have arrived, oldest first, waiting up to `timeout_s` seconds for the first.

        Their arrays are writable and belong to the caller. After `close` it gives what was acknowledged last. Raises
        ReceiverError where the receiver has died.
        """
        trajectories = self._inbox.drain(timeout_s)
        self._wake()
        return trajectories

    def trained(self, ticket_ids: Iterable[int]) -> None:
        """See `TicketLedger.trained`: call it before the `announce` of the version that the step makes."""
        self._ledger.trained(ticket_ids)
        self._wake()

    def evicted(self, ticket_ids: Iterable[int]) -> None:
        """See `TicketLedger.evicted`."""
        self._ledger.evicted(ticket_ids)
        self._wake()

    def announce(self, version: int) -> None:
        """Tell all actors that the weights of this version are published. ValueError where it is not a new one."""
        self._ledger.advance(version)
        self._wake()

    def lost_members(self, group_id: int) -> int:
        """See `TicketLedger.lost_members`."""
        return self._ledger.lost_members(group_id)

    def actor_stats(self) -> dict[str, dict[str, float]]:
        """Latest figures of each connected actor, by actor id."""
        with self._lock:
            return {actor_id: dict(stats) for actor_id, stats in self._actor_stats.items()}

    def counters(self) -> dict[str, float]:
        """Those of the ledger, and totals since the start (received_bytes, trajectories_refused: malformed ones,
        trajectories_unwanted: of superseded or unknown tickets, messages_malformed, actors_lost) and levels now
        (actors, queue_trajectories, queue_bytes, queue_fill: share of the bound)."""
        with self._lock:
            names = (
                "received_bytes",
                "trajectories_refused",
                "trajectories_unwanted",
                "messages_malformed",
                "actors_lost",
            )
            return {
                **self._ledger.counters(),
                **{name: float(self._totals[name]) for name in names},
                "actors": float(len(self._actor_stats)),
                "queue_trajectories": float(len(self._inbox)),
                "queue_bytes": float(self._inbox.num_bytes),
                "queue_fill": self._inbox.num_bytes / self._inbox.max_bytes,
            }

    def shutdown(self, reason: str = "the run is over") -> None:
        """Tell all actors, those that come later too, to end. Grants nothing from now on."""
        self._shutdown_reason = reason
        self._wake()

    def close(self) -> None:
        """End the thread and free the socket; messages that were sent are delivered within a second or not at all."""
        self._closing = True
        self._wake()
        self._thread.join()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _wake(self) -> None:
        if not self._thread.is_alive():
            return
        # A full pipe is full of earlier calls: it will wake.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    # --- the receiver's thread

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            while not self._closing:
                poller.poll(_POLL_MS)
                self._turn()
            self._say_shutdown()
        except BaseException as error:
            _log.exception("the receiver has died")
            self._inbox.fail(error)
        finally:
            self._socket.close()

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 1 << 16)
        self._clock.tick()
        for _ in range(_MAX_FRAMES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(frames)
        self._take_in()
        for identity, sequences in self._acks.items():
            self._send(identity, Ack(tuple(sequences)))
        self._acks.clear()
        self._check_actors()
        if self._shutdown_reason is not None:
            self._say_shutdown()
        else:
            self._grant()

    def _handle(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise WireError(f"a message has {len(frames) - 1} frames: 1 is expected")
            message = decode(frames[1])
            if isinstance(message, Hello):
                self._handle_hello(identity, message)
                return
        except WireError as error:
            self._count("messages_malformed")
            self._complaints.log("a malformed message was dropped", str(error))
            return
        session = self._sessions.get(identity)
        if session is None:
            if not isinstance(message, Goodbye):
                self._send(identity, HelloWanted())
            return
        session.last_heard = self._clock.now
        match message:
            case TicketRequest(want):
                self._ledger.request(session.actor_id, want)
            case DescriptorBatch(records):
                for record in records:
                    self._waiting.setdefault((identity, record.sequence), _Waiting(session, record))
            case TicketFailed(ticket_id, reason):
                self._ledger.failed(ticket_id, session.actor_id)
                self._complaints.log("an episode failed", f"ticket {ticket_id} at {session.actor_id}: {reason}")
            case Heartbeat(held, stats):
                self._handle_heartbeat(session, held, stats)
            case Goodbye():
                self._drop(session)
            case _:
                self._count("messages_malformed")
                self._complaints.log("a message of the learner came from an actor", type(message).__name__)

    def _handle_hello(self, identity: bytes, hello: Hello) -> None:
        if identity != f"{hello.actor_id}#{hello.incarnation:016x}".encode():
            raise WireError(f"actor {hello.actor_id!r} speaks as {identity!r}: the two do not belong together")
        session = self._sessions.get(identity)
        if session is None:
            for other in [s for s in self._sessions.values() if s.actor_id == hello.actor_id]:
                self._lose(other, "a later process took its place")
            try:
                reader = ArenaReader(self._run_dir.arena_path(hello.actor_id), hello.incarnation)
            except ArenaError as error:
                self._complaints.log("an actor was turned away", str(error))
                self._send(identity, Shutdown(f"the learner cannot use the arena: {error}"[:_MAX_REASON]))
                return
            process = ProcessIdentity(hello.pid, hello.start_time)
            # A process that cannot be seen from here (another pid namespace) is watched by its heartbeat alone.
            visible = process if process.alive() else None
            session = _Session(identity, hello.actor_id, hello.incarnation, visible, reader, self._clock.now)
            self._sessions[identity] = session
            with self._lock:
                self._actor_stats[hello.actor_id] = {}
        session.last_heard = self._clock.now
        self._ledger.resumed(session.actor_id, hello.held)
        self._send(identity, WeightsAnnounced(self._ledger.version))

    def _handle_heartbeat(self, session: _Session, held: tuple[int, ...], stats: dict[str, float]) -> None:
        with self._lock:
            self._actor_stats[session.actor_id] = stats
        now = self._clock.now
        still_open = self._ledger.open_tickets(session.actor_id)
        session.granted_at = {t.ticket_id: session.granted_at.get(t.ticket_id, -math.inf) for t in still_open}
        missing = [
            ticket
            for ticket in still_open
            if ticket.ticket_id not in set(held) and now - session.granted_at[ticket.ticket_id] > self._grant_resend_s
        ]
        if missing:
            self._send_grant(session, missing)
        self._send(session.identity, WeightsAnnounced(self._ledger.version))

    # --- trajectories

    def _take_in(self) -> None:
        for key, waiting in list(self._waiting.items()):
            if self._inbox.full:
                return
            if self._settle(waiting):
                del self._waiting[key]

    def _settle(self, waiting: _Waiting) -> bool:
        """Queue and acknowledge, or refuse. False where it has to wait."""
        session, record = waiting.session, waiting.record
        try:
            header = decode_header(record.header)
            if header.key[0] != record.ticket_id:
                raise WireError(f"ticket_id is {header.key[0]} in the header and {record.ticket_id} in the record")
            # Before the arena is looked at: the space of a duplicate may be in use again.
            verdict = self._ledger.check(*header.key)
            if verdict is Verdict.ACCEPTED:
                trajectory = waiting.trajectory or self._copy(session, record)
                if trajectory.newest_version > self._ledger.version and self._clock.now < waiting.not_after:
                    if waiting.trajectory is None:
                        waiting.trajectory, waiting.not_after = trajectory, self._clock.now + _PREMATURE_S
                    return False
                self._check(trajectory)
                verdict = self._ledger.received(*header.key)
        except (WireError, ArenaError, TrajectoryError) as error:
            self._ledger.refused(record.ticket_id, session.actor_id)
            self._refuse(session, record, "trajectories_refused", str(error))
            return True
        match verdict:
            case Verdict.ACCEPTED:
                self._inbox.put(trajectory)
                self._count("received_bytes", trajectory.nbytes)
                self._acks[session.identity].append(record.sequence)
            case Verdict.DUPLICATE:
                self._ledger.received(*header.key)  # counts it
                self._acks[session.identity].append(record.sequence)
            case Verdict.SUPERSEDED:
                reason = f"ticket {record.ticket_id} has its episode already or has ended"
                self._refuse(session, record, "trajectories_unwanted", reason)
            case Verdict.UNKNOWN_TICKET:
                self._refuse(session, record, "trajectories_unwanted", f"ticket {record.ticket_id} is unknown")
        return True

    def _copy(self, session: _Session, record: Record) -> Trajectory:
        payload = bytearray(session.reader.read(record.descriptor))
        trajectory = decode_trajectory(record.header, payload)
        trajectory.validate_vocabulary(self._vocab_size)
        return trajectory

    def _check(self, trajectory: Trajectory) -> None:
        """Raise TrajectoryError unless the trajectory is what its ticket asked for."""
        ticket = self._ledger.lookup(trajectory.ticket_id)
        assert ticket is not None
        if (trajectory.task_id, trajectory.group_id) != (ticket.task_id, ticket.group_id):
            raise TrajectoryError(
                f"task_id and group_id are {trajectory.task_id} and {trajectory.group_id}, ticket {ticket.ticket_id} "
                f"is for {ticket.task_id} and {ticket.group_id}"
            )
        if trajectory.newest_version > self._ledger.version:
            raise TrajectoryError(
                f"versions reaches {trajectory.newest_version}, the learner has {self._ledger.version}"
            )
        if trajectory.oldest_version < ticket.min_version:
            raise TrajectoryError(
                f"versions goes down to {trajectory.oldest_version}, ticket {ticket.ticket_id} demands "
                f"{ticket.min_version}"
            )

    def _refuse(self, session: _Session, record: Record, counter: str, reason: str) -> None:
        self._count(counter)
        self._complaints.log("a trajectory was refused", f"record {record.sequence} of {session.actor_id}: {reason}")
        self._send(session.identity, Refused(record.sequence, reason[:_MAX_REASON]))

    # --- tickets, weights, actors

    def _grant(self) -> None:
        by_actor = {session.actor_id: session for session in self._sessions.values()}
        grants = self._ledger.grantable()
        # Read after the grants: no ticket then demands a version that its actor has not heard of.
        version = self._ledger.version
        if version != self._announced:
            self._announced = version
            for identity in self._sessions:
                self._send(identity, WeightsAnnounced(version))
        for actor_id, tickets in grants:
            self._send_grant(by_actor[actor_id], tickets)

    def _send_grant(self, session: _Session, tickets: list[Ticket]) -> None:
        session.granted_at |= {ticket.ticket_id: self._clock.now for ticket in tickets}
        self._send(session.identity, Grant(tuple(tickets)))

    def _check_actors(self) -> None:
        now = self._clock.now
        for session in list(self._sessions.values()):
            if now - session.last_heard > self._heartbeat_timeout_s:
                self._lose(session, f"silent for {now - session.last_heard:.1f} s")
        if now < self._next_process_check:
            return
        self._next_process_check = now + _PROCESS_CHECK_S
        for session in list(self._sessions.values()):
            if session.process is not None and not session.process.alive():
                # Given up at the second look: what it sent last may still be on its way.
                if session.seems_dead:
                    self._lose(session, f"its process {session.process.pid} is dead")
                session.seems_dead = True

    def _lose(self, session: _Session, reason: str) -> None:
        num_open = len(self._ledger.open_tickets(session.actor_id))
        _log.warning("actor %s is lost (%s): %d tickets are granted again", session.actor_id, reason, num_open)
        self._count("actors_lost")
        self._drop(session)

    def _drop(self, session: _Session) -> None:
        del self._sessions[session.identity]
        self._ledger.actor_lost(session.actor_id)
        with self._lock:
            del self._actor_stats[session.actor_id]

    def _say_shutdown(self) -> None:
        if self._shutdown_reason is None:
            return
        for session in list(self._sessions.values()):
            self._send(session.identity, Shutdown(self._shutdown_reason))
            self._drop(session)

    def _count(self, name: str, increment: int = 1) -> None:
        with self._lock:
            self._totals[name] += increment

    def _send(self, identity: bytes, message: Message) -> None:
        # ROUTER drops what is for a peer that is gone or does not read; all that matters is sent again.
        self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
