"""Weights to other hosts over an encrypted connection: both ends, with their sockets.

Invariant: sockets, authenticator and context of an end are closed when its context manager is left.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import ActorKeys, LearnerKeys
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator
from impala_llm.pipeline.weights.relay_client import WeightRelay
from impala_llm.pipeline.weights.relay_messages import MAX_FRAME_BYTES
from impala_llm.pipeline.weights.relay_server import WeightServer

_QUEUE = 8
"""Maximum of messages that wait for a peer, each of which may hold a chunk of weights: twice as many as a relay asks
for at a time."""


@contextlib.contextmanager
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
        socket = sockets.router(context, endpoint, MAX_FRAME_BYTES, authenticator, _QUEUE)
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


@contextlib.contextmanager
def relay_weights(board: Path, endpoint: str, keys: ActorKeys | None) -> Iterator[WeightRelay]:
    """Fetch the weights that are served at an endpoint to this host's board while entered.

    Args:
        board: directory of this host's board.
        endpoint: of the learner's weight server.
        keys: of an actor; None: clear text, on this host only.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    identity = f"relay#{secrets.randbits(63):016x}".encode()
    relay = WeightRelay(board, lambda: sockets.dealer(context, endpoint, identity, MAX_FRAME_BYTES, keys, _QUEUE))
    relay.start()
    try:
        yield relay
    finally:
        relay.close()
        context.destroy(linger=0)
