"""One actor at two learner ranks: both get their share, and what is for one never goes to the other."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from impala_llm.config import load
from impala_llm.pipeline.actor_endpoint import RankChannels
from impala_llm.pipeline.shared_settings import difference, shared_settings
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.shm.trajectory_store import TrajectoryStore
from impala_llm.pipeline.tickets.ledger import TicketLedger
from impala_llm.pipeline.tickets.task_order import TaskOrder
from impala_llm.pipeline.transport.actor_channel import ActorChannel
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation
from impala_llm.pipeline.transport.learner_connection import ChannelTimes, Context
from impala_llm.pipeline.transport.messages import EvaluationGrant, EvaluationResult, Shutdown, WeightsAnnounced
from impala_llm.pipeline.transport.receiver import Endpoints, Receiver, RecordLimits
from impala_llm.pipeline.transport.sessions import SessionLimits
from tests.pipeline.support import VOCAB_SIZE, make_trajectory

NUM_RANKS = 2
WORDS = ("experiment=corridor", f"learner.num_ranks={NUM_RANKS}")
SETTINGS = shared_settings(load(WORDS))


class World:
    """Two ranks of which each lets `max_open` tickets be under way, and one actor."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self.run_dir = run_dir
        self.receivers: list[Receiver] = []

    def start(self, max_open: tuple[int, int], *words: str) -> RankChannels:
        """words: settings that the actor has and the learner has not."""
        for rank, limit in enumerate(max_open):
            order = TaskOrder(range(50), seed=1, rank=rank, world_size=NUM_RANKS)
            ledger = TicketLedger(order, batch_size=1, max_staleness=None, max_open=limit)
            arena = TrajectoryStore(self.run_dir.replay_path(rank), 1 << 18, 64)
            receiver = Receiver(
                *(Endpoints(self.run_dir.endpoint(rank)), ledger, RecordLimits(VOCAB_SIZE), self.run_dir, arena),
                sessions=SessionLimits(settings=SETTINGS),
            )
            receiver.start()
            self.receivers.append(receiver)
        settings = shared_settings(load([*WORDS, *words]))
        self.actor = RankChannels(self.connect, NUM_RANKS, settings, share_every_s=0.1)
        self.actor.hello()
        return self.actor

    def connect(self, rank: int, context: Context) -> ActorChannel:
        return ActorChannel(
            *(self.run_dir.endpoint(rank), "actor-0", self.run_dir, 1 << 16),
            times=ChannelTimes(0.05),
            arena_name=f"actor-0.rank-{rank}",
            context=context,
        )

    def until(self, condition: Callable[[], bool]) -> list[object]:
        async def turn() -> list[object]:
            events: list[object] = []
            deadline = time.monotonic() + 20
            while not condition():
                assert time.monotonic() < deadline
                events += await self.actor.poll_async(0.05)
            return events

        return asyncio.run(turn())

    def close(self) -> None:
        self.actor.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def world() -> Iterator[World]:
    # Not tmp_path: socket paths must be short.
    with tempfile.TemporaryDirectory() as base, RunDirectory.create("t", Path(base)) as run_dir:
        world = World(run_dir)
        yield world
        world.close()


def of_rank(actor: RankChannels, rank: int) -> list[int]:
    return [ticket.ticket_id for ticket in actor.held if ticket.group_id % NUM_RANKS == rank]


def test_ranks_share_an_actor_in_equal_parts(world: World) -> None:
    actor = world.start(max_open=(64, 64))
    actor.request(10)
    world.until(lambda: len(actor.held) >= 10)
    assert [len(of_rank(actor, rank)) for rank in range(NUM_RANKS)] == [5, 5]


def test_slots_that_one_rank_cannot_fill_go_to_the_other(world: World) -> None:
    actor = world.start(max_open=(2, 64))
    actor.request(10)
    world.until(lambda: len(actor.held) >= 10)
    assert len(of_rank(actor, 0)) == 2
    assert len(actor.held) <= 10 + NUM_RANKS - 1  # parts are rounded up


