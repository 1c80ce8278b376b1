"""Session registry of a receiver: the connected actors, and the rules by which an actor counts as lost.

Invariant: an actor id has at most one session, and belongs for good to the key that it was first used with. When a
session ends, the ledger has its tickets back. Nothing is sent here: messages to an actor are returned, or raised.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from impala_llm.pipeline.shared_settings import difference
from impala_llm.pipeline.shm.ring import ArenaError, ArenaReader
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.transport.active_clock import ActiveClock
from impala_llm.pipeline.transport.actor_sockets import Address
from impala_llm.pipeline.transport.messages import Engines, Hello, WireError
from impala_llm.pipeline.transport.offers import Offers
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_log = logging.getLogger(__name__)
_MAX_GAP_S = 0.5
_CHECK_S, _CHECKED_AT_ONCE = 0.5, 100
"""Seconds between two checks of all actors, for every so many actors."""
_HEARTBEATS_MISSED = 3
"""Missed heartbeats in a row that count as silence, where actors are asked for fewer."""
_TAKE_OVER_S = 3.0
"""Seconds of silence of an actor after which another process may take its name; 0 where it is known to be dead."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of an actor's session.

    Attributes:
        heartbeat_timeout_s: seconds of silence after which an actor is given up; the death of one on this host is
            noticed within about a second.
        grant_resend_s: seconds after which a granted ticket that its actor does not list as held is sent again.
        ticket_timeout_s: seconds after which a ticket without a trajectory is taken from a living actor, and counts as
            failed; with max_staleness 0 seconds in which none of the actor's tickets has brought one.
        heartbeats_per_s: heartbeats of all actors together; each of many actors is asked for fewer.
        max_remembered: limit of refusals, and of sequences out of order, that are remembered of an actor.
        settings: of the learner, see `shared_settings`: an actor that has others is refused. Empty: none is.
    """

    heartbeat_timeout_s: float = 20.0
    grant_resend_s: float = 5.0
    ticket_timeout_s: float = 600.0
    heartbeats_per_s: int = 100
    max_remembered: int = 1 << 14
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ActorSession:
    """An actor process that has introduced itself."""

    address: Address
    actor_id: str
    offers: Offers
    last_heard: float
    heartbeat_s: int = 0
    """Seconds between two heartbeats that it was asked for last."""
    seems_dead: bool = False
    has_ended: bool = False
    progress_at: dict[int, float] = field(default_factory=dict)
    """Time when each of its tickets was granted, or brought its last unroll."""
    brought_at: float = 0.0
    """Time of the last trajectory that was taken in."""
    evaluation_want: int = 0
    """Number of evaluation tasks that it wants to have at a time."""

    def is_dead(self) -> bool:
        """Return whether its process has ended; always False for an actor on another host."""
        reader = self.offers.reader
        return reader is not None and not reader.has_writer()

    def may_be_silent(self, timeout_s: float) -> float:
        """Seconds of silence, at least `timeout_s`, after which it counts as lost."""
        return max(timeout_s, _HEARTBEATS_MISSED * self.heartbeat_s)


class IntroductionRefused(Exception):
    """The actor that introduced itself must end; the message is for its user."""


class SessionRegistry:
    """Sessions of the actors of one rank. For one thread at a time, except `actor_stats`, `mean_actor_stats`, `engines`
    and `totals`.

    Args:
        ledger: gets the tickets of actors that are lost.
        run_dir: of the run, with the arenas of actors on this host.
        limits: of a session.
    """

    def __init__(self, ledger: TicketLedger, run_dir: RunDirectory, limits: SessionLimits) -> None:
        self._ledger = ledger
        self._run_dir = run_dir
        self._limits = limits
        self.clock = ActiveClock(max_gap_s=_MAX_GAP_S)
        """To be ticked by the message loop."""
        self.by_address: dict[Address, ActorSession] = {}
        self.by_actor: dict[str, ActorSession] = {}
        self.totals: Counter[str] = Counter()
        """Counters: actors_lost, tickets_expired."""
        self._key_of: dict[str, str | None] = {}
        """Name of the key that an actor's name was first used with; None: an actor of this host, which needs none."""
        self._next_check = 0.0
        self._warnings = RateLimitedWarnings()
        self._refusals = RateLimitedWarnings(on_terminal=True)
        self._lock = threading.Lock()
        # Shared with the learner's thread.
        self._actor_stats: dict[str, dict[str, float]] = {}
        self._reported: dict[str, dict[str, tuple[float, int]]] = {}
        """Sum and number of what each actor has reported since `mean_actor_stats`, by metric."""
        self._engines: dict[str, dict[int, str]] = {}

    # --- for any thread

    @property
    def num_actors(self) -> int:
        """Number of connected actors."""
        return len(self._actor_stats)

    def actor_stats(self) -> dict[str, dict[str, float]]:
        """Latest metrics of each connected actor, by actor id."""
        with self._lock:
            return {actor_id: dict(stats) for actor_id, stats in self._actor_stats.items()}

    def mean_actor_stats(self) -> dict[str, dict[str, float]]:
        """Mean metrics of each connected actor that has reported any since the last call, by actor id; each of its
        heartbeats counts alike. For one caller: what was read is forgotten."""
        with self._lock:
            reported, self._reported = self._reported, {}
        return {
            actor_id: {name: total / number for name, (total, number) in metrics.items()}
            for actor_id, metrics in reported.items()
        }

    def engines(self) -> dict[int, str]:
        """Servers that the connected actors offer for weights: opening -> URL; see `messages.Engines`."""
        with self._lock:
            return {opening: url for engines in self._engines.values() for opening, url in engines.items()}

    # --- for the message loop

    def introduce(self, address: Address, hello: Hello, key: str | None) -> ActorSession | None:
        """Begin a session, or continue the one that this process has.

        Args:
            address: of the sender.
            hello: its introduction.
            key: name of its key; None on this host.

        Returns:
            Its session; None where a living process has this name, and no answer is due.

        Raises:
            IntroductionRefused: its name belongs to another key, its arena cannot be used, or it has other settings.
            WireError: the routing id is not that of the actor.
        """
        identity = address[1]
        if identity != f"{hello.actor_id}#{hello.incarnation:016x}".encode():
            raise WireError(
                f"actor {hello.actor_id!r} sends with the socket identity {identity!r}: the two do not belong together"
            )
        # Later messages are matched by the routing id alone, which contains a random number that only this actor knows.
        if (owner := self._key_of.setdefault(hello.actor_id, key)) != key:
            first, now = (f"the key {name!r}" if name else "this host" for name in (owner, key))
            text = f"{hello.actor_id} belongs to {first} and came from {now}: give each actor an index of its own"
            self._refusals.log("an actor was refused", text)
            raise IntroductionRefused(text)
        if self._limits.settings and (text := difference(self._limits.settings, hello.settings, hello.actor_id)):
            self._refusals.log("an actor was refused", text)
            raise IntroductionRefused(text)
        session = self.by_address.get(address)
        if session is None:
            if (other := self.by_actor.get(hello.actor_id)) is not None and not self._take_over(other):
                return None
            session = ActorSession(address, hello.actor_id, self._offers(hello), self.clock.now)
            self.by_address[address] = self.by_actor[hello.actor_id] = session
            with self._lock:
                self._actor_stats[hello.actor_id] = {}
        session.last_heard = self.clock.now
        session.offers.answered_below(hello.first_sequence)
        self._ledger.resumed(session.actor_id, hello.held)
        return session

    def _take_over(self, other: ActorSession) -> bool:
        """End the session of an earlier process of a name, if that one is dead or silent. Returns whether it did."""
        silence = self.clock.now - other.last_heard
        if not other.is_dead() and silence < other.may_be_silent(_TAKE_OVER_S):
            # Two living processes would replace each other for ever.
            text = f"{other.actor_id} is here already: give each actor an index of its own"
            self._warnings.log("two processes have the name of one actor", text)
            return False
        self.lose(other, "a later process took its place")
        return True

    def _offers(self, hello: Hello) -> Offers:
        if not hello.arena:
            return Offers(None, hello.first_sequence)
        try:
            return Offers(ArenaReader(self._run_dir.arena_path(hello.arena), hello.incarnation), hello.first_sequence)
        except ArenaError as error:
            self._refusals.log("an actor was refused", str(error))
            raise IntroductionRefused(f"the learner cannot use the arena: {error}") from error

    def report(self, session: ActorSession, stats: dict[str, float]) -> None:
        """Replace the metrics of an actor.

        Args:
            session: of the actor.
            stats: metrics by name.
        """
        with self._lock:
            self._actor_stats[session.actor_id] = stats
            before = self._reported.get(session.actor_id, {})
            found: dict[str, tuple[float, int]] = {}
            for name, value in stats.items():  # names of earlier reports alone are given up: they would have no bound
                total, number = before.get(name, (0.0, 0))
                found[name] = (total + value, number + 1)
            self._reported[session.actor_id] = found

    def offer_engines(self, session: ActorSession, engines: Engines) -> None:
        """Replace the servers that an actor offers for weights.

        Args:
            session: of the actor.
            engines: the servers that it offers now.
        """
        with self._lock:
            self._engines[session.actor_id] = dict(zip(engines.openings, engines.urls, strict=True))

    def heartbeat_s(self) -> int:
        """Seconds between two heartbeats that each actor is asked for; 0: the actor's own interval."""
        return len(self.by_address) // self._limits.heartbeats_per_s

    def granted(self, session: ActorSession, tickets: Iterable[Ticket]) -> None:
        """Note that tickets were sent to an actor.

        Args:
            session: of the actor.
            tickets: that were sent.
        """
        session.progress_at |= {ticket.ticket_id: self.clock.now for ticket in tickets}

    def lost_grants(self, session: ActorSession, held: Iterable[int]) -> list[Ticket]:
        """Find the tickets that were granted to an actor some time ago and that it does not list as held: they are to
        be granted once more.

        Args:
            session: of the actor.
            held: ids of the tickets that it lists.

        Returns:
            Those without a received unroll; episodes of which one was received are cut.
        """
        now = self.clock.now
        at_actor = set(held)
        missing = [
            ticket.ticket_id
            for ticket in self._ledger.open_tickets(session.actor_id)
            if ticket.ticket_id not in at_actor
            and now - session.progress_at.get(ticket.ticket_id, now) > self._limits.grant_resend_s
        ]
        return self._ledger.lost_by(session.actor_id, missing) if missing else []

    def is_check_due(self) -> bool:
        """Return whether all sessions are to be checked now; True begins a new interval."""
        now = self.clock.now
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_S * max(1.0, len(self.by_address) / _CHECKED_AT_ONCE)
        return True

    def check_life(self, session: ActorSession) -> None:
        """End the session of an actor that is silent or dead."""
        silence = self.clock.now - session.last_heard
        if silence > session.may_be_silent(self._limits.heartbeat_timeout_s):
            fix = "raise pipeline.actor_timeout_s where something computes as long in one piece"
            self.lose(session, f"silent for {silence:.1f} s; {fix}")
        elif session.is_dead():
            # Given up only at the second check: the last messages of the process may still be on their way.
            if session.seems_dead:
                self.lose(session, "its process is dead")
            session.seems_dead = True

    def expire(self, session: ActorSession) -> list[int]:
        """Take the tickets back that an actor has had for too long. Returns their ids, to be revoked."""
        now, timeout_s = self.clock.now, self._limits.ticket_timeout_s
        still_open = [ticket.ticket_id for ticket in self._ledger.open_tickets(session.actor_id)]
        # The time of tickets from an earlier session (`resumed`) counts from their first check here.
        session.progress_at = {ticket_id: session.progress_at.get(ticket_id, now) for ticket_id in still_open}
        # When a whole batch is granted at once, most tickets wait at the actor until it has played the others.
        waited_until = session.brought_at if self._ledger.max_staleness == 0 else 0.0
        late = [i for i, since in session.progress_at.items() if now - max(since, waited_until) > timeout_s]
        if late:
            said = "%d tickets at %s brought nothing in %g s (pipeline.ticket_timeout_s, actor.episode_timeout_s)"
            _log.warning(said, len(late), session.actor_id, timeout_s)
            self.totals["tickets_expired"] += len(late)
            for ticket_id in late:
                self._ledger.failed(ticket_id, session.actor_id)
        return late

    def lose(self, session: ActorSession, reason: str) -> None:
        """End the session of a lost actor. Its tickets may be the cause of the loss.

        Args:
            session: of the actor.
            reason: for the log.
        """
        num_open = len(self._ledger.open_tickets(session.actor_id))
        _log.warning("actor %s is lost (%s): %d tickets are granted again", session.actor_id, reason, num_open)
        self.totals["actors_lost"] += 1
        self.drop(session, left=False)

    def drop(self, session: ActorSession, left: bool = True) -> None:
        """Remove a session; its tickets are granted to others.

        Args:
            session: to remove.
            left: the actor leaves by itself, or was told to.
        """
        session.has_ended = True
        del self.by_address[session.address], self.by_actor[session.actor_id]
        for ticket in self._ledger.actor_lost(session.actor_id, left):
            text = "task %d (ticket %d, group %d) is set aside: each of the last actors that played it was lost"
            _log.error(text, ticket.task_id, ticket.ticket_id, ticket.group_id)
        with self._lock:
            del self._actor_stats[session.actor_id]
            self._reported.pop(session.actor_id, None)
            self._engines.pop(session.actor_id, None)
