"""Sequences of valid messages against a live receiver: each may be said, and together they make no sense.

An input is the seed of a sequence. Three peers say what follows from it, some of them with an arena; what they were
granted, and what the learner makes of it, goes on from one sequence to the next. Wrong is an error of the receiver's,
also one that ended no more than a session, and a sound actor that is not served.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from impala_llm.pipeline.network import sockets
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.record import EncodedTrajectory, record_bytes
from impala_llm.pipeline.shm.ring import ArenaWriter
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport import messages
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.trajectory import Trajectory
from tests.pipeline.keeping import checksum_of
from tests.system.fuzz.inputs import VOCAB_SIZE, Decoder, Source, changed_record, sample_trajectory

NUM_PEERS = 3
ARENA_BYTES = 1 << 14
MAX_STEPS = 12
MAX_TOKENS = 35
"""Some records are longer."""
CANARY_EVERY = 50
"""Sequences from one sound actor to the next."""
PATIENCE_S = 20.0
INCARNATIONS = (1, 2, 3)
"""Incarnations of a peer; the first one has an arena."""
EVALUATED = range(6)
"""Tasks of an evaluation."""
NUMBERS = [0, 1, 2, 3, 5, 8, 20, 63, 64, 255, 1000, 65535, 65536, 2**31, 2**32, 2**53, 2**62, 2**63 - 1]


class Refusal(Exception):
    """Something of the sequence was turned away."""


class Talker:
    """A peer, under one identity after another. Its records lie in its arena where it says so, else they travel."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], receiver: Receiver, run_dir: RunDirectory, name: str):
        self.context, self.receiver, self.name = context, receiver, name
        self.incarnation = 0
        self.arena = ArenaWriter(run_dir.arena_path(name), ARENA_BYTES, incarnation=1)
        self.laid: list[int] = []
        self.shares = False
        self.granted: list[Ticket] = []
        self.evaluation = messages.EvaluationGrant(0, 0, 0.0, ())
        self.next_sequence = 0
        self.socket: zmq.Socket[bytes] | None = None
        self.connect(1)

    def connect(self, incarnation: int) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
        self.incarnation = incarnation
        identity = f"{self.name}#{incarnation:016x}".encode()
        self.socket = sockets.dealer(self.context, self.receiver.endpoint, identity, messages.MAX_MESSAGE_BYTES)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
        self.arena.close()

    def say(self, message: messages.Message, *frames: bytes) -> None:
        assert self.socket is not None
        self.socket.send_multipart([messages.encode(message), *frames])

    def beat(self, heartbeat: messages.Heartbeat) -> None:
        """Say it, and wait for the answer. As an actor, over a new connection where none comes."""
        self.say(heartbeat)
        if not self.listen(PATIENCE_S / 4):
            self.connect(self.incarnation)
            self.say(heartbeat)
            assert self.listen(PATIENCE_S), "a heartbeat was not answered"

    def listen(self, timeout_s: float = 0.0) -> bool:
        """Read what has come. Returns whether there was anything."""
        assert self.socket is not None
        heard = False
        while self.socket.poll(0 if heard else int(1000 * timeout_s)):
            message = messages.decode(self.socket.recv(zmq.NOBLOCK))
            heard = True
            if isinstance(message, messages.Grant):
                self.granted = [*self.granted, *message.tickets][-100:]
            elif isinstance(message, messages.EvaluationGrant):
                self.evaluation = message
        return heard

    def offer(self, records: list[tuple[int, int, bytes]], spoiled: bool) -> None:
        """records: sequence, ticket_id and bytes. spoiled: with numbers in the rows that are not so."""
        rows, frames = [], []
        for sequence, ticket_id, data in records:
            data = data[: len(data) // 8 * 8] or bytes(88)
            words = words_at(data)
            start = 0
            if self.shares:
                start = self.lay(data)
            else:
                frames.append(data)
            rows.append(messages.Descriptor(sequence, ticket_id, start, len(words), checksum_of(words)))
        if spoiled:
            rows[-1] = rows[-1]._replace(start=NUMBERS[len(rows) % 18], num_words=NUMBERS[-(len(rows) % 18)])
        self.say(messages.DescriptorBatch.of(rows), *frames)

    def lay(self, data: bytes) -> int:
        encoded = EncodedTrajectory(data, words_at(b""), len(data) // 8)
        span = self.arena.write(encoded)
        if span is None:
            while self.laid:
                self.arena.free(self.laid.pop())
            span = self.arena.write(encoded)
            assert span is not None
        self.laid.append(span.start)
        return span.start


def words_at(data: bytes) -> np.ndarray:
    """uint64[n]."""
    return np.frombuffer(data, np.uint64)


class World:
    """A live receiver, its learner, and who talks to it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDirectory.create("fuzz", folder)
        self.ledger = TicketLedger(
            TaskOrder(range(50), group_size=2, seed=1),
            batch_size=4,
            max_staleness=2,
            journal=Journal(self.run_dir.journal_path()),
        )
        arena = TrajectoryStore(self.run_dir.replay_path(), 1 << 18, 64)
        self.receiver = Receiver(
            Endpoints(self.run_dir.endpoint(0)),
            self.ledger,
            RecordLimits(VOCAB_SIZE, MAX_TOKENS),
            self.run_dir,
            arena,
            SessionLimits(grant_resend_s=0.01),
        )
        self.receiver.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.talkers = [
            Talker(self.context, self.receiver, self.run_dir, f"fuzz-{number}") for number in range(NUM_PEERS)
        ]
        self.num_sequences = 0
        self.turned_away = 0.0
        self.errors = Errors()
        logging.getLogger("impala_llm").addHandler(self.errors)

    def play(self, data: bytes) -> None:
        rng = random.Random(data)
        used = set()
        for _ in range(rng.randint(1, MAX_STEPS)):
            talker = rng.choice(self.talkers)
            used.add(talker)
            STEPS[rng.choices(range(len(STEPS)), WEIGHTS)[0]](rng, talker)
            talker.listen()
        for talker in used:
            talker.beat(messages.Heartbeat(tuple({t.ticket_id for t in talker.granted}), {}, 4, 0))
        self.learn(rng)
        self.num_sequences += 1
        if self.num_sequences % CANARY_EVERY == 0:
            self.check_a_sound_actor_is_served()
        counters = self.receiver.counters()
        assert counters["sessions_broken"] == len(self.errors.seen) == 0, self.errors.seen
        names = ("messages_malformed", "trajectories_refused", "trajectories_unwanted", "duplicates", "actors_lost")
        before, self.turned_away = self.turned_away, sum(counters[name] for name in names)
        if self.turned_away > before:
            raise Refusal

    def close(self) -> None:
        for talker in self.talkers:
            talker.close()
        self.context.term()
        self.receiver.close()

    def learn(self, rng: random.Random) -> list[Trajectory]:
        """Drain, and make a step of it, or drop it."""
        arrived = self.receiver.drain(0.0)
        numbers = [t.unroll_id for t in arrived]
        kind = rng.random()
        if kind < 0.3:
            self.receiver.evicted(numbers)
        else:
            self.receiver.trained(numbers)
            self.receiver.announce(self.ledger.version + 1)
        self.evaluate(rng)
        return arrived

    def evaluate(self, rng: random.Random) -> None:
        """Take an evaluation that has ended, and begin another one."""
        if (ended := self.receiver.evaluation()) is not None:
            ids = [result.task_id for result in ended.results]
            assert len(ids) == len(set(ids)) <= ended.num_tasks and set(ids) <= set(EVALUATED)
            assert all(0 <= result.score <= 1 for result in ended.results)
            assert all(ended.version <= result.first_version <= result.last_version for result in ended.results)
        if not self.receiver.is_evaluating:
            self.receiver.begin_evaluation(EVALUATED, 0.0, rng.choice((0.01, 1.0)))

    def check_a_sound_actor_is_served(self) -> None:
        for talker in self.talkers:  # what they hold, under whichever identity, is nobody else's
            for incarnation in INCARNATIONS:
                talker.connect(incarnation)
                talker.say(messages.Goodbye())
                talker.beat(messages.Heartbeat((), {}))
            talker.granted = []
        actor = ActorChannel(self.receiver.endpoint, "sound", self.run_dir, ARENA_BYTES, times=ChannelTimes(0.05))
        actor.hello()
        actor.request(1)
        deadline = time.monotonic() + PATIENCE_S
        rng = random.Random(self.num_sequences)
        sent: Trajectory | None = None
        is_done = False
        while not is_done:
            assert time.monotonic() < deadline, f"a sound actor is not served: {self.receiver.counters()}"
            actor.poll(0.01)
            if sent is None and actor.held:
                while sent is None or sent.num_tokens > MAX_TOKENS or sent.unroll_index or sent.continues:
                    sent = made_for(rng, actor.held[0], self.ledger.version)
                actor.send(sent)
            is_done = sent is not None and sent.episode_id in {t.episode_id for t in self.learn(rng)}
        actor.close()


class Errors(logging.Handler):
    """Handler that keeps all that the program logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


# --- what a peer does: each says something that its message allows


def number(rng: random.Random) -> int:
    return rng.choice(NUMBERS) if rng.random() < 0.3 else rng.randrange(60)


def numbers(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.002:
        return tuple(range(messages.MAX_ITEMS))
    return tuple(number(rng) for _ in range(rng.choice((0, 1, 2, 5, 30))))


def text(rng: random.Random) -> str:
    return rng.choice(("", "a", "actor/idle_share", "x" * 4096, "\0", "é😀", "%s %d", "env/"))


def hello(rng: random.Random, talker: Talker) -> None:
    if rng.random() < 0.3:
        talker.connect(rng.choice(INCARNATIONS))
    talker.shares = rng.random() < 0.5
    name = talker.name if rng.random() < 0.95 else f"fuzz-{rng.randrange(5)}"
    arena = (talker.name if rng.random() < 0.95 else rng.choice(("none", "fuzz-0"))) if talker.shares else ""
    talker.next_sequence = 0 if rng.random() < 0.7 else number(rng)
    talker.say(messages.Hello(name, talker.incarnation, numbers(rng), arena, talker.next_sequence))


def request(rng: random.Random, talker: Talker) -> None:
    talker.say(messages.TicketRequest(min(number(rng), messages.MAX_ITEMS)))


def heartbeat(rng: random.Random, talker: Talker) -> None:
    stats: dict[str, float] = {
        text(rng): rng.choice((0, 1, -1.5, 2**64 - 1, float("nan"), float("inf"))) for _ in range(rng.randrange(3))
    }
    held = tuple(t.ticket_id for t in talker.granted) if rng.random() < 0.5 else numbers(rng)
    talker.say(messages.Heartbeat(held, stats, min(number(rng), messages.MAX_ITEMS), number(rng)))


def fail(rng: random.Random, talker: Talker) -> None:
    ticket = rng.choice(talker.granted).ticket_id if talker.granted and rng.random() < 0.7 else number(rng)
    talker.say(messages.TicketFailed(ticket, text(rng)))


def offer(rng: random.Random, talker: Talker) -> None:
    records = []
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        if talker.granted and rng.random() < 0.8:
            made = made_for(rng, rng.choice(talker.granted), rng.randrange(6))
            ticket_id, data = made.ticket_id, record_bytes(made)
        else:
            ticket_id, data = number(rng), changed_record(Source(rng))
        sequence = talker.next_sequence if rng.random() < 0.8 else number(rng)
        talker.next_sequence = min(max(talker.next_sequence, sequence + 1), 2**63 - 1)
        records.append((sequence, ticket_id, data))
    talker.offer(records, spoiled=rng.random() < 0.05)


def made_for(rng: random.Random, ticket: Ticket, version: int) -> Trajectory:
    made = sample_trajectory(rng, ticket.ticket_id)
    versions = made.versions.copy()
    versions[made.action_mask] = max(ticket.min_version, version)
    unroll = rng.choice((0, 0, 0, 1, 2, 300))
    return dataclasses.replace(
        made,
        versions=versions,
        task_id=ticket.task_id,
        group_id=ticket.group_id,
        episode_id=f"episode {ticket.ticket_id} {rng.randrange(2)}",
        unroll_index=unroll,
        continues=(goes_on := rng.random() < 0.2),
        bootstrap=goes_on,
    )


def engines(rng: random.Random, talker: Talker) -> None:
    count = rng.randrange(4)
    talker.say(messages.Engines(tuple(f"http://{text(rng)}"[:4096] for _ in range(count)), tuple(range(count))))


def evaluated(rng: random.Random, talker: Talker) -> None:
    grant = talker.evaluation
    evaluation_id = grant.evaluation_id if rng.random() < 0.8 else number(rng)
    task_id = rng.choice(grant.task_ids) if grant.task_ids and rng.random() < 0.7 else number(rng)
    if rng.random() < 0.2:
        talker.say(messages.EvaluationFailed(evaluation_id, task_id, text(rng)))
        return
    first = grant.min_version + rng.randrange(3) if rng.random() < 0.8 else number(rng)
    last = max(first, number(rng))
    score, size = rng.choice((0, 0.5, 1.0)), min(number(rng), 2**31 - 1)
    for _ in range(rng.choice((1, 1, 2))):
        talker.say(
            messages.EvaluationResult(evaluation_id, task_id, score, rng.random() < 0.5, size, size, first, last)
        )


def request_evaluation(rng: random.Random, talker: Talker) -> None:
    talker.say(messages.EvaluationRequest(rng.choice((0, 1, 3, messages.MAX_ITEMS))))


def goodbye(rng: random.Random, talker: Talker) -> None:
    talker.say(messages.Goodbye())


def reverse(rng: random.Random, talker: Talker) -> None:
    """Say one of the messages that only a learner sends."""
    ticket = Ticket(number(rng), 1, 1, 1, 0)
    talker.say(
        rng.choice(
            (
                messages.HelloWanted(),
                messages.Grant((ticket,)),
                messages.Ack(numbers(rng)),
                messages.Refused(number(rng), text(rng)),
                messages.WeightsAnnounced(number(rng)),
                messages.Shutdown(text(rng)),
                messages.Revoked(numbers(rng)),
                messages.EvaluationGrant(number(rng), number(rng), 0.0, numbers(rng)),
            )
        )
    )


def vanish(rng: random.Random, talker: Talker) -> None:
    """Without a word, and back under the same name or as another process."""
    talker.connect(talker.incarnation if rng.random() < 0.5 else rng.choice(INCARNATIONS))


_CHANCES: dict[Callable[[random.Random, Talker], None], int] = {
    hello: 25,
    request: 10,
    heartbeat: 15,
    fail: 8,
    offer: 30,
    engines: 3,
    request_evaluation: 6,
    evaluated: 12,
    goodbye: 4,
    reverse: 3,
    vanish: 2,
}
STEPS, WEIGHTS = list(_CHANCES), list(_CHANCES.values())


def sequence_decoder(source: Source, folder: Path) -> Decoder:
    world = World(folder)
    atexit.register(world.close)
    return Decoder(lambda: source.rng.randbytes(8), world.play, (Refusal,))
