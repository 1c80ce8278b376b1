"""Our own pipeline as a contender of the transport benchmark: all of it, as the product runs it.

Validated trajectories go through an actor's channel to the receiver of a learner rank with a ledger that runs free, and
come out validated. Tickets are granted before the clock starts, so that it measures data and not admission. It stops
when all are acknowledged to the actor and drained by the learner, which reports them as dropped, so that their tickets
end as in a run.
"""

from __future__ import annotations

import os
import time

from impala_llm.bench._transport_processes import DEADLINE_S, VOCAB_SIZE, Batch, Contender, Load, Record
from impala_llm.pipeline.shm.run_directory import RunDirectory, remove_run_dir
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import Ticket, TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.learner_connection import ChannelTimes
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits, SessionLimits
from impala_llm.trajectory import Trajectory

MAX_OPEN = 1 << 16
"""Most tickets under way, over all actors."""
_ARENA_BYTES = 64 << 20
_REPLAY_BYTES = 512 << 20
_ATTACH_S = 20.0
_POLL_S = 0.1
_POLL_EVERY = 64
# A crew is idle while others have their turn, and then sends no heartbeats.
_PATIENCE_S = 3600.0


class OurPipeline(Contender):
    """Real `ActorChannel`s, `Receiver` and `TicketLedger`, with the arena's default size."""

    name = "impala_llm"

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self._run_name = f"bench-{os.getpid()}-{load.num_tokens}-{load.num_actors}"
        self._run: RunDirectory | None = None
        self._receiver: Receiver | None = None
        self._drained: list[Trajectory] = []
        self._channel: ActorChannel | None = None

    def connect_consumer(self, batch: Batch) -> None:
        self._run = RunDirectory.create(self._run_name)
        ledger = TicketLedger(TaskOrder(range(1000)), batch_size=1, max_staleness=None, max_open=MAX_OPEN)
        endpoint = self._run.endpoint(0)
        arena = TrajectoryStore(self._run.replay_path(0), _REPLAY_BYTES, 2 * MAX_OPEN)
        self._receiver = Receiver(
            Endpoints(endpoint), ledger, RecordLimits(VOCAB_SIZE), self._run, arena, SessionLimits(_PATIENCE_S)
        )
        self._receiver.start()

    def connect_producer(self, index: int, records: list[Record]) -> None:
        run = RunDirectory.attach(self._run_name, timeout_s=_ATTACH_S)
        self._actor_id = f"actor-{index}"
        times = ChannelTimes(learner_timeout_s=_PATIENCE_S)
        self._channel = ActorChannel(run.endpoint(0), self._actor_id, run, _ARENA_BYTES, times=times)
        self._channel.hello()
        self._models = [record.trajectory for record in records]
        self._num_prepared = 0
        self._prepared: list[Trajectory] = []

    def prepare(self, count: int) -> None:
        channel = self._channel
        assert channel is not None
        channel.request(count)
        deadline = time.monotonic() + DEADLINE_S
        while len(tickets := channel.held) < count:
            channel.poll(_POLL_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(tickets)} of {count} tickets were granted within {DEADLINE_S:g} s")
        # No more tickets are granted while the clock runs.
        channel.request(0)
        self._prepared = [self._for_ticket(ticket) for ticket in tickets[:count]]
        self._prepared.reverse()

    def send(self, count: int) -> None:
        channel = self._channel
        assert channel is not None
        for number in range(count):
            if not channel.send(self._prepared.pop()):
                # As an actor does: it finishes no more episodes until there is room.
                self._wait_for_acknowledgements(channel.num_unacknowledged // 2)
            elif number % _POLL_EVERY == 0:
                channel.poll(0.0)
        channel.poll(0.0)

    def settle(self) -> None:
        self._wait_for_acknowledgements(0)

    def receive(self) -> int:
        assert self._receiver is not None
        # They are in the learner's hands when `drain` returns; what becomes of them it reports later.
        self._receiver.evicted([trajectory.ticket_id for trajectory in self._drained])
        self._drained = self._receiver.drain(_POLL_S)
        return len(self._drained)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._receiver is not None:
            self._receiver.close()
        if self._run is not None:
            self._run.remove()
        if self._channel is None and self._receiver is None:
            remove_run_dir(self._run_name)

    def _for_ticket(self, ticket: Ticket) -> Trajectory:
        """A validated trajectory under another name: its arrays are shared, only what the ticket says differs."""
        model = self._models[self._num_prepared % len(self._models)]
        values = {name: getattr(model, name) for name in Trajectory.__slots__ if hasattr(model, name)}
        values |= {
            "episode_id": f"{self._actor_id}:{self._num_prepared}",
            "actor_id": self._actor_id,
            "ticket_id": ticket.ticket_id,
            "task_id": ticket.task_id,
            "group_id": ticket.group_id,
        }
        trajectory = object.__new__(Trajectory)
        for name, value in values.items():
            object.__setattr__(trajectory, name, value)
        self._num_prepared += 1
        return trajectory

    def _wait_for_acknowledgements(self, num_left: int) -> None:
        channel = self._channel
        assert channel is not None
        deadline = time.monotonic() + DEADLINE_S
        while channel.num_unacknowledged > num_left:
            channel.poll(_POLL_S)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{channel.num_unacknowledged} trajectories are not acknowledged")
