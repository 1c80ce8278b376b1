"""Taking turns: a server whose weights the learner sends by itself, and whose actor loads them from disk where it must.

Invariant: only one of the two changes a server's weights at any time, and no token is ever sampled from a part of a
version. The server's session for new weights is the lock. Who finds it taken leaves the server alone, paused as it may
be; who breaks off in the middle of a version leaves it paused, and the actor loads a whole one and lets it go on.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Literal

from impala_llm.engines.sglang_client import ServerLost, ServerRefused, SGLangClient
from impala_llm.engines.sglang_weights import InFlight, UpdateTimes

TRANSFER_TIMEOUT_S = 60.0
"""Of one version to one server; a learner waits no longer."""
PATIENCE_S = 1.25 * TRANSFER_TIMEOUT_S
"""Whoever has the session for longer is dead."""
_POLL_S = 0.1
_LATE_S = 1.0
"""After a session of the learner's its last call may still be on its way."""


def pause_mode(policy: InFlight) -> Literal["in_place", "retract"]:
    """How answers under way are held."""
    return "retract" if policy == "recompute_kv" else "in_place"


async def load_in_turn(
    client: SGLangClient, directory: Path, version: int, policy: InFlight, timeout_s: float, wanted: int | None = None
) -> UpdateTimes | None:
    """Load a version from disk while the learner sends nothing; whatever state the server was left in, it goes on.

    Args:
        wanted: not necessary any more where the learner turns out to be sending this version or a newer one.

    Returns:
        None where it was not necessary.

    Raises:
        ServerLost: also where the server refuses: it may have a part of a version.
    """
    begin = time.perf_counter()
    mode = pause_mode(policy)
    await client.pause(mode)
    if not await _take_session(client, mode, wanted):
        return None
    started = time.perf_counter()
    try:
        await client.update_weights(directory, version, flush_cache=mode == "retract", timeout_s=timeout_s)
        ended = time.perf_counter()
        await client.end_update()
        await client.resume()
    except ServerRefused as error:
        raise ServerLost(f"{error} (it may have a part of another version)") from error
    return UpdateTimes(time.perf_counter() - begin, ended - started)


async def _take_session(client: SGLangClient, mode: Literal["in_place", "retract"], wanted: int | None) -> bool:
    """Open the session of a paused server, after that of the learner if there is one."""
    deadline = time.monotonic() + PATIENCE_S
    has_waited = False
    while True:
        try:
            await client.begin_update()
            break
        except ServerRefused as error:
            has_waited = True
            if wanted is not None and (await client.weight_version() or 0) >= wanted:
                return False
            if time.monotonic() >= deadline + _LATE_S:
                raise ServerLost(f"{error}, and it cannot be closed") from error
            if time.monotonic() >= deadline:
                with contextlib.suppress(ServerRefused):
                    await client.end_update()
        await asyncio.sleep(_POLL_S)
    if has_waited:
        await asyncio.sleep(_LATE_S)
        await client.pause(mode)
    return True
