"""Relay: fetches the learner's weights to another host, once for all of its engines. The server is relay_server.py.

Invariant: a relay publishes on its host's board only whole versions of the learner's board, with their checksums
compared, and versions only grow. Server or network may fail at any moment: the download continues at the first missing
chunk; a new relay begins it anew. The server keeps a version while it is being fetched, and those published meanwhile
are skipped; a version that was overwritten nevertheless is dropped.

    loop:  newest?  ->  contents of it  ->  chunks, some of them asked for at a time  ->  verify, publish locally

Over a slow network no chunk may arrive before the answer counts as overdue, or ZeroMQ's heartbeat does. So half as much
is asked for at a time whenever one was overdue, and twice as much once there is ample time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import ActorKeys
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.relay_download import Download, FileChunk
from impala_llm.pipeline.weights.relay_messages import (
    MAX_FRAME_BYTES,
    QUEUE_LENGTH,
    ChunkRequest,
    Contents,
    Gone,
    Latest,
    LatestRequest,
    ManifestRequest,
    RelayWireError,
    Reply,
    Request,
    WeightsChunk,
    decode_reply,
    encode,
)
from impala_llm.pipeline.weights.relay_thread import RelayThread
from impala_llm.pipeline.weights.slots import WeightsError
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_POLL_S = 0.1
_WINDOW = 4
"""Requests for chunks without an answer at a time, at most."""
_LEAST_BYTES = 64 << 10
"""Bytes that are asked for at a time at least."""
_AMPLE = 3
"""Part of the time for an answer in which what is asked for at a time must arrive before it is doubled: 1 / _AMPLE."""


@contextmanager
def relay_weights(board: Path, endpoint: str, keys: ActorKeys | None) -> Iterator[WeightRelay]:
    """Fetch the weights that are served at an endpoint to this host's board while entered.

    Args:
        board: directory of this host's board.
        endpoint: of the learner's weight server.
        keys: of an actor; None: clear text, on this host only.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = f"relay#{secrets.randbits(63):016x}".encode()
    relay = WeightRelay(board, lambda: sockets.dealer(context, endpoint, identity, MAX_FRAME_BYTES, keys, QUEUE_LENGTH))
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
        context.destroy(linger=0)