def test_what_belongs_to_a_rank_goes_there(world: World) -> None:
    actor = world.start(max_open=(4, 4))
    actor.request(4)
    world.until(lambda: len(actor.held) >= 4)
    actor.request(0)
    tickets = actor.held
    sent, failed = tickets[:3], tickets[3]
    for ticket in sent:
        assert actor.send(make_trajectory(ticket))
    actor.fail(failed.ticket_id, "the environment broke")
    world.until(lambda: not actor.held)
    for rank, receiver in enumerate(world.receivers):
        arrived = {trajectory.ticket_id for trajectory in receiver.drain(0.0)}
        assert arrived == {ticket.ticket_id for ticket in sent if ticket.group_id % NUM_RANKS == rank}
        assert receiver.counters()["trajectories_refused"] == 0
    assert actor.held == [] and actor.arena_fill == 0
    with pytest.raises(ValueError, match="was not granted"):
        actor.fail(10**6, "unknown")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learner.num_ranks=1", "learner.num_ranks is 2 at the learner and 1 at actor-0"),
        ("env.args.num_words=5", "env.args.num_words is 4 at the learner and 5 at actor-0"),
        ("engine.temperature=0.1", "engine.temperature is 1.0 at the learner and 0.1 at actor-0"),
        ("run.name=another", "run.name is corridor at the learner and another at actor-0"),
        ("env=parrot", "env.name is corridor at the learner and parrot at actor-0"),
    ],
)
def test_an_actor_with_other_settings_than_the_learner_is_told_which(world: World, word: str, said: str) -> None:
    """It would play another task, sample otherwise, or play for some of the ranks."""
    actor = world.start((4, 4), word)
    actor.request(4)
    reasons: list[str] = []

    async def listen() -> None:
        while not reasons:
            reasons.extend(event.reason for event in await actor.poll_async(0.05) if isinstance(event, Shutdown))

    asyncio.run(asyncio.wait_for(listen(), 20))
    assert said in reasons[0] and "start the actors with the settings of the learner" in reasons[0]
    assert world.receivers[0].counters()["actors"] == 0


def test_what_may_differ_from_host_to_host_is_not_compared() -> None:
    own = ("model.path=tiny_shopper", "engine.dtype=bfloat16", "actor.max_episodes=3", "learner.total_updates=9")
    assert shared_settings(load([*WORDS, *own])) == SETTINGS
    config = load(WORDS)
    config.env.args = {"path": "/host/tasks", "text": "x" * 300, "of": {"depth": 2}}
    found = shared_settings(config)
    assert found["env.args.of.depth"] == "2" and "/host/tasks" not in found.values()
    for other in ("tasks", "/elsewhere/tasks"):  # a value that is a path at one side alone is not compared either
        config.env.args["path"] = other
        others = shared_settings(config)
        assert difference(found, others, "actor-0") == difference(others, found, "actor-0") == ""
    del others["env.args.path"]
    assert difference(found, others, "actor-0") == difference(others, found, "actor-0") == ""
    del others["env.args.of.depth"]
    assert "env.args.of.depth is 2 at the learner and not set at actor-0" in difference(found, others, "actor-0")
    assert found["env.args.text"].startswith("sha256 ")
    assert "and 4 other settings differ" in difference({}, dict.fromkeys("abcdefg", "1"), "actor-0")


def test_the_first_rank_asks_for_evaluations_and_gets_their_results(world: World) -> None:
    actor = world.start(max_open=(4, 4))
    first, second = world.receivers
    actor.first.request_evaluation(2)
    first.begin_evaluation([7, 8], 0.0, 60.0)
    ended: list[Evaluation] = []

    async def play() -> None:
        deadline = time.monotonic() + 20
        failed = False
        while not ended:
            assert time.monotonic() < deadline
            for event in await actor.poll_async(0.05):
                for task_id in event.task_ids if isinstance(event, EvaluationGrant) else ():
                    if task_id == 7 and not failed:
                        failed = True
                        actor.first.evaluation_failed(event.evaluation_id, task_id, "the environment broke")
                    else:
                        actor.first.evaluated(EvaluationResult(event.evaluation_id, task_id, 0.5, False, 20, 2, 0, 0))
            ended.extend(filter(None, [first.evaluation()]))

    asyncio.run(play())
    assert [result.task_id for result in ended[0].results] == [7, 8]
    assert second.counters()["evaluation_unwanted"] == second.counters()["messages_malformed"] == 0


def test_a_version_is_reported_once_whoever_announces_it(world: World) -> None:
    actor = world.start(max_open=(4, 4))
    world.until(lambda: len(world.receivers[0].actor_stats()) + len(world.receivers[1].actor_stats()) == 2)
    for receiver in world.receivers:
        receiver.announce(1)
    seen: list[object] = []

    async def listen() -> None:
        for _ in range(10):
            seen.extend(await actor.poll_async(0.05))

    asyncio.run(listen())
    assert [event for event in seen if isinstance(event, WeightsAnnounced)].count(WeightsAnnounced(1)) == 1


def test_channels_to_many_ranks_take_no_more_threads_than_one(run_dir: RunDirectory) -> None:
    world = World(run_dir)

    def threads_of(num_ranks: int) -> int:
        before = len(os.listdir("/proc/self/task"))
        channels = RankChannels(world.connect, num_ranks)
        try:
            return len(os.listdir("/proc/self/task")) - before
        finally:
            channels.close()

    assert threads_of(8) == threads_of(1) > 0
