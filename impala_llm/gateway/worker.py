"""A process of the pool: runs agents, many at once on one asyncio loop, for an actor (agent_pool.py).

It reads commands on its standard input and writes events to the descriptor that its argument names, a JSON object a
line; the output of agents, and of the interpreter at its start, goes to the actor's log. It ends, and kills all that it
or its agents have started, as soon as its input does.

    start the pool's:  {"agent": name, "command": line or null}
    to it:             {"episode": n, "task": {...}, "url": ..., "key": ...}   {"cancel": n}
    from it:           {"ready": true}   {"broken": reason}   {"alive": true}
                       {"episode": n, "result": ...}   {"episode": n, "failed": reason, "leaks": bool}
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from impala_llm.gateway.descendants import WORKER, folder_prefix, kill_started
from impala_llm.gateway.tasks import Task
from impala_llm.gateway.worker_pipes import open_pipe
from impala_llm.part_signatures import is_async
from impala_llm.plugs import AGENTS, load, raised_at

ALIVE_S = 1.0
"""Time between two signs of life."""
_MOST_OUTPUT = 1 << 20
"""Bytes at the end of a program's output in which its reward is looked for."""
_OUTPUT_GRACE_S = 1.0
"""Time in which the output of a program that has ended is read: a process that outlives it may hold it open."""
_MOST_THREADS = 4096
_MOST_RESULT = 1 << 20
"""Characters of a result as JSON."""
_MOST_VARIABLE = 100_000
"""Bytes of a variable: the kernel refuses more than 128 KiB."""

_Run = Callable[[Task, str, str], Awaitable[Any]]


class ThreadLeft(asyncio.CancelledError):
    """An agent that is not a coroutine was cancelled: its thread ends only with the process."""


class AgentError(RuntimeError):
    """An agent did not do its part. The message is the reason."""


def function_runner(name: str) -> _Run:
    """Call the function that `agent.name` means. Raises ValueError where there is none, or openai is not to be had."""
    agent = load(AGENTS, name)
    try:
        import openai
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "openai":
            raise ValueError(f"agent.name={name} needs the package openai: pip install 'impala-llm[agents]'") from error
        reason = f"{type(error).__name__}: {error}{raised_at(error)}"
        raise ValueError(
            f"agent.name={name}: the package openai cannot be imported ({reason}): correct that, or install it anew"
        ) from error

    class SharedClient(openai.DefaultAsyncHttpxClient):
        """Connections of all episodes of this process: a client of its own costs each tens of milliseconds."""

        async def aclose(self) -> None:
            """Do nothing: an agent that closes its client closes those of the other episodes as well."""

    http_client = SharedClient()
    is_awaited = is_async(agent)

    def call(task: Task, client: Any) -> Any:
        try:
            return agent(task, client)
        except StopIteration as error:  # a future takes none, and would be waited for without end
            raise RuntimeError("the agent raised StopIteration") from error

    async def run(task: Task, url: str, key: str) -> Any:
        if is_awaited:
            return await agent(task, openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http_client))
        try:
            return await asyncio.to_thread(call, task, openai.OpenAI(base_url=url, api_key=key))
        except asyncio.CancelledError:
            raise ThreadLeft from None

    return run


def command_runner(command: str) -> _Run:
    """Start a program for each episode, see docs/agents.md."""
    words = shlex.split(command)

    async def run(task: Task, url: str, key: str) -> Any:
        with tempfile.TemporaryDirectory(prefix=folder_prefix(os.environ.get(WORKER, ""))) as folder:
            reward, task_file, as_json = (
                Path(folder) / "reward.json",
                Path(folder) / "task.json",
                json.dumps(vars(task)),
            )
            task_file.write_text(as_json)
            environment = {
                **os.environ,
                "OPENAI_BASE_URL": url,
                "OPENAI_API_KEY": key,
                "IMPALA_TASK_FILE": str(task_file),
                "IMPALA_REWARD_FILE": str(reward),
                **({"IMPALA_TASK": as_json} if len(as_json) <= _MOST_VARIABLE else {}),
            }
            status, output = await _run_program(words, environment)
            if status:
                raise AgentError(f"{words[0]} ended with status {status}")
            if reward.exists():
                try:
                    return json.loads(reward.read_text())
                except ValueError as error:
                    raise AgentError(f"{words[0]} left no JSON in its reward file: {error}") from None
            return _last_value(output.decode(errors="replace"))

    return run


async def _run_program(words: list[str], environment: dict[str, str]) -> tuple[int, bytes]:
    """Run a program to its end, then kill all that it has started. Returns its status, and the end of its output."""
    output = bytearray()
    stream, transport, writing = await open_pipe()
    keeping = asyncio.create_task(_keep_end(stream, output))
    try:
        try:
            program = await asyncio.create_subprocess_exec(
                *words, env=environment, stdin=subprocess.DEVNULL, stdout=writing, start_new_session=True
            )
        finally:
            os.close(writing)
        try:
            status = await program.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            await asyncio.shield(asyncio.to_thread(kill_started, "OPENAI_API_KEY", environment["OPENAI_API_KEY"]))
            await program.wait()
        await asyncio.wait([keeping], timeout=_OUTPUT_GRACE_S)
        return status, bytes(output)
    finally:
        keeping.cancel()
        transport.close()


