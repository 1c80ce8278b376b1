"""Where processes of others meet this one to form a group: a listening socket on the one address that they can reach.

Invariant: it is bound to the address by which this host talks to them, loopback for those on this host, never to all.
"""

from __future__ import annotations

import socket as system
from typing import NamedTuple

from impala_llm.hosts import TcpEndpoint

_BACKLOG = 128


class Listener(NamedTuple):
    """descriptor: of the listening socket; it belongs to the caller."""

    address: str
    port: int
    descriptor: int


def address_towards(host: str, port: int) -> str:
    """The address of this host that another one sees. Sends nothing. Raises OSError where there is no way."""
    # Of a datagram socket connecting means only to ask for the route.
    family, _, _, _, target = system.getaddrinfo(host, port, type=system.SOCK_DGRAM)[0]
    with system.socket(family, system.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def check_known(host: str) -> None:
    """Raises OSError where this host has no address for a name."""
    try:
        system.getaddrinfo(host, None)
    except UnicodeError as error:  # a part of the name is empty or too long
        raise OSError(0, "it is no host name") from error


def try_to_listen(endpoint: TcpEndpoint) -> None:
    """Raises OSError where somebody listens at this address and port, or the address is none of this host's."""
    host = None if endpoint.host == "*" else endpoint.host
    found = system.getaddrinfo(host, endpoint.port, type=system.SOCK_STREAM, flags=system.AI_PASSIVE)
    family, _, _, _, address = found[0]
    with system.socket(family, system.SOCK_STREAM) as probe:
        # As ZeroMQ does: connections of an earlier listener that still linger are no hindrance.
        probe.setsockopt(system.SOL_SOCKET, system.SO_REUSEADDR, 1)
        probe.bind(address)


def listen_at(address: str) -> Listener:
    """Listen at a free port of one of this host's addresses. Raises OSError."""
    family = system.AF_INET6 if ":" in address else system.AF_INET
    with system.socket(family, system.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        port = int(listener.getsockname()[1])
        return Listener(address, port, listener.detach())
