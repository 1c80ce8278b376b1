"""Environments that fail again and again: printed once, answered slowly, ended in the end; engines that begin anew."""

import asyncio
import io
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from impala_llm.actor import Actor
from impala_llm.config import load
from impala_llm.engines.base import EngineError, EngineStats, Generation, SamplingParams
from impala_llm.environment_faults import BlockingWatchdog, EnvironmentFaults, failure_reason, is_fault
from impala_llm.envs import contract, make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.observability.actor_metrics import Reporter, RunningEpisodes
from impala_llm.pipeline.tickets.ledger import Ticket
from impala_llm.rollout import ENGINE_AWAITED, ChatFormat, EpisodeLimits, EpisodeSpec, play_episode


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Broken:
    def step(self, action: str) -> None:
        raise KeyError(action)


class WithoutScore:
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "the end", 1.0, True, False, {"success": True}


class Exits:
    def step(self, action: str) -> None:
        raise SystemExit(3)


class CancelsItself:
    async def step(self, action: str) -> None:
        raise asyncio.CancelledError


class Waits:
    is_closed = False

    async def step(self, action: str) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True


def fault(word: str = "door") -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        asyncio.run(contract.step(Broken(), word, "maze"))  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(("session", "said"), [(Exits(), "SystemExit: 3"), (CancelsItself(), "CancelledError")])
def test_an_environment_that_ends_its_process_or_its_task_is_a_fault_as_others(session: Any, said: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"env maze: step raised {said}"):
        asyncio.run(contract.step(session, "go", "maze"))


def test_a_session_whose_close_says_that_its_own_work_was_cancelled_loses_no_episode() -> None:
    def raise_cancelled() -> None:
        raise asyncio.CancelledError

    async def play() -> str:
        contract.close(SimpleNamespace(close=raise_cancelled))  # type: ignore[arg-type]
        return "sent"

    assert asyncio.run(play()) == "sent"
    with pytest.raises(EnvironmentFault, match="env maze: session raised CancelledError"):
        contract.session(SimpleNamespace(name="maze", session=lambda training: raise_cancelled()), training=True)


def test_an_answer_counts_although_the_environment_has_cancelled_its_own_task() -> None:
    """As a TaskGroup does whose child fails, and what it counted stays counted where it is caught."""

    async def answer(action: str) -> tuple:
        async def fail() -> None:
            await asyncio.sleep(0)
            raise LookupError

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        except* LookupError:
            pass
        return "page", 0.0, False, False, {}

    session: Any = SimpleNamespace(step=answer)
    assert asyncio.run(contract.step(session, "go", "maze"))[0] == "page"


def stands_still(ended: threading.Event) -> dict[str, Callable[[str], Any]]:
    """Steps that block, each in another way, until the event."""
    page = "page", 0.0, False, False, {}

    def block(action: str) -> Any:
        assert ended.wait(60)
        return page

    async def blocks(action: str) -> Any:
        await asyncio.sleep(0)
        return block(action)

    async def blocks_in_a_task(action: str) -> Any:
        [answer] = await asyncio.gather(blocks(action))
        return answer

    return {"plain": block, "coroutine": blocks, "task": blocks_in_a_task}


@pytest.mark.parametrize("kind", ["plain", "coroutine", "task"])
def test_an_environment_that_blocks_its_actor_is_told_once_and_a_call_of_it_that_goes_on_ends_it(kind: str) -> None:
    said: list[str] = []
    ended = threading.Event()
    # A task that the environment has made may be somebody else's: it is told, and ends nothing.
    enough = 1 if kind == "task" else 2

    def take(reason: str) -> None:
        said.append(reason)
        if len(said) == enough:
            ended.set()

    async def play() -> None:
        BlockingWatchdog(asyncio.get_running_loop(), 0.02, 0.05, take, take, pause_s=0.01).start()
        await contract.step(SimpleNamespace(step=stands_still(ended)[kind]), "go", "maze")  # type: ignore[arg-type]

    asyncio.run(play())
    assert len(said) == enough
    pattern = rf"a call has blocked all episodes of this process for (0\.\d+) s, in {__file__}:\d+: let it wait in an "
    for least, text in zip((0.02, 0.05), said, strict=False):
        blocked = re.match(pattern, text)
        assert blocked and float(blocked[1]) >= least
        assert text.endswith("by await; a call of the environment ends the process after 0.05 s")


