"""Sockets of a receiver: it listens at them, receives the messages of actors, and sends messages to actors.

Invariant: a message never waits for its peer. It is dropped if the peer has left or does not read; senders of important
messages send them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.network.keys import LearnerKeys
from impala_llm.pipeline.network.zap_authenticator import ZapAuthenticator, user_id
from impala_llm.pipeline.transport.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_RECORD_BYTES,
    Message,
    encode,
)

_MAX_FRAMES_A_TURN = 1000

Address = tuple[int, bytes]
"""(index of the receiver's socket, 0 for actors of this host; routing id there)."""


@dataclass(frozen=True)
class Endpoints:
    """Addresses at which a receiver listens.

    Attributes:
        local: `RunDirectory.endpoint(rank)`, or tcp://127.0.0.1:<port or *>.
        remote: tcp endpoint for actors on other hosts.
        keys: of the learner, for `remote`; see sockets.router.
    """

    local: str
    remote: str | None = None
    keys: LearnerKeys | None = None


class ActorSockets:
    """ROUTER sockets to the actors of one rank. For one thread at a time, after `bind`.

    Args:
        endpoints: where to listen.
        run_id: of the run, which all messages carry.
        wakeup: descriptor that ends `wait`, too.
    """

    def __init__(self, endpoints: Endpoints, run_id: int, wakeup: int) -> None:
        self.endpoints = [endpoints.local, *([] if endpoints.remote is None else [endpoints.remote])]
        """The endpoint for this host first; once bound, with the real ports."""
        self._keys = endpoints.keys
        self.run_id = run_id
        self._wakeup = wakeup
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: ZapAuthenticator | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()

    def bind(self) -> None:
        """Open the sockets. After an error `abort` is due.

        Raises:
            zmq.ZMQError: an endpoint is in use.
            ValueError: an endpoint needs keys.
        """
        self._authenticator = ZapAuthenticator(self._context, self._keys) if self._keys is not None else None
        self._sockets.append(sockets.router(self._context, self.endpoints[0], MAX_MESSAGE_BYTES))
        for remote in self.endpoints[1:]:
            self._sockets.append(sockets.router(self._context, remote, MAX_RECORD_BYTES, self._authenticator))
        self.endpoints = [_bound_to(socket) for socket in self._sockets]
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    @property
    def num_refused(self) -> int:
        """Number of connections that were refused, since they had no authorised key."""
        return self._authenticator.refused if self._authenticator is not None else 0

    def wait(self, timeout_s: float) -> set[object]:
        """Wait for a message or the wake-up.

        Returns:
            Those that can be read: sockets, for `receive`, and `wakeup`.
        """
        return {ready for ready, _ in self._poller.poll(math.ceil(1000 * timeout_s))}

    def receive(self, ready: set[object]) -> Iterator[tuple[Address, list[bytes], str | None]]:
        """Receive the messages that are there, up to 1,000 of each socket.

        Args:
            ready: returned by `wait`.

        Yields:
            (address of the sender, frames of the message, name of the sender's key; None on this host).
        """
        for index, socket in enumerate(self._sockets):
            if socket not in ready:
                continue
            for _ in range(_MAX_FRAMES_A_TURN):
                if not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator,arg-type]  # a number
                    break
                frames, key = _receive(socket, from_afar=index > 0)
                yield (index, frames[0]), frames[1:], key

    def send(self, address: Address, message: Message) -> None:
        """Send a message, as `send_frame` does.

        Args:
            address: of the actor.
            message: to encode and send.

        Raises:
            WireError: it cannot be encoded, see `messages.encode`.
        """
        self.send_frame(address, self.encode(message))

    def send_items(self, address: Address, kind: Callable[[tuple[Any, ...]], Message], items: Sequence[object]) -> None:
        """Send items to an address in as many messages of a kind as needed.

        Args:
            address: of the actor.
            kind: makes a message of at most MAX_ITEMS items.
            items: in order.

        Raises:
            WireError: a message cannot be encoded.
        """
        for first in range(0, len(items), MAX_ITEMS):
            self.send(address, kind(tuple(items[first : first + MAX_ITEMS])))

    def encode(self, message: Message) -> bytes:
        """Encode a message once, to send it to several actors by `send_frame`.

        Raises:
            WireError: see `messages.encode`.
        """
        return encode(message, self.run_id)

    def send_frame(self, address: Address, frame: bytes) -> None:
        """Send a frame. It is dropped if the actor has left or does not read.

        Args:
            address: of the actor.
            frame: made by `encode`.
        """
        # ROUTER drops it without an error; all important messages are sent again.
        self._sockets[address[0]].send_multipart([address[1], frame], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; messages that were sent are delivered within a second or dropped, see `join`."""
        for socket in self._sockets:
            socket.close()
        if self._authenticator is not None:
            self._authenticator.close()

    def abort(self) -> None:
        """Close the sockets at once, after an error; messages that were sent may be lost."""
        self.close()
        self._context.destroy(linger=0)

    def join(self) -> None:
        """Wait until the messages that were sent before `close` are delivered or dropped."""
        self._context.term()


def _receive(socket: zmq.Socket[bytes], from_afar: bool) -> tuple[list[bytes], str | None]:
    """Receive a message, which must be there.

    Returns:
        Its frames, and the name of the sender's key; None on this host.
    """
    if not from_afar:
        return socket.recv_multipart(zmq.NOBLOCK), None
    # Without copies: only original frames know their sender.
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    return [frame.bytes for frame in frames], user_id(frames[0])


def _bound_to(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()
