"""Answers of a server, or of a proxy before it, that no SGLang gives: a call raises only what its caller expects."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from impala_llm.engines.sglang.client import ServerLost, ServerRefused, SGLangClient, open_http

LATIN_1 = "Passerelle défaillante".encode("latin-1")
DEEP = b"[" * 100_000
NESTED = b'{"error": ' * 900 + b"1" + b"}" * 900
INFO = {"version": "0.5.21", "disable_radix_cache": True, "max_req_input_len": 9, "model_path": "/x"}


@asynccontextmanager
async def client_of(status: int, body: bytes, kind: str) -> AsyncIterator[SGLangClient]:
    """A client of a server that answers everything so."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, open_http() as http:
        yield SGLangClient(http, str(server.make_url("")))


@pytest.mark.parametrize("status", [200, 400, 502])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (LATIN_1, "text/html"),
        (LATIN_1, "application/json"),
        (DEEP, "application/json"),
        (NESTED, "application/json"),
        (b"data: " + DEEP + b"\n\n", "text/event-stream"),
        (b"data: " + NESTED + b"\n\n", "text/event-stream"),
        (b"\xff", "text/html; charset=utf-16"),
        (b"words", "text/html; charset=hex"),
        (json.dumps({**INFO, "weight_version": "9" * 5000}).encode(), "application/json"),
        (json.dumps({**INFO, "weight_version": 0, "max_req_input_len": float("inf")}).encode(), "application/json"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_only_a_lost_server_or_a_refusal_comes_of_a_broken_answer(body: bytes, kind: str, status: int) -> None:
    async def scenario() -> None:
        async with client_of(status, body, kind) as client:
            assert await client.healthy() == (status == 200 and "model_path" in body.decode(errors="replace"))
            assert await client.workers() == []
            for call in (client.info, client.weight_version, client.resume, lambda: anext(client.generate({}))):
                try:
                    await call()
                except (ServerLost, ServerRefused) as error:
                    assert client.url in str(error)

    asyncio.run(scenario())


def test_words_of_a_proxy_in_another_encoding_are_told() -> None:
    async def scenario() -> None:
        async with client_of(502, LATIN_1, "text/html") as client:
            with pytest.raises(ServerRefused, match="502: Passerelle d.faillante"):
                await client.resume()
            with pytest.raises(ServerLost, match="502: Passerelle d.faillante"):
                await anext(client.generate({}))

    asyncio.run(scenario())
