"""Scores answers in a process of its own: a scorer that hangs, crashes, or runs what a policy has written, harms
nobody else.

    python -m impala_llm.envs.scoring_process VERIFIER SECONDS [GIB]

reads a line of JSON, [answer, task, arguments], and writes one, [score, null] or [null, error]. Its first line says
that the verifier is there, or why not. It ends with its input.

Invariant: a request has one reply, or the process is ended and a new one takes the next request.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, Any

from impala_llm.plugs import VERIFIERS, load

_START_TIMEOUT_S = 120.0


class ScoringError(RuntimeError):
    """An answer could not be scored."""


class ScoringProcess:
    """Scores one answer at a time with a verifier, a plain function `verify(answer, task, **arguments)`.

    The process starts with the first answer.

    Args:
        verifier: short name or import path.
        timeout_s: for one answer; then the process is killed.
        memory_gib: largest address space of the process; None: without limit.
    """

    def __init__(self, verifier: str, timeout_s: float = 10.0, memory_gib: float | None = None) -> None:
        limit = [] if memory_gib is None else [str(memory_gib)]
        self._command = [sys.executable, "-m", "impala_llm.envs.scoring_process", verifier, str(timeout_s), *limit]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def score(self, answer: str, task: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> float:
        """Score an answer without holding up the event loop.

        Args:
            task, arguments: what the verifier gets beside the answer; of plain values, since they go as JSON.

        Raises:
            ScoringError: the verifier raised, took too long, or its process has died.
        """
        return await asyncio.to_thread(
            self._ask, json.dumps([answer, task, dict(arguments)], default=str).encode() + b"\n"
        )

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> float:
        with self._lock:
            if self._process is not None:
                return self._exchange(request, self._timeout_s)
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._exchange(b"", _START_TIMEOUT_S)
            # With its first answer a verifier loads what it needs, which on a busy machine takes longer than an answer.
            return self._exchange(request, max(_START_TIMEOUT_S, self._timeout_s))

    def _exchange(self, request: bytes, timeout_s: float) -> float:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
            score, error = json.loads(line) if line else (None, "the process has died, or took too long")
        except (OSError, ValueError) as problem:
            line, score, error = b"", None, str(problem)
        finally:
            timer.cancel()
        if not line:
            self._end()
        if score is None:
            raise ScoringError(error)
        return float(score)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def main(verifier: str, timeout_s: float, memory_gib: float | None) -> None:
    """Serve standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it goes to all: this ends with its input
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a verifier prints is no reply
    if memory_gib is not None:
        resource.setrlimit(resource.RLIMIT_AS, 2 * (int(memory_gib * 2**30),))
    try:
        verify = load(VERIFIERS, verifier)
    except Exception as error:
        _reply(replies, None, str(error))
        return
    _reply(replies, 0.0, None)
    for line in sys.stdin:
        # The parent kills what takes too long; where it has died, this does, in compiled code too.
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + timeout_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            answer, task, arguments = json.loads(line)
            _reply(replies, float(verify(answer, task, **arguments)), None)
        except BaseException as error:  # SystemExit too, which an answer may spell
            _reply(replies, None, f"{type(error).__name__}: {error}")


def _reply(replies: IO[str], score: float | None, error: str | None) -> None:
    replies.write(json.dumps([score, error]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else None)
