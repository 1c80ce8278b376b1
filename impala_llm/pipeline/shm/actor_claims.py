"""Claims of supervisors of one host, which know nothing of each other: indices of actors, and servers for them.

A claim is a socket with a name outside of the file system (unix(7)), to which nobody connects. Where there are none, or
no name can be bound, nothing is claimed. The names are those of a network namespace: containers with namespaces of
their own know nothing of each other's claims.

Invariant: what is claimed has one living owner at most; the kernel frees it with the owner, whatever ends that.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager


@contextmanager
def claimed_indices(run_name: str, count: int) -> Iterator[list[int]]:
    """Claim the lowest free indices of a run's actors on this host, one after another, while the context is open.

    Args:
        count: number of actors.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for index in itertools.count():
            if len(found) == count:
                break
            if _claim(stack, f"{run_name}-actor-{index}"):
                found.append(index)
            else:  # what is dealt by index has one share for each: a gap could give two the same
                found.clear()
                stack.close()
        yield found


@contextmanager
def claimed_servers(urls: Sequence[str]) -> Iterator[list[str]]:
    """Claim servers for the actors of this process while the context is open.

    Args:
        urls: of the servers.

    Yields:
        Those that another process of this user on this host has claimed.
    """
    with ExitStack() as stack:
        # A socket's name is short.
        names = {url: hashlib.sha256(url.rstrip("/").encode()).hexdigest() for url in urls}
        yield [url for url, name in names.items() if not _claim(stack, f"server-{name}")]


def _claim(stack: ExitStack, name: str) -> bool:
    """Claim a name until the stack is closed. Returns whether nobody else has it."""
    if sys.platform != "linux":
        return True
    claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    try:
        claim.bind(f"\0impala_llm-{os.getuid()}-{name}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    return True
