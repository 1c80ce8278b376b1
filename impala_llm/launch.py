"""Processes of one host under a supervisor: a whole run, or actors alone for a learner that somebody else started.

    python -m impala_llm.launch actor.num_actors=2 key=value ...     actors alone; see tools/launch_actors.sh

Invariant: whatever ends the run, its end, an error, Ctrl-C or a signal, ends every process of it within ten seconds and
leaves no file of it in shared memory. A process that dies is reported with its signal and last words, and started
again with back-off. The run's folder in shared memory belongs to the supervisor: a learner that was killed goes on from
what is in there. A learner that dies again and again without publishing a version ends the run.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from impala_llm.config import ConfigError, load, threads_per_process, to_yaml
from impala_llm.hosts import rank_endpoint
from impala_llm.pipeline.keys import load_actor_keys
from impala_llm.pipeline.remote import relay_weights
from impala_llm.pipeline.rundir import SUPERVISED, RunDirectory
from impala_llm.pipeline.weights import WeightReader
from impala_llm.settings import PACKAGE, Config

GRACE_S = 5.0
"""Time between the polite signal and the kill."""
GUARD_S = 3.0
"""What orphans get to end by themselves."""
POLL_S = 0.1
MAX_RESTARTS = 20
FAMILY = "IMPALA_LLM_FAMILY"
"""Environment variable by which a supervisor knows the descendants of a child again: torchrun gives its workers
sessions of their own, and they live on without it."""
MAX_LEARNER_RESTARTS = 3
"""Without a version published in between."""
STOPPED, BAD_SETTINGS, LEARNER_GONE = 0, 2, 3
"""Exit codes: the run is over; the settings are wrong; of an actor: the learner is gone."""


@dataclass
class Child:
    """A supervised process and its log."""

    name: str
    command: list[str]
    log: Path | None
    environment: dict[str, str]
    process: subprocess.Popen | None = None
    restarts: int = 0
    restart_at: float = 0.0
    """Monotonic time of the next start, while it is down."""
    started_at: float = field(default=0.0)

    def start(self) -> None:
        # A session of its own: Ctrl-C reaches the supervisor alone, which ends the others in order.
        if self.log is None:
            self.process = subprocess.Popen(self.command, env=self.environment, start_new_session=True)
        else:
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    self.command, env=self.environment, stdout=out, stderr=out, start_new_session=True
                )
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        return self.process.poll() if self.process else None

    def signal(self, number: int) -> None:
        """To the whole process group."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def last_words(self, lines: int = 8) -> str:
        if self.log is None or not self.log.exists():
            return ""
        tail = self.log.read_bytes()[-4096:].decode(errors="replace").splitlines()[-lines:]
        return "".join(f"\n    {line}" for line in tail)