def test_who_awaits_or_is_short_is_not_told_nor_is_other_code_that_blocks() -> None:
    said: list[str] = []
    nobody = threading.Event()

    def short(action: str) -> Any:
        nobody.wait(0.02)
        return "page", 0.0, False, False, {}

    async def play() -> None:
        loop = asyncio.get_running_loop()
        BlockingWatchdog(loop, 0.1, 0.2, said.append, said.append, pause_s=0.01).start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await contract.step(Waits(), "go", "maze")  # type: ignore[arg-type]
        for _ in range(20):  # all in one turn of the loop, as a script's are
            await contract.step(SimpleNamespace(step=short), "go", "maze")  # type: ignore[arg-type]
        loop.call_soon(nobody.wait, 0.3)  # by no code of the user's, as an engine that compiles
        await asyncio.sleep(0)

    asyncio.run(play())
    assert not said


def test_an_episode_that_is_given_up_is_no_fault_and_its_end_may_take_time() -> None:
    async def give_up() -> Waits:
        session: Any = Waits()
        playing = asyncio.create_task(contract.step(session, "go", "maze"))
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        contract.close(session)
        while not session.is_closed:
            await asyncio.sleep(0)
        return session

    assert asyncio.run(asyncio.wait_for(give_up(), 60)).is_closed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (range(2**31), "at most 10000000 tasks"),
        ([1, 2, 1], "each task id once"),
        ([0, -1], "task ids from 0 to"),
        ([2**63], "task ids from 0 to"),
        ([], "at least one task"),
        (["a"], "a sequence of task ids"),
    ],
)
def test_tasks_that_no_run_can_play_are_refused(given: Any, said: str) -> None:
    suite: Any = SimpleNamespace(name="maze", tasks=lambda split: given)
    with pytest.raises(EnvironmentFault, match=rf"tasks\('train'\) returned .*: .*{said}"):
        contract.tasks(suite, "train")


def test_a_storm_ends_the_actor_and_an_outage_does_not() -> None:
    clock = Clock()
    faults = EnvironmentFaults(20.0, clock)
    for _ in range(500):
        faults.observe(fault())
    assert not faults.is_broken  # all at once: whatever it needs may come back
    clock.now += 20.0
    assert faults.is_broken
    faults.clear()
    assert not faults.is_broken
    for _ in range(faults.MOST_IN_A_ROW - 1):
        faults.observe(fault())
        clock.now += 10.0
    assert not faults.is_broken


def test_a_broken_contract_ends_the_actor_at_once() -> None:
    faults = EnvironmentFaults(20.0, Clock())
    for _ in range(faults.MOST_IN_A_ROW):
        assert not faults.is_broken
        with pytest.raises(EnvironmentFault) as caught:
            asyncio.run(contract.step(WithoutScore(), "go", "maze"))  # type: ignore[arg-type]
        faults.observe(caught.value)
    assert faults.is_broken


def test_the_answer_to_faults_in_a_row_is_ever_slower() -> None:
    faults = EnvironmentFaults(20.0)
    delays = [faults.observe(fault()) for _ in range(100)]
    assert delays == sorted(delays) and delays[-1] == faults.MAX_DELAY_S
    faults.clear()
    assert faults.observe(fault()) == delays[0]


def test_the_first_fault_of_each_kind_is_printed_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    faults = EnvironmentFaults(20.0)
    for word in ("first", "second"):
        faults.observe(fault(word))
    said = capsys.readouterr().err
    assert said.count("raise KeyError(action)") == 1 and "first" in said and "second" not in said
    with pytest.raises(EnvironmentFault) as caught:
        asyncio.run(contract.reset(Broken(), 1, "maze"))  # type: ignore[arg-type]
    faults.observe(caught.value)
    assert "has no attribute 'reset'" in capsys.readouterr().err


