"""Servers as processes: stand-ins for the ways in which a start fails, and starts of the real SGLang where it is
installed. Real servers that are up: test_sglang_engine.py."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from impala_llm.engines.sglang.launch_args import BadServerSettings, ServerError, ServerSettings
from impala_llm.engines.sglang.server import GUARD, SGLangServer
from tests.helpers import write_program
from tests.system.sglang import (
    DEADLINE_S,
    ROOT,
    assert_all_end,
    cpu_settings,
    descendants,
    find,
    needs_sglang,
    tiny_checkpoint,
    without_guard,
)

STAND_IN = """# Speaks like an interpreter that has SGLang, and like its server.
import http.server, mmap, os, pathlib, subprocess, sys, threading, time
if sys.argv[1] == "-c":
    print("0.5.21")
    raise SystemExit
port = int(sys.argv[sys.argv.index("--port") + 1])
here = pathlib.Path({folder!r})
starts = len(list(here.glob("start-*")))
(here / f"start-{{starts}}").touch()

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def serve():
    # A worker that has left its parent's session, ignores polite signals and has a file in shared memory.
    code = '''
import mmap, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600) # like one of multiprocessing's spawn_main
'''
    shared = f"/dev/shm/impala-test-{{here.parent.name}}-{{here.name}}"
    worker = subprocess.Popen([sys.executable, "-c", code, shared], start_new_session=True, stdout=subprocess.PIPE)
    worker.stdout.readline()
    http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()

{code}
"""
START_IN_ANOTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from impala_llm.engines.sglang.server import GUARD, SGLangServer
from impala_llm.engines.sglang.launch_args import ServerSettings
async def own():
    server = SGLangServer(ServerSettings(
        model=Path(sys.argv[1]), log=Path(sys.argv[2]), python=sys.argv[3], max_length=512, max_running=16
    ))
    await server.start()
    print("up", flush=True)
    await server.wait_dead()
asyncio.run(own())
"""


@pytest.fixture
def started() -> Callable[[], list[psutil.Process]]:
    """Processes below this one that the test has started; environments of other tests live as long as pytest."""
    others = descendants()
    return lambda: descendants(others)


@pytest.fixture
def stand_in(tiny_model: Path, tmp_path: Path) -> Callable[[str], ServerSettings]:
    """Settings with an interpreter whose "SGLang" runs this code."""

    def make(code: str) -> ServerSettings:
        program = write_program(tmp_path / "python", STAND_IN.format(folder=str(tmp_path), code=code))
        return ServerSettings(model=tiny_model, log=tmp_path / "log", python=str(program), max_length=512)

    return make


def assert_no_files(folder: Path) -> None:
    assert not Path(f"/dev/shm/impala-test-{folder.parent.name}-{folder.name}").exists()


@pytest.mark.system
def test_a_port_that_was_taken_meanwhile_is_not_the_end(
    stand_in: Callable[[str], ServerSettings],
    tmp_path: Path,
    started: Callable[[], list[psutil.Process]],
) -> None:
    busy = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    settings = stand_in(f'serve() if starts == 2 else sys.exit("{busy}")')

    async def scenario() -> None:
        server = SGLangServer(settings)
        await server.start()
        assert len(list(tmp_path.glob("start-*"))) == 3
        await server.close()
        assert "was closed" in await server.wait_dead()

    asyncio.run(scenario())
    assert started() == []
    assert_no_files(tmp_path)


@pytest.mark.system
def test_the_server_of_somebody_else_at_our_port_is_not_ours(
    stand_in: Callable[[str], ServerSettings],
    tmp_path: Path,
    started: Callable[[], list[psutil.Process]],
) -> None:
    settings = replace(stand_in("time.sleep(600)"), start_timeout_s=3.0)

    async def scenario() -> None:
        server = SGLangServer(settings)
        starting = asyncio.create_task(server.start())
        while not settings.log.exists() or not (tmp_path / "start-0").exists():
            assert not starting.done()
            await asyncio.sleep(0.01)
        words = find(without_guard(started()), "launch_server").cmdline()
        port = words[words.index("--port") + 1]
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        (tmp_path / "health").touch()
        try:
            with pytest.raises(ServerError, match="did not come up within 3 s"):
                await starting
        finally:
            stranger.kill()
            await stranger.wait()

    asyncio.run(scenario())
    assert started() == []


@pytest.mark.system
def test_a_server_that_ends_while_starting_is_reported_with_the_end_of_its_log(
    stand_in: Callable[[str], ServerSettings],
    started: Callable[[], list[psutil.Process]],
) -> None:
    async def scenario(settings: ServerSettings, expected: str) -> None:
        with pytest.raises(ServerError, match=f"ended while starting: {expected}"):
            await SGLangServer(settings).start()

    asyncio.run(scenario(stand_in('sys.exit("the model is too large")'), "exit code 1.*\n.*the model is too large"))
    for number, reason in ((9, "SIGKILL"), (35, "signal 35")):
        code = f"print('almost', flush=True); os.kill(os.getpid(), {number})"
        asyncio.run(scenario(stand_in(code), f"killed by {reason}.*\n.*almost"))
    assert started() == []


@pytest.mark.system
def test_a_server_that_never_comes_up_is_ended(
    stand_in: Callable[[str], ServerSettings], started: Callable[[], list[psutil.Process]]
) -> None:
    settings = replace(stand_in('print("loading", flush=True); time.sleep(600)'), start_timeout_s=1.5)

    async def scenario() -> None:
        server = SGLangServer(settings)
        with pytest.raises(ServerError, match="did not come up within 1.5 s .engine.start_timeout_s.*\n.*loading"):
            await server.start()
        starting = asyncio.create_task(server.start())  # a start that is given up by its caller
        while len(settings.log.read_text().split("loading")) < 3:
            assert not starting.done()
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert started() == []

    asyncio.run(scenario())


