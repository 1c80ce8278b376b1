"""Connections of strangers on the host: they take nothing that the actor or its agents need."""

import asyncio
import contextlib
import gc
import http.client
import logging
import socket
import subprocess
import sys
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from impala_llm.gateway import server
from impala_llm.gateway.server import Gateway

SERVE = """
import asyncio, os, resource, sys, types
from impala_llm.gateway.server import Gateway

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))

async def main():
    gateway = Gateway(100)
    await gateway.start()
    gateway.add(types.SimpleNamespace(key="sk-own"), 1.0)
    print(gateway.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(len([open(os.devnull) for _ in range(64)]), flush=True)

asyncio.run(main())
"""
NUM_SILENT = 160
"""More than half of the descriptors that the actor may have."""


def answer(client: http.client.HTTPConnection) -> int:
    client.request("GET", "/v1/models", headers={"Authorization": "Bearer sk-own"})
    response = client.getresponse()
    response.read()
    return response.status


@pytest.mark.system
def test_connections_that_say_nothing_are_few_and_end() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVE], text=True, **pipes) as actor, contextlib.ExitStack() as stack:
        assert actor.stdin is not None and actor.stdout is not None and actor.stderr is not None
        port = int(actor.stdout.readline())
        earlier, later = (http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
        assert answer(earlier) == 200
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(NUM_SILENT)]
        for _ in range(2):
            assert answer(earlier) == 200, "a client that has sent its key goes on"
            actor.stdin.write("open files\n")
            actor.stdin.flush()
            assert actor.stdout.readline() == "64\n", "half of the descriptors are left to the actor"
            assert silent[0].recv(1) == b"", "closed"
        assert answer(later) == 200
        earlier.close()
        later.close()
        actor.stdin.close()
        assert len(actor.stderr.readlines()) <= 1, "nor is the log filled"


def test_what_is_no_http_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gateway = Gateway(100)
        await gateway.start()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
        await gateway.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "malformed HTTP" in caplog.text


def test_a_wrong_key_ends_its_connection() -> None:
    async def main() -> None:
        gateway = Gateway(100)
        await gateway.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer sk-other\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")  # up to its end
        writer.close()
        await gateway.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no time pass for the loop: nothing ends for its age."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)


def test_the_body_of_a_request_that_is_refused_is_neither_unpacked_nor_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what earlier tests have left unawaited is logged now, and not below
    caplog.clear()
    head = b"POST /v1/messages HTTP/1.1\r\nHost: here\r\nContent-Encoding: gzip\r\nContent-Length: 1000\r\n\r\n"

    async def main() -> None:
        gateway = Gateway(100)
        await gateway.start()

        def ask() -> bytes:
            with socket.create_connection(("127.0.0.1", gateway.port), 20) as stranger:
                stranger.sendall(head + b"its beginning")
                return b"".join(iter(lambda: stranger.recv(4096), b""))  # up to the end of the connection

        stop_clock(monkeypatch)
        monkeypatch.delattr(zlib, "decompressobj")
        assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 401 ")
        monkeypatch.undo()
        await gateway.close()

    asyncio.run(main())
    assert caplog.records == []


def test_where_all_connections_are_taken_the_oldest_that_is_silent_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(server, "raise_limit", lambda: 8)  # and so it takes four
        gateway = Gateway(100)
        await gateway.start()
        episode: Any = SimpleNamespace(key="sk-own")
        gateway.add(episode, 1.0)
        stop_clock(monkeypatch)
        client = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                silent = [
                    stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), 20)) for _ in range(16)
                ]
                assert await asyncio.to_thread(answer, client) == 200, "a client that has sent its key goes on"
            assert await asyncio.to_thread(silent[0].recv, 1) == b"", "closed"
        client.close()
        monkeypatch.undo()
        await gateway.close()

    asyncio.run(main())
