"""Interface of a server's life cycle, and servers that others start and stop.

Invariant: `start` returns only when the server answers; the engine checks its weights.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import aiohttp

from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.client import SGLangClient

_POLL_S = 0.5


class ServerUnfit(EngineError):
    """Server that another start would not mend."""


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
            ServerUnfit: the same, and no further attempt should be made.
        """
        ...

    async def wait_dead(self) -> str:
        """Return, with the reason, when the server has died or was closed."""
        ...

    async def close(self) -> None:
        """End it, if the caller owns it."""
        ...


@contextlib.asynccontextmanager
async def _patience(url: str, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise ServerUnfit(
            f"{url} did not answer for {timeout_s:g} s: is the server up, and is engine.urls right?"
        ) from None


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
            async with _patience(url, timeout_s):
                while not (workers := await client.workers()) and not await client.healthy():
                    await asyncio.sleep(_POLL_S)
            found += workers or [client.url]
    return [RemoteServer(url, timeout_s) for url in dict.fromkeys(found)]


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
        """Wait until it answers. Raises ServerUnfit after the timeout."""
        async with _patience(self._url, self._timeout_s), aiohttp.ClientSession() as http:
            client = SGLangClient(http, self._url, self._key)
            while not await client.healthy():
                await asyncio.sleep(_POLL_S)

    async def wait_dead(self) -> str:
        """Wait for ever: only its clients notice its death."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """Do nothing: the server is not ours."""
