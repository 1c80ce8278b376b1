"""An environment may fork workers, which live on when its actor is killed: whatever that has locked is free."""

import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from impala_llm.pipeline.shm.actor_claims import claimed_indices, claimed_servers
from impala_llm.pipeline.shm.ring import ArenaReader, ArenaWriter
from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.pipeline.weights.relay_download import Download
from impala_llm.pipeline.weights.relay_messages import Contents

pytestmark = pytest.mark.system

FORK = """
import os, sys
from contextlib import ExitStack
from pathlib import Path
import numpy as np

folder, name, stack = Path(sys.argv[1]), sys.argv[2], ExitStack()

def fork(*_):
    if os.fork() == 0:
        print("forked", flush=True)  # by now it has closed what it must not have
    os.read(0, 1)  # until it is killed, or the test is over
    os._exit(0)

"""
"""In front of what a process holds when it forks."""

WEIGHTS = {"w": ("F32", (2,), np.zeros(8, np.uint8))}
PORT = random.randrange(1, 2**16)


def arena_is_free(folder: Path, name: str) -> bool:
    if ArenaReader(folder / name).has_writer():
        return False
    ArenaWriter(folder / name, 4096).close()
    return True


def slot_is_free(folder: Path, name: str) -> bool:
    publisher = WeightPublisher(folder, num_slots=2)
    publisher.publish(WEIGHTS, 1)
    publisher.publish(WEIGHTS, 2, timeout_s=0)  # into the slot of the one that was leased
    return WeightReader(folder).latest() == 2


def board_is_free(folder: Path, name: str) -> bool:
    WeightPublisher(folder, takeover_s=0).publish(WEIGHTS, 1)
    return WeightReader(folder).latest() == 1


def run_is_free(folder: Path, name: str) -> bool:
    with RunDirectory.create(name, folder):
        return True


def server_is_free(folder: Path, name: str) -> bool:
    with claimed_servers([f"http://127.0.0.1:{PORT}"]) as taken:
        return not taken


def index_is_free(folder: Path, name: str) -> bool:
    with claimed_indices(name, 1) as indices:
        return indices == [0]


def download_is_free(folder: Path, name: str) -> bool:
    Download(folder, Contents(1, 1, 100, 1, (), ())).close()
    return True


@dataclass(frozen=True)
class Held:
    """Code with which a process holds something, and a check that another one can have it."""

    code: str
    is_free: Callable[[Path, str], bool]


