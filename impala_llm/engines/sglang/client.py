"""HTTP client of one SGLang server: the calls of the engine, with deadlines, and the server's own error messages.

Invariant: a call either returns the server's answer, or raises `ServerLost` (no answer: the call may or may not have
had an effect) or `ServerRefused` (an error answer: it had none).
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from impala_llm.engines.base import EngineError

CALL_TIMEOUT_S = 30.0
_ABORT_TIMEOUT_S = 5.0
_PROBE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
"""Seconds after which an idle connection is not used again. SGLang's server closes idle ones after 5 s, and a request
that is written at that moment is lost."""
_HALF_LOADED = "Rolling back"
"""Words in the answer of a server that failed in the middle of loading, and then reads the same directory again."""
ASKS_FOR_KEY = "it asks for a key"
"""Words in the error of a request that a server wants an API key for."""
_EVENT = b"data: "
_DONE = b"[DONE]"


class ServerLost(Exception):
    """Connection that was refused, broke or timed out."""


class ServerRefused(EngineError):
    """Error answer of a server to a request."""


@dataclass(frozen=True)
class ServerInfo:
    """Settings of a server that its clients need."""

    incremental_streaming: bool
    radix_cache: bool
    max_prompt_length: int
    """Maximum number of tokens of a prompt."""
    model_path: Path
    """Directory of the weights in use, as the server sees it."""
    weight_version: str
    tensor_parallel: int


def open_http() -> aiohttp.ClientSession:
    """Open an HTTP session for any number of clients, requests and servers."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S))


