"""Weight push: sends the learner's weights to SGLang servers while they generate, by one process group per server.

Invariant: `send` returns within its timeout and a few seconds of cleaning up, whatever the servers do. A server that
reads the tensors later than that keeps its old version number. A server that was given up is sent nothing until its
actor offers it under another number; until then the actor loads missing versions from disk. For the protocol between
the learner and this actor see engines/sglang/weight_lock.py.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import torch
from torch import Tensor

from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.client import ServerLost, ServerRefused, SGLangClient, open_http
from impala_llm.engines.sglang.launch_args import HOST
from impala_llm.engines.sglang.process_group import POLL_S, Link, both
from impala_llm.engines.sglang.weight_lock import TRANSFER_TIMEOUT_S, pause_mode
from impala_llm.engines.sglang.weight_update import InFlight

_log = logging.getLogger(__name__)

BUCKET_BYTES = 512 << 20
"""Bytes that a server receives before it copies them into its model: it needs so much more memory."""
MAX_FAILURES = 3
"""Failures in a row at one URL after which no further attempt is made there."""
_CLEANUP_S = 5.0
_OWN_SERVER = re.compile(rf"http://{re.escape(HOST)}:\d+")


class TransferError(Exception):
    """Failure of a transfer to one server."""


@dataclass(frozen=True)
class Sent:
    """Outcome of sending a version. Times are in seconds, of the slowest server.

    Attributes:
        num_received: servers that have it.
        num_dropped: servers that were given up.
        pause_s: time in which completions stood still.
        transfer_s: part of it in which tensors were sent and loaded.
    """

    num_received: int = 0
    num_dropped: int = 0
    pause_s: float = 0.0
    transfer_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Metrics by the names of observability/metrics.py; times only where a server received the version."""
        counts = {"weights/servers_sent": float(self.num_received), "weights/servers_dropped": float(self.num_dropped)}
        times = {"weights/pause_s": self.pause_s, "weights/transfer_s": self.transfer_s}
        return counts | (times if self.num_received else {})


