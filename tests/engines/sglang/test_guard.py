"""Remains of a server that is killed, or whose guard is killed. Orderly ends: tests/system/test_sglang_server.py."""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from impala_llm.engines.sglang.launch_args import ServerError, ServerSettings
from impala_llm.engines.sglang.server import GUARD, SGLangServer
from tests.helpers import write_program

DEADLINE_S = 30.0
SERVER = """# Speaks like an interpreter that has SGLang, and like its server.
import http.server, json, mmap, os, subprocess, sys, time
if sys.argv[1:2] == ["-c"]:
    print("0.5.21")
    raise SystemExit
shared, told = {shared!r}, {told!r}

def make(path):
    with open(path, "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)

def count_sleeps():
    with open(f"/proc/{{os.getppid()}}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

kept = [make(shared), make(shared + ".new")]
os.link(shared + ".new", shared + ".semaphore")  # as sem_open does
os.unlink(shared + ".new")
# As workers that are still importing. One has left the session, one has lost its variables.
waits = [sys.executable, "-c", "import time; time.sleep(600)"]
workers = [subprocess.Popen(waits, start_new_session=True), subprocess.Popen(waits, env={{}})]
# Until the guard has slept, has looked for files and sleeps again; one that never looks is not waited for any longer.
first, deadline = count_sleeps(), time.monotonic() + 10
while count_sleeps() < first + 4 and time.monotonic() < deadline:
    time.sleep(0.01)
with open(told + ".new", "w") as file:
    json.dump([os.environ["TMPDIR"], [os.getpid(), *(worker.pid for worker in workers)]], file)
os.rename(told + ".new", told)
{code}
"""
COME_UP = 'http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()'
NEVER_COME_UP = "time.sleep(600)"


@dataclass
class StandIn:
    """A server that makes files and workers, tells of them when its guard has looked at it, and then runs some code."""

    program: Path
    told: Path
    shared: Path
    """One of its files in shared memory."""
    folder: Path = Path()
    """For its temporary files."""
    processes: tuple[psutil.Process, ...] = ()
    """Itself, and its workers."""

    def is_known(self) -> bool:
        """Whether it has told what it has made, which is then known here too."""
        if not self.told.exists():
            return False
        folder, pids = json.loads(self.told.read_bytes())
        self.folder, self.processes = Path(folder), tuple(map(psutil.Process, pids))
        return True

    def files(self) -> list[Path]:
        """Its files in shared memory that are left."""
        return sorted(self.shared.parent.glob(f"{self.shared.name}*"))


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[[str], StandIn]]:
    shared = Path(f"/dev/shm/impala-guard-{os.getpid()}-{tmp_path.parent.name}-{tmp_path.name}")
    made: list[StandIn] = []

    def make(code: str) -> StandIn:
        told = tmp_path / "told"
        program = write_program(tmp_path / "python", SERVER.format(shared=str(shared), told=str(told), code=code))
        made.append(StandIn(program, told, shared))
        return made[-1]

    yield make
    for each in made:
        for process in filter(runs, each.processes):
            process.kill()
        for file in each.files():
            file.unlink()


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; its parent may be somebody who does not ask."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def start_guard(server: StandIn) -> subprocess.Popen[bytes]:
    """Start a guard of the server, without an owner that asks it for anything; returns when it has looked."""
    guard = subprocess.Popen([sys.executable, str(GUARD), str(os.getpid()), str(server.program)])
    deadline = time.monotonic() + DEADLINE_S
    while not server.is_known():
        assert guard.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return guard


@pytest.mark.system
def test_a_server_that_is_killed_unasked_leaves_no_files(stand_in: Callable[[str], StandIn]) -> None:
    """As by the system while it loads a model: nobody has asked the guard yet what it has made."""
    server = stand_in(NEVER_COME_UP)
    guard = start_guard(server)
    assert len(server.files()) == 2
    for process in reversed(server.processes):
        process.kill()
    assert guard.wait(DEADLINE_S) == 128 + 9
    assert server.files() == [] and not server.folder.exists()


@pytest.mark.system
def test_a_file_of_the_server_that_another_process_maps_is_left(stand_in: Callable[[str], StandIn]) -> None:
    server = stand_in(NEVER_COME_UP)
    guard = start_guard(server)
    with server.shared.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        guard.terminate()
        guard.wait(DEADLINE_S)
        assert server.files() == [server.shared]


@pytest.mark.system
def test_a_name_of_a_strangers_file_keeps_no_guard_from_its_work(
    stand_in: Callable[[str], StandIn], tmp_path: Path
) -> None:
    """Names in the kernel's list of maps may hold what ends a line elsewhere, such as \\v or \\r."""
    strange = tmp_path / "x\v\r" / "dev" / "shm" / "file"
    strange.parent.mkdir(parents=True)
    strange.write_bytes(bytes(4096))
    server = stand_in(NEVER_COME_UP)
    guard = start_guard(server)
    with strange.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        guard.terminate()
        guard.wait(DEADLINE_S)
    assert server.files() == [] and not server.folder.exists()


@pytest.mark.system
@pytest.mark.parametrize("comes_up", [True, False])
def test_the_owner_of_a_guard_that_is_killed_removes_what_is_left(
    comes_up: bool, stand_in: Callable[[str], StandIn], tiny_model: Path, tmp_path: Path
) -> None:
    made = stand_in(COME_UP if comes_up else NEVER_COME_UP)
    settings = ServerSettings(model=tiny_model, log=tmp_path / "log", python=str(made.program), max_length=512)

    async def scenario() -> None:
        server = SGLangServer(settings)
        starting = asyncio.create_task(server.start())
        async with asyncio.timeout(DEADLINE_S):
            while not made.is_known():
                assert not starting.done()
                await asyncio.sleep(0.01)
            if comes_up:
                await starting
            assert len(made.files()) == 2 and any(settings.key in each.read_text() for each in made.folder.iterdir())
            guard = made.processes[0].parent()
            assert guard is not None
            guard.kill()
            if comes_up:
                assert "its guard was killed by SIGKILL" in await server.wait_dead()
            else:
                with pytest.raises(ServerError, match="its guard was killed by SIGKILL"):
                    await starting
        await server.close()

    asyncio.run(scenario())
    assert [each for each in made.processes if runs(each)] == []
    assert made.files() == [] and not made.folder.exists()
