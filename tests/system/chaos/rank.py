"""A learner rank of the chaos test: everything of a real one but the model.

    python -m tests.system.chaos.rank DIRECTORY RANK GENERATION

A step: batch → note what it trains on → meet the other rank → publish → meet → announce. Steps run in the order of
`impala_llm.learner.learn`, so that a kill between any two of them finds what it would find there.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import psutil

from impala_llm.config import load
from impala_llm.learning.batch_source import BatchSource, Stalled
from impala_llm.pipeline.shm.journal import Journal
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.trajectory import Trajectory
from tests.pipeline.support import VOCAB_SIZE
from tests.system.chaos.content import digest, weights
from tests.system.chaos.events import EventLog
from tests.system.chaos.meeting import Meeting, Missed
from tests.system.chaos.settings import (
    BATCH_SIZE,
    JOURNAL_ROWS,
    MAX_STALENESS,
    NUM_RANKS,
    NUM_TASKS,
    REPLAY_BYTES,
    WEIGHT_SLOTS,
    Settings,
    die_with_parent,
)

START_S = 30.0
MEET_S = 5.0
"""Shorter than the longest stop: ranks are missed, too."""
SETTLE_S = 1.0
MEMORY_EVERY_S = 1.0
EVICTIONS_PER_BATCH = 0.1
HAS_BATCH, WANTS_END = 1, 2


class LoggedLedger(TicketLedger):
    """Says which tickets it refuses, and what it evicts: that it is about to, and whether it has."""

    log: EventLog

    def actor_lost(self, actor_id: str, left: bool = False) -> list[Ticket]:
        tickets = self.open_tickets(actor_id)
        for ticket in tickets:
            self.log.say("refusing", ticket.ticket_id)
        refused = super().actor_lost(actor_id, left)
        for ticket in tickets:
            self.log.say("refused" if ticket in refused else "kept", ticket.ticket_id)
        return refused

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        dropped = list(unroll_ids)
        if dropped:
            self.log.say("evicting", dropped)
            super().evicted(dropped)
            self.log.say("evicted", dropped)

    def refused(self, ticket_id: int, actor_id: str) -> None:
        num_refused = self._say_intent(ticket_id, actor_id)
        super().refused(ticket_id, actor_id)
        self._tell(ticket_id, num_refused)

    def failed(self, ticket_id: int, actor_id: str) -> None:
        num_refused = self._say_intent(ticket_id, actor_id)
        super().failed(ticket_id, actor_id)
        self._tell(ticket_id, num_refused)

    def _say_intent(self, ticket_id: int, actor_id: str) -> float | None:
        """Number that it has refused before; None where the ticket is not open."""
        if all(ticket.ticket_id != ticket_id for ticket in self.open_tickets(actor_id)):
            return None
        self.log.say("refusing", ticket_id)
        return self.counters()["refused"]

    def _tell(self, ticket_id: int, num_refused: float | None) -> None:
        if num_refused is not None:
            self.log.say("refused" if self.counters()["refused"] > num_refused else "kept", ticket_id)


class LoggedReceiver(Receiver):
    """Says what comes out of it; remembers what has not ended."""

    log: EventLog
    sabotage = ""
    digests: dict[int, str]

    def drain(self, timeout_s: float) -> list[Trajectory]:
        trajectories = super().drain(timeout_s)
        for t in trajectories:
            if self.sabotage == "change_bytes" and t.ticket_id % 50 == 0:
                t.tokens[0] ^= 1
            self.digests[t.unroll_id] = digest(t)
            self.log.say("arrived", t.ticket_id, t.episode_id, t.unroll_index, self.digests[t.unroll_id])
        return trajectories

    def evicted(self, unroll_ids: Iterable[int]) -> None:
        dropped = list(unroll_ids)
        super().evicted(dropped)
        for number in dropped:
            self.digests.pop(number, None)


def run(settings: Settings, rank: int, generation: int) -> None:
    log = EventLog(settings.log_path(f"rank-{rank}"))
    meeting = Meeting(settings.directory / "meeting", rank, generation)
    run_dir = RunDirectory.attach(settings.run_name)
    version = WeightReader(run_dir.weights_path).latest() or 0
    log.say("start", version)
    meeting.exchange(0, START_S)  # all have looked at the board
    publisher = WeightPublisher(run_dir.weights_path, WEIGHT_SLOTS) if rank == 0 else None

    def publish() -> None:
        if publisher is None:
            return
        tensors = weights(version)
        if settings.sabotage == "torn_weights" and version % 7 == 0:
            tensors["a"][2][-4:] = 0
        publisher.publish(tensors, version)
        log.say("committed", version)

    publish()
    meeting.exchange(0, START_S)
    if settings.sabotage == "forget_arena":
        run_dir.replay_path(rank).unlink(missing_ok=True)
    order = TaskOrder(range(NUM_TASKS), settings.group_size, settings.seed, rank, NUM_RANKS)
    ledger = LoggedLedger(
        order, BATCH_SIZE, MAX_STALENESS, version=version, journal=Journal(run_dir.journal_path(rank), JOURNAL_ROWS)
    )
    ledger.log = log
    config = load(
        [
            "experiment=toy",
            *(["algorithm=vtrace"] if settings.has_unrolls else []),
            f"algorithm.group_size={settings.group_size}",
            f"algorithm.max_staleness={MAX_STALENESS}",
            f"learner.batch_size={NUM_RANKS * BATCH_SIZE}",
            f"learner.num_ranks={NUM_RANKS}",
            f"replay.capacity={8 * BATCH_SIZE}",
            "learner.stall_timeout_s=1",
        ]
    )
    arena = TrajectoryStore(run_dir.replay_path(rank), REPLAY_BYTES, 4 * config.replay.capacity)
    receiver = LoggedReceiver(
        Endpoints(run_dir.endpoint(rank)),
        ledger,
        RecordLimits(VOCAB_SIZE),
        run_dir,
        arena,
        SessionLimits(heartbeat_timeout_s=3.0, grant_resend_s=2.0, ticket_timeout_s=20.0),
    )
    receiver.log, receiver.sabotage, receiver.digests = log, settings.sabotage, {}
    receiver.start()
    source = BatchSource(config, receiver, BATCH_SIZE, settings.seed)
    log.say("ready", receiver.counters()["recovered"])
    threading.Thread(target=report_memory, args=(log,), daemon=True).start()

    def step(unroll_ids: list[int]) -> None:
        nonlocal version
        log.say("trained", version + 1, unroll_ids)
        receiver.trained(unroll_ids)
        meeting.exchange(0, MEET_S)  # gradients are summed
        version += 1
        publish()
        meeting.exchange(0, MEET_S)
        receiver.announce(version)
        for number in unroll_ids:
            receiver.digests.pop(number, None)

    last: list[int] = []
    batch: list[Trajectory] = []
    while True:
        if not batch:
            try:
                batch = list(source.next_batch(version).trajectories)
            except Stalled:
                log.say("stalled")
        source.end_step()
        bits = meeting.exchange(HAS_BATCH * bool(batch) | WANTS_END * settings.calm.exists(), MEET_S)
        if any(value & WANTS_END for value in bits):
            break
        if not all(value & HAS_BATCH for value in bits):
            continue
        if sum(t.ticket_id for t in batch) % int(1 / EVICTIONS_PER_BATCH) == 0:
            receiver.evicted([t.unroll_id for t in batch if t.group_id == batch[0].group_id])
            batch = [t for t in batch if t.group_id != batch[0].group_id]
        tell_changes(batch, receiver.digests, log)
        unroll_ids = [t.unroll_id for t in batch]
        step(unroll_ids + (last if settings.sabotage == "train_twice" else []))
        last, batch = unroll_ids, []

    # The end: everything that was granted comes in, and what is left goes into a last step.
    settled_at = None
    while settled_at is None or time.monotonic() < settled_at + SETTLE_S:
        source.collect(version, 0.05)
        source.end_step()
        counters = ledger.counters()
        if counters["ready"] or counters["open"]:
            settled_at = None
        elif settled_at is None:
            settled_at = time.monotonic()
    log.say("settled")
    receiver.shutdown()
    while not settings.actors_gone.exists():
        source.collect(version, 0.05)
    receiver.close()
    source.collect(version, 0.0)
    del batch
    meeting.exchange(0, START_S)
    step(list(receiver.digests))
    del source
    gc.collect()
    arena.reserve(np.empty(0, np.int64))  # takes back what has been dropped
    counters = receiver.counters()
    left = {name: counters[name] for name in ("ready", "open", "in_buffer", "charged")}
    log.say("final", version, order.num_taken, {**left, "arena_bytes": arena.used})


def tell_changes(batch: list[Trajectory], digests: dict[int, str], log: EventLog) -> None:
    for t in batch:
        if digest(t) != digests.get(t.unroll_id):
            log.say("changed", t.ticket_id)


def report_memory(log: EventLog) -> None:
    process = psutil.Process()
    while True:
        status = Path("/proc/self/status").read_text().split()
        log.say("memory", 1024 * int(status[status.index("RssAnon:") + 1]), process.num_fds(), process.num_threads())
        time.sleep(MEMORY_EVERY_S)


def main(arguments: list[str]) -> None:
    die_with_parent()
    settings = Settings.load(Path(arguments[0]))
    try:
        run(settings, int(arguments[1]), int(arguments[2]))
    except Missed as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # torchrun kills whom a collective has left alone


if __name__ == "__main__":
    main(sys.argv[1:])
