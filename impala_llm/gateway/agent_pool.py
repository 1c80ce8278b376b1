"""The pool of processes in which agents run.

Invariant: an episode that is given to the pool comes back once: with the agent's result, or with an `AgentFailed`. What
an agent does to its process, such as blocking, crashing or filling it, costs at most the episodes of that process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import select
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from impala_llm.gateway.descendants import WORKER, folder_prefix, kill_started
from impala_llm.gateway.tasks import Task
from impala_llm.gateway.worker_pipes import open_pipe
from impala_llm.processes.module_process import module_command, python_path

_SILENT_PARTS = 3
"""Parts of `Patience.blocked_s` that are waited for one after the other."""
_END_S = 1.0
"""Time for each step of the end of a process: all of them fit into what the supervisor gives an actor."""
_RETRY_S = 30.0
"""Time between two attempts to replace processes while others play on."""
_MOST_PRINTED = 32 << 10
"""Bytes of what a process and its agents print that are kept, in each period of `_PRINTED_S`."""
_PRINTED_S = 60.0
_CUT = b"\n[the agents of this process have printed %d kB in less than %g s: the rest of this time is left out]\n"
_DROPPED = (
    b"\n[%d bytes that the agents of this process have printed were dropped: the actor's log was not read in time]\n"
)


class AgentFailed(RuntimeError):
    """An agent, or its process, did not come to a result. The message is the reason."""


@dataclass(frozen=True)
class Patience:
    """Time limits for a process of the pool, in seconds."""

    start_s: float = 120.0
    """Limit of its start: imports are slow on a busy machine."""
    grace_s: float = 5.0
    """Limit for the end of an episode that was cancelled."""
    blocked_s: float = 30.0
    """Silence after which it counts as blocked."""


PATIENCE = Patience()


class AgentPool:
    """Processes that run agents.

    Args:
        name: `agent.name`; None with a command.
        command: `agent.command`.
        most_memory: bytes of a process, beyond which it is replaced.
        patience: with each of them.
    """

    def __init__(
        self,
        name: str | None,
        command: str | None,
        num_processes: int,
        most_memory: float,
        patience: Patience = PATIENCE,
    ) -> None:
        self._settings = {"agent": name, "command": command}
        self._num_processes, self._most_memory, self._patience = num_processes, most_memory, patience
        self._workers: list[_Process] = []
        self._retired: list[_Process] = []
        self._starting: asyncio.Task[None] | None = None
        """Starts those that are missing, while the others play on."""
        self._start_at = 0.0
        """Time of the loop before which that is not tried again."""
        self.num_replaced = 0
        """Processes that were replaced, since the start."""

    async def start(self) -> None:
        """Start all processes. Raises AgentFailed where the agent cannot be imported."""
        await self._fill()

    async def run(self, task: Task, url: str, key: str) -> Any:
        """Run the agent. Cancelled, it ends the agent first, or the process where that does not end.

        Raises:
            AgentFailed: it raised, or its process ended.
        """
        self._tend()
        if not self._workers:
            starting = self._starting = self._starting or asyncio.create_task(self._fill())
            await asyncio.wait([starting])  # which continues for other episodes if this one is cancelled
            if not self._workers:
                starting.result()
        worker = min(self._workers, key=lambda each: each.num_episodes)
        return await worker.run(task, url, key)

    async def close(self) -> None:
        """End all processes."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in [*self._workers, *self._retired]))
        self._workers, self._retired = [], []

    async def _new(self) -> "_Process":
        name = secrets.token_hex(8)
        with contextlib.ExitStack() as if_failed, contextlib.ExitStack() as anyway:
            printed, printing, writing = await open_pipe()
            if_failed.callback(printing.close)
            anyway.callback(os.close, writing)
            # Not standard output, on which what the interpreter runs at its start, such as a sitecustomize, may print.
            events, telling, told = await open_pipe(1 << 24)
            if_failed.callback(telling.close)
            anyway.callback(os.close, told)
            process = await asyncio.create_subprocess_exec(
                *(*module_command("impala_llm.gateway.worker"), str(told)),
                stdin=asyncio.subprocess.PIPE,
                stdout=writing,
                stderr=writing,
                pass_fds=(told,),
                env={**os.environ, **python_path(), **_without_proxy(os.environ), "OMP_NUM_THREADS": "1", WORKER: name},
                start_new_session=True,  # an agent that signals its process group is not to end the actor
            )
            if_failed.pop_all()
        show = asyncio.create_task(_print_some(printed, printing))
        worker = _Process(process, name, events, telling, show, self._patience)
        try:
            async with asyncio.timeout(self._patience.start_s):
                await worker.start(self._settings)
        except TimeoutError:
            await worker.close()
            raise AgentFailed(f"no process of the agent came up in {self._patience.start_s:g} s") from None
        except BaseException:
            await worker.close()
            raise
        if worker.memory() > self._most_memory:
            size = worker.memory()
            await worker.close()
            raise AgentFailed(
                f"agent.process_memory_mb={self._most_memory / 2**20:g}: a process of the agents has "
                f"{size / 2**20:.0f} MiB before its first episode; raise it"
            )
        return worker

    async def _fill(self) -> None:
        """Start the processes that are missing. Raises AgentFailed where one does not come up."""

        async def add() -> None:
            self._workers.append(await self._new())

        missing = self._num_processes - len(self._workers)
        for error in await asyncio.gather(*(add() for _ in range(missing)), return_exceptions=True):
            if error is not None:
                raise error

    def _tend(self) -> None:
        """Retire processes that have ended, or are to end with their last episode; others start beside the rest."""
        for worker in list(self._workers):
            if not worker.is_alive or worker.leaks or worker.memory() > self._most_memory:
                self._workers.remove(worker)
                self._retired.append(worker)
                self.num_replaced += 1
        for worker in [each for each in self._retired if not each.num_episodes]:
            self._retired.remove(worker)
            worker.end("it was replaced")
        now = asyncio.get_running_loop().time()
        if self._starting is not None and self._starting.done():
            if (error := self._starting.exception()) is not None:
                self._start_at = now + _RETRY_S
                print(f"a process of the agents could not be replaced: {error}", file=sys.stderr, flush=True)
            self._starting = None
        if len(self._workers) < self._num_processes and self._starting is None and now >= self._start_at:
            self._starting = asyncio.create_task(self._fill())


