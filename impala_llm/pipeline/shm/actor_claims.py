"""Claims on the indices of actors: supervisors of one host, which know nothing of each other, number theirs apart.

Invariant: an index of a run has one living owner at most; the kernel frees it with the owner, whatever ends that.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def claimed_indices(run_name: str, count: int) -> Iterator[list[int]]:
    """Claim the lowest free indices of a run's actors on this host while the context is open.

    A claim is a socket with a name outside of the file system (unix(7)), to which nobody connects. Where there are
    none, nothing is claimed, and the indices begin at 0.

    Args:
        count: number of actors.
    """
    with ExitStack() as stack:
        found: list[int] = []
        for index in itertools.count():
            if len(found) == count:
                break
            if sys.platform == "linux":
                claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                try:
                    claim.bind(f"\0impala_llm-{os.getuid()}-{run_name}-actor-{index}")
                except OSError:
                    claim.close()
                    continue
            found.append(index)
        yield found
