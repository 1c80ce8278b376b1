"""Makes the sockets between actors and learner ranks, all of their options in one place.

Invariant: a socket that reaches beyond this host is encrypted and lets in only authorised keys; what is asked to be
otherwise raises before anything is opened.
"""

from __future__ import annotations

import errno
import os
import socket as system
import stat
from dataclasses import replace
from pathlib import Path

import zmq

from impala_llm.hosts import TcpEndpoint, check_bind, check_connect
from impala_llm.pipeline.gatekeeper import ZAP_DOMAIN, Gatekeeper
from impala_llm.pipeline.keys import ActorKeys

_LINGER_MS = 1000
_BACKLOG = 1024
_HANDSHAKE_MS = 10_000
_CONNECT_MS = 5_000
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 2_000
# A peer that neither sends nor answers for so long is cut off, and connects again when it can. Any message that
# arrives counts, so the largest one must come through in this time.
_HEARTBEAT_MS = 3_000
# A learner has many peers, and hears what each of them sends by itself.
_ROUTER_HEARTBEAT_MS = 15_000
_HEARTBEAT_TIMEOUT_MS = 15_000
# What encryption adds to a message (RFC 26: 8 bytes of command name, 8 of nonce, 16 of authenticator, 1 of flags).
_CURVE_OVERHEAD = 33
_DEFAULT_QUEUE = 1000


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    max_message_bytes: int,
    gatekeeper: Gatekeeper | None = None,
    queue_messages: int = _DEFAULT_QUEUE,
) -> zmq.Socket[bytes]:
    """A learner's ROUTER socket, bound.

    An actor that connects again takes its routing id over, even while its old connection seems to be there.

    endpoint: ipc:///path or tcp://address:port, `*` as port for any free one (then see zmq.LAST_ENDPOINT).
    max_message_bytes: a peer that sends a larger frame is cut off. gatekeeper: of this context; encrypts and lets in
    authorised keys only; None: clear text, on this host only. queue_messages: waiting for or from each peer at most.
    Raises ValueError where the endpoint needs keys or is malformed, zmq.ZMQError where it is taken or not of this host.
    """
    check_bind(endpoint, has_keys=gatekeeper is not None)
    if endpoint.startswith("ipc://"):
        _refuse_if_taken(Path(endpoint.removeprefix("ipc://")))
    socket = context.socket(zmq.ROUTER)
    try:
        # Gone over in this order: a gatekeeper watches from before the first connection.
        _set_common(socket, max_message_bytes, encrypted=gatekeeper is not None, queue_messages=queue_messages)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if gatekeeper is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, gatekeeper.keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without it libzmq lets everybody in when no gatekeeper answers.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            gatekeeper.watch(socket)
        if endpoint.startswith("tcp://"):
            target = _numeric_localhost(TcpEndpoint.parse(endpoint))
            socket.setsockopt(zmq.IPV6, int(target.is_ipv6))
            _set_tcp(socket, _ROUTER_HEARTBEAT_MS)
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
) -> zmq.Socket[bytes]:
    """An actor's DEALER socket, connecting; it connects by itself again whenever it must.

    endpoint: of a `router`, which need not be there yet. identity: routing id. keys: None: clear text, on this host
    only. The other arguments as in `router`. Raises ValueError where the endpoint needs keys or is malformed.
    """
    check_connect(endpoint, has_keys=keys is not None)
    socket = context.socket(zmq.DEALER)
    try:
        _set_common(socket, max_message_bytes, encrypted=keys is not None, queue_messages=queue_messages)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        if endpoint.startswith("tcp://"):
            target = _numeric_localhost(TcpEndpoint.parse(endpoint))
            socket.setsockopt(zmq.IPV6, int(_has_ipv6_only(target)))
            socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            _set_tcp(socket, _HEARTBEAT_MS)
            endpoint = str(target)
        socket.connect(endpoint)
    except BaseException:
        socket.close()
        raise
    return socket


def _set_common(socket: zmq.Socket[bytes], max_message_bytes: int, encrypted: bool, queue_messages: int) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + encrypted * _CURVE_OVERHEAD)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _set_tcp(socket: zmq.Socket[bytes], heartbeat_ms: int) -> None:
    # A cable that is pulled closes no socket. ZeroMQ's heartbeats find it; the kernel's find a peer whose ZeroMQ hangs.
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _numeric_localhost(endpoint: TcpEndpoint) -> TcpEndpoint:
    # libzmq takes no names to bind to, and `localhost` may stand for either family where one side has only the other.
    return replace(endpoint, host="127.0.0.1") if endpoint.host.lower() == "localhost" else endpoint


def _has_ipv6_only(endpoint: TcpEndpoint) -> bool:
    """Whether a host has no IPv4 address. A name that cannot be looked up now is taken for one that has."""
    try:
        found = system.getaddrinfo(endpoint.host, None, type=system.SOCK_STREAM)
    except OSError:
        return False
    return all(family == system.AF_INET6 for family, *_ in found)


def _refuse_if_taken(path: Path) -> None:
    """ZMQError where somebody listens at a path, or it is no socket: libzmq would delete it without a word.

    What a dead process left is not in the way.
    """
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise zmq.ZMQError(errno.EEXIST, f"{path} is a file that is no socket: move it away")
    with system.socket(system.AF_UNIX, system.SOCK_STREAM) as probe:
        # A listener that is stopped, or has a full queue, listens all the same: do not wait for it.
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise zmq.ZMQError(
            errno.EADDRINUSE, f"somebody listens at {path} already: stop that process or choose another run name"
        )
