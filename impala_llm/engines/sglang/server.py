"""SGLang server as a process: its start, its death, its end.

Invariant: between a `start` that returned and the end of the server, `url` answers. When any part of the server dies,
`wait_dead` returns at once, and no process and no folder of it is left; of its files in shared memory only such as
guard.py names. The same holds when its guard is killed, and when its owner is, but not when both are at once: then
processes, files and the folder with its key may be left.

Left out on purpose: requests to the server. A restarted server has the weights of its model directory: its owner gives
it the current ones before it gets requests.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from impala_llm.engines.sglang.guard import FOLDER_VARIABLE, finish, new_folder
from impala_llm.engines.sglang.launch_args import (
    HOST,
    ServerError,
    ServerSettings,
    check_model,
    check_python,
    command,
    environment,
)
from impala_llm.processes.supervised import signal_name

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.1
CLOSE_S = 8.0
"""Seconds for the guard to end all processes; then it is killed, and this process does the rest."""
PORT_ATTEMPTS = 4
PORT_TAKEN = "address already in use"
IDLE_TALK = ("Decode batch", "Prefill batch", "resource_tracker", "server_args=")
"""Marks of lines in the log that never tell why a server died; lines with the last one hold its key."""


class SGLangServer:
    """Owns one server at a time. All methods are called from one asyncio loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._url = ""
        self._guard: asyncio.subprocess.Process | None = None
        self._folder = Path()
        """The guard's temporary folder."""
        self._log_start = 0
        self._watcher: asyncio.Task[None] | None = None
        self._death: asyncio.Future[str] | None = None

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT of the newest start; empty before the first."""
        return self._url

    @property
    def key(self) -> str:
        """API key, without which it answers only probes; see docs/engines.md."""
        return self.settings.key

    async def start(self) -> None:
        """Start the server, and wait until it answers.

        Raises:
            BadServerSettings: an interpreter or a model directory that cannot work.
            ServerError: it ended while starting, or took longer than `start_timeout_s`.
        """
        if self._guard is not None:
            raise ServerError(f"the SGLang server at {self.url} runs already")
        check_model(self.settings)
        await check_python(self.settings.python)
        guard = None
        for remaining in reversed(range(PORT_ATTEMPTS)):
            port = await _free_port()
            guard = await self._start_at(port, final=remaining == 0)
            if guard is not None:
                break
        assert guard is not None, "the final attempt raises"
        self._url = f"http://{HOST}:{port}"
        self._death = asyncio.get_running_loop().create_future()
        watching = self._watch(guard, _server(guard.pid), _workers(guard.pid), self._death)
        self._watcher = asyncio.create_task(watching)

    async def wait_dead(self) -> str:
        """Wait until the server has died or was closed. Returns the reason. Any number of tasks may wait."""
        if self._death is None:
            return "the SGLang server was not started"
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """End the server and all of its processes. It may be called before a start, and twice."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        await self._end()
        if self._death is not None and not self._death.done():
            self._death.set_result("the SGLang server was closed")

    def log_end(self, lines: int = 12) -> str:
        """Last lines of its output since its last start, without `IDLE_TALK`, each indented on a new line."""
        told = [line for line in self._printed().splitlines() if not any(talk in line for talk in IDLE_TALK)]
        return "".join(f"\n    {line[:400]}" for line in told[-lines:])

    async def _start_at(self, port: int, final: bool) -> asyncio.subprocess.Process | None:
        """Start a server. Returns its guard; None if another process took its port, except in the final attempt."""
        settings = self.settings
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        # SGLang prints its settings, including keys.
        with open(settings.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            os.fchmod(log.fileno(), 0o600)
            self._log_start = log.tell()
            self._folder = new_folder()
            guard = self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, str(GUARD), str(os.getpid()), *command(settings, port)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**environment(settings, os.environ), FOLDER_VARIABLE: str(self._folder)},
                start_new_session=True,  # Ctrl-C reaches only the owner, which ends this in order
            )
        up = False
        try:
            up = await self._wait_until_up(guard, port, final)
        finally:
            if not up:
                await self._end()
        return guard if up else None

    async def _wait_until_up(self, guard: asyncio.subprocess.Process, port: int, final: bool) -> bool:
        """Wait for a server. Returns False if its port was taken. Raises ServerError if it does not come up."""
        ended = asyncio.create_task(guard.wait())
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                while not ended.done():
                    # The system is asked too: the answer at the port may come from another server.
                    if await _healthy(port) and _listens(guard.pid, port):
                        guard.send_signal(signal.SIGUSR1)
                        assert guard.stdout is not None
                        await guard.stdout.readline()  # the guard has noted the server's files
                        return True
                    await asyncio.wait({ended}, timeout=POLL_S)
        except TimeoutError:
            raise ServerError(
                f"the SGLang server for {self.settings.model} did not come up within "
                f"{self.settings.start_timeout_s:g} s (engine.start_timeout_s); its log is {self.settings.log}, "
                f"which ends with:{self.log_end()}"
            ) from None
        finally:
            ended.cancel()
        if PORT_TAKEN in self._printed().lower() and not final:
            return False
        raise ServerError(
            f"the SGLang server for {self.settings.model} ended while starting: {_reason(guard.returncode)}; its log "
            f"is {self.settings.log}, which ends with:{self.log_end()}"
        )

    async def _watch(
        self,
        guard: asyncio.subprocess.Process,
        server: psutil.Process | None,
        workers: Mapping[psutil.Process, str],
        death: asyncio.Future[str],
    ) -> None:
        """Wait until the server or one of its worker processes is dead. SGLang itself takes seconds to notice the death
        of a worker, while clients wait."""
        ended = asyncio.create_task(guard.wait())
        try:
            while not ended.done() and all(map(_runs, workers)):
                await asyncio.wait({ended}, timeout=POLL_S)
            lost = " and ".join(name for worker, name in workers.items() if not _runs(worker))
            if server is None or not _runs(server):
                # Its workers die with it, and may be seen dead first; the guard will tell the reason.
                await asyncio.wait({ended}, timeout=CLOSE_S)
        finally:
            ended.cancel()
        await self._end()
        # A guard that was told to end the server returns 0.
        what = f"lost its process {lost}" if lost and not guard.returncode else f"ended: {_reason(guard.returncode)}"
        death.set_result(
            f"the SGLang server at {self.url} {what}; its log is {self.settings.log}, which ends with:{self.log_end()}"
        )

    async def _end(self) -> None:
        guard = self._guard
        if guard is None:
            return
        try:
            if guard.returncode is None:
                guard.terminate()
            async with asyncio.timeout(CLOSE_S):
                await guard.wait()
        except TimeoutError:
            for process in _descendants(guard.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            guard.kill()
            await guard.wait()
        if guard.returncode is not None and guard.returncode < 0:  # it was killed, by us or by others
            await asyncio.to_thread(finish, guard.pid, self._folder)
        self._guard = None

    def _printed(self) -> str:
        if not self.settings.log.exists():
            return ""
        with self.settings.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, end - 16384))
            return log.read().decode(errors="replace")