class WeightSender:
    """Sender of weights, a context manager. For one thread; its HTTP calls run on a thread of its own."""

    def __init__(
        self,
        in_flight: InFlight,
        timeout_s: float = TRANSFER_TIMEOUT_S,
        bucket_bytes: int = BUCKET_BYTES,
        urls: Sequence[str] | None = None,
        key: str | None = None,
    ) -> None:
        """
        Args:
            in_flight: policy for completions under way; not "drain".
            timeout_s: seconds for one version to one server, forming the group included.
            bucket_bytes: sent in one call.
            urls: `engine.urls`, the servers, or routers in front of them, that are sent weights; None: those that
                actors start on this host.
            key: API key of all servers.
        """
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._configured = None if urls is None else [url.rstrip("/") for url in urls]
        self._known = set(self._configured or ())
        self._strange: set[str] = set()
        self._key = key
        self._links: dict[int, Link] = {}
        self._given_up: set[int] = set()
        self._failures: Counter[str] = Counter()
        self._hanging: list[Link] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-sender", daemon=True)

    def __enter__(self) -> "WeightSender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._forget(list(self._links)), self._loop).result()
        deadline = time.monotonic() + _CLEANUP_S
        while any(link.hangs and not link.is_nccl for link in self._hanging) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(
        self,
        servers: Mapping[int, str],
        tensors: Mapping[str, Tensor],
        version: int,
        device: torch.device | None = None,
    ) -> Sent:
        """Send a version to all servers at the same time; those that do not take it in time are given up.

        Args:
            servers: opening -> URL, see `pipeline.transport.messages.Engines`. Groups of others are left. Nothing is
                sent to a URL that was not configured.
            tensors: name -> tensor, all on one device; they must not change until this returns.
            device: of the process groups, to which a bucket at a time is copied; None: the tensors'.
        """
        coroutine = self._send(dict(servers), tensors, version, device)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _send(
        self, servers: dict[int, str], tensors: Mapping[str, Tensor], version: int, device: torch.device | None
    ) -> Sent:
        await self._forget([opening for opening in self._links if opening not in servers])
        self._given_up &= servers.keys()
        async with open_http() as http:
            strange = await self._find_strange(http, set(servers.values()))
        servers = {opening: url for opening, url in servers.items() if url not in strange}
        wanted = {
            opening: url
            for opening, url in servers.items()
            if opening not in self._given_up and self._failures[url] < MAX_FAILURES
        }
        if not wanted:
            return Sent()
        buckets = list(_buckets(tensors, self._bucket_bytes))
        device = device or next(iter(tensors.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # until the update's kernels have written them
        async with open_http() as http:
            times = await asyncio.gather(
                *(self._send_one(http, opening, url, buckets, device, version) for opening, url in wanted.items())
            )
        done = [time_ for time_ in times if time_ is not None]
        return Sent(
            len(done),
            len(times) - len(done),
            max((pause_s for pause_s, _ in done), default=0.0),
            max((transfer_s for _, transfer_s in done), default=0.0),
        )

    async def _find_strange(self, http: aiohttp.ClientSession, urls: set[str]) -> set[str]:
        """Find the URLs that were not configured."""
        if self._configured is None:
            strange = {url for url in urls if not _OWN_SERVER.fullmatch(url)}
        else:
            if urls - self._known - self._strange:  # workers of a router, perhaps
                workers = await asyncio.gather(*(SGLangClient(http, url).workers() for url in self._configured))
                self._known.update(*workers)
            strange = urls - self._known
        for url in strange - self._strange:
            _log.warning("an actor offers %r as a server: it is not among engine.urls, so nothing is sent there", url)
        self._strange = strange
        return strange

    async def _send_one(
        self,
        http: aiohttp.ClientSession,
        opening: int,
        url: str,
        buckets: Sequence["_Bucket"],
        device: torch.device,
        version: int,
    ) -> tuple[float, float] | None:
        """Seconds of pause and transfer; None where the server was given up."""
        client = SGLangClient(http, url, self._key)
        turn = _Turn(time.monotonic() + self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                if opening not in self._links:
                    # The server may still have a group of a learner that was killed.
                    self._links[opening] = Link(f"impala-{opening:x}-{secrets.token_hex(4)}", url)
                    await self._links[opening].meet(client, device, self._timeout_s)
                times = await self._transfer(client, self._links[opening], buckets, device, version, turn)
        except (ServerLost, EngineError, TransferError, OSError, RuntimeError, TimeoutError) as error:
            why = f"not within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
        else:
            self._failures[url] = 0
            return times
        self._given_up.add(opening)
        self._failures[url] += 1
        _log.warning(
            "%s was not given version %d by the process group, its actor loads it from disk%s: %s",
            url,
            version,
            "" if self._failures[url] < MAX_FAILURES else " from now on",
            why,
        )
        # Outside of the handlers: the error refers to frames that would keep the group, and so its connections.
        await self._break_off(client, opening, turn)
        return None

    # One server

    async def _transfer(
        self,
        client: SGLangClient,
        link: Link,
        buckets: Sequence["_Bucket"],
        device: torch.device,
        version: int,
        turn: "_Turn",
    ) -> tuple[float, float]:
        mode = pause_mode(self._in_flight)
        begin = time.perf_counter()
        turn.is_paused = True
        await client.pause(mode)
        try:
            await client.begin_update()
        except ServerRefused as error:
            turn.is_others = True
            raise TransferError(f"{error}: its actor is loading weights, or a learner has died at it") from error
        turn.has_session = True
        started = time.perf_counter()
        for bucket in buckets:
            turn.is_touched = True
            await both(
                link.broadcast([tensor.to(device) for tensor in bucket.tensors], turn.deadline),
                client.receive_weights(link.name, bucket.described, None, False, self._timeout_s),
            )
        # A call of its own: tensors that a server receives too late, after it was given up, get no label.
        # Completions under way hold slots in the cache after an in-place pause: it cannot be flushed then.
        await client.receive_weights(link.name, [], version, mode == "retract", self._timeout_s)
        turn.is_touched = False
        await client.end_update()
        turn.has_session = False
        ended = time.perf_counter()
        await client.resume()
        return time.perf_counter() - begin, ended - started

    async def _break_off(self, client: SGLangClient, opening: int, turn: "_Turn") -> None:
        """Restore a server's state, and leave its group; with a part of a version it stays paused."""
        link = self._links.pop(opening)
        self._let_go(link)
        with contextlib.suppress(ServerLost, EngineError, TimeoutError):
            async with asyncio.timeout(_CLEANUP_S):
                if turn.is_others:
                    return
                if turn.has_session:
                    await client.end_update()
                if turn.is_paused and not turn.is_touched:
                    await client.resume()
                await client.leave_group(link.name)

    async def _forget(self, openings: Sequence[int]) -> None:
        """Leave the groups of servers that are gone, or of all at the end."""
        links = [self._links.pop(opening) for opening in openings]
        if not links:
            return
        async with open_http() as http:

            async def leave(link: Link) -> None:
                with contextlib.suppress(ServerLost, EngineError, TimeoutError):
                    async with asyncio.timeout(_CLEANUP_S):
                        await SGLangClient(http, link.url, self._key).leave_group(link.name)
                self._let_go(link)

            await asyncio.gather(*(leave(link) for link in links))

    def _let_go(self, link: Link) -> None:
        """Close a group: at once, or after the deadline of broadcasts that hang, since closing would block before."""
        self._hanging = [other for other in self._hanging if other.hangs]
        if link.is_nccl and link.group is not None:
            threading.Thread(target=link.group.abort, daemon=True).start()
        if link.hangs:
            self._hanging.append(link)
        else:
            link.group, link.works = None, []  # broadcasts keep the connections open too


@dataclass
class _Turn:
    """Progress of a transfer, for undoing it.

    Attributes:
        deadline: monotonic time.
        is_others: another process holds the session.
    """

    deadline: float
    is_paused: bool = False
    is_others: bool = False
    has_session: bool = False
    is_touched: bool = False


@dataclass(frozen=True)
class _Bucket:
    tensors: list[Tensor]
    described: list[tuple[str, str, tuple[int, ...]]]
    """(name, torch's name of the dtype, shape) of each."""


def _buckets(tensors: Mapping[str, Tensor], num_bytes: int) -> Iterator[_Bucket]:
    """Divide tensors, in order, into buckets of one tensor or at most `num_bytes` bytes."""
    bucket, size = _Bucket([], []), 0
    for name, tensor in tensors.items():
        if bucket.tensors and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = _Bucket([], []), 0
        bucket.tensors.append(tensor.contiguous())
        bucket.described.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        size += tensor.nbytes
    yield bucket