class Unwritable(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("No space left on device")


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_fault_that_cannot_be_printed_counts_all_the_same(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = EnvironmentFaults(20.0)
    stream = io.StringIO() if is_closed else Unwritable()
    if is_closed:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert faults.observe(fault()) > 0 and faults.num_in_a_row == 1


def test_a_cause_without_a_traceback_is_a_fault_as_others(capsys: pytest.CaptureFixture[str]) -> None:
    faults = EnvironmentFaults(20.0)
    remote = ConnectionError("no sandbox is free")
    remote.__cause__ = RuntimeError("as it came from another process")
    assert faults.observe(remote) > 0 and faults.observe(remote) > 0 and faults.num_in_a_row == 2
    assert capsys.readouterr().err.count("no sandbox is free") == 1, "of each kind the first"


def measured_actor() -> Any:
    """The parts of an actor that are measured."""
    actor: Any = SimpleNamespace(running=RunningEpisodes(), channels=SimpleNamespace(arena_fill=0.0), is_up=True)
    actor.load_seconds, actor.fed_engine, actor.engine_restarts, actor.agents = 0.0, None, 1, None
    return actor


def test_running_episodes_are_the_mean_between_two_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none is under way when a report is due."""
    now, task = 100.0, Mock()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    actor = measured_actor()
    reporter = Reporter(EngineStats())
    actor.running[1] = actor.running[2] = task
    now = 101.0
    del actor.running[1]
    now = 102.0
    assert reporter.metrics(EngineStats(), actor)["actor/running_episodes"] == 1.5
    now = 103.0
    del actor.running[2]
    now = 106.0
    assert reporter.metrics(EngineStats(), actor)["actor/running_episodes"] == 0.25


@pytest.mark.parametrize("fallen", ["decode_tokens", "prefill_tokens", "busy_seconds"])
def test_rates_of_an_engine_that_was_made_anew_count_from_its_start(
    fallen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its counters at least is below that of the engine before it."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    actor = measured_actor()
    reporter = Reporter(EngineStats(decode_tokens=100, prefill_tokens=100, busy_seconds=100.0))
    now = 1100.0
    stats = replace(EngineStats(decode_tokens=1000, prefill_tokens=1000, busy_seconds=1000.0), **{fallen: 50})
    metrics = reporter.metrics(stats, actor)
    assert metrics["actor/generated_tokens_per_s"] == stats.decode_tokens / 1000
    assert metrics["actor/prefill_tokens_per_s"] == stats.prefill_tokens / 1000
    assert metrics["actor/idle_share"] == 1 - stats.busy_seconds / 1000


def test_restarts_of_engines_are_counted_on_where_another_engine_takes_the_place_of_one() -> None:
    class Engine:
        version, failure = 0, None

        def __init__(self, restarts: int) -> None:
            self.restarts = restarts

        def stats(self) -> EngineStats:
            return EngineStats(restarts=self.restarts)

        async def start(self) -> None: ...

        async def close(self) -> None: ...

    actor: Any = Actor.__new__(Actor)
    actor.config, actor.actor_id, actor.running = load(["experiment=toy"]), "actor-0", RunningEpisodes()
    actor.channels = SimpleNamespace(request=lambda want: None, arena_fill=0.0)
    actor.board = SimpleNamespace(latest=lambda: 0)
    actor.loading, actor.load_seconds, actor.num_new_learners, actor.announced = None, 0.0, 0, 0
    actor.engine, actor.make_engine = Engine(restarts=2), lambda: Engine(restarts=0)
    actor.is_up, actor.starting = True, None
    actor.failed_starts, actor.engine_restarts = 9, 0  # so that this test alone starts an engine: others come later
    reporter = Reporter(EngineStats())

    def counted() -> float:
        return reporter.metrics(actor.engine.stats(), actor)["actor/engine_restarts"]

    assert counted() == 2
    actor.engine.failure = EngineError("its server does not come back")
    actor.tend_engine()
    assert not actor.is_up and counted() == 3
    asyncio.run(actor.start_engine())
    assert actor.is_up and counted() == 3
    actor.engine.restarts = 1
    assert counted() == 4


def test_the_turns_so_far_are_sent_where_the_time_of_an_episode_ends_during_a_step(tmp_path: Path) -> None:
    """Then the engine is at no completion that could be aborted."""

    class Engine:
        def __init__(self) -> None:
            self.time_is_over = asyncio.Event()

        async def generate(self, session_id: str, prompt: list[int], params: SamplingParams) -> Generation:
            if self.time_is_over.is_set():
                await asyncio.Event().wait()
            end = np.array([params.stop_token_ids[0]], np.int32)
            return Generation(end, np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")

        def abort(self, session_id: str) -> None:
            self.time_is_over.set()

        def release(self, session_id: str) -> None: ...

    class Slow:
        async def reset(self, task_id: int) -> tuple[str, dict]:
            return "a", {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            await actor.engine.time_is_over.wait()
            return "b", 1.0, False, False, {}

    actor: Any = Actor.__new__(Actor)
    actor.config = load(["experiment=toy", "actor.episode_timeout_s=0.001"])
    actor.actor_id, actor.episodes, actor.keep_aborted, actor.failure = "actor-0", 0, True, None
    actor.suite = SimpleNamespace(name="maze", session=lambda training: Slow(), signature=lambda task_id: "s")
    actor.engine, actor.limits, actor.faults = Engine(), EpisodeLimits(1.0, 8, 400), EnvironmentFaults(20.0)
    actor.chat = ChatFormat.of(make_scratch_policy(tmp_path / "policy"), "")
    sent: list[Any] = []
    failed: list[tuple[int, str]] = []
    actor.channels = SimpleNamespace(send=sent.append, fail=lambda *reason: failed.append(reason))
    asyncio.run(actor.play(Ticket(1, 2, 3, 4, 0)))
    assert failed == []
    [episode] = sent
    assert (len(episode.turns), episode.rewards.sum(), episode.score) == (1, 1.0, 0.0)
    assert episode.bootstrap and not episode.continues


def test_the_time_out_of_a_python_that_names_no_cause_is_told_apart_too() -> None:
    """Before 3.11.4 the error of `asyncio.timeout` has the cancellation as its context, and not as its cause."""

    def raised_in(cancelled: BaseException) -> TimeoutError:
        try:
            try:
                raise cancelled
            except asyncio.CancelledError:
                raise TimeoutError  # noqa: B904
        except TimeoutError as error:
            return error

    assert is_fault(raised_in(asyncio.CancelledError()))
    assert not is_fault(raised_in(asyncio.CancelledError(ENGINE_AWAITED)))


def test_a_time_out_is_a_fault_unless_the_engine_was_awaited(tmp_path: Path) -> None:
    policy = make_scratch_policy(tmp_path / "policy")
    suite = make_suite(load(["experiment=toy"]).env)
    spec = EpisodeSpec("e", task_id=1, group_id=1, ticket_id=1, seed=1, env=suite.name, actor_id="a", signature="s")
    chat = ChatFormat.of(policy, suite.system_prompt)
    limit: asyncio.Timeout

    async def the_time_ends() -> None:
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    class SlowEngine:
        async def generate(self, *_: object) -> None:
            await the_time_ends()

        def release(self, session: str) -> None: ...

    class Hangs:
        async def reset(self, task_id: int) -> None:
            await the_time_ends()

        async def close(self) -> None: ...

    async def play(session: Any) -> TimeoutError:
        nonlocal limit
        limit = asyncio.timeout(None)
        engine: Any = SlowEngine()
        with pytest.raises(TimeoutError) as caught:
            async with limit:
                await play_episode(spec, session, engine, chat, EpisodeLimits(1.0, 8, 400))
        return caught.value

    slow, hangs = asyncio.run(play(suite.session(True))), asyncio.run(play(Hangs()))
    assert not is_fault(slow) and is_fault(hangs)
    assert failure_reason(hangs, 0.1) == "TimeoutError: not done in actor.episode_timeout_s=0.1"
    assert failure_reason(slow, 0.1).startswith(
        "TimeoutError: not done in actor.episode_timeout_s=0.1, when the engine"
    )
    own = TimeoutError("the database did not answer")
    assert is_fault(own) and failure_reason(own, 0.1) == "TimeoutError: the database did not answer"


def test_errors_of_an_engine_in_a_row_are_answered_ever_more_slowly() -> None:
    faults = EnvironmentFaults(20.0)
    delays = [faults.observe(EngineError("a decoding step failed")) for _ in range(40)]
    assert 0 < delays[0] < delays[9] < delays[-1] == faults.MAX_DELAY_S
    assert not faults.is_broken and not faults.num_in_a_row
    faults.clear()
    assert faults.observe(EngineError("a decoding step failed")) == delays[0]
