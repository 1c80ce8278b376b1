"""Processes of agents: whatever an agent does, its episode comes back once, and the pool goes on."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from impala_llm.gateway.agent_pool import PATIENCE, AgentFailed, AgentPool, Patience
from impala_llm.gateway.descendants import WORKER
from impala_llm.gateway.tasks import Task
from impala_llm.gateway.worker import Worker
from impala_llm.gateway.worker_pipes import open_pipe
from tests.helpers import has_ended, write_namesakes

AGENTS = """
import asyncio, os, signal, subprocess, threading, time
barrier = threading.Barrier(40)
kept = []

async def agent(task, client):
    what = task.data["what"]
    if what == "number":
        return 0.5
    if what == "stop":
        next(iter(()))
    if what == "details":
        return {"score": 0.25, "stats": {"url": len(str(client.base_url)), "seed": task.seed}}
    if what == "print":
        print("a line that is no event")
        return 1
    if what == "flood":
        for _ in range(2000):
            print("x" * 1000)
        return 1
    if what == "raise":
        raise KeyError("no such tool")
    if what == "exit":
        raise SystemExit(3)
    if what == "die":
        os._exit(7)
    if what == "object":
        return object()
    if what == "block":
        open(task.data["file"], "w").close()
        time.sleep(1000)
    if what == "wait":
        open(task.data["file"], "w").close()
        await asyncio.sleep(1000)
    if what == "tidy":
        open(task.data["file"], "w").close()
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.1)
            with open(task.data["file"], "w") as file:
                file.write("tidied up")
    if what == "stubborn":
        open(task.data["file"], "w").close()
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if what == "fill":
        kept.append(bytearray(400 << 20))
        return 1
    if what == "write":
        for descriptor in range(3, 30):
            try:
                os.write(descriptor, task.data["line"].encode() + b"\\n")
            except OSError:
                pass
    if what == "process":
        return os.getpid()
    if what == "start":
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    if what == "close":
        async with client:
            return 1
    if what == "request":
        await client.with_options(max_retries=0).models.list()
    if what == "signal":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    if what == "large":
        return {"stats": {str(number): 1 for number in range(2_000_000)}}
    if what == "call":
        import urllib.request
        return float(urllib.request.urlopen(task.data["url"]).status)

def plain(task, client):
    if task.data["what"] == "stop":
        next(iter(()))
    if task.data["what"] == "block":
        open(task.data["file"], "w").close()
        time.sleep(1000)
    if task.data["what"] == "meet":
        barrier.wait(60)
    return float(client.api_key == "sk-1")
