"""Connections of strangers on the host: they take nothing that the actor or its agents need."""

import asyncio
import contextlib
import http.client
import logging
import socket
import subprocess
import sys

import pytest

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
