"""Addresses of hosts: TCP endpoints, files that hold one, and the names of key files. No sockets.

Invariant: without keys only endpoints on this host pass; an address that is not known to be this host's counts as
another host's.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

LEARNER_SECRET = "learner.secret.json"
LEARNER_PUBLIC = "learner.public.json"
SECRET_SUFFIX = ".secret.json"
PUBLIC_SUFFIX = ".public.json"
AUTHORISED = "authorised"
"""Folder, beside the learner's keys, of the public keys that the learner lets in."""

_MAX_PORT = 65535
_MAX_LABEL = 63  # RFC 1035: no resolver takes longer ones
_TCP = re.compile(r"tcp://(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>\*|[A-Za-z0-9][A-Za-z0-9._-]*)):(?P<port>[0-9]{1,5}|\*)")
_WILDCARDS = ("*", "0.0.0.0", "::")


@dataclass(frozen=True)
class TcpEndpoint:
    """A TCP endpoint as ZeroMQ writes it.

    host: name, IPv4 address, IPv6 address without its brackets, or * for all addresses. port: 1 to 65535; None (written
    *): any free one.
    """

    host: str
    port: int | None

    @classmethod
    def parse(cls, endpoint: str) -> TcpEndpoint:
        """Parse an endpoint. Raises ValueError, which says what is expected."""
        match = _TCP.fullmatch(endpoint)
        if match is None:
            raise ValueError(
                f"{endpoint!r} is not a TCP endpoint: write tcp://ADDRESS:PORT, such as tcp://0.0.0.0:7400"
            )
        host = match["ipv6"] or match["host"]
        try:
            if match["ipv6"]:
                ipaddress.IPv6Address(host)
            elif re.fullmatch(r"[0-9.]+", host):
                ipaddress.IPv4Address(host)
            elif not all(0 < len(label) <= _MAX_LABEL for label in host.removesuffix(".").split(".")):
                raise ValueError(f"between the dots of a host's name stand 1 to {_MAX_LABEL} characters")
        except ValueError as error:
            raise ValueError(f"{endpoint!r} has a malformed address: {error}") from None
        if match["port"] == "*":
            return cls(host, None)
        return cls(host, _check_port(endpoint, int(match["port"])))

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of a host."""
        return self.host in _WILDCARDS

    @property
    def is_loopback(self) -> bool:
        """Whether it cannot be reached from other hosts: 127.0.0.0/8, ::1 and localhost. Looks up no name."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{'*' if self.port is None else self.port}"


def rank_endpoint(endpoint: str, offset: int) -> str:
    """The endpoint `offset` ports above: learner rank r listens at offset r, the weight server at offset num_ranks.

    Of @FILE it is that of the endpoint which the file holds when it is looked at, see `resolve`.

    ValueError where the endpoint is malformed or has no port, or the ports end before.
    """
    if is_in_file(endpoint):
        return f"{endpoint}+{offset}"
    first = TcpEndpoint.parse(endpoint)
    if first.port is None:
        raise ValueError(f"{endpoint!r} leaves the port open: give a number, so that others can find it")
    return str(replace(first, port=_check_port(endpoint, first.port, offset)))


def is_in_file(endpoint: str) -> bool:
    """Whether an endpoint stands in a file: @FILE."""
    return endpoint.startswith("@")


def resolve(endpoint: str) -> str:
    """The endpoint as it is now.

    Args:
        endpoint: from `rank_endpoint`.

    Raises:
        OSError: its file cannot be read.
        ValueError: its file holds no endpoint.
    """
    if not is_in_file(endpoint):
        return endpoint
    path, _, offset = endpoint[1:].rpartition("+")
    written = Path(path).expanduser().read_text(errors="replace").strip()
    if is_in_file(written):
        raise ValueError(f"{written!r} is no TCP endpoint, but the name of another file")
    return rank_endpoint(written, int(offset))


def is_loopback_url(url: str) -> bool:
    """Whether an http URL means this host alone."""
    try:
        return TcpEndpoint(_url_host(url), None).is_loopback
    except ValueError:
        return False


def server_identity(url: str) -> tuple[str, int]:
    """Host and port of an http URL, the same for all spellings of an address. Looks up no name: a name and its address
    are two."""
    parts = urlsplit(url)
    host = _url_host(url)
    host = "localhost" if is_loopback_url(url) or host in _WILDCARDS else host
    return host, parts.port or (443 if parts.scheme == "https" else 80)


def _url_host(url: str) -> str:
    """The host of a URL, each address in one spelling: ::ffff:127.0.0.1 is 127.0.0.1."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def check_bind(endpoint: str, has_keys: bool) -> None:
    """Raise ValueError where a learner must not listen at an endpoint: other hosts reach it, and it has no keys."""
    if _is_ipc(endpoint):
        return
    if not TcpEndpoint.parse(endpoint).is_loopback and not has_keys:
        raise ValueError(
            f"{endpoint!r} can be reached from other hosts and is not opened without keys: run `impala-llm keys --dir "
            f"KEYS`, copy KEYS/{LEARNER_PUBLIC} and KEYS/actor{SECRET_SUFFIX} to the hosts of the actors and set "
            "pipeline.keys=KEYS"
        )


def check_connect(endpoint: str, has_keys: bool) -> None:
    """Raise ValueError where an actor must not talk to an endpoint: it is on another host, and there are no keys."""
    if _is_ipc(endpoint):
        return
    if is_in_file(endpoint):
        return  # what it holds is checked each time
    target = TcpEndpoint.parse(endpoint)
    if target.is_wildcard or target.port is None:
        raise ValueError(f"{endpoint!r} is no address to connect to: give the name or address of the learner's host")
    if not target.is_loopback and not has_keys:
        raise ValueError(
            f"{endpoint!r} is on another host, to which nothing is sent without keys: copy {LEARNER_PUBLIC} and this "
            f"host's actor{SECRET_SUFFIX}, made by `impala-llm keys` on the learner's host, into a folder here and set "
            "pipeline.keys to it"
        )


def actor_secrets(folder: Path) -> list[Path]:
    """Files with secret keys of actors in a folder, sorted by name."""
    return sorted(path for path in folder.glob(f"*{SECRET_SUFFIX}") if path.name != LEARNER_SECRET)


def _is_ipc(endpoint: str) -> bool:
    # A path and nothing else: names in the abstract namespace (ipc://@...) are open to every user of the host.
    if endpoint.startswith("ipc://") and not endpoint.startswith("ipc:///"):
        raise ValueError(f"{endpoint!r} is not a path: write ipc:///absolute/path")
    return endpoint.startswith("ipc://")


def _check_port(endpoint: str, port: int, offset: int = 0) -> int:
    if not 1 <= port + offset <= _MAX_PORT:
        above = f" with {offset} more above it" if offset else ""
        raise ValueError(f"{endpoint!r} has port {port}{above}: ports reach from 1 to {_MAX_PORT}")
    return port + offset
