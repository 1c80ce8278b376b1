"""Environments behind an OpenEnv server, by the WebSocket protocol of its clients. The server has the library; here
nothing of it is needed.

An episode is a connection: the server makes an environment for it, and removes it when the connection ends.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from impala_llm.envs.base import Split
from impala_llm.envs.shared_options import ScoreRange, SplitSizes
from impala_llm.envs.single_turn import Result, check_task
from impala_llm.settings import bounded


class OpenEnvSuite:
    """An environment of a running server. A task id goes to the server as the seed of the reset."""

    @dataclass
    class Options(ScoreRange, SplitSizes):
        """Settings env.args.*"""

        url: str = "http://127.0.0.1:8000"
        """Address of the server. It must admit actor.max_episodes sessions at once, from each actor."""
        action_field: str = "message"
        """Field of the action that takes the answer."""
        action: dict[str, Any] = field(default_factory=dict)
        """Further fields of every action."""
        observation_field: str = ""
        """Field of the observation that is shown; empty: all of them, as JSON."""
        reset: dict[str, Any] = field(default_factory=dict)
        """Further arguments of the reset."""
        system_prompt: str = ""
        """Text before the first observation."""
        max_steps: int = bounded(50, least=1)
        """Actions of an episode at most; then it is cut."""
        timeout_s: float = bounded(60.0, least=0.001)
        """Longest time for an answer of the server."""

    def __init__(self, options: Options) -> None:
        options.check_range()
        self.name, self.system_prompt, self.options = "openenv", options.system_prompt, options
        self.splits = options.splits()

    def tasks(self, split: Split) -> Sequence[int]:
        return self.splits[split]

    def session(self, training: bool) -> "OpenEnvSession":
        return OpenEnvSession(self)

    def signature(self, task_id: int) -> str:
        """The address of the server."""
        return self.options.url


class OpenEnvSession:
    """An episode of `OpenEnvSuite`."""

    def __init__(self, suite: OpenEnvSuite) -> None:
        self._suite = suite
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._steps, self._return = 0, 0.0

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        check_task(task_id, self._suite.splits)
        options = self._suite.options
        self._steps, self._return = 0, 0.0
        if self._socket is None or self._socket.closed:
            await self.close()
            self._client = aiohttp.ClientSession()
            try:
                async with asyncio.timeout(options.timeout_s):
                    self._socket = await self._client.ws_connect(f"{options.url.rstrip('/')}/ws", max_msg_size=0)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise ConnectionError(
                    f"env.args.url={options.url}: no OpenEnv server answers ({error or 'timeout'}): start it, or "
                    "correct the address"
                ) from error
        data = await self._ask({"type": "reset", "data": {"seed": task_id, **options.reset}})
        return self._shown(data), {}

    async def step(self, action: str) -> Result:
        options = self._suite.options
        self._steps += 1
        data = await self._ask({"type": "step", "data": {**options.action, options.action_field: action}})
        reward = float(data.get("reward") or 0.0)
        self._return += reward
        ended = bool(data.get("done"))
        truncated = not ended and self._steps >= options.max_steps
        if not (ended or truncated):
            return self._shown(data), reward, False, False, {}
        stats = {"steps": float(self._steps), "return": self._return}
        info = {**options.scored(self._return), "stats": stats}
        return self._shown(data), reward, ended, truncated, info

    async def close(self) -> None:
        """End the connection."""
        client, self._client, self._socket = self._client, None, None
        if client is not None:
            await client.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the answer."""
        assert self._socket is not None
        options = self._suite.options
        try:
            async with asyncio.timeout(options.timeout_s):
                await self._socket.send_json(message)
                answer = await self._socket.receive()
        except TimeoutError:
            raise TimeoutError(
                f"env.args.url={options.url} has not answered in env.args.timeout_s={options.timeout_s:g}: raise it, "
                "or see what the server waits for"
            ) from None
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"env.args.url={self._suite.options.url}: the server has ended the session")
        content = json.loads(answer.data)
        data: dict[str, Any] = content.get("data") or {}
        if content.get("type") == "error":
            raise ValueError(f"the server answers {data.get('code')}: {data.get('message')} {data.get('errors', '')}")
        return data

    def _shown(self, data: dict[str, Any]) -> str:
        observation, name = data.get("observation") or {}, self._suite.options.observation_field
        if name and name not in observation:
            raise ValueError(f"env.args.observation_field={name} is not there: choose one of {', '.join(observation)}")
        return str(observation[name]) if name else json.dumps(observation, ensure_ascii=False)
