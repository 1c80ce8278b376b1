"""Two hosts as network namespaces with a cable between them: each has its own addresses and its own /dev/shm.

Needs the right to make namespaces (root), and iproute2, util-linux; it is skipped without.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from impala_llm.learning.checkpoints.files import newest_whole
from impala_llm.learning.checkpoints.reader import CheckpointReader
from impala_llm.pipeline.network import keys
from impala_llm.pipeline.tickets.journal_rows import LIVE, TAKEN
from tests.system.runs import ROOT, START_S, Run, column

LEARNER, ACTORS = "10.77.0.1", "10.77.0.2"
PORT = 7400
CUT_S = 20.0
STOP_S = 20.0


class Host:
    """A network namespace, kept by a process that sleeps in it."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])

    def enter(self, *command: str) -> list[str]:
        """The command as run on this host, with its own /dev/shm."""
        script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return [*self._nsenter(), "unshare", "--mount", "sh", "-c", script, "host", *command]

    def run(self, *command: str) -> None:
        subprocess.run([*self._nsenter(), *command], check=True, capture_output=True)

    def wait_until_made(self) -> None:
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 20
        while os.readlink(f"/proc/{self.pid}/ns/net") == own:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()

    def _nsenter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net"]


def may_make_namespaces() -> bool:
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip", "mount")))
    script = "ip link add one type veth peer name two && mount -t tmpfs tmpfs /dev/shm"
    return tools and subprocess.run(["unshare", "-n", "-m", "sh", "-c", script], capture_output=True).returncode == 0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if not may_make_namespaces():
        pytest.skip("no right to make network namespaces here: the test of two hosts needs root, iproute2, util-linux")
    pair = Host(), Host()
    try:
        # Interface names are of the whole machine until they are moved.
        cable = [f"v{uuid.uuid4().hex[:8]}{end}" for end in "ab"]
        subprocess.run(["ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1]], check=True)
        for host, end, address in zip(pair, cable, (LEARNER, ACTORS), strict=True):
            host.wait_until_made()
            subprocess.run(["ip", "link", "set", end, "netns", str(host.pid), "name", "cable"], check=True)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
        yield pair
    finally:
        for host in pair:
            host.close()


STRANGER = """
import sys, zmq
from impala_llm.pipeline.transport import messages
context = zmq.Context()
socket = context.socket(zmq.DEALER)
if len(sys.argv) > 2:
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = sys.argv[2].encode()
socket.connect(sys.argv[1])
socket.send(messages.encode(messages.Hello("stranger", 1, (), "")))
socket.send(messages.encode(messages.TicketRequest(10)))
print(socket.poll(5000))
context.destroy(linger=0)
"""


def copy_keys(tmp_path: Path) -> tuple[Path, Path]:
    """Make keys. Returns the learner's folder, and what an operator copies of it to the other host."""
    folder, away = tmp_path / "keys", tmp_path / "away"
    keys.make_keys(folder)
    away.mkdir(mode=0o700)
    for name in ("actor.secret.json", "learner.public.json"):
        shutil.copy(folder / name, away / name)
    return folder, away


@pytest.mark.system
def test_actors_on_another_host_train_strangers_get_nothing_and_a_cut_cable_is_survived(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    learner_host, actor_host = hosts
    folder, away = copy_keys(tmp_path)
    server = f"tcp://{LEARNER}:{PORT}"
    with Run(tmp_path / "run", "experiment=toy", "learner.total_updates=100000") as run:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        learn = learner_host.enter(
            *torchrun, "impala_llm/learner.py", f"pipeline.bind={server}", f"pipeline.keys={folder}"
        )
        learner = run.start(*learn)
        actors = run.start(
            *actor_host.enter(
                *("tools/launch_actors.sh", "--num-actors", "2"), f"pipeline.connect={server}", f"pipeline.keys={away}"
            )
        )
        run.wait_for_updates(8)

        public = keys.load_learner_keys(folder).public.decode()
        for arguments in ([server], [server, public]):
            stranger = subprocess.run(
                actor_host.enter(sys.executable, "-c", STRANGER, *arguments),
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert stranger.stdout.strip() == "0", stranger.stderr  # nothing came within 5 s

        learner_host.run("ip", "link", "set", "cable", "down")
        time.sleep(CUT_S)  # the length of the cut is what is tested
        learner_host.run("ip", "link", "set", "cable", "up")
        run.wait_for_updates(8)
        assert sum(column(run.rows(), "pipeline/refused")) == 0

        [process] = run.processes("impala_llm/learner.py", "--standalone")
        process.send_signal(signal.SIGTERM)  # as at the time limit of a Slurm job
        learner.wait(STOP_S)
        run.settings[-1] = f"learner.total_updates={run.rows()[-1]['step'] + 3}"
        assert run.start(*learn).wait(START_S) == 0, run.printed()
        assert actors.wait(STOP_S) == 0, run.printed()
        run.assert_gone()


SLOW = """
import asyncio, random
from impala_llm.envs.toy import CorridorSession, CorridorSuite

class SlowSession(CorridorSession):
    async def step(self, action):
        await asyncio.sleep(1.5 * random.random())
        return super().step(action)

class Slow(CorridorSuite):
    def session(self, training):
        return SlowSession(self)
"""
"""Episodes of different lengths: some are under way at each checkpoint."""
BATCH = 16


def num_skipped(folder: Path) -> int:
    """Number of tickets that a run has dealt by its last checkpoint, and that it neither trained on nor still has."""
    checkpoint, _ = newest_whole(folder)
    assert checkpoint is not None
    rows = CheckpointReader(checkpoint).plain(0)["rows"].tolist()
    (num_taken,) = [row[1] for row in rows if row[0] == TAKEN]
    num_live = len({row[1] for row in rows if row[0] == LIVE})
    return num_taken - num_live - BATCH * checkpoint.update


@pytest.mark.system
def test_no_task_is_skipped_where_actors_outlive_the_host_of_their_learner(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Episodes played meanwhile are of older weights than the tickets demand once the run goes on."""
    learner_host, actor_host = hosts
    folder, away = copy_keys(tmp_path)
    server = f"tcp://{LEARNER}:{PORT}"
    settings = (f"learner.batch_size={BATCH}", "learner.checkpoint_every=2", "learner.total_updates=6")
    with Run(tmp_path / "run", "experiment=corridor", "env.name=slow:Slow", *settings) as run:
        (tmp_path / "slow.py").write_text(SLOW)
        run.python_path.append(str(tmp_path))
        program = (sys.executable, "-m", "impala_llm.cli")
        train = learner_host.enter(
            *program, "train", "actor.num_actors=0", f"pipeline.bind={server}", f"pipeline.keys={folder}"
        )
        learner = run.start(*train)
        actors = run.start(
            *actor_host.enter(
                *(*program, "actors", "--num-actors", "1"), f"pipeline.connect={server}", f"pipeline.keys={away}"
            )
        )
        run.wait_for((run.directory / "checkpoints" / "update-000002").exists, "the checkpoint of update 2")
        lost = psutil.Process(learner.pid)
        for process in [lost, *lost.children(recursive=True)]:
            process.kill()
        learner.wait()
        assert run.start(*train).wait(START_S) == 0, run.printed()
        assert actors.wait(STOP_S) == 0, run.printed()
        rows = run.rows()
        assert num_skipped(run.directory) <= sum(column(rows, "buffer/evicted")), run.printed()
        assert sum(column(rows, "pipeline/regranted")) > 0 == sum(column(rows, "pipeline/refused"))
        run.assert_gone()
