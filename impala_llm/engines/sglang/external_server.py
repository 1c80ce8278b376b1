"""Interface of a server's life cycle, and servers that others start and stop.

Invariant: `start` returns only when the server answers; the engine checks its weights.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Protocol

import aiohttp

from impala_llm.config import ConfigError
from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.client import ASKS_FOR_KEY, SGLangClient
from impala_llm.pipeline.shm.actor_claims import claimed_servers
from impala_llm.processes.supervised import tell
from impala_llm.settings import Config

SAID_AFTER_S = 10.0
"""Seconds of waiting for a server after which that is said."""
_POLL_S = 0.5
_log = logging.getLogger(__name__)


class ServerAbsent(EngineError):
    """Server of others that did not answer in time. It may later, and has been waited for long enough."""


class Server(Protocol):
    """One SGLang server. `start` may follow on `close`: that is a restart."""

    @property
    def url(self) -> str:
        """URL at which it listens, once it was started."""
        ...

    @property
    def key(self) -> str | None:
        """Its API key."""
        ...

    async def start(self) -> None:
        """Bring it up.

        Raises:
            EngineError: it does not come up; the message has its last output.
            ServerUnfit, ServerAbsent: the same, and no further attempt should be made.
        """
        ...

    async def wait_dead(self) -> str:
        """Return, with the reason, when the server has died or was closed."""
        ...

    async def close(self) -> None:
        """End it, if the caller owns it."""
        ...


@contextlib.asynccontextmanager
async def _patience(client: SGLangClient, timeout_s: float) -> AsyncIterator[None]:
    """Limit the wait for a server, and say once that it is waited for. Raises ServerAbsent after the timeout."""
    saying = asyncio.get_running_loop().call_later(SAID_AFTER_S, _say_waiting, client, timeout_s - SAID_AFTER_S)
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        did, fix = f"did not answer for {timeout_s:g} s", "start the server, or correct the URL"
        if client.refusal:
            did = f"answers, but was no SGLang server that is ready within {timeout_s:g} s ({client.refusal})"
        if ASKS_FOR_KEY in client.refusal:
            fix = "start it without --api-key, since the engine has a key for servers of its own alone"
        raise ServerAbsent(f"engine.urls: {client.url} {did}: {fix}") from None
    finally:
        saying.cancel()


def _say_waiting(client: SGLangClient, left_s: float) -> None:
    """Say in the log, and on the terminal of the supervisor where there is one, that a server is waited for."""
    text = (
        f"engine.urls: {client.url} {'is not ready' if client.refusal else 'does not answer'} yet and is waited for, "
        f"{left_s:g} s more at most "
        "(engine.start_timeout_s): start the server, or correct the URL"
    )
    _log.warning("%s", text)
    tell(say=text)


@contextlib.contextmanager
def reserved_servers(config: Config) -> Iterator[None]:
    """Claim the servers of `engine.urls` for this command while the context is open.

    Raises:
        ConfigError: another command of this user on this host has claimed one of them.
    """
    with claimed_servers(config.engine.urls or ()) as taken:
        if taken:
            raise ConfigError(
                f"engine.urls has {taken[0]}, which another command on this host uses: both would change its weights; "
                "name other servers, or end that command first"
            )
        yield


async def find_servers(urls: Sequence[str], timeout_s: float = 600.0) -> list["RemoteServer"]:
    """Find the servers at given URLs, and, for the URL of an SGLang router, those behind it.

    A router is asked once: it passes on requests, but neither weights nor pauses, so its workers are used directly.

    Args:
        timeout_s: seconds to wait for a router and its first worker, and later for each server.

    Raises:
        EngineError: a malformed URL, or no answer there in time.
    """
    found: list[str] = []
    async with aiohttp.ClientSession() as http:
        for url in urls:
            client = SGLangClient(http, url)
            async with _patience(client, timeout_s):
                while not (workers := await client.workers()) and not await client.healthy():
                    await asyncio.sleep(_POLL_S)
            found += workers or [client.url]
    return [RemoteServer(url, timeout_s) for url in dict.fromkeys(found)]


async def absent_servers(urls: Sequence[str], timeout_s: float) -> list[str]:
    """Ask the servers and routers at given URLs. Returns a sentence for each that does not answer in time."""
    found = await asyncio.gather(*(find_servers([url], timeout_s) for url in urls), return_exceptions=True)
    return [str(error) for error in found if isinstance(error, BaseException)]


class RemoteServer:
    """Server known by its URL, which is only waited for, never started or ended."""

    def __init__(self, url: str, timeout_s: float = 600.0, key: str | None = None) -> None:
        """
        Args:
            timeout_s: seconds to wait for it, at first and whenever it was lost.
            key: its API key; None: it has none.
        """
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"engine.urls has {url!r}: http://HOST:PORT is expected")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._key = key

    @property
    def key(self) -> str | None:
        """Its API key."""
        return self._key

    @property
    def url(self) -> str:
        """Its URL."""
        return self._url

    async def start(self) -> None:
        """Wait until it answers. Raises ServerAbsent after the timeout."""
        async with aiohttp.ClientSession() as http:
            client = SGLangClient(http, self._url, self._key)
            async with _patience(client, self._timeout_s):
                while not await client.healthy():
                    await asyncio.sleep(_POLL_S)

    async def wait_dead(self) -> str:
        """Wait for ever: only its clients notice its death."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """Do nothing: the server is not ours."""
