"""SGLang engine: episodes on one or several SGLang servers, over HTTP.

Invariant: a server gets traffic only between a handshake, which gives it the newest weights, and the first sign that it
is gone; and a completion ends exactly once, with every token that any server has streamed for it. A completion whose
server dies is continued from those tokens on another server, or on the same one after its restart.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from impala_llm.engines.base import EngineError, EngineStats, Generation, SamplingParams, WeightSource, check_request
from impala_llm.engines.sglang.client import ServerLost, SGLangClient, open_http
from impala_llm.engines.sglang.external_server import Server
from impala_llm.engines.sglang.replica import Replica, check_fit
from impala_llm.engines.sglang.replica_weights import ReplicaWeights, WeightsSource
from impala_llm.engines.sglang.response import Continuation
from impala_llm.engines.sglang.weight_update import IN_FLIGHT, InFlight, UpdateTimes

MAX_STARTS = 5
"""Attempts to restart a server before it is given up; the first start has one attempt."""
STREAM_INTERVAL = 16
"""Tokens in one piece of a stream: at most so many of each completion are lost with a server."""
_MAX_LOSSES = 4
"""Number of times in a row that a completion may lose its server without a new token."""
ABORT_GRACE_S = 2.0
"""Seconds that a server has for ending an aborted completion itself."""


class SGLangEngine:
    """Engine (see `impala_llm.engines.base.Engine`) on SGLang servers. All methods are called from one asyncio loop."""

    def __init__(
        self,
        servers: Sequence[Server] | Callable[[], Awaitable[Sequence[Server]]],
        *,
        vocab_size: int,
        max_length: int,
        version: int = 0,
        in_flight: InFlight = "recompute_kv",
        weights: WeightsSource | None = None,
        request_timeout_s: float = 600.0,
        is_fed: bool = False,
    ) -> None:
        """
        Args:
            servers: the engine owns them from now on: it starts, restarts and closes them. Or a function that finds
                them at `start`.
            vocab_size: of the model; an id beyond it would kill a server.
            max_length: tokens of a session at most, completions included.
            version: policy version of the weights that the servers start with.
            in_flight: policy for completions under way when weights change; see docs/engines.md.
            weights: source of the newest weights for a started or restarted server. Without it, they come from the
                directory of the last `load_weights`, which must then not change until the next.
            request_timeout_s: deadline of one completion, waiting and restarts of servers included.
            is_fed: the learner sends new weights to the servers: see `adopt`. Not with in_flight="drain".

        Raises:
            EngineError: no servers, an unknown policy, or a limit that is not positive.
        """
        if in_flight not in IN_FLIGHT:
            raise EngineError(f"in_flight is {in_flight!r}: it must be one of {', '.join(IN_FLIGHT)}")
        for name, value in (
            ("vocab_size", vocab_size),
            ("max_length", max_length),
            ("request_timeout_s", request_timeout_s),
        ):
            if value <= 0:
                raise EngineError(f"{name} is {value}: it must be > 0")
        if is_fed and in_flight == "drain":
            raise EngineError("in_flight is 'drain': a learner that sends weights does not wait for completions")
        self.version = version
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.weights = ReplicaWeights(in_flight, is_fed, weights, lambda: self._changed.wait())
        self._request_timeout_s = request_timeout_s
        self._replica_of: dict[str, Replica] = {}
        self.completions: dict[str, Continuation] = {}
        """Completions under way, by session."""
        self._changed = asyncio.Event()
        self._servers = servers
        self._is_fed = is_fed
        self.replicas: list[Replica] = []
        """Servers, once they are known."""
        if not callable(servers):
            self._take(servers)
        self._supervision: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._stats = EngineStats()
        self._busy_since = 0.0
        self._closed = False
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Bring up all servers and give them the newest weights.

        Raises:
            EngineError: a server did not come up, or is not set up as this engine needs it. The engine is closed then.
        """
        if callable(self._servers):
            self._take(await self._servers())
        self._http = open_http()
        self._supervision = [asyncio.create_task(replica.keep()) for replica in self.replicas]
        try:
            while not all(replica.version is not None for replica in self.replicas):
                for replica in self.replicas:
                    if replica.failure is not None:
                        raise replica.failure
                await self._changed.wait()
        except BaseException:
            await self.close()
            raise

    @property
    def failure(self) -> EngineError | None:
        """Reason why no completion is possible any more: every server was given up. None before."""
        failures = [replica.failure for replica in self.replicas]
        return failures[0] if failures and all(failures) else None

    @property
    def last_update(self) -> UpdateTimes | None:
        """Times of the latest successful `load_weights`; None before."""
        return self.weights.last_update

    @property
    def restarts(self) -> int:
        """Number of times that a server was lost and came back."""
        return sum(replica.restarts for replica in self.replicas)

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Continue a history, on the server that has its prefix. Waits while no server has the weights.

        Where less than `max_new_tokens` fit into `max_length` the completion ends early, with reason "length". The seed
        of `params` is not used: servers have their own.

        Raises:
            EngineError: a request that cannot be answered (an id outside of the vocabulary, no room), a second one of a
                session that has one, no completion before the deadline, one that cannot be true, or no server left.
        """
        self._check_open()
        if session_id in self.completions:
            raise EngineError(f"session {session_id!r} has a running request: await it or abort it first")
        tokens = check_request(prompt, params, self.vocab_size, self.max_length)
        limit = min(params.max_new_tokens, self.max_length - len(tokens))
        completion = self.completions[session_id] = Continuation(session_id, tokens, params, limit, self.vocab_size)
        try:
            async with asyncio.timeout(self._request_timeout_s) as completion.timer:
                await self._complete(completion)
        except TimeoutError:
            if not completion.settle():
                raise EngineError(
                    f"session {session_id!r}: no whole completion within {self._request_timeout_s:g} s"
                    f" ({len(completion.tokens)} of {limit} tokens): raise request_timeout_s, or see why servers hang"
                ) from None
        finally:
            del self.completions[session_id]
            self._notify()
        return completion.result()

    def release(self, session_id: str) -> None:
        """Forget the server of a session; a running completion is aborted. Unknown ids are ignored."""
        self.abort(session_id)
        self._leave_replica(session_id)

    def abort(self, session_id: str | None = None) -> None:
        """End one session's completion, or all: callers get the tokens so far, with reason "abort"."""
        for name in list(self.completions) if session_id is None else [session_id]:
            completion = self.completions.get(name)
            if completion is None or completion.aborted:
                continue
            completion.aborted = True
            grace = 0.0
            if completion.rid:
                client = self._replica_of[name].client
                assert client is not None
                self._run_in_background(client.abort(completion.rid))
                grace = ABORT_GRACE_S
            if completion.timer is not None and not completion.timer.expired():
                completion.timer.reschedule(asyncio.get_running_loop().time() + grace)

    async def load_weights(self, directory: Path, version: int) -> None:
        """Load the weights of a Hugging Face directory into all servers; see `in_flight` for completions under way.

        A server that is down gets them when it is back. Where all are down, this waits for the first.

        Raises:
            EngineError: a version below the present one; a directory that cannot be read, or that a server refuses. The
                old weights stay in use there, and completions continue.
            ModelRefused: the directory is of another model than the servers have.
        """
        self._check_open()
        if version < self.version:
            raise EngineError(
                f"version {version} is older than the engine's {self.version}: versions never decrease;"
                " after a restart of the learner, resume it from its checkpoint"
            )
        directory = Path(directory).absolute()
        self.weights.check_layout(directory)
        while True:
            changed = self._changed
            async with self.weights.lock:
                serving = [each for each in self.replicas if each.version is not None]
                if serving:
                    await self._load(serving, directory, version)
                    if any(replica.version is not None for replica in serving):
                        return
            if self.failure is not None:
                raise self.failure
            await changed.wait()
            self._check_open()

    @property
    def fed(self) -> dict[int, str]:
        """Servers that the learner may send weights to: opening -> URL; see `pipeline.transport.messages.Engines`."""
        if not self._is_fed:
            return {}
        return {replica.opening: replica.server.url for replica in self.replicas if replica.version is not None}

    async def adopt(self, version: int) -> bool:
        """Adopt a version that the learner has sent to the servers. False where one lacks it: then `load_weights`."""
        self._check_open()
        async with self.weights.lock:
            behind = [replica for replica in self.replicas if replica.version is not None and replica.version < version]
            labels = await asyncio.gather(*(self._label(replica) for replica in behind))
            for replica, label in zip(behind, labels, strict=True):
                if label is not None and label >= version and replica.version is not None:
                    replica.version = label
            self._set_version()
            self._notify()
            return self.version >= version

    async def reclaim(self, source: WeightSource) -> None:
        """Load a version into all servers, whatever their labels: their learner has died, perhaps during a transfer.

        Raises:
            EngineError, ModelRefused: see `load_weights`.
        """
        self._check_open()
        directory = Path(source.path).absolute()
        self.weights.check_layout(directory)
        async with self.weights.lock:
            serving = [each for each in self.replicas if each.version is not None]
            await self._load(serving, directory, source.version, anew=True)

    async def _label(self, replica: Replica) -> int | None:
        assert replica.client is not None
        try:
            return await replica.client.weight_version()
        except ServerLost as error:
            replica.suspect(error)
        except EngineError:
            pass
        return None

    async def load_shared(self, source: WeightSource) -> None:
        """Load the weights of the source's directory; see `load_weights`."""
        await self.load_weights(source.path, source.version)

    def stats(self) -> EngineStats:
        """Return counters and current load. Busy is the time in which a server worked on at least one completion."""
        running = sum(replica.running for replica in self.replicas)
        busy = self._stats.busy_seconds + (time.perf_counter() - self._busy_since if running else 0.0)
        times = self.last_update or UpdateTimes(0.0, 0.0)
        return replace(
            self._stats,
            busy_seconds=busy,
            running=running,
            waiting=len(self.completions) - running,
            pause_seconds=times.pause_s,
            transfer_seconds=times.transfer_s,
            is_up=any(replica.version is not None for replica in self.replicas),
            restarts=self.restarts,
        )

    async def close(self) -> None:
        """Abort all completions, end the servers that are ours, and refuse further requests."""
        self._closed = True
        self.abort()
        self._notify()
        while self.completions:
            await self._changed.wait()
        for task in self._supervision:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=ABORT_GRACE_S)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._supervision, *self._background, return_exceptions=True)
        await asyncio.gather(*(replica.server.close() for replica in self.replicas))
        if self._http is not None:
            await self._http.close()

    # Completions

    async def _complete(self, completion: Continuation) -> None:
        losses = 0
        while not completion.settle():
            replica = await self._acquire(completion.session_id)
            before = len(completion.tokens)
            try:
                await self._stream(replica, completion)
            except ServerLost as error:
                replica.suspect(error)
                losses = losses + 1 if len(completion.tokens) == before else 1
                if losses >= _MAX_LOSSES:
                    raise EngineError(
                        f"session {completion.session_id!r} lost its server {losses} times in a row: {error}"
                    ) from error

    async def _acquire(self, session_id: str) -> Replica:
        """Wait for the session's server to be open; a new session gets the least loaded one."""
        while True:
            self._check_open()
            changed = self._changed
            replica = self._replica_of.get(session_id)
            if replica is None or replica.version is None:
                serving = [each for each in self.replicas if each.version is not None]
                if serving:
                    self._leave_replica(session_id)
                    replica = min(serving, key=lambda each: (not each.is_open, each.sessions, each.running))
                    self._replica_of[session_id] = replica
                    replica.sessions += 1
            if replica is not None and replica.is_open:
                return replica
            if self.failure is not None:
                raise self.failure
            await changed.wait()

    async def _stream(self, replica: Replica, completion: Continuation) -> None:
        assert replica.client is not None and replica.version is not None
        request = completion.request(uuid.uuid4().hex, replica.version, STREAM_INTERVAL)
        if not any(other.running for other in self.replicas):
            self._busy_since = time.perf_counter()
        replica.running += 1
        before = len(completion.tokens)
        try:
            async with contextlib.aclosing(replica.client.generate(request)) as pieces:
                async for piece in pieces:
                    completion.receive(piece)
        finally:
            if not completion.request_ended and not replica.suspected.is_set():
                self._run_in_background(replica.client.abort(completion.rid))
            completion.rid = ""
            replica.running -= 1
            if not any(other.running for other in self.replicas):
                self._stats.busy_seconds += time.perf_counter() - self._busy_since
            self._stats.decode_tokens += len(completion.tokens) - before
            self._stats.prefill_tokens += completion.prompt_tokens - completion.cached_tokens
            self._notify()

    # Servers

    async def _handshake(self, replica: Replica) -> None:
        """Give a new server the newest weights, then traffic."""
        assert self._http is not None
        client = SGLangClient(self._http, replica.server.url, replica.server.key)
        info = await client.info()
        check_fit(client.url, info, self.max_length, self.weights.in_flight)
        self.weights.learn_layout(info.model_path)
        if not self._is_fed:
            await client.resume()  # a client that died may have left it paused
        async with self.weights.lock:
            version = await self.weights.give_newest(client, self.version)
            replica.open(client, version)
            self._set_version()
        self._notify()

    async def _load(self, serving: Sequence[Replica], directory: Path, version: int, anew: bool = False) -> None:
        try:
            await self.weights.load(serving, directory, version, anew)
        finally:
            self._set_version()
            self._notify()

    def _set_version(self) -> None:
        versions = [replica.version for replica in self.replicas if replica.version is not None]
        if versions:
            self.version = min(versions)

    # Helpers

    def _take(self, servers: Sequence[Server]) -> None:
        if not servers:
            raise EngineError("servers is empty: at least one is needed")
        self.replicas = [
            Replica(server, self._handshake, self._notify, self.weights.lock, MAX_STARTS, self._is_fed)
            for server in servers
        ]

    def _leave_replica(self, session_id: str) -> None:
        replica = self._replica_of.pop(session_id, None)
        if replica is not None:
            replica.sessions -= 1

    def _notify(self) -> None:
        """Wake all tasks that wait for a change in servers or completions."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._http is None:
            raise EngineError("the engine was not started: await start() first")

    def _run_in_background(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a call without waiting for it; a lost server is ignored."""

        async def run() -> None:
            with contextlib.suppress(ServerLost, EngineError):
                await call

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