class _Process:
    """One process of the pool.

    Args:
        name: the value of the variable that all below it have.
        events: what it says, over `telling`.
        printing: prints what they print, until all of them have ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        name: str,
        events: asyncio.StreamReader,
        telling: asyncio.BaseTransport,
        printing: asyncio.Task[None],
        patience: Patience,
    ) -> None:
        self._process, self._name, self._events, self._telling = process, name, events, telling
        self._printing, self._patience = printing, patience
        self._resources: psutil.Process | None = None
        self._numbers = itertools.count()
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.leaks = False
        """Whether an agent has left something behind that only the end of the process ends."""
        self.is_alive = True

    @property
    def num_episodes(self) -> int:
        return len(self._results)

    def memory(self) -> float:
        """Resident bytes."""
        with contextlib.suppress(psutil.Error):
            self._resources = self._resources or psutil.Process(self._process.pid)
            return float(self._resources.memory_info().rss)
        return 0.0

    async def start(self, settings: dict[str, Any]) -> None:
        """Wait until it is ready. Raises AgentFailed."""
        self._send(settings)
        line = await self._events.readline()
        event = json.loads(line) if line else {"broken": f"its process ended with status {await self._process.wait()}"}
        if "broken" in event:
            raise AgentFailed(event["broken"])
        self._reader = asyncio.create_task(self._read())

    async def run(self, task: Task, url: str, key: str) -> Any:
        if not self.is_alive:
            raise AgentFailed("the process of the agents has ended")
        number = next(self._numbers)
        future = self._results[number] = asyncio.get_running_loop().create_future()
        self._send({"episode": number, "task": asdict(task), "url": url, "key": key})
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await self._cancel(number, future)
            raise
        finally:
            self._results.pop(number, None)

    def end(self, reason: str) -> None:
        """Fail its episodes, and end the process in the background."""
        if not self.is_alive:
            return
        self.is_alive = False
        for future in self._results.values():
            if not future.done():
                future.set_exception(AgentFailed(reason))
        self._closing = asyncio.create_task(self._close())

    async def close(self) -> None:
        """Cancel its episodes, which have `_END_S` for their clean-up, and end the process."""
        if self.is_alive and self._results:
            for number in self._results:
                self._send({"cancel": number})
            await asyncio.wait(list(self._results.values()), timeout=_END_S)
        self.end("the pool of agents was closed")
        if self._closing is not None:
            await self._closing

    async def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # upon which it ends, and what it has started
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.to_thread(self._clear)
        if self._reader is not None:
            self._reader.cancel()
        self._telling.close()
        await asyncio.wait([self._printing], timeout=_END_S)  # its last words
        self._printing.cancel()

    def _clear(self) -> None:
        """End what it has started, and remove its folders, where it could not do so itself."""
        kill_started(WORKER, self._name)
        for folder in Path(tempfile.gettempdir()).glob(f"{folder_prefix(self._name)}*"):
            shutil.rmtree(folder, ignore_errors=True)

    async def _cancel(self, number: int, future: "asyncio.Future[Any]") -> None:
        if not self.is_alive:
            return
        self._send({"cancel": number})
        done, _ = await asyncio.wait([future], timeout=self._patience.grace_s)
        if not done:
            self.end("another agent of the process did not end when its time was over")
        elif not future.cancelled():
            future.exception()  # mark it as retrieved: no other code reads it

    async def _read(self) -> None:
        try:
            while line := await self._next_line():
                self._handle(json.loads(line))
            reason = f"ended it with status {await self._process.wait()}"
        except TimeoutError:
            reason = "blocked it"
        except Exception as error:  # the line may hold anything
            reason = (
                "wrote to a descriptor that is the pool's, so that no result can be told from its text: let it write "
                f"to its own alone ({error!r:.200})"
            )
        self.end(f"an agent of the process {reason}")

    async def _next_line(self) -> bytes:
        """Read the next line. Raises TimeoutError after `blocked_s` without one.

        The time is waited for in several parts: a pause of this process's own event loop uses up only one of them.
        """
        part_s = self._patience.blocked_s / _SILENT_PARTS
        for _ in range(_SILENT_PARTS - 1):
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._events.readline(), part_s)
        return await asyncio.wait_for(self._events.readline(), part_s)

    def _handle(self, event: dict[str, Any]) -> None:
        self.leaks = self.leaks or bool(event.get("leaks"))
        future = self._results.get(event.get("episode", -1))
        if future is None or future.done():
            return
        if "failed" in event:
            future.set_exception(AgentFailed(event["failed"]))
        else:
            future.set_result(event["result"])

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")


async def _print_some(stream: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
    """Print a stream on the standard error, up to a limit in each period, so that no agent fills the log."""
    loop = asyncio.get_running_loop()
    dropped = 0
    left, until = _MOST_PRINTED, loop.time() + _PRINTED_S
    try:
        while piece := await stream.read(1 << 16):
            if loop.time() >= until:
                left, until = _MOST_PRINTED, loop.time() + _PRINTED_S
            shown = piece[:left]
            if left and len(piece) >= left:
                shown += _CUT % (_MOST_PRINTED >> 10, _PRINTED_S)
            left -= min(left, len(piece))
            dropped += _write_at_once(shown)
    finally:
        if dropped:
            _write_at_once(_DROPPED % dropped)
        transport.close()


def _write_at_once(data: bytes) -> int:
    """Write to the standard error as much as it takes without waiting: a pipe without reader must not stop the actor.

    Returns the number of bytes that it did not take.
    """
    with contextlib.suppress(OSError):
        while data and select.select([], [2], [], 0)[1]:
            # So much fits into a pipe that is ready, and more might not.
            data = data[os.write(2, data[: select.PIPE_BUF]) :]
    return len(data)


def _without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which clients reach loopback without the proxy that the environment may name."""
    return {name: ",".join(filter(None, [environment.get(name), "127.0.0.1"])) for name in ("NO_PROXY", "no_proxy")}
