"""The processes of test_pipeline_processes: `python -m tests.system.pipeline_process receiver|actor RUN LOG ...`.

Each line of a log is written in one call, so that a killed process leaves whole lines, but for the last at most.
"""

import hashlib
import sys
from pathlib import Path

from impala_llm.pipeline.channel import ActorChannel
from impala_llm.pipeline.receiver import Receiver
from impala_llm.pipeline.rundir import RunDirectory
from impala_llm.pipeline.task_order import TaskOrder
from impala_llm.pipeline.tickets import Ticket, TicketLedger
from impala_llm.pipeline.wire import Ack, Grant, Shutdown
from impala_llm.trajectory import Trajectory
from tests.pipeline.support import VOCAB_SIZE, contents, make_trajectory

BATCH_SIZE = 32


def digest(trajectory: Trajectory) -> str:
    return hashlib.sha256(repr(sorted(contents(trajectory).items())).encode()).hexdigest()


def receive(run_name: str, log: Path, num_trajectories: int) -> None:
    """Log `ticket episode unroll digest` of each trajectory that arrives; end when there are enough."""
    with RunDirectory.create(run_name) as run, log.open("a", buffering=1) as lines:
        ledger = TicketLedger(TaskOrder(range(300), group_size=2, seed=1), BATCH_SIZE, max_staleness=2)
        receiver = Receiver(run.endpoint(0), ledger, VOCAB_SIZE, run)
        receiver.start()
        num_arrived = 0
        batch: list[Trajectory] = []

        def take(trajectories: list[Trajectory]) -> None:
            for t in trajectories:
                lines.write(f"{t.ticket_id} {t.episode_id} {t.unroll_index} {digest(t)}\n")
                batch.append(t)

        while num_arrived < num_trajectories:
            trajectories = receiver.drain(1.0)
            take(trajectories)
            num_arrived += len(trajectories)
            while len(batch) >= BATCH_SIZE:
                receiver.trained(trajectory.ticket_id for trajectory in batch[:BATCH_SIZE])
                del batch[:BATCH_SIZE]
                receiver.announce(ledger.version + 1)
        receiver.shutdown("enough")
        receiver.close()
        take(receiver.drain(0.0))  # what was acknowledged last


def act(run_name: str, log: Path, actor_id: str) -> None:
    """Log `sent episode digest` before and `acknowledged episode` after; end when told to."""
    run = RunDirectory.attach(run_name, timeout_s=60.0)
    with log.open("a", buffering=1) as lines:
        channel = ActorChannel(run.endpoint(0), actor_id, run, arena_bytes=1 << 18, heartbeat_s=0.2)
        channel.hello()
        channel.request(24)
        episodes: list[str] = []

        def play(ticket: Ticket) -> None:
            episode_id = f"{actor_id}:{ticket.ticket_id}:{len(episodes)}"
            trajectory = make_trajectory(
                ticket,
                seed=ticket.ticket_id,
                num_tokens=50 + ticket.seed % 1000,
                version=ticket.min_version,
                episode_id=episode_id,
                actor_id=actor_id,
            )
            lines.write(f"sent {episode_id} {digest(trajectory)}\n")
            episodes.append(episode_id)
            channel.send(trajectory)

        running = True
        while running:
            for event in channel.poll(1.0):
                match event:
                    case Grant(tickets):
                        for ticket in tickets:
                            play(ticket)
                    case Ack(sequences):
                        for sequence in sequences:
                            lines.write(f"acknowledged {episodes[sequence]}\n")
                    case Shutdown():
                        running = False
        channel.close()


if __name__ == "__main__":
    role, run_name, log, argument = sys.argv[1:]
    if role == "receiver":
        receive(run_name, Path(log), int(argument))
    else:
        act(run_name, Path(log), argument)
