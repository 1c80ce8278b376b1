"""A peer of a receiver that says whatever a test wants, by a socket of its own."""

from collections.abc import Iterable

import zmq

from impala_llm.pipeline import sockets, wire
from impala_llm.pipeline.receiver import Receiver


class Peer:
    """Introduced as an actor, unless told otherwise. arena: of its records; they come as frames where it has no name.
    Leave it with `close`."""

    def __init__(
        self,
        receiver: Receiver,
        actor_id: str = "peer",
        incarnation: int = 1,
        held: Iterable[int] = (),
        first_sequence: int = 0,
        introduced: bool = True,
        arena: str = "",
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = f"{actor_id}#{incarnation:016x}".encode()
        self.socket = sockets.dealer(self.context, receiver.endpoint, identity, wire.MAX_MESSAGE_BYTES)
        if introduced:
            self.say(wire.Hello(actor_id, incarnation, tuple(held), arena, first_sequence))

    def say(self, message: wire.Message, *frames: bytes) -> None:
        self.socket.send_multipart([wire.encode(message), *frames])

    def request(self, want: int) -> None:
        self.say(wire.TicketRequest(want))

    def granted(self) -> wire.Grant:
        """The next grant."""
        grant = self.hear_until(wire.Grant)
        assert isinstance(grant, wire.Grant)
        return grant

    def hear(self, timeout_s: float = 20.0) -> wire.Message:
        """The next message of the learner."""
        assert self.socket.poll(int(1000 * timeout_s)), "nothing has come"
        return wire.decode(self.socket.recv())

    def hear_until(self, kind: type[wire.Message]) -> wire.Message:
        """The next message of this kind; others are passed over."""
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
