"""Replica: one SGLang server of the engine, which is started, given traffic, watched, restarted, given up.

Invariant: `version` is set exactly while the server has that version's weights and may get traffic. Only a handshake
sets it; the death of the server, a broken connection to a dead one, or weights that it was not given clear it.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from impala_llm.engines.base import EngineError, ServerUnfit
from impala_llm.engines.sglang.client import ServerInfo, ServerLost, SGLangClient
from impala_llm.engines.sglang.external_server import Server, ServerAbsent
from impala_llm.engines.sglang.weight_update import InFlight

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
_PROBES = 3
_PROBE_PAUSE_S = 0.3
_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0


class Replica:
    """A server, and whether it may have traffic."""

    def __init__(
        self,
        server: Server,
        handshake: Callable[["Replica"], Awaitable[None]],
        notify: Callable[[], None],
        updating: asyncio.Lock,
        max_starts: int,
        is_fed: bool = False,
    ) -> None:
        """
        Args:
            handshake: gives a new server the newest weights, and opens it.
            notify: called after every change.
            updating: lock held while weights change.
            max_starts: attempts to restart the server before it is given up; the first start has one attempt.
            is_fed: the learner sends it weights, so that it may have newer ones than `version`.
        """
        self.server = server
        self.opening = 0
        """Random number that changes whenever this process gives the server weights."""
        self.restarts = 0
        """Number of times that the server was lost and came back."""
        self.client: SGLangClient | None = None
        self.version: int | None = None
        """Version of its weights; None while it gets no traffic."""
        self.failure: EngineError | None = None
        self.was_up = False
        """Whether it has had traffic, so that its settings are known to work."""
        self.running = 0
        self.sessions = 0
        self.is_draining = False
        self.suspected = asyncio.Event()
        """Set where a connection to it broke."""
        self._suspicion = ""
        self._handshake = handshake
        self._notify = notify
        self._updating = updating
        self._max_starts = max_starts
        self._is_fed = is_fed

    @property
    def is_open(self) -> bool:
        """Whether it takes requests now."""
        return self.version is not None and not self.is_draining and not self.suspected.is_set()

    def suspect(self, error: ServerLost) -> None:
        """Note that a connection to it broke: it gets no requests until it is known to be well."""
        if not self.suspected.is_set():
            self._suspicion = str(error)
            self.suspected.set()

    def open(self, client: SGLangClient, version: int) -> None:
        """Give it traffic: it has the weights of this version."""
        self.client = client
        self.given(version)
        self.suspected.clear()

    def given(self, version: int) -> None:
        """Note that this process has given it a version."""
        self.version = version
        self.opening = secrets.randbits(62)

    async def keep(self) -> None:
        """Keep a server in traffic until it has to be given up."""
        try:
            self.failure = await self._restart_for_ever()
        except Exception as error:  # no task awaits a keeper: those that wait for its server must learn of it
            _log.exception("the keeper of an SGLang server failed")
            self.failure = EngineError(f"an SGLang server was given up: {error!r}")
            self.version = None
        self._notify()

    async def _restart_for_ever(self) -> EngineError:
        """Bring a server up, give it weights and traffic, again whenever it dies. Returns why it was given up:
        ServerUnfit where no further attempt can do better."""
        failures = 0
        while True:
            try:
                await self.server.start()
                await self._handshake(self)
            except Exception as error:  # the source of weights may raise any error; the actor must learn of it
                failures += 1
                allowed = self._max_starts if self.was_up else 1
                _log.warning("an SGLang server did not come up, attempt %d of %d: %s", failures, allowed, error)
                await self.server.close()
                if isinstance(error, ServerUnfit | ServerAbsent) or failures >= allowed:
                    kind = ServerUnfit if isinstance(error, ServerUnfit) else EngineError
                    said = f"{failures} of {allowed} attempts failed, the last: {error}"
                    return kind(f"an SGLang server was given up: {said}")
                await asyncio.sleep(min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _MAX_BACKOFF_S))
                continue
            failures, self.was_up = 0, True
            reason = await self._wait_lost()
            self.version = None
            self.restarts += 1
            self._notify()
            _log.warning("%s is lost, its completions go on elsewhere: %s", self.server.url, reason)
            await self.server.close()

    async def _wait_lost(self) -> object:
        """Wait until a server with traffic is lost. Returns the reason."""
        dead = asyncio.create_task(self.server.wait_dead())
        try:
            while True:
                suspected = asyncio.create_task(self.suspected.wait())
                await asyncio.wait([dead, suspected], return_when=asyncio.FIRST_COMPLETED)
                suspected.cancel()
                if dead.done():
                    return dead.result()
                if not await self._is_well(dead):
                    return dead.result() if dead.done() else self._suspicion
                self.suspected.clear()
                self._notify()
        finally:
            dead.cancel()

    async def _is_well(self, dead: asyncio.Task[str]) -> bool:
        """Return whether a server whose connection broke still answers, with the weights it was given."""
        assert self.client is not None
        for _ in range(_PROBES):
            async with self._updating:
                if self.version is None:  # it was not given the weights that the others have
                    return False
                try:
                    async with asyncio.timeout(_PROBE_TIMEOUT_S):
                        found = await self.client.weight_version()
                        return found == self.version or (self._is_fed and (found or 0) >= self.version)
                except (EngineError, ServerLost, TimeoutError):
                    pass
            done, _ = await asyncio.wait([dead], timeout=_PROBE_PAUSE_S)
            if done:
                return False
        return False


def check_fit(url: str, info: ServerInfo, max_length: int, in_flight: InFlight) -> None:
    """Check the settings of a server. Raises ServerUnfit, which names the flag, where the engine cannot use it."""
    if not info.incremental_streaming:
        raise ServerUnfit(f"{url} streams whole completions: start it with --incremental-streaming-output")
    if info.radix_cache and in_flight == "keep_kv":
        raise ServerUnfit(
            f"{url} has a prefix cache, which would serve keys and values of old weights as new under"
            " in_flight=keep_kv: start it with --disable-radix-cache, or set in_flight to recompute_kv or drain"
        )
    if info.max_prompt_length < max_length - 1:
        raise ServerUnfit(
            f"{url} takes prompts of {info.max_prompt_length} tokens, but max_length is {max_length}:"
            " lower engine.max_length, or raise --context-length and --max-total-tokens of the server"
        )
