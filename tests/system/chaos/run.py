"""One chaos run, from an empty directory to a verdict."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.system.chaos.checker import Logs, Verdict, check
from tests.system.chaos.settings import Settings
from tests.system.chaos.world import Unrest, World

SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_MB = 256
_ALONE = "CHAOS_HAS_SHARED_MEMORY"
_MOUNT = 'mount -t tmpfs -o size="$0"m,mode=1777 chaos /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Outcome:
    """counts: what the monkey and the proxy did, by kind."""

    seconds: float
    seed: int
    counts: dict[str, int]
    verdict: Verdict


def has_own_shared_memory() -> bool:
    """Whether this process has a small /dev/shm that no one else sees, which may be filled."""
    return os.environ.get(_ALONE) == "1"


def command_with_own_shared_memory(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command and environment to run it with a /dev/shm of its own; as it is where the system does not let us."""
    for options in (["--mount"], ["--mount", "--map-root-user"]):
        prefix = ["unshare", *options, "sh", "-c", _MOUNT, str(_SHARED_MEMORY_MB)]
        try:
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return [*prefix, *command], {**os.environ, _ALONE: "1"}
        except FileNotFoundError:
            break
    return command, dict(os.environ)


def run_chaos(seconds: float, seed: int, directory: Path | None = None, sabotage: str = "") -> Outcome:
    """directory: for the logs, kept; by default they are thrown away unless something was wrong."""
    # Short: there is a socket in it.
    folder = Path(tempfile.mkdtemp(prefix="chaos-")) if directory is None else directory
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(folder, f"chaos-{os.getpid()}", seed, sabotage)
    world = World(settings, SHARED_MEMORY if has_own_shared_memory() else None)
    unrest: list[str] = []
    version = 0
    try:
        version = world.run(seconds)
    except Unrest as error:
        unrest.append(str(error))
    logs = Logs.read(folder)
    verdict = check(logs, version, settings.group_size)
    verdict.violations[:0] = unrest
    left = [path.name for path in SHARED_MEMORY.glob("*" if has_own_shared_memory() else f"*{settings.run_name}*")]
    if left:
        verdict.violations.append(f"{SHARED_MEMORY} still holds {', '.join(left)}")
    alive = [process.pid for process in psutil.Process().children(recursive=True)]
    if alive:
        verdict.violations.append(f"processes {alive} still live")
    counts = dict(world.counts)
    for event in logs.proxy:
        counts[f"proxy {event.kind}"] = counts.get(f"proxy {event.kind}", 0) + 1
    if directory is None and not verdict.violations:
        shutil.rmtree(folder)
    elif verdict.violations:
        print(f"chaos: logs are in {folder}", file=sys.stderr)
    return Outcome(seconds, seed, dict(sorted(counts.items())), verdict)
