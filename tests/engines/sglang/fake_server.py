"""A server that behaves as SGLang does, or misbehaves on demand, and an engine that runs on some of them.

It answers token i of a sequence with the id (sequence length) % VOCAB and log-probability -id / 8.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from impala_llm.engines.base import Generation
from impala_llm.engines.sglang.engine import SGLangEngine
from impala_llm.engines.sglang.external_server import RemoteServer

VOCAB = 50
PIECE = 4
Change = Callable[[dict, int], object]
"""Gets a piece of a completion and its number, changes it, or gives the raw bytes to send in its place."""


class FakeServer:
    """One SGLang server. Counts what it is asked; `change`, `die_after` and the others make it misbehave."""

    def __init__(self, **info: object) -> None:
        self.info = {
            "version": "0.5.21",
            "incremental_streaming_output": True,
            "disable_radix_cache": True,
            "max_req_input_len": 4096,
            **info,
        }
        self.label = "default"
        self.calls: list[str] = []
        self.requests: list[dict] = []
        self.loaded: list[Path] = []
        self.aborted: list[str] = []
        self.change: Change = lambda piece, number: None
        self.die_after: list[int] = []
        """For each of the next requests: pieces until its connection breaks."""
        self.refuse_weights = ""
        self.transports: list[asyncio.Transport] = []
        self.is_dead = False
        self.gate = asyncio.Event()
        """Completions stop after their first piece until it is set."""
        self.gate.set()
        app = web.Application()
        app.router.add_get("/server_info", self.tell_info)
        app.router.add_get("/model_info", self.tell_model)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/{call}", self.take_call)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def die(self) -> None:
        """As by SIGKILL: all connections break, no new ones are taken."""
        self.is_dead = True
        for transport in self.transports:
            transport.abort()
        self.gate.set()
        await self.server.close()

    async def tell_info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def tell_model(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": "/nowhere", "weight_version": self.label})

    async def take_call(self, request: web.Request) -> web.Response:
        call, body = request.match_info["call"], await request.json()
        self.calls.append(call)
        if call == "update_weight_version":
            self.label = body["new_version"]
        elif call == "update_weights_from_disk":
            if self.refuse_weights:
                return web.json_response({"success": False, "message": self.refuse_weights}, status=400)
            self.loaded.append(Path(body["model_path"]))
            self.label = body["weight_version"]
        elif call == "abort_request":
            self.aborted.append(body["rid"])
        return web.json_response({"success": True})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.transports.append(request.transport)
        dies_after = self.die_after.pop(0) if self.die_after else None
        response = web.StreamResponse()
        await response.prepare(request)
        length, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        stops = set(body["sampling_params"]["stop_token_ids"])
        sent = 0
        for number in range(1000):
            if number == dies_after:
                request.transport.abort()
                return response
            ids = [(length + sent + index) % VOCAB for index in range(min(PIECE, limit - sent))]
            stop = next((index for index, token in enumerate(ids) if token in stops), None)
            ids = ids if stop is None else ids[: stop + 1]
            sent += len(ids)
            reason = {"type": "stop"} if stop is not None else {"type": "length"} if sent == limit else None
            if body["rid"] in self.aborted:
                reason = {"type": "abort", "message": "on request"}
            piece = {
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": reason,
                    "completion_tokens": sent,
                    "prompt_tokens": length,
                    "cached_tokens": 0,
                    "weight_version": self.label,
                    "output_token_logprobs": [[-token / 8, token, None] for token in ids],
                },
            }
            if reason is not None:
                piece["meta_info"]["weight_versions"] = [{"version": self.label, "start": 0, "end": sent}]
            raw = self.change(piece, number)
            reason = piece["meta_info"]["finish_reason"]
            data = raw if isinstance(raw, bytes) else json.dumps(piece).encode()
            if self.is_dead:
                return response
            with contextlib.suppress(ConnectionError):
                await response.write(b"data: " + data + b"\n\n")
            if reason is not None:
                await response.write(b"data: [DONE]\n\n")
                return response
            await self.gate.wait()
        raise AssertionError("a completion without end")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def running(*fakes: FakeServer, timeout_s: float = 10, **options):
    for fake in fakes:
        await fake.server.start_server(shutdown_timeout=0.1)
    servers = [RemoteServer(fake.url, timeout_s=timeout_s) for fake in fakes]
    engine = SGLangEngine(servers, **{"vocab_size": VOCAB, "max_length": 200, **options})
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        for fake in fakes:
            await fake.server.close()


def check_tokens(prompt: list[int], completion: Generation) -> None:
    tokens = [(len(prompt) + index) % VOCAB for index in range(len(completion.tokens))]
    assert completion.tokens.tolist() == tokens
    np.testing.assert_array_equal(completion.log_probs, -np.array(tokens, np.float32) / 8)