class SGLangClient:
    """Client of one server.

    Args:
        http: session, which other clients may share; it belongs to the caller.
        url: of the server.
        key: the server's API key; None where it has none.
    """

    refusal = ""
    """The answer to the last `healthy`, in words, where a ready server gives another; empty where nothing answered."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = http
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def healthy(self) -> bool:
        """Return whether the server answers. No token is requested: a paused or busy server is healthy too."""
        self.refusal = ""
        try:
            if "model_path" in await self._call("GET", "/model_info", timeout_s=_PROBE_TIMEOUT_S):
                return True
            self.refusal = f"{self.url}/model_info names no model"
        except ServerLost:
            pass
        except ServerRefused as error:
            self.refusal = str(error)
        return False

    async def info(self) -> ServerInfo:
        """Read the settings and the version in use."""
        settings = await self._call("GET", "/server_info")
        model = await self._call("GET", "/model_info")
        try:
            return ServerInfo(
                incremental_streaming=bool(settings.get("incremental_streaming_output")),
                radix_cache=not settings["disable_radix_cache"],
                max_prompt_length=int(settings["max_req_input_len"]),
                model_path=Path(model["model_path"]),
                weight_version=str(model["weight_version"]),
                tensor_parallel=int(settings.get("tp_size") or 1),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ServerRefused(f"{self.url} does not describe itself as an SGLang server does: {error!r}") from error

    async def weight_version(self) -> int | None:
        """Read the version of the weights in use, the server's label; None for a label that is no number."""
        label = (await self._call("GET", "/model_info", timeout_s=_PROBE_TIMEOUT_S)).get("weight_version")
        if isinstance(label, str | int) and re.fullmatch("-?[0-9]{1,9}", str(label)):
            return int(label)
        return None

    async def workers(self) -> list[str]:
        """List the URLs of the servers behind a router; empty for a server, or where there is no answer."""
        try:
            listed = (await self._call("GET", "/workers", timeout_s=_PROBE_TIMEOUT_S)).get("workers", [])
            return [str(worker["url"]).rstrip("/") for worker in listed]
        except (ServerLost, ServerRefused, KeyError, TypeError, RecursionError):
            return []

    async def pause(self, mode: Literal["in_place", "retract"]) -> None:
        """Stop decoding. Requests wait until `resume`."""
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue after a pause. It has no effect on a server that is not paused."""
        await self._call("POST", "/continue_generation", {})

    async def update_weights(self, directory: Path, version: int, flush_cache: bool, timeout_s: float) -> None:
        """Load a Hugging Face directory. A server that is not paused first ends all of its requests."""
        payload = {"model_path": str(directory), "weight_version": str(version), "flush_cache": flush_cache}
        try:
            await self._call("POST", "/update_weights_from_disk", payload, timeout_s=timeout_s)
        except ServerRefused as error:
            if _HALF_LOADED in str(error):
                raise ServerLost(f"{error} (it has neither the old weights nor the new)") from error
            raise

    async def begin_update(self) -> None:
        """Open the server's one session for new weights. Refused while there is one: that makes it a lock.

        A server that is not paused first ends all of its requests.
        """
        await self._call("POST", "/begin_weight_update", {})

    async def end_update(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Close the session, even one that another client opened. Refused where there is none."""
        await self._call("POST", "/end_weight_update", {}, timeout_s=timeout_s)

    async def join_group(self, group: str, address: str, port: int, size: int, backend: str, timeout_s: float) -> None:
        """Join the process group of a sender of weights, rank 0, at its store: the server's GPUs are ranks 1 and up."""
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": group,
            "backend": backend,
        }
        await self._call("POST", "/init_weights_update_group", payload, timeout_s=timeout_s)

    async def leave_group(self, group: str, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Leave the process group of a sender."""
        await self._call("POST", "/destroy_weights_update_group", {"group_name": group}, timeout_s=timeout_s)

    async def receive_weights(
        self,
        group: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        version: int | None,
        flush_cache: bool,
        timeout_s: float,
    ) -> None:
        """Take part in one broadcast for each tensor, in this order, and load them. Within a session only.

        Args:
            tensors: (name, torch's name of the dtype, shape) each.
            version: of the weights in use from now on; None: more tensors follow.
        """
        payload = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
            "group_name": group,
            "flush_cache": flush_cache,
            "weight_version": None if version is None else str(version),
        }
        await self._call("POST", "/update_weights_from_distributed", payload, timeout_s=timeout_s)

    async def relabel(self, version: int) -> None:
        """Set the version number of the weights in use."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def abort(self, rid: str) -> None:
        """End a request, and all others whose ids begin with its id."""
        await self._call("POST", "/abort_request", {"rid": rid}, timeout_s=_ABORT_TIMEOUT_S)

    async def generate(self, request: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the pieces of one answer, the last one included. The caller sets a deadline."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._http.post(
                f"{self.url}/generate", json=request, headers=self._headers, timeout=timeout
            ) as response:
                if response.status >= 500:
                    raise ServerLost(f"{self.url} failed: {response.status}: {_words(await _text(response))}")
                if response.status != 200:
                    raise ServerRefused(f"{self.url} refused the request: {_words(await _text(response))}")
                buffer = b""
                async for data in response.content.iter_any():
                    *events, buffer = (buffer + data).split(b"\n\n")
                    for event in events:
                        if event.startswith(_EVENT):
                            body = event[len(_EVENT) :]
                            if body == _DONE:
                                return
                            yield self._piece(body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerLost(f"{self.url}: {error!r}") from error
        raise ServerLost(f"{self.url} ended an answer in the middle")

    def _piece(self, body: bytes) -> dict[str, Any]:
        try:
            piece = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ServerRefused(f"{self.url} sent what is not JSON: {body[:200]!r}") from error
        if not isinstance(piece, dict):
            raise ServerRefused(f"{self.url} sent no object: {body[:200]!r}")
        if "error" in piece:
            raise ServerRefused(f"{self.url} refused the request: {_words(piece)}")
        return piece

    async def _call(
        self, method: str, path: str, payload: Mapping[str, Any] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._http.request(
                method, f"{self.url}{path}", json=payload, headers=self._headers, timeout=timeout
            ) as response:
                text = await _text(response)
                status = response.status
        except TimeoutError as error:
            raise ServerLost(f"{self.url}{path}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.url}{path}: {error!r}") from error
        if status != 200:
            wants = f", {ASKS_FOR_KEY}" if status in (401, 403) else ""
            raise ServerRefused(f"{self.url}{path} answered {status}{wants}: {_words(text)}")
        try:
            answer = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            return {}
        if not isinstance(answer, dict):
            return {}
        if answer.get("success") is False:
            raise ServerRefused(f"{self.url}{path} answered: {_words(answer)}")
        return answer


async def _text(response: aiohttp.ClientResponse) -> str:
    """Read an answer as UTF-8, which SGLang writes, whatever a proxy claims to have written."""
    return (await response.read()).decode(errors="replace")


def _words(answer: str | dict[str, Any]) -> str:
    """Extract the sentence from an error answer."""
    try:
        found = json.loads(answer) if isinstance(answer, str) else answer
        if isinstance(found, dict):
            found = found.get("error", found)
        if isinstance(found, dict):
            found = found.get("message", found.get("detail", found))
        return str(found)[:500]
    except (ValueError, RecursionError):  # no JSON, or none that can be told
        return str(answer)[:500] if isinstance(answer, str) else "(its answer is nested too deeply)"