HELD = {
    "arena": Held(
        "from impala_llm.pipeline.shm.ring import ArenaWriter\narena = ArenaWriter(folder / name, 4096); fork()",
        arena_is_free,
    ),
    "lease": Held(
        "from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader\n"
        "WeightPublisher(folder, num_slots=2).publish({'w': ('F32', (2,), np.zeros(8, np.uint8))}, 0)\n"
        "lease = stack.enter_context(WeightReader(folder).lease()); fork()",
        slot_is_free,
    ),
    "board": Held(
        "from impala_llm.pipeline.weights.board import WeightPublisher\n"
        "WeightPublisher(folder).publish({'w': ('F32', (2,), fork)}, 0)",
        board_is_free,
    ),
    "run": Held(
        "from impala_llm.pipeline.shm.run_directory import RunDirectory\n"
        "run = RunDirectory.create(name, folder); fork()",
        run_is_free,
    ),
    "server": Held(
        "from impala_llm.pipeline.shm.actor_claims import claimed_servers\n"
        f"stack.enter_context(claimed_servers(['http://127.0.0.1:{PORT}'])); fork()",
        server_is_free,
    ),
    "index": Held(
        "from impala_llm.pipeline.shm.actor_claims import claimed_indices\n"
        "stack.enter_context(claimed_indices(name, 1)); fork()",
        index_is_free,
    ),
    "download": Held(
        "from impala_llm.pipeline.weights.relay_download import Contents, Download\n"
        "download = Download(folder, Contents(1, 1, 100, 1, (), ())); fork()",
        download_is_free,
    ),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_killed_process_held_is_free_although_its_child_lives(tmp_path: Path, kind: str) -> None:
    held, name = HELD[kind], uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", FORK + held.code, str(tmp_path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"forked\n"
        process.kill()
        process.wait()
        assert held.is_free(tmp_path, name)
    finally:
        process.kill()
        process.stdin.close()
        assert process.stdout.read() == b"", "until the child has ended as well"
        process.wait()


ENDED_IN_THE_CHILD = """
from impala_llm.pipeline.shm.actor_claims import claimed_servers
from impala_llm.pipeline.shm.ring import ArenaReader, ArenaWriter
from impala_llm.pipeline.shm.run_directory import RunDirectory
url = f"http://{name}:1"
arena = ArenaWriter(folder / name, 4096)
with RunDirectory.create(name, folder) as run, claimed_servers([url]):
    if (child := os.fork()) == 0:
        sys.exit(0)  # through both contexts
    assert os.waitpid(child, 0)[1] == 0
    assert RunDirectory.attach(name, folder).run_id == run.run_id
    with claimed_servers([url]) as taken:
        assert taken == [url]
if (child := os.fork()) == 0:
    arena.close()
    own = ArenaWriter(folder / "other", 4096)
    os._exit(not ArenaReader(folder / "other").has_writer())
assert os.waitpid(child, 0)[1] == 0
assert ArenaReader(folder / name).has_writer()
"""


def test_a_forked_process_ends_nothing_of_its_parent_and_has_locks_of_its_own(tmp_path: Path) -> None:
    code = FORK + ENDED_IN_THE_CHILD
    subprocess.run([sys.executable, "-c", code, str(tmp_path), uuid.uuid4().hex], check=True)


FORKS_WHILE_A_THREAD_LOCKS = (
    FORK
    + """
import threading
from contextlib import closing
from impala_llm.pipeline.shm.file_lock import FileLock
import fcntl

(folder / name).touch()
is_over = threading.Event()

def lock():
    while not is_over.is_set():
        with closing(FileLock(folder / name)) as held:
            held.take(fcntl.LOCK_EX)

locking = threading.Thread(target=lock)
locking.start()
waits, goes_on = os.pipe()
children = []
for _ in range(100):
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]  # numbers that were those of locks before
    if (child := os.fork()) == 0:
        os.close(goes_on)
        for descriptor in others:
            os.fstat(descriptor)
        os.read(waits, 1)
        os._exit(0)
    children.append(child)
    for descriptor in others:
        os.close(descriptor)
is_over.set()
locking.join()
with closing(FileLock(folder / name)) as held:
    assert held.take(fcntl.LOCK_EX), "no child has it"
os.close(goes_on)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""
)


def test_a_fork_at_any_moment_of_another_thread_leaves_out_locks_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS_WHILE_A_THREAD_LOCKS, str(tmp_path), "file"], check=True)


ELSEWHERE = """
import sys
from impala_llm.pipeline.shm.actor_claims import claimed_indices, claimed_servers
with claimed_servers(sys.argv[2:]) as taken, claimed_indices(sys.argv[1], 1) as indices:
    print(taken, indices)
"""
OTHER_NETWORK = ("unshare", "--net")


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*OTHER_NETWORK, "true"], capture_output=True).returncode != 0,
    reason="no right to make network namespaces here",
)
def test_claims_are_seen_from_a_container_with_a_network_of_its_own() -> None:
    """The container shares /dev/shm; its localhost is another server."""
    run, near, far = uuid.uuid4().hex, f"http://localhost:{PORT}", f"http://{uuid.uuid4().hex}:30000"
    command = [*OTHER_NETWORK, sys.executable, "-c", ELSEWHERE, run, near, far]
    with claimed_servers([near, far]), claimed_indices(run, 1):
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"['{far}'] [1]\n"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[] [0]\n"