@pytest.mark.system
@pytest.mark.parametrize(
    ("victim", "reason"), [("launch_server", "killed by SIGKILL"), ("spawn_main", "lost its process")]
)
def test_a_death_is_noticed_and_nothing_is_left(
    victim: str,
    reason: str,
    stand_in: Callable[[str], ServerSettings],
    tmp_path: Path,
    started: Callable[[], list[psutil.Process]],
) -> None:
    settings = stand_in("serve()")

    async def scenario() -> None:
        server = SGLangServer(settings)
        for _ in range(2):
            await server.start()
            below = without_guard(started())
            find(below, victim).kill()
            async with asyncio.timeout(DEADLINE_S):
                assert reason in await server.wait_dead()
            assert_all_end(below)
            assert_no_files(tmp_path)
        await server.close()

    asyncio.run(scenario())
    assert started() == []


MAPS_FILES = """
import mmap, os, sys, time
own, early, *models = sys.argv[1:]
print("started", flush=True)
kept = []
for path in models:  # as weights are read
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
with open(early, "r+b") as file:
    kept.append(mmap.mmap(file.fileno(), 0))
with open(own, "w+b") as file:
    file.truncate(4096)
    kept.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.mark.system
@pytest.mark.parametrize("is_noted", [False, True])
def test_only_what_the_server_made_is_removed_from_shared_memory(is_noted: bool, tmp_path: Path) -> None:
    name = f"/dev/shm/impala-test-{tmp_path.parent.name}-{tmp_path.name}"
    folder, early, late, own = Path(name), Path(f"{name}.early"), Path(f"{name}.late"), Path(f"{name}.own")
    in_folder = folder / "model.safetensors"
    try:
        folder.mkdir()
        for file in (in_folder, early):
            file.write_bytes(b"weights")
        words = [sys.executable, "-c", MAPS_FILES, str(own), str(early), str(in_folder), str(late)]
        guard = subprocess.Popen(
            [sys.executable, str(GUARD), str(os.getpid()), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert guard.stdout is not None and guard.stderr is not None
        assert guard.stderr.readline() == b"started\n"
        (folder / "new").write_bytes(b"weights")
        (folder / "new").rename(late)
        assert guard.stderr.readline() == b"mapped\n"
        if is_noted:
            guard.send_signal(signal.SIGUSR1)
            assert guard.stdout.readline() == b"noted\n"
            own.unlink()
            own.write_bytes(b"by somebody else, under a name that the server has given up")
        guard.terminate()
        guard.wait(DEADLINE_S)
        assert [file.read_bytes() for file in (in_folder, early, late)] == [b"weights"] * 3
        assert own.exists() == is_noted
    finally:
        for file in (early, late, own):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def start_owner(model: Path, log: Path, python: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START_IN_ANOTHER_PROCESS, str(model), str(log), python],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.system
def test_a_server_does_not_outlive_its_owner(stand_in: Callable[[str], ServerSettings], tmp_path: Path) -> None:
    settings = stand_in("serve()")
    owner = start_owner(settings.model, settings.log, settings.python)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 3  # guard, server, worker
    owner.kill()
    owner.wait()
    assert_all_end(below)
    assert_no_files(tmp_path)


@pytest.mark.system
@pytest.mark.timeout(600)
@needs_sglang
def test_a_real_server_that_is_still_starting_does_not_outlive_its_owner(tmp_path: Path) -> None:
    settings = cpu_settings(tiny_checkpoint(tmp_path / "model"), tmp_path)
    owner = start_owner(settings.model, settings.log, settings.python)
    deadline = time.monotonic() + 300
    below: list[psutil.Process] = []
    # Until there is a worker below guard and server: it has no death signal yet.
    while len(below) < 3:
        assert owner.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        below = psutil.Process(owner.pid).children(recursive=True)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert_all_end(below)


@pytest.mark.system
def test_an_interpreter_without_sglang_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    settings = ServerSettings(
        model=tiny_model, log=tmp_path / "log", python=str(bare / "bin" / "python"), max_length=99
    )
    with pytest.raises(BadServerSettings, match="has no sglang installed.*tools/install_sglang_cpu.sh"):
        asyncio.run(SGLangServer(settings).start())


OF_TORCH = Path(tempfile.gettempdir()) / "torchinductor_me"
"""As torch sets the variable in the process that imports it."""


def compiled_code(home: Path, given: Path = OF_TORCH) -> Path:
    """Where a server of this user keeps compiled code. given: the variable of its owner."""
    tells = "import os; print(f\"it is {os.environ['TORCHINDUCTOR_CACHE_DIR']}\")"
    command = [sys.executable, str(GUARD), str(os.getpid()), sys.executable, "-c", tells]
    environment = {**os.environ, "HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(given)}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=True)
    return Path(done.stderr.splitlines()[-1].removeprefix("it is "))


@pytest.mark.system
def test_compiled_code_lasts_where_only_this_user_can_put_it(tmp_path: Path) -> None:
    first = compiled_code(tmp_path)
    assert first.is_relative_to(tmp_path) and first.stat().st_mode & 0o777 == 0o700
    assert compiled_code(tmp_path) == first
    assert compiled_code(tmp_path, tmp_path / "own") == tmp_path / "own"
    for each in (first, first.parent):
        each.chmod(0o777)
        assert not compiled_code(tmp_path).exists(), "a folder of the server's own, which ends with it"
        each.chmod(0o700)
    if os.getuid() == 0:
        os.chown(first, 12345, 12345)
        assert not compiled_code(tmp_path).exists()
