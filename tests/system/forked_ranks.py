"""Ranks as processes that begin with their modules imported, torch among them.

Each is the fork of one process that has imported them and done nothing else, so that a rank costs its own work and no
start. They meet in a file, as the ranks of `impala-llm train` do. Run as a program, this is that process: it answers
each line of JSON with another.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from impala_llm.processes.supervised import RENDEZVOUS

ROOT = Path(__file__).parents[2]
Start = Callable[[int, list[str]], "subprocess.CompletedProcess[str]"]
"""Called with the number of ranks and the words of each. The status is that of the first rank that failed, which ends
the others, or 0."""


@contextlib.contextmanager
def forked_ranks(module: str) -> Iterator[Start]:
    """The ranks: each calls `main` of this module with its words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, __file__, module]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as server:

        def start(number: int, words: list[str]) -> "subprocess.CompletedProcess[str]":
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps([number, words]), file=server.stdin, flush=True)
            status, errors = json.loads(server.stdout.readline())
            return subprocess.CompletedProcess(words, status, stderr=errors)

        yield start


def serve(module: ModuleType) -> None:
    """Start the ranks of each line of stdin, and print their status and what they have printed."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no thread but the one that forks"
    gc.freeze()  # a fork that looks through all that was imported copies its memory
    for line in sys.stdin:
        number, words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
            total = str(number)
            world = {"WORLD_SIZE": total, "LOCAL_WORLD_SIZE": total, RENDEZVOUS: f"file://{folder}/ranks"}
            ranks = set()
            for rank in range(number):
                child = os.fork()
                if child == 0:
                    os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank))
                    for own, wanted in enumerate((os.open(os.devnull, os.O_RDONLY), said.fileno(), said.fileno())):
                        os.dup2(wanted, own)
                    live(module, words)
                ranks.add(child)
            status = wait_for(ranks)
            said.seek(0)
            print(json.dumps([status, said.read().decode(errors="replace")]), flush=True)


def live(module: ModuleType, words: list[str]) -> None:
    """The life of a rank, to its end: whatever happens it does not come back into the loop of its parent."""
    from impala_llm.learning.ranks.parallel import exit_process

    try:
        module.main(words)
        exit_process(0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def wait_for(ranks: set[int]) -> int:
    """Wait until all ranks have ended; one that fails ends the others. Returns the status of the first that failed."""
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))
