"""Listening sockets at which other processes meet this one to form a process group, and trials of addresses and ports.

Invariant: a socket is bound to the address by which this host reaches those processes, loopback for those on this host,
never to all addresses.
"""

from __future__ import annotations

import socket as system
from typing import NamedTuple

from impala_llm.hosts import TcpEndpoint

_BACKLOG = 128


class Listener(NamedTuple):
    """A listening socket. Its file descriptor belongs to the caller."""

    address: str
    port: int
    descriptor: int


def address_towards(host: str, port: int) -> str:
    """Find the address of this host that another one sees. Sends nothing.

    Args:
        host: name or address of the other one.
        port: any; no process needs to listen there.

    Raises:
        OSError: there is no route to the host.
    """
    # Connecting a datagram socket only looks up the route.
    family, _, _, _, target = system.getaddrinfo(host, port, type=system.SOCK_DGRAM)[0]
    with system.socket(family, system.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def check_known(host: str) -> None:
    """Check that this host finds an address for a name.

    Raises:
        OSError: it does not.
    """
    try:
        system.getaddrinfo(host, None)
    except UnicodeError as error:  # a part of the name is empty or too long
        raise OSError(0, "it is no host name") from error


def try_to_listen(endpoint: TcpEndpoint) -> None:
    """Check that this process could listen at an address and port.

    Raises:
        OSError: a process listens there already, or the address is not this host's.
    """
    host = None if endpoint.host == "*" else endpoint.host
    found = system.getaddrinfo(host, endpoint.port, type=system.SOCK_STREAM, flags=system.AI_PASSIVE)
    family, _, _, _, address = found[0]
    with system.socket(family, system.SOCK_STREAM) as probe:
        # As ZeroMQ does: lingering connections of an earlier listener do not count.
        probe.setsockopt(system.SOL_SOCKET, system.SO_REUSEADDR, 1)
        probe.bind(address)


def try_to_connect(endpoint: TcpEndpoint, timeout_s: float) -> None:
    """Check that a process listens at an endpoint. Sends nothing.

    Args:
        endpoint: to connect to.
        timeout_s: seconds to wait.

    Raises:
        OSError: no process listens there, or none answers in time.
    """
    with system.create_connection((endpoint.host, endpoint.port or 0), timeout=timeout_s):
        pass


def listen_at(address: str) -> Listener:
    """Listen at a free port of one of this host's addresses.

    Raises:
        OSError: the address is not this host's.
    """
    family = system.AF_INET6 if ":" in address else system.AF_INET
    with system.socket(family, system.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        port = int(listener.getsockname()[1])
        return Listener(address, port, listener.detach())
