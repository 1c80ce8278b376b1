"""Settings on which all processes of a chaos run must agree, and the paths by which they find each other."""

import ctypes
import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

from impala_llm.pipeline.shm.run_directory import RunDirectory

NUM_RANKS = 2
NUM_ACTORS = 4
NUM_ENGINES = 2
GROUP_SIZE = 2
MAX_STALENESS = 2
BATCH_SIZE = 16
"""Trajectories of a rank's batch."""
NUM_TASKS = 300
WEIGHT_SLOTS = NUM_ENGINES + 2
"""As many as readers that may be stopped in the middle, the latest, and one to write to."""
REPLAY_BYTES = 48 << 20
ARENA_BYTES = 2 << 20
"""Six of the largest trajectories: actors run into its end."""
JOURNAL_ROWS = 1024
"""Few, so that journals are written anew while processes are killed."""
SABOTAGES = ("claim_early", "forget_arena", "train_twice", "change_bytes", "torn_weights")
"""Faults that are built in on request, to see that the checker finds them."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """directory: for logs, flags and the proxy's sockets; with a short path. sabotage: one of SABOTAGES, or nothing."""

    directory: Path
    run_name: str
    seed: int
    sabotage: str = ""

    @property
    def has_unrolls(self) -> bool:
        """With an odd seed episodes come in several unrolls, and each alone: groups are of whole episodes."""
        return self.seed % 2 == 1

    @property
    def group_size(self) -> int:
        return 1 if self.has_unrolls else GROUP_SIZE

    def save(self) -> None:
        (self.directory / "settings.json").write_text(json.dumps({**asdict(self), "directory": str(self.directory)}))

    @classmethod
    def load(cls, directory: Path) -> "Settings":
        values = json.loads((directory / "settings.json").read_text())
        return cls(**{**values, "directory": directory})

    def log_path(self, name: str) -> Path:
        """Events of a process. Names: world, rank-<n>, actor-<n>, engine-<n>, proxy."""
        return self.directory / f"{name}.events"

    def output_path(self, name: str) -> Path:
        """File of the output of a process."""
        return self.directory / f"{name}.out"

    def proxy_path(self, rank: int) -> Path:
        """Socket of the proxy in front of a rank."""
        return self.directory / f"proxy-{rank}.sock"

    def endpoint(self, actor: int, run_dir: RunDirectory) -> str:
        """Endpoint of an actor: every other pair goes through the proxy."""
        rank = actor % NUM_RANKS
        return f"ipc://{self.proxy_path(rank)}" if is_proxied(actor) else run_dir.endpoint(rank)

    @property
    def calm(self) -> Path:
        """Flag: no more mischief, no more failures, bring everything to its end."""
        return self.directory / "calm"

    @property
    def actors_gone(self) -> Path:
        """Flag: all actors have ended, nobody needs an answer any more."""
        return self.directory / "actors-gone"


def is_proxied(actor: int) -> bool:
    """Actors 2, 3, 6, 7, ..."""
    return actor // NUM_RANKS % 2 == 1


def is_remote(actor: int) -> bool:
    """Whether an actor sends its records over the socket, as one on another host does: actors 3, 7, ..."""
    return actor % 4 == 3


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
