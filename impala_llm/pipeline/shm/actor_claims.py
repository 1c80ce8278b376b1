"""Claims on actor indices and engine servers, by which independent supervisors on one host avoid using the same ones.

A claim is a locked file in a folder of this user in shared memory. Containers that share the memory see each other's
claims; other users cannot touch them. If the folder belongs to another user, or no file can be created in it, nothing
is claimed.

Invariant: a claim has at most one living owner; the kernel releases it when the owner ends for any reason.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from impala_llm.hosts import server_identity
from impala_llm.pipeline.shm.file_lock import FileLock
from impala_llm.pipeline.shm.owned_directory import RunDirectoryError, check_ours
from impala_llm.pipeline.shm.run_directory import shared_memory

_log = logging.getLogger(__name__)
_FIX = (
    "nothing is claimed there, so two commands of yours on this host may use the same servers of engine.urls, both "
    "changing their weights, and actors that are started beside those of a run may get names in use and be refused; "
    "have its owner or root remove it"
)


@contextmanager
def claimed_indices(run_name: str, count: int) -> Iterator[list[int]]:
    """Claim the lowest free indices of a run's actors on this host, one after another, while the context is open.

    Args:
        run_name: runs of other names have indices of their own.
        count: number of actors.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for index in itertools.count():
            if len(found) == count:
                break
            if _claim(stack, f"{run_name}-actor-{index}"):
                found.append(index)
            else:  # servers, for example, are shared out by index: with a gap two actors could get the same ones
                found.clear()
                stack.close()
        yield found


@contextmanager
def claimed_servers(urls: Sequence[str]) -> Iterator[list[str]]:
    """Claim servers for the actors of this process while the context is open.

    Args:
        urls: of the servers, each in any spelling.

    Yields:
        Those that another process of this user on this host has claimed.

    Raises:
        ValueError: a URL is malformed.
    """
    with ExitStack() as stack:
        servers = {url: _server(url) for url in urls}
        taken = {server for server in set(servers.values()) if not _claim(stack, server)}
        yield [url for url, server in servers.items() if server in taken]


@functools.cache
def _say_once(warning: str) -> None:
    _log.warning(warning)


def _server(url: str) -> str:
    """Name of the claim to a server."""
    host, port = server_identity(url)
    network = ""
    if host == "localhost":  # each network namespace, such as a container's, has one of its own
        with suppress(OSError):
            network = os.readlink("/proc/self/ns/net")
    return f"server {host} {port} {network}"


def _claim(stack: ExitStack, name: str) -> bool:
    """Claim a name until the stack is closed. Returns False if another process has it."""
    folder = shared_memory() / f"impala_llm-{os.getuid()}.claims"  # no run's: its name would follow on a hyphen
    path = folder / hashlib.sha256(name.encode()).hexdigest()
    while True:
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_ours(folder, _FIX)
            claim = FileLock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # the owner of the last claim has just removed the folder
        except RunDirectoryError as error:  # any user can create the folder first: the run continues without claims
            _say_once(str(error))
            return True
        except OSError:
            return True
        if not claim.take(fcntl.LOCK_EX):
            claim.close()
            return False
        if claim.is_at(path):
            stack.callback(_give_up, claim, path)
            return True
        claim.close()  # its owner has just given it up


def _give_up(claim: FileLock, path: Path) -> None:
    if not claim.is_open:
        return  # in a forked process
    path.unlink(missing_ok=True)
    claim.close()
    with suppress(OSError):  # there are other claims
        path.parent.rmdir()