class WeightRelay(RelayThread):
    """Fetches versions to the board in `directory`, in its thread or by `turn`.

    Args:
        directory: of this host's board.
        make_socket: returns a DEALER socket connected to the learner's weight server; called at first and whenever an
            answer is overdue, in the thread that works.
        chunk_bytes: largest size of a request, `relay_messages.MAX_CHUNK_BYTES` at most.
        answer_s: seconds to wait for an answer before the connection is made anew.
        poll_s: seconds between two requests for the newest version.
        monotonic: source of time, in seconds.
    """

    def __init__(
        self,
        directory: Path,
        make_socket: Callable[[], zmq.Socket[bytes]],
        chunk_bytes: int = 4 << 20,
        answer_s: float = 10.0,
        poll_s: float = 0.5,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("weight relay")
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_socket = make_socket
        self._chunk_bytes = chunk_bytes
        self._bytes_at_once = _WINDOW * chunk_bytes
        """Bytes of chunks to ask for at a time."""
        self._answer_s = answer_s
        self._poll_s = poll_s
        self._monotonic = monotonic
        self._socket: zmq.Socket[bytes] | None = None
        self._next_request = 0
        self._reader = WeightReader(directory)
        self._publisher: WeightPublisher | None = None
        self._files: dict[str, bytes] = {}
        self._warnings = RateLimitedWarnings()
        self._has_answered = False
        self._is_silent = False
        """Whether the log has reported that the server does not answer, and it has not answered since."""

    def turn(self) -> int | None:
        """Ask for the newest version, then fetch and publish it, or one that the server keeps, if it is new here.

        Returns:
            The version that was published; None where there is none newer, or it could not be fetched because the
            server was silent, or the version was overwritten: call again.

        Raises:
            WeightsError: the local board cannot be written.
        """
        latest = self._ask(LatestRequest(self._number()))
        if not isinstance(latest, Latest):
            return None
        here = self._reader.latest()
        if here is not None and latest.version < here:
            self._warnings.log(
                "the learner's weights are older than this host's",
                f"{latest.version} there, {here} here: the learner restarted from an older checkpoint; "
                "restart this host's actors and relay too",
            )
        if latest.version < 0 or (here is not None and latest.version <= here):
            return None
        have = -1 if here is None else here
        contents = self._ask(ManifestRequest(self._number(), latest.version, have))
        if not isinstance(contents, Contents) or not have < contents.version <= latest.version:
            return None
        with closing(Download(self._directory, contents)) as download:
            if not download.is_whole() and not self._fetch(download):
                return None
            try:
                tensors, files = download.tensors(), download.files()
            except WeightsError as error:
                self._warnings.log("weights arrived damaged, they are fetched again", str(error))
                return None
            if self._publisher is None or files != self._files:
                publisher = WeightPublisher(self._directory, files=files)
                publisher.reserve(tensors)
                self._publisher, self._files = publisher, files
            self._publisher.publish(tensors, contents.version)
        return contents.version

    def _work(self) -> None:
        try:
            self.turn()
        except (WeightsError, OSError) as error:
            self._warnings.log("the relay cannot write weights", str(error))
        self._stop.wait(self._poll_s)

    def _fetch(self, download: Download) -> bool:
        """Receive all chunks. Returns False where the version is gone, and after `close`."""
        waiting = download.chunks[::-1]
        asked: dict[int, FileChunk] = {}
        version = download.contents.version
        while waiting or asked:
            size = min(self._chunk_bytes, self._bytes_at_once)
            while waiting and len(asked) < self._bytes_at_once // size:
                chunk = waiting.pop()
                if chunk.length > size:
                    chunk, rest = chunk.split(size)
                    waiting.append(rest)
                number = self._number()
                request = ChunkRequest(number, version, chunk.name, chunk.offset, chunk.length)
                if not self._send(request):
                    waiting.append(chunk)
                    break
                asked[number] = chunk
            waiting_since = self._monotonic()
            received = self._receive(waiting_since + self._answer_s)
            if received is None:
                if self._stop.is_set():
                    return False
                self._reconnect()
                self._bytes_at_once = max(self._bytes_at_once // 2, min(_LEAST_BYTES, self._chunk_bytes))
                waiting.extend(reversed(asked.values()))
                asked.clear()
                continue
            reply, data = received
            if reply.request not in asked:
                continue  # answer to an earlier request
            if isinstance(reply, Gone):
                return False
            chunk = asked.pop(reply.request)
            if isinstance(reply, WeightsChunk) and len(data) == chunk.length:
                download.put(chunk, data)
                all_s = (self._monotonic() - waiting_since) * self._bytes_at_once / chunk.length
                if all_s < self._answer_s / _AMPLE:
                    self._bytes_at_once = min(2 * self._bytes_at_once, _WINDOW * self._chunk_bytes)
                continue
            self._warnings.log("a chunk arrived damaged, it is asked for again", f"{chunk}: {len(data)} bytes")
            waiting.append(chunk)
        return True

    def _ask(self, request: Request) -> Reply | None:
        """Send a request and wait for its answer. Returns None where there is none in time."""
        if self._send(request):
            until = self._monotonic() + self._answer_s
            while (received := self._receive(until)) is not None:
                if received[0].request == request.request:
                    return received[0]
        if not self._stop.is_set():
            self._reconnect()
        return None

    def _send(self, request: Request) -> bool:
        if self._socket is None:
            self._socket = self._make_socket()
        try:
            self._socket.send(encode(request), zmq.NOBLOCK)
        except zmq.Again:
            return False  # not connected, and the queue is full
        return True

    def _receive(self, until: float) -> tuple[Reply, bytes] | None:
        """Receive an answer and its data. Returns None where none has come until then, and after `close`."""
        while not self._stop.is_set() and (left := until - self._monotonic()) > 0:
            if self._socket is None or not self._socket.poll(int(1000 * min(left, _POLL_S)) + 1):
                continue
            frames = self._socket.recv_multipart()
            try:
                reply = decode_reply(frames[0])
                if len(frames) != (2 if isinstance(reply, WeightsChunk) else 1):
                    raise RelayWireError(f"{type(reply).__name__} in {len(frames)} frames")
                self._has_answered, self._is_silent = True, False
                return reply, frames[-1]
            except RelayWireError as error:
                self._warnings.log("malformed answer of the weight server", str(error))
        return None

    def _number(self) -> int:
        self._next_request += 1
        return self._next_request

    def _reconnect(self) -> None:
        self._release()
        if self._is_silent:
            return
        self._is_silent = True
        if self._has_answered:
            bytes_per_s = min(self._chunk_bytes, self._bytes_at_once) / self._answer_s
            cause = (
                f"it did before: the learner is down, or the network is slower than {bytes_per_s:,.0f} bytes/s: then "
                "less is asked for at a time"
            )
        else:
            cause = (
                "if that goes on: are address and port of pipeline.connect those of pipeline.bind on the learner's "
                "host, is learner.num_ranks that of the learner (by it the port is found), and is the key in "
                "pipeline.keys among those authorised there?"
            )
        self._warnings.log("the weight server does not answer", f"connecting anew until it does; {cause}")

    def _release(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