async def _free_port() -> int:
    """Find a free port. Another process may take it before the server does."""
    listener = await asyncio.start_server(lambda _reader, _writer: None, HOST, 0)
    port: int = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    return port


async def _healthy(port: int) -> bool:
    """Return whether a healthy server answers at the port."""
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"GET /health HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        descendants: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return descendants
    except psutil.NoSuchProcess:
        return []


def _server(guard_pid: int) -> psutil.Process | None:
    """Find the guard's first child; later ones are adopted orphans. None: it is dead already."""
    try:
        return min(psutil.Process(guard_pid).children(), key=psutil.Process.create_time, default=None)
    except psutil.NoSuchProcess:
        return None


def _listens(pid: int, port: int) -> bool:
    """Return whether a descendant listens at the port."""
    for process in _descendants(pid):
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections):
            return True
    return False


def _workers(pid: int) -> dict[psutil.Process, str]:
    """Find SGLang's own processes below this one, with their titles. Other processes may start and end."""
    workers = {}
    for process in _descendants(pid):
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            # The title, sglang::scheduler for example, replaces the first word, where it could be set.
            if words and words[0].startswith("sglang::"):
                workers[process] = words[0]
            elif any("spawn_main" in word for word in words):
                workers[process] = f"worker {process.pid}"
    return workers


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reason(code: int | None) -> str:
    """Explain an exit code of the guard: the server's own or, after a signal, 128 plus its number."""
    if code is not None and code < 0:
        return f"its guard was killed by {signal_name(-code)}"
    if code is not None and 0 < code - 128 < signal.NSIG:
        return f"killed by {signal_name(code - 128)}"
    return f"exit code {code}"
