"""The world of the chaos test: starts its processes, starts those again that die, lets the monkey loose, and in the end
brings everything to rest.

Invariant: when `World.run` has returned or raised, no process of it lives and its run directory is gone. Ranks live and
die together, as under torchrun: the next ones are started when both of the last are dead.
"""

import errno
import heapq
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.weights.board import WeightReader
from tests.system.chaos.events import EventLog
from tests.system.chaos.forked import Forked, prepare
from tests.system.chaos.meeting import Meeting
from tests.system.chaos.monkey import Action, Monkey
from tests.system.chaos.settings import NUM_ACTORS, NUM_ENGINES, NUM_RANKS, Settings

TURN_S = 0.02
BACKOFF_S = (0.2, 2.0)
GOOD_LIFE_S = 5.0
"""Who lived so long is started again at once."""
START_S = 120.0
REST_S = 120.0


class Unrest(RuntimeError):
    """Something did not start, or did not come to its end, in time."""


@dataclass
class Child:
    """A process that is kept alive."""

    name: str
    module: str
    arguments: list[str]
    process: Forked | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    failures: int = 0
    starts: int = 0
    stopped_until: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def has_finished(self) -> bool:
        return self.process is not None and self.process.poll() == 0


class World:
    """shared_memory: a directory that may be filled, being ours alone; None: nothing is filled."""

    def __init__(self, settings: Settings, shared_memory: Path | None) -> None:
        self.settings = settings
        self.shared_memory = shared_memory
        self.log = EventLog(settings.log_path("world"))
        self.counts: Counter[str] = Counter()
        directory = str(settings.directory)
        package = "tests.system.chaos"
        self.ranks = [Child(f"rank-{i}", f"{package}.rank", [directory, str(i)]) for i in range(NUM_RANKS)]
        self.actors = [Child(f"actor-{i}", f"{package}.actor", [directory, str(i)]) for i in range(NUM_ACTORS)]
        self.engines = [Child(f"engine-{i}", f"{package}.engine", [directory, str(i)]) for i in range(NUM_ENGINES)]
        self.proxy = Child("proxy", f"{package}.proxy", [directory])
        self.others = [*self.actors, *self.engines, self.proxy]
        self.children = {child.name: child for child in [*self.ranks, *self.others]}
        self.generation = 0
        self.wakes: list[tuple[float, str, int]] = []
        """Heap: when to let whom go on, by pid."""
        self.filled_until = 0.0

    def run(self, seconds: float) -> int:
        """Mischief for so long, then rest. Returns the version on the board in the end. Raises Unrest."""
        prepare(sorted({child.module for child in self.children.values()}))
        self.settings.save()
        Meeting.prepare(self.settings.directory / "meeting")
        with RunDirectory.create(self.settings.run_name) as run_dir:
            board = WeightReader(run_dir.weights_path)
            try:
                self._start_all()
                self._until(lambda: (board.latest() or 0) >= 2, START_S, "no step was made")
                self._mischief(seconds)
                self._rest()
            finally:
                self._end()
            version = board.latest()
            assert version is not None
            return version

    # --- mischief

    def _mischief(self, seconds: float) -> None:
        self.log.say("mischief")
        names = [child.name for child in self.ranks], [child.name for child in self.others]
        actions = Monkey(self.settings.seed, *names).actions()
        end = time.monotonic() + seconds
        action = next(actions)
        due = time.monotonic() + action.after_s
        while time.monotonic() < end:
            self._turn()
            if time.monotonic() >= due:
                self._do(action)
                action = next(actions)
                due = time.monotonic() + action.after_s
            time.sleep(TURN_S)

    def _do(self, action: Action) -> None:
        if action.kind == "fill":
            if self.shared_memory is not None and not self.filled_until:
                self._fill(self.shared_memory, action.duration_s)
            return
        child = self.children[action.name]
        if not child.is_alive or child.process is None:
            return
        self.counts[f"{action.kind} {action.name.split('-')[0]}"] += 1
        self.log.say(action.kind, action.name, action.duration_s)
        if action.kind == "kill":
            child.process.kill()
        else:
            child.process.send_signal(signal.SIGSTOP)
            child.stopped_until = max(child.stopped_until, time.monotonic() + action.duration_s)
            heapq.heappush(self.wakes, (time.monotonic() + action.duration_s, child.name, child.process.pid))

    def _fill(self, directory: Path, seconds: float) -> None:
        """Take all of its free space for a while."""
        self.counts["fill"] += 1
        self.log.say("fill", seconds)
        self.filled_until = time.monotonic() + seconds
        handle = os.open(directory / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            size, piece = 0, 1 << 30
            while piece >= 4096:
                try:
                    os.posix_fallocate(handle, size, piece)
                    size += piece
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece //= 2
        finally:
            os.close(handle)

    def _wake_and_free(self, everything: bool) -> None:
        now = time.monotonic()
        while self.wakes and (everything or self.wakes[0][0] <= now):
            _, name, pid = heapq.heappop(self.wakes)
            child = self.children[name]
            if not child.is_alive or child.process is None or child.process.pid != pid:
                continue
            if everything or child.stopped_until <= now:
                child.process.send_signal(signal.SIGCONT)
                child.stopped_until = 0.0
                self.log.say("go on", name)
        if self.filled_until and (everything or self.filled_until <= now):
            assert self.shared_memory is not None
            (self.shared_memory / "filler").unlink()
            self.filled_until = 0.0
            self.log.say("free")

    # --- keeping alive

    def _turn(self, everything_goes_on: bool = False) -> None:
        self._wake_and_free(everything_goes_on)
        self._keep_ranks()
        for child in self.others:
            self._keep(child)

    def _start_all(self) -> None:
        for child in self.children.values():
            self._start(child)

    def _start(self, child: Child) -> None:
        arguments = [*child.arguments, *([str(self.generation)] if child in self.ranks else [])]
        child.process = Forked(child.module, arguments, self.settings.output_path(child.name))
        child.started_at = time.monotonic()
        child.restart_at = child.stopped_until = 0.0
        child.starts += 1
        self.log.say("up", child.name, child.process.pid)

    def _keep(self, child: Child) -> None:
        if child.is_alive or child.has_finished:
            return
        if child.restart_at == 0.0:
            self._bury(child)
        elif time.monotonic() >= child.restart_at:
            self._start(child)

    def _keep_ranks(self) -> None:
        if all(child.is_alive or child.has_finished for child in self.ranks):
            return
        if all(child.restart_at == 0.0 for child in self.ranks):
            for child in self.ranks:
                if child.is_alive and child.process is not None:
                    child.process.kill()
                    child.process.wait()
            for child in self.ranks:
                self._bury(child)
        elif time.monotonic() >= max(child.restart_at for child in self.ranks):
            self.generation += 1
            for child in self.ranks:
                self._start(child)

    def _bury(self, child: Child) -> None:
        assert child.process is not None
        now = time.monotonic()
        child.failures = 0 if now - child.started_at > GOOD_LIFE_S else child.failures + 1
        child.restart_at = now + min(BACKOFF_S[1], BACKOFF_S[0] * 2**child.failures)
        self.log.say("down", child.name, child.process.poll())

    # --- the end

    def _rest(self) -> None:
        self.log.say("calm")
        self.settings.calm.touch()
        self._turn(everything_goes_on=True)
        self._until(lambda: all(child.has_finished for child in self.actors), REST_S, "actors do not end")
        self.settings.actors_gone.touch()
        ending = [*self.ranks, *self.engines]
        self._until(lambda: all(child.has_finished for child in ending), REST_S, "ranks or engines do not end")
        self.log.say("rest")

    def _until(self, condition, seconds: float, said: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Unrest(f"{said} within {seconds:g} s: see {self.settings.directory}")
            self._turn()
            time.sleep(TURN_S)

    def _end(self) -> None:
        for child in self.children.values():
            if child.process is not None:
                child.process.kill()
                child.process.wait()
        if self.filled_until:
            self._wake_and_free(everything=True)
