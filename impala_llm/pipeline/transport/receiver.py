"""Learner rank's end of the channel: receives trajectories, grants tickets, announces weights.

Invariant: a trajectory is acknowledged once it lies, valid, in the trajectory store, which outlives this process, and
each is stored once. Malformed records, and records that do not match their ticket, are refused and counted. No message
of a peer can end the receiver: an error in handling one ends that peer's session.

One thread at a time serves the sockets and the sessions of actors: the receiver's own, or the learner's while it waits
for trajectories (leader_follower.py). Both may use at any time the ledger and the queue, each of which has a lock, and
`TrajectoryStore.end`. Messages: see messages.py.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from impala_llm.hosts import is_loopback_url
from impala_llm.limited_warnings import RateLimitedWarnings
from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import LearnerKeys
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator, user_id
from impala_llm.pipeline.shm import record_kernels
from impala_llm.pipeline.shm.record import MAX_TOKENS
from impala_llm.pipeline.shm.ring import ArenaError, ArenaReader
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.ingest import Inbox, Ingest, IngestBroken, Offers, too_long
from impala_llm.pipeline.transport.leader_follower import LeaderFollower
from impala_llm.pipeline.transport.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_RECORD_BYTES,
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
_POLL_S = 0.1
_MAX_GAP_S = 0.5
_RETRY_S = 0.1
"""Seconds between two attempts to store records that wait for room, where no space was freed."""
_CHECK_S, _CHECKED_AT_ONCE = 0.5, 100
"""Seconds between two checks of all actors, for every so many actors."""
_HEARTBEATS_PER_S = 100
"""Heartbeats of all actors together; each of many actors is asked for fewer."""
_HEARTBEATS_MISSED = 3
"""Missed heartbeats in a row that count as silence, where actors are asked for fewer."""
_MAX_FRAMES_A_TURN = 1000
_MAX_REASON = 1000
_TAKE_OVER_S = 3.0
"""Seconds of silence of an actor after which another process may take its name; 0 where it is known to be dead."""
_MAX_STEPS_SHARE = 0.1
"""Share of the trajectory store for trained trajectories of versions on no board; see `must_keep`. The arena has a
fifth more than the buffer needs."""
_MAX_REMEMBERED = 1 << 14
"""Limit of refusals, and of sequences out of order, that are remembered of an actor."""

_Address = tuple[int, bytes]
"""(index of the receiver's socket, routing id there)."""


@dataclass(slots=True)
class _Session:
    """An actor process that has introduced itself."""

    address: _Address
    actor_id: str
    offers: Offers
    last_heard: float
    heartbeat_s: int = 0
    """Seconds between two heartbeats that it was asked for last."""
    seems_dead: bool = False
    granted_at: dict[int, float] = field(default_factory=dict)

    def is_dead(self) -> bool:
        """Return whether its process has ended; always False for an actor on another host."""
        reader = self.offers.reader
        return reader is not None and not reader.has_writer()

    def may_be_silent(self, timeout_s: float) -> float:
        """Seconds of silence, at least `timeout_s`, after which it counts as lost."""
        return max(timeout_s, _HEARTBEATS_MISSED * self.heartbeat_s)


class Receiver:
    """Receives trajectories for one learner rank. Call `start`, then `drain` in the training loop.

    A step of the learner: `drain` until there is a batch, `trained`, train, publish the weights, `announce`.

    Args:
        endpoint: `RunDirectory.endpoint(rank)`, or tcp://127.0.0.1:<port or *>.
        ledger: only this receiver changes it from now on.
        vocab_size: bound that token ids must lie below.
        run_dir: of the run, with the arenas of actors on this host.
        arena: stores the trajectories. `start` takes over those that an earlier process left there, with the ledger's
            journal.
        heartbeat_timeout_s: seconds of silence after which an actor is given up; the death of one on this host is
            noticed within about a second.
        grant_resend_s: seconds after which a granted ticket that its actor does not list as held is sent again.
        ticket_timeout_s: seconds after which a ticket without a trajectory is taken from a living actor, and counts as
            failed.
        bind: tcp endpoint for actors on other hosts.
        keys: of the learner, for `bind`; see sockets.router.
        max_tokens: limit of a trajectory.
        published: version that actors find on the board, where that is not the ledger's.
    """

    def __init__(
        self,
        endpoint: str,
        ledger: TicketLedger,
        vocab_size: int,
        run_dir: RunDirectory,
        arena: TrajectoryStore,
        heartbeat_timeout_s: float = 20.0,
        grant_resend_s: float = 5.0,
        ticket_timeout_s: float = 600.0,
        bind: str | None = None,
        keys: LearnerKeys | None = None,
        max_tokens: int = MAX_TOKENS,
        published: int | None = None,
    ) -> None:
        self.endpoints = [endpoint, *([] if bind is None else [bind])]
        self._keys = keys
        self._max_tokens = max_tokens
        self._ledger = ledger
        self._run_dir = run_dir
        self._arena = arena
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._grant_resend_s = grant_resend_s
        self._ticket_timeout_s = ticket_timeout_s
        # Shared with the learner's thread. The flags are set once; _lock is for what follows it.
        self._inbox = Inbox()
        self._shutdown_reason: str | None = None
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._actor_stats: dict[str, dict[str, float]] = {}
        self._engines: dict[str, dict[int, str]] = {}
        self._steps: dict[int, None] = {}
        """Trajectories of trained steps whose versions are on no board yet, by `unroll_id`. Used as an ordered set."""
        # For the thread that serves.
        self._clock = ActiveClock(max_gap_s=_MAX_GAP_S)
        self._ingest = Ingest(arena, ledger, self._inbox, vocab_size, max_tokens)
        self._sessions: dict[_Address, _Session] = {}
        self._acks: defaultdict[_Address, list[int]] = defaultdict(list)
        self._key_of: dict[str, str | None] = {}
        """Name of the key that an actor's name first came with; None: from this host, which needs none."""
        self._announced = self._published = ledger.version if published is None else published
        self._next_check = 0.0
        self._actors: dict[str, _Session] = {}
        """Sessions by actor id."""
        self._offered: dict[_Address, _Session] = {}
        """Sessions that have offered records in this turn."""
        self._waiting: dict[_Address, _Session] = {}
        """Sessions with records that wait, for room or for their version, since an earlier turn."""
        self._taken_in_at = (0, 0.0)
        """(version, time) of the last attempt to store records that wait."""
        self._warnings = RateLimitedWarnings()
        self._leadership = LeaderFollower(_POLL_S)
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)

    # --- the learner's thread

    def start(self) -> None:
        """Bind the sockets, take over the trajectories that an earlier process left, and begin.

        Increases this process's limit of file descriptors as far as allowed: each connection takes one, and libzmq
        ends a process that has none left.

        Raises:
            zmq.ZMQError: an endpoint is in use.
            ValueError: an endpoint needs keys.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._context = zmq.Context()
        self._authenticator = ZapAuthenticator(self._context, self._keys) if self._keys is not None else None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._sockets.append(sockets.router(self._context, self.endpoints[0], MAX_MESSAGE_BYTES))
            for remote in self.endpoints[1:]:
                self._sockets.append(sockets.router(self._context, remote, MAX_RECORD_BYTES, self._authenticator))
            self._recover()
        except BaseException:
            self._close_sockets()
            self._leadership.close()
            self._context.destroy(linger=0)
            raise
        self.endpoints = [_bound_to(socket) for socket in self._sockets]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._leadership.wakeup, zmq.POLLIN)
        self._thread.start()
        # Beside the start of the actors: without a cache it takes seconds. `close` does not wait for its end.
        threading.Thread(target=record_kernels.compile_ingest, name="compiling", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Endpoint for actors of this host; once started, with the real port."""
        return self.endpoints[0]

    def drain(self, timeout_s: float) -> list[Trajectory]:
        """Take all trajectories that have arrived. For one thread.

        After `close` it returns those that were acknowledged last.

        Args:
            timeout_s: seconds to wait for the first.

        Returns:
            Trajectories, oldest first. Their arrays are writable and belong to the caller; their memory is used again
            once they were trained on or evicted and nothing refers to them.

        Raises:
            ReceiverError: the receiver has died.
        """
        if timeout_s > 0 and not self._inbox.is_ready() and self._thread.is_alive():
            with contextlib.suppress(Exception):  # the queue raises it
                self._leadership.lead(self._serve, self._inbox.is_ready, timeout_s)
        return self._inbox.drain()

    def trained(self, unroll_ids: Iterable[int]) -> None:
        """Note the trajectories of the step that makes the next version, before the first weight changes.

        They stay stored until that version, or a later one, is announced as kept or published: a learner that is
        restarted before finds them again. See `TicketLedger.trained`.

        Args:
            unroll_ids: see `Trajectory.unroll_id`; of a whole episode it is the ticket's id.
        """
        step = list(unroll_ids)
        self._ledger.trained(step)
        self._steps |= dict.fromkeys(step)
        self._leadership.wake()

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        """Note trajectories that were dropped, see `TicketLedger.evicted`.

        Those of a trained step whose version is on no board yet stay stored for a restarted learner.
        """
        dropped = list(unroll_ids)
        self._ledger.evicted(dropped)
        self._arena.end(number for number in dropped if number not in self._steps)
        self._leadership.wake()

    def announce(self, version: int, published: bool = True, kept: bool = False) -> None:
        """Note that the learner has made a version, and announce it to all actors where its weights are published.

        Args:
            published: it is on the board of engines.
            kept: it is on the board of kept versions. A restarted learner goes on from either; until one holds, the
                trajectories of its step stay stored, see `must_keep`.

        Raises:
            ValueError: the version is not a new one.
        """
        self._ledger.advance(version, kept=published or kept)
        if published:
            self._published = version
        if published or kept:
            self._arena.end(self._steps)
            self._steps.clear()
        self._leadership.wake(urgent=True)

    def needs_weights(self) -> bool:
        """Return whether no trajectory can arrive until a later version is published.

        Tickets that ended without a trajectory leave a batch short, and later ones demand the version of the step that
        the batch was for.
        """
        return not self._inbox.is_ready() and self._ledger.needs_newer_than(self._published)

    def announce_late(self, version: int) -> None:
        """Announce the learner's version, which was published some time after it was made."""
        self._published = version
        self._leadership.wake(urgent=True)

    def must_keep(self) -> bool:
        """Return whether the trajectories of steps since the last version on a board fill so much of the trajectory
        store that the next version should be kept."""
        return self._arena.share_of(self._steps) > _MAX_STEPS_SHARE

    @property
    def is_full(self) -> bool:
        """Whether records that actors offer wait for room in the trajectory store."""
        return any(session.offers.queue for session in list(self._waiting.values()))

    def interrupted(self) -> None:
        """Note that this process was told to end, see `TicketLedger.interrupted`."""
        self._ledger.interrupted()

    def lost_members(self, group_id: int) -> int:
        """Number of a group's tickets that can bring no trajectory, see `TicketLedger.lost_members`."""
        return self._ledger.lost_members(group_id)

    def actor_stats(self) -> dict[str, dict[str, float]]:
        """Latest metrics of each connected actor, by actor id."""
        with self._lock:
            return {actor_id: dict(stats) for actor_id, stats in self._actor_stats.items()}

    def engines(self) -> dict[int, str]:
        """Servers that the connected actors offer for weights: opening -> URL; see `messages.Engines`."""
        with self._lock:
            return {opening: url for engines in self._engines.values() for opening, url in engines.items()}

    def counters(self) -> dict[str, float]:
        """Counters by name: those of the ledger and those of the receiver.

        Totals since the start: received_bytes, trajectories_refused (malformed), trajectories_unwanted (of superseded
        or unknown tickets), recovered (found after a restart), messages_malformed, actors_lost, sessions_broken (ended
        by an error of our own), tickets_expired, peers_refused (connections without an authorised key). Current levels:
        actors, queue_trajectories, arena_fill (share of the trajectory store in use).
        """
        with self._lock:
            taken = ("received_bytes", "trajectories_refused", "trajectories_unwanted")
            names = ("messages_malformed", "actors_lost", "sessions_broken", "tickets_expired", "recovered")
            return {
                **self._ledger.counters(),
                **{name: float(self._ingest.totals[name]) for name in taken},
                **{name: float(self._totals[name]) for name in names},
                "peers_refused": float(self._authenticator.refused if self._authenticator is not None else 0),
                "actors": float(len(self._actor_stats)),
                "queue_trajectories": float(len(self._inbox)),
                "arena_fill": self._arena.used / self._arena.capacity,
            }

    def shutdown(self, reason: str = "the run is over") -> None:
        """Tell all actors to end, later ones too. No ticket is granted from now on."""
        self._shutdown_reason = reason
        self._leadership.wake(urgent=True)

    def close(self) -> None:
        """End the thread and close the sockets; messages that were sent are delivered within a second or dropped."""
        self._leadership.stop()
        self._thread.join()
        self._context.term()
        self._leadership.close()
        for endpoint in self.endpoints:
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    # --- the thread that serves

    def _recover(self) -> None:
        kept = self._arena.recovered()
        wanted = self._ledger.recover([(t.ticket_id, t.episode_id, t.unroll_index) for t in kept])
        self._arena.end([t.unroll_id for t, is_wanted in zip(kept, wanted, strict=True) if not is_wanted])
        found = [t for t, is_wanted in zip(kept, wanted, strict=True) if is_wanted]
        quarantined = set(self._ledger.quarantined)
        if names := [f"{t.episode_id} (task {t.task_id})" for t in kept if t.unroll_id in quarantined]:
            _log.error(
                "%d trajectories are set aside, as the learner has died twice in a step that trained on them: %s",
                len(names),
                ", ".join(names),
            )
        # Taken by a process with another budget: a step would fail on it, now and after each restart.
        long = [t for t in found if t.num_tokens > self._max_tokens]
        for t in long:
            reason = too_long(t.num_tokens, self._max_tokens).removeprefix("it ")
            _log.warning("dropped what an earlier process had acknowledged: ticket %d %s", t.ticket_id, reason)
        if long:
            self.evicted([t.unroll_id for t in long])
            found = [t for t in found if t.num_tokens <= self._max_tokens]
        if found:
            _log.warning("took over %d trajectories that an earlier process had acknowledged", len(found))
        self._count("recovered", len(found))
        self._inbox.put(found)

    def _run(self) -> None:
        try:
            self._leadership.run(self._serve)
            self._say_shutdown()
        except Exception as error:
            _log.exception("the receiver has died")
            self._inbox.fail(error)
        finally:
            self._close_sockets()

    def _serve(self, timeout_s: float) -> None:
        ready = {ready for ready, _ in self._poller.poll(math.ceil(1000 * timeout_s))}
        try:
            self._turn(ready)
        except BaseException as error:
            # Ctrl-C and signals too: the state after an interrupted turn is unknown, so it is the last one. The error
            # is noted before the stop, so that `drain` raises it.
            self._inbox.fail(error)
            self._leadership.stop()
            raise

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._authenticator is not None:
            self._authenticator.close()

    def _turn(self, ready: set[object]) -> None:
        """Handle messages, store records, check actors, grant tickets.

        Args:
            ready: descriptors that are readable: sockets, and that of `LeaderFollower`.
        """
        if self._leadership.wakeup in ready:
            self._leadership.clear_wakeup()
        self._clock.tick()
        for index, socket in enumerate(self._sockets):
            if socket not in ready:
                continue
            for _ in range(_MAX_FRAMES_A_TURN):
                if not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator,arg-type]  # a number
                    break
                frames, key = _receive(socket, from_afar=index > 0)
                self._handle((index, frames[0]), frames[1:], key)
        self._send_acks()
        self._take_in_all()
        self._check_actors()
        if self._shutdown_reason is not None:
            self._say_shutdown()
        else:
            self._grant()

    def _handle(self, address: _Address, frames: list[bytes], key: str | None) -> None:
        try:
            if not frames:
                raise WireError("a message has no frames: at least 1 is expected")
            message = decode(frames[0])
            if len(frames) > 1 and not isinstance(message, DescriptorBatch):
                raise WireError(f"{type(message).__name__} has {len(frames)} frames: 1 is expected")
            if run_id_of(frames[0]) not in (UNKNOWN_RUN, self._run_dir.run_id):
                self._send_home(address)
                return
            if isinstance(message, Hello):
                self._handle_hello(address, message, key)
                return
            session = self._sessions.get(address)
            if session is None:
                if not isinstance(message, Goodbye):
                    self._send(address, HelloWanted())
                return
            session.last_heard = self._clock.now
            match message:
                case TicketRequest(want):
                    self._ledger.request(session.actor_id, want)
                case DescriptorBatch():
                    self._handle_offer(session, message, frames[1:])
                case TicketFailed(ticket_id, reason):
                    self._ledger.failed(ticket_id, session.actor_id)
                    self._warnings.log("an episode failed", f"ticket {ticket_id} at {session.actor_id}: {reason}")
                case Heartbeat(held, stats, want, first_sequence):
                    self._ledger.request(session.actor_id, want)
                    session.offers.answered_below(first_sequence)
                    self._handle_heartbeat(session, held, stats)
                case Goodbye():
                    self._drop(session)
                case Engines(urls, openings):
                    if address[0] > 0 and any(map(is_loopback_url, urls)):
                        raise WireError(f"{session.actor_id} on another host offers servers of this one: {urls}")
                    with self._lock:
                        self._engines[session.actor_id] = dict(zip(openings, urls, strict=True))
                case _:
                    raise WireError(f"{type(message).__name__} is a learner's message, and an actor sent it")
        except WireError as error:
            self._count("messages_malformed")
            self._warnings.log("a malformed message was dropped", str(error))
        except Exception as error:
            self._end_broken(address, error)

    def _at_the_risk_of(self, session: _Session, what: Callable[[_Session], None]) -> None:
        """Call a function for a peer. An error ends only its session."""
        try:
            what(session)
        except IngestBroken:
            raise
        except Exception as error:
            self._end_broken(session.address, error)

    def _end_broken(self, address: _Address, error: Exception) -> None:
        """End the session at an address after an error of our own. An actor that lives introduces itself again."""
        self._count("sessions_broken")
        _log.error("an error in dealing with the peer %r ends its session", address[1], exc_info=error)
        if (session := self._sessions.get(address)) is not None:
            self._lose(session, f"an error of the learner's: {error!r}")

    def _handle_hello(self, address: _Address, hello: Hello, key: str | None) -> None:
        identity = address[1]
        if identity != f"{hello.actor_id}#{hello.incarnation:016x}".encode():
            raise WireError(f"actor {hello.actor_id!r} speaks as {identity!r}: the two do not belong together")
        # From here on the routing id stands for the key: half of it is a random number that only this actor knows.
        if (owner := self._key_of.setdefault(hello.actor_id, key)) != key:
            first, now = (f"the key {name!r}" if name else "this host" for name in (owner, key))
            text = f"{hello.actor_id} belongs to {first} and came from {now}: give each actor an index of its own"
            self._warnings.log("an actor was refused", text)
            self._send(address, Shutdown(text[:_MAX_REASON]))
            return
        session = self._sessions.get(address)
        if session is None:
            if (other := self._actors.get(hello.actor_id)) is not None:
                silence = self._clock.now - other.last_heard
                if not other.is_dead() and silence < other.may_be_silent(_TAKE_OVER_S):
                    # Two living processes would replace each other for ever.
                    text = f"{hello.actor_id} is here already: give each actor an index of its own"
                    self._warnings.log("two processes have the name of one actor", text)
                    return
                self._lose(other, "a later process took its place")
            reader = None
            if hello.arena:
                try:
                    reader = ArenaReader(self._run_dir.arena_path(hello.arena), hello.incarnation)
                except ArenaError as error:
                    self._warnings.log("an actor was refused", str(error))
                    self._send(address, Shutdown(f"the learner cannot use the arena: {error}"[:_MAX_REASON]))
                    return
            session = _Session(address, hello.actor_id, Offers(reader, hello.first_sequence), self._clock.now)
            self._sessions[address] = self._actors[hello.actor_id] = session
            with self._lock:
                self._actor_stats[hello.actor_id] = {}
        session.last_heard = self._clock.now
        session.offers.answered_below(hello.first_sequence)
        self._ledger.resumed(session.actor_id, hello.held)
        self._send_version([session])

    def _send_home(self, address: _Address) -> None:
        """Shut down an actor of an earlier run of this name, whose tickets and records are invalid here."""
        text = f"{address[1][:_MAX_REASON]!r} belongs to another run, which has ended: start it again"
        self._warnings.log("an actor of another run was told to end", text)
        self._send(address, Shutdown(text[:_MAX_REASON]))

    def _handle_heartbeat(self, session: _Session, held: tuple[int, ...], stats: dict[str, float]) -> None:
        with self._lock:
            self._actor_stats[session.actor_id] = stats
        now = self._clock.now
        at_actor = set(held)
        missing = [
            ticket.ticket_id
            for ticket in self._ledger.open_tickets(session.actor_id)
            if ticket.ticket_id not in at_actor
            and now - session.granted_at.get(ticket.ticket_id, now) > self._grant_resend_s
        ]
        if missing and (again := self._ledger.lost_by(session.actor_id, missing)):
            self._send_grant(session, again)
        self._send_version([session])

    # --- trajectories

    def _handle_offer(self, session: _Session, offer: DescriptorBatch, frames: list[bytes]) -> None:
        rows = offer.array
        if session.offers.reader is None and not frames:
            settled, lacking = session.offers.look_up(rows[:, 0].tolist())
            if lacking:
                self._send(session.address, RecordsWanted(tuple(lacking)))
        elif len(frames) != (len(rows) if session.offers.reader is None else 0):
            raise WireError(f"{len(rows)} records of {session.actor_id} came with {len(frames)} frames")
        else:
            settled = session.offers.add(rows, frames)
            self._offered[session.address] = session
        for sequence in settled:
            # Its answer was lost: repeat it.
            if (reason := session.offers.refused.get(sequence)) is not None:
                self._send(session.address, Refused(sequence, reason))
            else:
                self._acks[session.address].append(sequence)
        if session.offers.num_gaps > _MAX_REMEMBERED:
            self._lose(session, f"it sent {session.offers.num_gaps} records without those before them")

    def _take_in_all(self) -> None:
        """Store the records offered in this turn, and those that wait where room or version have changed."""
        tried, self._offered = self._offered, {}
        if self._waiting:
            version, tried_at = self._taken_in_at
            has_room = bool(self._arena.dropped) or self._clock.now - tried_at >= _RETRY_S
            if has_room or version != self._ledger.version:
                self._taken_in_at = self._ledger.version, self._clock.now
                tried = {**self._waiting, **tried}
        for address, session in tried.items():
            if self._sessions.get(address) is not session:
                continue  # it has ended meanwhile
            self._waiting.pop(address, None)
            self._at_the_risk_of(session, self._take_in)
            if self._sessions.get(address) is session and (session.offers.queue or session.offers.early):
                self._waiting[address] = session

    def _take_in(self, session: _Session) -> None:
        if session.offers.early:
            session.offers.announced(self._ledger.version)
        while session.offers.queue:
            settled = self._ingest.take(session.offers, session.actor_id)
            if settled.acks:
                self._acks[session.address] += settled.acks
                self._send_acks()
            for sequence, reason in settled.refusals:
                self._warnings.log("a trajectory was refused", f"record {sequence} of {session.actor_id}: {reason}")
                reason = reason[:_MAX_REASON]
                refused = session.offers.refused
                refused[sequence] = reason
                if len(refused) > _MAX_REMEMBERED:
                    del refused[next(iter(refused))]
                self._send(session.address, Refused(sequence, reason))
            if not settled.acks and not settled.refusals:
                return  # what is left must wait: for room, or for its version

    def _send_acks(self) -> None:
        for address, sequences in self._acks.items():
            self._send_items(address, Ack, sequences)
        self._acks.clear()

    # --- tickets, weights, actors

    def _grant(self) -> None:
        grants = self._ledger.grantable()
        # Read after the grants: no ticket then demands a version that its actor has not heard of.
        version = self._published
        if version != self._announced:
            self._announced = version
            self._send_version(self._sessions.values())
        for actor_id, tickets in grants:
            self._send_grant(self._actors[actor_id], tickets)

    def _send_version(self, sessions: Iterable[_Session]) -> None:
        heartbeat_s = len(self._sessions) // _HEARTBEATS_PER_S
        frame = encode(WeightsAnnounced(self._published, heartbeat_s), self._run_dir.run_id)
        for session in sessions:
            session.heartbeat_s = heartbeat_s
            self._send_frame(session.address, frame)

    def _send_grant(self, session: _Session, tickets: list[Ticket]) -> None:
        session.granted_at |= {ticket.ticket_id: self._clock.now for ticket in tickets}
        self._send_items(session.address, Grant, tickets)

    def _check_actors(self) -> None:
        now = self._clock.now
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_S * max(1.0, len(self._sessions) / _CHECKED_AT_ONCE)
        for session in list(self._sessions.values()):
            self._at_the_risk_of(session, self._check_life)
        for session in list(self._sessions.values()):
            self._at_the_risk_of(session, self._expire)

    def _check_life(self, session: _Session) -> None:
        silence = self._clock.now - session.last_heard
        if silence > session.may_be_silent(self._heartbeat_timeout_s):
            self._lose(session, f"silent for {silence:.1f} s")
        elif session.is_dead():
            # Given up at the second check: its last messages may still be on their way.
            if session.seems_dead:
                self._lose(session, "its process is dead")
            session.seems_dead = True

    def _expire(self, session: _Session) -> None:
        """Revoke the tickets that an actor has had for too long."""
        now = self._clock.now
        still_open = [ticket.ticket_id for ticket in self._ledger.open_tickets(session.actor_id)]
        # Tickets that it brought along (`resumed`) count from their first check here.
        session.granted_at = {ticket_id: session.granted_at.get(ticket_id, now) for ticket_id in still_open}
        late = [i for i, granted_at in session.granted_at.items() if now - granted_at > self._ticket_timeout_s]
        if late:
            _log.warning(
                "%d tickets at %s brought nothing in %g s", len(late), session.actor_id, self._ticket_timeout_s
            )
            self._count("tickets_expired", len(late))
            for ticket_id in late:
                self._ledger.failed(ticket_id, session.actor_id)
            self._send_items(session.address, Revoked, late)

    def _lose(self, session: _Session, reason: str) -> None:
        num_open = len(self._ledger.open_tickets(session.actor_id))
        _log.warning("actor %s is lost (%s): %d tickets are granted again", session.actor_id, reason, num_open)
        self._count("actors_lost")
        self._drop(session, left=False)

    def _drop(self, session: _Session, left: bool = True) -> None:
        """Remove a session; its tickets are granted to others.

        Args:
            left: the actor leaves by itself, or was told to.
        """
        del self._sessions[session.address], self._actors[session.actor_id]
        self._waiting.pop(session.address, None)
        for ticket in self._ledger.actor_lost(session.actor_id, left):
            text = "task %d (ticket %d, group %d) is set aside: each of the last actors that played it was lost"
            _log.error(text, ticket.task_id, ticket.ticket_id, ticket.group_id)
        with self._lock:
            del self._actor_stats[session.actor_id]
            self._engines.pop(session.actor_id, None)

    def _say_shutdown(self) -> None:
        if self._shutdown_reason is None:
            return
        for session in list(self._sessions.values()):
            self._send(session.address, Shutdown(self._shutdown_reason))
            self._drop(session)

    def _count(self, name: str, increment: int = 1) -> None:
        with self._lock:
            self._totals[name] += increment

    def _send_items(
        self, address: _Address, kind: Callable[[tuple[Any, ...]], Message], items: Sequence[object]
    ) -> None:
        """Send items in as many messages as needed."""
        for first in range(0, len(items), MAX_ITEMS):
            self._send(address, kind(tuple(items[first : first + MAX_ITEMS])))

    def _send(self, address: _Address, message: Message) -> None:
        self._send_frame(address, encode(message, self._run_dir.run_id))

    def _send_frame(self, address: _Address, frame: bytes) -> None:
        # ROUTER drops messages for a peer that is gone or does not read; all important ones are sent again.
        self._sockets[address[0]].send_multipart([address[1], frame], zmq.NOBLOCK)


def _receive(socket: zmq.Socket[bytes], from_afar: bool) -> tuple[list[bytes], str | None]:
    """Receive a message, which must be there.

    Returns:
        Its frames, and the name of the sender's key; None on this host.
    """
    if not from_afar:
        return socket.recv_multipart(zmq.NOBLOCK), None
    # Without copies: only original frames know their sender.
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.bytes for frame in frames], user_id(frames[0])


def _bound_to(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
