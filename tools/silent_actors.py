#!/usr/bin/env python
"""Cost of idle actors for a learner rank: the share of a core that its receiver's process takes.

    python tools/silent_actors.py --actors 1000 --seconds 10            # as on the learner's host
    python tools/silent_actors.py --actors 1000 --seconds 10 --away     # as on other hosts: tcp, with keys

Prints one JSON object. The actors are real channels with sockets of their own, all in this process, and are short of
tickets; the receiver runs in another process, which waits for trajectories as a learner does.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from impala_llm.pipeline.network.keys import load_actor_keys, load_learner_keys, make_keys  # noqa: E402
from impala_llm.pipeline.shm.run_directory import RunDirectory  # noqa: E402
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore  # noqa: E402
from impala_llm.pipeline.tickets.ledger import TicketLedger  # noqa: E402
from impala_llm.pipeline.tickets.task_order import TaskOrder  # noqa: E402
from impala_llm.pipeline.transport.actor_channel import ActorChannel  # noqa: E402
from impala_llm.pipeline.transport.learner_connection import ChannelTimes  # noqa: E402
from impala_llm.pipeline.transport.messages import WeightsAnnounced  # noqa: E402
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits  # noqa: E402

TURN_S = 0.1
"""Between two polls of an actor."""
START_S = 120.0


def serve(run_name: str, keys: Path) -> None:
    """The receiver's process, until its standard input ends."""
    run = RunDirectory.attach(run_name, timeout_s=START_S)
    ledger = TicketLedger(TaskOrder(range(1000), seed=0), batch_size=64, max_staleness=1)
    arena = TrajectoryStore(run.replay_path(), 1 << 24, max_records=1024)
    endpoints = Endpoints(run.endpoint(), "tcp://127.0.0.1:*", load_learner_keys(keys))
    receiver = Receiver(endpoints, ledger, RecordLimits(1000), run, arena)
    receiver.start()
    print(json.dumps(receiver.endpoints), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while is_wanted():
        receiver.drain(1.0)
    print(json.dumps(receiver.counters()), flush=True)
    receiver.close()


def is_wanted() -> bool:
    """Whether standard input is still open."""
    try:
        return os.read(sys.stdin.fileno(), 1) != b""
    except BlockingIOError:
        return True


def turn(channels: list[ActorChannel]) -> int:
    """Poll all of them once, spread over a while, as actors do not keep time. Returns how many heard of weights."""
    num_heard = 0
    begin = time.monotonic()
    for index, channel in enumerate(channels):
        num_heard += any(isinstance(event, WeightsAnnounced) for event in channel.poll())
        if (early := begin + TURN_S * index / len(channels) - time.monotonic()) > 0:
            time.sleep(early)
    return num_heard


def turn_for(channels: list[ActorChannel], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        turn(channels)


def measure(num_actors: int, seconds: float, settle_s: float, is_away: bool) -> dict[str, object]:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, num_actors + 16)
    name = f"silent-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder, RunDirectory.create(name) as run:
        keys = Path(folder) / "keys"
        make_keys(keys)
        command = [sys.executable, __file__, "--serve", name, str(keys)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None and server.stdout is not None
            here, there = json.loads(server.stdout.readline())
            channels = []
            for index in range(num_actors):
                where = (there if is_away else here, f"actor-{index}", None if is_away else run, 1 << 12)
                own_keys = load_actor_keys(keys) if is_away else None
                channel = ActorChannel(
                    *where, keys=own_keys, times=ChannelTimes(learner_timeout_s=START_S), context=context
                )
                channel.hello()
                channel.request(4)
                channels.append(channel)
                time.sleep(1.0 / num_actors)
            deadline = time.monotonic() + START_S
            num_known = 0
            while num_known < num_actors:
                num_known += turn(channels)
                assert time.monotonic() < deadline, f"{num_known} of {num_actors} actors have heard of the learner"
            turn_for(channels, settle_s)
            process = psutil.Process(server.pid)
            before, began = process.cpu_times(), time.monotonic()
            turn_for(channels, seconds)
            after, took = process.cpu_times(), time.monotonic() - began
            server.stdin.close()
            counters = json.loads(server.stdout.readline())
            for channel in channels:
                channel.close()
    context.term()
    used = after.user + after.system - before.user - before.system
    return {
        **{"actors": num_actors, "away": is_away, "seconds": round(took, 2), "share_of_a_core": round(used / took, 4)},
        **{"known": counters["actors"], "lost": counters["actors_lost"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds before that")
    parser.add_argument("--away", action="store_true", help="actors of other hosts")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.serve:
        serve(arguments.serve[0], Path(arguments.serve[1]))
    else:
        print(json.dumps(measure(arguments.actors, arguments.seconds, arguments.settle, arguments.away)))


if __name__ == "__main__":
    main()
