"""Weight server: serves the learner's weight board to the relays of other hosts. The client is relay_client.py.

Invariant: each chunk belongs to the version that was asked for, since it is read under a lease. Malformed requests, and
requests for versions that were overwritten, get an error reply or a log line and do not end the server.

The version that a relay fetches stays leased while the relay asks for more chunks, so that a learner faster than the
network does not overwrite it each time. The publisher needs two slots, so at most `num_slots - 2` versions are leased.
If no more can be leased, a relay gets a version that is leased for another relay, if that is newer than its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import LearnerKeys
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator
from impala_llm.pipeline.shm import copy_kernels
from impala_llm.pipeline.weights.board import WeightLease, WeightReader
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
    WeightsChunk,
    decode_request,
    encode,
)
from impala_llm.pipeline.weights.relay_thread import RelayThread
from impala_llm.pipeline.weights.slots import WEIGHTS_FILE, WeightsError
from impala_llm.processes.limited_warnings import RateLimitedWarnings

_POLL_MS = 100
_IDLE_S = 60.0
"""Seconds without a request after which a relay counts as gone."""


@contextmanager
def serve_weights(board: Path, endpoint: str, keys: LearnerKeys | None) -> Iterator[WeightServer]:
    """Serve a learner's board at a tcp endpoint while entered.

    Args:
        board: directory of the board.
        endpoint: to listen at, see `sockets.router`.
        keys: of the learner; None: clear text, on this host only.

    Raises:
        ValueError, zmq.ZMQError: see `sockets.router`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = ZapAuthenticator(context, keys) if keys is not None else None
    try:
        socket = sockets.router(context, endpoint, MAX_FRAME_BYTES, authenticator, QUEUE_LENGTH)
        server = WeightServer(board, socket)
        server.start()
        try:
            yield server
        finally:
            server.close()
    finally:
        if authenticator is not None:
            authenticator.close()
        context.destroy(linger=0)


@dataclass
class _Held:
    """A leased version.

    Attributes:
        relays: time of the last request of each relay that fetches it, by routing id.
    """

    lease: WeightLease
    stack: ExitStack
    relays: dict[bytes, float]


class WeightServer(RelayThread):
    """Answers relays, in its thread.

    Args:
        directory: of the board.
        socket: a ROUTER, bound, with `relay_messages.MAX_FRAME_BYTES` as message limit and a short queue (each waiting
            message may be a chunk). The server owns it from now on.
        monotonic: source of time, in seconds.
    """

    def __init__(
        self, directory: Path, socket: zmq.Socket[bytes], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__("weight server")
        self._reader = WeightReader(directory)
        self._socket = socket
        self._monotonic = monotonic
        self._held: dict[int, _Held] = {}
        self._warnings = RateLimitedWarnings()

    def _work(self) -> None:
        if self._socket.poll(_POLL_MS):
            self._answer(self._socket.recv_multipart())
        self._leave_the_silent()

    def _release(self) -> None:
        for held in self._held.values():
            held.stack.close()
        self._held.clear()
        self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise RelayWireError(f"{len(frames)} frames: 2 are expected")
            reply, data = self._reply(frames[0], decode_request(frames[1]))
        except RelayWireError as error:
            self._warnings.log("malformed request for weights", f"from {frames[0][:32]!r}: {error}")
            return
        except (WeightsError, OSError) as error:
            self._warnings.log("weights cannot be served", str(error))
            return
        try:
            self._socket.send_multipart([frames[0], encode(reply), *data], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._warnings.log("a relay does not take its answer", f"{frames[0][:32]!r}: {error}")

    def _reply(
        self, relay: bytes, request: LatestRequest | ManifestRequest | ChunkRequest
    ) -> tuple[Reply, list[bytes]]:
        if isinstance(request, LatestRequest):
            self._leave(relay)  # it has finished its download
            latest = self._reader.latest()
            return Latest(request.request, -1 if latest is None else latest), []
        version, has_room = request.version, len(self._held) < self._reader.num_slots() - 2
        if isinstance(request, ManifestRequest) and not has_room and version not in self._held:
            version = max((held for held in self._held if held > request.have), default=version)
        with ExitStack() as stack:
            held = self._held.get(version)
            if held is None:
                try:
                    lease = stack.enter_context(self._reader.lease(version, timeout_s=0))
                except WeightsError:
                    return Gone(request.request, version), []
                held = _Held(lease, stack, {})
                if has_room:
                    held.stack = stack.pop_all()
                    self._held[version] = held
            held.relays[relay] = self._monotonic()
            if isinstance(request, ChunkRequest):
                return WeightsChunk(request.request), [_read(held.lease, request)]
            return _contents(held.lease, request.request), []

    def _leave(self, relay: bytes) -> None:
        """End the leases that only this relay needs."""
        for version, held in list(self._held.items()):
            held.relays.pop(relay, None)
            if not held.relays:
                self._held.pop(version).stack.close()

    def _leave_the_silent(self) -> None:
        now = self._monotonic()
        for held in list(self._held.values()):
            for relay, last_asked in list(held.relays.items()):
                if now - last_asked >= _IDLE_S:
                    self._leave(relay)


def _contents(lease: WeightLease, request: int) -> Contents:
    files = []
    for path in sorted(lease.path.iterdir()):
        if path.name != WEIGHTS_FILE and path.suffix != ".new" and path.is_file():
            content = path.read_bytes()
            files.append((path.name, len(content), copy_kernels.bytes_checksum(np.frombuffer(content, np.uint8))))
    manifest = lease.manifest
    return Contents(
        request, manifest.version, manifest.num_bytes, manifest.header_checksum, manifest.checksums, tuple(files)
    )


def _read(lease: WeightLease, request: ChunkRequest) -> bytes:
    end = request.offset + request.length
    if request.name == WEIGHTS_FILE:
        data = lease.file_bytes()[request.offset : end].tobytes()
    else:
        path = lease.path / request.name
        if not path.is_file():
            raise RelayWireError(f"version {request.version} has no file {request.name!r}")
        with path.open("rb") as file:
            file.seek(request.offset)
            data = file.read(request.length)
    if len(data) != request.length:
        raise RelayWireError(f"{request.name} ends before byte {end}")
    return data