def exit_reason(code: int) -> str:
    """What a return code of subprocess means, for people."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; empty without."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name and name != "-1"]
    # torch would know as well, and cost seconds and gigabytes in every supervisor.
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    listed = subprocess.run([tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    return listed.stdout.split() if listed.returncode == 0 else []


def share_gpus(config: Config, gpus: Sequence[str], with_learner: bool) -> list[list[str]]:
    """The GPUs of each actor of this host: `engine.tensor_parallel` of its own, behind those of the learner's ranks.

    An empty list for each where there is no GPU or the actors start no server. Actors with the embedded engine share
    GPUs where there are too few. ConfigError where servers would have to.
    """
    engine, num_actors = config.engine, config.actor.num_actors
    if not gpus or engine.urls is not None or config.model.device == "cpu":
        return [[] for _ in range(num_actors)]
    taken = config.learner.num_ranks if with_learner else 0
    free, each = list(gpus[taken:]), engine.tensor_parallel
    if engine.name == "torch":
        free = free or list(gpus)
        return [[free[index % len(free)]] for index in range(num_actors)]
    if len(free) < num_actors * each:
        others = f", {taken} of them for learner.num_ranks={taken}" if taken else ""
        raise ConfigError(
            f"actor.num_actors={num_actors} servers of engine.tensor_parallel={each} need {num_actors * each} GPUs, "
            f"and this host has {len(gpus)}{others}: lower one of these settings"
        )
    return [free[index * each : (index + 1) * each] for index in range(num_actors)]


def plan(config: Config, overrides: Sequence[str]) -> list[Child]:
    """The processes of a run: the learner first, then the actors. ConfigError where GPUs are too few."""
    actors = plan_actors(config, overrides, with_learner=True)
    learner = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(config.learner.num_ranks)),
        *(str(PACKAGE / "learner.py"), *overrides),
    ]
    environment = {**actors[0].environment, FAMILY: uuid.uuid4().hex, SUPERVISED: "1"}
    return [Child("learner", learner, None, environment), *actors]


def plan_actors(config: Config, overrides: Sequence[str], with_learner: bool = False) -> list[Child]:
    """The actors of this host, with their share of its cores and GPUs. Each is a family of its own, see `FAMILY`."""
    threads = str(threads_per_process(config))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        # glibc gives large blocks back at once, and fresh pages cost more than the work on them: keep them.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "PYTHONPATH": os.pathsep.join(p for p in (str(PACKAGE.parent), os.environ.get("PYTHONPATH")) if p),
    }
    logs = Path(config.run.dir) / "logs"
    return [
        Child(
            f"actor {index}",
            [sys.executable, str(PACKAGE / "actor.py"), "--index", str(index), *overrides],
            logs / f"actor-{index}.log",
            {**environment, FAMILY: uuid.uuid4().hex, **({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})},
        )
        for index, own in enumerate(share_gpus(config, visible_gpus(), with_learner))
    ]


def dry_run(config: Config, overrides: Sequence[str]) -> str:
    """What `train` would do: the resolved configuration and the command line of every process."""
    lines = [to_yaml(config), f"# threads a process: {threads_per_process(config)}"]
    lines += [f"# {child.name}: {' '.join(child.command)}" for child in plan(config, overrides)]
    return "\n".join(lines)


def supervise(config: Config, overrides: Sequence[str]) -> int:
    """Run to the end of training. Returns the learner's exit code, 130 after Ctrl-C, 143 after SIGTERM.

    Raises RunDirectoryError where a living process has a run of this name.
    """
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    (Path(config.run.dir) / "config.yaml").write_text(to_yaml(config))
    children = plan(config, overrides)
    learner, actors = children[0], children[1:]
    with _stop_signal() as stop_signal, RunDirectory.create(config.run.name) as run_dir:
        board = WeightReader(run_dir.weights_path)
        published = None
        try:
            for child in children:
                child.start()
            while not stop_signal() and _keep_alive(learner, final=(STOPPED, BAD_SETTINGS), most=MAX_LEARNER_RESTARTS):
                if learner.restarts and board.latest() != published:
                    learner.restarts, published = 0, board.latest()  # it had worked: not a crash loop
                for actor in actors:
                    _keep_alive(actor, final=(STOPPED,))
                time.sleep(POLL_S)
        finally:
            end(children, polite=not stop_signal() and learner.poll() == 0)
        if stop_signal():
            return 128 + stop_signal()
    code = learner.poll()
    assert code is not None
    if code:
        _say(f"learner ended: {exit_reason(code)}")
    return code if code >= 0 else 128 - code


def supervise_actors(config: Config, overrides: Sequence[str]) -> int:
    """Actors alone, until the learner says stop to all of them.

    On another host than the learner's (`pipeline.connect`) it also brings the weights there, once for all actors.

    Returns 0 then, 1 if one was lost for good or found its learner gone, 130 after Ctrl-C, 143 after SIGTERM.
    """
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    actors = plan_actors(config, overrides)
    with _stop_signal() as stop_signal, _away_from_learner(config):
        try:
            for actor in actors:
                actor.start()
            while not stop_signal():
                if not any([_keep_alive(actor, final=(STOPPED, LEARNER_GONE)) for actor in actors]):
                    break
                time.sleep(POLL_S)
        finally:
            end(actors, polite=False)
        if stop_signal():
            return 128 + stop_signal()
    failed = [actor for actor in actors if actor.poll() != STOPPED]
    for actor in failed:
        _say(f"{actor.name} failed ({exit_reason(actor.poll() or 0)}); its last words:{actor.last_words()}")
    return 1 if failed else 0


@contextmanager
def _away_from_learner(config: Config) -> Iterator[None]:
    """On another host: a run directory with a board of its own, filled by a relay, while entered."""
    pipeline = config.pipeline
    if pipeline.connect is None:
        yield
        return
    keys = load_actor_keys(Path(pipeline.keys).expanduser()) if pipeline.keys else None
    served_at = rank_endpoint(pipeline.connect, config.learner.num_ranks)
    with RunDirectory.create(config.run.name) as run_dir, relay_weights(run_dir.weights_path, served_at, keys):
        yield


def end(children: Sequence[Child], polite: bool) -> None:
    """End all processes: after a finished run actors go by themselves, else they are told to; then they are killed."""
    if not polite:
        for child in children:
            if child.poll() is None:
                child.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for child in children:
        if child.process is not None:
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(f"{child.name} does not end: killing it")
        child.signal(signal.SIGKILL)  # also what is left of its group
    for child in children:
        if child.process is not None:
            child.process.wait()
    _kill_relatives(children)


def _kill_relatives(children: Sequence[Child]) -> None:
    """What dead children have left of their descendants: a torchrun that was killed leaves its workers."""
    relatives = _relatives({child.environment[FAMILY] for child in children})
    # The guard of a server ends by itself when its owner is gone, and removes the server's files then.
    _, relatives = psutil.wait_procs(relatives, timeout=GUARD_S)
    for relative in relatives:
        try:
            relative.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(relatives, timeout=GRACE_S)


def _relatives(families: set[str]) -> list[psutil.Process]:
    """All living processes of these families, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(FAMILY) in families:
                found.append(process)
        except psutil.Error:
            continue  # gone, or another user's
    return found