"""
DEADLINE_S = 120


def task(what: str, **data: Any) -> Task:
    return Task(id=5, seed=6, training=True, data={"what": what, **data})


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pool_agents.py").write_text(AGENTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


def use(
    test: Callable[[AgentPool], Awaitable[None]],
    name: str | None = "pool_agents:agent",
    command: str | None = None,
    processes: int = 1,
    most_memory: float = 1e12,
    patience: Patience = PATIENCE,
) -> None:
    """Run a test with a pool, after which no process of it is left."""

    async def main() -> None:
        pool = AgentPool(name, command, processes, most_memory, patience)
        await pool.start()
        try:
            await test(pool)
        finally:
            await pool.close()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


async def play(pool: AgentPool, what: str, **data: Any) -> Any:
    return await pool.run(task(what, **data), "http://127.0.0.1:1/v1", "sk-1")


async def appears(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


def put_clock_forward(seconds: float) -> None:
    """Have so much time pass at once for the loop, as where it stood still, and for nothing else."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def vanishes(pid: int) -> None:
    """A process that was sent SIGKILL takes a moment to go."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


@pytest.mark.system
def test_results_come_back_and_faults_with_their_reason(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        assert await play(pool, "number") == 0.5
        assert await play(pool, "details") == {"score": 0.25, "stats": {"url": 22, "seed": 6}}
        assert await play(pool, "print") == 1
        for what, reason in {"raise": "KeyError: 'no such tool'", "exit": "SystemExit", "object": "TypeError"}.items():
            with pytest.raises(AgentFailed, match=reason):
                await play(pool, what)
        many = await asyncio.gather(*(play(pool, "number") for _ in range(64)))
        assert many == [0.5] * 64 and pool.num_replaced == 0

    use(test)


@pytest.mark.system
def test_agents_fill_no_log(agents: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def test(pool: AgentPool) -> None:
        assert [await play(pool, what) for what in ("print", "flood", "number")] == [1, 1, 0.5]

    use(test)
    said = capfd.readouterr().err
    assert "a line that is no event" in said and said.count("the rest of this time is left out") == 1
    assert said.count("x") < 40_000


@pytest.mark.system
def test_a_process_that_dies_fails_its_episodes_and_is_replaced(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        waiting = asyncio.ensure_future(play(pool, "wait", file=str(agents / "waits")))
        await appears(agents / "waits")
        for dying in (play(pool, "die"), waiting):
            with pytest.raises(AgentFailed, match="ended it with status 7"):
                await dying
        assert await play(pool, "number") == 0.5 and pool.num_replaced == 1

    use(test)


@pytest.mark.system
def test_a_process_whose_pipe_an_agent_has_written_to_fails_its_episodes_with_that_reason(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        for line in ("5", "no JSON", '{"episode": 1}'):
            with pytest.raises(AgentFailed, match="wrote to a descriptor that is the pool's"):
                await play(pool, "write", line=line)
            assert await play(pool, "number") == 0.5

    use(test)


@pytest.mark.system
@pytest.mark.parametrize(("name", "what"), [("agent", "block"), ("agent", "stubborn"), ("plain", "block")])
def test_an_agent_that_does_not_end_with_its_time_costs_its_process(agents: Path, name: str, what: str) -> None:
    async def test(pool: AgentPool) -> None:
        stuck = asyncio.ensure_future(play(pool, what, file=str(agents / "stuck")))
        await appears(agents / "stuck")
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert await play(pool, "number") in (0.5, 1.0)
        assert pool.num_replaced == 1

    use(test, f"pool_agents:{name}", patience=Patience(grace_s=0.5))


def test_an_episode_that_is_cancelled_before_it_began_ends_like_others() -> None:
    async def never(task: Task, url: str, key: str) -> None:
        raise AssertionError("it was cancelled")

    async def main() -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        worker = Worker(never, said.append)
        # As they come where the process was busy meanwhile.
        worker.handle({"episode": 3, "task": vars(task("number")), "url": "", "key": ""})
        worker.handle({"cancel": 3})
        while not said:
            await asyncio.sleep(0)
        worker.handle({"cancel": 3})
        return said

    assert asyncio.run(asyncio.wait_for(main(), 5)) == [{"episode": 3, "failed": "cancelled", "leaks": False}]


@pytest.mark.system
def test_a_process_that_takes_a_dead_ones_place_and_does_not_come_up_fails_its_episode(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        blocks = "import time\nopen(f'{__file__}.begun', 'w').close()\ntime.sleep(1000)\n"
        (agents / "pool_agents.py").write_text(blocks)
        with pytest.raises(AgentFailed, match="status 7"):
            await play(pool, "die")
        waiting = asyncio.ensure_future(play(pool, "number"))
        await appears(agents / "pool_agents.py.begun")
        put_clock_forward(60)
        with pytest.raises(AgentFailed, match="no process of the agent came up in 60 s"):
            await waiting

    use(test, patience=Patience(start_s=60))


@pytest.mark.system
def test_processes_play_on_while_one_in_a_dead_ones_place_comes_up(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        (agents / "pool_agents.py").write_text("import time\ntime.sleep(1000)\n")
        with pytest.raises(AgentFailed, match="status 7"):
            await play(pool, "die")
        for _ in range(3):
            assert await asyncio.wait_for(play(pool, "number"), 60) == 0.5
        assert pool.num_replaced == 1

    use(test, processes=2)


@pytest.mark.system
def test_an_agent_that_closes_its_client_closes_no_others(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        assert await play(pool, "close") == 1
        with pytest.raises(AgentFailed, match="APIConnectionError"):  # nothing listens there: it has been tried
            await play(pool, "request")

    use(test)


@pytest.mark.system
def test_a_limit_of_memory_that_no_process_can_keep_is_refused(agents: Path) -> None:
    async def main() -> None:
        pool = AgentPool("pool_agents:agent", None, 2, 2.0**20)
        try:
            with pytest.raises(AgentFailed, match=r"agent.process_memory_mb=1: .* before its first episode; raise it"):
                await pool.start()
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_what_an_agent_does_for_its_end_is_not_cancelled_a_second_time() -> None:
    async def tidy(task: Task, url: str, key: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            said.append({"tidied": True})

    async def main() -> None:
        worker = Worker(tidy, said.append)
        worker.handle({"episode": 3, "task": vars(task("number")), "url": "", "key": ""})
        await asyncio.sleep(0)
        while len(said) < 2:
            worker.handle({"cancel": 3})
            await asyncio.sleep(0)

    said: list[dict[str, Any]] = []
    asyncio.run(asyncio.wait_for(main(), 5))
    assert said == [{"tidied": True}, {"episode": 3, "failed": "cancelled", "leaks": False}]


@pytest.mark.system
def test_a_process_whose_actor_was_killed_in_the_middle_of_a_command_ends_with_what_it_has_started(
    agents: Path,
) -> None:
    name = f"test-{agents.name}"
    reading, told = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-m", "impala_llm.gateway.worker", str(told)],
        stdin=subprocess.PIPE,
        pass_fds=(told,),
        env={**os.environ, WORKER: name},
    )
    os.close(told)
    assert worker.stdin is not None
    command = {"episode": 0, "task": vars(task("start")), "url": "http://127.0.0.1:1/v1", "key": "sk-1"}
    for line in ({"agent": "pool_agents:agent", "command": None}, command):
        worker.stdin.write(json.dumps(line).encode() + b"\n")
        worker.stdin.flush()
    with open(reading) as events:
        started = psutil.Process(next(event["result"] for event in map(json.loads, events) if "result" in event))
    worker.stdin.write(b'{"episode": 1, "task": {"da')
    worker.stdin.close()
    assert worker.wait(DEADLINE_S) == 0
    assert has_ended(started)


@pytest.mark.system
def test_what_the_interpreter_prints_at_its_start_is_no_event(agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (agents / "sitecustomize.py").write_text("print('hello from the site')")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")

    async def test(pool: AgentPool) -> None:
        assert await play(pool, "number") == 0.5

    use(test)


@pytest.mark.system
def test_an_agent_that_reads_the_arguments_of_its_process_as_it_is_imported_finds_none(agents: Path) -> None:
    with (agents / "pool_agents.py").open("a") as file:
        file.write("import argparse\nargparse.ArgumentParser().parse_args()\n")

    async def test(pool: AgentPool) -> None:
        assert await play(pool, "number") == 0.5

    use(test)


@pytest.mark.system
def test_a_blocked_process_is_found_without_a_time_out(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        blocking = asyncio.ensure_future(play(pool, "block", file=str(agents / "blocks")))
        await appears(agents / "blocks")
        with pytest.raises(AgentFailed, match="blocked it"):
            await blocking
        assert await play(pool, "number") == 0.5

    use(test, patience=Patience(blocked_s=3.0))


@pytest.mark.system
def test_a_process_that_grows_is_replaced_when_its_episodes_are_over(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        first = await play(pool, "process")
        assert await play(pool, "fill") == 1
        assert await play(pool, "process") != first
        assert pool.num_replaced == 1

    use(test, most_memory=400 << 20)


@pytest.mark.system
def test_a_file_beside_an_agent_hides_no_module_of_pythons_and_the_agent_is_found(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_namesakes(user_folder)
    (user_folder / "agent_in_folder.py").write_text(AGENTS)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    async def test(pool: AgentPool) -> None:
        assert await play(pool, "number") == 0.5

    use(test, "agent_in_folder:agent")


@pytest.mark.system
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ModuleNotFoundError('none', name='openai')", "needs the package openai: pip install"),
        ("import no_such_module", "openai cannot be imported .ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "raise AttributeError('half of it')",
            "openai cannot be imported .AttributeError: half of it, in .*openai.py:1",
        ),
    ],
)
def test_why_the_client_of_agents_cannot_be_imported_is_said(agents: Path, code: str, reason: str) -> None:
    (agents / "openai.py").write_text(code)
    with pytest.raises(AgentFailed, match=reason):
        use(lambda pool: play(pool, "number"))


@pytest.mark.system
@pytest.mark.parametrize("name", ["agent", "plain"])
def test_an_agent_that_raises_stop_iteration_ends_with_its_line(agents: Path, name: str) -> None:
    async def test(pool: AgentPool) -> None:
        with pytest.raises(AgentFailed, match=r"raised StopIteration, in .*pool_agents\.py:\d+$"):
            await asyncio.wait_for(play(pool, "stop"), 60)
        assert pool.num_replaced == 0

    use(test, f"pool_agents:{name}")


@pytest.mark.system
def test_an_agent_that_is_not_there_is_named(agents: Path) -> None:
    for name, reason in {"no_such_module:agent": "cannot be imported", "pool_agents:other": "has no other"}.items():
        with pytest.raises(AgentFailed, match=reason):
            use(lambda pool: play(pool, "number"), name)


@pytest.mark.system
def test_agents_that_are_no_coroutines_run_at_once_each_in_a_thread(agents: Path) -> None:
    """Forty of them wait for each other."""

    async def test(pool: AgentPool) -> None:
        assert await asyncio.gather(*(play(pool, "meet") for _ in range(40))) == [1.0] * 40

    use(test, "pool_agents:plain")


@pytest.mark.system
def test_what_an_agent_started_and_left_ends_with_its_process(agents: Path) -> None:
    started = []

    async def test(pool: AgentPool) -> None:
        started.append(psutil.Process(await play(pool, "start")))
        with pytest.raises(AgentFailed, match="ended it with status -9"):  # and this process lives
            await play(pool, "signal")
        started.append(psutil.Process(await play(pool, "start")))

    use(test)
    assert all(map(has_ended, started))


@pytest.mark.system
def test_a_result_that_is_too_large_fails_its_own_episode(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        with pytest.raises(AgentFailed, match="its result has .* characters"):
            await play(pool, "large")
        assert await play(pool, "number") == 0.5 and pool.num_replaced == 0

    use(test)


@pytest.mark.system
def test_a_pause_of_the_actor_is_no_silence_of_the_agents(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        waiting = asyncio.ensure_future(play(pool, "wait", file=str(agents / "waits")))
        await appears(agents / "waits")
        put_clock_forward(61)
        assert await play(pool, "number") == 0.5 and pool.num_replaced == 0 and not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    use(test, patience=Patience(blocked_s=60))


@pytest.mark.system
def test_agents_reach_the_gateway_past_a_proxy(agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def test(pool: AgentPool) -> None:
        async with await asyncio.start_server(_say_ok, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await play(pool, "call", url=f"http://127.0.0.1:{port}/") == 200.0

    use(test)


async def _say_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()
    writer.close()


PROGRAM = """
import json, os, sys, time, subprocess
task = json.loads(open(os.environ["IMPALA_TASK_FILE"]).read())
assert json.loads(os.environ.get("IMPALA_TASK", "null")) in (None, task)
assert os.environ["OPENAI_API_KEY"] == "sk-1" and os.environ["OPENAI_BASE_URL"].endswith("/v1")
what = task["data"]["what"]
if what == "file":
    open(os.environ["IMPALA_REWARD_FILE"], "w").write(json.dumps({"score": 0.75}))
