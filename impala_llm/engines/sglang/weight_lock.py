"""Weight lock of a server to which the learner sends weights, and whose actor loads them from disk where it must.

Invariant: only one of the two changes a server's weights at any time, and no token is ever sampled from a part of a
version. The server's session for new weights is the lock. A process that finds it taken leaves the server unchanged,
even paused; one that fails in the middle of a version leaves it paused, and the actor loads a whole one and resumes it.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Literal

from impala_llm.engines.sglang.client import ServerLost, ServerRefused, SGLangClient
from impala_llm.engines.sglang.weight_update import InFlight, UpdateTimes

TRANSFER_TIMEOUT_S = 60.0
"""Limit of the transfer of one version to one server, in seconds; the learner waits no longer."""
PATIENCE_S = 1.25 * TRANSFER_TIMEOUT_S
"""Seconds after which the holder of the session counts as dead."""
_POLL_S = 0.1
_LATE_S = 1.0
"""Seconds to wait after a session of the learner, whose last call may still be on its way."""


def pause_mode(policy: InFlight) -> Literal["in_place", "retract"]:
    """Choose the mode in which a server pauses completions under way."""
    return "retract" if policy == "recompute_kv" else "in_place"


async def load_in_turn(
    client: SGLangClient, directory: Path, version: int, policy: InFlight, timeout_s: float, wanted: int | None = None
) -> UpdateTimes | None:
    """Load a version from disk while the learner sends none, and resume the server, in whatever state it was left.

    Args:
        directory: Hugging Face directory of the version.
        policy: for completions under way.
        timeout_s: seconds for loading.
        wanted: load nothing where the learner turns out to be sending this version or a newer one; None: always load.

    Returns:
        None where nothing was loaded.

    Raises:
        ServerLost: the server does not answer, or refuses: it may have a part of a version.
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
    """Open the session of a paused server, after that of the learner if there is one. False: see `wanted`."""
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
