"""Connections of the gateway: accepted up to a limit, and closed where they bring no valid request.

Invariant: a client that opens many connections takes no descriptor that the rest of the actor needs, and fills no log.
"""

import asyncio
import contextlib
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from impala_llm.processes.limited_warnings import RateLimitedWarnings

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_SILENT_TICKS = 10
"""Looks after which a connection that has brought no valid request is closed. A pause of the loop is one of them."""
_BACKLOG = 1024
_RETRY_S = 0.1


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Log of a server, in which what is no HTTP fills no more than a line a minute."""

    def __init__(self, warnings: RateLimitedWarnings) -> None:
        super().__init__(_log)
        self._warnings = warnings

    def exception(self, msg: object, *args: object, exc_info: Any = True, **wishes: Any) -> None:
        """Log an error as `logging.Logger.exception` does; malformed HTTP is limited in rate."""
        if isinstance(exc_info, HttpProcessingError):
            self._warnings.log("gateway, malformed HTTP", repr(exc_info)[:200])
        else:
            super().exception(msg, *args, exc_info=exc_info, **wishes)


class Connections:
    """Accepts connections at a free port of loopback, and hands them to a server. Call from its event loop.

    Args:
        most: connections at once. Beyond it the oldest that has brought no valid request is closed; where all have,
            others wait to be accepted.
    """

    def __init__(self, server: web.Server, most: int, warnings: RateLimitedWarnings) -> None:
        self._server, self._most, self._warnings = server, most, warnings
        self._trusted: set[object] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._opening: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(each) for each in (self._accept(), self._close_silent())]

    def trust(self, connection: object) -> None:
        """Keep a connection, `request.protocol` of a valid request, for as long as its client does."""
        self._trusted.add(connection)

    async def close(self) -> None:
        """Accept no more. Those that are open stay so."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._opening, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if len(self._server.connections) + len(self._opening) >= self._most:
                self._warnings.log(
                    "gateway, connections",
                    f"{self._most} are open: the oldest that has brought no valid request is closed; without one the "
                    "next ones wait",
                )
                there = (each for each in self._server.connections if each not in self._trusted and each.transport)
                if (oldest := next(there, None)) is not None:
                    oldest.force_close()
                await asyncio.sleep(_RETRY_S if oldest is None and not self._opening else 0)
                continue
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is left, or the client has gone away
                self._warnings.log("gateway, a connection is not accepted", str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            opening = loop.create_task(self._open(accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(self._server, accepted)

    async def _close_silent(self) -> None:
        ages: dict[Any, int] = {}
        while True:
            await asyncio.sleep(_TICK_S)
            there = self._server.connections
            self._trusted.intersection_update(there)
            ages = {each: ages.get(each, 0) + 1 for each in there if each not in self._trusted}
            for connection, age in ages.items():
                if age >= _SILENT_TICKS:
                    connection.force_close()