if what == "stdout":
    print("thinking")
    print(0.5)
if what == "leave":  # it holds the output, in a session of its own
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(json.dumps({"stats": {"pid": left.pid}, "score": 1}))
if what == "crash":
    sys.exit("no such tool")
if what == "wait":
    subprocess.Popen(["sleep", "1000"])
    open(task["data"]["file"], "w").close()
    time.sleep(1000)
"""


@pytest.mark.system
def test_a_command_reports_by_file_or_output_and_ends_with_its_episode(agents: Path) -> None:
    program = agents / "program.py"
    program.write_text(PROGRAM)

    async def test(pool: AgentPool) -> None:
        assert await play(pool, "file") == {"score": 0.75}
        assert await play(pool, "stdout") == 0.5
        assert await play(pool, "nothing") is None
        assert await play(pool, "nothing", text="x" * 1_000_000) is None
        left = (await play(pool, "leave"))["stats"]["pid"]
        await vanishes(left)
        with pytest.raises(AgentFailed, match="ended with status 1"):
            await play(pool, "crash")
        waiting = asyncio.ensure_future(play(pool, "wait", file=str(agents / "waits")))
        await appears(agents / "waits")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not [c for c in psutil.Process().children(recursive=True) if "sleep" in c.name()]
        running = asyncio.ensure_future(play(pool, "wait", file=str(agents / "left")))  # ends with the pool
        await appears(agents / "left")
        del running

    use(test, None, shlex.join([sys.executable, str(program)]))


@pytest.mark.system
def test_folders_of_programs_go_with_a_process_that_is_killed(
    agents: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = agents / "program.py"
    program.write_text(PROGRAM)
    temporary = tmp_path_factory.mktemp("temporary")  # its own: runs beside this one have such folders too
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    of_others = set(psutil.Process().children())

    async def test(pool: AgentPool) -> None:
        workers = set(psutil.Process().children()) - of_others
        waiting = asyncio.ensure_future(play(pool, "wait", file=str(agents / "waits")))
        await appears(agents / "waits")
        assert list(temporary.glob("impala-agent-*"))
        for worker in workers:
            worker.kill()
        with pytest.raises(AgentFailed):
            await waiting

    use(test, None, shlex.join([sys.executable, str(program)]))
    assert list(temporary.glob("impala-agent-*")) == []


@pytest.mark.system
def test_agents_clean_up_when_the_pool_is_closed_and_those_that_do_not_end_are_ended(agents: Path) -> None:
    async def test(pool: AgentPool) -> None:
        kinds = ("tidy", "stubborn")
        playing = [asyncio.ensure_future(play(pool, kind, file=str(agents / kind))) for kind in kinds]
        for kind in kinds:
            await appears(agents / kind)
        await pool.close()
        assert (agents / "tidy").read_text() == "tidied up"
        for each in playing:
            with pytest.raises(AgentFailed):
                await each

    use(test)


FLOODED = """
import asyncio, sys
from impala_llm.gateway.agent_pool import AgentPool
from impala_llm.gateway.tasks import Task

async def main():
    pool = AgentPool("pool_agents:agent", None, 1, 1e12)
    await pool.start()
    print(await pool.run(Task(5, 6, True, {"what": "flood"}), "http://127.0.0.1:1/v1", "sk-1"), flush=True)
    sys.stdin.readline()
    await pool.close()

asyncio.run(main())
"""


@pytest.mark.system
def test_a_standard_error_that_nobody_reads_stops_no_agent_and_is_told_what_it_missed(agents: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"-" * 4096)
    os.set_blocking(writing, True)
    command, pipe = [sys.executable, "-c", FLOODED], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=writing) as process,
        os.fdopen(reading, "rb") as errors,
    ):
        os.close(writing)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert set(errors.read1(1 << 20)) == set(b"-")
        process.stdin.close()
        said = errors.read()
    [dropped] = re.findall(rb"(\d+) bytes that the agents of this process have printed were dropped", said)
    assert process.returncode == 0 and 32 << 10 <= int(dropped) < 33 << 10  # what the log would have had


def test_a_pipe_that_cannot_be_read_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError("no more descriptors are watched")

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", fail)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="no more"):
            await open_pipe()
        assert os.listdir("/proc/self/fd") == before

    asyncio.run(main())
