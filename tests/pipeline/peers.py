"""A peer of a receiver that says whatever a test wants, by a socket of its own."""

from collections.abc import Iterable

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.receiver import Receiver


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
        self.socket = sockets.dealer(self.context, receiver.endpoint, identity, messages.MAX_MESSAGE_BYTES)
        if introduced:
            self.say(messages.Hello(actor_id, incarnation, tuple(held), arena, first_sequence))

    def say(self, message: messages.Message, *frames: bytes) -> None:
        self.socket.send_multipart([messages.encode(message), *frames])

    def request(self, want: int) -> None:
        self.say(messages.TicketRequest(want))

    def granted(self) -> messages.Grant:
        """The next grant."""
        grant = self.hear_until(messages.Grant)
        assert isinstance(grant, messages.Grant)
        return grant

    def hear(self, timeout_s: float = 20.0) -> messages.Message:
        """The next message of the learner."""
        assert self.socket.poll(int(1000 * timeout_s)), "nothing has come"
        return messages.decode(self.socket.recv())

    def hear_until(self, kind: type[messages.Message]) -> messages.Message:
        """The next message of this kind; others are passed over."""
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()
