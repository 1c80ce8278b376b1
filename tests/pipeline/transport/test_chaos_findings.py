"""What the chaos test, and reading for it, has found: each as few lines as it takes."""

import contextlib
import socket
import threading
from pathlib import Path

import numpy as np

from impala_llm.pipeline.network.sockets import dealer
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.ingest import Offers
from impala_llm.pipeline.transport.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    Descriptor,
    DescriptorBatch,
    Grant,
    Hello,
    Refused,
    TicketRequest,
    decode,
    encode,
)
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits
from tests.pipeline.support import VOCAB_SIZE, turns_until


def rows(*sequences: int) -> np.ndarray:
    return np.array([[sequence, sequence, 0, 10, 0] for sequence in sequences], np.int64)


def make_ledger(path: Path, version: int) -> TicketLedger:
    order = TaskOrder(range(9), seed=1)
    return TicketLedger(order, batch_size=2, max_staleness=2, version=version, journal=Journal(path))


def test_a_ticket_of_a_lost_step_that_was_evicted_then_stays_evicted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = make_ledger(path, version=0)
    first.request("actor", 1)
    [(_, [ticket])] = first.grantable()
    first.received(ticket.ticket_id, "episode")
    first.trained([ticket.ticket_id])  # and killed before version 1 was published
    second = make_ledger(path, version=0)
    assert second.recover([(ticket.ticket_id, "episode", 0)]) == [True]
    second.evicted([ticket.ticket_id])  # and killed again, before version 1 was published
    third = make_ledger(path, version=0)
    third.recover([])
    assert third.lookup(ticket.ticket_id) is None  # it has ended: not to be granted again


def test_what_was_seen_of_an_actor_takes_no_memory_after_the_learner_was_started_again() -> None:
    # A new process of the learner meets an actor whose first 100 records were answered by the last one.
    offers = Offers(reader=None, first_sequence=100)
    for sequence in range(100, 5100):
        offers.add(rows(sequence), [])
        offers.queue.clear()
    assert len(offers._seen) < 100


def test_a_refused_record_that_is_offered_again_is_not_acknowledged(run_dir: RunDirectory) -> None:
    receiver = Receiver(
        Endpoints(run_dir.endpoint()),
        make_ledger(run_dir.journal_path(), version=0),
        RecordLimits(VOCAB_SIZE),
        run_dir,
        TrajectoryStore(run_dir.replay_path(), 1 << 20, max_records=8),
    )
    receiver.start()
    actor = dealer(receiver._actors._context, receiver.endpoint, b"actor#0000000000000001", MAX_MESSAGE_BYTES)

    def answer(*kinds: type) -> object:
        while actor.poll(5000):
            message = decode(actor.recv())
            if isinstance(message, kinds):
                return message
        raise AssertionError(f"no {kinds}")

    try:
        actor.send(encode(Hello("actor", 1, (), "")))
        actor.send(encode(TicketRequest(1)))
        grant = answer(Grant)
        assert isinstance(grant, Grant)
        offer = encode(DescriptorBatch.of([Descriptor(0, grant.tickets[0].ticket_id, 0, 100, 0)]))
        actor.send_multipart([offer, bytes(800)])
        assert isinstance(answer(Ack, Refused), Refused)
        actor.send_multipart([offer, bytes(800)])  # the answer was lost on its way
        assert isinstance(answer(Ack, Refused), Refused)
    finally:
        actor.close(linger=0)
        receiver.close()


class Relay:
    """A socket in front of another, whose stream towards whoever connects can be disturbed."""

    def __init__(self, front: Path, back: Path) -> None:
        self.num_connections = 0
        self._back = back
        self._actor: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(front))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def send_noise(self) -> None:
        assert self._actor is not None
        self._actor.sendall(b"\xff" * 20)  # a frame that is larger than any may be

    def _serve(self) -> None:
        while True:
            self._actor, _ = self._listener.accept()
            rank = socket.socket(socket.AF_UNIX)
            rank.connect(str(self._back))
            self.num_connections += 1
            for source, target in ((self._actor, rank), (rank, self._actor)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_an_actor_connects_again_after_its_stream_was_disturbed(run_dir: RunDirectory) -> None:
    # libzmq does not: after an error of protocol, unlike one of the connection, it gives a connection up for good.
    receiver = Receiver(
        Endpoints(run_dir.endpoint()),
        make_ledger(run_dir.journal_path(), version=0),
        RecordLimits(VOCAB_SIZE),
        run_dir,
        TrajectoryStore(run_dir.replay_path(), 1 << 20, max_records=8),
    )
    receiver.start()
    front = run_dir.path / "relay.sock"
    relay = Relay(front, run_dir.path / "learner-0.sock")
    actor = ActorChannel(f"ipc://{front}", "actor", run_dir, arena_bytes=1 << 16, heartbeat_s=0.05)
    try:
        actor.hello()
        actor.request(1)
        turns_until(lambda: len(actor.held) == 1, actor)
        before = relay.num_connections
        relay.send_noise()
        turns_until(lambda: relay.num_connections > before, actor)
    finally:
        actor.close()
        receiver.close()