async def _keep_end(stream: asyncio.StreamReader, output: bytearray) -> None:
    while piece := await stream.read(1 << 16):
        output += piece
        del output[:-_MOST_OUTPUT]


def _last_value(output: str) -> Any:
    """The last line of an output, if it is a JSON number or object; None: it is not, and the reward came otherwise."""
    lines = output.strip().split("\n")
    with contextlib.suppress(ValueError):
        value = json.loads(lines[-1]) if lines else None
        if isinstance(value, int | float | dict) and not isinstance(value, bool):
            return value
    return None


def _raised_at(error: BaseException) -> str:
    """`raised_at`; of a StopIteration, which comes as the cause of another error, the line that raised it."""
    return raised_at(error.__cause__ if isinstance(error.__cause__, StopIteration) else error)


class Worker:
    """Runs episodes as commands say.

    Args:
        say: writes an event.
    """

    def __init__(self, run: _Run, say: Callable[[dict[str, Any]], None]) -> None:
        self._run, self._say = run, say
        self._episodes: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._cancelled: set[int] = set()
        self._seen: set[str] = set()

    def handle(self, command: dict[str, Any]) -> None:
        """Start or cancel an episode."""
        if "cancel" in command:
            number = command["cancel"]
            # Once: a second time would cancel what the agent does for its end.
            if number in self._episodes and number not in self._cancelled:
                self._cancelled.add(number)
                self._episodes[number].cancel()
            return
        number = command["episode"]
        task = asyncio.get_running_loop().create_task(self._play(command))
        self._episodes[number] = task
        task.add_done_callback(partial(self._end, number))

    async def live(self) -> None:
        """Say that the loop turns."""
        while True:
            self._say({"alive": True})
            await asyncio.sleep(ALIVE_S)

    async def _play(self, command: dict[str, Any]) -> dict[str, Any]:
        """The event of its end, without its number."""
        try:
            result = await self._run(Task(**command["task"]), command["url"], command["key"])
            # An agent may return anything; numbers of numpy are numbers.
            as_json = json.dumps(result, default=float)
            if len(as_json) > _MOST_RESULT:
                raise AgentError(f"its result has {len(as_json)} characters as JSON: at most {_MOST_RESULT} are taken")
            return {"result": json.loads(as_json)}
        except asyncio.CancelledError as error:
            return {"failed": "cancelled", "leaks": isinstance(error, ThreadLeft)}
        except BaseException as error:  # of other people's code, sys.exit included
            self._show(error)
            return {"failed": f"{type(error).__name__}: {error}"[:2000] + _raised_at(error)}

    def _end(self, number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        del self._episodes[number]
        self._cancelled.discard(number)
        # One that was cancelled before its first step has not come to its own words.
        event = {"failed": "cancelled", "leaks": False} if task.cancelled() else task.result()
        self._say({"episode": number, **event})

    def _show(self, error: BaseException) -> None:
        """Print the first error of each kind with its traceback."""
        where = _raised_at(error)
        kind = f"{type(error).__name__}{where}" if where else repr(error)
        if kind not in self._seen and len(self._seen) < 100:
            self._seen.add(kind)
            with contextlib.suppress(OSError, ValueError):  # of a stream that is full or closed: the result counts
                traceback.print_exception(error)


def _read_commands(loop: asyncio.AbstractEventLoop, commands: BinaryIO, handle: Callable[[Any], None]) -> None:
    """Read commands, in a thread: a process whose loop is blocked ends with its actor too."""
    try:
        for line in commands:
            if line.endswith(b"\n"):  # else the actor was killed while it wrote
                loop.call_soon_threadsafe(handle, json.loads(line))
    finally:
        kill_started(WORKER, os.environ.get(WORKER, ""))
        os._exit(0)


async def main() -> None:
    """Run until the standard input ends."""
    told = int(sys.argv.pop())  # an agent that reads its arguments as it is imported is not to find it
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(told), "wb", buffering=0)  # no agent inherits them
    os.close(told)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout = sys.stderr

    def say(event: dict[str, Any]) -> None:
        events.write(json.dumps(event).encode() + b"\n")

    settings = json.loads(commands.readline())
    try:
        run = command_runner(settings["command"]) if settings["command"] else function_runner(settings["agent"])
    except ValueError as error:
        say({"broken": str(error)})
        return
    worker = Worker(run, say)
    loop = asyncio.get_running_loop()
    # Agents that are no coroutines wait in their threads: asyncio has few, for as many as there are cores.
    loop.set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
    threading.Thread(target=_read_commands, args=(loop, commands, worker.handle), daemon=True).start()
    say({"ready": True})
    await worker.live()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(main())
