"""An actor's channel and a rank's receiver in one process: the receiver on its thread, actors turned by hand."""

from collections.abc import Callable

import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.record import MAX_TOKENS
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.trajectory import Trajectory
from tests.pipeline.peers import Peer
from tests.pipeline.support import VOCAB_SIZE, turns_until

ARENA_BYTES = 1 << 16


class Pair:
    """A receiver and what is needed to make actors for it."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.receivers: list[Receiver] = []
        self.actors: list[ActorChannel] = []
        self.peers: list[Peer] = []

    def receiver(
        self,
        max_staleness: int | None = 1,
        batch_size: int = 4,
        heartbeat_timeout_s: float = 60.0,
        replay_bytes: int = 1 << 20,
        grant_resend_s: float = 60.0,
        ticket_timeout_s: float = 600.0,
        endpoint: str | None = None,
        version: int = 0,
        max_tokens: int = MAX_TOKENS,
        bind: str | None = None,
        published: int | None = None,
        heartbeats_per_s: int = 100,
        max_remembered: int = 1 << 14,
        group_size: int = 1,
    ) -> Receiver:
        """A later one goes on from what an earlier one left."""
        self.ledger = TicketLedger(
            TaskOrder(range(50), group_size, seed=1),
            batch_size,
            max_staleness,
            max_open=64,
            max_attempts=2,
            version=version,
            journal=Journal(self.run_dir.journal_path()),
        )
        receiver = Receiver(
            Endpoints(endpoint or self.run_dir.endpoint(0), bind),
            self.ledger,
            RecordLimits(VOCAB_SIZE, max_tokens),
            self.run_dir,
            TrajectoryStore(self.run_dir.replay_path(), replay_bytes, max_records=64),
            SessionLimits(heartbeat_timeout_s, grant_resend_s, ticket_timeout_s, heartbeats_per_s, max_remembered),
            published,
        )
        receiver.start()
        self.receivers.append(receiver)
        return receiver

    def actor(
        self,
        actor_id: str = "actor-0",
        want: int = 2,
        arena_bytes: int = ARENA_BYTES,
        heartbeat_s: float = 0.05,
        resend_s: float = 60.0,
        learner_timeout_s: float | None = 60.0,
        endpoint: str | None = None,
        is_shared: bool = True,
    ) -> ActorChannel:
        """is_shared: its records lie in shared memory; otherwise they travel."""
        endpoint = endpoint or self.run_dir.endpoint(0)
        run_dir = self.run_dir if is_shared else None
        times = ChannelTimes(heartbeat_s, resend_s, learner_timeout_s)
        actor = ActorChannel(endpoint, actor_id, run_dir, arena_bytes, times=times)
        actor.hello()
        actor.request(want)
        self.actors.append(actor)
        return actor

    def peer(self, receiver: Receiver, arena: str = "") -> Peer:
        """See `Peer`; closed with this pair."""
        self.peers.append(Peer(receiver, arena=arena))
        return self.peers[-1]

    def tickets(self, actor: ActorChannel, count: int) -> list[Ticket]:
        turns_until(lambda: len(actor.held) >= count, actor)
        return actor.held

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        for actor in self.actors:
            actor.close()
        for receiver in self.receivers:
            receiver.close()


class Listener:
    """A learner by hand: hears what actors say, and answers only when told to."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = sockets.router(self.context, "tcp://127.0.0.1:*", messages.MAX_RECORD_BYTES)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.offers: list[tuple[messages.DescriptorBatch, list[bytes]]] = []
        self.others: list[messages.Message] = []

    def listen(self) -> None:
        while self.socket.poll(0):
            self.address, frame, *records = self.socket.recv_multipart()
            message = messages.decode(frame)
            if isinstance(message, messages.DescriptorBatch):
                self.offers.append((message, records))
            else:
                self.others.append(message)

    @property
    def records(self) -> list[bytes]:
        return [record for _, records in self.offers for record in records]

    def say(self, message: messages.Message) -> None:
        self.socket.send_multipart([self.address, messages.encode(message)])

    def has_heard(self, num_offers: int) -> bool:
        self.listen()
        return len(self.offers) >= num_offers


def drain(receiver: Receiver, count: int, *actors: ActorChannel) -> list[Trajectory]:
    arrived: list[Trajectory] = []

    def enough() -> bool:
        arrived.extend(receiver.drain(0.0))
        return len(arrived) >= count

    turns_until(enough, *actors)
    return arrived


def counter(receiver: Receiver, name: str, value: float = 1) -> Callable[[], bool]:
    return lambda: receiver.counters()[name] >= value