@contextmanager
def _stop_signal() -> Iterator[Callable[[], int]]:
    """While entered, SIGINT and SIGTERM are only remembered: what is yielded tells which one came, 0 for none."""
    received = 0

    def remember(number: int, _frame: object) -> None:
        nonlocal received
        received = number

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _keep_alive(child: Child, final: Sequence[int], most: int = MAX_RESTARTS) -> bool:
    """Start a dead child again when its time has come. False where it has ended: with a final code, or once too often.

    A moment passes before each new start, and longer ones when it keeps dying.
    """
    code = child.poll()
    if code is None:
        return True
    now = time.monotonic()
    if child.restart_at == 0.0:
        if code in final:
            return False
        if now - child.started_at > 60:
            child.restarts = 0  # it had worked: not a crash loop
        if child.restarts >= most:
            return False
        delay = min(30.0, 2.0**child.restarts)
        child.restart_at = now + delay
        child.restarts += 1
        words = child.last_words()
        words = words and f"; its last words:{words}"
        _say(f"{child.name} died ({exit_reason(code)}), again in {delay:.0f} s{words}")
    elif now >= child.restart_at:
        child.restart_at = 0.0
        _kill_relatives([child])
        child.start()
    return True


def _say(text: str) -> None:
    print(f"impala-llm: {text}", file=sys.stderr, flush=True)


def one_actor_per_server(words: Sequence[str], gpus: Sequence[str]) -> list[str]:
    """The overrides with `actor.num_actors` for all GPUs of an actors' host, where servers use them and nobody said."""
    config = load(words)
    if config.engine.name != "sglang" or any(word.startswith("actor.num_actors=") for word in words):
        return list(words)
    num_servers = len(config.engine.urls or ()) or len(gpus) // config.engine.tensor_parallel
    return [*words, f"actor.num_actors={max(1, num_servers)}"]


def main(argv: Sequence[str]) -> int:
    """Actors alone; see `supervise_actors` for the exit code, and 2 for bad settings."""
    try:
        words = one_actor_per_server(argv, visible_gpus())
        return supervise_actors(load(words), words)
    except ConfigError as error:
        print(f"launch: {error}", file=sys.stderr)
        return BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
