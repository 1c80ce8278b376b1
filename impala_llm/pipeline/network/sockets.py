"""ZeroMQ sockets between actors and learner ranks, with all of their options.

Invariant: a socket that reaches beyond this host is encrypted and accepts only authorised keys; any other request
raises before a socket is opened.
"""

from __future__ import annotations

import errno
import functools
import os
import socket as system
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from impala_llm.hosts import TcpEndpoint, check_bind, check_connect, is_in_file, resolve
from impala_llm.pipeline.network.keys import ActorKeys
from impala_llm.pipeline.network.zap_authenticator import ZAP_DOMAIN, ZapAuthenticator
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_BACKLOG = 1024
_CONNECT_MS = 5_000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
# Bytes that encryption adds to a message (RFC 26: 8 of command name, 8 of nonce, 16 of authenticator, 1 of flags).
_CURVE_OVERHEAD = 33
_DEFAULT_QUEUE = 1000
_warnings = RateLimitedWarnings()


@dataclass(frozen=True, slots=True)
class SocketTimes:
    """Times of a socket, in milliseconds.

    Attributes:
        handshake_ms: that a peer may take for the handshake before it is disconnected.
        heartbeat_ms: between ZeroMQ's heartbeats, over TCP.
        heartbeat_timeout_ms: after which a peer that neither sends nor answers is disconnected, and connects again when
            it can. Any message counts, so the largest one must arrive within this time.
        linger_ms: that messages under way have left when the socket is closed.
    """

    handshake_ms: int = 10_000
    heartbeat_ms: int = 3_000
    heartbeat_timeout_ms: int = 15_000
    linger_ms: int = 1_000


# A learner has many peers, and each sends heartbeats of its own.
_ROUTER_TIMES = SocketTimes(heartbeat_ms=15_000)
_DEALER_TIMES = SocketTimes()


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    max_message_bytes: int,
    authenticator: ZapAuthenticator | None = None,
    queue_messages: int = _DEFAULT_QUEUE,
    times: SocketTimes = _ROUTER_TIMES,
) -> zmq.Socket[bytes]:
    """Make and bind a learner's ROUTER socket.

    An actor that connects again takes its routing id over, even while its old connection seems to exist.

    Args:
        context: that the socket belongs to.
        endpoint: ipc:///path or tcp://address:port, `*` as port for any free one (then see zmq.LAST_ENDPOINT).
        max_message_bytes: a peer that sends a larger frame is disconnected.
        authenticator: of this context, for encryption and authorised keys; None: clear text, on this host only.
        queue_messages: maximum of messages that wait for, or from, each peer.
        times: see `SocketTimes`.

    Returns:
        The socket, which the caller closes.

    Raises:
        ValueError: the endpoint needs keys or is malformed.
        zmq.ZMQError: the endpoint is in use, or not of this host.
    """
    check_bind(endpoint, has_keys=authenticator is not None)
    if endpoint.startswith("ipc://"):
        _refuse_if_taken(Path(endpoint.removeprefix("ipc://")))
    socket = context.socket(zmq.ROUTER)
    try:
        # In this order: the authenticator watches from before the first connection.
        _set_common(socket, max_message_bytes + (authenticator is not None) * _CURVE_OVERHEAD, queue_messages, times)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if authenticator is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, authenticator.keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without it libzmq accepts every peer when no authenticator answers.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            authenticator.watch(socket)
        if endpoint.startswith("tcp://"):
            target = _numeric_localhost(TcpEndpoint.parse(endpoint))
            socket.setsockopt(zmq.IPV6, int(target.is_ipv6))
            _set_tcp(socket, times)
            endpoint = str(target)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == errno.ENODEV:
            raise zmq.ZMQError(
                error.errno, f"{endpoint} is no address of this host: use one of its addresses or 0.0.0.0"
            ) from None
        raise zmq.ZMQError(error.errno, f"cannot listen at {endpoint}: {error.strerror}") from None
    except BaseException:
        socket.close()
        raise
    return socket


def dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_message_bytes: int,
    keys: ActorKeys | None = None,
    queue_messages: int = _DEFAULT_QUEUE,
    times: SocketTimes = _DEALER_TIMES,
) -> zmq.Socket[bytes]:
    """Make an actor's DEALER socket. It connects in the background, again whenever it must.

    A name is looked up at each attempt; @FILE is read once, and a socket for a file that holds no endpoint connects to
    nothing: the next one may.

    Args:
        context: of the socket; it ends only once the socket is closed.
        endpoint: of a `router`, which need not exist yet.
        identity: routing id.
        max_message_bytes, queue_messages, times: as for `router`.
        keys: of the actor; None: clear text, on this host only.

    Returns:
        The socket, which the caller closes.

    Raises:
        ValueError: the endpoint needs keys or is malformed.
    """
    address: str | None = endpoint
    if is_in_file(endpoint):
        address = _read_address(endpoint, keys)
    else:
        check_connect(endpoint, has_keys=keys is not None)
    socket = context.socket(zmq.DEALER)
    try:
        _set_common(socket, max_message_bytes + (keys is not None) * _CURVE_OVERHEAD, queue_messages, times)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        if address is not None and address.startswith("tcp://"):
            target = _numeric_localhost(TcpEndpoint.parse(address))
            socket.setsockopt(zmq.IPV6, int(_has_ipv6_only(target)))
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            _set_tcp(socket, times)
            address = str(target)
        if address is not None:
            socket.connect(address)
    except BaseException:
        socket.close()
        raise
    return socket


def monitor(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Make a socket for `ends_without_handshake`.

    Args:
        context: of the dealer. Its termination waits until the new socket is closed, too.
        socket: the dealer to watch.
    """
    name = f"inproc://dealer-{id(socket)}"
    socket.monitor(name, zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.setsockopt(zmq.RCVHWM, 0)  # libzmq waits while this queue is full
    events.connect(name)
    return events


def ends_without_handshake(events: zmq.Socket[bytes]) -> bool:
    """Return whether the last connection of a watched dealer ended without a handshake: a learner does not answer a key
    that is not authorised, or that is meant for another learner.

    Args:
        events: see `monitor`; they are read.
    """
    last = None
    while events.poll(0):
        last = parse_monitor_message(events.recv_multipart())["event"]
    return last == zmq.EVENT_CONNECTED


def _read_address(endpoint: str, keys: ActorKeys | None) -> str | None:
    """Read the endpoint that a file holds; None, with a warning, where there is none to which this actor may talk."""
    try:
        address = resolve(endpoint)
        check_connect(address, has_keys=keys is not None)
    except (OSError, ValueError) as error:
        _warnings.log("the learner's address cannot be read, it is tried again", f"{endpoint}: {error}")
        return None
    return address


def _set_common(socket: zmq.Socket[bytes], max_message_bytes: int, queue_messages: int, times: SocketTimes) -> None:
    socket.setsockopt(zmq.LINGER, times.linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.HANDSHAKE_IVL, times.handshake_ms)


def _set_tcp(socket: zmq.Socket[bytes], times: SocketTimes) -> None:
    # A lost network closes no socket. ZeroMQ's heartbeats detect it; the kernel's detect a peer whose ZeroMQ hangs.
    socket.setsockopt(zmq.HEARTBEAT_IVL, times.heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, times.heartbeat_timeout_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _numeric_localhost(endpoint: TcpEndpoint) -> TcpEndpoint:
    # libzmq binds to no names, and `localhost` may mean either family where one side has only the other.
    return replace(endpoint, host="127.0.0.1") if endpoint.host.lower() == "localhost" else endpoint


def _has_ipv6_only(endpoint: TcpEndpoint) -> bool:
    """Return whether a host has no IPv4 address; False for a name that cannot be looked up now."""
    try:
        return _families(endpoint.host) == {system.AF_INET6}
    except OSError:
        return False


@functools.lru_cache
def _families(host: str) -> set[int]:
    """Address families of a host. Looked up until it succeeds, and not again: each new connection would wait for it.

    Raises:
        OSError: it cannot be looked up now.
    """
    return {family for family, *_ in system.getaddrinfo(host, None, type=system.SOCK_STREAM)}


def _refuse_if_taken(path: Path) -> None:
    """Check that a path is free, or the socket of a dead process: libzmq would delete any file there silently.

    Raises:
        zmq.ZMQError: a process listens there, or the file is no socket.
    """
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise zmq.ZMQError(errno.EEXIST, f"{path} is a file that is no socket: move it away")
    with system.socket(system.AF_UNIX, system.SOCK_STREAM) as probe:
        # A listener that is stopped, or has a full queue, counts as well: do not wait for it.
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise zmq.ZMQError(
            errno.EADDRINUSE, f"somebody listens at {path} already: stop that process or choose another run name"
        )
