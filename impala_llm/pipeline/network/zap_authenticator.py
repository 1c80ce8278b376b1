"""ZAP authenticator: decides which keys may connect to a learner's encrypted sockets, and counts refused connections.

Invariants: a connection reaches a socket only if its public key lay in the authorised folder at its handshake; where
nobody answers (no authenticator, or one that has ended) nobody gets in. Connections leave a quarter of the file
descriptors of this process to its files: strangers may hold many until their handshake's time is over.

Two sources are combined. libzmq asks about keys over ZAP (ZeroMQ RFC 27); the answer names an admitted peer. libzmq
does not ask about a peer without a key, with the wrong learner's key, or with another protocol: such a peer shows only
as a connection that ends before its handshake succeeds, among the events of the socket. pyzmq's own authenticator knows
neither these nor folders that change, and runs an event loop a context.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as system
import threading
from collections import deque
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from impala_llm.pipeline.network.keys import AuthorisedKeys, LearnerKeys
from impala_llm.processes.limited_warnings import RateLimitedWarnings

ZAP_DOMAIN = b"impala_llm"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_LET_IN = (b"200", b"OK")
# A temporary error in the sense of RFC 27: the peer tries again by itself, until it is authorised. After 400 it would
# never try again.
_REFUSED = (b"300", b"the key is not authorised")
_USER_ID = "User-Id"

_FAILURES = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it ended the connection or was silent for too long",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has no key or the wrong public key of the learner: compare its "
    "learner.public.json with the learner's",
}
_NOT_ZMTP = "it does not speak ZeroMQ 3 with encryption"
# Without ACCEPT_FAILED: while no descriptor is free libzmq reports some 30,000 a second.
_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
    | zmq.Event.MONITOR_STOPPED
)


def user_id(frame: zmq.Frame) -> str | None:
    """Name of the key of the peer that sent a frame.

    Args:
        frame: received with copy=False.

    Returns:
        None where the frame came in clear text.
    """
    try:
        name = frame.get(_USER_ID)
    except zmq.ZMQError:
        return None
    assert isinstance(name, str)
    return name


@dataclass(slots=True)
class _Handshakes:
    """Connections of a socket whose handshake may still be under way.

    An event does not name the connection whose handshake succeeded or failed. With one connection under way it is that
    one. With several, only their number is counted; a connection that ends without such an event was never done.

    Attributes:
        pending: file descriptors of connections whose handshake may be under way.
        num_done: number of handshakes among them that have succeeded, or failed with an event.
        shut_down: file descriptors of connections that the authenticator has ended, and libzmq has not reported yet.
    """

    pending: set[int] = field(default_factory=set)
    num_done: int = 0
    shut_down: set[int] = field(default_factory=set)

    def began(self, descriptor: int) -> None:
        self.pending.add(descriptor)

    def done(self) -> None:
        """Count a handshake that has succeeded, or failed with an event."""
        self.num_done += 1
        self._forget()

    def ended_without(self, descriptor: int) -> bool:
        """Remove a connection that ended. Returns whether its handshake was never done."""
        if descriptor not in self.pending:
            return False
        self.pending.remove(descriptor)
        self._forget()
        return True

    def _forget(self) -> None:
        if self.num_done >= len(self.pending):
            self.pending.clear()
            self.num_done = 0


class ZapAuthenticator:
    """Authenticates the peers of the sockets given to `watch` (by `sockets.router`), in its own thread until `close`.

    Args:
        context: of the sockets. It can have one authenticator.
        keys: of the learner. Its authorised folder is read for each handshake, so keys may come and go meanwhile.

    Raises:
        zmq.ZMQError: the context has an authenticator already.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: LearnerKeys) -> None:
        self.keys = keys
        self._context = context
        self._authorised = AuthorisedKeys(keys.authorised)
        self._warnings = RateLimitedWarnings()
        self._num_refused = 0
        self._closing = False
        self._zap = context.socket(zmq.REP)
        try:
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            self._zap.close()
            raise
        # Sockets to watch, and the ends of their monitors on the way to the thread. deque is safe between threads.
        self._guarded: list[zmq.Socket[bytes]] = []
        self._arriving: deque[zmq.Socket[bytes]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._spare = os.dup(self._wake_read)
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Connections refused since the start. Each attempt of a peer counts."""
        return self._num_refused

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Count the refused connections of a socket, which is not bound yet."""
        name = f"inproc://authenticator-{id(self)}-{len(self._guarded)}"
        socket.monitor(name, _EVENTS)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        # libzmq waits while this queue is full, and nobody would be served meanwhile.
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(name)
        self._guarded.append(socket)
        self._arriving.append(monitor)
        self._wake()

    def close(self) -> None:
        """End the thread; later peers are refused. Call it after closing the guarded sockets, or in their thread."""
        if self._closing:
            return
        for socket in self._guarded:
            if not socket.closed:
                with contextlib.suppress(zmq.ContextTerminated):
                    socket.disable_monitor()
        self._closing = True
        self._wake()
        self._thread.join()
        for descriptor in (self._wake_read, self._wake_write, self._spare):
            os.close(descriptor)

    def _wake(self) -> None:
        os.write(self._wake_write, b"w")

    # --- the authenticator's thread

    def _run(self) -> None:
        watched: dict[zmq.Socket[bytes], _Handshakes] = {}
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)
        try:
            # Each monitor is read until libzmq has ended it: libzmq waits for ever on a monitor that nobody reads.
            while not self._closing or watched or self._arriving:
                ready = dict(poller.poll())
                if self._wake_read in ready:
                    os.read(self._wake_read, 1 << 16)
                while self._arriving:
                    monitor = self._arriving.popleft()
                    watched[monitor] = _Handshakes()
                    poller.register(monitor, zmq.POLLIN)
                if self._zap in ready:
                    self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
                for monitor in [m for m in watched if m in ready]:
                    if not self._note(watched[monitor], monitor.recv_multipart()):
                        poller.unregister(monitor)
                        del watched[monitor]
                        monitor.close()
        except zmq.ContextTerminated:
            pass  # the context was ended before `close`: nothing is left to guard
        finally:
            for socket in (self._zap, *watched, *self._arriving):
                socket.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Answer a ZAP request.

        Args:
            question: version, request id, domain, address, routing id, mechanism, public key.

        Returns:
            The frames of the reply.
        """
        version, request_id, _, address, _, mechanism, *credentials = question
        name = None
        if mechanism == b"CURVE" and len(credentials) == 1:
            public = z85.encode(credentials[0])
            name = self._authorised.name(public)
            if name is None:
                self._warnings.log(
                    "an actor was refused", f"{address.decode()} has the key {public.decode()}, which is not authorised"
                )
        status = _REFUSED if name is None else _LET_IN
        return [version, request_id, *status, (name or "").encode(), b""]

    def _note(self, handshakes: _Handshakes, message: list[bytes]) -> bool:
        """Handle an event of a socket. Returns False after the last one."""
        event = parse_monitor_message(message)
        kind, endpoint = zmq.Event(event["event"]), event["endpoint"].decode()
        match kind:
            case zmq.Event.MONITOR_STOPPED:
                return False
            case zmq.Event.ACCEPTED:
                if not _is_scarce(event["value"]):
                    handshakes.began(event["value"])
                else:
                    self._num_refused += 1
                    handshakes.shut_down.add(event["value"])
                    self._warnings.log(
                        "a connection was ended at once",
                        f"at {endpoint}: three quarters of the open files that this process may have are open: raise "
                        "ulimit -Hn, and let a firewall admit the actors' hosts alone",
                    )
                    self._shut_down(event["value"], endpoint)
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                handshakes.done()
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                handshakes.done()
                self._num_refused += 1  # `_answer` has said who it was
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL if handshakes.shut_down:
                pass  # it is of such a connection, or DISCONNECTED reports it
            case zmq.Event.DISCONNECTED if event["value"] in handshakes.shut_down:
                handshakes.shut_down.remove(event["value"])
            case zmq.Event.DISCONNECTED:
                if handshakes.ended_without(event["value"]):
                    self._refused_at(endpoint, _NOT_ZMTP)
            case _:
                handshakes.done()
                self._refused_at(endpoint, _FAILURES[kind])
        return True

    def _refused_at(self, endpoint: str, why: str) -> None:
        self._num_refused += 1
        self._warnings.log("a connection was refused", f"at {endpoint}: {why}")

    def _shut_down(self, descriptor: int, endpoint: str) -> None:
        """Shut down a connection to a TCP endpoint; libzmq then closes it. Nothing is done where libzmq has closed the
        connection meanwhile, and its descriptor belongs to another file.
        """
        # The duplicate keeps its file open while its port is compared. It takes the number of the spare descriptor,
        # since no other may be free.
        with contextlib.suppress(OSError, IndexError):  # the descriptor is closed, or of a file without a port
            os.dup2(descriptor, self._spare, inheritable=False)
            connection = system.socket(system.AF_INET, system.SOCK_STREAM, fileno=self._spare)
            try:
                if endpoint.endswith(f":{connection.getsockname()[1]}"):
                    connection.shutdown(system.SHUT_RDWR)
            finally:
                connection.detach()
        os.dup2(self._wake_read, self._spare, inheritable=False)


def _is_scarce(descriptor: int) -> bool:
    """Whether a new file descriptor, the lowest that was free, is one of the last quarter."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most != resource.RLIM_INFINITY and descriptor >= most * 3 // 4
