"""Scores answers in a process of its own: a scorer that hangs, crashes, or runs what a policy has written, harms
nobody else.

    python -m impala_llm.envs.scoring_process REPLIES VERIFIER SECONDS [GIB]

reads a line, NAME [answer, task, arguments], with JSON after the request's name, and writes one of JSON, [NAME, score,
null] or [NAME, null, error], to the descriptor REPLIES, see `start_with_pipe`. Its first line, without a name, says
that the verifier is there, or why not. It ends with its input.

Invariant: a request has one reply, or the process is ended and a new one takes the next request. No answer gets the
score of another one, unless the verifier executes what the policy writes, which may change the verifier itself.
"""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import IO, Any, BinaryIO

from impala_llm.plugs import VERIFIERS, load
from impala_llm.processes.module_process import module_command, python_path
from impala_llm.processes.supervised import start_with_pipe

_START_TIMEOUT_S = 120.0
_MOST_REPLY_BYTES = 1 << 20


class ScoringError(RuntimeError):
    """An answer could not be scored."""


class ScorerNotStarted(ScoringError):
    """The process did not start, so that no answer could have a score."""


class _StrayReply(ScoringError):
    """The line read as the reply is not a reply to this request; the process has been ended."""


class ScoringProcess:
    """Scores one answer at a time with a verifier, a plain function `verify(answer, task, **arguments)`.

    The process starts with the first answer.

    Args:
        verifier: short name or import path.
        timeout_s: for one answer; then the process is killed, with all that it has started.
        memory_gib: largest address space of the process; None: without limit.
        example: task and arguments with which an empty answer is scored before the first one, so that the time in which
            the verifier imports its libraries does not count for an answer; its score is ignored. None: no empty answer
            is scored.
    """

    def __init__(
        self,
        verifier: str,
        timeout_s: float = 10.0,
        memory_gib: float | None = None,
        example: tuple[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        limit = [] if memory_gib is None else [str(memory_gib)]
        self._arguments = [verifier, str(timeout_s), *limit]
        self._verifier, self._timeout_s = verifier, timeout_s
        self._example = None if example is None else _request("", *example)
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: BinaryIO | None = None

    async def score(self, answer: str, task: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> float:
        """Score an answer without holding up the event loop.

        Args:
            task, arguments: what the verifier gets beside the answer; of plain values, since they go as JSON.

        Raises:
            ScorerNotStarted: its process did not start.
            ScoringError: the verifier raised, took too long, or its process has died.
        """
        request = _request(answer, task, arguments)
        score: float = await asyncio.wrap_future(self._submit(partial(self._ask, request)))
        return score

    def close(self) -> None:
        """End the process."""
        self._submit(self._end).result()

    def _submit(self, call: Callable[[], Any]) -> "Future[Any]":
        """Have the one thread make a call: answers that wait for their turn hold none of the event loop's own."""
        if self._thread is None:
            # A daemon: the end of the interpreter waits for the threads of an executor, and so for one that hangs.
            self._thread = threading.Thread(target=_make_calls, args=(self._calls,), name="scoring", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _ask(self, request: bytes) -> float:
        try:
            return self._score(request)
        except _StrayReply:  # the code of an earlier answer may have written it: try again with a new process
            return self._score(request)

    def _score(self, request: bytes) -> float:
        if self._process is None:
            self._start()
            if self._example is not None:
                with contextlib.suppress(ScoringError):
                    self._exchange(self._example, _START_TIMEOUT_S)
                if self._process is None:  # the verifier does not bear an empty answer
                    self._example = None
                    self._start()
        return self._exchange(request, self._timeout_s)

    def _start(self) -> None:
        try:
            self._process, self._replies = start_with_pipe(
                lambda replies: [*module_command("impala_llm.envs.scoring_process"), str(replies), *self._arguments],
                env={**os.environ, **python_path()},
                bufsize=0,
            )
            self._exchange(b"", _START_TIMEOUT_S)
        except (OSError, ScoringError) as error:
            self._end()
            raise ScorerNotStarted(
                f"the process that scores answers with {self._verifier} did not start ({error}): correct the verifier, "
                "or what its output in the log names"
            ) from error

    def _exchange(self, request: bytes, timeout_s: float) -> float:
        # A random name: an answer that the verifier executes may write to the pipe of the replies.
        name = secrets.token_hex(8) if request else ""
        try:
            line = self._line(request and f"{name} ".encode() + request, time.monotonic() + timeout_s)
            replied, score, error = json.loads(line)
            if replied != name:
                raise ValueError("it is to another request")
            score = None if score is None else float(score)
        except OSError as problem:
            self._end()
            raise ScoringError(str(problem)) from None
        except Exception as problem:  # the line may hold anything
            self._end()
            raise _StrayReply(
                f"what stands in the place of the reply is none ({problem!r:.200}), and so the answer has no score: if "
                "the verifier executes what the policy wrote, let it do so in a sandboxed process of its own"
            ) from None
        if score is None:
            raise ScoringError(error)
        return score

    def _line(self, request: bytes, deadline: float) -> bytes:
        """Send a request and return the line of its reply. OSError where none comes; ValueError, and nothing is sent,
        where there is something to read before.

        Nothing waits for the end of a pipe: a process that the verifier has started may hold it open for ever.
        """
        process = self._process
        if process is None or process.stdin is None or self._replies is None:
            raise OSError("the process has died")
        source, sink = self._replies.fileno(), process.stdin.fileno()
        os.set_blocking(sink, False)
        poll, reply = select.poll(), b""
        poll.register(source, select.POLLIN)
        if request:
            if poll.poll(0):
                raise ValueError("it came before the request, or the process had ended by then")
            poll.register(sink, select.POLLOUT)
        while not reply.endswith(b"\n"):
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready or time.monotonic() > deadline:  # a pipe that is filled without end is always ready
                raise OSError("the answer took too long")
            if len(reply) > _MOST_REPLY_BYTES:
                raise ValueError("it has no end")
            for descriptor, _ in ready:
                if descriptor == source:
                    if not (part := os.read(source, 1 << 16)):
                        raise OSError("the process has died")
                    reply += part
                elif not (request := request[os.write(sink, request) :]):
                    poll.unregister(sink)
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, self._replies):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


_Call = tuple["Future[Any]", Callable[[], Any]]


def _make_calls(calls: "SimpleQueue[_Call | None]") -> None:
    """Make one call after the other, but for those that were cancelled before their turn, until None comes."""
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del item, future, call  # what they belong to may be given up while the next is waited for


def _request(answer: str, task: Any, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps([answer, task, dict(arguments)], default=str).encode() + b"\n"


def main(descriptor: int, verifier: str, timeout_s: float, memory_gib: float | None) -> None:
    """Serve the requests of standard input until it ends, and write the replies to `descriptor`."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    process_id = os.getpid()
    # A verifier and its processes must not read requests from standard input. They do not inherit what dup returns.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(descriptor), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(descriptor)
    if memory_gib is not None:
        most, _ = _within_hard_limit(resource.RLIMIT_AS, int(memory_gib * 2**30))
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        verify = load(VERIFIERS, verifier)
    except Exception as error:
        _reply(replies, "", None, str(error))
        return
    _reply(replies, "", 0.0, None)
    for number, line in enumerate(requests):
        # The parent kills what takes too long; where it has died, this does, in compiled code too. A verifier may use
        # all cores, and the first answer may be the example, in whose time libraries and models are loaded.
        longest_s = timeout_s if number else max(timeout_s, _START_TIMEOUT_S)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + longest_s * len(os.sched_getaffinity(0))) + 2
        resource.setrlimit(resource.RLIMIT_CPU, _within_hard_limit(resource.RLIMIT_CPU, limit))
        name, _, request = line.partition(b" ")
        try:
            answer, task, arguments = json.loads(request)
            score, reason = float(verify(answer, task, **arguments)), None
        except BaseException as error:  # SystemExit too, which an answer may spell
            score, reason = None, f"{type(error).__name__}: {error}"
        if os.getpid() != process_id:  # a fork of the verifier's: a request has one reply
            os._exit(0)
        _reply(replies, name.decode(), score, reason)


def _within_hard_limit(kind: int, wanted: int) -> tuple[int, int]:
    """The limits of this process to set: the wanted one, or the user's hard limit where that is smaller, and the hard
    limit as it is, which root alone may raise."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard


def _end_with(parent: int) -> None:
    """End this process, and what it has started, when its parent is gone: a verifier may wait for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def _reply(replies: IO[str], name: str, score: float | None, error: str | None) -> None:
    replies.write(json.dumps([name, score, error]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else None)
    _end_with(0)
