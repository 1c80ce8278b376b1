"""The gateway: OpenAI's protocol, and Anthropic's, over HTTP on loopback, for the agents of one actor.

Invariant: a request is answered for the episode whose key it carries, and for none where it carries no valid one. A bad
request, or a client that goes away, ends nothing but itself.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from impala_llm.engines.base import EngineError
from impala_llm.gateway import anthropic
from impala_llm.gateway.chat import Reply, texts_of
from impala_llm.gateway.connections import Connections, ServerLog
from impala_llm.gateway.conversation import Position
from impala_llm.gateway.episode import AgentResult, ContextFull, EpisodeOver, GatewayEpisode
from impala_llm.gateway.requests import (
    MOST_COMPLETIONS,
    BadRequest,
    ParsedRequest,
    RequestReader,
    messages_of,
    prompts_of,
)
from impala_llm.gateway.tree import Completion
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.processes.open_files import raise_limit

MODEL = "policy"
"""Name of the model in answers; requests may name any."""
_MOST_BYTES = 64 << 20
_MOST_CONNECTIONS = 8192

_Handler = Callable[[web.Request, GatewayEpisode], Awaitable[web.StreamResponse]]


class Gateway:
    """The server. All methods are called from the event loop of the engine.

    Args:
        vocab_size: of the policy, for prompts that are token ids.
        drops: drop what cannot be honoured, with a warning, in place of a refusal.
    """

    def __init__(self, vocab_size: int, drops: bool = False) -> None:
        self.counters: Counter[str] = Counter()
        """requests, refused_keys, refused_requests, since the start."""
        self._vocab_size, self._drops = vocab_size, drops
        self._episodes: dict[str, GatewayEpisode] = {}
        self._readers: dict[str, RequestReader] = {}
        self._warnings = RateLimitedWarnings(60.0)
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None

    @property
    def port(self) -> int:
        """Port on loopback, once it is started."""
        assert self._connections is not None
        return self._connections.port

    @property
    def url(self) -> str:
        """Base URL of the protocol."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listen at a free port of loopback.

        Increases this process's limit of file descriptors, half of which are left to the rest of the actor.
        """
        app = web.Application(client_max_size=_MOST_BYTES)
        routes: dict[str, _Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/messages": self._messages,
            "/v1/reward": self._reward,
            "/reward": self._reward,
        }
        for path, handler in routes.items():
            app.router.add_post(path, self._checked(handler))
        app.router.add_get("/v1/models", self._checked(self._models))
        app.router.add_get("/v1/models/{model}", self._checked(self._models))
        app.router.add_route("*", "/{path:.*}", self._checked(self._nothing))
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # of one whose client has gone away: it aborts its completion
            access_log=None,
            shutdown_timeout=1.0,
            logger=ServerLog(self._warnings),
            # A body costs the engine's loop no time that its sender chooses: it is not unpacked, nor read once refused.
            auto_decompress=False,
            lingering_time=0.0,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        most = min(raise_limit() // 2, _MOST_CONNECTIONS)
        self._connections = Connections(self._runner.server, most, self._warnings)

    async def close(self) -> None:
        """End all connections."""
        if self._connections is not None:
            await self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, episode: GatewayEpisode, temperature: float | None) -> None:
        """Let an episode's key in. temperature: the one that its requests may ask for; None: any, without effect."""
        self._episodes[episode.key] = episode
        self._readers[episode.key] = RequestReader(temperature, self._drops, self._warnings)

    async def remove(self, episode: GatewayEpisode) -> None:
        """End an episode: its key is no longer valid, and what is under way is aborted."""
        self._episodes.pop(episode.key, None)
        self._readers.pop(episode.key, None)
        await episode.close()

    def _checked(self, handler: _Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that is called with the episode of the request, and whose errors are answers."""

        async def handle(request: web.Request) -> web.StreamResponse:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ")
            episode = self._episodes.get(key or request.headers.get("x-api-key", ""))
            if episode is None:
                self.counters["refused_keys"] += 1
                refusal = _error(401, "no valid key: send the key of an episode that is under way as a bearer token")
                refusal.force_close()
                return refusal
            self.counters["requests"] += 1
            assert self._connections is not None
            self._connections.trust(request.protocol)
            try:
                return await handler(request, episode)
            except ContextFull as error:
                return _error(400, str(error), "context_length_exceeded")
            except EpisodeOver as error:
                return _error(401, str(error))
            except EngineError as error:
                return _error(503, str(error))
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                # Any error that the contents of a body cause is reported to its sender.
                self.counters["refused_requests"] += 1
                return _error(400, str(error) if isinstance(error, ValueError) else f"malformed request: {error!r}")

        return handle

    def _check(self, episode: GatewayEpisode) -> None:
        """Raise EpisodeOver where an episode has ended while the body of a request came."""
        if episode.key not in self._readers:
            raise EpisodeOver("this episode has ended")

    def _reader(self, episode: GatewayEpisode) -> RequestReader:
        """The reader of an episode's bodies. EpisodeOver where it has ended while the body came."""
        self._check(episode)
        return self._readers[episode.key]

    async def _nothing(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        self.counters["refused_requests"] += 1
        fix = "set OpenAI's SDK to chat completions" if request.path.endswith("/responses") else "take one of these"
        return _error(
            404,
            f"{request.method} {request.path[:80]} is not served here, but POST /v1/chat/completions, /v1/completions, "
            f"/v1/messages and /v1/reward, and GET /v1/models: {fix}",
        )

    async def _models(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        name = request.match_info.get("model")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "impala-llm"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _reward(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        body = await _body(request)
        self._check(episode)
        if "completion_id" in body:
            episode.reward(str(body["completion_id"]), body.get("reward"))
        else:
            AgentResult.of(body)  # refused here, where its sender sees why
            episode.result = body
        return web.json_response({"ok": True})

    async def _chat(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        asked, chat_completion = await self._complete_chat(await _body(request), episode)
        return await _stream(request, chat_completion, asked) if asked.stream else web.json_response(chat_completion)

    async def _messages(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        asked, chat_completion = await self._complete_chat(
            anthropic.chat_body(await _body(request)) | {"n": 1}, episode
        )
        answer = anthropic.answer_of(chat_completion)
        if not asked.stream:
            return web.json_response(answer)
        response = await _begin_stream(request)
        for event in anthropic.events_of(answer):
            await _send(response, event, event["type"])
        await response.write_eof()
        return response

    async def _complete_chat(
        self, body: dict[str, Any], episode: GatewayEpisode
    ) -> tuple[ParsedRequest, dict[str, Any]]:
        """Answer a chat request: what was asked for, and the chat completion."""
        asked = self._reader(episode).read(body)
        conversation, messages = episode.conversation, messages_of(body)
        episode.check_room(said for message in messages for said in texts_of(message))
        if asked.tools and not conversation.chat.finds_calls:
            self._warnings.log(
                "gateway, an agent offers tools",
                "agent.tool_parser=none leaves the calls that the policy writes a part of its text: set the parser of "
                "its family, such as agent.tool_parser=qwen3",
            )
        position = conversation.position_of(messages, asked.tools)
        completions = await _sample_all(episode, [position] * asked.n, asked)
        choices = []
        for index, completion in enumerate(completions):
            assert completion.generation is not None
            reply = conversation.chat.reply(completion.generation.tokens.tolist(), position.read, asked.tools)
            content, stop = _before_stop(reply.content, asked.stop)
            reasoning = reply.reasoning
            if stop is None and reasoning is not None:
                reasoning, stop = _before_stop(reasoning, asked.stop)
            message = Reply(content, reasoning, reply.tool_calls).message()
            conversation.remember(position, completion, message)
            reason = "tool_calls" if reply.tool_calls else _reason(completion)
            choices.append(
                {"index": index, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
            )
        return asked, {
            "id": episode.completion_id(completions, "chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(body.get("model", MODEL)),
            "choices": choices,
            "usage": _usage([position], completions),
        }

    async def _completions(self, request: web.Request, episode: GatewayEpisode) -> web.StreamResponse:
        body = await _body(request)
        asked = self._reader(episode).read(body)
        conversation, prompts = episode.conversation, prompts_of(body, self._vocab_size)
        if len(prompts) * asked.n > MOST_COMPLETIONS:
            raise BadRequest(
                f"prompt and n ask for {len(prompts) * asked.n} completions: at most {MOST_COMPLETIONS} are given"
            )
        for prompt in prompts:
            episode.check_room([prompt] if isinstance(prompt, str) else [""] * len(prompt))
        positions = [conversation.position_of_text(prompt) for prompt in prompts]
        completions = await _sample_all(episode, [position for position in positions for _ in range(asked.n)], asked)
        choices = []
        for index, completion in enumerate(completions):
            assert completion.generation is not None
            conversation.remember_text(positions[index // asked.n], completion)
            text, stop = _before_stop(conversation.chat.text(completion.generation.tokens.tolist()), asked.stop)
            reason = _reason(completion)
            choices.append(
                {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
            )
        text_completion = {
            "id": episode.completion_id(completions, "cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": str(body.get("model", MODEL)),
            "choices": choices,
            "usage": _usage(positions, completions),
        }
        return await _stream(request, text_completion, asked) if asked.stream else web.json_response(text_completion)


async def _body(request: web.Request) -> dict[str, Any]:
    if (packing := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise BadRequest(
            f"the body is compressed (Content-Encoding: {packing[:80]}), and unpacking it would hold up the engine: "
            "send it as it is"
        )
    try:
        body = json.loads(await request.read())  # UTF-8 (RFC 8259): some charsets take quadratic time
    except (ValueError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a {type(body).__name__}: an object is expected")
    return body


async def _sample_all(episode: GatewayEpisode, positions: list[Position], asked: ParsedRequest) -> list[Completion]:
    """A completion at each position, all at once."""
    if len(positions) == 1:
        return [await episode.sample(positions[0], asked.limit, asked.stop, asked.seed)]
    seeds = [None if asked.seed is None else asked.seed + number for number in range(len(positions))]
    calls = [
        asyncio.ensure_future(episode.sample(position, asked.limit, asked.stop, seed))
        for position, seed in zip(positions, seeds, strict=True)
    ]
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        for call in calls:
            call.cancel()
        raise


def _before_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """A text up to the first of the texts that end it, and which that is; None where it has none."""
    end, word = min(((text.find(word), word) for word in stop if word in text), default=(len(text), None))
    return text[:end], word


def _reason(completion: Completion) -> str:
    assert completion.generation is not None
    return "length" if completion.generation.finish_reason == "length" else "stop"


def _usage(positions: list[Position], completions: list[Completion]) -> dict[str, int]:
    read = sum(
        len(position.read) + (0 if position.parent is None else position.parent.num_tokens) for position in positions
    )
    said = sum(len(completion.generation.tokens) for completion in completions if completion.generation is not None)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}


async def _stream(request: web.Request, body: Mapping[str, Any], asked: ParsedRequest) -> web.StreamResponse:
    """Send a whole answer as a stream of server-sent events: each choice in one piece, then its end."""
    response = await _begin_stream(request)
    is_chat = body["object"] == "chat.completion"
    head = {key: body[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    for choice in body["choices"]:
        first = dict(choice) | {"finish_reason": None}
        last = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
        if is_chat:
            delta = first.pop("message")
            calls = [{"index": index, **call} for index, call in enumerate(delta.get("tool_calls", ()))]
            first["delta"] = delta | ({"tool_calls": calls} if calls else {})
            last["delta"] = {}
        else:
            last["text"] = ""
        for piece in (first, last):
            await _send(response, {**head, "choices": [piece]})
    if asked.includes_usage:
        await _send(response, {**head, "choices": [], "usage": body["usage"]})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, event: Mapping[str, Any], name: str | None = None) -> None:
    named = f"event: {name}\n" if name else ""
    await response.write(f"{named}data: {json.dumps(event)}\n\n".encode())


def _error(status: int, sentence: str, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    # `type` is for clients of Anthropic's protocol.
    return web.json_response(
        {"type": "error", "error": {"message": sentence, "type": kind, "param": None, "code": code}}, status=status
    )
